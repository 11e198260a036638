"""Data sets: `load(config.data)` gives a `Dataset` of arrays in memory."""

import importlib
import pkgutil

import ml_collections

from sinkformer_jax.data.batching import eval_batches
from sinkformer_jax.data.batching import model_inputs
from sinkformer_jax.data.batching import steps_per_epoch
from sinkformer_jax.data.batching import train_batch
from sinkformer_jax.data.dataset import Dataset
from sinkformer_jax.data.dataset import DatasetInfo

__all__ = [
  'DATASETS',
  'Dataset',
  'DatasetInfo',
  'eval_batches',
  'load',
  'model_inputs',
  'steps_per_epoch',
  'train_batch',
]


def _datasets():
  modules = {
    x.name: importlib.import_module(f'{__name__}.{x.name}')
    for x in pkgutil.iter_modules(__path__)
  }
  return {k: v for k, v in modules.items() if hasattr(v, 'KIND')}


# What the names in a config mean: the modules of this package that have a
# `KIND` ('image' or 'text'). Such a module has `load`, `SOURCES`, `input_shape`
# and `RULES` (of its own config fields) too.
DATASETS = _datasets()


def load(config: ml_collections.ConfigDict) -> Dataset:
  """Loads the data set that `config.data` names.

  Args:
    config: the section `config.data`: `name`, `source` ('auto', 'files',
      'tfds' or, for MNIST, 'sample'), `dir` ('' if unset), and what else the
      set's `load` takes.

  Returns:
    The data set; `info.provenance` says where it came from.

  Raises:
    errors.DataError: if no source could be read; says what was tried.
  """
  fields = config.to_dict()
  dataset = DATASETS[fields.pop('name')]
  return dataset.load(fields.pop('source'), fields.pop('dir'), **fields)
