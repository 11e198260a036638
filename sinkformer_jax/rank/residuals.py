"""How far token representations are from all being the same.

``res(X) = J X`` with ``J = I - 11^T/n`` is what remains of ``X`` when its mean
token is removed (Dong et al. 2021). Everything here takes arrays, NumPy or JAX
of any float dtype, computes in float64 NumPy, and looks at valid tokens only:
what padded tokens hold, NaN included, has no effect.

A number that does not exist is NaN, never 0 or 1: each function says when.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array

# Spectral: Lapenna et al. 2026. Composite, ``sqrt(max column sum * max row
# sum)`` of absolute values: Dong et al. 2021, their ``||.||_{1,inf}``.
NORMS = ('spectral', 'frobenius', 'composite')

# Of a residual norm: as it is, divided by the norm of what it is the residual
# of, divided by the residual norm of layer 0.
SCALINGS = ('absolute', 'relative', 'initial')

# Attention rows further off 1 than this are not rounding, whatever the dtype.
MAX_ROW_ERROR = 1e-3

# Of a squared spectral norm, relative.
_SPECTRAL_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class Residuals:
  """Residual norms; the first axis of every array is the layer or path depth.

  Index 0 is what there is before the first layer.

  Attributes:
    log10: for each norm, log10 of the residual norm, ``[depths, ...]``. -inf
      stands for an exact 0 (which is below resolution), NaN where `invalid`.
    log10_whole: for each norm, log10 of the norm of the whole that it is the
      residual of; empty where 'relative' has no meaning.
    below_resolution: booleans ``[depths, ...]``: too small for `dtype` to tell
      from rounding, not to be read as decay.
    invalid: booleans ``[depths, ...]``: could not be computed.
    problems: what is invalid, in words.
    dtype: in which the input was computed. (All here is float64.)
  """

  log10: dict[str, np.ndarray]
  log10_whole: dict[str, np.ndarray]
  below_resolution: np.ndarray
  invalid: np.ndarray
  problems: tuple[str, ...]
  dtype: str

  def scaled(
    self, norm: str, scaling: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One norm in one scaling.

    Args:
      norm: one of `NORMS` that was computed.
      scaling: one of `SCALINGS`.

    Returns:
      ``(log10, below_resolution, invalid)``, each ``[depths, ...]``. The flags
      count in the divisor too: one that is 0 makes a ratio invalid, one that
      is below resolution makes the ratio so.
    """
    check_name(scaling, SCALINGS, 'scaling')
    check_name(norm, tuple(self.log10), 'norm')
    values = self.log10[norm]
    below, invalid = self.below_resolution, self.invalid
    if scaling == 'absolute':
      return values, below, invalid
    if scaling == 'relative':
      check_name(norm, tuple(self.log10_whole), "norm of scaling 'relative'")
      divisor = self.log10_whole[norm]
    else:
      divisor, below = values[:1], below | below[:1]
    invalid = invalid | ~np.isfinite(divisor)
    with np.errstate(invalid='ignore'):
      values = np.where(invalid, np.nan, values - divisor)
    return values, below & ~invalid, invalid


def summarize(
  residuals: Residuals, norm: str = 'spectral', scaling: str = 'absolute'
) -> dict[str, np.ndarray]:
  """What a curve shows: statistics over examples, paths or draws, by depth.

  Values below resolution and invalid ones are left out of all statistics and
  counted. Where they are many, the rest is a selection: show the counts.

  Args:
    residuals: arrays of shape ``[depths, ...]``.
    norm: one of `NORMS` that was computed.
    scaling: one of `SCALINGS`.

  Returns:
    Arrays ``[depths]``: ``mean`` and ``std`` (of these values, no estimate) of
    log10 of the residual, the headline; ``log10_of_mean`` and ``log10_of_rms``
    of the residual, ruled by the largest values; ``count`` of values used,
    ``below_resolution`` and ``invalid``, those left out. Statistics of no
    value are NaN, with a count of 0.
  """
  values, below, invalid = (
    x.reshape(len(x), -1) for x in residuals.scaled(norm, scaling)
  )
  used = ~(below | invalid)
  count = used.sum(1)
  some = np.where(count, count, np.nan)
  values = np.where(used, values, 0)
  mean = values.sum(1) / some
  deviation = np.where(used, values - mean[:, None], 0)
  return {
    'mean': mean,
    'std': np.sqrt((deviation**2).sum(1) / some),
    'log10_of_mean': _log10_of_mean(values, used, some),
    'log10_of_rms': _log10_of_mean(2 * values, used, some) / 2,
    'count': count,
    'below_resolution': below.sum(1),
    'invalid': invalid.sum(1),
  }


