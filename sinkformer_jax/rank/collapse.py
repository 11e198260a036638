"""Attention without skips followed however far it collapses (Dong et al. 2021).

Without skip connections around attention the residual shrinks with exponent 3
at every layer, with and without an FFN, and after a few layers no float64 token
shows any of it. So tokens are kept as ``X = 1 m^T + sigma R``: a mean token, a
residual of unit norm, and the logarithm of its size. With queries
``q + sigma R W_Q`` and keys ``k + sigma R W_K`` the logits are, but for what is
constant over a row,

  C_ij = b_j + s e_ij,  b = sigma R W_K q / sqrt(d),  s = sigma^2,
  e = (R W_Q) (R W_K)^T / sqrt(d),

and both normalizers ignore what is constant over a row: a row update takes it
up in ``f_i``, and ``P`` and ``g_j`` stay the same. With ``P = 1 p^T + s D`` and
``1^T R = 0`` the new residual is ``J P X W = sigma^3 J D R W``. These are
identities, nothing has to be small, and no digits are lost in differences.

Why the exponent is 3 for both normalizers: as sigma goes to 0, ``D`` tends to
``e / n`` whatever the mean token is. For Sinkhorn ``p = 1 / n``, and the first
column update takes ``b`` out. For softmax ``p = softmax(b)`` is ``1 / n`` but
for order sigma. So once collapsed the two normalizers differ by a relative
sigma, and where q is 0 by sigma^4: the second order of softmax differs from
Sinkhorn's by what is equal for all queries, which J removes. An FFN works on
every token alone and multiplies the residual by its slope at the mean token.

Everything is NumPy in float64. Padded tokens have to be cut off before.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from sinkformer_jax import encoder

EPS = np.finfo(np.float64).eps
_GELU = np.sqrt(2 / np.pi)


@dataclasses.dataclass(frozen=True)
class Deflated:
  """Tokens ``X = 1 mean^T + exp(log_scale) residual``.

  The logarithm of any norm of res(X) is `log_scale` and that of the norm of
  `residual`.

  Attributes:
    mean: ``[..., width]``.
    residual: ``[..., n, width]``, of zero mean over the tokens and of
      Frobenius norm 1.
    log_scale: ``[...]``, the natural logarithm of the residual's Frobenius
      norm.
  """

  mean: np.ndarray
  residual: np.ndarray
  log_scale: np.ndarray

  def log10_residual(self, ord=2) -> np.ndarray:
    """``log10 ||res(X)||``, ``[...]``; `ord` as in `numpy.linalg.norm`."""
    norm = np.linalg.norm(self.residual, ord, axis=(-2, -1))
    return self.log_scale / np.log(10) + np.log10(norm)

  def log10_whole(self) -> np.ndarray:
    """``log10 ||X||``, spectral, ``[...]``: of what it is the residual of."""
    return np.log10(np.linalg.norm(self.tokens(), 2, axis=(-2, -1)))

  def tokens(self) -> np.ndarray:
    """``X`` itself, ``[..., n, width]``: equal rows once collapsed."""
    scale = np.exp(self.log_scale)[..., None, None]
    return self.mean[..., None, :] + scale * self.residual


def deflate(x: np.ndarray) -> Deflated:
  """Splits tokens ``[..., n, width]`` into mean token and residual.

  Raises:
    ValueError: if a number is not finite or all tokens are equal.
  """
  x = np.asarray(x, np.float64)
  mean = np.zeros((*x.shape[:-2], x.shape[-1]))
  return _deflate(mean, x, np.zeros(x.shape[:-2]))


def _deflate(mean, deviation, log_scale) -> Deflated:
  """``1 mean^T + exp(log_scale) deviation``, for any deviation."""
  shift = deviation.mean(-2, keepdims=True)
  residual = deviation - shift
  norm = np.linalg.norm(residual, axis=(-2, -1))
  mean = mean + np.exp(log_scale)[..., None] * shift[..., 0, :]
  if not (np.isfinite(norm).all() and np.isfinite(mean).all()):
    raise ValueError('Tokens that are not finite: see the weights, or inputs.')
  rounding = 10 * residual.shape[-2] * EPS
  if (norm <= rounding * np.linalg.norm(deviation, axis=(-2, -1))).any():
    raise ValueError(
      'All tokens are equal to rounding, or the weights make them so: there is'
      ' no residual to follow.'
    )
  return Deflated(
    mean, residual / norm[..., None, None], log_scale + np.log(norm)
  )


def propagate(
  params: Mapping,
  embedding: np.ndarray,
  num_heads: int,
  num_iters: int,
  norm_position: str | None = 'pre',
  ffn: bool = False,
) -> list[Deflated]:
  """Runs an encoder with the skips around attention switched off.

  The same as `encoder.Encoder` under ``Ablation(skip=False, ffn=ffn)``, without
  DeepNorm.

  Args:
    params: of `encoder.Encoder`, in any dtype; talking heads included.
    embedding: ``[..., n, width]``, the input of the first layer, without
      padded tokens.
    num_heads: heads of each attention.
    num_iters: Sinkhorn iterations; 0 is softmax.
    norm_position: LayerNorm 'pre' or 'post' each sublayer, or None for none.
    ffn: whether the FFN sublayers, with their skips, are on.

  Returns:
    The embedding and the tokens after each layer. With 'pre' the result of
    the encoder is `layer_norm` of the last one with ``params['norm']``.

  Raises:
    ValueError: for an unknown norm_position, and where all tokens are equal
      or a number is not finite.
  """
  if norm_position not in ('pre', 'post', None):
    raise ValueError(
      f"norm_position must be 'pre', 'post' or None, got {norm_position!r}."
    )
  states = [deflate(embedding)]
  num_layers = len(params['blocks']['attention']['out']['bias'])
  for layer in range(num_layers):
    block = jax.tree.map(lambda p, layer=layer: p[layer], params['blocks'])
    x = states[-1]
    if norm_position == 'pre':
      x = layer_norm(x, block['attention_norm'])
    x = attend(x, block['attention'], num_heads, num_iters)
    if norm_position == 'post':
      x = layer_norm(x, block['attention_norm'])
    if ffn:
      y = layer_norm(x, block['ffn_norm']) if norm_position == 'pre' else x
      x = _sum(x, feed_forward(y, block['ffn']))
      if norm_position == 'post':
        x = layer_norm(x, block['ffn_norm'])
    states.append(x)
  return states


def residuals_by_layer(
  params: Mapping,
  embeddings: Sequence[np.ndarray],
  num_heads: int,
  num_iters: int,
  norm_position: str | None = 'pre',
  ffn: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
  """Sizes of what `propagate` gives, for several examples.

  Args:
    params: as in `propagate`, and so are the arguments after the next.
    embeddings: of each example, ``[n, width]``.
    num_heads: heads of each attention.
    num_iters: Sinkhorn iterations; 0 is softmax.
    norm_position: LayerNorm 'pre' or 'post' each sublayer, or None for none.
    ffn: whether the FFN sublayers are on.

  Returns:
    log10 of the spectral norms of ``res(X)`` and of ``X``, each
    ``[layers + 1, examples]``.
  """
  states = [
    propagate(params, x, num_heads, num_iters, norm_position, ffn)
    for x in embeddings
  ]
  residual = np.array(
    [[x.log10_residual() for x in layers] for layers in states]
  )
  whole = np.array([[x.log10_whole() for x in layers] for layers in states])
  return residual.T, whole.T


def random_encoder(
  seed: int, num_layers: int, num_tokens: int, width: int
) -> tuple[dict, np.ndarray]:
  """An encoder of Gaussian weights without biases, and tokens for it.

  Args:
    seed: a non-negative int.
    num_layers: its layers.
    num_tokens: tokens of the embedding.
    width: of tokens.

  Returns:
    ``(params, embedding)`` as `propagate` takes them with `norm_position` None.
    Weights and tokens have variance ``1 / width``.
  """
  rng = np.random.default_rng(seed)
  shape = (num_layers, width, width)
  attention = {
    name: {
      'kernel': rng.standard_normal(shape) / np.sqrt(width),
      'bias': np.zeros(shape[:2]),
    }
    for name in ('query', 'key', 'value', 'out')
  }
  embedding = rng.standard_normal((num_tokens, width)) / np.sqrt(width)
  return {'blocks': {'attention': attention}}, embedding


def exponents(log10: np.ndarray) -> np.ndarray:
  """Exponent of the residual's decay: each change of log10 over that before.

  Args:
    log10: of the residual after each layer, ``[layers + 1, ...]``.

  Returns:
    ``[layers + 1, ...]``; NaN for the first two. The law of depth says 3.
  """
  change = np.diff(log10, axis=0)
  first = np.full((2, *log10.shape[1:]), np.nan)
  return np.concatenate([first, change[1:] / change[:-1]])[: len(log10)]


def _sum(x: Deflated, y: Deflated) -> Deflated:
  factor = np.exp(y.log_scale - x.log_scale)[..., None, None]
  return _deflate(
    x.mean + y.mean, x.residual + factor * y.residual, x.log_scale
  )


def feed_forward(x: Deflated, params: Mapping) -> Deflated:
  """`encoder.FeedForward` with its parameters."""
  expand, contract = (
    {k: np.asarray(v, np.float64) for k, v in params[name].items()}
    for name in ('expand', 'contract')
  )
  mean = x.mean @ expand['kernel'] + expand['bias']
  change = x.residual @ expand['kernel']
  sigma = np.exp(x.log_scale)[..., None, None]
  slope = _mean_gelu_slope(mean[..., None, :], sigma * change)
  return _deflate(
    _gelu(mean) @ contract['kernel'] + contract['bias'],
    (slope * change) @ contract['kernel'],
    x.log_scale,
  )


def _mean_gelu_slope(x, change):
  """``(gelu(x + change) - gelu(x)) / change``, also where it would cancel."""
  small = np.abs(change) < 1
  # The mean of the derivative in between: 12 points give it to rounding.
  points, weights = np.polynomial.legendre.leggauss(12)
  near = np.where(small, change, 0)
  slope = sum(
    w / 2 * _gelu_slope(x + (1 + t) / 2 * near)
    for t, w in zip(points, weights, strict=True)
  )
  far = np.where(small, 1, change)
  return np.where(small, slope, (_gelu(x + far) - _gelu(x)) / far)


def _gelu(x):
  """As `flax.linen.gelu`: the approximation by tanh."""
  return x / 2 * (1 + np.tanh(_GELU * (x + 0.044715 * x**3)))


def _gelu_slope(x):
  tanh = np.tanh(_GELU * (x + 0.044715 * x**3))
  inner = _GELU * (1 + 3 * 0.044715 * x**2)
  return (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * inner


def layer_norm(x: Deflated, params: Mapping) -> Deflated:
  """LayerNorm with the parameters of `encoder.LayerNorm`."""
  scale, bias = (np.asarray(params[k], np.float64) for k in ('scale', 'bias'))
  epsilon = encoder.LayerNorm.epsilon
  sigma = np.exp(x.log_scale)[..., None, None]
  mean = (x.mean - x.mean.mean(-1, keepdims=True))[..., None, :]
  residual = x.residual - x.residual.mean(-1, keepdims=True)

  def average(y):
    return y.mean(-1, keepdims=True)

  # Standard deviation of the mean token, and of each token. The difference of
  # their inverses, over sigma, is written out: subtracting would cancel.
  old = np.sqrt(average(mean**2) + epsilon)
  new = np.sqrt(average((mean + sigma * residual) ** 2) + epsilon)
  growth = average(residual * (2 * mean + sigma * residual))
  change = -growth / (old * new * (old + new))
  deviation = (residual / new + mean * change) * scale
  return _deflate(
    (mean / old)[..., 0, :] * scale + bias, deviation, x.log_scale
  )


def attend(
  x: Deflated, params: Mapping, num_heads: int, num_iters: int
) -> Deflated:
  """`attention.MultiHeadAttention` of one layer, with its parameters."""
  width = x.mean.shape[-1]
  if width % num_heads:
    raise ValueError(
      f'num_heads={num_heads} does not divide the width {width}.'
    )
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)

  def project(name):
    """Of the mean token ``[..., h, d]``, of the residual ``[..., h, n, d]``."""
    kernel, bias = params[name]['kernel'], params[name]['bias']
    split = (num_heads, width // num_heads)
    mean = (x.mean @ kernel + bias).reshape(*x.mean.shape[:-1], *split)
    residual = x.residual @ kernel
    residual = residual.reshape(*residual.shape[:-1], *split)
    return mean, residual.swapaxes(-3, -2)

  (query_mean, query), (_, key), (value_mean, value) = (
    project(name) for name in ('query', 'key', 'value')
  )
  scale = query.shape[-1] ** -0.5
  sigma = np.exp(x.log_scale)[..., None]
  bias = sigma[..., None] * scale * (key @ query_mean[..., None])[..., 0]
  interaction = scale * query @ key.swapaxes(-1, -2)
  if 'logits_mix' in params:
    mix = params['logits_mix']
    bias = np.einsum('...hk,hg->...gk', bias, mix)
    interaction = np.einsum('...hqk,hg->...gqk', interaction, mix)
  base, deviation = attention_deviation(bias, interaction, sigma**2, num_iters)
  if 'weights_mix' in params:
    mix = params['weights_mix']
    base = np.einsum('...hk,hg->...gk', base, mix)
    deviation = np.einsum('...hqk,hg->...gqk', deviation, mix)

  def output(y):
    """``[..., h, n, d] -> [..., n, width]``."""
    y = y.swapaxes(-3, -2)
    return y.reshape(*y.shape[:-2], -1) @ params['out']['kernel']

  # base^T (1 value_mean^T + sigma value), for all queries alike.
  base = base[..., None, :]
  mean = base.sum(-1, keepdims=True) * value_mean[..., None, :]
  mean = mean + sigma[..., None, None] * base @ value
  mean = output(mean)[..., 0, :] + params['out']['bias']
  return _deflate(mean, output(deviation @ value), 3 * x.log_scale)


def attention_deviation(
  bias: np.ndarray, interaction: np.ndarray, scale: np.ndarray, num_iters: int
) -> tuple[np.ndarray, np.ndarray]:
  """Attention weights of the logits ``bias_j + scale * interaction_ij``.

  Args:
    bias: ``[..., n]``, one number a key.
    interaction: ``[..., n, n]``.
    scale: ``[...]``, at least 0.
    num_iters: Sinkhorn iterations, closed by a row update; 0 is softmax.

  Returns:
    ``(base, deviation)``, ``[..., n]`` and ``[..., n, n]``: the weights are
    ``1 base^T + scale * deviation``. `base` is ``softmax(bias)`` for softmax
    and ``1 / n`` otherwise. `deviation` is as accurate as the logits for any
    scale, and has a limit at 0.

  Raises:
    ValueError: if `num_iters` is negative.
  """
  if num_iters < 0:
    raise ValueError(f'num_iters must be at least 0, got {num_iters}.')
  bias, interaction, scale = (
    np.asarray(a, np.float64) for a in (bias, interaction, scale)
  )
  scale = scale[..., None, None]
  bias = bias[..., None, :]
  log_base = bias - bias.max(-1, keepdims=True)
  log_base = log_base - np.log(np.exp(log_base).sum(-1, keepdims=True))
  uniform = np.full_like(log_base, -np.log(bias.shape[-1]))
  # A row update with bias is a mean with the weights softmax(bias). The first
  # column update takes the bias out: from there on all means are uniform.
  x = _normalize_rows(log_base, interaction, scale)
  for _ in range(num_iters):
    log_base, before = uniform, x
    x = _normalize_rows(uniform, x.swapaxes(-1, -2), scale).swapaxes(-1, -2)
    x = _normalize_rows(uniform, x, scale)
    size = np.abs(x).max((-2, -1), keepdims=True)
    if (np.abs(x - before) <= 4 * EPS * size).all():
      break  # What is left would change the last digits alone.
  return np.exp(log_base)[..., 0, :], _change(log_base, x, scale)


def _normalize_rows(log_p, x, s):
  """`x` minus one number a row, such that ``sum_j p_j exp(s x_ij) = 1``.

  The number is ``log(sum_j p_j exp(s x_ij)) / s``; ``sum_j p_j x_ij`` at
  ``s = 0``.
  """
  # Where one p_j is nearly 1, the others decide; this keeps their digits.
  top = np.broadcast_to(log_p.argmax(-1)[..., None], (*x.shape[:-1], 1))
  x = x - np.take_along_axis(x, top, -1)
  exponent = log_p + s * x
  largest = exponent.max(-1, keepdims=True)
  near = largest < 1
  total = _change(log_p, np.where(near, x, 0), s).sum(-1, keepdims=True)
  small = total * _quotient(np.log1p, s * total)
  if near.all():
    return x - small
  large = largest + np.log(np.exp(exponent - largest).sum(-1, keepdims=True))
  return x - np.where(near, small, large / np.where(near, 1, s))


def _change(log_p, x, s):
  """``p (exp(s x) - 1) / s``; ``p x`` at ``s = 0``."""
  y = s * x
  return x * np.exp(log_p + np.maximum(y, 0)) * _quotient(np.expm1, -np.abs(y))


def _quotient(fn, x):
  """``fn(x) / x``, for a function with ``fn(x) ~ x`` at 0."""
  return np.divide(fn(x), x, out=np.ones_like(x), where=x != 0)
