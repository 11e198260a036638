"""Bounds against exact residuals, orders of convergence, and known numbers."""

import dataclasses
import math

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from sinkformer_jax.rank import collapse
from sinkformer_jax.rank import theory
from tests.rank import collapse_test

N, WIDTH = 64, 32


def make(seed=0, n=N, width=WIDTH, mean=0.0, scale=1.0):
  """A layer with tokens of spread `scale` around a mean token."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((n, width))
  x = scale * (x - x.mean(0)) + mean * rng.standard_normal(width)
  w_qk, w_v = rng.standard_normal((2, width, width)) / math.sqrt(width)
  return theory.Layer(x, w_qk, w_v, width)


def scaled(layer, factor):
  return dataclasses.replace(layer, x=factor * layer.x)


def norm(x):
  return np.linalg.norm(x, 2)


def orders(errors, scales):
  """The power of the scale that errors go with, between neighbours."""
  return np.diff(np.log(errors)) / np.diff(np.log(scales))


# One layer.


@pytest.mark.parametrize('num_iters', [0, 50])
@pytest.mark.parametrize('mean', [0.0, 1.0])
def test_residual_of_plain_attention(num_iters, mean):
  layer = make(n=12, width=6, mean=mean)
  logits = layer.x @ layer.w_qk @ layer.x.T / math.sqrt(layer.d_qk)
  with mpmath.workdps(50):
    weights = collapse_test.exact_weights(
      collapse_test.exact(logits), num_iters
    )
    weights = weights.astype(float)
  output = weights @ layer.x @ layer.w_v
  np.testing.assert_allclose(
    theory.attention_residual(layer, num_iters),
    output - output.mean(0),
    rtol=0,
    atol=1e-12,
  )


def test_float64_from_any_arrays():
  layer = make(n=6, width=4)
  arrays = (np.float32(a) for a in (layer.x, layer.w_qk, layer.w_v))
  arrays = [jnp.asarray(a) for a in arrays]
  result = theory.attention_residual(theory.Layer(*arrays, 4), 2)
  assert result.dtype == np.float64
  arrays = [np.float64(a) for a in arrays]
  expected = theory.attention_residual(theory.Layer(*arrays, 4), 2)
  np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize('num_iters', [0, 3])
def test_residual_keeps_its_digits(num_iters):
  layer = make(n=6, width=4, mean=2.0, scale=1e-6)
  with mpmath.workdps(80):
    x, w_qk, w_v = (
      collapse_test.exact(a) for a in (layer.x, layer.w_qk, layer.w_v)
    )
    logits = x @ w_qk @ x.T / mpmath.sqrt(layer.d_qk)
    output = collapse_test.exact_weights(logits, num_iters) @ x @ w_v
    expected = collapse_test.center(output).astype(float)
  assert norm(expected) < 1e-17
  # The tokens hold their own residual to ten digits.
  error = norm(theory.attention_residual(layer, num_iters) - expected)
  assert error < 1e-9 * norm(expected)


def test_numbers_of_one_draw():
  """A draw that was measured elsewhere with another seed, n=64, d=32.

  ``||A|| = 0.25``: softmax, Sinkhorn and first order 5.223e-3, bound 2.57e-2,
  the paper's 7.6e4. ``||A|| = 25``: softmax 5.23, Sinkhorn 4.82.
  """
  small, large = theory.scale_sweep(make(), [0.25, 25.0])
  for row, factor in ((small, 1), (large, 1e3)):
    assert row['logit_norm'] == pytest.approx(0.25 * factor ** (2 / 3))
    first_order = row['first_order_softmax']
    assert first_order == pytest.approx(5.2e-3 * factor, rel=0.3)
    assert row['first_order_sinkhorn'] == pytest.approx(first_order, rel=1e-12)
    assert row['bound_softmax'] == pytest.approx(2.57e-2 * factor, rel=0.3)
    assert row['bound_paper'] == pytest.approx(7.6e4 * factor, rel=0.3)
    assert row['sinkhorn_column_error'] < 1e-13
  assert small['softmax'] == pytest.approx(small['first_order_softmax'], 2e-3)
  assert small['sinkhorn'] == pytest.approx(small['softmax'], 2e-5)
  for name in ('softmax', 'sinkhorn'):
    assert large[name] == pytest.approx(large['first_order_softmax'], rel=0.3)
  assert large['sinkhorn'] != pytest.approx(large['softmax'], rel=1e-2)


def test_sweep_is_the_single_functions():
  layer = make(n=10, width=6, mean=1.0)
  (row,) = theory.scale_sweep(layer, [3.0], num_iters=7)
  layer = scaled(layer, row['token_scale'])
  p = theory.base_weights(layer)
  logits = layer.x @ layer.w_qk @ layer.x.T / math.sqrt(layer.d_qk)
  assert norm(logits) == pytest.approx(3.0)
  assert row['input'] == pytest.approx(norm(layer.x - layer.x.mean(0)))
  assert row['bound_softmax'] == theory.first_order_bound(layer, p)
  assert row['bound_sinkhorn'] == theory.first_order_bound(layer)
  assert row['bound_global'] == theory.global_bound(layer)
  assert row['bound_paper'] == theory.paper_bound(layer)
  assert row['sinkhorn'] == norm(theory.attention_residual(layer, 7))
  weights = 1 / len(layer.x) + theory.deviation(layer, 7)
  column_error = np.abs(weights.sum(0) - 1).max()
  assert row['sinkhorn_column_error'] == pytest.approx(column_error, rel=1e-6)
  with pytest.raises(ValueError, match='logits are 0'):
    theory.scale_sweep(dataclasses.replace(layer, w_qk=0 * layer.w_qk), [1.0])


def test_bounds_written_out():
  layer = make()
  beta = norm(layer.w_qk) * norm(layer.w_v)
  size = norm(layer.x - layer.x.mean(0))
  uniform = beta / (N * math.sqrt(WIDTH)) * size**3
  assert theory.first_order_bound(layer) == pytest.approx(uniform)
  paper = beta * N**3 / WIDTH * size**3
  assert theory.paper_bound(layer) == pytest.approx(paper)
  assert theory.paper_bound(layer, 0.5) == pytest.approx(paper / 2)
  assert paper / uniform == pytest.approx(N**4 / math.sqrt(WIDTH))


@pytest.mark.parametrize('num_iters', [0, 1, 50])
def test_first_order_is_first_order(num_iters):
  """An error of second order in the logits: the scale to the power 3 + 2."""
  scales = np.array([1e-3, 1e-2])
  errors = []
  for scale in scales:
    layer = scaled(make(mean=1.0), scale)
    p = None if num_iters else theory.base_weights(layer)
    exact = theory.attention_residual(layer, num_iters)
    errors.append(norm(exact - theory.first_order_residual(layer, p)))
  np.testing.assert_allclose(orders(errors, scales), 5, 0, 0.05)


def test_normalizers_agree_to_second_order():
  """Without a mean token the difference goes with the scale to the 3 + 4."""
  scales = np.array([0.03, 0.1])
  errors = []
  for scale in scales:
    layer = scaled(make(), scale)
    softmax, sinkhorn = (theory.attention_residual(layer, k) for k in (0, 50))
    errors.append(norm(softmax - sinkhorn))
  np.testing.assert_allclose(orders(errors, scales), 7, 0, 0.1)


def test_mean_token():
  """It lifts softmax over the bound without it, and leaves Sinkhorn alone.

  Two opposite tokens, and a mean token that makes all queries look at these
  two: the bound with ``p = softmax(b)`` is then reached.
  """
  scale, tilt = 1e-2, 0.1
  x = np.zeros((N, 2))
  x[:2] = scale * np.array([[1, tilt], [-1, tilt]])
  x[2:, 1] = -2 * tilt * scale / (N - 2)
  layer = theory.Layer(x, np.eye(2), np.eye(2), 1)
  mean = np.array([0, 12 / (tilt * scale)])
  shifted = dataclasses.replace(layer, x=x + mean)
  p = theory.base_weights(shifted)
  np.testing.assert_allclose(p[:2], 0.5, 1e-3)
  softmax = norm(theory.attention_residual(shifted, 0))
  with_mean = theory.first_order_bound(shifted, p)
  assert softmax == pytest.approx(with_mean, rel=0.02)
  ratio = softmax / theory.first_order_bound(shifted)
  assert ratio == pytest.approx(N / 2, rel=0.02)
  np.testing.assert_allclose(
    norm(theory.attention_residual(shifted, 50)),
    norm(theory.attention_residual(layer, 50)),
    rtol=1e-3,
  )


@pytest.mark.parametrize('num_iters', [0, 1000])
def test_global_bound(num_iters):
  closest = 0
  for seed in range(3):
    for scale in (1e-3, 0.3, 1.0, 3.0, 30.0):
      for mean in (0.0, 3.0):
        layer = make(seed, n=5, width=4, mean=mean, scale=scale)
        measured = norm(theory.attention_residual(layer, num_iters))
        bound = theory.global_bound(layer)
        closest = max(closest, measured / bound)
        # The step before the norms are taken apart.
        deviation = np.linalg.norm(theory.deviation(layer, num_iters))
        assert deviation <= np.linalg.norm(layer.interaction) / 2
  assert 0.01 < closest < 1


# Several layers.


def test_depth_law():
  law = theory.depth_law(math.log10(0.3), math.log10(0.5), 4)
  size = 0.5
  for value in law:
    assert value == pytest.approx(math.log10(size))
    size = 0.3 * size**3
  deep = theory.depth_law(-1.0, 0.0, 24)
  assert deep[-1] == pytest.approx(-(3**24 - 1) / 2)
  with pytest.raises(OverflowError):
    theory.depth_law(-1.0, 0.0, 700)


@pytest.mark.parametrize('num_heads', [1, 2])
def test_depth_law_bounds_collapsed_attention(num_heads):
  num_layers, width, n = 8, 4, 6
  params = collapse_test.encoder_params(
    0, num_layers, width, biases=False, talking_heads=0
  )
  x = collapse_test.tokens(2, n, width, mean=0.0)
  x = 0.02 * (x - x.mean(0))
  for num_iters in (0, 20):
    states = collapse.propagate(params, x, num_heads, num_iters, None)
    measured = np.array([state.log10_residual() for state in states])
    constants = []
    for layer in range(num_layers):
      query, key, value, out = (
        params['blocks']['attention'][k]['kernel'][layer]
        for k in ('query', 'key', 'value', 'out')
      )
      size = width // num_heads
      heads = [slice(h * size, (h + 1) * size) for h in range(num_heads)]
      constants.append(
        sum(
          norm(query[:, s] @ key[:, s].T) * norm(value[:, s] @ out[s])
          for s in heads
        )
        / (n * math.sqrt(size))
      )
    law = theory.depth_law(math.log10(max(constants)), measured[0], num_layers)
    assert (measured[1:] < law[1:]).all()
    # And not by much: the logarithms are of one size.
    assert (measured[1:] > 2 * law[1:]).all()


# Dong's lemma.


def test_lemma_holds_below_its_limit():
  rng = np.random.default_rng(0)
  tightest = np.inf
  for _ in range(200):
    logits = rng.choice([0.1, 1.0, 10.0]) * rng.standard_normal((20, 6, 6))
    e = rng.uniform(-1, 1, (20, 6, 6))
    e -= e.min(-1, keepdims=True)
    e *= rng.uniform(0, theory.LEMMA_LIMIT, (20, 6, 1)) / e.max(
      -1, keepdims=True
    )
    lower, upper, spread = theory.lemma_margins(logits, e)
    assert spread.max() <= theory.LEMMA_LIMIT
    assert min(lower.min(), upper.min()) > -1e-13
    tightest = min(tightest, upper.min())
  # The margins are those of the weights themselves.
  p, before = (
    np.exp(a) / np.exp(a).sum(-1, keepdims=True) for a in (logits, logits - e)
  )
  np.testing.assert_allclose(
    upper, (1 + 2 * spread) - (p / before).max(-1), 0, 1e-10
  )
  np.testing.assert_allclose(
    lower, (p / before).min(-1) - (1 - spread), 0, 1e-10
  )
  np.testing.assert_allclose(spread, e.max(-1) - e.min(-1), 1e-12)
  assert tightest < 1e-2


def test_lemma_fails_above_its_limit():
  """Where almost all weight is on the key that E changes least."""
  for spread, holds in ((theory.LEMMA_LIMIT, True), (1.2565, False)):
    e = np.array([[spread, 0.0], [0.0, 0.0]])
    logits = np.array([[spread - 40.0, 0.0], [0.0, 0.0]])
    lower, upper, measured = theory.lemma_margins(logits, e)
    assert measured[0] == pytest.approx(spread)
    assert (upper.min() >= 0) == holds
    assert (lower >= 0).all()


# Path lengths.

MEANS = {
  'DistilBERT': 5.538,
  'MobileBERT': 9.600,
  'BERT-base, ViT-B': 11.077,
  'BERT-large, ViT-L': 22.588,
  'ViT-H': 30.118,
  'T5-3B': 23.273,
  'T5-11B': 23.814,
  'GPT-3': 95.010,
  'DeiT-T': 9.000,
  'Lapenna et al.': 19.2,
}


def test_path_lengths():
  assert MEANS.keys() == theory.ARCHITECTURES.keys()
  for name, (num_heads, num_layers) in theory.ARCHITECTURES.items():
    share = theory.path_length_distribution(num_heads, num_layers)
    assert share.shape == (num_layers + 1,)
    assert share.sum() == pytest.approx(1, abs=1e-12)
    mean = share @ np.arange(num_layers + 1)
    assert mean == pytest.approx(MEANS[name], abs=5e-4)
    assert mean == pytest.approx(
      theory.mean_path_length(num_heads, num_layers), rel=1e-12
    )
  share = theory.path_length_distribution(12, 12)
  assert share.argmax() == 11
  assert share[11] == pytest.approx(0.383, abs=5e-4)


def test_path_lengths_counted_one_by_one():
  num_heads, num_layers = 2, 3
  counts = np.zeros(num_layers + 1)
  for path in np.ndindex(*[num_heads + 1] * num_layers):
    counts[np.count_nonzero(path)] += 1
  np.testing.assert_allclose(
    theory.path_length_distribution(num_heads, num_layers),
    counts / counts.sum(),
    rtol=1e-15,
  )