def _log10_of_mean(values, used, count):
  """Of ``10 ** values``, which may be too small or large for float64."""
  values = np.where(used, values, -np.inf)
  peak = values.max(1, initial=-np.inf)
  peak = np.where(np.isfinite(peak), peak, 0)
  return peak + np.log10((10 ** (values - peak[:, None])).sum(1) / count)


def residual_norms(
  x: Array,
  mask: Array | None = None,
  column_mask: Array | None = None,
  norms: Sequence[str] = NORMS,
  dtype: str | None = None,
) -> Residuals:
  """Norms of ``J X`` beside norms of ``X``, layer by layer.

  Args:
    x: ``[layers, ..., n, width]``: hidden states, or matrices ``n`` by ``n``.
    mask: booleans that broadcast to ``[..., n]``, True for valid tokens.
    column_mask: booleans that broadcast to ``[..., width]``; for matrices
      ``n`` by ``n`` the same as `mask`.
    norms: some of `NORMS`.
    dtype: in which `x` was computed; that of `x` if not given.

  Returns:
    Residual norms ``[layers, ...]``. Below resolution is a residual of at most
    ``10 n eps ||X||`` (Frobenius, n valid tokens). Invalid is a layer with a
    value that is not finite and, as they came out of it, all layers after it;
    and everything with fewer than 2 valid tokens.

  Raises:
    ValueError: for shapes or names that do not fit.
  """
  x, dtype = np.asarray(x), name_dtype(x, dtype)
  if x.ndim < 3:
    raise ValueError(f'x must be [layers, ..., n, width], got {x.shape}.')
  for kind in norms:
    check_name(kind, NORMS, 'norms')
  small = {kind: [] for kind in norms}
  large = {kind: [] for kind in norms}
  below, finite = [], []
  for layer in x:  # One at a time, so that no copy of the whole is needed.
    whole, count = _valid(layer, mask, column_mask)
    rest = residual(layer, mask, column_mask)
    for kind in norms:
      small[kind].append(norm(rest, kind))
      large[kind].append(norm(whole, kind))
    limit = resolution(count, dtype) * norm(whole, 'frobenius')
    below.append(norm(rest, 'frobenius') <= limit)
    finite.append(np.isfinite(rest).all((-2, -1)))
  finite, few = np.stack(finite), count < 2
  invalid = ~np.logical_and.accumulate(finite) | few
  return Residuals(
    log10={k: np.where(invalid, np.nan, log10(v)) for k, v in small.items()},
    log10_whole={
      k: np.where(invalid, np.nan, log10(v)) for k, v in large.items()
    },
    below_resolution=np.stack(below) & ~invalid,
    invalid=invalid,
    problems=describe_problems(finite, few),
    dtype=dtype,
  )


def describe_problems(
  finite: np.ndarray, few: np.ndarray, first: int = 0
) -> tuple[str, ...]:
  """Names what makes results invalid.

  Args:
    finite: ``[layers, ...]``, whether all values of a layer are finite.
    few: ``[...]``, whether there are fewer than 2 valid tokens.
    first: the number of the first layer.

  Returns:
    One line for each example with a problem.
  """
  lines = []
  for index in np.ndindex(finite.shape[1:]):
    name = f'example {", ".join(map(str, index))}'
    if few[index]:
      lines.append(f'{name}: fewer than 2 valid tokens')
    elif not finite[(slice(None), *index)].all():
      layer = first + int(finite[(slice(None), *index)].argmin())
      lines.append(f'{name}: layer {layer} is not finite; invalid from there')
  return tuple(lines)


def name_dtype(x: Array, dtype: str | None) -> str:
  """The float dtype an array was computed in, unless one is given."""
  name = str(np.dtype(x.dtype if dtype is None else dtype))
  return name if jnp.issubdtype(name, jnp.floating) else 'float64'


def resolution(num_tokens: np.ndarray | int, dtype: str) -> np.ndarray | float:
  """``10 n eps``: relative to its whole, a smaller residual is rounding."""
  return 10 * num_tokens * float(jnp.finfo(dtype).eps)


def log10(x: np.ndarray) -> np.ndarray:
  """log10, of 0 too (-inf)."""
  with np.errstate(divide='ignore'):
    return np.log10(x)


def residual(
  x: Array, mask: Array | None = None, column_mask: Array | None = None
) -> np.ndarray:
  """``J X``, the mean over valid tokens subtracted; 0 for the others.

  The mean is the best common token in the spectral and the Frobenius norm. For
  the composite norm it is what the code of Dong et al. uses.

  Args:
    x: ``[..., n, width]``.
    mask: booleans that broadcast to ``[..., n]``, True for valid tokens.
    column_mask: booleans that broadcast to ``[..., width]``.

  Returns:
    ``[..., n, width]``, float64. NaN where a valid entry is not finite.
  """
  x, count = _valid(x, mask, column_mask)
  with np.errstate(invalid='ignore', over='ignore'):
    mean = x.sum(-2, keepdims=True) / np.maximum(count, 1)[..., None, None]
    x -= mean
  return x if mask is None else np.where(np.asarray(mask)[..., None], x, 0)


