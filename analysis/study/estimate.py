"""How long a study will take here, from a few real training steps."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from analysis.common import machine
from analysis.study import plan
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax.training import metrics

# Logged steps that are waited for; the first is left out.
_STEPS = 2
_PATIENCE = 300
# Sinkhorn leaves its iterations later as the logits grow: over a whole training
# on MNIST its steps took this much longer than the first ones.
_GROWTH = {plan.SOFTMAX: 1.0, plan.SINKHORN: 1.3}
# Start and compilation.
_START = 20
# Where glibc allocates: large pages, and memory that is kept instead of being
# given back, and cleared again, every step.
ENVIRONMENT = {
  'GLIBC_TUNABLES': (
    'glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0'
    ':glibc.malloc.trim_threshold=17179869184'
  )
}


def environment() -> dict[str, str]:
  """Of training processes: this one's, and `ENVIRONMENT` where it is silent."""
  return {**ENVIRONMENT, **os.environ}


@dataclasses.dataclass(frozen=True)
class Work:
  """Floating-point operations of the matrix products of a training.

  Attributes:
    step: those of a training step, on average.
    evaluations: those of all evaluations.
  """

  step: float
  evaluations: float


class Estimator:
  """Says how long trainings will take.

  A few steps of the first run of each normalizer are timed; the others are
  taken to have as many operations a second.

  Args:
    data_dir: of the data sets; '' for what the configs say.
  """

  def __init__(self, data_dir: str = ''):
    self._data_dir = data_dir
    self._datasets = {}
    self._rates = {}

  def seconds(self, runs: Iterable[plan.PlannedRun]) -> dict[str, float]:
    """What is left of each training, by name of the run.

    Args:
      runs: of one study, none of them finished.

    Raises:
      errors.DataError: if their data is not there.
      errors.RunError: if a run ends with an error within its first steps.
    """
    return {run.name: self._seconds(run) for run in runs}

  def _seconds(self, run):
    config = run.config()
    config.data.dir = self._data_dir or config.data.dir
    work = training_work(config, self._dataset(config.data))
    if run.normalizer not in self._rates:
      print(f'Timing a few steps of {run.name} ...', flush=True)
      seconds = time_step(run, plan.data_flags(self._data_dir))
      self._rates[run.normalizer] = work.step / seconds
    left = config.total_steps - run.steps_done()
    operations = left * work.step * _GROWTH[run.normalizer] + work.evaluations
    return _START + operations / self._rates[run.normalizer]

  def _dataset(self, config):
    key = str(config)
    if key not in self._datasets:
      self._datasets[key] = data.load(config)
    return self._datasets[key]


def training_work(config, dataset: data.Dataset) -> Work:
  """The operations of a training.

  Args:
    config: a whole config.
    dataset: its data.
  """
  splits, model = dataset.info.splits, config.model
  example = 3 * model.num_layers * _layer_flops(model, dataset)
  rounds = math.ceil(config.total_steps / config.eval_every_steps)
  evaluated = rounds * splits['validation'] + splits['test']
  # A backward pass is two forward passes.
  return Work(config.batch_size * example, evaluated * example / 3)


def _layer_flops(model, dataset):
  """Of a layer's forward pass, the mean over training examples."""
  class_token = model.pooling == 'cls'
  if dataset.info.vocab_size is None:
    height, width, _ = dataset.info.input_shape
    tokens = height * width // model.patch_size**2 + class_token
    return encoder.layer_flops(model, tokens)
  # Padded to the length of its bucket.
  buckets = np.asarray(dataset.bucket_lengths)
  places = np.searchsorted(buckets, dataset.splits['train']['length'])
  of_bucket = [encoder.layer_flops(model, x + class_token) for x in buckets]
  return np.asarray(of_bucket)[places].mean()


def time_step(run: plan.PlannedRun, extra: Sequence[str] = ()) -> float:
  """Seconds of a training step, from the first ones of a training.

  Args:
    run: what is trained, in a directory of its own that is not kept.
    extra: further arguments of `launch.train`.

  Returns:
    Seconds; NaN if it takes minutes.

  Raises:
    errors.RunError: if the training ends with an error.
  """
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    command = [
      sys.executable,
      *run.command()[:-1],
      f'--workdir={workdir}',
      '--config.log_every_steps=1',
      *extra,
    ]
    process = subprocess.Popen(
      command,
      cwd=machine.ROOT,
      env=environment(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    try:
      seconds = _wait_for_steps(process, workdir)
      code = process.poll()
    finally:
      process.kill()
      _, log = process.communicate()
  if code:
    # No training will get further.
    last = log.strip().splitlines()[-1:] or [f'exit code {code}']
    raise errors.RunError(f'{run.name} cannot be trained: {last[0]}')
  return seconds


def _wait_for_steps(process, workdir):
  """NaN if it takes too long, or ends before."""
  end = time.monotonic() + _PATIENCE
  while time.monotonic() < end:
    ended = process.poll() is not None
    lines = metrics.read_metrics(workdir) if workdir.exists() else []
    elapsed = [x['elapsed_s'] for x in lines if 'elapsed_s' in x]
    if len(elapsed) > _STEPS:
      return (elapsed[_STEPS] - elapsed[0]) / _STEPS
    if ended:
      break
    time.sleep(0.2)
  return math.nan


class Countdown:
  """The time left, corrected by how long the tasks so far have taken.

  Args:
    seconds: of each task, roughly.
  """

  def __init__(self, seconds: Sequence[float]):
    self._left = list(seconds)
    self._spent = self._expected = 0.0
    self._start = None

  def next(self) -> str:
    """To be called when a task begins: what is left, as text."""
    now = time.monotonic()
    if self._start is not None:
      self._spent += now - self._start
      self._expected += self._left.pop(0)
    self._start = now
    rate = self._spent / self._expected if self._expected else 1.0
    return clock(rate * sum(self._left))


def clock(seconds: float) -> str:
  """Hours and minutes, for people."""
  if math.isnan(seconds):
    return 'an unknown time'
  minutes = max(1, round(seconds / 60))
  hours, minutes = divmod(minutes, 60)
  return f'{hours} h {minutes:02d} min' if hours else f'{minutes} min'
