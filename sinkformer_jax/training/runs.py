"""Opening a run for evaluation and analysis, on any machine."""

import dataclasses
import os
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import models
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import workdir as workdir_lib


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that has been opened.

  Attributes:
    workdir: its directory.
    config: the config it was trained with.
    info: its data set.
    model: its model.
    params: parameters at `step`, on the first device.
    step: which checkpoint they are from.
  """

  workdir: pathlib.Path
  config: ml_collections.ConfigDict
  info: data.DatasetInfo
  model: nn.Module
  params: Any
  step: int


def load_run(
  workdir: str | os.PathLike,
  step: int | None = None,
  normalizer: attention.Normalizer | None = None,
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
  workdir = workdir_lib.normalize(workdir)
  fields = workdir_lib.read_json(workdir / 'config.json')
  config = ml_collections.ConfigDict(fields)
  info = workdir_lib.read_info(workdir)
  model = models.create_model(config.model, info, normalizer)
  example = jnp.zeros((1, *info.input_shape))
  with checkpoints.Checkpoints(workdir) as saved:
    shapes = jax.eval_shape(model.init, jax.random.key(0), example)['params']
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = checkpoints.abstract(shapes, here)
    params = saved.restore({'params': abstract}, step)['params']
    step = saved.steps[-1] if step is None else step
  return Run(workdir, config, info, model, params, step)
