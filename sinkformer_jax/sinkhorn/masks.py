"""Logits, masks and marginals, as all forms of the normalizers read them.

A mask is two-sided: ``mask[..., i, j]`` is True where query i and key j are
both valid. It is kept as the valid rows and the valid columns.
"""

import jax
import jax.numpy as jnp
import numpy as np

# What the gradient of Sinkhorn keeps goes by this name in the policies of
# `jax.checkpoint`.
POTENTIALS = 'potentials'


def check_num_iters(num_iters: int) -> int:
  is_int = isinstance(num_iters, (int, np.integer))
  if not is_int or isinstance(num_iters, bool) or num_iters < 0:
    raise ValueError(
      f'num_iters must be an integer of at least 0, got {num_iters!r}.'
    )
  return int(num_iters)


def prepare(logits, mask):
  """Logits in float32 at least, and which rows and columns are valid."""
  logits = jnp.asarray(logits)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  if mask is None:
    return logits, None, None
  # Not over heads: one mask serves them all.
  mask = jnp.asarray(mask, bool)
  mask = jnp.broadcast_to(mask, mask.shape[:-2] + logits.shape[-2:])
  rows, columns = mask.any(-1), mask.any(-2)
  is_product = (mask == valid_pairs(rows, columns)).all((-2, -1))
  if isinstance(is_product, jax.core.Tracer):
    # Inside jit the values of a mask are not known yet. A wrong one must not
    # pass silently, so it makes its matrix NaN.
    logits = jnp.where(is_product[..., None, None], logits, jnp.nan)
  elif not is_product.all():
    raise ValueError(
      'mask must be True exactly where query and key are both valid. Causal'
      ' and other partial masks have no doubly stochastic form.'
    )
  return logits, rows, columns


def valid_pairs(rows, columns):
  return None if rows is None else rows[..., :, None] & columns[..., None, :]


def column_sum(rows, columns, logits):
  """``n_q / n_k``, what each valid column sums to: ``[..., 1]``."""
  if rows is None:
    n_q, n_k = logits.shape[-2:]
    return jnp.asarray([n_q / n_k], logits.dtype)
  # An example without any valid token has no columns to fill.
  n_q, n_k = (jnp.maximum(x.sum(-1, keepdims=True), 1) for x in (rows, columns))
  return n_q.astype(logits.dtype) / n_k.astype(logits.dtype)


def masked(x, pairs, fill):
  return x if pairs is None else jnp.where(pairs, x, fill)
