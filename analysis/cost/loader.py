"""Part `loader` of `analysis.cost`: batches beside the step that takes them."""

import importlib
import itertools
import os
import tempfile
import time
from unittest import mock

import jax
import numpy as np

from analysis.common import timing
from analysis.cost import setup as cost_setup
from sinkformer_jax import data
from sinkformer_jax import models
from sinkformer_jax.data import sources
from sinkformer_jax.training import optimizer
from sinkformer_jax.training import sharding
from sinkformer_jax.training import steps

STEP = 'training step, softmax'


def loader_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[timing.Row]:
  """Each data set's loader, and the training step of its softmax config.

  Softmax is the faster one, and texts are of the shortest bucket: steps that
  need most from a loader. Sets that are not there are left out.
  """
  rows = []
  for name in data.DATASETS:
    config = importlib.import_module(f'configs.{name}_softmax').get_config(
      options.preset.configs
    )
    with (
      tempfile.TemporaryDirectory() as cache,
      mock.patch.dict(os.environ, SINKFORMER_CACHE_DIR=cache),
    ):
      report(f'{name}: loading into an empty cache, then from it')
      try:
        first_load_s, dataset = _load(config)
      except sources.NotThereError as error:
        report(f'{name} is left out: {error}')
        continue
      load_s, dataset = _load(config)
      about = {'first_load_s': first_load_s, 'load_s': load_s}
      rows += _rows(config, dataset, about, options.repeats, report)
  return rows


def _load(config):
  start = time.perf_counter()
  dataset = data.load(config.data)
  return time.perf_counter() - start, dataset


def _rows(config, dataset, about, repeats, report):
  size = config.batch_size
  numbers = itertools.count()

  def load_batch():
    return data.train_batch(dataset, next(numbers), size, config.seed)

  batch = min(
    (load_batch() for _ in range(8)),
    key=lambda x: data.model_inputs(x)[0].shape[1],
  )
  shape = 'x'.join(map(str, data.model_inputs(batch)[0].shape))
  rows = timing.compare(
    f'{config.data.name}, batch {shape}',
    {
      'loader': timing.Alternative(load_batch, about),
      STEP: timing.Alternative(_training(config, dataset, batch), {}, 'loader'),
    },
    repeats,
    report,
  )
  for row in rows:
    row['examples_per_s'] = 1e3 * size / row['ms']
  return rows


def _training(config, dataset, batch):
  model = models.create_model(config.model, dataset.info)
  tx = optimizer.create_optimizer(config.optimizer, config.total_steps)
  schedule = optimizer.create_schedule(config.optimizer, config.total_steps)
  mesh = sharding.create_mesh()
  seed = np.uint32(config.seed)
  state = jax.jit(lambda: steps.create_state(model, tx, dataset.info, seed))()
  train_step = steps.make_train_step(model, tx, schedule, mesh)
  batch = jax.device_put(batch, sharding.split_batch(mesh))

  def call():
    nonlocal state
    state, metrics = train_step(state, batch, seed)
    return metrics['loss']

  return call
