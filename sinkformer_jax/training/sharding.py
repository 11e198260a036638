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


def check_batch_sizes(mesh: jax.sharding.Mesh, **sizes: int) -> None:
  """Refuses batches that the devices do not divide.

  Raises:
    errors.ConfigError: names the field and the number of devices.
  """
  for field, size in sizes.items():
    if size % mesh.size:
      raise errors.ConfigError(
        f'config.{field}={size} cannot be split evenly between {mesh.size}'
        f' devices; use a multiple of {mesh.size}.'
      )
