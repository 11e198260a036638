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
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# TPUs and recent GPUs multiply float32 matrices in a far coarser format
# unless told not to.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


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
  logits, rows, columns = _prepare(logits, mask)
  return _softmax(logits, _pairs(rows, columns))


def sinkhorn(
  logits: jax.Array, num_iters: int = 50, mask: jax.Array | None = None
) -> jax.Array:
  """Sinkhorn normalization, closed by a row update, in float32 at least.

  Values equal those of `sinkhorn_reference`. The gradient is the exact
  gradient of the finite iteration; it is built from what each update leaves
  per token, so its memory grows with ``length * num_iters`` and not with
  ``length ** 2 * num_iters``.

  Args:
    logits: ``[..., q_length, kv_length]``.
    num_iters: number of iterations (row and column update), a static int.
    mask: booleans that broadcast to the shape of `logits`; True where the
      query and the key are both valid.

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
  num_iters = _check_num_iters(num_iters)
  logits, rows, columns = _prepare(logits, mask)
  if num_iters == 0:
    return _softmax(logits, _pairs(rows, columns))
  return _sinkhorn(num_iters, logits, rows, columns)


def sinkhorn_reference(
  logits: jax.Array, num_iters: int = 50, mask: jax.Array | None = None
) -> jax.Array:
  """`sinkhorn` as one would write it down: slow to differentiate, easy to read.

  The oracle of the tests, and the form for forward-mode differentiation, which
  `sinkhorn` does not support.
  """
  num_iters = _check_num_iters(num_iters)
  logits, rows, columns = _prepare(logits, mask)
  pairs = _pairs(rows, columns)
  log_ratio = jnp.log(_column_sum(rows, columns, logits))

  def iteration(_, potentials):
    f, g = potentials
    f = -_logsumexp(logits + g[..., None, :], pairs, axis=-1)
    g = log_ratio - _logsumexp(logits + f[..., :, None], pairs, axis=-2)
    return f, g

  zeros = jnp.zeros_like(logits)
  f, g = jax.lax.fori_loop(
    0, num_iters, iteration, (zeros[..., :, 0], zeros[..., 0, :])
  )
  return _softmax(logits + g[..., None, :], pairs)


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
  weights, rows, columns = _prepare(weights, mask)
  weights = _masked(weights, _pairs(rows, columns), 0)
  row_error = jnp.abs(weights.sum(-1) - 1)
  column_error = jnp.abs(weights.sum(-2) - _column_sum(rows, columns, weights))
  if rows is not None:
    row_error = jnp.where(rows, row_error, 0)
    column_error = jnp.where(columns, column_error, 0)
  return largest(row_error, -1), largest(column_error, -1)


def largest(x: jax.Array, axis: int | tuple[int, ...] | None = None):
  """Maximum over `axis`; NaN where there is a NaN or an infinity.

  XLA's maximum on CPU can pass over a NaN.
  """
  return x.max(axis) + 0 * x.sum(axis)


def _check_num_iters(num_iters: int) -> int:
  is_int = isinstance(num_iters, (int, np.integer))
  if not is_int or isinstance(num_iters, bool) or num_iters < 0:
    raise ValueError(
      f'num_iters must be an integer of at least 0, got {num_iters!r}.'
    )
  return int(num_iters)


def _prepare(logits, mask):
  """Logits in float32 at least, and which rows and columns are valid."""
  logits = jnp.asarray(logits)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  if mask is None:
    return logits, None, None
  # Not over heads: one mask serves them all.
  mask = jnp.asarray(mask, bool)
  mask = jnp.broadcast_to(mask, mask.shape[:-2] + logits.shape[-2:])
  rows, columns = mask.any(-1), mask.any(-2)
  is_product = (mask == _pairs(rows, columns)).all((-2, -1))
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


def _pairs(rows, columns):
  return None if rows is None else rows[..., :, None] & columns[..., None, :]


def _column_sum(rows, columns, logits):
  """``n_q / n_k``, what each valid column sums to: ``[...]`` or a number."""
  if rows is None:
    n_q, n_k = logits.shape[-2:]
    return jnp.asarray(n_q / n_k, logits.dtype)
  # An example without any valid token has no columns to fill.
  n_q, n_k = (jnp.maximum(x.sum(-1, keepdims=True), 1) for x in (rows, columns))
  return n_q.astype(logits.dtype) / n_k.astype(logits.dtype)


def _masked(x, pairs, fill):
  return x if pairs is None else jnp.where(pairs, x, fill)


def _logsumexp(x, pairs, axis):
  """``log sum exp`` over valid pairs; 0 (not -inf) where there are none."""
  x = _masked(x, pairs, -jnp.inf)
  shift = jax.lax.stop_gradient(_shift(x, axis))
  total = jnp.exp(x - shift).sum(axis)
  total = jnp.where(total == 0, 1, total)
  return jnp.log(total) + shift.squeeze(axis)


def _shift(x, axis):
  """What to subtract before ``exp``: the maximum, 0 where nothing is valid."""
  maximum = x.max(axis, keepdims=True)
  return jnp.where(maximum == -jnp.inf, 0, maximum)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _softmax(x, pairs, axis=-1):
  x = _masked(x, pairs, -jnp.inf)
  weights = jnp.exp(x - _shift(x, axis))
  total = weights.sum(axis, keepdims=True)
  return weights / jnp.where(total == 0, 1, total)


@_softmax.defjvp
def _softmax_jvp(axis, primals, tangents):
  # The derivative needs the weights alone, so nothing else is kept.
  x, pairs = primals
  weights = _softmax(x, pairs, axis)
  change = weights * _masked(tangents[0], pairs, 0)
  change -= weights * change.sum(axis, keepdims=True)
  # Masked once more for the gradient: what is NaN in a masked place, such as
  # the values of a padded token, must not reach the sum.
  return weights, _masked(change, pairs, 0)


# The fast form.
#
# The first iteration runs in log space. The others run in blocks. A block
# builds E = exp(C + f_i + g_j) from the potentials it starts with, runs its
# iterations as the matrix-vector updates u = 1 / (E v), v = r / (E^T u) with
# r = n_q / n_k, starting at v = 1, and ends with f += log u, g += log v. After
# a full iteration every half-update changes a potential by at most log(n), so
# a block short enough that n ** (2 * iterations) stays within 1e30 neither
# overflows nor drops anything that float32 could see, whatever the logits.


def _block_sizes(num_iters: int, length: int) -> list[tuple[int, int]]:
  """All iterations but the first, as ``[(blocks, iterations each), ...]``."""
  limit = (30 / math.log10(max(length, 2)) + 1) / 2
  size = min(max(1, math.floor(limit)), max(num_iters - 1, 1))
  blocks, rest = divmod(num_iters - 1, size)
  return [x for x in [(blocks, size), (1, rest)] if x[0] and x[1]]


def _kernel(logits, pairs, f, g):
  return _masked(
    jnp.exp((logits + f[..., :, None]) + g[..., None, :]), pairs, 0
  )


def _divide(numerator, denominator, valid):
  """Division where `valid`, 0 elsewhere: there is nothing to divide there."""
  if valid is None:
    return numerator / denominator
  return jnp.where(valid, numerator / jnp.where(valid, denominator, 1), 0)


def _log(x, valid):
  return jnp.log(x if valid is None else jnp.where(valid, x, 1))


def _run_block(logits, rows, columns, size, f, g):
  """`size` iterations from ``f, g``; also what each update left, ``u, v``."""
  kernel = _kernel(logits, _pairs(rows, columns), f, g)
  ratio = _column_sum(rows, columns, logits)

  def iteration(v, _):
    u = _divide(1, _einsum('...ij,...j->...i', kernel, v), rows)
    v = _divide(ratio, _einsum('...ij,...i->...j', kernel, u), columns)
    return v, (u, v)

  _, (u, v) = jax.lax.scan(iteration, jnp.ones_like(g), length=size)
  return f + _log(u[-1], rows), g + _log(v[-1], columns), u, v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sinkhorn(num_iters, logits, rows, columns):
  return _sinkhorn_fwd(num_iters, logits, rows, columns)[0]


def _sinkhorn_fwd(num_iters, logits, rows, columns):
  pairs = _pairs(rows, columns)
  log_ratio = jnp.log(_column_sum(rows, columns, logits))
  first_f = f = -_logsumexp(logits, pairs, axis=-1)
  g = log_ratio - _logsumexp(logits + f[..., :, None], pairs, axis=-2)
  history = []
  for blocks, size in _block_sizes(num_iters, max(logits.shape[-2:])):

    def block(potentials, _, size=size):
      f, g, u, v = _run_block(logits, rows, columns, size, *potentials)
      return (f, g), (*potentials, u, v)

    (f, g), trace = jax.lax.scan(block, (f, g), length=blocks)
    history.append(trace)
  weights = _softmax(logits + g[..., None, :], pairs)
  return weights, (logits, rows, columns, weights, first_f, g, history)


def _sinkhorn_bwd(num_iters, residuals, d_weights):
  logits, rows, columns, weights, first_f, g, history = residuals
  pairs = _pairs(rows, columns)
  ratio = _column_sum(rows, columns, logits)

  # The closing row update, a softmax of C + g.
  d_logits = weights * _masked(d_weights, pairs, 0)
  d_logits -= weights * d_logits.sum(-1, keepdims=True)
  dg = d_logits.sum(-2)

  for trace in reversed(history):

    def block(carry, block_trace):
      d_logits, dg = carry
      f0, g0, u, v = block_trace
      kernel = _kernel(logits, pairs, f0, g0)
      v_before = jnp.concatenate([jnp.ones_like(v[:1]), v[:-1]])

      # A column update has S = diag(u) E diag(v) / r, a row update
      # S = diag(u) E diag(v_before); each adds -S times the cotangent of its
      # potential to the cotangents of C and of the other potential. With
      # right = -v dg / r and left = -u df every term has a factor E and
      # (u right^T + left v_before^T), and an update is one product with E.
      def iteration(right, factors):
        u_squared, v_before_squared = factors
        left = -u_squared * _einsum('...ij,...j->...i', kernel, right)
        carry = -v_before_squared * _einsum('...ij,...i->...j', kernel, left)
        return carry, (left, right)

      right, (left, rights) = jax.lax.scan(
        iteration,
        -v[-1] * dg / ratio,
        (u**2, v_before**2 / ratio),
        reverse=True,
      )
      # All updates of a block share E: their rank-one terms are one product.
      terms = _einsum(
        '...ik,...kj->...ij',
        jnp.moveaxis(jnp.concatenate([u, left]), 0, -1),
        jnp.moveaxis(jnp.concatenate([rights, v_before]), 0, -2),
      )
      # The block starts at v = 1.
      return (d_logits + kernel * terms, -right * ratio), None

    (d_logits, dg), _ = jax.lax.scan(block, (d_logits, dg), trace, reverse=True)

  # The first iteration: a column update of C + f, then a row update of C.
  d_column = -_softmax(logits + first_f[..., :, None], pairs, axis=-2)
  d_column *= dg[..., None, :]
  d_row = -_softmax(logits, pairs) * d_column.sum(-1, keepdims=True)
  return d_logits + d_column + d_row, None, None


_sinkhorn.defvjp(_sinkhorn_fwd, _sinkhorn_bwd)
