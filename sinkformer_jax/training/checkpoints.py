"""Checkpoints: the only module that knows Orbax."""

from collections.abc import Sequence
import hashlib
import logging
import pathlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np
from orbax.checkpoint import v1 as ocp

from sinkformer_jax import errors
from sinkformer_jax.training import hosts

logger = logging.getLogger(__name__)


class Checkpoints:
  """The checkpoints of a run, ``workdir/checkpoints/<step>``.

  A context manager. Saving is synchronous and atomic: a step is there whole,
  or not at all. The content is saved with its checksums and checked when it is
  read, since Orbax itself takes most flipped bits for good ones.

  Attributes:
    directory: where they are.
    best: a step that is not deleted as long as it is named here.
  """

  directory: pathlib.Path
  best: int | None

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
      keep_steps: steps that are kept always, as step 0 and `best` are.
      writable: make the directory if need be, and clear what a killed save
        has left behind.

    Raises:
      errors.RunError: if the directory is not there or cannot be used.
    """
    # Orbax refuses relative paths.
    self.directory = workdir.resolve() / 'checkpoints'
    self.best = None
    if not writable and not self.directory.is_dir():
      raise errors.RunError(f'{workdir} holds no checkpoints.')
    policies = ocp.training.preservation_policies
    preservation = None
    if keep is not None:
      preservation = policies.AnyPreservationPolicy(
        [
          policies.LatestN(keep),
          policies.CustomSteps((0, *keep_steps)),
          _Best(self),
        ]
      )
    context = ocp.Context()
    context.pytree_options.loading.partial_load = True
    # Devices save slices of an array that all of them have; a small one is not
    # worth the program that cuts it.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    try:
      self._checkpointer = ocp.training.Checkpointer(
        self.directory,
        context=context,
        preservation_policy=preservation,
        cleanup_tmp_directories=writable,
      )
    except Exception as error:
      raise errors.RunError(
        f'{self.directory} cannot be opened ({_brief(error)}). If that is of a'
        ' _CHECKPOINT_METADATA, move the checkpoint that has it out of there.'
      ) from error

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    try:
      self._checkpointer.close()
    except Exception as error:
      # It raises what a save has raised once more.
      if exception[0] is None:
        raise errors.RunError(
          f'{self.directory} could not be closed ({_brief(error)}).'
        ) from error

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
      checksums = {'sha256': _checksums(state)}
      if not self._checkpointer.save(
        step, state, force=True, custom_metadata=checksums
      ):
        raise RuntimeError('Orbax did not save it')
    except Exception as error:
      if hosts.is_of_devices(error):
        raise
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
      The tree, with arrays of the types asked for. Where others were saved,
      the log says so.

    Raises:
      errors.RunError: if the checkpoint is not there, is damaged, or is of
        another model.
    """
    steps = self._some_steps()
    step = steps[-1] if step is None else step
    if step not in steps:
      raise errors.RunError(
        f'{self.directory} has no checkpoint of step {step}; it has {steps}.'
      )
    try:
      return self._load(abstract_state, step)
    except Exception as error:
      if hosts.is_of_devices(error) or isinstance(error, _OtherModelError):
        raise
      others = [x for x in steps if x != step]
      raise errors.RunError(
        f'checkpoint {self.directory / str(step)} cannot be read'
        f' ({_brief(error)}). The others are {others}: name one of them with'
        ' --step. Training goes on from the newest that can be read.'
      ) from error

  def restore_newest_readable(self, abstract_state: Any) -> Any:
    """Restores the newest checkpoint that is whole, and sets others aside.

    Newer ones, which are damaged, are named in the log and moved out of the
    way, to ``workdir/damaged_checkpoints``: training will come to their steps
    again. Nothing is deleted.

    Args:
      abstract_state: see `restore`.

    Returns:
      The tree, with arrays.

    Raises:
      errors.RunError: if none can be read, or the newest that is whole is of
        another model; then all stay where they are.
    """
    steps, damaged = self._some_steps(), {}
    for step in reversed(steps):
      state, problem = None, ''
      try:
        state = self._load(abstract_state, step)
      except Exception as error:
        if hosts.is_of_devices(error) or isinstance(error, _OtherModelError):
          raise
        problem = _brief(error)
      # All processes go on from the same step.
      if not multihost_utils.process_allgather(np.array(bool(problem))).any():
        break
      damaged[step] = problem or 'another process cannot read it'
    else:
      raise errors.RunError(
        f'no checkpoint in {self.directory} can be read: {damaged}. Restore'
        ' them from a copy, or start anew in another --workdir.'
      )
    for damaged_step, problem in damaged.items():
      logger.warning(
        'checkpoint %s is damaged (%s): going back to step %d',
        self.directory / str(damaged_step),
        problem,
        step,
      )
    self._set_aside(damaged)
    return state

  def _some_steps(self):
    if not self.steps:
      raise errors.RunError(f'{self.directory} holds no complete checkpoint.')
    return self.steps

  def _load(self, abstract_state, step):
    about = self._checkpointer.metadata(step)
    if about.init_timestamp_nsecs is None:
      raise ValueError('_CHECKPOINT_METADATA is missing or damaged')
    where = self.directory / str(step)
    # Read and checked as it was saved: a checksum is of one type and shape.
    # Runs of earlier versions have no checksums.
    expected = about.custom_metadata.get('sha256', {})
    lost = expected.keys() - _named(about.metadata).keys()
    if lost:
      raise ValueError(f'its list of arrays has lost {min(lost)}')
    saved = _as_saved(where, abstract_state, about.metadata)
    state = self._checkpointer.load(step, saved)
    actual = _checksums(state) if expected else {}
    wrong = [x for x in actual if actual[x] != expected.get(x)]
    if wrong:
      raise ValueError(f'checksums differ, the first of {wrong[0]}')
    return _as_asked(where, abstract_state, state)

  def _set_aside(self, steps):
    if steps and jax.process_index() == 0:
      folder = self.directory.parent / 'damaged_checkpoints'
      try:
        folder.mkdir(exist_ok=True)
        for step in steps:
          target, number = folder / str(step), 1
          while target.exists():
            target, number = folder / f'{step}.{number}', number + 1
          (self.directory / str(step)).rename(target)
          logger.warning('moved to %s', target)
      except OSError as error:
        raise errors.RunError(
          f'damaged checkpoints could not be moved to {folder}:'
          f' {error.strerror}. Move {list(steps)} out of {self.directory}.'
        ) from error
    if steps:
      multihost_utils.sync_global_devices('damaged checkpoints')
      self._checkpointer.reload()


