"""Batches as pure functions: no iterator, no state, so resuming is exact."""

from collections.abc import Iterator
import functools

import numpy as np

from sinkformer_jax import errors
from sinkformer_jax.data import dataset as dataset_lib


def steps_per_epoch(dataset: dataset_lib.Dataset, batch_size: int) -> int:
  """Training steps in an epoch; an incomplete last batch is left out.

  Raises:
    errors.ConfigError: if the batch is larger than the training split.
  """
  num_examples = dataset.info.splits['train']
  if batch_size > num_examples:
    raise errors.ConfigError(
      f'config.batch_size={batch_size} is larger than the training split of'
      f' {num_examples} examples.'
    )
  return num_examples // batch_size


@functools.lru_cache(maxsize=2)
def _epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.default_rng((seed, epoch)).permutation(num_examples)


def train_batch(
  dataset: dataset_lib.Dataset,
  step: int,
  batch_size: int,
  seed: int,
  rows: np.ndarray | slice = slice(None),
) -> dataset_lib.Arrays:
  """The batch of a training step, a pure function of `seed` and `step`.

  Every epoch is a new permutation of the training split.

  Args:
    dataset: the data set.
    step: from 0.
    batch_size: examples in a batch.
    seed: of the order of examples.
    rows: which of the batch's examples are wanted.

  Returns:
    Preprocessed arrays with `batch_size` examples, or those of `rows`.
  """
  epoch, i = divmod(step, steps_per_epoch(dataset, batch_size))
  order = _epoch_order(dataset.info.splits['train'], seed, epoch)
  batch = order[i * batch_size : (i + 1) * batch_size]
  return _take(dataset, 'train', batch[rows])


def eval_batches(
  dataset: dataset_lib.Dataset,
  split: str,
  batch_size: int,
  rows: np.ndarray | slice = slice(None),
) -> Iterator[dataset_lib.Arrays]:
  """Every example of a split once, in batches of one size.

  Args:
    dataset: the data set.
    split: 'train', 'validation' or 'test'.
    batch_size: examples in a batch.
    rows: which examples of each batch are wanted.

  Yields:
    Preprocessed arrays, and ``_mask``: False for the examples that only fill
    up the last batch. Whatever the rows, there are as many batches.
  """
  num_examples = dataset.info.splits[split]
  for start in range(0, num_examples, batch_size):
    indices = np.arange(start, start + batch_size)[rows]
    mask = indices < num_examples
    batch = _take(dataset, split, np.where(mask, indices, 0))
    yield {**batch, '_mask': mask}


def _take(dataset, split, indices):
  arrays = dataset.splits[split]
  return dataset.preprocess({key: x[indices] for key, x in arrays.items()})
