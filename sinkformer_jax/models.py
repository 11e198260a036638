"""Models: a Vision Transformer, and `create_model` from a config."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import attention
from sinkformer_jax import encoder

MODELS = ('vit',)
POOLINGS = ('cls', 'mean')
_EMBEDDING_INIT = nn.initializers.normal(stddev=1.0)


class VisionTransformer(nn.Module):
  """Image classifier over square patches (Dosovitskiy et al. 2021).

  Attributes:
    encoder: the encoder, unbound.
    num_classes: number of classes.
    patch_size: side of a patch, in pixels.
    width: width of a token.
    pooling: 'cls' reads a class token, put in front of the patches; 'mean'
      averages over tokens and has no class token.
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
    if self.pooling not in POOLINGS:
      raise ValueError(f'pooling must be of {POOLINGS}, got {self.pooling!r}.')
    x = split_patches(images.astype(self.dtype), self.patch_size)
    x = nn.Dense(
      self.width,
      kernel_init=attention.kernel_init(),
      dtype=self.dtype,
      name='patch_embedding',
    )(x)
    if self.pooling == 'cls':
      cls = self.param('cls', _EMBEDDING_INIT, (1, 1, self.width))
      cls = jnp.broadcast_to(cls, (len(x), 1, self.width)).astype(x.dtype)
      x = jnp.concatenate([cls, x], axis=1)
      if mask is not None:
        mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    positions = self.param('positions', _EMBEDDING_INIT, (1, *x.shape[1:]))
    x = x + positions.astype(x.dtype)
    x = nn.Dropout(self.dropout_rate, deterministic=deterministic)(x)
    x = self.encoder(
      x, mask=mask, deterministic=deterministic, ablation=ablation
    )
    x = pool(x, mask, self.pooling)
    return nn.Dense(self.num_classes, name='head', dtype=x.dtype)(x)


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
    pooling: 'cls' (the first token) or 'mean'.

  Returns:
    ``[batch, width]``, in float32 at least; 0 for the mean of no tokens.
  """
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if pooling == 'cls':
    return x[:, 0]
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
    info: a `data.DatasetInfo`, for the number of classes.
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
      f'model.name must be one of {MODELS}, got {config.name!r}.'
    )
  if normalizer is None:
    if config.normalizer not in attention.NORMALIZERS:
      raise ValueError(
        f'model.normalizer must be one of {sorted(attention.NORMALIZERS)}, got'
        f' {config.normalizer!r}.'
      )
    normalizer = attention.NORMALIZERS[config.normalizer](config.num_iters)
  dtype = jnp.dtype(config.dtype)
  return VisionTransformer(
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
    patch_size=config.patch_size,
    width=config.width,
    pooling=config.pooling,
    dropout_rate=config.dropout_rate,
    dtype=dtype,
  )
