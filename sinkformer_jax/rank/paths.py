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

import numpy as np

from sinkformer_jax.rank import blocks
from sinkformer_jax.rank import residuals

# Which layers a path of depth k takes: the first k, or any k.
LAYERS = ('first', 'drawn')

# What a path does in a layer where it takes no head.
SKIP = -1  # Takes the skip connection.
ABSENT = -2  # Leaves the layer out: it is beyond its depth, or was not drawn.

# Matrices worked on at a time should stay in the cache.
_CHUNK_BYTES = 2**19


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
  attention, valid = blocks.check_attention(attention, mask)
  heads = _check_heads(heads, attention)
  for kind in norms:
    residuals.check_name(kind, residuals.NORMS, 'norms')
  dtype = residuals.name_dtype(attention, dtype)
  if not plain:
    blocks.check_rows(attention, valid, dtype, row_sums)
  few = valid.sum(1) < 2
  rest, whole, below, finite = _sizes(
    attention,
    valid,
    heads,
    norms,
    dtype,
    plain,
    chunk_size,
    num_threads,
    progress,
  )

  # A path is invalid if its last layer is, or comes after one that is.
  invalid = np.broadcast_to(few[:, None], below.shape).copy()
  last = np.where(heads == ABSENT, -1, np.arange(len(attention))).max(-1)
  invalid[1:] |= last[:, None] >= blocks.first_bad_layer(finite)[:, None]
  return residuals.Residuals(
    log10={k: np.where(invalid, np.nan, v) for k, v in rest.items()},
    log10_whole={k: np.where(invalid, np.nan, v) for k, v in whole.items()},
    below_resolution=below & ~invalid,
    invalid=invalid,
    problems=residuals.describe_problems(finite, few, first=1),
    dtype=dtype,
  )


def _sizes(
  attention,
  valid,
  heads,
  norms,
  dtype,
  plain,
  chunk_size,
  num_threads,
  progress,
):
  """log10 of norms of residuals and wholes, what is below, finite layers."""
  num_layers, batch, _, n, _ = attention.shape
  depths, num_paths, _ = heads.shape
  chunk_size = chunk_size or max(1, _CHUNK_BYTES // (8 * n * n))

  shape = (depths + 1, batch, num_paths)
  rest = {kind: np.zeros(shape) for kind in norms}
  whole = {kind: np.zeros(shape) for kind in norms}
  below = np.zeros(shape, bool)
  finite = np.ones((num_layers, batch), bool)

  def measure(example):
    matrices, finite[:, example] = blocks.finite_blocks(
      attention, valid, example
    )
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

  blocks.for_each(
    np.flatnonzero(valid.sum(1) >= 2), measure, num_threads, progress
  )
  return rest, whole, below, finite


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
    self._factors = blocks.Factors(matrices, dtype)

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
    size = blocks.frobenius(product)
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
    limit = self._resolution * blocks.frobenius(self._products)
    return blocks.frobenius(self.rest) <= limit


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
