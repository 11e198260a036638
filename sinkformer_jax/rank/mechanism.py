"""Why one model keeps tokens apart better: experiments on captured logits.

Three questions about a softmax and a Sinkhorn model of the same task:

- Is it the normalizer, or the logits that training under it has found?
  `normalize` puts the logits of either through either: four attention stacks.
- Is it the column bias? What logits have in common along a column makes every
  query look at the same keys. Softmax keeps it, Sinkhorn at convergence is
  blind to it. `logit_variance` says how much of it there is,
  `remove_column_bias` takes it away, and `bias_dependence` measures what it
  still does to the weights after finitely many iterations.
- Is it the scale? Sharper attention decays less. `match_entropy` finds the
  temperatures at which two models attend equally sharply.

The stacks go to `paths.path_residuals`. All runs in float64.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses

import jax
import numpy as np
from scipy import optimize

from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import numerics
from sinkformer_jax.rank import residuals

# Logits are multiplied by at least and at most this to match an entropy.
_LARGEST_FACTOR = 2.0**20


def normalize(
  logits: np.ndarray,
  num_iters: int,
  mask: np.ndarray | None = None,
  closed: bool = True,
) -> np.ndarray:
  """Attention weights of captured logits under a chosen normalizer, in float64.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    num_iters: of Sinkhorn; 0 is softmax.
    mask: booleans ``[batch, n]``, True for valid tokens.
    closed: whether a last row update closes the rows. Without it the matrices
      are column-closed.

  Returns:
    ``[layers, batch, heads, n, n]``, NaN in matrices with a logit that is not
    finite. With talking heads these are the weights before the second mix.
  """
  logits, valid = _check(logits, mask)
  weights = np.empty(logits.shape)
  for layer, x in enumerate(logits):
    weights[layer] = _normalize_layer(x, num_iters, valid, closed)
  return weights


def _normalize_layer(logits, num_iters, valid, closed=True):
  pairs = _pairs(valid)
  logits = np.where(pairs, logits, 0).astype(np.float64)
  finite = np.isfinite(logits).all((-2, -1), keepdims=True)
  with numerics.fixed(x64=True):
    half_updates = 2 * num_iters + closed
    weights = np.asarray(
      _half_updates(np.where(finite, logits, 0), half_updates, pairs)
    )
  return np.where(finite, weights, np.nan)


_half_updates = jax.jit(normalizers.sinkhorn_half_updates, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class LogitVariance:
  """Variance of logits within their rows, and its two parts.

  Row-centred logits are the sum of a column bias ``b_j``, the mean of column j,
  and of what is left, whose rows and columns have mean 0. Both are orthogonal,
  so that their mean squares add up. (Row means have no effect on any weights.)

  Attributes:
    total: mean square of row-centred logits, ``[layers, batch, heads]``. Its
      root is the spread (standard deviation) of logits.
    column: mean square of the column bias, ``[layers, batch, heads]``.
    interaction: mean square of doubly centred logits,
      ``[layers, batch, heads]``.
    fraction: ``column / total``; NaN where `total` is rounding.
  """

  total: np.ndarray
  column: np.ndarray
  interaction: np.ndarray
  fraction: np.ndarray


def logit_variance(
  logits: np.ndarray, mask: np.ndarray | None = None
) -> LogitVariance:
  """How much logits vary within rows, and how much of it is column bias.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    See `LogitVariance`. NaN where a logit is not finite or no token is valid.
  """
  logits, valid = _check(logits, mask)
  shape = logits.shape[:3]
  total, column, interaction, size = np.full((4, *shape), np.nan)
  count = np.where(valid.any(1), valid.sum(1), np.nan)[:, None]
  for layer, x in enumerate(logits):
    bias, rest = _decompose(x, valid)
    size[layer] = _mean_square(np.where(_pairs(valid), x, 0), count)
    column[layer] = (bias**2).sum(-1) / count
    interaction[layer] = _mean_square(rest, count)
    total[layer] = _mean_square(
      np.where(_pairs(valid), rest + bias[..., None, :], 0), count
    )
  least = residuals.resolution(count, str(logits.dtype)) ** 2 * size
  resolved = np.where(total > least, total, np.nan)
  return LogitVariance(total, column, interaction, column / resolved)


def remove_column_bias(
  logits: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
  """Doubly centred logits: row and column means subtracted.

  Their softmax is that of logits whose column means alone are subtracted: row
  means have no effect. So it is with Sinkhorn, whatever the iterations.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    ``[layers, batch, heads, n, n]``, float64, 0 where not valid.
  """
  logits, valid = _check(logits, mask)
  return np.stack([_decompose(x, valid)[1] for x in logits])


def bias_dependence(
  logits: np.ndarray, num_iters: int, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """How much attention weights change when the column bias is removed.

  It goes to 0 with the iterations; for softmax (0 iterations) it is the whole
  effect of the bias.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    num_iters: of Sinkhorn; 0 is softmax.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    ``(largest, total_variation)``, each ``[layers, batch, heads]``: the largest
    change of a weight, and half the summed absolute change of a row, from 0 to
    1, mean over valid queries. NaN as in `logit_variance`.
  """
  logits, valid = _check(logits, mask)
  count = np.where(valid.any(1), valid.sum(1), np.nan)[:, None]
  largest, variation = np.full((2, *logits.shape[:3]), np.nan)
  for layer, x in enumerate(logits):
    centered = _decompose(x, valid)[1]
    change = np.abs(
      _normalize_layer(x, num_iters, valid)
      - _normalize_layer(centered, num_iters, valid)
    )
    largest[layer] = change.max((-2, -1)) + 0 * count
    variation[layer] = change.sum((-2, -1)) / 2 / count
  return largest, variation


def match_entropy(
  logits: np.ndarray,
  target: np.ndarray,
  num_iters: int,
  mask: np.ndarray | None = None,
  *,
  tolerance: float = 1e-9,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Temperatures at which attention has a given mean entropy, layer by layer.

  The mean is over examples and heads, of what `residuals.attention_entropy`
  gives: heads and examples of a layer keep their differences. Entropy falls as
  the logits grow, for softmax and for Sinkhorn at convergence.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    target: mean entropy of each layer, in nats, ``[layers]``.
    num_iters: of Sinkhorn; 0 is softmax.
    mask: booleans ``[batch, n]``, True for valid tokens.
    tolerance: of the entropy, in nats.
    progress: called with the number of layers done and that of all.

  Returns:
    ``(temperature, attention)``: what logits are divided by, ``[layers]``, and
    the weights they then give, ``[layers, batch, heads, n, n]``.

  Raises:
    errors.DataError: if no temperature gives the entropy, or a layer has none;
      names the layer.
  """
  logits, valid = _check(logits, mask)
  target = np.asarray(target, np.float64)
  if target.shape != logits.shape[:1]:
    raise ValueError(
      f'target must be [layers] = {logits.shape[:1]}, got {target.shape}.'
    )
  temperature, attention = np.empty(len(logits)), np.empty(logits.shape)
  for layer, x in enumerate(logits):

    def excess(log_factor, x=x, wanted=target[layer]):
      factor = np.exp(log_factor)
      weights = _normalize_layer(factor * x, num_iters, valid)
      return _mean_entropy(weights, valid) - wanted

    name = f'layer {layer + 1}'
    root = _falling_root(excess, name, target[layer], tolerance)
    temperature[layer] = np.exp(-root)
    attention[layer] = _normalize_layer(np.exp(root) * x, num_iters, valid)
    progress(layer + 1, len(logits))
  return temperature, attention


