"""What decides numbers besides code and data: types, keys, and settings of JAX.

JAX takes many settings from the environment. Those that would give the same
seed other weights, other dropout or other types are fixed here; those that may
have to differ between machines are recorded with every start of a training.
"""

from collections.abc import Iterator
import contextlib
import os
from typing import Any

import jax
import jax.numpy as jnp

_PRNG = 'threefry2x32'
# Settings of JAX and variables of the environment that change the programs of
# XLA, and so the last bits of results or more.
_CONFIG = (
  'jax_default_matmul_precision',
  'jax_disable_jit',
  'jax_disable_most_optimizations',
  'jax_exec_time_optimization_effort',
  'jax_optimization_level',
)
_VARIABLES = (
  'LIBTPU_INIT_ARGS',
  'NVIDIA_TF32_OVERRIDE',
  'SINKFORMER_FUSED',
  'XLA_FLAGS',
)


@contextlib.contextmanager
def fixed(x64: bool = False) -> Iterator[None]:
  """Fixes what JAX_ENABLE_X64 and variables like it would change.

  A context manager, and a decorator of functions. It fixes the types of new
  arrays, the rules of promotion, and how random numbers are made.

  Args:
    x64: whether arrays may be of 64 bits.
  """
  with (
    jax.enable_x64(x64),
    jax.default_prng_impl(_PRNG),
    jax.threefry_partitionable(True),
    jax.numpy_dtype_promotion('standard'),
    jax.numpy_rank_promotion('allow'),
  ):
    yield


def key(seed: int | jax.Array) -> jax.Array:
  """The random key of a seed from 0 to 2^32 - 1, whatever JAX is set to.

  It equals ``jax.random.key(seed)`` of an unchanged JAX.
  """
  seed = jnp.asarray(seed).astype(jnp.uint32)
  data = jnp.stack([jnp.zeros_like(seed), seed])
  return jax.random.wrap_key_data(data, impl=_PRNG)


def settings() -> dict[str, Any]:
  """What is not fixed and may change results, ready for JSON."""
  # An attribute knows of context managers; not all settings are attributes.
  values = jax.config.values
  config = {x: str(getattr(jax.config, x, values[x])) for x in _CONFIG}
  return config | {name: os.environ.get(name, '') for name in _VARIABLES}
