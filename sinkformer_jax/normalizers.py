"""Normalizers by the names that configs give them.

A normalizer turns logits into attention weights. A further one is a function
here and an entry of `NORMALIZERS`; `config.model.normalizer` then takes its
name.
"""

from collections.abc import Callable

import jax

from sinkformer_jax import sinkhorn

# (logits, mask) -> float32 weights, [batch, num_heads, q_length, kv_length].
Normalizer = Callable[[jax.Array, jax.Array | None], jax.Array]


def _sinkhorn(num_iters: int) -> Normalizer:
  def normalizer(logits, mask=None):
    return sinkhorn.sinkhorn(logits, num_iters, mask)

  return normalizer


# Each takes `config.model.num_iters`, whether it needs it or not.
NORMALIZERS: dict[str, Callable[[int], Normalizer]] = {
  'softmax': lambda num_iters: sinkhorn.softmax,
  'sinkhorn': _sinkhorn,
}


def create(name: str, num_iters: int) -> Normalizer:
  """The normalizer of a config.

  Args:
    name: `config.model.normalizer`.
    num_iters: `config.model.num_iters`.

  Raises:
    ValueError: for an unknown name.
  """
  if name not in NORMALIZERS:
    raise ValueError(
      f'model.normalizer must be one of {sorted(NORMALIZERS)}, got {name!r}.'
    )
  return NORMALIZERS[name](num_iters)
