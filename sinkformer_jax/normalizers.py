"""Normalizers by the names that configs give them.

A normalizer turns logits into attention weights. A further one is a function
here and an entry of `NORMALIZERS`; `config.model.normalizer` then takes its
name.

  softmax                rows sum to 1
  sinkhorn               rows sum to 1, columns to n_q / n_k as nearly as
                         `num_iters` iterations allow
  softmax_centered       softmax without the column bias of the logits
  softmax_shaped         identity plus softmax minus the uniform matrix; it has
                         negative entries, and its rows sum to 1
  sinkhorn_half_updates  for comparisons only: counts half-updates, and if their
                         number is even its rows do NOT sum to 1

Logits and masks are those of `sinkhorn`: ``[..., q_length, kv_length]``, and
booleans that are True where the query and the key are both valid. Weights are
float32 at least, and exactly 0 where the query or the key is not valid. All
raise a ValueError for a mask that is not the product of query and key validity,
such as a causal one; inside jit the matrix becomes NaN instead.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinkformer_jax import sinkhorn
from sinkformer_jax.sinkhorn import masks
from sinkformer_jax.sinkhorn import reference

# (logits, mask) -> float32 weights, [batch, num_heads, q_length, kv_length].
Normalizer = Callable[[jax.Array, jax.Array | None], jax.Array]


def softmax_centered(
  logits: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
  """Row softmax of ``C_ij - mean_i C_ij``, without the logits' column bias.

  The column bias is what a key adds to the logits of all queries. Without it
  no key can attract all queries alike (an attention sink). The mean runs over
  valid queries, so each query's weights depend on the other queries. With one
  valid query the weights are uniform.

  Args:
    logits: ``[..., q_length, kv_length]``.
    mask: True where the query and the key are both valid.

  Returns:
    Weights ``[..., q_length, kv_length]``; rows of valid queries sum to 1.

  Raises:
    ValueError: for a mask that is not the product of query and key validity.
  """
  logits, rows, columns = masks.prepare(logits, mask)
  pairs = masks.valid_pairs(rows, columns)
  logits = masks.masked(logits, pairs, 0)
  if rows is None:
    count = logits.shape[-2]
  else:
    count = jnp.maximum(rows.sum(-1), 1).astype(logits.dtype)[..., None, None]
  bias = logits.sum(-2, keepdims=True) / count
  return reference.softmax_of_pairs(logits - bias, pairs)


def softmax_shaped(
  logits: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
  """Shaped attention ``I + softmax(C) - 1/n`` with its start values.

  Noci et al. 2023, "The Shaped Transformer": equal logits give the identity, so
  that deep encoders without skip connections can be trained. There the three
  terms have learned factors; here all are 1, their start value. ``n`` counts
  valid keys. Entries can be negative; rows sum to 1.

  Args:
    logits: ``[..., length, length]``, of self-attention.
    mask: True where the query and the key are both valid; the same tokens have
      to be valid as queries and as keys.

  Returns:
    Weights ``[..., length, length]``; rows of valid queries sum to 1.

  Raises:
    ValueError: for logits that are not square, for a mask that is not the
      product of query and key validity, and for one whose valid queries are not
      its valid keys. Inside jit such a mask makes the matrix NaN instead.
  """
  logits, rows, columns = masks.prepare(logits, mask)
  n_q, n_k = logits.shape[-2:]
  if n_q != n_k:
    raise ValueError(
      'softmax_shaped adds the identity to the weights, so it needs as many'
      f' queries as keys, got {n_q} and {n_k}.'
    )
  shape = jnp.eye(n_q, dtype=logits.dtype) - 1 / n_k
  if rows is not None:
    logits = _refuse_unlike(logits, rows, columns)
    count = jnp.maximum(columns.sum(-1), 1).astype(logits.dtype)
    shape = jnp.eye(n_q, dtype=logits.dtype) - 1 / count[..., None, None]
  pairs = masks.valid_pairs(rows, columns)
  weights = reference.softmax_of_pairs(logits, pairs) + shape
  return masks.masked(weights, pairs, 0)


def _refuse_unlike(logits, rows, columns):
  """The logits, if the same tokens are valid as queries and as keys."""
  is_alike = (rows == columns).all(-1)
  if isinstance(is_alike, jax.core.Tracer):
    return jnp.where(is_alike[..., None, None], logits, jnp.nan)
  if not is_alike.all():
    raise ValueError(
      'mask must have the same valid queries and keys: softmax_shaped adds the'
      ' identity to the weights.'
    )
  return logits


def sinkhorn_half_updates(
  logits: jax.Array, num_iters: int, mask: jax.Array | None = None
) -> jax.Array:
  """Sinkhorn by a number of half-updates; not closed by rows if it is even.

  The default is `sinkhorn.sinkhorn`, which counts whole iterations and always
  closes the rows. This form counts as the Sinkformers do (Sander et al. 2022,
  ``n_it``): half-updates alternate, beginning with a row update.

  An odd number ends on a row update (row-closed) and equals `sinkhorn.sinkhorn`
  with ``(num_iters - 1) / 2`` iterations. An even number ends on a column
  update (column-closed): columns sum to ``n_q / n_k``, and rows only nearly to
  1. Products of such matrices end on a floor that looks like rank. It is here
  to show what that floor does to measurements.

  Args:
    logits: ``[..., q_length, kv_length]``.
    num_iters: number of half-updates, a static int.
    mask: True where the query and the key are both valid.

  Returns:
    Weights ``[..., q_length, kv_length]``.

  Raises:
    ValueError: if `num_iters` is not an integer of at least 1, or for a mask
      that is not the product of query and key validity.
  """
  if masks.check_num_iters(num_iters) < 1:
    raise ValueError('sinkhorn_half_updates needs num_iters of at least 1.')
  if num_iters % 2:
    return sinkhorn.sinkhorn(logits, num_iters // 2, mask)
  if num_iters > 2:
    weights = sinkhorn.sinkhorn(logits, num_iters // 2 - 1, mask)
  logits, rows, columns = masks.prepare(logits, mask)
  pairs = masks.valid_pairs(rows, columns)
  ratio = masks.column_sum(rows, columns, logits)[..., None, :]
  if num_iters == 2:
    # Softmax can leave a column that is 0 to rounding. The later row updates
    # cannot: they leave no column sum below 1 / n_k.
    row_closed = logits - reference.logsumexp(logits, pairs, -1)[..., None]
    weights = reference.softmax_of_pairs(row_closed, pairs, -2)
    return masks.masked(ratio * weights, pairs, 0)
  total = weights.sum(-2, keepdims=True)
  weights = ratio * weights / jnp.where(total == 0, 1, total)
  # Once more for the gradient, as in `reference.softmax_of_pairs`.
  return masks.masked(weights, pairs, 0)


def _with_num_iters(function) -> Callable[[int], Normalizer]:
  def create_one(num_iters):
    return lambda logits, mask=None: function(logits, num_iters, mask)

  return create_one


# Each takes `config.model.num_iters`, whether it needs it or not.
NORMALIZERS: dict[str, Callable[[int], Normalizer]] = {
  'softmax': lambda num_iters: sinkhorn.softmax,
  'sinkhorn': _with_num_iters(sinkhorn.sinkhorn),
  'softmax_centered': lambda num_iters: softmax_centered,
  'softmax_shaped': lambda num_iters: softmax_shaped,
  'sinkhorn_half_updates': _with_num_iters(sinkhorn_half_updates),
}


def create(name: str, num_iters: int) -> Normalizer:
  """The normalizer of a config.

  Args:
    name: `config.model.normalizer`.
    num_iters: `config.model.num_iters`.

  Raises:
    ValueError: for an unknown name.
  """
  if name not in NORMALIZERS:
    raise ValueError(
      f'model.normalizer must be one of {sorted(NORMALIZERS)}, got {name!r}.'
    )
  return NORMALIZERS[name](num_iters)
