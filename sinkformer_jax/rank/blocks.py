"""Attention matrices of examples: checked, cut to valid tokens, as factors.

What `paths` and `exact` share, and what is said of single matrices. All is
NumPy float64 on the host.
"""

from concurrent import futures
import os

import numpy as np
import threadpoolctl

from sinkformer_jax import errors
from sinkformer_jax.rank import residuals

# Each holds the attention of an example.
_MAX_THREADS = 8


def marginal_errors(
  attention: residuals.Array, mask: residuals.Array | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """How far attention matrices are from doubly stochastic, in float64.

  Args:
    attention: ``[layers, batch, heads, n, n]``.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    ``(row_error, column_error)``, each ``[layers, batch, heads]``: the largest
    ``|sum - 1|`` over valid tokens. NaN where a weight is not finite or no
    token is valid.
  """
  attention, valid = check_attention(attention, mask)
  row_error, column_error = np.full((2, *attention.shape[:3]), np.nan)
  for example in np.flatnonzero(valid.any(1)):
    block = valid_block(attention, valid, example)
    block[~np.isfinite(block)] = np.nan
    row_error[:, example] = np.abs(block.sum(-1) - 1).max(-1)
    column_error[:, example] = np.abs(block.sum(-2) - 1).max(-1)
  return row_error, column_error


def column_spread(
  attention: residuals.Array, mask: residuals.Array | None = None
) -> np.ndarray:
  """Root mean square of ``column sum - 1``, in float64.

  What Sander et al. 2022 show as a histogram of column sums, as one number. The
  largest deviation, `marginal_errors`, is that of one token.

  Args:
    attention: ``[layers, batch, heads, n, n]``.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    ``[layers, batch, heads]``. NaN where a weight is not finite or no token is
    valid.
  """
  attention, valid = check_attention(attention, mask)
  spread = np.full(attention.shape[:3], np.nan)
  for example in np.flatnonzero(valid.any(1)):
    block = valid_block(attention, valid, example)
    block[~np.isfinite(block)] = np.nan
    spread[:, example] = np.sqrt(((block.sum(-2) - 1) ** 2).mean(-1))
  return spread


def for_each(examples, measure, num_threads=None, progress=lambda *_: None):
  """One thread an example, and in each thread a BLAS of one.

  Matrices this small gain nothing from being shared among threads.
  """
  num_threads = num_threads or min(os.cpu_count() or 1, _MAX_THREADS)
  with (
    threadpoolctl.threadpool_limits(1, 'blas'),
    futures.ThreadPoolExecutor(num_threads) as pool,
  ):
    for done, _ in enumerate(pool.map(measure, examples), start=1):
      progress(done, len(examples))


class Factors:
  """``J P J`` of each matrix, its size, and whether it is resolved."""

  def __init__(self, matrices, dtype):
    self.num_tokens = matrices.shape[-1]
    self.resolution = residuals.resolution(self.num_tokens, dtype)
    # J P = P - 1 m^T, m the column means; then the same from the right.
    self.column_means = matrices.mean(-2)
    self.row_sums = matrices.sum(-1).mean(-1)
    self.matrices = matrices - self.column_means[..., None, :]
    self.matrices -= self.matrices.mean(-1, keepdims=True)
    self.norms = frobenius(self.matrices)
    self.below = self.norms <= self.resolution * frobenius(matrices)


def frobenius(matrices):
  return residuals.unscaled_norm(matrices, 'frobenius')


def first_bad_layer(finite):
  """Of each example; the number of layers if there is none."""
  return np.where(finite.all(0), len(finite), finite.argmin(0))


def check_attention(attention, mask):
  attention = np.asarray(attention)
  shape = attention.shape
  if len(shape) != 5 or shape[-1] != shape[-2] or 0 in shape:
    raise ValueError(
      f'attention must be [layers, batch, heads, n, n], got {shape}.'
    )
  valid = np.ones((shape[1], shape[-1]), bool) if mask is None else mask
  valid = np.asarray(valid)
  if valid.shape != (shape[1], shape[-1]) or valid.dtype != bool:
    raise ValueError(
      f'mask must be booleans [batch, n] = {(shape[1], shape[-1])}, got'
      f' {valid.dtype} {valid.shape}.'
    )
  return attention, valid


def check_rows(attention, valid, dtype, row_sums):
  """Refuses rows that are off what they sum to: with them J P is not J P J."""
  num_layers, _, num_heads = attention.shape[:3]
  meant = np.ones((num_layers, num_heads)) if row_sums is None else row_sums
  meant = np.asarray(meant, np.float64)
  if meant.shape != (num_layers, num_heads):
    raise ValueError(
      f'row_sums must be [layers, heads] = {(num_layers, num_heads)}, got'
      f' {meant.shape}.'
    )
  for example in np.flatnonzero(valid.any(1)):
    block = valid_block(attention, valid, example)
    # NaN is not off; it makes its layer invalid.
    block[~np.isfinite(block)] = np.nan
    error = np.abs(block.sum(-1) - meant[..., None]).max(-1)
    limit = residuals.resolution(block.shape[-1], dtype)
    limit = min(limit, residuals.MAX_ROW_ERROR)
    if row_sums is not None:
      # Of weights of both signs, which cancel.
      limit = limit * np.maximum(1, np.abs(block).sum(-1).max(-1))
    off = error > limit
    if off.any():
      layer, head = np.argwhere(off)[0]
      allowed = np.broadcast_to(limit, off.shape)[layer, head]
      raise errors.DataError(
        f'attention rows of layer {layer + 1}, head {head}, example {example}'
        f' are off {meant[layer, head]:g} by {error[layer, head]:.1e}; rounding'
        f' in {dtype} explains {allowed:.1e}. If it was computed in another'
        " dtype, name it (dtype='float32'); if rows are not meant to sum to one"
        ' number, use plain=True, whose products have a floor.'
      )


def valid_block(attention, valid, example):
  """``[layers, heads, n_valid, n_valid]``, float64."""
  block = attention[:, example]
  if not valid[example].all():
    index = np.flatnonzero(valid[example])
    block = block[..., index[:, None], index]
  return np.array(block, np.float64, order='C')


def finite_blocks(attention, valid, example):
  """The valid block, layers that are not finite set to 0, and which are not."""
  block = valid_block(attention, valid, example)
  finite = np.isfinite(block).all((1, 2, 3))
  block[~finite] = 0
  return block, finite
