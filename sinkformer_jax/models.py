"""Models of images and texts, and `create_model` from a config."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from sinkformer_jax import attention
from sinkformer_jax import encoder

# What each model reads, see `KIND` of the data sets.
MODELS = {'vit': 'image', 'text': 'text'}
POOLINGS = ('cls', 'mean', 'max')
POSITIONS = ('learned', 'sinusoidal')
_EMBEDDING_INIT = nn.initializers.normal(stddev=1.0)


class VisionTransformer(nn.Module):
  """Image classifier over square patches (Dosovitskiy et al. 2021).

  Attributes:
    encoder: the encoder, unbound.
    num_classes: number of classes.
    patch_size: side of a patch, in pixels.
    width: width of a token.
    pooling: 'cls' reads a class token, put in front of the patches; 'mean'
      and 'max' are over patches, and there is no class token.
    dropout_rate: of the embedded tokens.
    dtype: of activations; the result is float32 at least.
  """

  encoder: encoder.Encoder
  num_classes: int
  patch_size: int
  width: int
  pooling: str = 'cls'
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    images: jax.Array,
    mask: jax.Array | None = None,
    deterministic: bool = True,
    ablation: encoder.Ablation = encoder.Ablation(),
  ) -> jax.Array:
    """Classifies images.

    Args:
      images: ``[batch, height, width, channels]``, standardized floats.
      mask: ``[batch, patches]``, True for valid patches, row by row.
      deterministic: no dropout.
      ablation: parts to switch off.

    Returns:
      Class scores ``[batch, num_classes]``.

    Raises:
      ValueError: if the patches do not divide the image, or for an unknown
        pooling.
    """
    _check_pooling(self.pooling)
    x = split_patches(images.astype(self.dtype), self.patch_size)
    x = nn.Dense(
      self.width,
      kernel_init=attention.kernel_init(),
      dtype=self.dtype,
      name='patch_embedding',
    )(x)
    if self.pooling == 'cls':
      x, mask = _with_class_token(self, x, mask)
    positions = self.param('positions', _EMBEDDING_INIT, (1, *x.shape[1:]))
    x = x + positions.astype(x.dtype)
    x = nn.Dropout(self.dropout_rate, deterministic=deterministic)(x)
    x = self.encoder(
      x, mask=mask, deterministic=deterministic, ablation=ablation
    )
    x = pool(x, mask, self.pooling)
    return nn.Dense(self.num_classes, name='head', dtype=x.dtype)(x)


class TextClassifier(nn.Module):
  """Text classifier over tokens, padding left out everywhere.

  Attributes:
    encoder: the encoder, unbound.
    num_classes: number of classes.
    vocab_size: tokens are below this.
    max_length: largest number of tokens.
    width: width of a token.
    pooling: 'max' or 'mean' over valid tokens, or 'cls', which reads a class
      token, put in front of the others.
    positions: 'learned', or 'sinusoidal' (Vaswani et al. 2017).
    dropout_rate: of the embedded tokens.
    dtype: of activations; the result is float32 at least.
  """

  encoder: encoder.Encoder
  num_classes: int
  vocab_size: int
  max_length: int
  width: int
  pooling: str = 'max'
  positions: str = 'learned'
  dropout_rate: float = 0.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    deterministic: bool = True,
    ablation: encoder.Ablation = encoder.Ablation(),
  ) -> jax.Array:
    """Classifies texts.

    Args:
      tokens: ``[batch, length]``, integers.
      mask: ``[batch, length]``, True for valid tokens; None if all are. The
        result does not depend on what is not valid, or on how much of it
        there is.
      deterministic: no dropout.
      ablation: parts to switch off.

    Returns:
      Class scores ``[batch, num_classes]``.

    Raises:
      ValueError: for texts longer than `max_length`, or an unknown pooling or
        kind of positions.
    """
    _check_pooling(self.pooling)
    if self.positions not in POSITIONS:
      raise ValueError(
        f'positions must be one of {POSITIONS}, got {self.positions!r}.'
      )
    if tokens.shape[1] > self.max_length:
      raise ValueError(
        f'texts of {tokens.shape[1]} tokens are longer than'
        f' max_length={self.max_length}.'
      )
    x = nn.Embed(
      self.vocab_size,
      self.width,
      embedding_init=nn.initializers.normal(self.width**-0.5),
      dtype=self.dtype,
      name='token_embedding',
    )(tokens)
    # Kept small and scaled up to unit spread (Vaswani et al. 2017): an update
    # then moves the embedding of a rare token by more than a trace.
    x = x * jnp.sqrt(self.width).astype(x.dtype)
    num_positions = self.max_length
    if self.pooling == 'cls':
      x, mask = _with_class_token(self, x, mask)
      num_positions += 1
    shape = (1, num_positions, self.width)
    if self.positions == 'learned':
      positions = self.param('position_embedding', _EMBEDDING_INIT, shape)
    else:
      positions = sinusoids(*shape[1:])[None]
    x = x + positions[:, : x.shape[1]].astype(x.dtype)
    x = nn.Dropout(self.dropout_rate, deterministic=deterministic)(x)
    x = self.encoder(
      x, mask=mask, deterministic=deterministic, ablation=ablation
    )
    x = pool(x, mask, self.pooling)
    return nn.Dense(self.num_classes, name='head', dtype=x.dtype)(x)


def sinusoids(length: int, width: int) -> np.ndarray:
  """Fixed position embeddings (Vaswani et al. 2017), ``[length, width]``.

  Even columns are sines and odd ones cosines of
  ``position / 10000^(2 (column // 2) / width)``.
  """
  columns = np.arange(width)
  rates = 10_000.0 ** (-2 * (columns // 2) / width)
  angles = np.arange(length)[:, None] * rates
  return np.where(columns % 2 == 0, np.sin(angles), np.cos(angles)).astype(
    np.float32
  )


def _check_pooling(pooling):
  if pooling not in POOLINGS:
    raise ValueError(f'pooling must be one of {POOLINGS}, got {pooling!r}.')


def _with_class_token(module, x, mask):
  """Puts a learned token, which is always valid, in front of the others."""
  width = x.shape[-1]
  cls = module.param('cls', _EMBEDDING_INIT, (1, 1, width))
  cls = jnp.broadcast_to(cls, (len(x), 1, width)).astype(x.dtype)
  x = jnp.concatenate([cls, x], axis=1)
  if mask is not None:
    mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
  return x, mask


def split_patches(images: jax.Array, patch_size: int) -> jax.Array:
  """Cuts images into patches, row by row.

  Args:
    images: ``[batch, height, width, channels]``.
    patch_size: side of a patch, in pixels.

  Returns:
    ``[batch, patches, patch_size * patch_size * channels]``.

  Raises:
    ValueError: if `patch_size` does not divide height and width.
  """
  batch, height, width, channels = images.shape
  if height % patch_size or width % patch_size:
    raise ValueError(
      f'patch_size={patch_size} does not divide images of {height} x {width}.'
    )
  rows, columns = height // patch_size, width // patch_size
  x = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
  # [batch, rows, columns, patch rows, patch columns, channels]
  x = x.transpose(0, 1, 3, 2, 4, 5)
  return x.reshape(batch, rows * columns, patch_size * patch_size * channels)


def pool(x: jax.Array, mask: jax.Array | None, pooling: str) -> jax.Array:
  """One vector for each example, from its valid tokens alone.

  Args:
    x: ``[batch, length, width]``.
    mask: ``[batch, length]``, True for valid tokens; None if all are.
    pooling: 'cls' (the first token), 'mean' or 'max'.

  Returns:
    ``[batch, width]``, in float32 at least; 0 for the mean or maximum of no
    tokens.
  """
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if pooling == 'cls':
    return x[:, 0]
  if pooling == 'max':
    if mask is None:
      return x.max(1)
    largest = jnp.where(mask[..., None], x, -jnp.inf).max(1)
    return jnp.where(mask.any(1, keepdims=True), largest, 0)
  if mask is None:
    return x.mean(1)
  total = jnp.where(mask[..., None], x, 0).sum(1)
  return total / jnp.maximum(mask.sum(1, keepdims=True), 1)


def create_model(
  config: ml_collections.ConfigDict,
  info,
  normalizer: attention.Normalizer | None = None,
) -> nn.Module:
  """Builds the model of `config.model` for a data set.

  Args:
    config: the section `config.model`.
    info: a `data.DatasetInfo`, for the number of classes and, of texts, the
      vocabulary and the largest length.
    normalizer: a function ``(logits, mask) -> weights`` that takes the place
      of the one named in the config.

  Returns:
    A module to be called as ``model.apply(variables, inputs, mask=...,
    deterministic=..., ablation=...)``.

  Raises:
    ValueError: for an unknown model or normalizer.
  """
  if config.name not in MODELS:
    raise ValueError(
      f'model.name must be one of {sorted(MODELS)}, got {config.name!r}.'
    )
  if normalizer is None:
    if config.normalizer not in attention.NORMALIZERS:
      raise ValueError(
        f'model.normalizer must be one of {sorted(attention.NORMALIZERS)}, got'
        f' {config.normalizer!r}.'
      )
    normalizer = attention.NORMALIZERS[config.normalizer](config.num_iters)
  dtype = jnp.dtype(config.dtype)
  shared = dict(
    encoder=encoder.Encoder(
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      ffn_dim=config.ffn_dim,
      normalizer=normalizer,
      norm_position=config.norm_position,
      skip=config.skip,
      ffn=config.ffn,
      talking_heads=config.talking_heads,
      deepnorm=config.deepnorm,
      dropout_rate=config.dropout_rate,
      dtype=dtype,
      remat=config.remat,
    ),
    num_classes=info.num_classes,
    width=config.width,
    pooling=config.pooling,
    dropout_rate=config.dropout_rate,
    dtype=dtype,
  )
  if config.name == 'vit':
    return VisionTransformer(patch_size=config.patch_size, **shared)
  return TextClassifier(
    vocab_size=info.vocab_size,
    max_length=info.input_shape[0],
    positions=config.positions,
    **shared,
  )