def _valid(x, mask, column_mask):
  """A float64 copy, 0 where not valid, and the number of valid tokens."""
  x = np.array(x, np.float64)
  count = np.full(x.shape[:-2], x.shape[-2])
  if column_mask is not None:
    keep = _booleans(column_mask, (*x.shape[:-2], x.shape[-1]), 'column_mask')
    x = np.where(keep[..., None, :], x, 0)
  if mask is not None:
    keep = _booleans(mask, x.shape[:-1], 'mask')
    x, count = np.where(keep[..., None], x, 0), keep.sum(-1)
  return x, count


def _booleans(mask, shape, name):
  mask = np.asarray(mask)
  if mask.dtype != bool:
    raise ValueError(
      f'{name} must be booleans (True: valid), got {mask.dtype}.'
    )
  try:
    return np.broadcast_to(mask, shape)
  except ValueError:
    raise ValueError(
      f'{name} of shape {mask.shape} does not fit {shape}.'
    ) from None


def norm(x: Array, kind: str = 'spectral') -> np.ndarray:
  """Norm of each matrix, accurate to 1e-12 whatever the size of its values.

  Args:
    x: ``[..., n, width]``, invalid tokens 0.
    kind: one of `NORMS`.

  Returns:
    ``[...]``; NaN where a value is not finite.
  """
  check_name(kind, NORMS, 'norm')
  x = np.asarray(x, np.float64)
  shape, x = x.shape[:-2], x.reshape(-1, *x.shape[-2:])
  # Squares of very small or large values would leave float64.
  peak = np.abs(x).max((1, 2), initial=0)
  usable = np.isfinite(peak) & (peak > 0)
  x = np.where(usable[:, None, None], x, 0)
  x /= np.where(usable, peak, 1)[:, None, None]
  peak = np.where(np.isfinite(peak), peak, np.nan)
  return (peak * unscaled_norm(x, kind)).reshape(shape)


def unscaled_norm(x: np.ndarray, kind: str) -> np.ndarray:
  """`norm` of ``[..., n, width]`` finite values whose squares are normal."""
  if kind == 'frobenius':
    return np.sqrt(_squared_sum(x))
  if kind == 'composite':
    x = np.abs(x)
    return np.sqrt(x.sum(-2).max(-1) * x.sum(-1).max(-1))
  return _spectral_norm(x)


def _squared_sum(x):
  flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
  return np.vecdot(flat, flat)


def _spectral_norm(x, num_steps=8):
  """Largest singular values, by power iteration where it provably ends.

  With v a unit vector, rho = ||X v||^2 and G = X^T X, no squared singular value
  but the first exceeds beta = ||X||_F^2 - rho. If beta < rho, Temple's
  inequality bounds the first: rho <= sigma^2 <= rho + r^2 / (rho - beta) with
  r = ||G v - rho v||. Products of attention matrices are nearly of rank one, so
  that a few steps close the gap; the others get all their singular values.
  """
  total = _squared_sum(x)
  squared = np.where(total > 0, np.nan, 0)
  # The longest row is a good start: exact for rank one.
  v = x[np.arange(len(x)), np.vecdot(x, x).argmax(1)]
  for _ in range(num_steps):
    v = v / np.where(total > 0, np.sqrt(np.vecdot(v, v)), 1)[:, None]
    left = np.matvec(x, v)
    rho = np.vecdot(left, left)
    right = np.vecmat(left, x)
    r = right - rho[:, None] * v
    gap = rho - (total - rho)
    done = np.vecdot(r, r) <= _SPECTRAL_TOLERANCE * rho * gap
    # The first time only, so that a result does not depend on the others.
    squared = np.where(np.isnan(squared) & done & (gap > 0), rho, squared)
    v = right
    if not np.isnan(squared).any():
      break
  values = np.sqrt(squared)
  rest = np.isnan(squared)
  if rest.any():
    values[rest] = np.linalg.svd(x[rest], compute_uv=False)[:, 0]
  return values


def singular_values(x: Array, mask: Array | None = None) -> np.ndarray:
  """Singular values in descending order, ``[..., min(n, width)]``.

  Args:
    x: ``[..., n, width]``.
    mask: booleans that broadcast to ``[..., n]``, True for valid tokens.

  Returns:
    Float64; NaN for a matrix with a value that is not finite. With padding,
    the last ones are 0.
  """
  x, _ = _valid(x, mask, None)
  finite = np.isfinite(x).all((-2, -1))
  x = np.where(finite[..., None, None], x, 0)
  return np.where(finite[..., None], np.linalg.svd(x, compute_uv=False), np.nan)