def experiments(
  softmax_logits: np.ndarray,
  sinkhorn_logits: np.ndarray,
  num_iters: int,
  mask: np.ndarray | None = None,
  failed: Callable[[str, errors.DataError], None] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
  """All attention stacks of two models, one at a time.

  Args:
    softmax_logits: of the softmax-trained model,
      ``[layers, batch, heads, n, n]``.
    sinkhorn_logits: of the Sinkhorn-trained model, the same.
    num_iters: of Sinkhorn.
    mask: booleans ``[batch, n]``, True for valid tokens.
    failed: is told which experiment cannot be done, and why.

  Yields:
    Name and weights. Names are such as ``softmax logits, sinkhorn`` (the
    normalizer), ``softmax logits, softmax, bias removed`` (the column bias) and
    ``softmax logits, softmax, sinkhorn's entropy`` (at matched entropy, that of
    the other model as trained, in each layer).

  Raises:
    errors.DataError: see `match_entropy`, unless `failed` is given.
  """
  logits = {'softmax': softmax_logits, 'sinkhorn': sinkhorn_logits}
  iterations = {'softmax': 0, 'sinkhorn': num_iters}
  entropies = {}
  for source, x in logits.items():
    for normalizer, count in iterations.items():
      attention = normalize(x, count, mask)
      if source == normalizer:
        entropies[source] = mean_entropy(attention, mask)
      yield f'{source} logits, {normalizer}', attention
    attention = normalize(remove_column_bias(x, mask), 0, mask)
    yield f'{source} logits, softmax, bias removed', attention
  for source, normalizer, entropy, removed in (
    ('softmax', 'softmax', 'sinkhorn', ''),
    ('sinkhorn', 'sinkhorn', 'softmax', ''),
    ('softmax', 'sinkhorn', 'softmax', ''),
    ('sinkhorn', 'softmax', 'sinkhorn', ''),
    ('softmax', 'softmax', 'softmax', ', bias removed'),
    ('sinkhorn', 'softmax', 'sinkhorn', ', bias removed'),
  ):
    x = logits[source]
    if removed:
      x = remove_column_bias(x, mask)
    name = f"{source} logits, {normalizer}{removed}, {entropy}'s entropy"
    try:
      _, attention = match_entropy(
        x, entropies[entropy], iterations[normalizer], mask
      )
    except errors.DataError as error:
      if failed is None:
        raise
      failed(name, error)
      continue
    yield name, attention


def logit_statistics(
  logits: np.ndarray, num_iters: int, mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
  """What the experiments change, as it is in one model.

  Args:
    logits: ``[layers, batch, heads, n, n]``.
    num_iters: of the model's Sinkhorn; 0 is softmax.
    mask: booleans ``[batch, n]``, True for valid tokens.

  Returns:
    ``column bias`` (its share in the variance of logits within rows), ``logit
    spread`` (standard deviation of logits within rows) and ``bias dependence``
    (total variation of the weights when the bias is removed), each
    ``[layers, batch, heads]``.
  """
  variance = logit_variance(logits, mask)
  return {
    'column bias': variance.fraction,
    'logit spread': np.sqrt(variance.total),
    'bias dependence': bias_dependence(logits, num_iters, mask)[1],
  }


def mean_entropy(
  attention: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
  """Entropy of each layer, mean over examples and heads, in nats: ``[layers]``.

  What `match_entropy` takes as its target.
  """
  attention, valid = _check(attention, mask)
  return np.array([_mean_entropy(x, valid) for x in attention])


def _mean_entropy(weights, valid):
  return residuals.attention_entropy(weights, valid[:, None, :]).mean()


def _falling_root(excess, name, target, tolerance):
  """Where a falling function of the log of a factor is 0."""
  at_one = excess(0.0)
  if not np.isfinite(at_one):
    raise errors.DataError(
      f'{name} has no entropy (logits that are not finite, an example without'
      f' valid tokens) or no target ({target}).'
    )
  if abs(at_one) <= tolerance:
    # Collapsed tokens attend uniformly, whatever the temperature.
    return 0.0
  # Away from 0 in steps that double, towards more or less entropy.
  sign, near, far = np.sign(at_one), 0.0, 0.0
  beyond, step = at_one, 0.125
  while np.sign(beyond) == sign:
    near, far = far, sign * step
    if step > np.log(_LARGEST_FACTOR):
      raise errors.DataError(
        f'{name}: no temperature gives a mean entropy of {target:.6g} nats. Its'
        f' logits as they are give {at_one + target:.6g}, times'
        f' {np.exp(near):.2g} they give {beyond + target:.6g}.'
      )
    beyond, step = excess(far), 2 * step
  root = optimize.brentq(excess, *sorted((near, far)), xtol=1e-14, rtol=1e-14)
  left = abs(excess(root))
  if not left <= tolerance:
    raise errors.DataError(
      f'{name}: mean entropy could not be brought nearer than {left:.1e} nats'
      f' to {target:.6g}; the tolerance is {tolerance:.1e}.'
    )
  return root


def _decompose(logits, valid):
  """``(column bias [..., n], doubly centred logits)`` of one layer."""
  pairs, count = _pairs(valid), np.maximum(valid.sum(1), 1)[:, None, None]
  x = np.where(pairs, logits, 0).astype(np.float64)
  with np.errstate(invalid='ignore'):
    x = np.where(pairs, x - x.sum(-1, keepdims=True) / count[..., None], 0)
    bias = x.sum(-2) / count
    return bias, np.where(pairs, x - bias[..., None, :], 0)


def _mean_square(x, count):
  """Over valid pairs; `x` is 0 elsewhere."""
  return (x.astype(np.float64) ** 2).sum((-2, -1)) / count**2


def _pairs(valid):
  return valid[:, None, :, None] & valid[:, None, None, :]


def _check(x, mask):
  x = np.asarray(x)
  if x.ndim != 5 or x.shape[-1] != x.shape[-2] or 0 in x.shape:
    raise ValueError(f'expected [layers, batch, heads, n, n], got {x.shape}.')
  shape = (x.shape[1], x.shape[-1])
  valid = np.ones(shape, bool) if mask is None else np.asarray(mask)
  if valid.shape != shape or valid.dtype != bool:
    raise ValueError(
      f'mask must be booleans [batch, n] = {shape}, got {valid.dtype}'
      f' {valid.shape}.'
    )
  return x, valid
