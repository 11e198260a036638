"""Path products against enumeration, exact arithmetic and closed forms."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import errors
from sinkformer_jax import rank
from sinkformer_jax import sinkhorn


def softmax(x):
  weights = np.exp(x - x.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def stack(layers=3, batch=2, heads=2, n=6, scale=1.0, seed=0):
  rng = np.random.default_rng(seed)
  return softmax(scale * rng.standard_normal((layers, batch, heads, n, n)))


def product(attention, example, path):
  """``P_k ... P_2 P_1`` as it is written."""
  matrix = np.eye(attention.shape[-1])
  for layer, head in enumerate(path):
    if head >= 0:
      matrix = attention[layer, example, head] @ matrix
  return matrix


def centered(matrix):
  return matrix - matrix.mean(0)


def oracle_norm(x, kind):
  if kind == 'composite':
    return np.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf))
  return np.linalg.norm(x, 2 if kind == 'spectral' else 'fro')


def one_path(*matrices):
  """A stack of one example and head, and the path through it."""
  attention = np.stack(matrices)[:, None, None].astype(np.float64)
  return attention, rank.sample_paths(0, len(matrices), 1, num_paths=1)


def values(residuals, norm, scaling='absolute'):
  log10, below, invalid = residuals.scaled(norm, scaling)
  assert not below.any()
  assert not invalid.any()
  return 10 ** log10[:, 0, 0]


# Sampling.


@pytest.mark.parametrize('layers', ['first', 'drawn'])
@pytest.mark.parametrize('skip', [False, True])
def test_paths_are_a_function_of_their_arguments(layers, skip):
  first, again, other = (
    rank.sample_paths(seed, 6, 3, 50, layers, skip) for seed in (4, 4, 5)
  )
  assert first.shape == (6, 50, 6)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()
  # A path of depth k has k layers.
  np.testing.assert_array_equal(
    (first != rank.ABSENT).sum(-1), np.repeat(np.arange(1, 7)[:, None], 50, 1)
  )
  assert set(np.unique(first[-1])) == set(range(-1 if skip else 0, 3))


def test_first_layers_extend_and_drawn_layers_cover_all():
  heads = rank.sample_paths(0, 6, 3, 50)
  for depth in range(1, 6):
    np.testing.assert_array_equal(
      heads[depth, :, :depth], heads[depth - 1, :, :depth]
    )
    assert (heads[depth - 1, :, depth:] == rank.ABSENT).all()
  drawn = rank.sample_paths(0, 6, 3, 3000, 'drawn')
  used = (drawn != rank.ABSENT).mean(1)
  expected = np.repeat(np.arange(1, 7)[:, None] / 6, 6, 1)
  np.testing.assert_allclose(used, expected, atol=0.04)  # 4 standard errors.


def test_mean_length_with_skips_is_that_of_a_binomial():
  # Dong et al. 2021: L H / (H + 1) of L layers take a head, 19.2 of 24.
  heads = rank.sample_paths(0, 24, 4, 5000, skip=True)
  lengths = (heads[-1] >= 0).sum(-1)
  error = np.sqrt(24 * 0.8 * 0.2 / 5000)
  assert abs(lengths.mean() - 19.2) < 4 * error
  counts = np.bincount(heads[-1].ravel() + 1, minlength=5) / heads[-1].size
  np.testing.assert_allclose(counts, 0.2, atol=0.005)


# Products.


@pytest.mark.parametrize('plain', [False, True])
@pytest.mark.parametrize('layers', ['first', 'drawn'])
@pytest.mark.parametrize('skip', [False, True])
def test_products_equal_enumeration(layers, skip, plain):
  attention = stack()
  heads = rank.sample_paths(1, 3, 2, 9, layers, skip)
  result = rank.path_residuals(attention, heads, plain=plain)
  for example in range(2):
    for depth, path in np.ndindex(4, 9):
      taken = heads[depth - 1, path] if depth else []
      matrix = product(attention, example, taken)
      at = depth, example, path
      for kind in rank.NORMS:
        expected = oracle_norm(centered(matrix), kind)
        assert 10 ** result.log10[kind][at] == pytest.approx(
          expected, rel=1e-11
        )
        expected = oracle_norm(matrix, kind)
        whole = 10 ** result.log10_whole[kind][at]
        assert whole == pytest.approx(expected, rel=1e-11)
  assert not result.below_resolution.any()
  assert not result.invalid.any()


def test_layer_1_is_rightmost():
  first, second = stack(2, 1, 1, 5, 2.0)[:, 0, 0]
  result = rank.path_residuals(*one_path(first, second))
  right, wrong = (
    np.linalg.norm(centered(x), 2) for x in (second @ first, first @ second)
  )
  assert abs(right - wrong) > 0.01
  assert values(result, 'spectral')[2] == pytest.approx(right, rel=1e-12)


def test_permutations_keep_everything():
  n = 7
  rng = np.random.default_rng(0)
  result = rank.path_residuals(
    *one_path(*[rng.permutation(np.eye(n)) for _ in range(30)])
  )
  for scaling in rank.SCALINGS:
    absolute = scaling == 'absolute'
    np.testing.assert_allclose(values(result, 'spectral', scaling), 1)
    np.testing.assert_allclose(
      values(result, 'frobenius', scaling),
      {
        'absolute': np.sqrt(n - 1),
        'relative': np.sqrt((n - 1) / n),
        'initial': 1,
      }[scaling],
    )
    np.testing.assert_allclose(
      values(result, 'composite', scaling),
      1 if scaling == 'initial' else 2 * (n - 1) / n,
      err_msg=str(absolute),
    )


def test_block_averages_keep_a_residual_of_rank_blocks_minus_1():
  # Three blocks of 2, 3 and 4 tokens.
  blocks = np.repeat([0, 1, 2], [2, 3, 4])
  same = blocks[:, None] == blocks
  average = same / same.sum(-1)
  result = rank.path_residuals(*one_path(average, average, average))
  np.testing.assert_allclose(values(result, 'spectral'), 1)
  np.testing.assert_allclose(values(result, 'frobenius'), np.sqrt([8, 2, 2, 2]))


@pytest.mark.parametrize('n', [2, 6, 49, 50, 64])
@pytest.mark.parametrize('plain', [False, True])
def test_uniform_attention_is_below_resolution_from_depth_1(n, plain):
  attention, heads = one_path(*[np.full((n, n), 1 / n)] * 3)
  result = rank.path_residuals(attention, heads, plain=plain)
  np.testing.assert_array_equal(
    result.below_resolution[:, 0, 0], [False, True, True, True]
  )
  for kind in rank.NORMS:
    assert (result.log10[kind][1:] < -14).all()
    summary = rank.summarize(result, kind, 'relative')
    np.testing.assert_array_equal(summary['count'], [1, 0, 0, 0])
    np.testing.assert_array_equal(summary['below_resolution'], [0, 1, 1, 1])
  assert not result.invalid.any()
  assert exact(attention).below_resolution[1:].all()


def test_a_product_that_cancels_is_below_resolution():
  # Each averages over pairs, in two ways that have the mean alone in common.
  pairs = np.kron(np.eye(2), np.full((2, 2), 0.5))
  other = np.kron(np.full((2, 2), 0.5), np.eye(2))
  attention, heads = one_path(pairs, other, np.eye(4))
  result = rank.path_residuals(attention, heads)
  np.testing.assert_array_equal(
    result.below_resolution[:, 0, 0], [False, False, True, True]
  )
  np.testing.assert_array_equal(
    exact(attention).below_resolution[:, 0], [False, False, True, True]
  )
  drawn = exact(attention, layers='drawn')
  # At depth 2, the two of three choices with the identity keep a residual.
  np.testing.assert_array_equal(
    drawn.below_resolution[:, 0], [False, False, False, True]
  )


def test_1e_300_and_less_in_closed_form():
  # P = (1 - a) 11^T / n + a Pi has J P J = a J Pi, exactly so in float64.
  n, a = 32, 2.0**-20
  rng = np.random.default_rng(0)
  attention, heads = one_path(
    *[(1 - a) / n + a * rng.permutation(np.eye(n)) for _ in range(64)]
  )
  result = rank.path_residuals(attention, heads)
  expected = np.arange(65) * math.log10(a)
  assert expected[-1] < -385
  for kind, start in (
    ('spectral', 1),
    ('frobenius', math.sqrt(n - 1)),
    ('composite', 2 * (n - 1) / n),
  ):
    np.testing.assert_allclose(
      result.log10[kind][:, 0, 0], expected + math.log10(start), atol=1e-10
    )
    relative, below, invalid = result.scaled(kind, 'relative')
    assert np.isfinite(relative).all()
    assert not (below | invalid).any()
  np.testing.assert_allclose(
    exact(attention).log10['frobenius'][:, 0],
    expected + math.log10(n - 1) / 2,
    atol=1e-10,
  )


# R01
def test_1e_300_and_less_in_exact_arithmetic():
  # Rows of integers that sum to 2^30: products without any rounding.
  n, layers, total = 5, 40, 2**30
  rng = np.random.default_rng(0)
  integers = total // n + rng.integers(-1000, 1000, (layers, n, n))
  integers[..., 0] += total - integers.sum(-1)
  result = rank.path_residuals(*one_path(*integers / total))
  whole = np.eye(n, dtype=int).astype(object)
  for depth, matrix in enumerate(integers.astype(object), start=1):
    whole = matrix @ whole
    rest = n * whole - whole.sum(0)
    squared = (rest**2).sum()  # Of n * total ** depth times the residual.
    expected = math.log10(squared) / 2 - math.log10(n * total**depth)
    log10 = result.log10['frobenius'][depth, 0, 0]
    assert log10 == pytest.approx(expected, abs=1e-8)
  assert log10 < -200


# R01
def test_spectral_norms_of_deep_products_equal_numpy():
  attention = stack(24, 1, 2, 50, 3.0)
  heads = rank.sample_paths(0, 24, 2, 10)
  result = rank.path_residuals(attention, heads)
  for depth in (1, 2, 4, 8, 16, 24):
    for path in range(10):
      matrix = product(attention, 0, heads[depth - 1, path])
      for log10, expected in (
        (result.log10, centered(matrix)),
        (result.log10_whole, matrix),
      ):
        value = 10 ** log10['spectral'][depth, 0, path]
        assert value == pytest.approx(np.linalg.norm(expected, 2), rel=1e-10)


# R04
def test_nothing_depends_on_chunks_or_threads():
  attention = stack(4, 5, 3, 12, 2.0)
  for layers in ('first', 'drawn'):
    heads = rank.sample_paths(0, 4, 3, 17, layers, skip=True)
    results = [
      rank.path_residuals(
        attention, heads, chunk_size=size, num_threads=threads
      )
      for size, threads in ((None, None), (1, 1), (5, 2), (17, 3))
    ]
    alone = rank.path_residuals(attention[:, 3:4], heads[:, 4:5])
    for kind in rank.NORMS:
      for other in results[1:]:
        np.testing.assert_array_equal(results[0].log10[kind], other.log10[kind])
        np.testing.assert_array_equal(
          results[0].log10_whole[kind], other.log10_whole[kind]
        )
      np.testing.assert_array_equal(
        results[0].log10[kind][:, 3:4, 4:5], alone.log10[kind]
      )


def test_progress_is_reported():
  seen = []
  rank.path_residuals(
    stack(),
    rank.sample_paths(0, 3, 2, 2),
    norms=(),
    progress=lambda *x: seen.append(x),
  )
  assert seen == [(1, 2), (2, 2)]


# Masks, dtypes, and input that cannot be used.


def padded_stack():
  """Example 0 is whole; the others hold NaN in padded places."""
  attention = stack(3, 3, 2, 8)
  mask = np.ones((3, 8), bool)
  mask[1, 5:], mask[2, [0, 3]] = False, False
  pairs = mask[:, None, :, None] & mask[:, None, None, :]
  attention = np.where(pairs, attention, 0)
  attention /= np.where(pairs, attention.sum(-1, keepdims=True), 1)
  return np.where(pairs, attention, np.nan), mask


def test_padded_equals_unpadded():
  attention, mask = padded_stack()
  heads = rank.sample_paths(0, 3, 2, 5)
  result = rank.path_residuals(attention, heads, mask)
  mean_square = exact(attention, mask)
  row_error, column_error = rank.marginal_errors(attention, mask)
  spread = rank.column_spread(attention, mask)
  for example in range(3):
    index = np.flatnonzero(mask[example])
    block = attention[:, example : example + 1][..., index[:, None], index]
    expected = rank.path_residuals(block, heads)
    for kind in rank.NORMS:
      np.testing.assert_array_equal(
        result.log10[kind][:, example], expected.log10[kind][:, 0]
      )
    np.testing.assert_array_equal(
      mean_square.log10['frobenius'][:, example],
      exact(block).log10['frobenius'][:, 0],
    )
    np.testing.assert_allclose(
      spread[:, example], block[:, 0].sum(-2).std(-1), atol=1e-14
    )
    for found, axis in ((row_error, -1), (column_error, -2)):
      np.testing.assert_allclose(
        found[:, example], np.abs(block[:, 0].sum(axis) - 1).max(-1), atol=1e-15
      )


def test_marginal_errors_equal_those_of_the_normalizers():
  attention, mask = padded_stack()
  with jax.enable_x64(True):
    pairs = mask[:, None, :, None] & mask[:, None, None, :]
    expected = sinkhorn.marginal_errors(attention, pairs)
  for ours, theirs in zip(
    rank.marginal_errors(attention, mask), expected, strict=True
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-15)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_layers_after_one_that_is_not_finite_are_invalid(value):
  attention = stack(4, 3, 2)
  heads = rank.sample_paths(0, 4, 2, 6, skip=True)
  drawn = rank.sample_paths(0, 4, 2, 6, 'drawn')
  clean = rank.path_residuals(attention, heads)
  clean_rms = exact(attention).log10['frobenius']
  attention[2, 1, 0, 3, 3] = value
  result = rank.path_residuals(attention, heads)
  expected = np.zeros((5, 3, 6), bool)
  expected[3:, 1] = True
  np.testing.assert_array_equal(result.invalid, expected)
  assert result.problems == (
    'example 1: layer 3 is not finite; invalid from there',
  )
  for kind in rank.NORMS:
    assert np.isnan(result.log10[kind][expected]).all()
    np.testing.assert_array_equal(
      result.log10[kind][~expected], clean.log10[kind][~expected]
    )
  np.testing.assert_array_equal(
    rank.summarize(result)['invalid'], [0, 0, 0, 6, 6]
  )
  # Drawn: a path is valid if it ends before that layer.
  result = rank.path_residuals(attention, drawn)
  uses = (drawn[..., 2:] != rank.ABSENT).any(-1)
  assert 0 < uses[0].sum() < 6
  np.testing.assert_array_equal(result.invalid[1:, 1], uses)
  assert not result.invalid[:, [0, 2]].any()

  result = exact(attention)
  np.testing.assert_array_equal(result.invalid, expected[..., 0])
  np.testing.assert_array_equal(
    result.log10['frobenius'][~result.invalid], clean_rms[~result.invalid]
  )
  row_error, column_error = rank.marginal_errors(attention)
  for error in (row_error, column_error, rank.column_spread(attention)):
    assert np.isnan(error[2, 1, 0])
    assert np.isnan(error).sum() == 1
  result = exact(attention, layers='drawn')
  np.testing.assert_array_equal(result.invalid[:, 1], [False, *[True] * 4])
  assert not result.invalid[:, [0, 2]].any()


def test_fewer_than_two_valid_tokens_are_invalid():
  attention, heads = stack(3, 3), rank.sample_paths(0, 3, 2, 4)
  attention[:, 1] = np.eye(6)
  mask = np.ones((3, 6), bool)
  mask[1, 1:], mask[2] = False, False
  result = rank.path_residuals(attention, heads, mask)
  np.testing.assert_array_equal(
    result.invalid, np.broadcast_to([[False], [True], [True]], (4, 3, 4))
  )
  assert len(result.problems) == 2
  np.testing.assert_array_equal(
    exact(attention, mask).invalid, result.invalid[..., 0]
  )


def test_rows_that_are_not_closed_are_refused():
  heads = rank.sample_paths(0, 3, 2, 4)
  good = stack()
  ends_on_columns = good / good.sum(-2, keepdims=True)
  kept = np.random.default_rng(0).random(good.shape) < 0.9
  for wrong in (ends_on_columns, good * kept / 0.9, good / 6):
    with pytest.raises(errors.DataError, match='layer 1, head 0, example 0'):
      rank.path_residuals(wrong, heads)
    with pytest.raises(errors.DataError, match='plain=True'):
      exact(wrong)
    result = rank.path_residuals(wrong, heads, plain=True)
    path = heads[2, 1]
    expected = centered(product(wrong, 1, path))
    assert 10 ** result.log10['frobenius'][3, 1, 1] == pytest.approx(
      np.linalg.norm(expected), rel=1e-12
    )


def test_rows_are_as_closed_as_the_dtype_allows():
  heads = rank.sample_paths(0, 3, 2, 4)
  single = stack(n=50).astype(np.float32)
  result = rank.path_residuals(single, heads)
  assert result.dtype == 'float32'
  double = single.astype(np.float64)
  with pytest.raises(errors.DataError, match="dtype='float32'"):
    rank.path_residuals(double, heads)
  named = rank.path_residuals(double, heads, dtype='float32')
  np.testing.assert_array_equal(
    result.log10['spectral'], named.log10['spectral']
  )
  # Not even of bfloat16 a row may be off by more than 1e-3.
  with pytest.raises(errors.DataError, match='1.0e-03'):
    rank.path_residuals(stack(n=50) * 1.01, heads, dtype='bfloat16')


@pytest.mark.parametrize(
  ('dtype', 'deviation', 'expected'),
  [
    ('float64', 1e-9, False),
    ('float64', 1e-15, True),
    ('float32', 1e-3, False),
    ('float32', 1e-6, True),
  ],
)
def test_factors_below_the_resolution_of_the_capture_are_marked(
  dtype, deviation, expected
):
  # Layer 2 of 3 is uniform but for a deviation.
  attention, heads = one_path(*stack(3, 1, 1, 50)[:, 0, 0])
  noise = np.random.default_rng(0).standard_normal((50, 50)) * deviation / 50
  attention[1] = 1 / 50 + noise - noise.mean(-1, keepdims=True)
  result = rank.path_residuals(attention, heads, dtype=dtype)
  np.testing.assert_array_equal(
    result.below_resolution[:, 0, 0], [False, False, expected, expected]
  )
  np.testing.assert_array_equal(
    exact(attention, dtype=dtype).below_resolution[:, 0],
    [False, False, expected, expected],
  )
  # A path that skips it does not see it, and one that may skip it can be told.
  skipping = heads.copy()
  skipping[:, :, 1] = np.where(heads[:, :, 1] == 0, rank.SKIP, rank.ABSENT)
  skipped = rank.path_residuals(attention, skipping, dtype=dtype)
  assert not skipped.below_resolution.any()
  assert not exact(attention, skip=True, dtype=dtype).below_resolution.any()


# R02
@pytest.mark.parametrize('enabled', [True, False])
def test_jax_arrays_of_any_setting_give_the_same(enabled):
  attention, heads = stack(n=12), rank.sample_paths(0, 3, 2, 4)
  single = attention.astype(np.float32)
  expected = rank.path_residuals(single, heads)
  with jax.enable_x64(enabled):
    result = rank.path_residuals(jnp.asarray(single), heads)
  assert result.dtype == 'float32'
  for kind in rank.NORMS:
    np.testing.assert_array_equal(result.log10[kind], expected.log10[kind])


def test_input_that_does_not_fit_is_refused():
  attention, heads = stack(), rank.sample_paths(0, 3, 2, 4)
  for call, match in (
    (lambda: rank.path_residuals(attention[0], heads), 'layers, batch'),
    (lambda: rank.path_residuals(attention[..., :4], heads), 'layers, batch'),
    (lambda: rank.path_residuals(attention, heads[..., :2]), 'layers = 3'),
    (lambda: rank.path_residuals(attention, heads[0]), 'layers = 3'),
    (lambda: rank.path_residuals(attention, heads + 1), 'from -2 to 1'),
    (
      lambda: rank.path_residuals(attention, heads, np.ones((2, 5), bool)),
      'mask',
    ),
    (lambda: rank.path_residuals(attention, heads, np.ones((2, 6))), 'bool'),
    (lambda: rank.path_residuals(attention, heads, norms=('max',)), 'max'),
    (lambda: rank.sample_paths(0, 3, 2, layers='last'), 'last'),
    (lambda: exact(attention, layers='last'), 'last'),
  ):
    with pytest.raises(ValueError, match=match):
      call()


# The exact mean over all paths.

exact = rank.exact_rms


def enumerated(attention, example, choices_of_layers, choices):
  """log10 of the RMS over every path, one after the other."""
  squares = []
  for layers in choices_of_layers:
    for heads in itertools.product(choices, repeat=len(layers)):
      path = np.full(len(attention), rank.ABSENT)
      path[list(layers)] = heads
      squares.append((centered(product(attention, example, path)) ** 2).sum())
  return math.log10(np.mean(squares)) / 2


@pytest.mark.parametrize('skip', [False, True])
@pytest.mark.parametrize('layers', ['first', 'drawn'])
def test_exact_rms_equals_enumeration(layers, skip):
  attention = stack(4, 2, 3, 5, 2.0)
  choices = range(-1 if skip else 0, 3)
  result = exact(attention, layers=layers, skip=skip)
  for depth, example in np.ndindex(5, 2):
    choices_of_layers = (
      [range(depth)]
      if layers == 'first'
      else itertools.combinations(range(4), depth)
    )
    expected = enumerated(attention, example, choices_of_layers, choices)
    log10 = result.log10['frobenius'][depth, example]
    assert log10 == pytest.approx(expected, abs=1e-12)
  assert not result.below_resolution.any()
  with pytest.raises(ValueError, match='relative'):
    result.scaled('frobenius', 'relative')
  initial, _, _ = result.scaled('frobenius', 'initial')
  assert (initial[0] == 0).all()


@pytest.mark.parametrize('skip', [False, True])
@pytest.mark.parametrize('layers', ['first', 'drawn'])
def test_sampled_mean_square_is_the_exact_one(layers, skip):
  attention = stack(4, 1, 4, 8, 2.0)
  heads = rank.sample_paths(0, 4, 4, 4000, layers, skip)
  sampled = rank.path_residuals(attention, heads, norms=('frobenius',))
  squares = 10 ** (2 * sampled.log10['frobenius'][1:, 0])
  expected = 10 ** (
    2 * exact(attention, layers=layers, skip=skip).log10['frobenius'][1:, 0]
  )
  error = squares.std(1) / np.sqrt(4000)
  np.testing.assert_array_less(np.abs(squares.mean(1) - expected), 4 * error)
  assert (error < 0.05 * expected).all()
  np.testing.assert_allclose(
    rank.summarize(sampled, 'frobenius')['log10_of_rms'][1:],
    np.log10(squares.mean(1)) / 2,
  )


def test_exact_rms_of_many_layers():
  # 4 ** 200 paths; more choices of 100 layers than an int64 counts.
  n, a = 32, 2.0**-20
  rng = np.random.default_rng(0)
  attention = (1 - a) / n + a * np.stack(
    [rng.permutation(np.eye(n)) for _ in range(400)]
  ).reshape(200, 1, 2, n, n)
  for layers in ('first', 'drawn'):
    np.testing.assert_allclose(
      exact(attention, layers=layers).log10['frobenius'][:, 0],
      np.arange(201) * math.log10(a) + math.log10(n - 1) / 2,
      atol=1e-8,
    )
