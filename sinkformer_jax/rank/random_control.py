"""Path products of unrelated random matrices: the control of trained ones.

Lapenna et al. 2026, Appendix G: random matrices, normalized by softmax or by
Sinkhorn and multiplied, with and without a random half of them replaced by the
identity. The ensemble is not stated there. Here logits are independent and
Gaussian, and their scale is swept, as the outcome depends on it.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from sinkformer_jax import numerics
from sinkformer_jax import sinkhorn
from sinkformer_jax.rank import blocks
from sinkformer_jax.rank import paths
from sinkformer_jax.rank import residuals

# Softmax; Sinkhorn, closed by a row update; and Sinkhorn as it should not be
# used, ending on a column update. Its rows are off 1, so that products of its
# matrices end on a floor which looks as if they kept their rank.
NORMALIZERS = ('softmax', 'sinkhorn', 'sinkhorn_column')


@dataclasses.dataclass(frozen=True)
class RandomControl:
  """One curve.

  Attributes:
    normalizer: one of `NORMALIZERS`.
    scale: standard deviation of the logits.
    half_identity: whether half of the factors are the identity.
    residuals: norms of shape ``[depths + 1, 1, num_draws]``.
    row_error: the largest ``|row sum - 1|`` of the matrices used.
    column_error: the largest ``|column sum - 1|``.
  """

  normalizer: str
  scale: float
  half_identity: bool
  residuals: residuals.Residuals
  row_error: float
  column_error: float


def random_attention(
  seed: int,
  normalizer: str,
  scale: float | Sequence[float],
  num_tokens: int = 50,
  num_layers: int = 24,
  num_draws: int = 100,
  num_iters: int = 50,
) -> np.ndarray:
  """Independent random attention matrices in float64.

  Args:
    seed: a non-negative int. All normalizers and scales see the same logits,
      but for the scale.
    normalizer: one of `NORMALIZERS`.
    scale: standard deviation of the Gaussian logits, or one for each layer.
    num_tokens: rows and columns.
    num_layers: matrices of a draw.
    num_draws: draws, in the place of heads.
    num_iters: Sinkhorn iterations, each a row and a column update.

  Returns:
    ``[num_layers, 1, num_draws, num_tokens, num_tokens]``.

  Raises:
    ValueError: for an unknown normalizer, or 'sinkhorn_column' without an
      iteration.
  """
  residuals.check_name(normalizer, NORMALIZERS, 'normalizer')
  if normalizer == 'sinkhorn_column' and num_iters < 1:
    raise ValueError(
      'num_iters must be at least 1 to end on a column update, got'
      f' {num_iters}.'
    )
  rng = np.random.default_rng(seed)
  shape = (num_layers, 1, num_draws, num_tokens, num_tokens)
  attention = np.empty(shape)
  scales = np.broadcast_to(scale, num_layers)
  for layer in range(num_layers):
    logits = scales[layer] * rng.standard_normal(shape[1:])
    attention[layer] = _normalize(logits, normalizer, num_iters)
  return attention


def _normalize(logits, normalizer, num_iters):
  with numerics.fixed(x64=True):
    if normalizer == 'softmax':
      return np.asarray(sinkhorn.softmax(logits))
    if normalizer == 'sinkhorn':
      return np.asarray(_sinkhorn(logits, num_iters))
    # One iteration less is closed by the row update of the last one.
    weights = np.asarray(_sinkhorn(logits, num_iters - 1))
    return weights / weights.sum(-2, keepdims=True)


_sinkhorn = jax.jit(sinkhorn.sinkhorn, static_argnums=1)


def half_identity_paths(
  seed: int, num_layers: int, num_draws: int
) -> np.ndarray:
  """Paths of which each takes its own head, and half their layers none.

  Args:
    seed: a non-negative int.
    num_layers: depths.
    num_draws: heads, and paths of each depth.

  Returns:
    Paths as `paths.sample_paths` gives them. In a path of depth k a random
    half of the factors, ``k // 2``, is the identity.
  """
  rng = np.random.default_rng(seed)
  heads = own_paths(num_layers, num_draws)
  order = rng.random(heads.shape)
  order[heads == paths.ABSENT] = np.inf
  depths = np.arange(1, num_layers + 1)[:, None, None]
  is_identity = order.argsort(-1).argsort(-1) < depths // 2
  return np.where(is_identity, paths.SKIP, heads)


def own_paths(num_layers: int, num_draws: int) -> np.ndarray:
  """Paths of which each takes its own head in all its layers."""
  layer = np.arange(num_layers)
  draw = np.arange(num_draws)[:, None]
  return np.where(layer <= layer[:, None, None], draw, paths.ABSENT)


def sweep(
  seed: int,
  scales: Sequence[float] = (0.5, 1, 2, 3, 5),
  normalizers: Sequence[str] = ('softmax', 'sinkhorn'),
  norms: Sequence[str] = residuals.NORMS,
  num_tokens: int = 50,
  num_layers: int = 24,
  num_draws: int = 100,
  num_iters: int = 50,
) -> Iterator[RandomControl]:
  """The control at several scales, without and with half identities.

  All curves are made of the same Gaussian numbers and the same choices of
  identities. 'sinkhorn_column' is multiplied plainly (see
  `paths.path_residuals`), as its rows are not closed.

  Args:
    seed: a non-negative int.
    scales: standard deviations of the logits.
    normalizers: some of `NORMALIZERS`.
    norms: some of `residuals.NORMS`.
    num_tokens: see `random_attention`.
    num_layers: the same.
    num_draws: draws of each depth.
    num_iters: Sinkhorn iterations.

  Yields:
    A `RandomControl` for each scale, normalizer, and without and with half of
    the factors replaced by the identity.
  """
  choices = {
    False: own_paths(num_layers, num_draws),
    True: half_identity_paths(seed + 1, num_layers, num_draws),
  }
  for scale in scales:
    for normalizer in normalizers:
      attention = random_attention(
        seed, normalizer, scale, num_tokens, num_layers, num_draws, num_iters
      )
      row_error, column_error = blocks.marginal_errors(attention)
      for half_identity, heads in choices.items():
        norms_of_products = paths.path_residuals(
          attention, heads, norms=norms, plain=normalizer == 'sinkhorn_column'
        )
        yield RandomControl(
          normalizer=normalizer,
          scale=scale,
          half_identity=half_identity,
          residuals=norms_of_products,
          row_error=float(row_error.max()),
          column_error=float(column_error.max()),
        )
