"""Several seeds of a small model, trained at once on one device."""

from collections.abc import Mapping
import contextlib
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax import numerics
from sinkformer_jax import paths
from sinkformer_jax.training import interruption
from sinkformer_jax.training import loop
from sinkformer_jax.training import workdir as workdir_lib

logger = logging.getLogger(__name__)


@numerics.fixed()
def train_seeds(
  config: ml_collections.ConfigDict, workdirs: Mapping[int, str | os.PathLike]
) -> dict[int, dict[str, Any] | None]:
  """Trains a config with several seeds, whose steps are computed together.

  Each is a run of its own, as `train_and_evaluate` would have made it to
  rounding, and can go on with or without the others. They need not be at the
  same step. One that fails leaves the others to go on.

  Args:
    config: a whole config; its seed does not count.
    workdirs: ``{seed: run directory}``.

  Returns:
    ``{seed: what train_and_evaluate returns}``.

  Raises:
    errors.UserError: where there are several devices. See `train_and_evaluate`
      for others; those of one seed come after the other seeds have ended.
  """
  if jax.device_count() > 1:
    raise errors.ConfigError(
      f'several seeds are trained at once on one device, and there are'
      f' {jax.device_count()}: leave one (as with CUDA_VISIBLE_DEVICES=0), or'
      ' train each seed by itself.'
    )
  results, trainings = {}, {}
  with contextlib.ExitStack() as stack:
    for seed, workdir in workdirs.items():
      own = config.copy_and_resolve_references()
      own.seed = seed
      configuration.check(own)
      workdir = paths.resolve(workdir, 'workdir')
      stack.enter_context(workdir_lib.claim(workdir, own))
      results[seed] = workdir_lib.finished_result(workdir)
      if results[seed] is None:
        first = next(iter(trainings.values()), None)
        trainings[seed] = loop.Training(own, workdir, other=first)
        _check_lengths(trainings[seed].dataset)
        trainings[seed].label = f'seed {seed}  '
    with interruption.StopSignal() as stop:
      for training in trainings.values():
        training.stop = stop
      return {**results, **_run(trainings, stop)}


def _check_lengths(dataset):
  if len(dataset.bucket_lengths) > 1:
    raise errors.ConfigError(
      'several seeds are trained at once on batches of one length: add'
      ' --config.data.bucket_lengths="()", or train each seed by itself.'
    )


def _run(trainings, stop):
  """Runs trainings in step until each has ended; their results."""
  if not trainings:
    return {}
  # All have the step of the first.
  step = _together(next(iter(trainings.values())).train_step)
  results, failures = {}, {}
  with contextlib.ExitStack() as stack:
    runs = {
      seed: stack.enter_context(contextlib.closing(training.run()))
      for seed, training in trainings.items()
    }
    answers = dict.fromkeys(runs)
    while answers:
      requests = {}
      for seed, answer in answers.items():
        try:
          requests[seed] = runs[seed].send(answer)
        except StopIteration as finished:
          results[seed] = finished.value
        except errors.UserError as error:
          logger.error('seed %d has failed: %s', seed, error)
          failures[seed] = error
      if stop.check() or not requests:
        # Those that wait for a step do not get it: all stop alike.
        answers = dict.fromkeys(requests)
      else:
        states = step(*zip(*requests.values(), strict=True))
        answers = dict(zip(requests, states, strict=True))
  if failures:
    listed = '; '.join(f'seed {seed}: {x}' for seed, x in failures.items())
    raise errors.RunError(
      f'{len(failures)} of {len(trainings)} seeds have failed: {listed}'
    )
  return results


def _together(train_step):
  """The training step of several trainings: tuples in, tuples out."""

  def step(states, batches, seeds):
    stacked = jax.tree.map(
      lambda *x: jnp.stack(x), *zip(states, batches, seeds, strict=True)
    )
    results = jax.vmap(train_step)(*stacked)
    return tuple(
      jax.tree.map(lambda x, i=i: x[i], results) for i in range(len(states))
    )

  return jax.jit(step, donate_argnums=0)
