"""What theory says about rank decay, beside the exact residual of one layer.

One attention layer without biases is ``SA(X) = P(X) X W_V``, with the logits
``A = X W_QK X^T / sqrt(d_qk)``. Here ``X = 1 m^T + R`` with ``R = res(X)``, and
``beta = ||W_QK||_2 ||W_V||_2``. The logits are then a column bias
``b = R W_QK^T m / sqrt(d_qk)``, an interaction ``E = R W_QK R^T / sqrt(d_qk)``
and what is constant over a row, which no normalizer sees.

  size of E     residual of SA(X)
  small         J E (diag(p) - p p^T) R W_V + O(||E||^2); ``p = softmax(b)`` for
                softmax, ``p = 1 / n`` for Sinkhorn, where it is ``E R W_V / n``
  any           ``||P - 1 p^T||_F <= ||E||_F / 2``, see `global_bound`

So the first order of Sinkhorn does not depend on m, and with ``m = 0`` the two
normalizers agree; to second order even, where P differs by what is equal for
all queries. Norms are spectral unless said otherwise.

Everything is NumPy in float64.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from sinkformer_jax.rank import collapse

# Dong et al. (2021), lemma on perturbed logits. exp(D) = 1 + 2 D at 1.25643.
LEMMA_LIMIT = 1.256

# Heads of a layer and layers, of Dong et al. (2021), for path lengths.
ARCHITECTURES = {
  'DistilBERT': (12, 6),
  'MobileBERT': (4, 12),
  'BERT-base, ViT-B': (12, 12),
  'BERT-large, ViT-L': (16, 24),
  'ViT-H': (16, 32),
  'T5-3B': (32, 24),
  'T5-11B': (128, 24),
  'GPT-3': (96, 96),
  'DeiT-T': (3, 12),
  'Lapenna et al.': (4, 24),
}


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer of one head, and the tokens it is given.

  Attributes:
    x: tokens, ``[n, width]``.
    w_qk: ``[width, width]``, query times transposed key weights.
    w_v: ``[width, value_width]``.
    d_qk: width of queries and keys.
  """

  x: np.ndarray
  w_qk: np.ndarray
  w_v: np.ndarray
  d_qk: int

  def __post_init__(self):
    for name in ('x', 'w_qk', 'w_v'):
      array = np.asarray(getattr(self, name), np.float64)
      object.__setattr__(self, name, array)

  @property
  def residual(self) -> np.ndarray:
    """``R = res(X)``, ``[n, width]``."""
    return _center(self.x)

  @property
  def bias(self) -> np.ndarray:
    """``b``, ``[n]``."""
    return self.residual @ (self.x.mean(0) @ self.w_qk) / math.sqrt(self.d_qk)

  @property
  def interaction(self) -> np.ndarray:
    """``E``, ``[n, n]``."""
    product = self.residual @ self.w_qk @ self.residual.T
    return product / math.sqrt(self.d_qk)

  @property
  def beta(self) -> float:
    """``||W_QK|| ||W_V||``."""
    return float(np.linalg.norm(self.w_qk, 2) * np.linalg.norm(self.w_v, 2))

  @property
  def size(self) -> float:
    """``||res(X)||``."""
    return float(np.linalg.norm(self.residual, 2))


def random_layer(
  seed: int, num_tokens: int, width: int, mean_size: float = 0.0
) -> Layer:
  """A layer of Gaussian weights of variance ``1 / width``, and its tokens.

  Args:
    seed: a non-negative int.
    num_tokens: how many.
    width: of tokens, queries and values.
    mean_size: standard deviation of the numbers of the mean token.
  """
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((num_tokens, width))
  x -= x.mean(0)
  x += mean_size * rng.standard_normal(width)
  w_qk, w_v = (
    rng.standard_normal((width, width)) / math.sqrt(width) for _ in range(2)
  )
  return Layer(x, w_qk, w_v, width)


def base_weights(layer: Layer) -> np.ndarray:
  """``p = softmax(b)``, ``[n]``: softmax of what the mean token brings in."""
  p = np.exp(layer.bias - layer.bias.max())
  return p / p.sum()


