"""Local Lipschitz constant of one attention layer: its Jacobian's norm.

How much the result of attention, all heads together, changes with its input,
both as one long vector: ``max_v ||J v|| / ||v||`` over changes v of all tokens
of one example. Found by power iteration on ``J^T J``.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import normalizers
from sinkformer_jax import numerics
from sinkformer_jax import sinkhorn


@dataclasses.dataclass(frozen=True)
class JacobianNorm:
  """Spectral norm of the Jacobian for each example.

  Attributes:
    value: ``[batch]``, never above the true norm, but for rounding.
    eigen_residual: ``[batch]``, ``||J^T J v - s^2 v|| / s^2`` for the last unit
      vector v, with ``s = ||J v||`` the value. Some singular value lies
      within half of it of s, relatively, and mostly much closer.
    converged: ``[batch]``, whether the residual came below the tolerance.
    num_steps: of the power iteration.
  """

  value: np.ndarray
  eigen_residual: np.ndarray
  converged: np.ndarray
  num_steps: int


def attention_lipschitz(
  params: Mapping,
  x: np.ndarray,
  num_heads: int,
  normalizer: normalizers.Normalizer,
  mask: np.ndarray | None = None,
  norm_params: Mapping | None = None,
  tolerance: float = 1e-4,
  max_steps: int = 1000,
  seed: int = 0,
) -> JacobianNorm:
  """Norm of the Jacobian of attention at given inputs, in float64.

  Args:
    params: of `attention.MultiHeadAttention`, of one layer.
    x: ``[batch, n, width]``, such as the captured inputs of the layer.
    num_heads: number of heads.
    normalizer: see `normalizers`. It needs derivatives in forward
      mode: for Sinkhorn use `sinkhorn.sinkhorn_reference`. Compiled once for
      each such object: keep it.
    mask: ``[batch, n]``, True for valid tokens; only these are changed, and
      only their results are looked at.
    norm_params: of a LayerNorm in front of attention, which then belongs to
      the layer; None for attention alone.
    tolerance: of `eigen_residual`. The value is better by far: its relative
      error is of the order of the residual squared over the relative gap to
      the next singular value.
    max_steps: where to give up. What has not converged then says so.
    seed: of the vector that the iteration starts with.

  Raises:
    ValueError: if `x` holds NaN or infinities where it is valid.
  """
  x = np.asarray(x, np.float64)
  mask = np.ones(x.shape[:2], bool) if mask is None else np.asarray(mask, bool)
  if not np.isfinite(x[mask]).all():
    raise ValueError('The tokens hold NaN or infinities.')
  start = np.random.default_rng(seed).standard_normal(x.shape)
  with numerics.fixed(x64=True):
    params, norm_params = jax.tree.map(
      lambda p: np.asarray(p, np.float64), (dict(params), norm_params)
    )
    value, residual, steps = _attention_lipschitz(
      params,
      norm_params,
      np.where(mask[..., None], x, 0),
      mask,
      start,
      tolerance,
      max_steps,
      num_heads,
      normalizer,
    )
    value, residual = np.asarray(value), np.asarray(residual)
  return JacobianNorm(value, residual, residual <= tolerance, int(steps))


def encoder_lipschitz(
  params: Mapping,
  hidden: np.ndarray,
  num_heads: int,
  normalizer: normalizers.Normalizer,
  mask: np.ndarray | None = None,
  *,
  norm_position: str = 'pre',
  with_norm: bool = False,
  num_finite: int | None = None,
  tolerance: float = 1e-4,
  progress: Callable[[], None] = lambda: None,
) -> JacobianNorm:
  """`attention_lipschitz` of each layer of an encoder, at its own inputs.

  Args:
    params: of `encoder.Encoder`.
    hidden: its hidden states, ``[layers + 1, batch, n, width]``.
    num_heads: number of heads.
    normalizer: as in `attention_lipschitz`; see `differentiable`.
    mask: ``[batch, n]``, True for valid tokens.
    norm_position: 'pre' or 'post'.
    with_norm: whether a LayerNorm in front belongs to the layer.
    num_finite: number of the first layers that can be used; all if not given.
      The others have not converged, and are NaN.
    tolerance: as in `attention_lipschitz`.
    progress: called after each layer.

  Returns:
    As `attention_lipschitz`, but ``[layers, batch]``.
  """
  blocks = jax.device_get(params['blocks'])
  num_layers, batch = len(hidden) - 1, hidden.shape[1]
  value, residual = np.full((2, num_layers, batch), np.nan)
  converged, steps = np.zeros((num_layers, batch), bool), 0
  for layer in range(num_layers if num_finite is None else num_finite):
    block = jax.tree.map(lambda x, layer=layer: x[layer], blocks)
    tokens, norm_params = hidden[layer], None
    if with_norm:
      norm_params = block['attention_norm']
    elif norm_position == 'pre':
      tokens = layer_norm(tokens, block['attention_norm'])
    found = attention_lipschitz(
      block['attention'],
      tokens,
      num_heads,
      normalizer,
      mask,
      norm_params,
      tolerance,
    )
    value[layer], residual[layer] = found.value, found.eigen_residual
    converged[layer] = found.converged
    steps = max(steps, found.num_steps)
    progress()
  return JacobianNorm(value, residual, converged, steps)


@functools.cache
def differentiable(name: str, num_iters: int) -> normalizers.Normalizer:
  """A normalizer with derivatives in forward mode, one object for each."""
  if name != 'sinkhorn':
    return normalizers.create(name, num_iters)
  # The fast form has none.
  return lambda logits, mask: sinkhorn.sinkhorn_reference(
    logits, num_iters, mask
  )


def layer_norm(x: np.ndarray, norm_params: Mapping) -> np.ndarray:
  """The LayerNorm with these parameters of ``[..., width]``, in float64."""
  with numerics.fixed(x64=True):
    norm = encoder.LayerNorm(dtype=np.float64)
    return np.asarray(norm.apply({'params': norm_params}, x))


@functools.partial(jax.jit, static_argnums=(7, 8))
def _attention_lipschitz(
  params,
  norm_params,
  x,
  mask,
  start,
  tolerance,
  max_steps,
  num_heads,
  normalizer,
):
  attend = attention.MultiHeadAttention(
    num_heads,
    normalizer,
    talking_heads='logits_mix' in params,
    dtype=x.dtype,
  )
  pair_mask = mask[:, None, :, None] & mask[:, None, None, :]

  def layer(x):
    if norm_params is not None:
      norm = encoder.LayerNorm(dtype=x.dtype)
      x = norm.apply({'params': norm_params}, x)
    y = attend.apply({'params': params}, x, x, pair_mask)
    return jnp.where(mask[..., None], y, 0)

  return _power_iteration(layer, x, start, tolerance, max_steps)


def _power_iteration(fn, x, start, tolerance, max_steps):
  """Largest singular value of each example's Jacobian.

  `fn` maps ``[batch, ...]`` to ``[batch, ...]``, each example by itself.
  """
  _, forward = jax.linearize(fn, x)
  transposed = jax.linear_transpose(forward, x)

  def norm(a):
    axes = tuple(range(1, a.ndim))
    return jnp.sqrt((a**2).sum(axes, keepdims=True))

  def step(carry):
    v, *_, count = carry
    u = forward(v)
    w = transposed(u)[0]
    square = norm(u) ** 2
    # A Jacobian of 0 is done at once; a NaN is never.
    residual = jnp.where(square == 0, 0, norm(w - square * v) / square)
    v = jnp.where(square == 0, v, w / norm(w))
    return v, norm(u), residual, count + 1

  def unfinished(carry):
    *_, residual, count = carry
    return (count < max_steps) & ~(residual <= tolerance).all()

  v = start / norm(start)
  nothing = jnp.full_like(norm(v), jnp.inf)
  carry = jax.lax.while_loop(unfinished, step, (v, nothing, nothing, 0))
  _, value, residual, count = carry
  return value.reshape(len(x)), residual.reshape(len(x)), count
