"""Checkpoints: the only module that knows Orbax."""

from collections.abc import Sequence
import pathlib
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from sinkformer_jax import errors


class Checkpoints:
  """The checkpoints of a run, ``workdir/checkpoints/<step>``.

  A context manager. Saving is synchronous and atomic: a step is there whole,
  or not at all.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    keep: int | None = None,
    keep_steps: Sequence[int] = (),
    writable: bool = False,
  ):
    """Opens the checkpoints of a run.

    Args:
      workdir: the run directory.
      keep: how many of the newest are kept; None keeps all.
      keep_steps: steps that are kept always, as step 0 is.
      writable: make the directory if need be, and clear what a killed save
        has left behind.
    """
    # Orbax refuses relative paths.
    self.directory = workdir.resolve() / 'checkpoints'
    if not writable and not self.directory.is_dir():
      raise errors.RunError(f'{workdir} holds no checkpoints.')
    policies = ocp.training.preservation_policies
    preservation = None
    if keep is not None:
      preservation = policies.AnyPreservationPolicy(
        [policies.LatestN(keep), policies.CustomSteps((0, *keep_steps))]
      )
    context = ocp.Context()
    context.pytree_options.loading.partial_load = True
    # Devices save slices of an array that all of them have; a small one is not
    # worth the program that cuts it.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    self._checkpointer = ocp.training.Checkpointer(
      self.directory,
      context=context,
      preservation_policy=preservation,
      cleanup_tmp_directories=writable,
    )

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._checkpointer.close()

  @property
  def steps(self) -> list[int]:
    """Steps that are there, in order."""
    return sorted(x.step for x in self._checkpointer.checkpoints)

  def save(self, step: int, state: Any) -> None:
    """Saves `state` (a tree of arrays) unless the step is there already.

    Raises:
      errors.RunError: if it could not be written; what was there is intact.
    """
    if step in self.steps:
      return
    try:
      if not self._checkpointer.save(step, state, force=True):
        raise RuntimeError('Orbax did not save it')
    except jax.errors.JaxRuntimeError:
      raise  # Of devices or other processes, not of the disk.
    except Exception as error:
      raise errors.RunError(
        f'checkpoint {step} could not be written to {self.directory}'
        f' ({_brief(error)}). Complete checkpoints: {self.steps}. Free some'
        ' space and start again to go on from the newest.'
      ) from error

  def restore(self, abstract_state: Any, step: int | None = None) -> Any:
    """Restores a tree, or the part of it that is asked for.

    Args:
      abstract_state: tree of `jax.ShapeDtypeStruct`, whose shardings say where
        the arrays go, whatever devices they were saved from.
      step: which checkpoint; None for the newest.

    Returns:
      The tree, with arrays.

    Raises:
      errors.RunError: if the checkpoint is not there or cannot be read.
    """
    steps = self.steps
    if not steps:
      raise errors.RunError(f'{self.directory} holds no complete checkpoint.')
    step = steps[-1] if step is None else step
    if step not in steps:
      raise errors.RunError(
        f'{self.directory} has no checkpoint of step {step}; it has {steps}.'
      )
    try:
      return self._checkpointer.load(step, abstract_state)
    except jax.errors.JaxRuntimeError:
      raise
    except Exception as error:
      others = [x for x in steps if x != step]
      raise errors.RunError(
        f'checkpoint {self.directory / str(step)} cannot be read'
        f' ({_brief(error)}). The others are {others}; to go on from the'
        ' newest of them, move the unreadable one out of the directory.'
      ) from error


def _brief(error):
  text = ' '.join(str(error).split())
  text = text if len(text) <= 200 else f'{text[:200]}...'
  return f'{type(error).__name__}: {text}'


def abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Shapes and dtypes of a tree, to be restored with `sharding`."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )
