"""Sinkhorn in JAX operations: blocks of matrix-vector updates.

The first iteration runs in log space. The others run in blocks. A block
builds E = exp(C + g_j), each row scaled to a largest entry of 1, from the
column potentials it starts with, runs its iterations as the matrix-vector
updates u = 1 / (E v), v = r / (E^T u) with r = n_q / n_k, starting at v = 1,
and ends with g += log v. After a full iteration every half-update changes a
potential by at most log(n), so a block short enough that
n ** (2 * iterations) stays within 1e30 neither overflows nor drops anything
that float32 could see, whatever the logits. The backward pass needs v of
every iteration; u is one product with E away.

A matrix leaves the loops, on its own, when all that is left would change
nothing beyond `_TOLERANCE`: forward when its potentials stand still, backward
when the cotangent of its potentials has died away.
"""

import functools
import math

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from sinkformer_jax.sinkhorn import masks
from sinkformer_jax.sinkhorn import reference

# TPUs and recent GPUs multiply float32 matrices in a far coarser format
# unless told not to.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)

# In units of the dtype's rounding: just below 1e-6 in float32.
_TOLERANCE = 8


def _block_sizes(num_iters: int, length: int) -> tuple[int, int]:
  """All iterations but the first: ``(blocks, iterations in each)``.

  The last block may have fewer.
  """
  limit = max(1, math.floor((30 / math.log10(max(length, 2)) + 1) / 2))
  blocks = max(1, -(-(num_iters - 1) // limit))
  return blocks, max(1, -(-(num_iters - 1) // blocks))


def _tolerance(x):
  return _TOLERANCE * jnp.finfo(x.dtype).eps


def _kernel(logits, pairs, g):
  x = masks.masked(logits + g[..., None, :], pairs, -jnp.inf)
  return jnp.exp(x - reference.shift(x, -1))


def _divide(numerator, denominator, valid):
  """Division where `valid`, 1 elsewhere: there is nothing to divide there."""
  if valid is None:
    return numerator / denominator
  return jnp.where(valid, numerator / jnp.where(valid, denominator, 1), 1)


def _run_block(kernel, rows, columns, ratio, count, size):
  """`count` iterations from ``v = 1``, at most `size`.

  Returns:
    The last u, v and the v before, and every v, ``[size, ..., n_k]``.
  """

  def iteration(k, state):
    _, v, _, history = state
    u = _divide(1, _einsum('...ij,...j->...i', kernel, v), rows)
    new = _divide(ratio, _einsum('...ij,...i->...j', kernel, u), columns)
    history = jax.lax.dynamic_update_index_in_dim(history, new, k, 0)
    return u, new, v, history

  u, v = jnp.ones_like(kernel[..., :, 0]), jnp.ones_like(kernel[..., 0, :])
  history = jnp.ones((size, *v.shape), v.dtype)
  return jax.lax.fori_loop(0, count, iteration, (u, v, v, history))


def _stands_still(kernel, rows, columns, ratio, u, v, before, remaining):
  """Whether `remaining` more iterations change no weight: ``[...]`` booleans.

  An iteration maps potentials to potentials with a derivative that is a product
  of two stochastic matrices. Each shrinks the spread (largest minus smallest)
  of what it is given at least by Dobrushin's coefficient, one minus the sum of
  the smallest entries of its columns. So all further movement has at most the
  spread of the last iteration's times a geometric sum, and a movement of spread
  s changes a weight p at most by s p (1 - p).
  """
  pairs = masks.valid_pairs(rows, columns)
  movement = jnp.log(v / before)
  eps = jnp.finfo(v.dtype).eps
  spread = jnp.maximum(movement.max(-1) - movement.min(-1), eps)

  def change():
    weights = u[..., :, None] * kernel * v[..., None, :]

    def sum_of_smallest(axis):
      smallest = masks.masked(weights, pairs, jnp.inf).min(axis)
      return jnp.where(smallest == jnp.inf, 0, smallest).sum(-1)

    rate = 1 - sum_of_smallest(-2)
    rate *= 1 - sum_of_smallest(-1) / ratio.squeeze(-1)
    steps = jnp.minimum(remaining, rate / jnp.maximum(1 - rate, 1e-3))
    return spread * steps * (weights * (1 - weights)).max((-2, -1))

  # Passes over whole matrices, made only if there is a chance.
  chance = (spread <= 64 * eps).any()
  return jax.lax.cond(chance, change, lambda: spread) <= _tolerance(v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sinkhorn(
  num_iters: int,
  logits: jax.Array,
  rows: jax.Array | None,
  columns: jax.Array | None,
) -> jax.Array:
  """Sinkhorn with `num_iters` of at least 1; see the package's `sinkhorn`.

  Args:
    num_iters: number of iterations.
    logits: ``[..., n_q, n_k]``, float32 or float64.
    rows: valid queries, ``[..., n_q]``; None if all are.
    columns: valid keys, ``[..., n_k]``; None with `rows`.
  """
  return _sinkhorn_fwd(num_iters, logits, rows, columns)[0]


@functools.partial(jax.jit, static_argnums=0)
def _potentials(num_iters, logits, rows, columns):
  """Runs all iterations.

  Returns:
    ``(g, first_g, history, blocks_run)``: the column potentials at the end and
    after the first iteration; v in the blocks, ``[blocks, size, ..., n_k]``; in
    how many blocks each matrix took part.
  """
  pairs = masks.valid_pairs(rows, columns)
  ratio = masks.column_sum(rows, columns, logits)
  blocks, size = _block_sizes(num_iters, max(logits.shape[-2:]))
  f = -reference.logsumexp(logits, pairs, axis=-1)
  first_g = jnp.log(ratio) - reference.logsumexp(
    logits + f[..., :, None], pairs, -2
  )

  def block(state):
    index, g, moving, blocks_run, history = state
    left = num_iters - 1 - index * size
    count = jnp.minimum(size, left)
    kernel = _kernel(logits, pairs, g)
    u, v, before, all_v = _run_block(kernel, rows, columns, ratio, count, size)
    still = _stands_still(
      kernel, rows, columns, ratio, u, v, before, left - count
    )
    here = moving[..., None]
    history = jax.lax.dynamic_update_index_in_dim(
      history, jnp.where(here, all_v, 1), index, 0
    )
    g += jnp.where(here, jnp.log(v), 0)
    return index + 1, g, moving & ~still, blocks_run + moving, history

  moving = jnp.ones(first_g.shape[:-1], bool)
  history = jnp.ones((blocks, size, *first_g.shape), first_g.dtype)
  _, g, _, blocks_run, history = jax.lax.while_loop(
    lambda state: (state[0] * size < num_iters - 1) & state[2].any(),
    block,
    (0, first_g, moving, moving * 0, history),
  )
  return g, first_g, history, blocks_run


def _sinkhorn_fwd(num_iters, logits, rows, columns):
  potentials = checkpoint_name(
    _potentials(num_iters, logits, rows, columns), masks.POTENTIALS
  )
  weights = reference.softmax_of_pairs(
    logits + potentials[0][..., None, :], masks.valid_pairs(rows, columns)
  )
  return weights, (logits, rows, columns, weights, *potentials)


def _block_gradient(kernel, rows, ratio, v, count, dg):
  """What the first `count` iterations of a block pass on.

  Args:
    kernel: E, ``[..., n_q, n_k]``.
    rows: valid rows.
    ratio: ``n_q / n_k``.
    v: ``[size, ..., n_k]``.
    count: number of iterations.
    dg: cotangent of the potentials after the block, ``[..., n_k]``.

  Returns:
    What to add to the cotangent of the logits, and the cotangent of the
    potentials before the block.
  """
  v_before = jnp.concatenate([jnp.ones_like(v[:1]), v[:-1]])

  # A column update has S = diag(u) E diag(v) / r, a row update
  # S = diag(u) E diag(v_before); each adds -S times the cotangent of its
  # potential to the cotangents of C and of the other potential. With
  # right = -v dg / r and left = -u df every term has a factor E and
  # (u right^T + left v_before^T), and an update is one product with E.
  def iteration(k, state):
    k = count - 1 - k
    right, *kept = state
    u = _divide(1, _einsum('...ij,...j->...i', kernel, v_before[k]), rows)
    left = -(u**2) * _einsum('...ij,...j->...i', kernel, right)
    kept = [
      jax.lax.dynamic_update_index_in_dim(all_x, x, k, 0)
      for all_x, x in zip(kept, (u, left, right), strict=True)
    ]
    product = _einsum('...ij,...i->...j', kernel, left)
    return -(v_before[k] ** 2) / ratio * product, *kept

  rows_zeros = jnp.zeros((len(v), *kernel.shape[:-1]), v.dtype)
  right, u, left, rights = jax.lax.fori_loop(
    0,
    count,
    iteration,
    (-v[count - 1] * dg / ratio, rows_zeros, rows_zeros, jnp.zeros_like(v)),
  )
  # All updates of a block share E: their rank-one terms are one product.
  terms = _einsum(
    'k...i,k...j->...ij',
    jnp.concatenate([u, left]),
    jnp.concatenate([rights, v_before]),
  )
  # The block starts at v = 1.
  return kernel * terms, -right * ratio


def _centered(dg, columns):
  """Takes out the mean, which is 0 but for rounding and would never decay.

  (A constant added to the potentials changes nothing.)
  """
  if columns is None:
    return dg - dg.mean(-1, keepdims=True)
  count = jnp.maximum(columns.sum(-1, keepdims=True), 1)
  return jnp.where(columns, dg - dg.sum(-1, keepdims=True) / count, 0)


@functools.partial(jax.jit, static_argnums=0)
def _sinkhorn_bwd(num_iters, residuals, d_weights):
  logits, rows, columns, weights, g, first_g, history, blocks_run = residuals
  pairs = masks.valid_pairs(rows, columns)
  ratio = masks.column_sum(rows, columns, logits)
  size = history.shape[1]

  # The closing row update, a softmax of C + g.
  d_logits = weights * masks.masked(d_weights, pairs, 0)
  d_logits -= weights * d_logits.sum(-1, keepdims=True)
  dg = _centered(d_logits.sum(-2), columns)

  # An update is linear in dg, with a stochastic matrix, so the sum of absolute
  # values never grows: what is left to add is at most so many times that sum.
  limit = _tolerance(dg) * jnp.abs(dg).sum(-1)

  def alive(dg, iterations):
    return ~(iterations * jnp.abs(dg).sum(-1) <= limit)

  # Iterations that were left out: all like the last, so their terms are of rank
  # two. (A row update with u and v = 1, a column update with the same.)
  skipped = num_iters - 1 - blocks_run * size
  kernel = _kernel(logits, pairs, g)
  u = _divide(1, kernel.sum(-1), rows)

  def steps_here(index, dg):
    return (index < skipped) & alive(dg, num_iters - index)

  def step(state):
    index, dg, left_sum, right_sum = state
    here = steps_here(index, dg)[..., None]
    right = jnp.where(here, -dg / ratio, 0)
    left = -(u**2) * _einsum('...ij,...j->...i', kernel, right)
    new_dg = _einsum('...ij,...i->...j', kernel, left)
    dg = jnp.where(here, _centered(new_dg, columns), dg)
    return index + 1, dg, left_sum + left, right_sum + right

  _, dg, left, right = jax.lax.while_loop(
    lambda state: steps_here(state[0], state[1]).any(),
    step,
    (0, dg, jnp.zeros_like(u), jnp.zeros_like(dg)),
  )
  terms = u[..., :, None] * right[..., None, :] + left[..., :, None]
  d_logits += kernel * terms

  starts = first_g + jnp.cumsum(jnp.log(history[:-1, -1]), axis=0)
  starts = jnp.concatenate([first_g[None], starts])

  def count_of(index):
    return jnp.minimum(size, num_iters - 1 - index * size)

  def alive_at(index, dg):
    return alive(dg, 1 + index * size + count_of(index))

  def block(state):
    index, d_logits, dg = state
    kernel = _kernel(logits, pairs, starts[index])
    more, new_dg = _block_gradient(
      kernel, rows, ratio, history[index], count_of(index), dg
    )
    here = ((index < blocks_run) & alive_at(index, dg))[..., None]
    d_logits = jnp.where(here[..., None], d_logits + more, d_logits)
    dg = jnp.where(here, _centered(new_dg, columns), dg)
    return index - 1, d_logits, dg

  _, d_logits, dg = jax.lax.while_loop(
    lambda state: (state[0] >= 0) & alive_at(state[0], state[2]).any(),
    block,
    (blocks_run.max() - 1, d_logits, dg),
  )

  # The first iteration: a column update of C + f, then a row update of C.
  def first(d_logits, dg):
    f = -reference.logsumexp(logits, pairs, axis=-1)
    d_column = -reference.softmax_of_pairs(
      logits + f[..., :, None], pairs, axis=-2
    )
    d_column *= dg[..., None, :]
    d_row = -reference.softmax_of_pairs(logits, pairs) * d_column.sum(
      -1, keepdims=True
    )
    here = alive(dg, 1)[..., None, None]
    return jnp.where(here, d_logits + d_column + d_row, d_logits)

  d_logits = jax.lax.cond(
    alive(dg, 1).any(), first, lambda d_logits, _: d_logits, d_logits, dg
  )
  return d_logits, None, None


sinkhorn.defvjp(_sinkhorn_fwd, _sinkhorn_bwd)
