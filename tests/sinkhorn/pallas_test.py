"""The Pallas kernels, interpreted on CPU, against the log-space reference.

No test here needs a GPU or TPU: that the kernels can be lowered for both is
checked, that they run there is not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import sinkhorn
from sinkformer_jax.sinkhorn import pallas
from tests.sinkhorn import sinkhorn_test

KERNEL_NAMES = {'cuda': '__gpu$xla.gpu.triton', 'tpu': 'tpu_custom_call'}
EPS = sinkhorn_test.EPS
normal = sinkhorn_test.normal


@functools.partial(jax.jit, static_argnums=2)
def value_and_gradient(logits, cotangent, num_iters, rows=None, columns=None):
  weights, vjp = jax.vjp(
    lambda x: pallas.sinkhorn(x, num_iters, rows, columns, interpret=True),
    logits,
  )
  return weights, vjp(cotangent)[0]


def check(logits, num_iters):
  """Against `sinkhorn_reference` and its automatic gradient in float64."""
  cotangent = normal(logits.shape, seed=1)
  weights, gradient = map(
    np.asarray, value_and_gradient(logits, cotangent, num_iters)
  )
  expected, expected_gradient = sinkhorn_test.reference_gradient(
    logits, cotangent, num_iters
  )
  for i in range(len(logits)):
    # Logits in the thousands leave float32 no more than this.
    tolerance = 1e-5 + 4 * EPS * np.abs(logits[i]).max()
    np.testing.assert_allclose(weights[i], expected[i], 0, tolerance)
    scale = np.abs(expected[i] * cotangent[i]).max()
    np.testing.assert_allclose(
      gradient[i], expected_gradient[i], rtol=0, atol=tolerance * scale
    )
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


# S11
@pytest.mark.parametrize(
  ('n_q', 'n_k', 'num_iters'),
  [
    (1, 1, 10),
    (2, 3, 2),
    (2, 15, 2000),  # Nothing may drift, either.
    (17, 17, 1),
    (50, 50, 50),
    (128, 128, 10),
  ],
)
def test_values_and_gradients(n_q, n_k, num_iters):
  logits = normal((7, n_q, n_k))
  logits *= np.float32([0.02, 1, 10, 100, 1e4, 1, 0.1])[:, None, None]
  # One is nearly a permutation. In the last two heavy rows want the same
  # column: it converges slowly, and every iteration moves the result.
  diagonal = np.arange(min(n_q, n_k))
  logits[5, diagonal, diagonal[::-1]] += 30
  logits[6, :2, 0] += 20
  check(logits, num_iters)


@pytest.mark.parametrize('filler', [0.0, np.nan])
def test_masked_equals_reference(filler):
  shape = (4, 2, 20, 13)
  rows = np.random.default_rng(0).random((4, 1, 20)) < 0.7
  columns = np.random.default_rng(1).random((4, 1, 13)) < 0.7
  rows[1] = np.arange(20) == 3  # One valid token,
  columns[1] = np.arange(13) == 5
  rows[2], columns[2] = False, False  # none,
  rows[3], columns[3] = True, np.arange(13) == 2  # and one key for all queries.
  pairs = np.broadcast_to(rows[..., None] & columns[..., None, :], shape)
  logits = np.where(pairs, normal(shape, 3), np.float32(filler))
  cotangent = np.where(pairs, normal(shape, seed=1), np.float32(filler))
  weights, gradient = map(
    np.asarray, value_and_gradient(logits, cotangent, 10, rows, columns)
  )
  with jax.enable_x64(True):
    expected, expected_gradient = sinkhorn_test.value_and_gradient(
      sinkhorn.sinkhorn_reference,
      np.float64(np.where(pairs, logits, 0)),
      np.float64(np.where(pairs, cotangent, 0)),
      10,
      pairs,
    )
  np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-5)
  assert (weights[~pairs] == 0).all()
  assert (gradient[~pairs] == 0).all()


def test_low_precision_logits_are_normalized_in_float32():
  logits = jnp.asarray(normal((7, 17, 17), 2), jnp.bfloat16)
  cotangent = normal(logits.shape, seed=1)
  weights, gradient = value_and_gradient(logits, cotangent, 1)
  expected, expected_gradient = value_and_gradient(
    logits.astype(jnp.float32), cotangent, 1
  )
  assert weights.dtype == jnp.float32
  np.testing.assert_array_equal(weights, expected)
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_array_equal(
    gradient, expected_gradient.astype(jnp.bfloat16)
  )


def test_transformations_agree():
  logits, cotangent = normal((3, 2, 10, 10), 2), normal((3, 2, 10, 10), seed=1)

  def loss(x, c):
    return (pallas.sinkhorn(x, 5, interpret=True) * c).sum()

  def through_scan(x, c):
    step = jax.checkpoint(lambda total, xc: (total + loss(*xc), None))
    return jax.lax.scan(step, 0.0, (x, c))[0]

  # Interpreted kernels cannot be checked for what differs between devices.
  sharded = functools.partial(
    jax.shard_map,
    mesh=jax.make_mesh((1,), ('data',), (jax.sharding.AxisType.Auto,)),
    in_specs=jax.sharding.PartitionSpec('data'),
    out_specs=jax.sharding.PartitionSpec('data'),
    check_vma=False,
  )
  _, expected = sinkhorn_test.reference_gradient(logits, cotangent, 5)
  for grad in (
    jax.vmap(jax.vmap(jax.grad(loss)), in_axes=1, out_axes=1),
    jax.grad(through_scan),
    sharded(jax.grad(loss)),
  ):
    gradient = jax.jit(grad)(logits, cotangent)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5)


def test_gradient_keeps_one_number_per_key_and_iteration():
  def kept(num_iters):
    _, vjp = jax.eval_shape(
      lambda x: jax.vjp(
        lambda x: pallas.sinkhorn(x, num_iters, interpret=True), x
      ),
      jax.ShapeDtypeStruct((3, 64, 64), jnp.float32),
    )
    return sum(x.size for x in jax.tree.leaves(vjp))

  assert kept(50) - kept(10) == 3 * 40 * 64


@pytest.mark.parametrize('platform', KERNEL_NAMES)
@pytest.mark.parametrize('shape', [(2, 4, 50, 50), (3, 1, 128), (128, 128)])
def test_lowers_for_accelerators(shape, platform):
  logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  rows = jax.ShapeDtypeStruct(shape[:-1], bool)
  columns = jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), bool)

  def loss(*args):
    return (pallas.sinkhorn(args[0], 50, *args[1:]) ** 2).sum()

  traced = jax.jit(jax.grad(loss)).trace(logits, rows, columns)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count(KERNEL_NAMES[platform]) == 2
  assert 'while' not in text  # All iterations are in the kernel.


@pytest.mark.parametrize('platform', KERNEL_NAMES)
def test_lowers_inside_shard_map(platform):
  sharded = jax.shard_map(
    lambda x: pallas.sinkhorn(x, 5),
    mesh=jax.sharding.AbstractMesh((4,), ('data',)),
    in_specs=jax.sharding.PartitionSpec('data'),
    out_specs=jax.sharding.PartitionSpec('data'),
  )
  grad = jax.grad(lambda x: (sharded(x) ** 2).sum())
  traced = jax.jit(grad).trace(jax.ShapeDtypeStruct((8, 9, 9), jnp.float32))
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count(KERNEL_NAMES[platform]) == 2


def test_choice_by_platform_leaves_no_kernel_in_a_cpu_program():
  def kernel(x, valid):
    return pallas.sinkhorn(x, 5, valid, valid)

  def xla(x, valid):
    return sinkhorn.sinkhorn(x, 5, valid[..., None] & valid[..., None, :])

  def choice(x, valid):
    return jax.lax.platform_dependent(
      x, valid, cuda=kernel, tpu=kernel, default=xla
    )

  def loss(normalizer, x, valid):
    def layer(x, _):
      return normalizer(x, valid) @ x, None

    return (jax.lax.scan(jax.checkpoint(layer), x, length=3)[0] ** 2).sum()

  x = normal((2, 6, 6))
  valid = np.arange(6) < np.array([[4], [6]])
  gradient = jax.jit(jax.grad(functools.partial(loss, choice)))
  traced = gradient.trace(x, valid)
  for platform, name in KERNEL_NAMES.items():
    # Forward, the same once more for jax.checkpoint, and backward.
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(name) == 3
  text = traced.lower().as_text()
  assert not any(name in text for name in KERNEL_NAMES.values())
  expected = jax.jit(jax.grad(functools.partial(loss, xla)))(x, valid)
  np.testing.assert_allclose(gradient(x, valid), expected, rtol=0, atol=1e-5)


def test_wrong_input_is_refused():
  with pytest.raises(ValueError, match='num_iters must be at least 1, got 0'):
    pallas.sinkhorn(jnp.zeros((3, 3)), 0)
  for shape in ((0, 3), (129, 3), (3, 129)):
    with pytest.raises(ValueError, match=f'1 to 128 .* got {shape[0]} and'):
      pallas.sinkhorn(jnp.zeros(shape), 5)
  with pytest.raises(ValueError, match='interpret mode'):
    pallas.sinkhorn(jnp.zeros((3, 3)), 5)


def test_sinkhorn_takes_the_kernel_where_it_is_there_and_wanted(monkeypatch):
  calls = []

  def kernel(logits, num_iters, rows, columns):
    calls.append(logits.shape)
    return jnp.zeros_like(logits)

  monkeypatch.setattr(pallas, 'sinkhorn', kernel)
  monkeypatch.setattr(jax, 'device_count', lambda: 1)
  logits = jnp.zeros((2, 9, 9))
  sinkhorn.sinkhorn(logits, 3)
  assert not calls  # This is a CPU.
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  sinkhorn.sinkhorn(logits, 3)
  assert calls == [logits.shape]
  sinkhorn.sinkhorn(logits, 3, fused=False)
  sinkhorn.sinkhorn(logits, 0)  # Softmax.
  sinkhorn.sinkhorn(jnp.zeros((pallas.MAX_LENGTH + 1, 3)), 3)
  with jax.enable_x64(True):
    sinkhorn.sinkhorn(jnp.zeros((9, 9), jnp.float64), 3)
  monkeypatch.setenv('SINKFORMER_FUSED', '0')
  sinkhorn.sinkhorn(logits, 3)
  monkeypatch.delenv('SINKFORMER_FUSED')
  monkeypatch.setattr(jax, 'device_count', lambda: 2)
  sinkhorn.sinkhorn(logits, 3)
  assert len(calls) == 1
  # With several, each takes its share.
  share_out = jax.shard_map(
    lambda x: sinkhorn.sinkhorn(x, 3),
    mesh=jax.sharding.AbstractMesh((2,), ('data',)),
    in_specs=jax.sharding.PartitionSpec('data'),
    out_specs=jax.sharding.PartitionSpec('data'),
    check_vma=False,
  )
  jax.eval_shape(share_out, logits)
  assert calls[1:] == [(1, 9, 9)]