def deviation(layer: Layer, num_iters: int) -> np.ndarray:
  """``P - 1 p^T``, ``[n, n]``, to rounding however small it is.

  ``p`` is `base_weights` for softmax (`num_iters` 0), and ``1 / n`` for
  Sinkhorn, whose iterations are closed by a row update.
  """
  return collapse.attention_deviation(
    layer.bias, layer.interaction, np.ones(()), num_iters
  )[1]


def attention_residual(layer: Layer, num_iters: int) -> np.ndarray:
  """``res(SA(X))``, ``[n, value_width]``, as exact as `deviation`."""
  return _center(deviation(layer, num_iters) @ layer.residual @ layer.w_v)


def first_order_residual(
  layer: Layer, p: np.ndarray | None = None
) -> np.ndarray:
  """``res(SA(X))`` to first order in E, ``[n, value_width]``.

  Args:
    layer: the layer.
    p: `base_weights` for softmax; None is ``1 / n``, for Sinkhorn, and for
      softmax without a mean token.
  """
  return layer.interaction @ _covariance(layer, p) @ layer.residual @ layer.w_v


def first_order_bound(layer: Layer, p: np.ndarray | None = None) -> float:
  """Bound of the norm of `first_order_residual`, and of nothing beyond it.

  ``||diag(p) - p p^T|| beta / sqrt(d_qk) ||res X||^3``, which is
  ``beta / (n sqrt(d_qk)) ||res X||^3`` for ``p = 1 / n``.
  """
  slope = np.linalg.norm(_covariance(layer, p), 2)
  return float(slope * layer.beta / math.sqrt(layer.d_qk) * layer.size**3)


def global_bound(layer: Layer) -> float:
  """Bound of ``||res(SA(X))||`` for any logits and any mean token.

  ``beta / (2 sqrt(d_qk)) ||res X||_F ||res X||^2``, for softmax and for
  Sinkhorn at convergence. Both normalizers are gradients of
  ``max_P <A, P> + entropy(P)``, over row-stochastic or doubly stochastic P.
  The Hessian for softmax is ``diag(P_i) - P_i P_i^T`` for each row, at most
  1/2 (Nair 2025), and more constraints on P only make it smaller. So
  ``||P - 1 p^T||_F <= ||E||_F / 2``. (Sinkhorn at convergence takes b out.)
  """
  frobenius = np.linalg.norm(layer.residual)
  scale = layer.beta / (2 * math.sqrt(layer.d_qk))
  return float(scale * frobenius * layer.size**2)


def paper_bound(layer: Layer, factor: float = 1.0) -> float:
  """``factor beta n^3 / d_qk ||res X||^3`` (Lapenna et al. 2026).

  Stated for logits much smaller than 1; `factor` is their lambda, in (0, 1].
  That beta is the product of the two norms is our reading.
  """
  n = len(layer.x)
  return factor * layer.beta * n**3 / layer.d_qk * layer.size**3


def scale_sweep(
  layer: Layer, logit_norms: Sequence[float], num_iters: int = 50
) -> list[dict[str, float]]:
  """Residual of one layer beside its bounds, for tokens of several sizes.

  Args:
    layer: its tokens are scaled, mean token included, so that ``||A||`` takes
      each of `logit_norms`.
    logit_norms: spectral norms of the logits.
    num_iters: Sinkhorn iterations.

  Returns:
    A row for each norm: ``logit_norm``; ``token_scale``, which the tokens were
    multiplied by; ``input``, the norm of res(X); ``softmax`` and ``sinkhorn``,
    the norms of res(SA(X)); ``sinkhorn_column_error``; the same to first
    order, ``first_order_softmax`` and ``first_order_sinkhorn``, and what
    bounds these, ``bound_softmax`` and ``bound_sinkhorn``; ``bound_global``;
    and ``bound_paper``.

  Raises:
    ValueError: if the logits are 0.
  """
  logits = layer.x @ layer.w_qk @ layer.x.T / math.sqrt(layer.d_qk)
  unscaled = np.linalg.norm(logits, 2)
  if unscaled == 0:
    raise ValueError('The logits are 0: no scale makes them larger.')
  return [
    _sweep_row(layer, logit_norm, math.sqrt(logit_norm / unscaled), num_iters)
    for logit_norm in logit_norms
  ]


