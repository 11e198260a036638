"""Normalizers by name against float64 NumPy oracles written on their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mnist_sinkhorn
from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn

# With the numbers of half-updates; the others take no number.
CASES = [
  ('softmax_centered', 0),
  ('softmax_shaped', 0),
  *(('sinkhorn_half_updates', n) for n in (1, 2, 3, 4, 50, 51)),
]
SHAPES = {
  'softmax_centered': [(1, 5), (5, 1), (2, 3, 12, 7)],
  'softmax_shaped': [(1, 1), (2, 3, 12, 12)],
  'sinkhorn_half_updates': [(1, 5), (5, 1), (2, 3, 12, 7)],
}
CENTERED = normalizers.NORMALIZERS['softmax_centered'](0)


def normal(shape, scale=1.0, seed=0):
  return scale * np.random.default_rng(seed).standard_normal(shape)


def half_updates(c, num_half_updates):
  """By repeated division, as in the Sinkformers' definition."""
  weights = np.exp(c - c.max(1, keepdims=True))
  for index in range(num_half_updates):
    if index % 2 == 0:
      weights = weights / weights.sum(1, keepdims=True)
    else:
      weights = weights / weights.sum(0) * (c.shape[0] / c.shape[1])
  return weights


def block_oracle(name, num_iters, c):
  """One matrix without padding, in float64."""
  if name == 'softmax_centered':
    return half_updates(c - c.mean(0), 1)
  if name == 'softmax_shaped':
    return np.eye(len(c)) + half_updates(c, 1) - 1 / len(c)
  return half_updates(c, num_iters)


def oracle(name, num_iters, logits, rows=None, columns=None):
  """All matrices, each on its valid block only."""
  rows = np.ones(logits.shape[:-1], bool) if rows is None else rows
  columns = (
    np.ones((*logits.shape[:-2], logits.shape[-1]), bool)
    if columns is None
    else columns
  )
  weights = np.zeros(logits.shape)
  for index in np.ndindex(logits.shape[:-2]):
    block = np.ix_(rows[index], columns[index])
    if weights[index][block].size:
      c = np.float64(logits[index][block])
      weights[index][block] = block_oracle(name, num_iters, c)
  return weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradient(name, num_iters, logits, cotangent, mask=None):
  function = normalizers.create(name, num_iters)
  weights, vjp = jax.vjp(lambda x: function(x, mask), logits)
  return weights, vjp(cotangent)[0]


def differences(name, num_iters, logits, cotangent):
  """Gradient of ``sum(weights * cotangent)`` by differences of the oracle."""
  gradient, step = np.zeros_like(logits), 1e-5
  for index in np.ndindex(logits.shape):
    change = np.zeros_like(logits)
    change[index] = step
    above, below = (
      (block_oracle(name, num_iters, logits + x) * cotangent).sum()
      for x in (change, -change)
    )
    gradient[index] = (above - below) / (2 * step)
  return gradient


@pytest.mark.parametrize(('name', 'num_iters'), CASES)
def test_values(name, num_iters):
  function = jax.jit(normalizers.create(name, num_iters))
  for shape in SHAPES[name]:
    logits = np.float32(normal(shape, 3))
    weights = function(logits)
    assert weights.dtype == jnp.float32
    expected = oracle(name, num_iters, logits)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
    with jax.enable_x64(True):
      np.testing.assert_allclose(
        function(np.float64(logits)), expected, rtol=0, atol=1e-11
      )


@pytest.mark.parametrize(('name', 'num_iters'), CASES)
def test_gradient_against_central_differences(name, num_iters):
  shape = (6, 6) if name == 'softmax_shaped' else (6, 4)
  logits, cotangent = normal(shape), normal(shape, seed=1)
  with jax.enable_x64(True):
    _, gradient = value_and_gradient(name, num_iters, logits, cotangent)
  expected = differences(name, num_iters, logits, cotangent)
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-8)
  assert np.abs(expected).max() > 1e-2


