"""The root mean square of the residuals of all paths, without sampling them."""

import math

import numpy as np

from sinkformer_jax.rank import blocks
from sinkformer_jax.rank import paths
from sinkformer_jax.rank import residuals


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
  residuals.check_name(layers, paths.LAYERS, 'layers')
  attention, valid = blocks.check_attention(attention, mask)
  dtype = residuals.name_dtype(attention, dtype)
  blocks.check_rows(attention, valid, dtype, row_sums)
  num_layers, batch = attention.shape[:2]
  log10 = np.zeros((num_layers + 1, batch))
  below = np.zeros(log10.shape, bool)
  finite = np.ones((num_layers, batch), bool)
  few = valid.sum(1) < 2
  mean_square = _first_layers if layers == 'first' else _drawn_layers

  def measure(example):
    matrices, finite[:, example] = blocks.finite_blocks(
      attention, valid, example
    )
    factors = blocks.Factors(matrices, dtype)
    squares, below[:, example] = mean_square(factors, num_layers, skip)
    log10[:, example] = squares / 2

  blocks.for_each(np.flatnonzero(~few), measure)

  bad = blocks.first_bad_layer(finite)
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
