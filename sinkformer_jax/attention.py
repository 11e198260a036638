"""Multi-head attention with a chosen normalizer, and talking heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn

# The collection that captured arrays are sown into. They come out with
# `model.apply(..., mutable=['capture'])` and cost nothing without it.
CAPTURE = 'capture'
# The same for what is logged while training: a few numbers per layer.
MONITOR = 'monitor'


def sow(module: nn.Module, collection: str, name: str, value) -> None:
  """Sows one array under `name`; a second call overwrites, never piles up."""
  if not module.is_initializing():
    module.sow(
      collection,
      name,
      value,
      init_fn=lambda: None,
      reduce_fn=lambda _, new: new,
    )


def kernel_init(gain: float = 1.0) -> nn.initializers.Initializer:
  """Xavier (Glorot) normal with a gain: variance ``gain^2 2 / (in + out)``."""
  return nn.initializers.variance_scaling(
    gain**2, 'fan_avg', 'truncated_normal'
  )


def _identity(key, shape, dtype=jnp.float32):
  del key
  return jnp.eye(*shape, dtype=dtype)


class MultiHeadAttention(nn.Module):
  """Attention of `num_heads` heads over ``[batch, length, width]`` tokens.

  Captures ``logits``, the matrices given to the normalizer, and ``attention``,
  what multiplies the values (before dropout), each
  ``[batch, num_heads, q_length, kv_length]``. Monitors ``row_error`` and
  ``column_error`` of the same, the largest of the batch.

  Attributes:
    num_heads: number of heads; has to divide the width.
    normalizer: turns logits into weights, see `normalizers`.
    talking_heads: mixes heads linearly before and after the normalizer
      (Shazeer et al. 2020), both mixes started at the identity. Head g's rows
      then sum to the sum of column g of the second mix.
    dropout_rate: dropout of attention weights.
    deterministic: no dropout.
    value_gain: gain of the initial value kernel, see `kernel_init`.
    output_gain: gain of the initial output kernel.
    dtype: of activations; logits and weights are float32 at least.
  """

  num_heads: int
  normalizer: normalizers.Normalizer
  talking_heads: bool = False
  dropout_rate: float = 0.0
  deterministic: bool = True
  value_gain: float = 1.0
  output_gain: float = 1.0
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
    self,
    queries: jax.Array,
    keys_values: jax.Array,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """Attends from `queries` to `keys_values`.

    Args:
      queries: ``[batch, q_length, width]``.
      keys_values: ``[batch, kv_length, width]``.
      mask: ``[batch, 1, q_length, kv_length]``, True where both are valid.

    Returns:
      ``[batch, q_length, width]``.
    """
    width = queries.shape[-1]
    if width % self.num_heads:
      raise ValueError(
        f'num_heads={self.num_heads} does not divide the width {width}.'
      )
    head_dim = width // self.num_heads

    def dense(name, inputs, gain=1.0):
      return nn.Dense(
        width, kernel_init=kernel_init(gain), dtype=self.dtype, name=name
      )(inputs)

    def split_heads(x):
      x = x.reshape(*x.shape[:-1], self.num_heads, head_dim)
      return x.swapaxes(-3, -2)

    query = split_heads(dense('query', queries))
    key = split_heads(dense('key', keys_values))
    value = split_heads(dense('value', keys_values, self.value_gain))

    logits = jnp.einsum(
      'bhqd,bhkd->bhqk',
      query / jnp.sqrt(head_dim).astype(query.dtype),
      key,
      preferred_element_type=jnp.promote_types(self.dtype, jnp.float32),
    )
    if self.talking_heads:
      mix = self.param('logits_mix', _identity, (self.num_heads,) * 2)
      logits = jnp.einsum('bhqk,hg->bgqk', logits, mix)
    sow(self, CAPTURE, 'logits', logits)

    weights = self.normalizer(logits, mask)
    if self.talking_heads:
      mix = self.param('weights_mix', _identity, (self.num_heads,) * 2)
      weights = jnp.einsum('bhqk,hg->bgqk', weights, mix)
    sow(self, CAPTURE, 'attention', weights)
    self._monitor(weights, mask)

    weights = nn.Dropout(self.dropout_rate, deterministic=self.deterministic)(
      weights
    )
    mixed = jnp.einsum('bhqk,bhkd->bhqd', weights.astype(self.dtype), value)
    mixed = mixed.swapaxes(-3, -2).reshape(*queries.shape[:-1], width)
    return dense('out', mixed, self.output_gain)

  def _monitor(self, weights, mask):
    row_error, column_error = sinkhorn.marginal_errors(
      jax.lax.stop_gradient(weights), mask
    )
    sow(self, MONITOR, 'row_error', sinkhorn.largest(row_error))
    sow(self, MONITOR, 'column_error', sinkhorn.largest(column_error))
