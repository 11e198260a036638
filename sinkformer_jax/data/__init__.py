"""Data sets: `load(config.data)` gives a `Dataset` of arrays in memory."""

import ml_collections

from sinkformer_jax.data import mnist
from sinkformer_jax.data.batching import eval_batches
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
  'steps_per_epoch',
  'train_batch',
]

# What the names in a config mean: modules with `load`, `SOURCES` and
# `INPUT_SHAPE`.
DATASETS = {'mnist': mnist}


def load(config: ml_collections.ConfigDict) -> Dataset:
  """Loads the data set that `config.data` names.

  Args:
    config: the section `config.data`: `name`, `source` ('auto', 'files',
      'tfds' or 'sample') and `dir` ('' if unset).

  Returns:
    The data set; `info.provenance` says where it came from.

  Raises:
    errors.DataError: if no source could be read; says what was tried.
  """
  return DATASETS[config.name].load(config.source, config.dir)
