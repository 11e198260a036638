"""Softmax, and Sinkhorn as one would write it down.

The oracle of the tests, and the form for forward-mode and second derivatives,
which the fast forms do not have.
"""

import functools

import jax
import jax.numpy as jnp

from sinkformer_jax.sinkhorn import masks


def softmax(logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
  """Row softmax with a two-sided mask, in float32 at least.

  Args:
    logits: ``[..., q_length, kv_length]``.
    mask: booleans that broadcast to the shape of `logits`; True where the
      query and the key are both valid.

  Returns:
    Weights ``[..., q_length, kv_length]``; rows of valid queries sum to 1.

  Raises:
    ValueError: if `mask` is not the product of query and key validity. Inside
      jit, where its values are not known, the matrix becomes NaN instead.
  """
  logits, rows, columns = masks.prepare(logits, mask)
  return softmax_of_pairs(logits, masks.valid_pairs(rows, columns))


def sinkhorn(
  logits: jax.Array, num_iters: int = 50, mask: jax.Array | None = None
) -> jax.Array:
  """`sinkhorn` as one would write it down: slow to differentiate, easy to read.

  The oracle of the tests, and the form for forward-mode and second derivatives,
  which `sinkhorn` does not support.
  """
  num_iters = masks.check_num_iters(num_iters)
  logits, rows, columns = masks.prepare(logits, mask)
  pairs = masks.valid_pairs(rows, columns)
  log_ratio = jnp.log(masks.column_sum(rows, columns, logits))

  def iteration(_, potentials):
    f, g = potentials
    f = -logsumexp(logits + g[..., None, :], pairs, axis=-1)
    g = log_ratio - logsumexp(logits + f[..., :, None], pairs, axis=-2)
    return f, g

  zeros = jnp.zeros_like(logits)
  f, g = jax.lax.fori_loop(
    0, num_iters, iteration, (zeros[..., :, 0], zeros[..., 0, :])
  )
  return softmax_of_pairs(logits + g[..., None, :], pairs)


def logsumexp(x, pairs, axis):
  """``log sum exp`` over valid pairs; 0 (not -inf) where there are none."""
  x = masks.masked(x, pairs, -jnp.inf)
  top = jax.lax.stop_gradient(shift(x, axis))
  total = jnp.exp(x - top).sum(axis)
  total = jnp.where(total == 0, 1, total)
  return jnp.log(total) + top.squeeze(axis)


def shift(x, axis):
  """What to subtract before ``exp``: the maximum, 0 where nothing is valid."""
  maximum = x.max(axis, keepdims=True)
  return jnp.where(maximum == -jnp.inf, 0, maximum)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax_of_pairs(x, pairs, axis=-1):
  x = masks.masked(x, pairs, -jnp.inf)
  weights = jnp.exp(x - shift(x, axis))
  total = weights.sum(axis, keepdims=True)
  return weights / jnp.where(total == 0, 1, total)


@softmax_of_pairs.defjvp
def _softmax_jvp(axis, primals, tangents):
  # The derivative needs the weights alone, so nothing else is kept.
  x, pairs = primals
  weights = softmax_of_pairs(x, pairs, axis)
  change = weights * masks.masked(tangents[0], pairs, 0)
  change -= weights * change.sum(axis, keepdims=True)
  # Masked once more for the gradient: what is NaN in a masked place, such as
  # the values of a padded token, must not reach the sum.
  return weights, masks.masked(change, pairs, 0)
