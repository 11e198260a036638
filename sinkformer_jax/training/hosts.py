"""Several processes, one a host or device, that train together.

`jax.distributed` connects them; see `launch.distributed`. Here is what they
agree on. The *first* process has index 0: it alone writes, except for
checkpoints. Where there is only one process, all of this does nothing.
"""

from collections.abc import Mapping
import contextlib
import hashlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from sinkformer_jax import errors
from sinkformer_jax.training import sharding


def are_several() -> bool:
  """Whether there are other processes; does not touch devices."""
  return jax.distributed.is_initialized()


def is_first() -> bool:
  """Whether this is the process that writes."""
  return not are_several() or jax.process_index() == 0


def from_first(value: int) -> int:
  """The value that the first process has, on all."""
  if not are_several():
    return value
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


@contextlib.contextmanager
def first_then_others():
  """Runs the body on the first process, then on the others.

  Raises:
    errors.RunError: on the others, in place of the body, if it raised an
      `errors.UserError` on the first.
  """
  # What process 0 says: whether it failed.
  if not is_first() and from_first(False):
    raise errors.RunError('process 0 could not go on; its log says why.')
  try:
    yield
  except errors.UserError:
    if is_first():
      from_first(True)
    raise
  if is_first():
    from_first(False)


def check_same(values: Mapping[str, Any]) -> None:
  """Refuses to go on with processes that differ.

  Args:
    values: by name; as many on all processes. Their texts are compared.

  Raises:
    errors.RunError: on all processes, if one value is not the same everywhere.
  """
  if not are_several():
    return
  digests = [hashlib.sha256(repr(x).encode()).digest() for x in values.values()]
  # [processes, values, bytes]
  everywhere = multihost_utils.process_allgather(
    np.array([np.frombuffer(x, np.uint8) for x in digests])
  )
  differs = (everywhere != everywhere[0]).any((0, 2))
  if differs.any():
    pairs = zip(values.items(), differs, strict=True)
    here = ', '.join(f'{k}={v!r}' for (k, v), is_other in pairs if is_other)
    raise errors.RunError(
      f'the processes of this run differ: here {here}. Give all of them the'
      ' same command and the same data.'
    )


def on_any(flag: bool) -> jax.Array:
  """Whether `flag` is True on any process.

  All have to ask. The answer is the same on all, and on its way: who looks at
  it waits for what the devices are doing.
  """
  flags = {'flag': np.full(jax.local_device_count(), flag)}
  mesh = sharding.create_mesh()
  return _any(sharding.put_batch(mesh, mesh.size, flags)['flag'])


_any = jax.jit(jnp.any)


@contextlib.contextmanager
def lost_peers_are_named():
  """Says of a failed computation that another process may have ended.

  Raises:
    errors.RunError: in place of JAX's error, where there are several processes.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if not are_several():
      raise
    text = ' '.join(str(error).split())[:200]
    raise errors.RunError(
      f'a computation of all {jax.process_count()} processes failed ({text}).'
      ' If another process has ended, its log says why. Start them all again to'
      ' go on from the newest checkpoint.'
    ) from error
