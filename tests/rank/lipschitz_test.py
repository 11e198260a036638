"""Power iteration against the dense Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn
from sinkformer_jax.rank import lipschitz
from tests.rank import collapse_test

HEADS, WIDTH, LENGTH, BATCH = 2, 4, 5, 3


def sinkhorn_12(logits, mask):
  return sinkhorn.sinkhorn_reference(logits, 12, mask)


NORMALIZERS = {
  # What is measured, in forward mode, and what the dense Jacobian is made from,
  # in reverse mode.
  'softmax': (sinkhorn.softmax, sinkhorn.softmax),
  'sinkhorn': (sinkhorn_12, normalizers.NORMALIZERS['sinkhorn'](12)),
}


def layer_params(talking_heads=0):
  params = collapse_test.encoder_params(
    0, 1, WIDTH, gain=2.0, talking_heads=talking_heads
  )
  return jax.tree.map(lambda p: np.float32(p[0]), params['blocks'])


def inputs(seed=0):
  return np.random.default_rng(seed).standard_normal((BATCH, LENGTH, WIDTH))


def dense_norm(params, x, normalizer, norm_params=None):
  """The Jacobian of one example, entry by entry, in float64."""
  with jax.enable_x64(True):
    attend = attention.MultiHeadAttention(
      HEADS,
      normalizer,
      talking_heads='logits_mix' in params,
      dtype=jnp.float64,
    )

    def fn(x):
      if norm_params is not None:
        norm = encoder.LayerNorm(dtype=jnp.float64)
        x = norm.apply({'params': norm_params}, x)
      return attend.apply({'params': params}, x[None], x[None])[0]

    jacobian = np.asarray(jax.jit(jax.jacrev(fn))(x), np.float64)
  return np.linalg.norm(jacobian.reshape(x.size, x.size), 2)


def measure(params, x, normalizer, **kwargs):
  return lipschitz.attention_lipschitz(
    params['attention'], x, HEADS, normalizer, tolerance=1e-6, **kwargs
  )


@pytest.mark.parametrize('name', ['softmax', 'sinkhorn'])
@pytest.mark.parametrize('with_more', [False, True])
def test_dense_jacobian(name, with_more):
  """Attention alone, and with LayerNorm in front and talking heads."""
  normalizer, reference = NORMALIZERS[name]
  params = layer_params(HEADS * with_more)
  norm = params['attention_norm'] if with_more else None
  x = inputs()
  result = measure(params, x, normalizer, norm_params=norm)
  assert result.value.dtype == np.float64
  assert result.value.shape == (BATCH,)
  assert result.converged.all()
  assert (result.eigen_residual <= 1e-6).all()
  assert 1 < result.num_steps < 1000
  expected = [
    dense_norm(params['attention'], example, reference, norm) for example in x
  ]
  np.testing.assert_allclose(result.value, expected, 1e-8)


def test_padding():
  params, x = layer_params(), inputs()
  lengths = np.array([5, 3, 4])
  mask = np.arange(LENGTH) < lengths[:, None]
  padded = np.where(mask[..., None], x, np.nan)
  result = measure(params, padded, sinkhorn_12, mask=mask)
  assert result.converged.all()
  alone = measure(params, x[1:2, :3], sinkhorn_12)
  np.testing.assert_allclose(result.value[1], alone.value[0], 1e-8)
  whole = measure(params, x, sinkhorn_12)
  np.testing.assert_allclose(result.value[0], whole.value[0], 1e-8)


def test_not_converged():
  result = measure(layer_params(), inputs(), sinkhorn.softmax, max_steps=2)
  assert not result.converged.any()
  assert (result.eigen_residual > 1e-6).all()
  assert result.num_steps == 2
  best = measure(layer_params(), inputs(), sinkhorn.softmax)
  assert (result.value < best.value).all()


def test_linear_attention_has_a_known_norm():
  """Logits of 0: the mean of the values, whose norm is that of the kernels."""
  params = layer_params()
  for name in ('query', 'key'):
    params['attention'][name] = jax.tree.map(
      np.zeros_like, params['attention'][name]
    )
  value, out = (params['attention'][k]['kernel'] for k in ('value', 'out'))
  expected = np.linalg.norm(np.float64(value) @ np.float64(out), 2)
  result = measure(params, inputs(), sinkhorn_12)
  np.testing.assert_allclose(result.value, expected, 1e-8)


def test_no_values():
  params = layer_params()
  params['attention']['value'] = jax.tree.map(
    np.zeros_like, params['attention']['value']
  )
  result = measure(params, inputs(), sinkhorn.softmax)
  np.testing.assert_array_equal(result.value, 0)
  assert result.converged.all()


def test_not_finite():
  x = inputs()
  x[1, 0, 0] = np.nan
  with pytest.raises(ValueError, match='NaN'):
    measure(layer_params(), x, sinkhorn.softmax)
  params = layer_params()
  params['attention']['out']['kernel'][0, 0] = np.nan
  result = measure(params, inputs(), sinkhorn.softmax, max_steps=3)
  assert not result.converged.any()
