"""Batches as pure functions: no iterator, no state, so resuming is exact."""

from collections.abc import Iterator
import functools
from typing import Any

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
def _epoch_batches(dataset, batch_size, seed, epoch):
  """Indices of the examples of an epoch, ``[steps, batch_size]``."""
  steps = steps_per_epoch(dataset, batch_size)
  rng = np.random.default_rng((seed, epoch))
  order = rng.permutation(dataset.info.splits['train'])[: steps * batch_size]
  if not dataset.bucket_lengths:
    return order.reshape(steps, batch_size)
  # Texts of a like length share a batch; the batches come in any order.
  batches = _by_length(dataset, 'train', order).reshape(steps, batch_size)
  return batches[rng.permutation(steps)]


def _by_length(dataset, split, indices):
  """Puts texts of one bucket side by side, in the order they have there."""
  lengths = dataset.splits[split]['length'][indices]
  buckets = np.searchsorted(dataset.bucket_lengths, lengths)
  return indices[np.argsort(buckets, kind='stable')]


def train_batch(
  dataset: dataset_lib.Dataset,
  step: int,
  batch_size: int,
  seed: int,
  rows: np.ndarray | slice = slice(None),
) -> dataset_lib.Arrays:
  """The batch of a training step, a pure function of `seed` and `step`.

  Every epoch is a new permutation of the training split. Texts are put into
  batches with others of a like length (see `Dataset.bucket_lengths`), images
  are augmented, if the data set is to.

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
  indices = _epoch_batches(dataset, batch_size, seed, epoch)[i]
  if dataset.augment:
    indices = indices[rows]
    keys = np.stack(np.broadcast_arrays(seed, epoch, indices), axis=-1)
    arrays = dataset.augment(_take(dataset, 'train', indices), keys)
    return dataset.preprocess(arrays)
  return _prepared(dataset, 'train', indices, rows)


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
    up the last batch. Images come in the order of the split, texts by
    length. Whatever the rows, there are as many batches.
  """
  num_examples = dataset.info.splits[split]
  order = np.arange(num_examples)
  if dataset.bucket_lengths:
    order = _by_length(dataset, split, order)
  for start in range(0, num_examples, batch_size):
    places = np.arange(start, start + batch_size)
    mask = places < num_examples
    indices = order[np.where(mask, places, start)]
    batch = _prepared(dataset, split, indices, rows)
    mask = mask[rows]
    yield {**batch, '_mask': mask}


def _prepared(dataset, split, indices, rows):
  """Rows of a batch, padded to what the whole batch needs."""
  if not dataset.bucket_lengths:
    return dataset.preprocess(_take(dataset, split, indices[rows]))
  batch = dataset.preprocess(_take(dataset, split, indices))
  return {key: x[rows] for key, x in batch.items()}


def _take(dataset, split, indices):
  return {key: x[indices] for key, x in dataset.splits[split].items()}


def model_inputs(batch: dataset_lib.Arrays) -> tuple[Any, Any]:
  """What a model is called with: ``(inputs, mask)``; mask None if all valid."""
  inputs = batch['tokens'] if 'tokens' in batch else batch['image']
  return inputs, batch.get('mask')
