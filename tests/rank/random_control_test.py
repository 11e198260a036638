"""The random control against the table of the project's protocols."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import rank
from sinkformer_jax.rank import random_control

# Geometric mean of the spectral residual of 32 tokens at depths 1, 4, 8, 16,
# by normalizer and number of half-updates (2 iterations each; a closing row
# update makes them odd), made by other software with 30 draws.
DEPTHS = [1, 4, 8, 16]
TABLE = [
  ('softmax', 1, 0, (4.2e-1, 5.5e-3, 1.1e-5, 3.3e-11)),
  ('sinkhorn', 1, 51, (3.6e-1, 3.9e-3, 6.5e-6, 1.5e-11)),
  ('softmax', 3, 0, (1.20, 4.4e-1, 7.0e-2, 1.4e-3)),
  ('sinkhorn_column', 3, 50, (8.4e-1, 1.9e-1, 1.7e-2, 2.7e-4)),
  ('sinkhorn', 3, 51, (8.3e-1, 1.9e-1, 1.7e-2, 1.0e-4)),
  ('sinkhorn', 3, 1001, (8.4e-1, 2.0e-1, 1.8e-2, 1.1e-4)),
]


def control(normalizer, scale=1.0, **kwargs):
  options = {'num_tokens': 12, 'num_layers': 6, 'num_draws': 8, 'num_iters': 5}
  return list(
    random_control.sweep(
      0, (scale,), (normalizer,), ('spectral',), **{**options, **kwargs}
    )
  )


@pytest.mark.parametrize(('normalizer', 'scale', 'updates', 'expected'), TABLE)
def test_table(normalizer, scale, updates, expected):
  whole, half = control(
    normalizer,
    scale,
    num_tokens=32,
    num_layers=24,
    num_draws=100,
    num_iters=updates // 2,
  )
  mean = rank.summarize(whole.residuals)['mean']
  np.testing.assert_allclose(mean[DEPTHS], np.log10(expected), atol=0.2)
  assert (rank.summarize(whole.residuals)['count'][:17] == 100).all()
  assert whole.row_error < 1e-14 or normalizer == 'sinkhorn_column'
  # Half identities: as deep as half the depth, within the noise of the draws.
  half_mean = rank.summarize(half.residuals)['mean']
  np.testing.assert_allclose(half_mean[[2, 8, 16]], mean[[1, 4, 8]], atol=0.2)


def test_ending_on_a_column_update_shows_a_false_floor():
  columns, rows = (
    control(x, 3.0, num_tokens=32, num_layers=40, num_draws=30, num_iters=25)[0]
    for x in ('sinkhorn_column', 'sinkhorn')
  )
  false, true = (rank.summarize(x.residuals)['mean'] for x in (columns, rows))
  assert columns.row_error > 1e-2
  assert columns.column_error < 1e-14
  assert abs(false[24] - np.log10(1.5e-4)) < 0.3
  assert abs(true[24] - np.log10(5.9e-7)) < 0.3
  # A floor: no decay any more.
  assert abs(false[40] - false[30]) < 0.1
  assert true[30] - true[40] > 2.5


def test_column_update_is_the_last_half_update():
  closed, ends_on_columns = (
    random_control.random_attention(0, x, 2.0, 9, 2, 3, 4)
    for x in ('sinkhorn', 'sinkhorn_column')
  )
  # A row update of it closes it.
  np.testing.assert_allclose(
    ends_on_columns / ends_on_columns.sum(-1, keepdims=True), closed, rtol=1e-12
  )


def test_all_curves_share_their_logits():
  softmax = random_control.random_attention(3, 'softmax', 1.0, 8, 2, 3)
  scaled = random_control.random_attention(3, 'softmax', 2.0, 8, 2, 3)
  squared = softmax**2
  np.testing.assert_allclose(
    scaled, squared / squared.sum(-1, keepdims=True), rtol=1e-12
  )
  assert softmax.shape == (2, 1, 3, 8, 8)
  # Independent draws and layers.
  assert len(np.unique(softmax[..., 0, 0])) == 6


def test_a_scale_for_each_layer():
  scales = (0.5, 3.0, 1.0)
  shape = {'num_tokens': 6, 'num_layers': 3, 'num_draws': 4, 'num_iters': 2}
  attention = random_control.random_attention(1, 'sinkhorn', scales, **shape)
  for layer, scale in enumerate(scales):
    alone = random_control.random_attention(1, 'sinkhorn', scale, **shape)
    np.testing.assert_array_equal(attention[layer], alone[layer])


def test_float64_without_touching_the_setting_of_jax():
  attention = random_control.random_attention(0, 'sinkhorn', 1.0, 8, 1, 2)
  assert attention.dtype == np.float64
  row_error, _ = rank.marginal_errors(attention)
  assert row_error.max() < 1e-14
  assert jnp.ones(2).dtype == jnp.float32
  with jax.enable_x64(True):
    again = random_control.random_attention(0, 'sinkhorn', 1.0, 8, 1, 2)
  np.testing.assert_array_equal(attention, again)


def test_half_of_the_factors_are_the_identity():
  heads = random_control.half_identity_paths(0, 7, 400)
  depths = np.arange(1, 8)[:, None]
  assert ((heads != rank.ABSENT).sum(-1) == depths).all()
  assert ((heads == rank.SKIP).sum(-1) == depths // 2).all()
  draws = np.arange(400)[:, None]
  assert ((heads == draws) | (heads < 0)).all()
  # Any of the layers: 3 of 7, within 4 standard errors.
  share = (heads[-1] == rank.SKIP).mean(0)
  np.testing.assert_allclose(share, 3 / 7, atol=4 * np.sqrt(12 / 49 / 400))


def test_wrong_names_and_no_iterations_are_refused():
  with pytest.raises(ValueError, match='sparsemax'):
    random_control.random_attention(0, 'sparsemax', 1.0)
  with pytest.raises(ValueError, match='num_iters'):
    random_control.random_attention(0, 'sinkhorn_column', 1.0, num_iters=0)
