"""One vector for each example from its tokens, and the class token."""

import flax.linen as nn
import jax
import jax.numpy as jnp

POOLINGS = ('cls', 'mean', 'max')
# Of class tokens and learned positions.
EMBEDDING_INIT = nn.initializers.normal(stddev=1.0)


def check_pooling(pooling: str) -> None:
  """Raises ValueError for an unknown pooling."""
  if pooling not in POOLINGS:
    raise ValueError(f'pooling must be one of {POOLINGS}, got {pooling!r}.')


def with_class_token(module, x, mask):
  """Puts a learned token, which is always valid, in front of the others."""
  width = x.shape[-1]
  cls = module.param('cls', EMBEDDING_INIT, (1, 1, width), jnp.float32)
  cls = jnp.broadcast_to(cls, (len(x), 1, width)).astype(x.dtype)
  x = jnp.concatenate([cls, x], axis=1)
  if mask is not None:
    mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
  return x, mask


def pool(x: jax.Array, mask: jax.Array | None, pooling: str) -> jax.Array:
  """One vector for each example, from its valid tokens alone.

  Args:
    x: ``[batch, length, width]``.
    mask: ``[batch, length]``, True for valid tokens; None if all are.
    pooling: 'cls' (the first token), 'mean' or 'max'.

  Returns:
    ``[batch, width]``, in float32 at least; 0 for the mean or maximum of no
    tokens.
  """
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if pooling == 'cls':
    return x[:, 0]
  if pooling == 'max':
    if mask is None:
      return x.max(1)
    largest = jnp.where(mask[..., None], x, -jnp.inf).max(1)
    return jnp.where(mask.any(1, keepdims=True), largest, 0)
  if mask is None:
    return x.mean(1)
  total = jnp.where(mask[..., None], x, 0).sum(1)
  return total / jnp.maximum(mask.sum(1, keepdims=True), 1)