@pytest.mark.parametrize('filler', [np.inf, np.nan])
@pytest.mark.parametrize(('name', 'num_iters'), CASES)
def test_masked_equals_unpadded(name, num_iters, filler):
  square = name == 'softmax_shaped'
  shape = (4, 2, 9, 9 if square else 7)
  rng = np.random.default_rng(0)
  rows = rng.random((4, 1, shape[2])) < 0.6
  columns = rows if square else rng.random((4, 1, shape[3])) < 0.6
  rows[0, 0, 0], columns[0, 0, 0] = True, True
  rows[1] = np.arange(shape[2]) == 3  # One valid token,
  columns[1] = np.arange(shape[3]) == 3
  rows[2], columns[2] = False, False  # and none.
  mask = rows[..., :, None] & columns[..., None, :]
  pairs = np.broadcast_to(mask, shape)
  logits = np.where(pairs, normal(shape, 2), filler).astype(np.float32)
  cotangent = np.where(pairs, normal(shape, seed=1), filler).astype(np.float32)
  weights, gradient = map(
    np.asarray, value_and_gradient(name, num_iters, logits, cotangent, mask)
  )
  heads = [np.broadcast_to(x, (4, 2, x.shape[-1])) for x in (rows, columns)]
  expected = oracle(name, num_iters, logits, *heads)
  np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
  assert (weights[~pairs] == 0).all()
  assert (gradient[~pairs] == 0).all()
  assert np.isfinite(gradient).all()
  for index in ((0, 0), (3, 1)):
    block = np.ix_(heads[0][index], heads[1][index])
    unpadded = differences(
      name,
      num_iters,
      np.float64(logits[index][block]),
      np.float64(cotangent[index][block]),
    )
    np.testing.assert_allclose(
      gradient[index][block], unpadded, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(('name', 'num_iters'), CASES)
def test_partial_masks_are_refused(name, num_iters):
  function = normalizers.create(name, num_iters)
  logits, causal = np.float32(normal((2, 5, 5))), np.tri(5, dtype=bool)
  with pytest.raises(ValueError, match='mask must'):
    function(logits, causal)
  assert np.isnan(jax.jit(function)(logits, causal)).any((-2, -1)).all()


def test_shaped_refuses_what_is_not_self_attention():
  function = normalizers.create('softmax_shaped', 0)
  with pytest.raises(ValueError, match='as many queries as keys, got 7 and 12'):
    function(normal((7, 12)))
  logits, valid = np.float32(normal((5, 5))), np.arange(5) < 4
  mask = np.ones((5, 1), bool) & valid
  with pytest.raises(ValueError, match='same valid queries and keys'):
    function(logits, mask)
  assert np.isnan(jax.jit(function)(logits, mask)).any()


def test_centered_ignores_the_column_bias_and_nothing_else():
  logits = normal((3, 12, 12))
  bias = 20 * normal((3, 1, 12), seed=1)
  biased = CENTERED(np.float32(logits + bias))
  np.testing.assert_allclose(
    biased, CENTERED(np.float32(logits)), rtol=0, atol=1e-5
  )
  # Without a column bias it is softmax.
  logits -= logits.mean(-2, keepdims=True)
  np.testing.assert_allclose(
    CENTERED(np.float32(logits)),
    sinkhorn.softmax(np.float32(logits)),
    rtol=0,
    atol=1e-6,
  )
  sums = np.asarray(sinkhorn.softmax(np.float32(logits + bias))).sum(-2)
  assert sums.max() > 5  # What softmax makes of the bias.
  assert np.asarray(biased).sum(-2).max() < 5


def test_shaped_is_the_identity_for_equal_logits_and_its_rows_sum_to_one():
  function = normalizers.create('softmax_shaped', 0)
  np.testing.assert_allclose(function(np.ones((8, 8))), np.eye(8), atol=1e-7)
  weights = np.asarray(function(np.float32(normal((4, 50, 50), 5))))
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
  assert (weights < 0).any()


@pytest.mark.parametrize('num_iters', [0, 1, 25])
def test_odd_half_updates_are_the_row_closed_form(num_iters):
  logits = np.float32(normal((2, 20, 13), 3))
  np.testing.assert_array_equal(
    normalizers.create('sinkhorn_half_updates', 2 * num_iters + 1)(logits),
    sinkhorn.sinkhorn(logits, num_iters),
  )


@pytest.mark.parametrize('num_iters', [2, 4, 50])
def test_even_half_updates_close_columns_and_not_rows(num_iters):
  logits = np.float32(normal((4, 20, 10), 12))
  weights = np.asarray(
    normalizers.create('sinkhorn_half_updates', num_iters)(logits)
  )
  np.testing.assert_allclose(weights.sum(-2), 2, rtol=1e-5)
  assert (np.abs(weights.sum(-1) - 1).max(-1) > 1e-3).all()


def test_two_half_updates_of_logits_that_softmax_rounds_to_zero():
  # Every row puts all its weight on the first key.
  logits = np.float32(normal((6, 4)))
  logits[:, 0] += 500
  weights, gradient = value_and_gradient(
    'sinkhorn_half_updates', 2, logits, np.float32(normal((6, 4), seed=1))
  )
  assert np.isfinite(gradient).all()
  c = np.float64(logits)
  row_closed = c - c[:, :1]  # exp of the others adds nothing to 1.
  expected = np.exp(row_closed - row_closed.max(0))
  expected = expected / expected.sum(0) * 6 / 4
  np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-4)


def test_numbers_of_half_updates_that_do_not_exist():
  for wrong in (0, -1, 1.5, True):
    with pytest.raises(ValueError, match='num_iters'):
      normalizers.create('sinkhorn_half_updates', wrong)(normal((3, 3)))
  config = mnist_sinkhorn.get_config('tiny')
  config.model.normalizer = 'sinkhorn_half_updates'
  configuration.check(config)
  config.model.num_iters = 0
  with pytest.raises(errors.ConfigError, match='counts half-updates'):
    configuration.check(config)


def test_unknown_name():
  with pytest.raises(ValueError, match="one of .*'softmax_shaped'.*, got 'x'"):
    normalizers.create('x', 3)
