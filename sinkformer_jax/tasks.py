"""Tasks: what is predicted, and how a prediction is scored.

A task is a function ``(outputs, batch) -> scores``. `outputs` are what the
model gives for the batch; scores are a dict of arrays ``[batch]``: ``loss``,
whose mean is trained on, and others that are logged beside it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

Task = Callable[[jax.Array, dict], dict[str, jax.Array]]


def classification(outputs: jax.Array, batch: dict) -> dict[str, jax.Array]:
  """Cross-entropy and accuracy of one label an example.

  Args:
    outputs: class scores ``[batch, num_classes]``.
    batch: with ``label``, integers ``[batch]``.

  Returns:
    ``loss`` and ``accuracy`` (1 where the largest score is that of the label,
    else 0), each ``[batch]``.
  """
  labels = batch['label']
  return {
    'loss': optax.softmax_cross_entropy_with_integer_labels(outputs, labels),
    'accuracy': (outputs.argmax(-1) == labels).astype(jnp.float32),
  }


# By the names that data sets give them, see `data.DatasetInfo.task`.
TASKS: dict[str, Task] = {'classification': classification}