def effective_rank(values: np.ndarray) -> np.ndarray:
  """``exp`` of the entropy of the normalized singular values.

  Roy and Vetterli 2007, "The effective rank". It needs no threshold.

  Args:
    values: singular values ``[..., k]``.

  Returns:
    ``[...]``, from 1 to k; NaN for a matrix that is 0 or not finite.
  """
  total = values.sum(-1, keepdims=True)
  return np.exp(_entropy(values / np.where(total > 0, total, np.nan)))


def stable_rank(values: np.ndarray) -> np.ndarray:
  """Squared Frobenius norm over squared spectral norm.

  Args:
    values: singular values ``[..., k]``.

  Returns:
    ``[...]``, from 1 to k; NaN for a matrix that is 0 or not finite.
  """
  largest = values.max(-1, keepdims=True)
  shares = values / np.where(largest > 0, largest, np.nan)
  return (shares**2).sum(-1)


def _entropy(p):
  return -(p * np.log(np.where(p == 0, 1, p))).sum(-1)


def mean_cosine_similarity(x: Array, mask: Array | None = None) -> np.ndarray:
  """Mean cosine of the angle between two different valid tokens.

  Args:
    x: ``[..., n, width]``.
    mask: booleans that broadcast to ``[..., n]``, True for valid tokens.

  Returns:
    ``[...]``; NaN where a valid token is the zero vector, which has no
    direction, or not finite, or where fewer than 2 tokens are valid.
  """
  x, count = _valid(x, mask, None)
  peak = np.abs(x).max(-1, keepdims=True)
  with np.errstate(invalid='ignore', divide='ignore'):
    x = x / peak
    x /= np.sqrt(np.vecdot(x, x))[..., None]
    if mask is not None:
      x = np.where(np.asarray(mask)[..., None], x, 0)
    total = x.sum(-2)
    pairs = count * (count - 1.0)
    return (np.vecdot(total, total) - count) / np.where(pairs, pairs, np.nan)


def attention_entropy(
  attention: Array, mask: Array | None = None, relative: bool = False
) -> np.ndarray:
  """Entropy of attention rows, mean over valid queries, in nats.

  Args:
    attention: ``[..., n, n]``.
    mask: booleans that broadcast to ``[..., n]``, True for valid tokens.
    relative: divide by the entropy of uniform attention, ``log n_valid``.

  Returns:
    ``[...]``; NaN where the row of a valid query is no distribution (a
    negative or non-finite weight, a sum off 1 by more than 1e-3), where no
    token is valid, and, if relative, where only one is.
  """
  p, count = _valid(attention, mask, mask)
  rows = np.ones(p.shape[:-1], bool) if mask is None else np.asarray(mask)
  with np.errstate(invalid='ignore'):
    is_distribution = (p >= 0).all(-1) & (
      np.abs(p.sum(-1) - 1) <= MAX_ROW_ERROR
    )
    entropy = np.where(is_distribution, _entropy(np.abs(p)), np.nan)
    entropy = np.where(rows, entropy, 0).sum(-1)
    if relative:
      count = count * np.log(np.maximum(count, 1))
    return entropy / np.where(count > 0, count, np.nan)


def of_examples(residuals: Residuals, examples: np.ndarray | int) -> Residuals:
  """Residuals of some examples, the second axis; of one number, without it."""

  def chosen(x):
    if isinstance(x, dict):
      return {k: v[:, examples] for k, v in x.items()}
    return x[:, examples]

  fields = ('log10', 'log10_whole', 'below_resolution', 'invalid')
  own = {x: chosen(getattr(residuals, x)) for x in fields}
  return dataclasses.replace(residuals, **own)


def concatenate(parts: Sequence[Residuals]) -> Residuals:
  """Residuals of chunks of examples, the second axis, as one."""

  def joined(field):
    values = [getattr(x, field) for x in parts]
    if isinstance(values[0], dict):
      return {k: np.concatenate([x[k] for x in values], 1) for k in values[0]}
    return np.concatenate(values, 1)

  fields = ('log10', 'log10_whole', 'below_resolution', 'invalid')
  problems = tuple(x for part in parts for x in part.problems)
  return Residuals(
    **{x: joined(x) for x in fields}, problems=problems, dtype=parts[0].dtype
  )


def check_name(name, known, what):
  if name not in known:
    raise ValueError(f'{what} must be one of {known}, got {name!r}.')
