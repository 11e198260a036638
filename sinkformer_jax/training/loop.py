"""The training loop."""

from collections.abc import Generator
import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from sinkformer_jax import configuration
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import numerics
from sinkformer_jax import paths
from sinkformer_jax import tasks
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import evaluation
from sinkformer_jax.training import hosts
from sinkformer_jax.training import interruption
from sinkformer_jax.training import metrics as metrics_lib
from sinkformer_jax.training import optimizer
from sinkformer_jax.training import sharding
from sinkformer_jax.training import steps
from sinkformer_jax.training import workdir as workdir_lib

logger = logging.getLogger(__name__)


@numerics.fixed()
def train_and_evaluate(
  config: ml_collections.ConfigDict, workdir: str | os.PathLike
) -> dict[str, Any] | None:
  """Trains from scratch or from the newest checkpoint, then evaluates.

  A resumed run sees the batches and random keys that an uninterrupted one
  would have seen; on CPU its parameters are equal bit for bit.

  Several processes, connected by `jax.distributed`, all call this with the
  same config and a directory that all of them see.

  Args:
    config: a whole config.
    workdir: the run directory; made if it is not there. SIGTERM and Ctrl-C
      leave a checkpoint of the last finished step in it.

  Returns:
    What `result.json` holds, or None if a signal stopped the run before its
    end. A finished run is returned as it is; nothing is changed.

  Raises:
    errors.UserError: for a config, data or directory that cannot be used, for
      a loss or gradient that is not finite, and where another process is lost.
  """
  configuration.check(config)
  workdir = paths.resolve(workdir, 'workdir')
  with hosts.lost_peers_are_named(), workdir_lib.claim(workdir, config):
    if hosts.from_first((workdir / 'result.json').exists()):
      return workdir_lib.finished_result(workdir)
    # Data first: while it is loaded or downloaded, signals end the process.
    training = Training(config, workdir)
    with (
      interruption.StopSignal() as training.stop,
      contextlib.closing(training.run()) as run,
    ):
      answer = None
      try:
        while True:
          answer = training.train_step(*run.send(answer))
      except StopIteration as finished:
        return finished.value


@dataclasses.dataclass
class _Position:
  """How far a training is: the state after `step` updates."""

  step: int
  state: steps.TrainState