class _OtherModelError(errors.RunError):
  """A checkpoint that does not fit what is asked for; it is not damaged."""


def _named(tree):
  """``{path: leaf}``; Orbax keeps tuples as lists, fields as keys of dicts."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def _as_saved(where, abstract_state, metadata):
  """What is asked for, with the types and shapes of the checkpoint."""
  there = _named(metadata)
  missing = [x for x in _named(abstract_state) if x not in there]
  if missing:
    raise _OtherModelError(
      f'checkpoint {where} has no {missing[0]}: it is of another model or'
      ' optimizer than the config of the run. It is not damaged.'
    )

  def leaf(path, asked):
    saved = there[jax.tree_util.keystr(path, simple=True, separator='/')]
    if saved.dtype != asked.dtype:
      # NumPy has every type, whatever JAX is set to.
      return np.empty(saved.shape, saved.dtype)
    return jax.ShapeDtypeStruct(
      saved.shape, saved.dtype, sharding=asked.sharding
    )

  return jax.tree_util.tree_map_with_path(leaf, abstract_state)


def _as_asked(where, abstract_state, state):
  """Converts types; refuses shapes, which nothing can convert."""
  asked, saved = _named(abstract_state), _named(state)
  for name, x in asked.items():
    if x.shape != saved[name].shape:
      raise _OtherModelError(
        f'checkpoint {where} has {name} of shape {saved[name].shape}, and'
        f' {x.shape} is asked for: it is of another model than the config of'
        ' the run. It is not damaged.'
      )
  others = [name for name, x in asked.items() if x.dtype != saved[name].dtype]
  if others:
    logger.warning(
      '%s was saved with other types: %d arrays are converted, as %s from %s to'
      ' %s. Results are not those of a run that had one type throughout.',
      where,
      len(others),
      others[0],
      saved[others[0]].dtype,
      asked[others[0]].dtype,
    )

  def leaf(x, y):
    if x.dtype == y.dtype:
      return y
    y = y.astype(x.dtype)
    return jax.make_array_from_callback(y.shape, x.sharding, lambda i: y[i])

  return jax.tree.map(leaf, abstract_state, state)


class _Best:
  """Orbax's policy of preservation that keeps `Checkpoints.best`."""

  def __init__(self, checkpoints):
    self._checkpoints = checkpoints

  def should_preserve(self, checkpoints, *, context):
    del context
    return [x.step == self._checkpoints.best for x in checkpoints]


def _checksums(state):
  """SHA-256 of each array of a tree, by its path, dtype and shape included."""
  checksums = {}
  for path, array in jax.tree_util.tree_leaves_with_path(state):
    # Arrays that are split between processes are not here to be read.
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
      array = np.asarray(array)
      total = hashlib.sha256(f'{array.dtype} {array.shape}'.encode())
      total.update(np.ascontiguousarray(array))
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      checksums[name] = total.hexdigest()
  return checksums


def _brief(error):
  # Orbax wraps what went wrong into long words about its handlers.
  while error.__cause__:
    error = error.__cause__
  text = ' '.join(str(error).split())
  text = text.partition(' [tensorstore_spec')[0]
  text = text if len(text) <= 400 else f'{text[:400]}...'
  return f'{type(error).__name__}: {text}'


def abstract(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """Shapes and dtypes of a tree, to be restored with `sharding`."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )
