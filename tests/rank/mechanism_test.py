"""Experiments on logits against closed forms and written-out sums."""

import math

import jax
import numpy as np
import pytest

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import rank
from sinkformer_jax.rank import mechanism

SHAPE = (2, 3, 2, 6, 6)
N = SHAPE[-1]


def logits(seed=0, scale=1.0):
  return scale * np.random.default_rng(seed).standard_normal(SHAPE)


def column_terms(seed=1, scale=2.0):
  """``[layers, batch, heads, 1, n]``."""
  return scale * np.random.default_rng(seed).standard_normal((*SHAPE[:3], 1, N))


def row_terms(seed=2, scale=2.0):
  return np.swapaxes(column_terms(seed, scale), -1, -2)


def doubly_centered(seed=3):
  x = logits(seed)
  x = x - x.mean(-1, keepdims=True)
  return x - x.mean(-2, keepdims=True)


def padding():
  """A mask with 6, 4 and 1 valid tokens."""
  return np.arange(N) < np.array([6, 4, 1])[:, None]


def spoiled(x, mask):
  """Anything at all where a token is padded."""
  pairs = mask[:, None, :, None] & mask[:, None, None, :]
  return np.where(pairs, x, np.nan)


def softmax(x):
  weights = np.exp(x - x.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


# Swapped normalizers.


def test_softmax_as_it_is_written():
  found = mechanism.normalize(logits(scale=5), 0)
  np.testing.assert_allclose(found, softmax(logits(scale=5)), rtol=1e-13)


def test_sinkhorn_as_it_is_written():
  x = logits(scale=2)
  expected = np.exp(x)
  for _ in range(7):
    expected /= expected.sum(-1, keepdims=True)
    expected /= expected.sum(-2, keepdims=True)
  expected /= expected.sum(-1, keepdims=True)
  found = mechanism.normalize(x, 7)
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert np.abs(found.sum(-1) - 1).max() < 1e-14


@pytest.mark.parametrize('num_iters', [0, 3])
def test_own_normalizer_reproduces_a_capture(num_iters):
  model = encoder.Encoder(
    num_layers=2,
    num_heads=2,
    ffn_dim=8,
    normalizer=normalizers.NORMALIZERS['sinkhorn'](num_iters),
    dtype=np.float64,
  )
  with jax.enable_x64(True):
    x = np.random.default_rng(0).standard_normal((3, N, 8))
    params = jax.jit(model.init)(jax.random.key(0), x)
    _, sown = model.apply(params, x, padding(), mutable=[attention.CAPTURE])
  found = sown[attention.CAPTURE]['blocks']['attention']
  np.testing.assert_allclose(
    mechanism.normalize(np.asarray(found['logits']), num_iters, padding()),
    found['attention'],
    rtol=0,
    atol=1e-15,
  )


@pytest.mark.parametrize('num_iters', [0, 3])
def test_normalize_with_padding_and_nan(num_iters):
  x, mask = logits(), padding()
  found = mechanism.normalize(spoiled(x, mask), num_iters, mask)
  short = mechanism.normalize(x[:, 1:2, :, :4, :4], num_iters)
  np.testing.assert_allclose(found[:, 1:2, :, :4, :4], short, atol=1e-15)
  assert not found[:, 1, :, 4:].any()
  assert not found[:, 1, :, :, 4:].any()
  x[1, 0, 1, 2, 3] = np.inf
  found = mechanism.normalize(x, num_iters)
  assert np.isnan(found[1, 0, 1]).all()
  assert np.isnan(found).sum() == N * N
  paths = rank.path_residuals(found, rank.sample_paths(0, 2, 2, 40))
  assert paths.invalid.sum() > 0
  assert not paths.invalid[:, 1:].any()


# Column bias.


def test_parts_of_the_variance_add_up():
  x = logits() + column_terms() + row_terms()
  found = mechanism.logit_variance(x)
  centered = x - x.mean(-1, keepdims=True)
  np.testing.assert_allclose(found.total, (centered**2).mean((-2, -1)))
  np.testing.assert_allclose(
    found.total, found.column + found.interaction, rtol=1e-12
  )
  np.testing.assert_allclose(found.column, centered.mean(-2).var(-1))
  np.testing.assert_allclose(found.fraction, found.column / found.total)
  # The root of the total is the spread within rows.
  np.testing.assert_allclose(
    np.sqrt(found.total), np.sqrt(x.var(-1).mean(-1)), rtol=1e-12
  )


def test_pure_bias_and_no_bias():
  found = mechanism.logit_variance(column_terms() + row_terms())
  np.testing.assert_allclose(found.fraction, 1, rtol=1e-14)
  np.testing.assert_allclose(found.column, column_terms().var((-2, -1)))
  found = mechanism.logit_variance(doubly_centered() + row_terms())
  assert found.fraction.max() < 1e-30
  np.testing.assert_allclose(
    found.interaction, (doubly_centered() ** 2).mean((-2, -1))
  )


def test_row_terms_alone_have_no_variance_to_share():
  rows = np.broadcast_to(row_terms(scale=1e3), SHAPE)
  found = mechanism.logit_variance(rows)
  assert found.total.max() < 1e-24
  assert found.column.max() < 1e-24
  assert np.isnan(found.fraction).all()


def test_known_fraction():
  # Bias variance 1, interaction variance 3.
  bias = np.array([1.0, -1.0, 1.0, -1.0])
  signs = np.sqrt(3) * np.outer([1, 1, -1, -1], [1, 1, -1, -1])
  found = mechanism.logit_variance((bias + signs)[None, None, None])
  assert found.fraction.item() == pytest.approx(0.25, rel=1e-14)


def test_variance_with_padding_and_nan():
  x, mask = logits() + column_terms(), padding()
  found = mechanism.logit_variance(spoiled(x, mask), mask)
  short = mechanism.logit_variance(x[:, 1:2, :, :4, :4])
  for name in ('total', 'column', 'interaction', 'fraction'):
    np.testing.assert_allclose(
      getattr(found, name)[:, 1:2], getattr(short, name), rtol=1e-13
    )
  # One token has nothing to vary.
  assert np.isnan(found.fraction[:, 2]).all()
  x[0, 0, 0, 0, 0] = np.nan
  found = mechanism.logit_variance(x)
  assert np.isnan(found.total[0, 0, 0])
  assert np.isnan(found.total).sum() == 1


def test_what_is_left_is_doubly_centered():
  x = doubly_centered() + column_terms() + row_terms()
  left = mechanism.remove_column_bias(x)
  np.testing.assert_allclose(left, doubly_centered(), atol=1e-14)
  # Subtracting column means alone gives the same weights.
  columns = x - x.mean(-2, keepdims=True)
  for num_iters in (0, 4):
    np.testing.assert_allclose(
      mechanism.normalize(columns, num_iters),
      mechanism.normalize(left, num_iters),
      atol=1e-14,
    )
  mask = padding()
  left = mechanism.remove_column_bias(spoiled(x, mask), mask)
  short = mechanism.remove_column_bias(x[:, 1:2, :, :4, :4])
  np.testing.assert_allclose(left[:, 1:2, :, :4, :4], short, atol=1e-14)
  assert not left[:, 1, :, 4:].any()


def test_sinkhorn_goes_blind_to_bias_and_softmax_does_not():
  x = logits() + column_terms()
  results = [mechanism.bias_dependence(x, k) for k in (0, 2, 20, 2000)]
  largest = [result[0].max() for result in results]
  assert largest[0] > 0.5
  assert largest == sorted(largest, reverse=True)
  assert largest[1] > 1e-6
  assert largest[-1] < 1e-10
  # As it is written, for softmax.
  change = softmax(x) - softmax(x - x.mean(-2, keepdims=True))
  np.testing.assert_allclose(results[0][0], np.abs(change).max((-2, -1)))
  np.testing.assert_allclose(
    results[0][1], np.abs(change).sum(-1).mean(-1) / 2, rtol=1e-12
  )


def test_bias_dependence_with_padding():
  x, mask = logits() + column_terms(), padding()
  found = mechanism.bias_dependence(spoiled(x, mask), 2, mask)
  short = mechanism.bias_dependence(x[:, 1:2, :, :4, :4], 2)
  for a, b in zip(found, short, strict=True):
    np.testing.assert_allclose(a[:, 1:2], b, atol=1e-14)
  nobody = np.zeros((3, N), bool)
  assert np.isnan(mechanism.bias_dependence(x, 2, nobody)).all()
  x[1, 1, 1, 1, 1] = np.nan
  assert np.isnan(mechanism.bias_dependence(x, 2)[0]).sum() == 1


# Matched entropy.


@pytest.mark.parametrize('num_iters', [0, 30])
def test_match_entropy_finds_a_temperature_again(num_iters):
  x, temperature = logits(), np.array([2.5, 0.4])
  scaled = x / temperature[:, None, None, None, None]
  expected = mechanism.normalize(scaled, num_iters)
  target = mechanism.mean_entropy(expected)
  calls = []
  found, weights = mechanism.match_entropy(
    x, target, num_iters, progress=lambda *c: calls.append(c)
  )
  np.testing.assert_allclose(found, temperature, rtol=1e-7)
  np.testing.assert_allclose(weights, expected, atol=1e-7)
  assert np.abs(mechanism.mean_entropy(weights) - target).max() < 1e-8
  assert calls == [(1, 2), (2, 2)]
  # What has the entropy already is left alone.
  same, _ = mechanism.match_entropy(expected * 0 + scaled, target, num_iters)
  np.testing.assert_allclose(same, 1, rtol=1e-7)


def test_uniform_attention_is_matched_as_it_is():
  # Collapsed tokens: logits that differ by rounding alone.
  x = 1e-17 * logits()
  target = np.full(len(x), np.log(x.shape[-1]) + 1e-15)
  for num_iters in (0, 30):
    found, weights = mechanism.match_entropy(x, target, num_iters)
    np.testing.assert_array_equal(found, 1)
    np.testing.assert_allclose(weights, 1 / x.shape[-1])


def test_matched_temperature_in_closed_form():
  # Two keys: weights p and 1 - p with log(p / (1 - p)) = 2 / temperature.
  x = np.broadcast_to([1.0, -1.0], (1, 1, 1, 2, 2))
  p = 0.7
  target = -(p * math.log(p) + (1 - p) * math.log(1 - p))
  found, weights = mechanism.match_entropy(x, [target], 0)
  assert found[0] == pytest.approx(2 / math.log(p / (1 - p)), rel=1e-9)
  np.testing.assert_allclose(weights[0, 0, 0], [[p, 1 - p]] * 2, rtol=1e-9)


def test_match_entropy_with_padding():
  x, mask = logits(), padding()[:2]
  x = x[:, :2]
  target = [0.9, 1.2]
  found, weights = mechanism.match_entropy(spoiled(x, mask), target, 0, mask)
  for layer in range(2):
    values = []
    for example, n in enumerate((6, 4)):
      p = softmax(x[layer, example, :, :n, :n] / found[layer])
      values.append(-(p * np.log(p)).sum(-1).mean(-1))
    assert np.mean(values) == pytest.approx(target[layer], abs=1e-8)
  assert not weights[:, 1, :, 4:].any()


@pytest.mark.parametrize('entropy', [math.log(N) + 1e-3, -0.1, 0.0, math.nan])
def test_entropy_that_no_temperature_gives(entropy):
  with pytest.raises(errors.DataError, match='layer 2') as caught:
    mechanism.match_entropy(logits(), [1.0, entropy], 0)
  assert f'{entropy:.6g}' in str(caught.value)


def test_match_entropy_refuses():
  with pytest.raises(ValueError, match=r'\[layers\] = \(2,\)'):
    mechanism.match_entropy(logits(), [1.0], 0)
  x = logits()
  x[0, 0, 0, 0, 0] = np.nan
  with pytest.raises(errors.DataError, match='layer 1 has no entropy'):
    mechanism.match_entropy(x, [1.0, 1.0], 0)


@pytest.mark.parametrize(
  'function',
  [
    lambda *args: mechanism.normalize(args[0], 2, *args[1:]),
    lambda *args: mechanism.bias_dependence(args[0], 2, *args[1:]),
    mechanism.logit_variance,
    mechanism.remove_column_bias,
    mechanism.mean_entropy,
  ],
)
def test_shapes_that_do_not_fit(function):
  with pytest.raises(ValueError, match='expected'):
    function(logits()[0])
  with pytest.raises(ValueError, match='expected'):
    function(logits()[..., 1:])
  with pytest.raises(ValueError, match='mask must be'):
    function(logits(), np.ones((3, N)))
