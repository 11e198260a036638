"""Where arrays lie: state on every device, batches split between them."""

import jax

from sinkformer_jax import errors


def create_mesh() -> jax.sharding.Mesh:
  """All devices along one axis, 'data'."""
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
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))


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
