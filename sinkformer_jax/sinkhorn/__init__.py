"""Normalizers: what turns attention logits into attention weights.

`softmax` makes rows sum to 1. `sinkhorn` also makes columns sum to 1 (to
``n_q / n_k`` if the matrix is not square), by alternating row and column
updates of the potentials ``f, g`` of ``P = exp(C + f_i + g_j)``:

  row update     f_i = -logsumexp_j(C_ij + g_j)
  column update  g_j = log(n_q / n_k) - logsumexp_i(C_ij + f_i)

One iteration is one row update followed by one column update. The iterations
are always closed by one more row update, so that rows sum to 1 to rounding and
columns approximately; `num_iters=0` is softmax. (Sander et al. 2022,
"Sinkformers", section 3, count half-updates: `n_it = 2 * num_iters + 1`.)

A mask is two-sided: ``mask[..., i, j]`` is True where query i and key j are
both valid. Invalid rows and columns of the result are exactly 0, the rest is
what the unpadded logits would give, and ``n_q, n_k`` count valid tokens.

`sinkhorn` has several forms with the same values and gradients:

  reference  as one would write it down; the oracle of the tests
  xla        JAX operations, for any device
  pallas     one kernel for GPUs and TPUs
"""

import os

import jax
import jax.numpy as jnp

from sinkformer_jax.sinkhorn import masks
from sinkformer_jax.sinkhorn import reference
from sinkformer_jax.sinkhorn import xla
from sinkformer_jax.sinkhorn.masks import POTENTIALS
from sinkformer_jax.sinkhorn.reference import sinkhorn as sinkhorn_reference
from sinkformer_jax.sinkhorn.reference import softmax

__all__ = [
  'POTENTIALS',
  'largest',
  'marginal_errors',
  'sinkhorn',
  'sinkhorn_reference',
  'softmax',
]


def sinkhorn(
  logits: jax.Array,
  num_iters: int = 50,
  mask: jax.Array | None = None,
  fused: bool | None = None,
) -> jax.Array:
  """Sinkhorn normalization, closed by a row update, in float32 at least.

  Values equal those of `sinkhorn_reference`. The gradient is the exact
  gradient of the finite iteration, once and in reverse mode; it is built from
  what each iteration leaves per key, so its memory grows with
  ``length * num_iters`` and not with ``length ** 2 * num_iters``. Iterations
  that would change nothing beyond rounding are left out, and no matrix depends
  on its neighbours.

  Args:
    logits: ``[..., q_length, kv_length]``.
    num_iters: number of iterations (row and column update), a static int.
    mask: booleans that broadcast to the shape of `logits`; True where the
      query and the key are both valid.
    fused: whether all iterations run in one kernel (`pallas`), which
      takes float32 and up to `pallas.MAX_LENGTH` tokens. By default
      they do on a GPU or TPU, unless the environment variable SINKFORMER_FUSED
      is 0; where there are several, only inside `jax.shard_map`.

  Returns:
    Weights ``[..., q_length, kv_length]``: rows of valid queries sum to 1,
    columns of valid keys to ``n_q / n_k`` as nearly as `num_iters` allow (see
    `marginal_errors`).

  Raises:
    ValueError: if `num_iters` is not an integer of at least 0, or if `mask` is
      not the product of query and key validity (a causal mask is not: the
      only triangular doubly stochastic matrix is the identity). Inside jit,
      where a mask's values are not known, the matrix becomes NaN instead.
  """
  num_iters = masks.check_num_iters(num_iters)
  logits, rows, columns = masks.prepare(logits, mask)
  if num_iters == 0:
    return reference.softmax_of_pairs(logits, masks.valid_pairs(rows, columns))
  if _is_fused(logits) if fused is None else fused:
    # Imported late: on a CPU nobody needs the compilers of kernels.
    from sinkformer_jax.sinkhorn import pallas

    return pallas.sinkhorn(logits, num_iters, rows, columns)
  return xla.sinkhorn(num_iters, logits, rows, columns)


def marginal_errors(
  weights: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """How far weights are from doubly stochastic.

  Args:
    weights: ``[..., q_length, kv_length]``.
    mask: as in `sinkhorn`.

  Returns:
    ``(row_error, column_error)``, each ``[...]``: the largest
    ``|sum_j P_ij - 1|`` over valid queries and ``|sum_i P_ij - n_q / n_k|``
    over valid keys; 0 where no token is valid.

  Raises:
    ValueError: for a mask that `sinkhorn` refuses.
  """
  weights, rows, columns = masks.prepare(weights, mask)
  weights = masks.masked(weights, masks.valid_pairs(rows, columns), 0)
  row_error = jnp.abs(weights.sum(-1) - 1)
  column_error = jnp.abs(
    weights.sum(-2) - masks.column_sum(rows, columns, weights)
  )
  if rows is not None:
    row_error = jnp.where(rows, row_error, 0)
    column_error = jnp.where(columns, column_error, 0)
  return largest(row_error, -1), largest(column_error, -1)


def largest(x: jax.Array, axis: int | tuple[int, ...] | None = None):
  """Maximum over `axis`; NaN where there is a NaN or an infinity.

  XLA's maximum on CPU can pass over a NaN.
  """
  return x.max(axis) + 0 * x.sum(axis)


def _is_fused(logits):
  """Whether the kernel is there for these logits, and wanted."""
  if jax.default_backend() not in ('gpu', 'tpu'):
    return False
  # XLA would gather the matrices of several devices for one kernel.
  has_own_share = jax.sharding.get_abstract_mesh().are_all_axes_manual
  if jax.device_count() > 1 and not has_own_share:
    return False
  from sinkformer_jax.sinkhorn import pallas

  fits = 1 <= min(logits.shape[-2:]) <= max(logits.shape[-2:])
  fits &= max(logits.shape[-2:]) <= pallas.MAX_LENGTH
  wanted = os.environ.get('SINKFORMER_FUSED') != '0'
  return fits and wanted and logits.dtype == jnp.float32
