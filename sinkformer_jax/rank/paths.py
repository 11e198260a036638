"""Residuals of products of attention matrices along paths through a model.

A path takes one head in each of its layers, or the skip connection, whose
matrix is the identity. Its matrix is ``P_k ... P_2 P_1``, layer 1 rightmost
(Dong et al. 2021; Lapenna et al. 2026).

A row-stochastic ``P`` has ``J P = J P J``, and so has one whose rows all sum to
another number, so that ``J P_k ... P_1`` is the product of the factors
``J P_l J``. Unlike a product followed by a subtraction
this has no floor at the rounding of float64, and as it is scaled at every
layer, its size kept as a logarithm, 1e-300 and less can be told.

All is NumPy float64 on the host: nothing is faster for many small matrices on
a CPU, and its precision depends on no setting.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import math
import os

import numpy as np
import threadpoolctl

from sinkformer_jax import errors
from sinkformer_jax.rank import residuals

# Which layers a path of depth k takes: the first k, or any k.
LAYERS = ('first', 'drawn')

# What a path does in a layer where it takes no head.
SKIP = -1  # Takes the skip connection.
ABSENT = -2  # Leaves the layer out: it is beyond its depth, or was not drawn.

# Matrices worked on at a time should stay in the cache.
_CHUNK_BYTES = 2**19

# Each holds the attention of an example.
_MAX_THREADS = 8


def sample_paths(
  seed: int,
  num_layers: int,
  num_heads: int,
  num_paths: int = 100,
  layers: str = 'first',
  skip: bool = False,
) -> np.ndarray:
  """Draws paths of every depth from 1 to `num_layers`.

  A function of its arguments alone, so that captures of the same shape get the
  same paths and models can be compared path by path.

  Args:
    seed: a non-negative int.
    num_layers: layers of the model.
    num_heads: heads of a layer, drawn uniformly.
    num_paths: paths of each depth.
    layers: 'first': a path of depth k takes the first k layers. 'drawn': k
      layers drawn without replacement and sorted (Dong et al. 2021). With
      'first', a path of depth k + 1 extends the same path of depth k: all
      depths together cost `num_layers` products a path. With 'drawn', depths
      are independent and cost ``(num_layers + 1) / 2`` times that.
    skip: makes the skip connection one more choice in each layer, as likely
      as a head.

  Returns:
    Ints ``[num_layers, num_paths, num_layers]``: for each depth (1 first) and
    path, the head taken in each layer, or `SKIP`, or `ABSENT`.
  """
  residuals.check_name(layers, LAYERS, 'layers')
  rng = np.random.default_rng(seed)
  shape = (num_layers, num_paths, num_layers)
  lowest = SKIP if skip else 0
  if layers == 'first':
    heads = rng.integers(lowest, num_heads, shape[1:])
    order = np.arange(num_layers)
  else:
    heads = rng.integers(lowest, num_heads, shape)
    order = rng.random(shape).argsort(-1)
  depths = np.arange(1, num_layers + 1)[:, None, None]
  return np.where(order < depths, heads, ABSENT)


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
  attention, valid = _check_attention(attention, mask)
  row_error, column_error = np.full((2, *attention.shape[:3]), np.nan)
  for example in np.flatnonzero(valid.any(1)):
    block = _valid_block(attention, valid, example)
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
  attention, valid = _check_attention(attention, mask)
  spread = np.full(attention.shape[:3], np.nan)
  for example in np.flatnonzero(valid.any(1)):
    block = _valid_block(attention, valid, example)
    block[~np.isfinite(block)] = np.nan
    spread[:, example] = np.sqrt(((block.sum(-2) - 1) ** 2).mean(-1))
  return spread


def path_residuals(
  attention: residuals.Array,
  heads: np.ndarray,
  mask: residuals.Array | None = None,
  *,
  norms: Sequence[str] = residuals.NORMS,
  dtype: str | None = None,
  plain: bool = False,
  row_sums: residuals.Array | None = None,
  chunk_size: int | None = None,
  num_threads: int | None = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> residuals.Residuals:
  """Residual norms of path products, for every depth, example and path.

  Args:
    attention: ``[layers, batch, heads, n, n]``, what multiplies the values.
    heads: paths ``[depths, num_paths, layers]``, as `sample_paths` gives them.
    mask: booleans ``[batch, n]``, True for valid tokens.
    norms: some of `residuals.NORMS`.
    dtype: in which `attention` was computed; that of the array if not given.
    plain: for rows that do not sum to 1: multiplies the matrices as they are
      and subtracts at the end, which has a floor at the rounding of `dtype`.
    row_sums: what the rows of a head are meant to sum to, all to one number, of
      any sign, ``[layers, heads]``; 1 if not given. See `Capture.about`.
    chunk_size: paths worked on at a time; no result depends on it.
    num_threads: examples worked on at a time; the number of cores, but at
      most 8, if not given.
    progress: called with the number of examples done and that of all.

  Returns:
    Residual norms ``[depths + 1, batch, num_paths]``. Index 0 is the empty
    path, ``J``, by which scaling 'initial' divides; 'relative' divides by the
    norm of the whole product. Invalid is, in one example, a path with a layer
    that is not finite or with one after it; and an example with fewer than 2
    valid tokens. Below resolution are, and all that continues them is
    (Frobenius norms, n valid tokens, eps of `dtype`):

    - a factor with ``||J P J|| <= 10 n eps ||P||``: forming it cancels;
    - a product with ``||A B|| <= 10 n eps ||A|| ||B||``: this cancels too;
    - if `plain`, only what has ``||J P|| <= 10 n eps ||P||``, P the product.

  Raises:
    errors.DataError: unless `plain`, if rows are off 1, or what they are meant
      to sum to, by more than ``10 n eps`` or 1e-3 of the weights' size.
    ValueError: for shapes or names that do not fit.
  """
  attention, valid = _check_attention(attention, mask)
  heads = _check_heads(heads, attention)
  for kind in norms:
    residuals.check_name(kind, residuals.NORMS, 'norms')
  dtype = residuals.name_dtype(attention, dtype)
  if not plain:
    _check_rows(attention, valid, dtype, row_sums)
  num_layers, batch, _, n, _ = attention.shape
  depths, num_paths, _ = heads.shape
  chunk_size = chunk_size or max(1, _CHUNK_BYTES // (8 * n * n))

  shape = (depths + 1, batch, num_paths)
  rest = {kind: np.zeros(shape) for kind in norms}
  whole = {kind: np.zeros(shape) for kind in norms}
  below = np.zeros(shape, bool)
  finite = np.ones((num_layers, batch), bool)
  few = valid.sum(1) < 2

  def measure(example):
    matrices, finite[:, example] = _matrices(attention, valid, example)
    products = (_PlainProducts if plain else _Products)(matrices, dtype)
    for start in range(0, num_paths, chunk_size):
      chunk = slice(start, start + chunk_size)
      for depth in _walk(products, heads[:, chunk]):
        at = depth, example, chunk
        below[at] = products.below
        matrix = products.whole() if norms else None
        for kind in norms:
          size = residuals.unscaled_norm(products.rest, kind)
          rest[kind][at] = products.log10 + residuals.log10(size)
          size = residuals.unscaled_norm(matrix, kind)
          whole[kind][at] = residuals.log10(size)

  _for_each(np.flatnonzero(~few), measure, num_threads, progress)

  # A path is invalid if its last layer is, or comes after one that is.
  invalid = np.broadcast_to(few[:, None], shape).copy()
  last = np.where(heads == ABSENT, -1, np.arange(num_layers)).max(-1)
  invalid[1:] |= last[:, None] >= _first_bad_layer(finite)[:, None]
  return residuals.Residuals(
    log10={k: np.where(invalid, np.nan, v) for k, v in rest.items()},
    log10_whole={k: np.where(invalid, np.nan, v) for k, v in whole.items()},
    below_resolution=below & ~invalid,
    invalid=invalid,
    problems=residuals.describe_problems(finite, few, first=1),
    dtype=dtype,
  )


def exact_rms(
  attention: residuals.Array,
  mask: residuals.Array | None = None,
  *,
  layers: str = 'first',
  skip: bool = False,
  dtype: str | None = None,
  row_sums: residuals.Array | None = None,
) -> residuals.Residuals:
  """Root mean square over all paths of the Frobenius residual, not sampled.

  The mean over heads of ``(J P J) N (J P J)^T``, repeated from ``N = J``, has
  the mean of the squared residuals as its trace. It is ruled by the few paths
  that keep most; `summarize` has the mean of log10 over sampled paths.

  Args:
    attention: ``[layers, batch, heads, n, n]``, what multiplies the values.
    mask: booleans ``[batch, n]``, True for valid tokens.
    layers: as in `sample_paths`.
    skip: as in `sample_paths`.
    dtype: in which `attention` was computed; that of the array if not given.
    row_sums: as in `path_residuals`.

  Returns:
    Residual norms ``[layers + 1, batch]``, 'frobenius' alone, without scaling
    'relative'. Below resolution is a mean in which all that counts is (see
    `path_residuals`). Invalid is as there; with layers drawn, where every
    depth uses all layers, one that is not finite leaves depth 0 alone valid.

  Raises:
    errors.DataError: as `path_residuals`.
    ValueError: for shapes or names that do not fit.
  """
  residuals.check_name(layers, LAYERS, 'layers')
  attention, valid = _check_attention(attention, mask)
  dtype = residuals.name_dtype(attention, dtype)
  _check_rows(attention, valid, dtype, row_sums)
  num_layers, batch = attention.shape[:2]
  log10 = np.zeros((num_layers + 1, batch))
  below = np.zeros(log10.shape, bool)
  finite = np.ones((num_layers, batch), bool)
  few = valid.sum(1) < 2
  mean_square = _first_layers if layers == 'first' else _drawn_layers

  def measure(example):
    matrices, finite[:, example] = _matrices(attention, valid, example)
    factors = _Factors(matrices, dtype)
    squares, below[:, example] = mean_square(factors, num_layers, skip)
    log10[:, example] = squares / 2

  _for_each(np.flatnonzero(~few), measure)

  bad = _first_bad_layer(finite)
  if layers == 'drawn':
    bad = np.where(bad < num_layers, 0, num_layers)
  invalid = few | (np.arange(num_layers + 1)[:, None] > bad)
  return residuals.Residuals(
    log10={'frobenius': np.where(invalid, np.nan, log10)},
    log10_whole={},
    below_resolution=below & ~invalid,
    invalid=invalid,
    problems=residuals.describe_problems(finite, few, first=1),
    dtype=dtype,
  )


def _for_each(examples, measure, num_threads=None, progress=lambda *_: None):
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


def _walk(products, heads: np.ndarray) -> Iterator[int]:
  """Brings `products` to each depth in turn, 0 (the empty path) first."""
  depths, num_paths, num_layers = heads.shape
  products.start(1)
  yield 0
  layer = np.arange(num_layers)
  extended = depths == num_layers and np.array_equal(
    heads, np.where(layer <= layer[:, None, None], heads[-1], ABSENT)
  )
  for depth, taken in enumerate(heads):
    if depth == 0 or not extended:
      products.start(num_paths)
    for i in [depth] if extended else layer:
      products.multiply(i, taken[:, i])
    yield depth + 1


class _Factors:
  """``J P J`` of each matrix, its size, and whether it is resolved."""

  def __init__(self, matrices, dtype):
    self.num_tokens = matrices.shape[-1]
    self.resolution = residuals.resolution(self.num_tokens, dtype)
    # J P = P - 1 m^T, m the column means; then the same from the right.
    self.column_means = matrices.mean(-2)
    self.row_sums = matrices.sum(-1).mean(-1)
    self.matrices = matrices - self.column_means[..., None, :]
    self.matrices -= self.matrices.mean(-1, keepdims=True)
    self.norms = _frobenius(self.matrices)
    self.below = self.norms <= self.resolution * _frobenius(matrices)


class _Products:
  """Products of the factors ``J P J``, and of the matrices ``P`` beside them.

  With ``m`` the column means of the product of the ``P``, that product is
  ``R + 1 m^T``, R its residual. A further ``P`` with column means ``c`` and row
  sums ``s`` makes them ``c^T R + s m``, which costs a vector instead of a
  matrix.

  Attributes:
    rest: residuals ``[num_paths, n, n]``, scaled to Frobenius norm 1.
    log10: log10 of their scale, ``[num_paths]``.
    below: below resolution, ``[num_paths]``.
  """

  def __init__(self, matrices, dtype):
    self._factors = _Factors(matrices, dtype)

  def start(self, num_paths):
    n = self._factors.num_tokens
    self.rest = np.tile((np.eye(n) - 1 / n) / np.sqrt(n - 1), (num_paths, 1, 1))
    self.log10 = np.full(num_paths, np.log10(n - 1) / 2)
    self.below = np.zeros(num_paths, bool)
    self._means = np.full((num_paths, n), 1 / n)
    # New arrays for every product would cost as much as the product.
    self._buffers = np.empty((2, num_paths, n, n))

  def multiply(self, layer, heads):
    factors = self._factors
    paths = np.flatnonzero(heads >= 0)
    heads = heads[paths]
    every = len(paths) == len(self.rest)
    rest = self.rest if every else self.rest[paths]
    factor, product = (x[: len(paths)] for x in self._buffers)
    # Without a mode, take() makes a copy of its output.
    factors.matrices[layer].take(heads, 0, factor, mode='clip')
    means = np.vecmat(factors.column_means[layer, heads], rest)
    self._means[paths] *= factors.row_sums[layer, heads, None]
    self._means[paths] += means * self._scale()[paths, None]
    np.matmul(factor, rest, out=product)
    size = _frobenius(product)
    cancelled = size <= factors.resolution * factors.norms[layer, heads]
    self.below[paths] |= cancelled | factors.below[layer, heads]
    np.divide(product, np.where(size > 0, size, 1)[:, None, None], out=rest)
    if not every:
      self.rest[paths] = rest
    self.log10[paths] += residuals.log10(size)

  def whole(self):
    whole = self._buffers[0]
    np.multiply(self.rest, self._scale()[:, None, None], out=whole)
    whole += self._means[:, None, :]
    return whole

  def _scale(self):
    return 10**self.log10


class _PlainProducts:
  """Products of the matrices as they are; attributes as in `_Products`."""

  def __init__(self, matrices, dtype):
    self._matrices = matrices
    self._resolution = residuals.resolution(matrices.shape[-1], dtype)

  def start(self, num_paths):
    n = self._matrices.shape[-1]
    self._products = np.tile(np.eye(n), (num_paths, 1, 1))
    self.log10 = np.zeros(num_paths)

  def multiply(self, layer, heads):
    paths = np.flatnonzero(heads >= 0)
    factor = self._matrices[layer, heads[paths]]
    self._products[paths] = factor @ self._products[paths]

  def whole(self):
    return self._products

  @property
  def rest(self):
    return self._products - self._products.mean(1, keepdims=True)

  @property
  def below(self):
    limit = self._resolution * _frobenius(self._products)
    return _frobenius(self.rest) <= limit


def _frobenius(matrices):
  return residuals.unscaled_norm(matrices, 'frobenius')


# Below, sums of R R^T over the residuals R of sets of paths are three arrays:
# matrices ``[sets, n, n]`` scaled to trace 1, log10 of their traces (the summed
# squared Frobenius residuals), and whether these are below resolution.


def _first_layers(factors, num_layers, skip):
  """log10 of the mean square, and whether it is below resolution, by depth."""
  means = _empty_path(factors.num_tokens)
  depths = [means]
  for layer in range(num_layers):
    means = _continued(factors, layer, skip, means)
    depths.append(means)
  return _concatenate(*depths)[1:]


def _drawn_layers(factors, num_layers, skip):
  """The same, over all choices of k layers.

  S[k], the sum over choices among the layers so far, becomes S[k] + T(S[k - 1])
  with one more layer: those without it and those with it.
  """
  n = factors.num_tokens
  empty = _empty_path(n)
  none = np.zeros((1, n, n)), np.array([-np.inf]), np.array([False])
  sums = _concatenate(empty, *[none] * num_layers)
  for layer in range(num_layers):
    longer = _continued(factors, layer, skip, [x[:-1] for x in sums])
    sums = _concatenate(empty, _added([x[1:] for x in sums], longer))
  choices = [math.comb(num_layers, k) for k in range(num_layers + 1)]
  return sums[1] - [math.log10(x) for x in choices], sums[2]


def _concatenate(*sets):
  return [np.concatenate(x) for x in zip(*sets, strict=True)]


def _empty_path(n):
  return _rescaled((np.eye(n) - 1 / n)[None], np.zeros(1), np.array([False]))


def _continued(factors, layer, skip, sums):
  """Means over what a layer can do with each set of paths."""
  matrices, log10, below = sums
  heads = factors.matrices[layer]
  images = heads @ matrices[:, None] @ heads.swapaxes(-2, -1)
  total, choices = images.sum(1), len(heads)
  if skip:
    total, choices = total + matrices, choices + 1
  else:
    size = np.trace(total, axis1=1, axis2=2)
    least = factors.resolution**2 * (factors.norms[layer] ** 2).sum()
    below = below | (size <= least) | factors.below[layer].all()
  return _rescaled(total / choices, log10, below)


def _added(first, second):
  """Sums of two sets of paths together; the larger decides what is below."""
  (a, a_log10, a_below), (b, b_log10, b_below) = first, second
  peak = np.maximum(a_log10, b_log10)
  peak = np.where(np.isfinite(peak), peak, 0)
  a, b = (
    x * (10 ** (log10 - peak))[:, None, None]
    for x, log10 in ((a, a_log10), (b, b_log10))
  )
  return _rescaled(a + b, peak, np.where(b_log10 >= a_log10, b_below, a_below))


def _rescaled(matrices, log10, below):
  trace = np.trace(matrices, axis1=1, axis2=2)
  matrices = matrices / np.where(trace > 0, trace, 1)[:, None, None]
  return matrices, log10 + residuals.log10(trace), below


def _first_bad_layer(finite):
  """Of each example; the number of layers if there is none."""
  return np.where(finite.all(0), len(finite), finite.argmin(0))


def _check_attention(attention, mask):
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


def _check_heads(heads, attention):
  heads = np.asarray(heads)
  num_layers, _, num_heads = attention.shape[:3]
  if heads.ndim != 3 or heads.shape[-1] != num_layers or 0 in heads.shape:
    raise ValueError(
      f'heads must be [depths, num_paths, layers = {num_layers}], got'
      f' {heads.shape}.'
    )
  if not np.isin(heads, np.arange(ABSENT, num_heads)).all():
    raise ValueError(
      f'heads must be from {ABSENT} to {num_heads - 1}, the last head of'
      f' attention; got {heads.min()} to {heads.max()}.'
    )
  return heads


def _check_rows(attention, valid, dtype, row_sums):
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
    block = _valid_block(attention, valid, example)
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


def _valid_block(attention, valid, example):
  """``[layers, heads, n_valid, n_valid]``, float64."""
  block = attention[:, example]
  if not valid[example].all():
    index = np.flatnonzero(valid[example])
    block = block[..., index[:, None], index]
  return np.array(block, np.float64, order='C')


def _matrices(attention, valid, example):
  """The valid block, layers that are not finite set to 0, and which are not."""
  block = _valid_block(attention, valid, example)
  finite = np.isfinite(block).all((1, 2, 3))
  block[~finite] = 0
  return block, finite
