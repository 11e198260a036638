"""Vision Transformer: images as sequences of patches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import rules
from sinkformer_jax.models import pooling as pooling_lib

# What it reads, see `KIND` of the data sets.
KIND = 'image'
# Fields of a config that only this model has.
RULES = {'model.patch_size': rules.integer(1, below=rules.MOST_UNITS)}


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
    pooling_lib.check_pooling(self.pooling)
    x = split_patches(images.astype(self.dtype), self.patch_size)
    x = nn.Dense(
      self.width,
      kernel_init=attention.kernel_init(),
      dtype=self.dtype,
      name='patch_embedding',
    )(x)
    if self.pooling == 'cls':
      x, mask = pooling_lib.with_class_token(self, x, mask)
    positions = self.param(
      'positions', pooling_lib.EMBEDDING_INIT, (1, *x.shape[1:]), jnp.float32
    )
    x = x + positions.astype(x.dtype)
    x = nn.Dropout(self.dropout_rate, deterministic=deterministic)(x)
    x = self.encoder(
      x, mask=mask, deterministic=deterministic, ablation=ablation
    )
    x = pooling_lib.pool(x, mask, self.pooling)
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


def create(
  config: ml_collections.ConfigDict, info, **shared
) -> VisionTransformer:
  """The model of `config.model`; `shared` is what all models have."""
  return VisionTransformer(
    num_classes=info.num_classes, patch_size=config.patch_size, **shared
  )
