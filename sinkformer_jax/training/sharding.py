"""Where arrays lie: state on every device, batches split between them.

All rules of partition are here; elsewhere arrays are handled as if there were
one device.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import numpy as np

from sinkformer_jax import errors
from sinkformer_jax import normalizers

_BATCH = jax.sharding.PartitionSpec('data')


def create_mesh() -> jax.sharding.Mesh:
  """All devices of all processes along one axis, 'data'."""
  return jax.make_mesh(
    (jax.device_count(),),
    ('data',),
    axis_types=(jax.sharding.AxisType.Auto,),
  )


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """The whole array on every device."""
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def split_batch(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """The first axis split between devices."""
  return jax.sharding.NamedSharding(mesh, _BATCH)


def check_batch_size(mesh: jax.sharding.Mesh, name: str, size: int) -> None:
  """Refuses a batch that the devices do not divide.

  Raises:
    errors.ConfigError: gives the name of the size and the number of devices.
  """
  if size % mesh.size:
    raise errors.ConfigError(
      f'{name}={size} cannot be split evenly between {mesh.size} devices; use a'
      f' multiple of {mesh.size}.'
    )


def own_rows(mesh: jax.sharding.Mesh, batch_size: int) -> np.ndarray:
  """Which rows of a batch go to the devices of this process, in order."""
  places = split_batch(mesh).addressable_devices_indices_map((batch_size,))
  return np.sort(
    np.concatenate([np.arange(batch_size)[x] for x in places.values()])
  )


def put_batch(
  mesh: jax.sharding.Mesh, batch_size: int, rows: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
  """Puts a batch on all devices.

  Args:
    mesh: the devices.
    batch_size: examples in the whole batch.
    rows: the rows of this process, see `own_rows`.

  Returns:
    Arrays ``[batch_size, ...]``.
  """
  return {
    name: jax.make_array_from_process_local_data(
      split_batch(mesh), x, (batch_size, *x.shape[1:])
    )
    for name, x in rows.items()
  }


def on_each_device(model: nn.Module, mesh: jax.sharding.Mesh) -> nn.Module:
  """A model with its normalizer on each device, if there are several."""
  if mesh.size == 1:
    return model
  normalizer = normalizer_on_each_device(model.encoder.normalizer, mesh)
  return model.clone(encoder=model.encoder.clone(normalizer=normalizer))


def normalizer_on_each_device(
  normalizer: normalizers.Normalizer, mesh: jax.sharding.Mesh
) -> normalizers.Normalizer:
  """A normalizer that each device runs for the part of the batch it holds.

  Left to itself, XLA cannot split a kernel's matrices between devices, and
  keeps all devices in step in a loop that ends when nothing more changes.
  """
  # Nothing here is the same on all devices, so that there is nothing to check,
  # and loops that start from constants would not pass.
  shared_out = jax.shard_map(
    normalizer, mesh=mesh, in_specs=_BATCH, out_specs=_BATCH, check_vma=False
  )
  return lambda logits, mask=None: shared_out(logits, mask)
