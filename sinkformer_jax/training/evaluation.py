"""Evaluation: every example once, weighted by count."""

from collections.abc import Callable
import logging
from typing import Any

import jax
import numpy as np

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.training import sharding

logger = logging.getLogger(__name__)

# Above this, attention weights should not be called doubly stochastic.
COLUMN_ERROR_THRESHOLD = 1e-2


def evaluate(
  eval_step: Callable[[Any, dict], dict[str, jax.Array]],
  params: Any,
  dataset: data.Dataset,
  split: str,
  batch_size: int,
  mesh: jax.sharding.Mesh,
  should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
  """Mean scores and marginal errors of a split.

  Args:
    eval_step: see `steps.make_eval_step`.
    params: parameters of the model.
    dataset: the data set.
    split: 'train', 'validation' or 'test'.
    batch_size: examples in a batch; the result does not depend on it.
    mesh: devices, of any number of processes: all get the same result.
    should_stop: asked before each batch.

  Returns:
    The mean of each score of the task, such as ``loss`` and ``accuracy``,
    ``count``, and the largest ``row_error`` and
    ``column_error`` of the attention weights used, over the split; their lists
    ``..._by_layer`` too. None if stopped: a part of a split is no result.

  Raises:
    errors.RunError: if a loss is not finite.
  """
  scores, by_layer = {}, []
  # A batch larger than the split would be filled up for nothing.
  largest = -(-dataset.info.splits[split] // mesh.size) * mesh.size
  batch_size = min(batch_size, largest)
  rows = sharding.own_rows(mesh, batch_size)
  for batch in data.eval_batches(dataset, split, batch_size, rows):
    if should_stop():
      return None
    batch = sharding.put_batch(mesh, batch_size, batch)
    result = jax.device_get(eval_step(params, batch))
    mask = result.pop('_mask')
    by_layer.append([result.pop(x) for x in ('row_error', 'column_error')])
    del result['hidden_rms']
    for name, values in result.items():
      scores.setdefault(name, []).append(values[mask])
  # Summed in float64, so that batches of any size give the same mean.
  scores = {k: np.concatenate(v).astype(np.float64) for k, v in scores.items()}
  losses = scores['loss']
  if not np.isfinite(losses).all():
    raise errors.RunError(
      f'the loss of {(~np.isfinite(losses)).sum()} of {len(losses)} {split}'
      ' examples is not finite: the parameters or the data are damaged.'
    )
  row_error, column_error = np.max(by_layer, axis=0)
  return {
    **{name: float(values.mean()) for name, values in scores.items()},
    'count': len(losses),
    **marginals(row_error, column_error),
  }


def marginals(row_error: np.ndarray, column_error: np.ndarray) -> dict:
  """Marginal errors of the layers, as they are logged.

  Args:
    row_error: ``[num_layers]``.
    column_error: ``[num_layers]``.

  Returns:
    The largest of each, and the lists ``..._by_layer``.
  """
  return {
    'row_error': float(row_error.max()),
    'column_error': float(column_error.max()),
    'row_error_by_layer': [float(x) for x in row_error],
    'column_error_by_layer': [float(x) for x in column_error],
  }


def warn_of_columns(normalizer: str, result: dict[str, Any]) -> None:
  """Warns if Sinkhorn weights have columns far from their sums."""
  if normalizer != 'sinkhorn':
    return
  layers = [
    i
    for i, x in enumerate(result['column_error_by_layer'], start=1)
    if x > COLUMN_ERROR_THRESHOLD
  ]
  if layers:
    logger.warning(
      'column sums of attention are off by up to %.2g (threshold %.2g) in'
      ' layers %s: these weights are not doubly stochastic; more'
      ' config.model.num_iters would bring them nearer.',
      result['column_error'],
      COLUMN_ERROR_THRESHOLD,
      layers,
    )
