"""Sinkhorn attention weights with all iterations on the chip, in Pallas.

The values and gradients of the XLA form, for GPUs (through Triton) and
TPUs (through Mosaic). XLA goes to memory for the matrix twice an iteration;
here one program reads a matrix once, runs all iterations and writes it once.

A row update makes ``exp(C + f_i + g_j)`` the row softmax of ``C + g``, so ``f``
need not be kept, and an iteration is

  P = softmax_j(C_ij + g_j),  g_j += log(n_q / n_k) - log(sum_i P_ij)

No column sum is below ``1 / n_k`` once an iteration has been run. The first one
therefore runs in log space, and then this is safe for any logits. Each
iteration leaves its ``g`` for the gradient, one number a key; the backward
kernel builds ``P`` from it anew.

`sinkhorn` spares most of the ``exp`` by blocks of matrix-vector updates. That
would take 4 operations an entry and iteration, and this takes 7 with one
``exp``; one plain loop is worth the difference, all the more as both must wait
for sums over rows and columns.

The least work for one matrix of ``n_q n_k = n`` entries and ``t`` iterations,
lengths padded to powers of two; counted, not measured:

            operations    exp among them   bytes read and written
  forward   (7 t + 10) n  (t + 2) n        8 n + 4 t n_k
  backward  (14 t + 19) n (t + 2) n        12 n + 4 t n_k

To these bytes come padding what goes in and cutting what comes out.

The kernels have been compiled for GPUs (sm_80, sm_90) and TPUs (v4 to v6e) but
not yet run on any. The tests run them in interpret mode.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.experimental.pallas import triton
import jax.numpy as jnp

from sinkformer_jax.sinkhorn import masks

# The backward kernel holds about three matrices in registers. At this length
# they just fit on a GPU; the next power of two spills.
MAX_LENGTH = 128
# Triton takes powers of two. Shorter ones would not fill a warp.
_MIN_LENGTH = 16


def sinkhorn(
  logits: jax.Array,
  num_iters: int,
  rows: jax.Array | None = None,
  columns: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Sinkhorn normalization, closed by a row update, in float32.

  The gradient is the exact one of the finite iteration, in reverse mode only.
  XLA cannot share a kernel's matrices out to several devices: there, call this
  inside `jax.shard_map`.

  Args:
    logits: ``[..., q_length, kv_length]``; -inf marks a pair as not valid.
    num_iters: number of iterations (row and column update), at least 1.
    rows: booleans that broadcast to ``[..., q_length]``, True where the query
      is valid; None if all are. Given with `columns` or not at all.
    columns: the same for keys, ``[..., kv_length]``.
    interpret: runs the kernels as plain JAX, on any device and slowly.

  Returns:
    Weights ``[..., q_length, kv_length]``, exactly 0 where the query or the key
    is not valid.

  Raises:
    ValueError: if `num_iters` is below 1 or a length not in 1 to `MAX_LENGTH`;
      without `interpret` also where it is compiled for a CPU.
  """
  if num_iters < 1:
    raise ValueError(f'num_iters must be at least 1, got {num_iters}.')
  n_q, n_k = logits.shape[-2:]
  check_lengths(n_q, n_k)
  logits = logits.astype(jnp.float32)
  if rows is not None:
    pairs = rows[..., :, None] & columns[..., None, :]
    logits = jnp.where(pairs, logits, -jnp.inf)
  weights = _sinkhorn(num_iters, interpret, logits.reshape(-1, n_q, n_k))
  return weights.reshape(logits.shape)


