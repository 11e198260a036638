"""Normalizers against a float64 NumPy oracle and automatic differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import sinkhorn
from sinkformer_jax.sinkhorn import xla

ITERATIONS = (0, 1, 2, 10, 50)
SHAPES = (
  (1, 1),
  (1, 5),
  (5, 1),
  (7, 12),
  (12, 7),
  (3, 2, 50, 50),
  (1, 1, 16, 16),
  (2, 1, 3, 9, 9),
  (197, 197),
)
EPS = float(np.finfo(np.float32).eps)


def oracle(logits, num_iters, row_valid=None, column_valid=None):
  """Sinkhorn in float64, one matrix at a time, on the valid block only."""
  logits = np.asarray(logits, np.float64)
  weights = np.zeros_like(logits)
  for index in np.ndindex(logits.shape[:-2]):
    rows = np.arange(logits.shape[-2])
    columns = np.arange(logits.shape[-1])
    if row_valid is not None:
      rows, columns = rows[row_valid[index]], columns[column_valid[index]]
    if not len(rows) or not len(columns):
      continue
    block = np.ix_(rows, columns)
    c = logits[index][block]
    log_ratio = np.log(len(rows) / len(columns))
    g = np.zeros(len(columns))
    for _ in range(num_iters):
      f = -np.logaddexp.reduce(c + g, axis=1)
      g = log_ratio - np.logaddexp.reduce(c + f[:, None], axis=0)
    f = -np.logaddexp.reduce(c + g, axis=1)
    weights[index][block] = np.exp(c + f[:, None] + g)
  return weights


def normal(shape, scale=1.0, seed=0):
  rng = np.random.default_rng(seed)
  return (scale * rng.standard_normal(shape)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradient(fn, logits, cotangent, num_iters, mask=None):
  weights, vjp = jax.vjp(lambda x: fn(x, num_iters, mask), logits)
  return weights, vjp(cotangent)[0]


def reference_gradient(logits, cotangent, num_iters):
  """Automatic differentiation of the log-space reference, in float64."""
  with jax.enable_x64(True):
    weights, gradient = value_and_gradient(
      sinkhorn.sinkhorn_reference,
      np.float64(logits),
      np.float64(cotangent),
      num_iters,
    )
    return np.asarray(weights), np.asarray(gradient)


def check(logits, num_iters):
  """Value and gradient in float32 within the promised tolerance."""
  cotangent = normal(logits.shape, seed=1)
  weights, gradient = value_and_gradient(
    sinkhorn.sinkhorn, logits, cotangent, num_iters
  )
  tolerance = 1e-5 + 4 * EPS * np.abs(logits).max()
  np.testing.assert_allclose(weights, oracle(logits, num_iters), 0, tolerance)
  expected, expected_gradient = reference_gradient(logits, cotangent, num_iters)
  np.testing.assert_allclose(expected, oracle(logits, num_iters), 0, 1e-9)
  scale = np.abs(expected * cotangent).max()
  np.testing.assert_allclose(
    gradient, expected_gradient, rtol=0, atol=tolerance * scale
  )


@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_values_and_gradients(shape):
  check(normal(shape), 10)


@pytest.mark.parametrize('num_iters', ITERATIONS)
def test_numbers_of_iterations(num_iters):
  check(normal((3, 2, 50, 47)), num_iters)


# S01
@pytest.mark.parametrize('num_iters', [1, 10, 50])
@pytest.mark.parametrize('scale', [1e-3, 1e-1, 3, 10, 50, 1e2, 1e3, 1e4])
def test_logit_scales(scale, num_iters):
  check(normal((4, 16, 16), scale), num_iters)


@pytest.mark.parametrize('scale', [10, 100, 1e4])
def test_near_permutations(scale):
  permutation = np.eye(32, dtype=np.float32)[
    np.random.default_rng(0).permutation(32)
  ]
  check(scale * permutation + normal((2, 32, 32)), 50)


def test_slow_convergence():
  # Two heavy rows that want the same column: the marginals need thousands of
  # iterations, so every one of the 50 still moves the result.
  logits = normal((12, 12), 0.1)
  logits[:2, 0] += 20
  check(logits, 50)


def coupled_blocks(coupling, imbalance):
  """Two groups of tokens that hardly see each other: slow to balance."""
  logits = normal((2, 16, 16), 0.5)
  logits[:, :8, 8:] -= coupling
  logits[:, 8:, :8] -= coupling
  logits[:, :8, :8] += imbalance
  return logits


@pytest.mark.parametrize('imbalance', [0, 1e-3, 1])
@pytest.mark.parametrize('coupling', [3, 6, 10, 15])
def test_leaving_the_loop_early_changes_nothing(coupling, imbalance):
  # Hard for a rule that looks at how far potentials move: they move little and
  # for long. With imbalance 0 they hardly move from the start, while what the
  # gradient passes on through the iterations does not die away.
  logits = coupled_blocks(coupling, imbalance)
  cotangent = normal(logits.shape, seed=1)
  weights, gradient = value_and_gradient(
    sinkhorn.sinkhorn, logits, cotangent, 50
  )
  rounding = 2e-6
  np.testing.assert_allclose(weights, oracle(logits, 50), 0, rounding)
  _, expected = reference_gradient(logits, cotangent, 50)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(gradient, expected, 0, rounding * scale)


def test_easy_logits_leave_the_loop_and_hard_ones_do_not():
  logits = np.stack(
    [normal((50, 50), 0.3), normal((50, 50), 4), normal((50, 50))]
  )
  *_, blocks_run = xla._potentials(50, jnp.asarray(logits), None, None)
  blocks, _ = xla._block_sizes(50, 50)
  assert blocks_run[0] == 1
  assert blocks_run[1] >= blocks - 1  # The last holds few iterations.
  assert blocks_run[2] <= 2


# S01
@pytest.mark.parametrize('num_iters', [1, 10, 50])
def test_constant_offset_changes_nothing(num_iters):
  logits = normal((4, 16, 16))
  shifted = sinkhorn.sinkhorn(logits + 37.5, num_iters)
  np.testing.assert_allclose(
    shifted, sinkhorn.sinkhorn(logits, num_iters), atol=1e-5
  )


@pytest.mark.parametrize('num_iters', [0, 2, 50])
def test_float64(num_iters):
  for scale in (0.1, 1.0, 10.0):
    logits = np.float64(normal((3, 33, 20), scale))
    cotangent = np.float64(normal(logits.shape, seed=1))
    expected, gradient = reference_gradient(logits, cotangent, num_iters)
    np.testing.assert_allclose(expected, oracle(logits, num_iters), 0, 1e-12)
    with jax.enable_x64(True):
      actual, actual_gradient = value_and_gradient(
        sinkhorn.sinkhorn, logits, cotangent, num_iters
      )
      assert actual.dtype == jnp.float64
      np.testing.assert_allclose(actual, expected, 0, 1e-10)
      np.testing.assert_allclose(actual_gradient, gradient, 0, 1e-10)


# S11
@pytest.mark.parametrize('num_iters', [1, 10])
def test_gradient_against_central_differences(num_iters):
  with jax.enable_x64(True):
    logits = jnp.asarray(normal((6, 6)), jnp.float64)
    cotangent = jnp.asarray(normal((6, 6), seed=1), jnp.float64)

    def loss(x):
      return (sinkhorn.sinkhorn(x, num_iters) * cotangent).sum()

    gradient = jax.grad(loss)(logits)
    step = 1e-6
    basis = jnp.eye(36).reshape(36, 6, 6)
    differences = jax.vmap(
      lambda e: (loss(logits + step * e) - loss(logits - step * e)) / (2 * step)
    )(basis).reshape(6, 6)
    # 1e-6 relative to the largest entry: the differences' own error is 1e-9.
    np.testing.assert_allclose(
      gradient, differences, rtol=0, atol=1e-6 * float(jnp.abs(gradient).max())
    )


# S09
def test_no_iterations_is_softmax():
  logits = normal((2, 4, 9, 9), 3)
  expected = jax.nn.softmax(logits, axis=-1)
  np.testing.assert_allclose(sinkhorn.softmax(logits), expected, atol=1e-6)
  np.testing.assert_allclose(sinkhorn.sinkhorn(logits, 0), expected, atol=1e-6)


# S06, S09
@pytest.mark.parametrize('scale', [1.0, 10.0, 1e4])
def test_rows_are_closed_and_columns_are_reported(scale):
  logits = normal((4, 50, 50), scale)
  weights = np.asarray(sinkhorn.sinkhorn(logits, 10))
  row_error, column_error = sinkhorn.marginal_errors(weights)
  assert row_error.shape == column_error.shape == (4,)
  np.testing.assert_array_less(row_error, 1e-5)
  expected = np.abs(weights.astype(np.float64).sum(-2) - 1).max(-1)
  np.testing.assert_allclose(column_error, expected, rtol=1e-3, atol=1e-6)
  # 10 iterations suffice at scale 1 and not at 10: no claim is made here.
  assert (column_error < 1e-3).all() == (scale == 1.0)


def test_marginal_error_of_a_known_matrix():
  weights = np.array([[0.5, 0.4, 9.0], [0.25, 0.75, 9.0], [9.0, 9.0, 9.0]])
  valid = np.array([True, True, False])
  row, column = sinkhorn.marginal_errors(weights, valid[:, None] & valid)
  assert row == pytest.approx(0.1)
  assert column == pytest.approx(0.25)
  # Rectangular: columns should sum to n_q / n_k.
  row, column = sinkhorn.marginal_errors(np.full((2, 4), 0.25))
  assert row == 0
  assert column == 0


def test_marginal_errors_do_not_lose_a_nan():
  weights = np.full((64, 50, 128), 1 / 128, np.float32)
  weights[3, 4, 5] = np.nan
  errors = jax.jit(sinkhorn.marginal_errors)(weights)
  for error in errors:
    assert np.isnan(error[3])
    assert np.isfinite(error[:3]).all()
    assert np.isnan(jax.jit(sinkhorn.largest)(error))


def random_masks(shape, seed=0):
  rng = np.random.default_rng(seed)
  rows = rng.random(shape[:-1]) < 0.7
  columns = rng.random((*shape[:-2], shape[-1])) < 0.7
  rows[..., 0], columns[..., -1] = True, True
  return rows, columns, rows[..., :, None] & columns[..., None, :]


# S03
@pytest.mark.parametrize('num_iters', [0, 1, 10, 50])
@pytest.mark.parametrize(
  ('shape', 'filler'),
  [
    ((2, 1, 20, 13), 1e4),
    ((2, 1, 20, 13), np.inf),
    ((2, 1, 20, 13), np.nan),
  ],
  ids=str,
)
def test_masked_equals_unpadded(shape, filler, num_iters):
  rows, columns, mask = random_masks(shape)
  logits = np.where(mask, normal(shape), np.float32(filler))
  cotangent = np.where(mask, normal(shape, seed=1), np.float32(filler))
  weights, gradient = map(
    np.asarray,
    value_and_gradient(sinkhorn.sinkhorn, logits, cotangent, num_iters, mask),
  )
  expected = oracle(logits, num_iters, rows, columns)
  np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
  assert (weights[~mask] == 0).all()
  assert (gradient[~mask] == 0).all()
  for index in list(np.ndindex(shape[:-2]))[:2]:
    block = np.ix_(np.flatnonzero(rows[index]), np.flatnonzero(columns[index]))
    _, unpadded = reference_gradient(
      logits[index][block], cotangent[index][block], num_iters
    )
    np.testing.assert_allclose(gradient[index][block], unpadded, 0, 1e-5)


@pytest.mark.parametrize('num_iters', [0, 10])
def test_one_mask_serves_all_heads(num_iters):
  shape = (2, 3, 8, 8)
  valid = np.arange(8) < np.array([[5], [8]])
  mask = valid[:, None, :, None] & valid[:, None, None, :]
  logits, cotangent = normal(shape), normal(shape, seed=1)
  for broadcast in (mask, mask[:1, 0], mask[0, 0]):
    full = np.broadcast_to(broadcast, shape)
    results = [
      value_and_gradient(sinkhorn.sinkhorn, logits, cotangent, num_iters, m)
      for m in (broadcast, full)
    ]
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results
    )
    errors = [sinkhorn.marginal_errors(results[0][0], m) for m in (mask, full)]
    assert errors[0][0].shape == errors[1][0].shape == shape[:2]


# S04
@pytest.mark.parametrize('num_iters', [0, 1, 50])
def test_all_invalid_example_gives_zeros(num_iters):
  mask = np.ones((2, 8, 8), bool)
  mask[1] = False
  logits = jnp.asarray(normal((2, 8, 8)))

  def loss(x):
    weights = sinkhorn.sinkhorn(x, num_iters, mask)
    return (weights**2).sum(), weights

  gradient, weights = jax.grad(loss, has_aux=True)(logits)
  assert (np.asarray(weights[1]) == 0).all()
  assert (np.asarray(gradient[1]) == 0).all()
  np.testing.assert_allclose(
    weights[0], sinkhorn.sinkhorn(logits[0], num_iters), atol=1e-6
  )
  assert np.isfinite(gradient).all()
  row_error, column_error = sinkhorn.marginal_errors(weights, mask)
  assert row_error[1] == column_error[1] == 0


# S08
@pytest.mark.parametrize('num_iters', [0, 3, 50])
def test_result_does_not_depend_on_neighbours(num_iters):
  # The second half needs all iterations, the first leaves them early.
  logits = normal((8, 2, 16, 16))
  hard = logits.copy()
  hard[4:] *= 15
  cotangent = normal(logits.shape, seed=1)
  fn = functools.partial(value_and_gradient, sinkhorn.sinkhorn)
  easy, mixed = (fn(x, cotangent, num_iters) for x in (logits, hard))
  for a, b in zip(easy, mixed, strict=True):
    np.testing.assert_array_equal(a[:4], b[:4])
  alone = fn(hard[:1], cotangent[:1], num_iters)
  for a, b in zip(alone, mixed, strict=True):
    np.testing.assert_allclose(b[:1], a, rtol=0, atol=1e-6)
  mapped = jax.vmap(lambda x: sinkhorn.sinkhorn(x, num_iters))(hard)
  np.testing.assert_allclose(mapped, mixed[0], rtol=0, atol=1e-6)


# S11
def test_transformations_agree():
  logits = jnp.asarray(normal((3, 2, 10, 10), 2))
  cotangent = jnp.asarray(normal(logits.shape, seed=1))

  def loss(x, c):
    return (sinkhorn.sinkhorn(x, 10) * c).sum()

  expected = jax.grad(loss)(logits, cotangent)
  scanned = jax.lax.scan(
    lambda total, xc: (total + loss(*xc), None), 0.0, (logits, cotangent)
  )[0]
  np.testing.assert_allclose(scanned, loss(logits, cotangent), rtol=1e-5)

  def through_scan(x):
    step = jax.checkpoint(lambda total, xc: (total + loss(*xc), None))
    return jax.lax.scan(step, 0.0, (x, cotangent))[0]

  for gradient in (
    jax.jit(jax.grad(loss))(logits, cotangent),
    jax.vmap(jax.grad(loss))(logits, cotangent),
    jax.vmap(jax.vmap(jax.grad(loss)))(logits, cotangent),
    jax.grad(jax.checkpoint(loss))(logits, cotangent),
    jax.jit(jax.grad(through_scan))(logits),
  ):
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6)


# S05
def test_low_precision_logits_are_normalized_in_float32():
  logits = jnp.asarray(normal((2, 50, 50), 2), jnp.bfloat16)
  for fn in (sinkhorn.softmax, functools.partial(sinkhorn.sinkhorn)):
    weights = fn(logits)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_less(sinkhorn.marginal_errors(weights)[0], 1e-5)
    expected = fn(logits.astype(jnp.float32))
    np.testing.assert_array_equal(weights, expected)
    gradient = jax.grad(lambda x, fn=fn: (fn(x) ** 2).sum())(logits)
    assert gradient.dtype == jnp.bfloat16
    assert np.isfinite(gradient.astype(jnp.float32)).all()
  # Nothing between the cast at the start and the result is narrower.
  inside = jax.make_jaxpr(sinkhorn.sinkhorn)(logits.astype(jnp.float32))
  assert 'bf16' not in str(inside)
  assert 'f16' not in str(inside)


# S12
def test_scratch_memory_grows_with_tokens_not_matrices():
  def temp_bytes(num_iters):
    logits = jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)
    fn = jax.grad(lambda x: (sinkhorn.sinkhorn(x, num_iters) ** 2).sum())
    analysis = jax.jit(fn).lower(logits).compile().memory_analysis()
    return analysis.temp_size_in_bytes

  matrices = 16 * 64 * 64 * 4
  assert temp_bytes(50) < temp_bytes(2) + 6 * matrices


# J04
def test_compile_time_does_not_grow_with_iterations():
  def lines(num_iters):
    fn = jax.grad(lambda x: (sinkhorn.sinkhorn(x, num_iters) ** 2).sum())
    return len(str(jax.make_jaxpr(fn)(jnp.zeros((50, 50)))).splitlines())

  assert lines(500) == lines(50)
  assert lines(50) < 3 * lines(3)


@pytest.mark.parametrize('num_iters', [-1, 2.5, True, '3', None])
def test_wrong_iterations_are_refused(num_iters):
  with pytest.raises(ValueError, match='integer of at least 0'):
    sinkhorn.sinkhorn(np.zeros((3, 3)), num_iters)


def test_causal_mask_is_refused():
  causal = np.tril(np.ones((4, 4), bool))
  for fn in (sinkhorn.softmax, sinkhorn.sinkhorn):
    with pytest.raises(ValueError, match='Causal'):
      fn(np.zeros((2, 4, 4)), mask=causal)
    # Under jit the mask's values come too late for an exception.
    weights = jax.jit(lambda x, m, fn=fn: fn(x, mask=m))(
      np.zeros((2, 4, 4)), np.stack([causal, np.ones((4, 4), bool)])
    )
    assert np.isnan(weights[0]).all()
    np.testing.assert_allclose(weights[1], 0.25, atol=1e-7)