class Training:
  """One start of a training, and what it needs.

  Attributes:
    stop: has to be set before it runs.
    train_step: see `steps.make_train_step`.
    label: begins its lines in the log.
  """

  stop: interruption.StopSignal
  label = ''

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    other: 'Training | None' = None,
  ):
    """Loads the data.

    Args:
      config: a whole config.
      workdir: the run directory, claimed for it.
      other: a training that differs in its seed alone, to share what both need.
    """
    self.config, self.workdir = config, workdir
    self.seed = np.uint32(config.seed)
    self.mesh = sharding.create_mesh()
    for field in ('batch_size', 'eval_batch_size'):
      sharding.check_batch_size(self.mesh, f'config.{field}', config[field])
    if other:
      self.dataset = other.dataset
    else:
      with hosts.first_then_others():
        # What has to be downloaded or prepared is, once.
        self.dataset = data.load(workdir_lib.data_config(config, workdir))
      about = self.dataset.info.provenance
      tokenizer = about.get('tokenizer', {}).get('sha256')
      name = f'data ({about["origin"]})'
      hosts.check_same({name: (about['fingerprint'], tokenizer)})
    self.steps_per_epoch = data.steps_per_epoch(self.dataset, config.batch_size)
    self.model = models.create_model(config.model, self.dataset.info)
    tx = optimizer.create_optimizer(config.optimizer, config.total_steps)
    if other:
      self.create_state = other.create_state
      self.train_step, self.eval_step = other.train_step, other.eval_step
      return
    self.create_state = jax.jit(
      functools.partial(steps.create_state, self.model, tx, self.dataset.info),
      out_shardings=sharding.replicated(self.mesh),
    )
    _check_memory(jax.eval_shape(self.create_state, self.seed))
    task = tasks.TASKS[self.dataset.info.task]
    self.train_step = steps.make_train_step(
      self.model,
      tx,
      optimizer.create_schedule(config.optimizer, config.total_steps),
      self.mesh,
      task,
    )
    self.eval_step = steps.make_eval_step(self.model, self.mesh, task)

  def run(self) -> Generator[tuple, tuple | None, dict[str, Any] | None]:
    """Trains from scratch or from the newest checkpoint, then evaluates.

    Yields:
      Arguments of `train_step`, and is sent what it returns: several trainings
      can have their steps computed together (see `seeds`). None stops it.

    Returns:
      See `train_and_evaluate`.
    """
    config = self.config
    workdir_lib.check_data(self.workdir, self.dataset.info)
    with checkpoints.Checkpoints(
      self.workdir,
      keep=config.checkpoint.keep,
      keep_steps=config.checkpoint.keep_steps,
      writable=True,
    ) as saved:
      position = self._start(saved)
      with hosts.first_then_others():
        workdir_lib.record_start(self.workdir, self.dataset.info, position.step)
        (self.workdir / workdir_lib.DIVERGED).unlink(missing_ok=True)
      with (
        metrics_lib.MetricWriter(self.workdir, position.step) as writer,
        metrics_lib.Progress(
          position.step, config.total_steps, self.label
        ) as progress,
      ):
        finished = yield from self._train(position, saved, writer, progress)
        result = finished and self._finish(position, saved, writer)
      if not result:
        logger.info(
          '%sStopped after step %d of %d. The same command goes on from there.',
          self.label,
          position.step,
          config.total_steps,
        )
        return None
    return result

  def _start(self, saved):
    """The newest good checkpoint, or a fresh state, saved as step 0."""
    if hosts.from_first(len(saved.steps)):
      abstract = checkpoints.abstract(
        jax.eval_shape(self.create_state, self.seed),
        sharding.replicated(self.mesh),
      )
      state = saved.restore_newest_readable(abstract)
      step = int(state.step)
      logger.info('Going on from step %d in %s', step, self.workdir)
      return _Position(step, state)
    logger.info('Starting in %s', self.workdir)
    state = self.create_state(self.seed)
    logger.info(
      '%d parameters, %d steps of %d examples, %d steps an epoch',
      sum(x.size for x in jax.tree.leaves(state.params)),
      self.config.total_steps,
      self.config.batch_size,
      self.steps_per_epoch,
    )
    workdir_lib.write_json(self.workdir / 'config.json', self.config.to_dict())
    workdir_lib.save_tokenizer(self.workdir, self.dataset)
    saved.save(0, state)
    return _Position(0, state)

  def _train(self, position, saved, writer, progress):
    """Trains to the end; False if a signal came first. See `run`."""
    config = self.config
    start = time.monotonic() - _elapsed_s(writer)
    if self._evaluation_is_due(position.step):
      # Unless the signal that stopped the last start came during it.
      self._validate(position, writer)
    saved.best = _best_step(writer, saved.steps)
    pending, clock = None, (position.step, time.monotonic())
    rows = sharding.own_rows(self.mesh, config.batch_size)
    while not self.stop.check() and position.step < config.total_steps:
      batch = sharding.put_batch(
        self.mesh,
        config.batch_size,
        data.train_batch(
          self.dataset, position.step, config.batch_size, config.seed, rows
        ),
      )
      answer = yield position.state, batch, self.seed
      if answer is None:
        break
      position.state, metrics = answer
      position.step += 1
      step = position.step
      last = step == config.total_steps
      log = step % config.log_every_steps == 0 or last
      validate = self._evaluation_is_due(step)
      save = (
        step % config.checkpoint.every_steps == 0
        or last
        or step in config.checkpoint.keep_steps
      )
      # Metrics are looked at one step late, so that the host prepares a batch
      # while the device computes; before anything is kept, at once.
      if pending:
        self._check_finite(*pending, saved)
      pending = (step, metrics)
      if log or validate or save:
        self._check_finite(*pending, saved)
      shown = {}
      if log:
        now = time.monotonic()
        rate = (step - clock[0]) * config.batch_size / (now - clock[1])
        clock = (step, now)
        shown = self._log(step, metrics, rate, now - start, writer)
      progress.update(step, shown)
      if validate:
        self._validate(position, writer)
        saved.best = _best_step(writer, {*saved.steps, step})
        clock = (step, time.monotonic())
      if save or saved.best == step:
        saved.save(step, position.state)
    if self.stop.requested and position.step:
      if pending:
        self._check_finite(*pending, saved)
      saved.save(position.step, position.state)
    return position.step == config.total_steps and not self.stop.requested

  def _evaluation_is_due(self, step):
    every = self.config.eval_every_steps
    return step > 0 and step % every == 0 and step < self.config.total_steps

  def _check_finite(self, step, metrics, saved):
    """Stops a run gone wrong before its state can reach a checkpoint."""
    watched = ('loss', 'gradient_norm', 'parameter_norm')
    values = {name: float(metrics[name]) for name in watched}
    if np.isfinite(list(values.values())).all():
      return
    hidden = np.asarray(metrics['hidden_rms'])
    bad = np.flatnonzero(~np.isfinite(hidden))
    where = (
      f'the forward pass is finite up to layer {bad[0]} of {len(hidden)}, the'
      f' first bad layer is {bad[0] + 1}'
      if len(bad)
      else 'the forward pass is finite in all layers, the backward pass or the'
      ' update is not'
    )
    listed = ', '.join(f'{k}={v:g}' for k, v in values.items())
    workdir_lib.write_json(
      self.workdir / workdir_lib.DIVERGED, {'step': step, 'where': where}
    )
    raise errors.RunError(
      f'step {step}: {listed}; {where}. Nothing of this was saved; the newest'
      f' good checkpoint is {saved.directory / str(saved.steps[-1])}. Start'
      ' anew, in another --workdir, with a lower'
      ' config.optimizer.learning_rate or longer config.optimizer.warmup_steps.'
    )

  def _log(self, step, metrics, examples_per_second, elapsed_s, writer):
    """Writes the metrics of a training step; returns those to be shown."""
    metrics = jax.device_get(metrics)
    marginals = evaluation.marginals(
      metrics['row_error'], metrics['column_error']
    )
    names = (
      'loss',
      'accuracy',
      'learning_rate',
      'gradient_norm',
      'parameter_norm',
    )
    train = {**{x: float(metrics[x]) for x in names}, **marginals}
    writer.write(
      step,
      {
        'epoch': step / self.steps_per_epoch,
        **{f'train/{name}': value for name, value in train.items()},
        'examples_per_second': examples_per_second,
        'elapsed_s': elapsed_s,
      },
    )
    shown = ('loss', 'accuracy', 'learning_rate', 'column_error')
    return {name: train[name] for name in shown}

  def _evaluate(self, position, split):
    return evaluation.evaluate(
      self.eval_step,
      position.state.params,
      self.dataset,
      split,
      self.config.eval_batch_size,
      self.mesh,
      self.stop.check,
    )

  def _validate(self, position, writer):
    """Evaluates and logs, unless that is logged; None if a signal came.

    What is logged already is known to the first process alone.
    """
    logged = writer.validation(position.step)
    if hosts.from_first(logged is not None):
      return logged
    result = self._evaluate(position, 'validation')
    if result is not None:
      writer.write(
        position.step, {f'validation/{k}': v for k, v in result.items()}
      )
      logger.info(
        '%sstep %d  validation loss %.4f accuracy %.4f',
        self.label,
        position.step,
        result['loss'],
        result['accuracy'],
      )
    return result

  def _finish(self, position, saved, writer):
    """Final numbers, from the last parameters; None if a signal came."""
    validation = self._validate(position, writer)
    if self.stop.requested:
      return None
    test = self._evaluate(position, 'test')
    if test is None:
      return None
    result = {
      'step': position.step,
      'epochs': position.step / self.steps_per_epoch,
      'train_s': _elapsed_s(writer),
      'validation': validation,
      'test': test,
      'best_step': _best_step(writer, saved.steps),
      'data': self.dataset.info.provenance['origin'],
      'notice': self.dataset.info.provenance['notice'],
    }
    path = self.workdir / 'result.json'
    with hosts.first_then_others():
      workdir_lib.write_json(path, result)
      result = workdir_lib.read_json(path)
    evaluation.warn_of_columns(self.config.model.normalizer, test)
    return result


def _check_memory(state):
  """Refuses a state that has no room, which would end in a kill."""
  needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  stats = jax.local_devices()[0].memory_stats() or {}
  there = stats.get(
    'bytes_limit', os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  )
  if needed > there:
    raise errors.ConfigError(
      f'parameters and optimizer need {needed / 2**30:.0f} GiB, and there are'
      f' {there / 2**30:.0f}: make config.model.num_layers, config.model.width'
      ' or config.model.ffn_dim smaller.'
    )


def _best_step(writer, steps):
  """The one of `steps` with the lowest validation loss; None without any.

  The first process has the log, and says so to the others.
  """
  losses = {
    x['step']: x['validation/loss']
    for x in writer.lines
    if x['step'] in steps and 'validation/loss' in x
  }
  best = hosts.from_first(min(losses, key=losses.get, default=-1))
  return None if best < 0 else best


def _elapsed_s(writer):
  """Seconds of training that the log knows of, over all starts."""
  return max((x.get('elapsed_s', 0.0) for x in writer.lines), default=0.0)
