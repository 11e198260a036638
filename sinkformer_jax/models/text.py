"""Text classifier over tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from sinkformer_jax import encoder
from sinkformer_jax import rules
from sinkformer_jax.models import pooling as pooling_lib

POSITIONS = ('learned', 'sinusoidal')
# What it reads, see `KIND` of the data sets.
KIND = 'text'
# Fields of a config that only this model has.
RULES = {'model.positions': rules.one_of(POSITIONS)}


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
    pooling_lib.check_pooling(self.pooling)
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
      x, mask = pooling_lib.with_class_token(self, x, mask)
      num_positions += 1
    shape = (1, num_positions, self.width)
    if self.positions == 'learned':
      positions = self.param(
        'position_embedding', pooling_lib.EMBEDDING_INIT, shape, jnp.float32
      )
    else:
      positions = sinusoids(*shape[1:])[None]
    x = x + positions[:, : x.shape[1]].astype(x.dtype)
    x = nn.Dropout(self.dropout_rate, deterministic=deterministic)(x)
    x = self.encoder(
      x, mask=mask, deterministic=deterministic, ablation=ablation
    )
    x = pooling_lib.pool(x, mask, self.pooling)
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


def create(config: ml_collections.ConfigDict, info, **shared) -> TextClassifier:
  """The model of `config.model`; `shared` is what all models have."""
  return TextClassifier(
    num_classes=info.num_classes,
    vocab_size=info.vocab_size,
    max_length=info.input_shape[0],
    positions=config.positions,
    **shared,
  )
