"""What a training step of the runs of a pair takes, in turn.

  python -m analysis.step_time --workdir=SOFTMAX_RUN --workdir=SINKHORN_RUN
    --output=DIR

The whole step (forward, backward, update), from the weights of the checkpoint:
large logits, which training makes, need more Sinkhorn iterations. Each round
takes one step of either run, on the same batch of training examples; what
disturbs the machine for a while disturbs both. See `analysis.cost` for what the
steps are made of.
"""

from collections.abc import Sequence
import time
from typing import Any

from analysis.common import command
from analysis.common import curves
from analysis.common import frames

FLAGS = command.create_flags(None)
# What has to be known of what is analysed.
NEEDS = ('model',)
SECONDS, RATIO = 'seconds a step', 'a step over one of softmax'
# Their medians are taken.
_ROUNDS = 5


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Seconds of a step, and for Sinkhorn the ratio to softmax, of each pair."""
  del options
  # Imported late: see `command`.
  from analysis.common import runs

  result = frames.Result()
  pairs = runs.pairs(subjects)
  if not pairs:
    result.notes.append(
      'No time of a step: it needs a softmax and a Sinkhorn run with one seed.'
    )
  for pair in pairs:
    progress.part(f'time of a step: {" and ".join(x.name for x in pair)}')
    softmax, sinkhorn = _seconds(pair, progress)
    ratios = [x / y for x, y in zip(sinkhorn, softmax, strict=True)]
    for subject, quantity, values in (
      (pair[0], SECONDS, softmax),
      (pair[1], SECONDS, sinkhorn),
      (pair[1], RATIO, ratios),
    ):
      result.summary.append(_table(subject, quantity, values))
  return result


def _table(subject, quantity, values):
  import pandas as pd

  from analysis.common import timing

  spread = timing.spread('mean', values)
  row = subject.about() | {
    'quantity': quantity,
    'norm': '',
    'scaling': '',
    'dtype': subject.run.config.model.dtype,
    'mean': spread['mean'],
    'smallest': spread['mean_min'],
    'largest': spread['mean_max'],
    'count': len(values),
  }
  return pd.DataFrame([row])


def _seconds(pair, progress):
  """Of each run, one number a round."""
  import jax

  from sinkformer_jax import data

  config, dataset = pair[0].run.config, pair[0].dataset()
  batches = [
    data.train_batch(dataset, step, config.batch_size, config.seed)
    for step in range(_ROUNDS)
  ]
  trainings = [_training(x) for x in pair]
  # Texts have a program for each length of a batch.
  shapes = {str(jax.tree.map(lambda x: x.shape, x)): x for x in batches}
  for done, batch in enumerate(shapes.values(), start=1):
    for training in trainings:
      training(batch)
    progress(done, len(shapes), 'programs')
  seconds = [], []
  for number, batch in enumerate(batches):
    # There and back again, so that nobody always follows the other.
    for i in (0, 1) if number % 2 else (1, 0):
      start = time.perf_counter()
      trainings[i](batch)
      seconds[i].append(time.perf_counter() - start)
    progress(number + 1, _ROUNDS, 'rounds')
  return seconds


def _training(subject):
  """A function that makes one step on a batch, and waits for it."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from sinkformer_jax.training import optimizer
  from sinkformer_jax.training import sharding
  from sinkformer_jax.training import steps

  run, mesh = subject.run, sharding.create_mesh()
  config = run.config
  arguments = config.optimizer, config.total_steps
  tx = optimizer.create_optimizer(*arguments)
  schedule = optimizer.create_schedule(*arguments)
  step = steps.make_train_step(run.model, tx, schedule, mesh)
  # A copy: the step donates it.
  params = jax.tree.map(jnp.copy, run.params)
  state = jax.device_put(
    steps.TrainState(jnp.int32(run.step), params, tx.init(params)),
    sharding.replicated(mesh),
  )

  def take(batch):
    nonlocal state
    placed = sharding.put_batch(mesh, config.batch_size, batch)
    state, metrics = step(state, placed, np.uint32(config.seed))
    jax.block_until_ready((state, metrics))

  return take


def plots(summary: frames.Table) -> list[curves.Plot]:
  """None: two numbers a pair."""
  del summary
  return []


def headlines(summary: frames.Table) -> list[str]:
  """Seconds and ratios with the fastest and slowest round, as text."""
  return [
    f'{x["run"]}, step {x["step"]}: {x["quantity"]} {x["mean"]:.3g}'
    f' ({x["smallest"]:.3g} to {x["largest"]:.3g})'
    for x in summary.to_dict('records')
  ]


if __name__ == '__main__':
  command.run('step_time', FLAGS)
