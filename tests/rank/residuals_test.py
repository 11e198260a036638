"""Residuals, norms and measures of rank against NumPy and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import rank


def normal(shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape)


def softmax(x):
  weights = np.exp(x - x.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def oracle_norm(x, kind):
  """As the definitions have it, one matrix."""
  if kind == 'composite':
    return np.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf))
  return np.linalg.norm(x, 2 if kind == 'spectral' else 'fro')


def hidden_and_mask():
  """Padding in the middle, holding what must not matter."""
  mask = np.ones((3, 9), bool)
  mask[0, 4], mask[1, [0, 3, 8]] = False, False
  hidden = normal((4, 3, 9, 5))
  return np.where(mask[:, :, None], hidden, np.nan), hidden, mask


@pytest.mark.parametrize('shape', [(2, 7, 5), (2, 3, 5, 7), (6, 6), (1, 1)])
def test_residual_is_the_centering_matrix_applied(shape):
  x = normal(shape)
  n = shape[-2]
  expected = (np.eye(n) - np.ones((n, n)) / n) @ x
  np.testing.assert_allclose(rank.residual(x), expected, atol=1e-14)


def test_residual_of_padded_equals_that_of_valid_tokens():
  padded, hidden, mask = hidden_and_mask()
  rest = rank.residual(padded, mask)
  assert (rest[:, ~mask] == 0).all()
  for i in range(3):
    expected = rank.residual(hidden[:, i][:, mask[i]])
    np.testing.assert_allclose(rest[:, i][:, mask[i]], expected, atol=1e-14)
  # Matrices: columns of padded tokens go as well.
  square = normal((3, 9, 9))
  rest = rank.residual(square, mask, mask)
  for i in range(3):
    expected = rank.residual(square[i][np.ix_(mask[i], mask[i])])
    block = rest[i][np.ix_(mask[i], mask[i])]
    np.testing.assert_allclose(block, expected, atol=1e-14)
    assert np.abs(rest[i]).sum() == pytest.approx(np.abs(block).sum())


def families():
  """Matrices with every kind of top of their spectrum."""
  rng = np.random.default_rng(1)
  left, right = (np.linalg.qr(normal((20, 20), s))[0] for s in (2, 3))

  def with_spectrum(values):
    return left @ np.diag(np.pad(values, (0, 20 - len(values)))) @ right

  # The longest row is blind to the block with the largest singular value.
  blind = np.zeros((20, 20))
  blind[0, 0], blind[1:, 1:] = 1, 0.9 / np.sqrt(19)
  return {
    'gaussian': normal((50, 20, 20)),
    'permutation': rng.permutation(np.eye(20)),
    'equal pair': with_spectrum([1, 1, 0.5]),
    'near pair': with_spectrum([1, 1 - 1e-9, 0.1]),
    'slow': with_spectrum(0.95 ** np.arange(20)),
    'rank one': with_spectrum([3.0]),
    'near rank one': with_spectrum([1, 1e-5, 1e-9]),
    'blind start': blind,
    'zero': np.zeros((20, 20)),
    'long': normal((5, 20, 7)),
    'wide': normal((5, 7, 20)),
    'one column': normal((5, 7, 1)),
    'softmax product': np.linalg.matrix_power(softmax(normal((20, 20))), 5),
  }


@pytest.mark.parametrize('kind', rank.NORMS)
@pytest.mark.parametrize('scale', [1.0, 1e-200, 1e200])
def test_norms_equal_numpy(kind, scale):
  for name, x in families().items():
    x = x.reshape(-1, *x.shape[-2:])
    expected = [oracle_norm(y, kind) for y in x]
    np.testing.assert_allclose(
      rank.norm(scale * x, kind) / scale, expected, rtol=1e-11, err_msg=name
    )


def test_norms_do_not_depend_on_neighbours():
  x = np.concatenate(
    [
      y.reshape(-1, 20, 20)
      for y in families().values()
      if y.shape[-2:] == (20, 20)
    ]
  )
  for kind in rank.NORMS:
    alone = [rank.norm(y, kind) for y in x]
    np.testing.assert_array_equal(rank.norm(x, kind), alone)


@pytest.mark.parametrize('kind', rank.NORMS)
def test_norm_of_what_is_not_finite_is_nan_and_alone(kind):
  x = normal((4, 5, 5))
  x[1, 2, 3], x[2, 0, 0] = np.nan, -np.inf
  values = rank.norm(x, kind)
  assert np.isnan(values[1:3]).all()
  np.testing.assert_array_equal(values[[0, 3]], rank.norm(x[[0, 3]], kind))


def test_residual_norms_of_hidden_states():
  padded, hidden, mask = hidden_and_mask()
  result = rank.residual_norms(padded, mask)
  for kind in rank.NORMS:
    expected, whole = np.empty((4, 3)), np.empty((4, 3))
    for layer, example in np.ndindex(4, 3):
      x = hidden[layer, example][mask[example]]
      whole[layer, example] = oracle_norm(x, kind)
      expected[layer, example] = oracle_norm(x - x.mean(0), kind)
    for scaling, divisor in (
      ('absolute', 1),
      ('relative', whole),
      ('initial', expected[:1]),
    ):
      values, below, invalid = result.scaled(kind, scaling)
      np.testing.assert_allclose(10**values, expected / divisor, rtol=1e-11)
      assert not below.any()
      assert not invalid.any()
  assert result.problems == ()
  assert result.dtype == 'float64'


def test_residual_norms_of_matrices():
  attention = softmax(normal((3, 2, 2, 6, 6)))
  mask = np.ones((2, 6), bool)
  mask[1, 4:] = False
  result = rank.residual_norms(attention, mask[:, None], mask[:, None])
  block = attention[2, 1, 1][:4, :4]
  value = 10 ** result.log10['spectral'][2, 1, 1]
  assert value == pytest.approx(np.linalg.norm(block - block.mean(0), 2))


def test_layers_after_one_that_is_not_finite_are_invalid():
  hidden = normal((5, 3, 6, 4))
  clean = rank.residual_norms(hidden)
  hidden[2, 1, 0, 0] = np.inf
  result = rank.residual_norms(hidden)
  expected = np.zeros((5, 3), bool)
  expected[2:, 1] = True
  np.testing.assert_array_equal(result.invalid, expected)
  assert result.problems == (
    'example 1: layer 2 is not finite; invalid from there',
  )
  for kind in rank.NORMS:
    log10 = result.log10[kind]
    assert np.isnan(log10[expected]).all()
    np.testing.assert_array_equal(
      log10[~expected], clean.log10[kind][~expected]
    )
  summary = rank.summarize(result)
  np.testing.assert_array_equal(summary['count'], [3, 3, 2, 2, 2])
  np.testing.assert_array_equal(summary['invalid'], [0, 0, 1, 1, 1])
  others = clean.log10['spectral'][:, [0, 2]]
  np.testing.assert_allclose(summary['mean'][2:], others.mean(1)[2:])


def test_fewer_than_two_valid_tokens_are_invalid():
  mask = np.array([[True, True, True], [False, True, False], [False] * 3])
  result = rank.residual_norms(normal((2, 3, 3, 4)), mask)
  np.testing.assert_array_equal(result.invalid, [[False, True, True]] * 2)
  assert len(result.problems) == 2
  assert 'fewer than 2' in result.problems[0]


@pytest.mark.parametrize('dtype', ['float64', 'float32', 'bfloat16'])
def test_what_rounding_leaves_of_equal_tokens_is_below_resolution(dtype):
  token = normal((1, 1, 1, 16))
  hidden = np.repeat(np.repeat(token, 50, 2), 2, 1)
  hidden = np.stack([normal(hidden.shape)[0], hidden[0], 0 * hidden[0]])
  # Rounding of the dtype: what a forward pass adds to equal tokens.
  hidden *= 1 + float(jnp.finfo(dtype).eps) * normal(hidden.shape, 1)
  result = rank.residual_norms(hidden, dtype=dtype)
  expected = [[dtype == 'bfloat16'] * 2, [True] * 2, [True] * 2]
  np.testing.assert_array_equal(result.below_resolution, expected)
  assert result.log10['spectral'][2, 0] == -np.inf
  assert not np.isfinite(rank.summarize(result)['mean'][1:]).any()
  _, below, invalid = result.scaled('spectral', 'relative')
  # Nothing relative to nothing is not a number.
  assert invalid[2].all()
  assert not below[2].any()


def test_dtype_is_that_of_the_array_unless_named():
  hidden = normal((2, 1, 4, 3)).astype(np.float32)
  assert rank.residual_norms(hidden).dtype == 'float32'
  assert (
    rank.residual_norms(jnp.asarray(hidden, 'bfloat16')).dtype == 'bfloat16'
  )
  assert rank.residual_norms(hidden, dtype='float64').dtype == 'float64'
  assert rank.residual_norms(np.ones((2, 1, 4, 3), int)).dtype == 'float64'


# R02
@pytest.mark.parametrize('enabled', [True, False])
def test_float64_whatever_jax_is_set_to(enabled):
  hidden = normal((2, 2, 8, 4)).astype(np.float32)
  expected = rank.residual_norms(hidden)
  with jax.enable_x64(enabled):
    result = rank.residual_norms(jnp.asarray(hidden))
    singular = rank.singular_values(jnp.asarray(hidden))
  assert singular.dtype == np.float64
  for kind in rank.NORMS:
    assert result.log10[kind].dtype == np.float64
    np.testing.assert_array_equal(result.log10[kind], expected.log10[kind])


def test_summary_of_known_values():
  log10 = np.array([[0.0, 1.0, 2.0, -3.0, 0.0], [-400.0, -402.0, 0, 0, 0]])
  below, invalid = np.zeros((2, 5), bool), np.zeros((2, 5), bool)
  below[0, 3], invalid[0, 4], below[1, 2:] = True, True, True
  log10[0, 3], log10[0, 4] = -np.inf, np.nan
  result = rank.Residuals(
    {'frobenius': log10}, {}, below, invalid, (), 'float64'
  )
  summary = rank.summarize(result, 'frobenius')
  np.testing.assert_allclose(summary['mean'], [1, -401])
  np.testing.assert_allclose(summary['std'], [np.sqrt(2 / 3), 1])
  np.testing.assert_allclose(
    summary['log10_of_mean'], [np.log10(37), -400 + np.log10(0.505)]
  )
  np.testing.assert_allclose(
    summary['log10_of_rms'],
    [np.log10(10101 / 3) / 2, -400 + np.log10(1.0001 / 2) / 2],
  )
  np.testing.assert_array_equal(summary['count'], [3, 2])
  np.testing.assert_array_equal(summary['below_resolution'], [1, 3])
  np.testing.assert_array_equal(summary['invalid'], [1, 0])


def test_summary_of_nothing_is_nan_with_count_0():
  invalid = np.ones((2, 3), bool)
  result = rank.Residuals(
    {'spectral': np.full((2, 3), np.nan)}, {}, ~invalid, invalid, (), 'float64'
  )
  summary = rank.summarize(result)
  assert (summary['count'] == 0).all()
  for name in ('mean', 'std', 'log10_of_mean', 'log10_of_rms'):
    assert np.isnan(summary[name]).all()


def test_a_divisor_below_resolution_makes_the_ratio_so():
  log10 = np.array([[-17.0, 0.0], [-1.0, -1.0]])
  below = np.array([[True, False], [False, False]])
  result = rank.Residuals(
    {'spectral': log10}, {}, below, np.zeros((2, 2), bool), (), 'float64'
  )
  _, scaled_below, _ = result.scaled('spectral', 'initial')
  np.testing.assert_array_equal(scaled_below, [[True, False], [True, False]])


def test_names_and_shapes_that_do_not_fit_are_refused():
  hidden = normal((2, 3, 4, 5))
  result = rank.residual_norms(hidden, norms=('frobenius',))
  for call, match in (
    (lambda: rank.norm(hidden, 'nuclear'), 'nuclear'),
    (lambda: rank.residual_norms(hidden, norms=('max',)), 'max'),
    (lambda: rank.residual_norms(hidden[0, 0]), 'layers'),
    (lambda: rank.residual_norms(hidden, np.ones((3, 5), bool)), 'mask'),
    (lambda: rank.residual_norms(hidden, np.ones((3, 4))), 'booleans'),
    (lambda: result.scaled('spectral', 'absolute'), 'spectral'),
    (lambda: result.scaled('frobenius', 'percent'), 'percent'),
  ):
    with pytest.raises(ValueError, match=match):
      call()


def test_singular_values_equal_numpy():
  padded, hidden, mask = hidden_and_mask()
  values = rank.singular_values(padded, mask)
  assert values.shape == (4, 3, 5)
  for layer, example in np.ndindex(4, 3):
    expected = np.linalg.svd(hidden[layer, example][mask[example]])[1]
    np.testing.assert_allclose(values[layer, example], expected, atol=1e-13)
  assert np.isnan(rank.singular_values(padded)[:, :2]).all()


# R02
def test_effective_and_stable_rank_of_known_spectra():
  values = np.array(
    [
      [1, 1, 1, 1],
      [5, 0, 0, 0],
      [1, 1, 0, 0],
      [2, 1, 1, 0],
      [1e-200, 0, 0, 0],
    ],
    float,
  )
  entropy = np.log(2) * 1.5  # Of 1/2, 1/4, 1/4.
  np.testing.assert_allclose(
    rank.effective_rank(values), [4, 1, 2, np.exp(entropy), 1]
  )
  np.testing.assert_allclose(rank.stable_rank(values), [4, 1, 2, 1.5, 1])
  for undefined in (np.zeros(4), np.full(4, np.nan)):
    assert np.isnan(rank.effective_rank(undefined))
    assert np.isnan(rank.stable_rank(undefined))


def test_mean_cosine_similarity_equals_the_mean_over_pairs():
  padded, hidden, mask = hidden_and_mask()
  values = rank.mean_cosine_similarity(padded, mask)
  for layer, example in np.ndindex(4, 3):
    tokens = hidden[layer, example][mask[example]]
    cosines = [
      a @ b / np.linalg.norm(a) / np.linalg.norm(b)
      for i, a in enumerate(tokens)
      for j, b in enumerate(tokens)
      if i != j
    ]
    assert values[layer, example] == pytest.approx(np.mean(cosines), abs=1e-14)


def test_mean_cosine_similarity_of_known_tokens():
  same = np.tile(normal((1, 4)), (7, 1))
  scaled = same * np.array([[1e-200], [1e200], [1], [2], [3], [4], [5]])
  assert rank.mean_cosine_similarity(scaled) == pytest.approx(1, abs=1e-14)
  assert rank.mean_cosine_similarity(np.eye(4)) == pytest.approx(0, abs=1e-15)
  assert rank.mean_cosine_similarity([[1.0, 0], [-2.0, 0]]) == pytest.approx(-1)
  with_zero = np.concatenate([same, np.zeros((1, 4))])
  assert np.isnan(rank.mean_cosine_similarity(with_zero))
  mask = np.arange(8) < 7
  assert rank.mean_cosine_similarity(with_zero, mask) == pytest.approx(1)
  assert np.isnan(rank.mean_cosine_similarity(same, np.arange(7) < 1))
  same[2, 1] = np.inf
  assert np.isnan(rank.mean_cosine_similarity(same))


def test_attention_entropy_of_known_rows():
  uniform = np.full((5, 5), 0.2)
  assert rank.attention_entropy(uniform) == pytest.approx(np.log(5))
  assert rank.attention_entropy(uniform, relative=True) == pytest.approx(1)
  assert rank.attention_entropy(np.eye(5)) == 0
  # Three valid tokens: a uniform, a sure and a half-half row.
  padded = np.full((5, 5), np.nan)
  index = np.array([0, 2, 3])
  padded[np.ix_(index, index)] = [[1 / 3] * 3, [0, 1, 0], [0.5, 0, 0.5]]
  mask = np.isin(np.arange(5), index)
  expected = (np.log(3) + np.log(2)) / 3
  assert rank.attention_entropy(padded, mask) == pytest.approx(expected)
  assert rank.attention_entropy(padded, mask, relative=True) == pytest.approx(
    expected / np.log(3)
  )


def test_attention_entropy_of_no_distribution_is_nan():
  batch = np.full((5, 4, 4), 0.25)
  batch[1, 2] = [1.5, -0.5, 0, 0]
  batch[2, 0, 0] = np.nan
  batch[3] *= 2
  mask = np.ones((5, 4), bool)
  mask[4] = False
  entropy = rank.attention_entropy(batch, mask)
  np.testing.assert_array_equal(np.isnan(entropy), [False, *[True] * 4])
  one = np.arange(4) < 1
  assert rank.attention_entropy(np.eye(4), one) == 0
  assert np.isnan(rank.attention_entropy(np.eye(4), one, relative=True))