def check_lengths(n_q: int, n_k: int) -> None:
  """Raises ValueError if a length is not in 1 to `MAX_LENGTH`."""
  if not 1 <= min(n_q, n_k) <= max(n_q, n_k) <= MAX_LENGTH:
    raise ValueError(
      f'The Pallas kernel takes 1 to {MAX_LENGTH} queries and keys, got {n_q}'
      f' and {n_k}. The XLA form takes any number.'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sinkhorn(num_iters, interpret, logits):
  return _sinkhorn_fwd(num_iters, interpret, logits)[0]


def _sinkhorn_fwd(num_iters, interpret, logits):
  batch, n_q, n_k = logits.shape
  # To the kernels masked and padded are the same.
  padded = _pad(logits, -jnp.inf)
  shapes = [padded.shape, (batch, num_iters, padded.shape[2])]
  weights, potentials = _call(_forward_kernel, interpret, shapes, padded)
  # Both are kept: to have the weights again would take the whole kernel.
  weights, potentials = checkpoint_name(
    (weights[:, :n_q, :n_k], potentials), masks.POTENTIALS
  )
  return weights, (logits, potentials)


def _sinkhorn_bwd(num_iters, interpret, residuals, d_weights):
  logits, potentials = residuals
  _, n_q, n_k = logits.shape
  operands = _pad(logits, -jnp.inf), potentials, _pad(d_weights, 0)
  shapes = [operands[0].shape]
  (d_logits,) = _call(_backward_kernel, interpret, shapes, *operands)
  return (d_logits[:, :n_q, :n_k],)


_sinkhorn.defvjp(_sinkhorn_fwd, _sinkhorn_bwd)


def _pad(x, fill):
  def padding(length):
    return 0, max(_MIN_LENGTH, pl.next_power_of_2(length)) - length

  return jnp.pad(x, [(0, 0), *map(padding, x.shape[1:])], constant_values=fill)


def _call(kernel, interpret, out_shapes, logits, *others):
  """Runs `kernel` once for each index of the first axis of all arrays."""
  batch, n_q, n_k = logits.shape
  operands = (logits, *others)
  # For shard_map: results differ between devices just as the logits do.
  result = functools.partial(
    jax.ShapeDtypeStruct,
    dtype=jnp.float32,
    manual_axis_type=jax.typeof(logits).manual_axis_type,
  )

  def spec(shape):
    return pl.BlockSpec((None, *shape[1:]), lambda i: (i, 0, 0))

  call = functools.partial(
    pl.pallas_call,
    kernel,
    out_shape=tuple(result(x) for x in out_shapes),
    grid=(batch,),
    in_specs=tuple(spec(x.shape) for x in operands),
    out_specs=tuple(spec(x) for x in out_shapes),
  )
  if interpret:
    return call(interpret=True)(*operands)
  # 32 entries a thread, 64 at the longest: then nothing spills.
  num_warps = min(max(n_q * n_k // 1024, 1), 8)
  on_gpu = call(
    compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=1)
  )
  on_tpu = call(
    compiler_params=tpu.CompilerParams(dimension_semantics=('parallel',))
  )
  # The default also makes Pallas refuse a CPU in its own words.
  return jax.lax.platform_dependent(*operands, cuda=on_gpu, default=on_tpu)


# The kernels. Vectors keep two axes: over queries ``[n_q, 1]``, over keys
# ``[1, n_k]``. Every iteration takes the logits from their reference anew: that
# is fast memory (L1 or VMEM), and registers are short.


def _forward_kernel(logits_ref, weights_ref, potentials_ref):
  log_ratio = _log_ratio(logits_ref[...])
  f = -_logsumexp(logits_ref[...], axis=1)
  g = log_ratio - _logsumexp(logits_ref[...] + f, axis=0)

  def iteration(i, g):
    potentials_ref[pl.ds(i, 1), :] = g
    weights = _softmax(logits_ref[...] + g, axis=1)
    return g + (log_ratio - jnp.log(_column_sums(weights)))

  last = potentials_ref.shape[0] - 1
  g = jax.lax.fori_loop(0, last, iteration, g)
  potentials_ref[pl.ds(last, 1), :] = g
  weights_ref[...] = _softmax(logits_ref[...] + g, axis=1)


def _backward_kernel(logits_ref, potentials_ref, d_weights_ref, d_logits_ref):
  last = potentials_ref.shape[0] - 1

  # The closing row update, a softmax of C + g. Cotangents may be NaN where
  # nothing is valid.
  g = potentials_ref[pl.ds(last, 1), :]
  weights = _softmax(logits_ref[...] + g, axis=1)
  d_weights = jnp.where(logits_ref[...] > -jnp.inf, d_weights_ref[...], 0)
  mean = (weights * d_weights).sum(1, keepdims=True)
  d_logits = weights * (d_weights - mean)
  dg = d_logits.sum(0, keepdims=True)

  # A column update gives all entries of a column of P the cotangent
  # d_j = -dg_j / sum_i P_ij. Through the softmax P_ij (d_j - mean_i) goes to C
  # and, summed over i, to g. There its first term is -dg, which cancels what g
  # hands on directly.
  def iteration(i, carry):
    d_logits, dg = carry
    g = potentials_ref[pl.ds(last - 1 - i, 1), :]
    weights = _softmax(logits_ref[...] + g, axis=1)
    d_columns = -dg / _column_sums(weights)
    mean = (weights * d_columns).sum(1, keepdims=True)
    d_logits += weights * (d_columns - mean)
    return d_logits, -(weights * mean).sum(0, keepdims=True)

  d_logits, dg = jax.lax.fori_loop(0, last, iteration, (d_logits, dg))

  # The first iteration: a column update of C + f, then a row update of C.
  f = -_logsumexp(logits_ref[...], axis=1)
  d_column = _softmax(logits_ref[...] + f, axis=0) * dg
  df = d_column.sum(1, keepdims=True)
  d_row = _softmax(logits_ref[...], axis=1) * df
  d_logits_ref[...] = d_logits - d_column + d_row


def _softmax(x, axis):
  exp, total, _ = _exp_and_sum(x, axis)
  return exp * (1 / total)


def _logsumexp(x, axis):
  _, total, top = _exp_and_sum(x, axis)
  return jnp.log(total) + top


def _exp_and_sum(x, axis):
  """``exp(x - top)``, its sum and ``top``; 0, 1 and 0 where all x are -inf."""
  top = x.max(axis, keepdims=True)
  top = jnp.where(top == -jnp.inf, 0, top)
  exp = jnp.exp(x - top)
  total = exp.sum(axis, keepdims=True)
  return exp, jnp.where(total == 0, 1, total), top


def _column_sums(weights):
  """What the weights of each key sum to; 1 where the key is not valid."""
  sums = weights.sum(0, keepdims=True)
  return jnp.where(sums == 0, 1, sums)


def _log_ratio(logits):
  """``log(n_q / n_k)`` of valid tokens, ``[1, 1]``; 0 where there are none."""

  def log_count(axis):
    is_valid = logits.max(axis, keepdims=True) > -jnp.inf
    count = is_valid.astype(jnp.float32).sum(1 - axis, keepdims=True)
    return jnp.log(jnp.maximum(count, 1))

  return log_count(1) - log_count(0)
