"""Part `loader` of `analysis.cost`: batches beside the step that takes them."""

import importlib
import itertools
import logging
import os
import pathlib
import tempfile
import time
from unittest import mock

import jax

from analysis.common import timing
from analysis.cost import setup as cost_setup
from sinkformer_jax import data
from sinkformer_jax.data import sources
from sinkformer_jax.training import loop
from sinkformer_jax.training import sharding

logger = logging.getLogger('sinkformer_jax.cost')

STEP = 'training step, softmax'


def loader_rows(options: cost_setup.Options) -> list[timing.Row]:
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
      logger.info('%s: loading into an empty cache, then from it', name)
      try:
        about = {'first_load_s': _seconds_to_load(config)}
      except sources.NotThereError as error:
        logger.info('%s is left out: %s', name, error)
        continue
      about['load_s'] = _seconds_to_load(config)
      # It makes steps and does not run, so it writes nothing.
      training = loop.Training(config, pathlib.Path(cache))
      rows += _rows(training, about, options.repeats)
  return rows


def _seconds_to_load(config):
  start = time.perf_counter()
  data.load(config.data)
  return time.perf_counter() - start


def _rows(training, about, repeats):
  config, size = training.config, training.config.batch_size
  numbers = itertools.count()

  def load_batch():
    return data.train_batch(training.dataset, next(numbers), size, config.seed)

  batch = min(
    (load_batch() for _ in range(8)),
    key=lambda x: data.model_inputs(x)[0].shape[1],
  )
  shape = 'x'.join(map(str, data.model_inputs(batch)[0].shape))
  rows = timing.compare(
    f'{config.data.name}, batch {shape}',
    {
      'loader': timing.Alternative(load_batch, about),
      STEP: timing.Alternative(_steps(training, batch), {}, 'loader'),
    },
    repeats,
  )
  for row in rows:
    row['examples_per_s'] = 1e3 * size / row['ms']
  return rows


def _steps(training, batch):
  state = training.create_state(training.seed)
  batch = jax.device_put(batch, sharding.split_batch(training.mesh))

  def call():
    nonlocal state
    state, metrics = training.train_step(state, batch, training.seed)
    return metrics['loss']

  return call
