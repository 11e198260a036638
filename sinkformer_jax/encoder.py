"""Transformer encoder: LayerNorm, FFN, block, scan over layers, ablations."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import attention
from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn

CAPTURE, MONITOR = attention.CAPTURE, attention.MONITOR


@dataclasses.dataclass(frozen=True)
class Ablation:
  """What stays on when a trained model is read (Dong et al. 2021).

  Attributes:
    skip: False removes the skip connection around attention and keeps the
      LayerNorm; the skip around the FFN stays.
    ffn: False bypasses the whole FFN sublayer, its skip and LayerNorm too.
  """

  skip: bool = True
  ffn: bool = True


def deepnorm_constants(num_layers: int) -> tuple[float, float]:
  """``(alpha, beta)`` of an encoder-only DeepNorm (Wang et al. 2022)."""
  return (2 * num_layers) ** 0.25, (8 * num_layers) ** -0.25


def layer_flops(model: ml_collections.ConfigDict, tokens: int) -> int:
  """Floating-point operations of a layer's forward pass on one example.

  Those of its matrix products: ``2 n (4 d^2 + 2 d f) + 4 n^2 d`` for n tokens
  of width d and an FFN of f (queries, keys, values, output; expansion,
  contraction; logits, weights times values).

  Args:
    model: the section `config.model`.
    tokens: length of the sequence, the class token included.
  """
  n, d = tokens, model.width
  ffn = 2 * d * model.ffn_dim * model.ffn
  return 2 * n * (4 * d**2 + ffn) + 4 * n**2 * d


def _dot_general(x, kernel, dimension_numbers, **options):
  """Matrix product whose kernel gradient transposes the smaller operand.

  The gradient contracts over tokens, for which XLA on CPU first transposes the
  left operand. Left to itself it takes the input, also where that is the wide
  one: it doubled the time of that product.
  """
  if kernel.shape[0] > kernel.shape[1]:
    ((contracted, _), batch) = dimension_numbers
    kernel = jax.lax.optimization_barrier(kernel.T)
    dimension_numbers = ((contracted, (1,)), batch)
  return jax.lax.dot_general(x, kernel, dimension_numbers, **options)


# What the backward pass of a block finds stored; it computes the rest again:
# reading and writing memory costs more than elementwise functions and the small
# products of attention.
_STORED = jax.checkpoint_policies.save_from_both_policies(
  jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  jax.checkpoint_policies.save_only_these_names(sinkhorn.POTENTIALS),
)


def _rms(x):
  return jnp.sqrt((x.astype(jnp.float32) ** 2).mean())


class LayerNorm(nn.Module):
  """LayerNorm over the last axis, computed in float32 at least."""

  dtype: jnp.dtype = jnp.float32
  epsilon: float = 1e-6

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """``[..., width] -> [..., width]``."""
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:], jnp.float32)
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:], jnp.float32)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + self.epsilon)
    return (x * scale + bias).astype(self.dtype)


class FeedForward(nn.Module):
  """Two dense layers with a GELU between them, on every token alone."""

  ffn_dim: int
  dropout_rate: float = 0.0
  deterministic: bool = True
  gain: float = 1.0
  output_gain: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """``[..., width] -> [..., width]``."""
    dense = functools.partial(
      nn.Dense, dtype=self.dtype, dot_general=_dot_general
    )
    hidden = dense(
      self.ffn_dim,
      kernel_init=attention.kernel_init(self.gain),
      name='expand',
    )(x)
    hidden = nn.gelu(hidden)
    hidden = nn.Dropout(self.dropout_rate, deterministic=self.deterministic)(
      hidden
    )
    return dense(
      x.shape[-1],
      kernel_init=attention.kernel_init(self.output_gain),
      name='contract',
    )(hidden)


class Block(nn.Module):
  """One layer: attention and FFN, each with LayerNorm and skip connection.

  Captures ``attention_output`` (of the attention sublayer, before the skip)
  and ``hidden`` (of the block), each ``[batch, length, width]``, and what
  `attention.MultiHeadAttention` captures. Monitors ``hidden_rms``, the root
  mean square of the block's result.

  Attributes: those of `Encoder`, and `deterministic` and `ablation`.
  """

  num_layers: int
  num_heads: int
  ffn_dim: int
  normalizer: normalizers.Normalizer
  norm_position: str = 'pre'
  skip: bool = True
  ffn: bool = True
  talking_heads: bool = False
  deepnorm: bool = False
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32
  deterministic: bool = True
  ablation: Ablation = Ablation()

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array | None):
    """Runs the layer.

    Args:
      x: ``[batch, length, width]``.
      mask: ``[batch, 1, length, length]``, True where both are valid.

    Returns:
      ``(x, None)``, the carry and output of a scan.
    """
    if self.deepnorm:
      _, beta = deepnorm_constants(self.num_layers)
      inner_gain, output_gain = beta, beta
    else:
      # The sum of 2 * num_layers sublayers starts as large as one of them.
      inner_gain, output_gain = 1.0, (2 * self.num_layers) ** -0.5

    attend = attention.MultiHeadAttention(
      self.num_heads,
      self.normalizer,
      talking_heads=self.talking_heads,
      dropout_rate=self.dropout_rate,
      deterministic=self.deterministic,
      value_gain=inner_gain,
      output_gain=output_gain,
      dtype=self.dtype,
      name='attention',
    )

    def attention_sublayer(y):
      output = attend(y, y, mask)
      attention.sow(self, CAPTURE, 'attention_output', output)
      return output

    feed_forward = FeedForward(
      self.ffn_dim,
      dropout_rate=self.dropout_rate,
      deterministic=self.deterministic,
      gain=inner_gain,
      output_gain=output_gain,
      dtype=self.dtype,
      name='ffn',
    )
    x = self._sublayer(
      attention_sublayer,
      x,
      skip=self.skip and self.ablation.skip,
      name='attention_norm',
    )
    if self.ffn and self.ablation.ffn:
      x = self._sublayer(feed_forward, x, skip=True, name='ffn_norm')
    attention.sow(self, CAPTURE, 'hidden', x)
    attention.sow(self, MONITOR, 'hidden_rms', _rms(jax.lax.stop_gradient(x)))
    return x, None

  def _sublayer(self, fn, x, skip, name):
    """`fn` with LayerNorm before or after it, dropout and skip connection."""
    norm = LayerNorm(self.dtype, name=name)
    dropout = nn.Dropout(self.dropout_rate, deterministic=self.deterministic)
    if self.norm_position == 'pre':
      y = dropout(fn(norm(x)))
      return x + y if skip else y
    alpha = deepnorm_constants(self.num_layers)[0] if self.deepnorm else 1.0
    y = dropout(fn(x))
    return norm(alpha * x + y if skip else y)


class Encoder(nn.Module):
  """`num_layers` blocks, by a scan: compile time does not grow with depth.

  Parameters of the blocks are stacked, ``[num_layers, ...]``; so is what they
  capture. Captures ``embedding``, the input of the first block, too.

  Attributes:
    num_layers: number of blocks.
    num_heads: heads of each attention.
    ffn_dim: width of the FFN's hidden layer.
    normalizer: of attention, see `normalizers`.
    norm_position: LayerNorm 'pre' (before each sublayer, and one after the
      last block) or 'post' (after each skip connection).
    skip: False trains without the skip connection around attention.
    ffn: False trains without the FFN sublayer (it has no parameters then).
    talking_heads: see `attention.MultiHeadAttention`.
    deepnorm: scales the skip and the initial kernels (Wang et al. 2022); goes
      with norm_position='post'.
    dropout_rate: of attention weights, FFN and sublayer results.
    dtype: of activations; parameters are float32.
    remat: store nothing but the input of each block for the backward pass;
      otherwise the results of its dense layers and the normalizer's
      potentials too.
  """

  num_layers: int
  num_heads: int
  ffn_dim: int
  normalizer: normalizers.Normalizer
  norm_position: str = 'pre'
  skip: bool = True
  ffn: bool = True
  talking_heads: bool = False
  deepnorm: bool = False
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array | None = None,
    deterministic: bool = True,
    ablation: Ablation = Ablation(),
  ) -> jax.Array:
    """Encodes tokens.

    Args:
      x: ``[batch, length, width]``.
      mask: ``[batch, length]``, True for valid tokens. What padded tokens hold
        does not matter, not even infinities; their results are not defined.
      deterministic: no dropout; otherwise a 'dropout' key is needed.
      ablation: parts to switch off.

    Returns:
      ``[batch, length, width]``.
    """
    if self.norm_position not in ('pre', 'post'):
      raise ValueError(
        f"norm_position must be 'pre' or 'post', got {self.norm_position!r}."
      )
    if self.deepnorm and self.norm_position != 'post':
      raise ValueError("deepnorm needs norm_position='post'.")
    pair_mask = None
    if mask is not None:
      x = jnp.where(mask[..., None], x, 0)
      pair_mask = mask[:, None, :, None] & mask[:, None, None, :]
    x = x.astype(self.dtype)
    attention.sow(self, CAPTURE, 'embedding', x)

    stored = jax.checkpoint_policies.nothing_saveable if self.remat else _STORED
    block = nn.remat(Block, prevent_cse=False, policy=stored)
    x, _ = nn.scan(
      block,
      variable_axes={'params': 0, CAPTURE: 0, MONITOR: 0},
      split_rngs={'params': True, 'dropout': True},
      in_axes=nn.broadcast,
      length=self.num_layers,
    )(
      num_layers=self.num_layers,
      num_heads=self.num_heads,
      ffn_dim=self.ffn_dim,
      normalizer=self.normalizer,
      norm_position=self.norm_position,
      skip=self.skip,
      ffn=self.ffn,
      talking_heads=self.talking_heads,
      deepnorm=self.deepnorm,
      dropout_rate=self.dropout_rate,
      dtype=self.dtype,
      deterministic=deterministic,
      ablation=ablation,
      name='blocks',
    )(x, pair_mask)
    if self.norm_position == 'pre':
      x = LayerNorm(self.dtype, name='norm')(x)
    return x
