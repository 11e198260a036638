"""Opening a run for evaluation and analysis, on any machine."""

import dataclasses
import os
import pathlib
from typing import Any

import flax.linen as nn
import jax
import ml_collections

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import normalizers
from sinkformer_jax import numerics
from sinkformer_jax import paths
from sinkformer_jax import tasks
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import evaluation
from sinkformer_jax.training import hosts
from sinkformer_jax.training import sharding
from sinkformer_jax.training import steps
from sinkformer_jax.training import workdir as workdir_lib


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that has been opened.

  Attributes:
    workdir: its directory.
    config: the config it was trained with; of texts, with the path of the
      run's own tokenizer.
    info: its data set.
    model: its model.
    params: parameters at `step`, on every device.
    step: which checkpoint they are from.
  """

  workdir: pathlib.Path
  config: ml_collections.ConfigDict
  info: data.DatasetInfo
  model: nn.Module
  params: Any
  step: int


@numerics.fixed()
def load_run(
  workdir: str | os.PathLike,
  step: int | None = None,
  normalizer: normalizers.Normalizer | None = None,
) -> Run:
  """Opens a run, finished or not, trained on any number of devices.

  Args:
    workdir: its directory.
    step: which checkpoint; None for the newest.
    normalizer: takes the place of the one it was trained with; needed again if
      it was a function.

  Returns:
    The run.

  Raises:
    errors.RunError: if there is no such run or checkpoint, or it is damaged.
  """
  workdir = paths.resolve(workdir, 'workdir')
  fields, filled_in = workdir_lib.read_config(workdir)
  workdir_lib.say_filled_in(workdir, filled_in)
  config = ml_collections.ConfigDict(fields)
  info = workdir_lib.read_info(workdir)
  workdir_lib.use_own_tokenizer(config, workdir, info)
  try:
    model = models.create_model(config.model, info, normalizer)
    shapes = jax.eval_shape(model.init, numerics.key(0), info.example())
  except (ValueError, AttributeError, TypeError) as error:
    raise errors.RunError(
      f'{workdir}: the model of its config.json cannot be made: {error} A run'
      " trained with one's own normalizer needs it again: load_run(workdir,"
      ' normalizer=...).'
    ) from error
  with checkpoints.Checkpoints(workdir) as saved:
    everywhere = sharding.replicated(sharding.create_mesh())
    abstract = checkpoints.abstract(shapes['params'], everywhere)
    params = saved.restore({'params': abstract}, step)['params']
    step = saved.steps[-1] if step is None else step
  return Run(workdir, config, info, model, params, step)


def check_dataset(run: Run, dataset: data.Dataset) -> None:
  """Refuses data that a run was not trained on.

  Raises:
    errors.RunError: if the examples or the tokenizer are others.
  """
  ours, theirs = (x.provenance for x in (run.info, dataset.info))
  if ours['fingerprint'] != theirs['fingerprint']:
    raise errors.RunError(
      f'{run.workdir} was trained on {ours["origin"]} {dict(run.info.splits)},'
      f' not on {theirs["origin"]} {dict(dataset.info.splits)}. Say where that'
      ' data is with --data_dir=DIR or $SINKFORMER_DATA_DIR.'
    )
  workdir_lib.check_tokenizer(run.workdir, ours, theirs)


@numerics.fixed()
def evaluate_run(
  run: Run, dataset: data.Dataset, split: str, batch_size: int
) -> dict[str, Any]:
  """Loss, accuracy and marginal errors of a run on a split.

  Args:
    run: an opened run.
    dataset: the data it was trained on.
    split: 'train', 'validation' or 'test'.
    batch_size: examples in a batch; the result does not depend on it.

  Returns:
    See `evaluation.evaluate`.

  Raises:
    errors.RunError: if `dataset` is not the data of the run.
    errors.ConfigError: if the devices do not divide the batch.
  """
  check_dataset(run, dataset)
  mesh = sharding.create_mesh()
  sharding.check_batch_size(mesh, 'batch_size', batch_size)
  with hosts.lost_peers_are_named():
    result = evaluation.evaluate(
      steps.make_eval_step(run.model, mesh, tasks.TASKS[run.info.task]),
      run.params,
      dataset,
      split,
      batch_size,
      mesh,
    )
  evaluation.warn_of_columns(run.config.model.normalizer, result)
  return result