def _sweep_row(layer, logit_norm, scale, num_iters):
  layer = dataclasses.replace(layer, x=scale * layer.x)
  p = base_weights(layer)
  residuals = {
    'softmax': attention_residual(layer, 0),
    'sinkhorn': attention_residual(layer, num_iters),
    'first_order_softmax': first_order_residual(layer, p),
    'first_order_sinkhorn': first_order_residual(layer),
  }
  column_error = np.abs(deviation(layer, num_iters).sum(0)).max()
  return {
    'logit_norm': float(logit_norm),
    'token_scale': scale,
    'input': layer.size,
    **{k: float(np.linalg.norm(v, 2)) for k, v in residuals.items()},
    'sinkhorn_column_error': float(column_error),
    'bound_softmax': first_order_bound(layer, p),
    'bound_sinkhorn': first_order_bound(layer),
    'bound_global': global_bound(layer),
    'bound_paper': paper_bound(layer),
  }


def depth_law(
  log10_constant: float, log10_residual: float, num_layers: int
) -> np.ndarray:
  """``log10`` of the bound after each layer, ``[num_layers + 1]`` from 0 on.

  ``C^((3^l - 1) / 2) r^(3^l)``, from ``||res(SA(X))|| <= C ||res X||^3`` in
  each layer. With several heads C is the sum of theirs.

  Raises:
    OverflowError: beyond 646 layers.
  """
  powers = np.array([3.0**layer for layer in range(num_layers + 1)])
  return (powers - 1) / 2 * log10_constant + powers * log10_residual


def lemma_margins(
  logits: np.ndarray, perturbation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Checks ``(I - D) P~ <= P <= (I + 2 D) P~`` (Dong et al. 2021).

  ``P`` is the softmax of the logits A and ``P~`` that of ``A - E``, and D is
  diagonal with ``D_ii = max_jj' |E_ij - E_ij'|``. Shown for
  ``D_ii <= LEMMA_LIMIT``; the left side holds always.

  Args:
    logits: ``[..., n, n]``.
    perturbation: E, ``[..., n, n]``.

  Returns:
    ``(lower, upper, spread)``, each ``[..., n]``: the smallest of
    ``P_ij / P~_ij - (1 - D_ii)`` and of ``1 + 2 D_ii - P_ij / P~_ij`` over j,
    which are not negative (but for rounding) where the lemma holds; and
    ``D_ii``.
  """
  logits = np.asarray(logits, np.float64)
  e = np.asarray(perturbation, np.float64)
  e = e - e.max(-1, keepdims=True)
  before = logits - e

  def log_total(x):
    return np.logaddexp.reduce(x, axis=-1, keepdims=True)

  ratio = np.exp(e + log_total(before) - log_total(logits))
  spread = -e.min(-1)
  lower = ratio.min(-1) - (1 - spread)
  return lower, 1 + 2 * spread - ratio.max(-1), spread


def path_length_distribution(num_heads: int, num_layers: int) -> np.ndarray:
  """Share of paths that go through k attention layers, ``[num_layers + 1]``.

  A path takes one of the heads or the skip connection in each layer (Dong et
  al. 2021): ``C(L, k) H^k / (H + 1)^L``, Binomial(L, H / (H + 1)).
  """
  total = (num_heads + 1) ** num_layers
  counts = (
    math.comb(num_layers, k) * num_heads**k for k in range(num_layers + 1)
  )
  return np.array([count / total for count in counts])


def mean_path_length(num_heads: int, num_layers: int) -> float:
  """Mean of `path_length_distribution`, ``L H / (H + 1)``."""
  return num_layers * num_heads / (num_heads + 1)


def _center(x):
  return x - x.mean(0)


def _covariance(layer, p):
  n = len(layer.x)
  p = np.full(n, 1 / n) if p is None else p
  return np.diag(p) - np.outer(p, p)
