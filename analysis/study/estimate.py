"""How long a study will take here, from a few real training steps."""

from collections.abc import Iterable
from collections.abc import Sequence
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from analysis import machine
from analysis.study import plan
from sinkformer_jax import errors
from sinkformer_jax.training import metrics

# Logged steps that are waited for; the first is left out.
_STEPS = 2
_PATIENCE = 300
# Sinkhorn leaves its iterations later as the logits grow: over a whole training
# on MNIST its steps took this much longer than the first ones.
_GROWTH = {plan.SOFTMAX: 1.0, plan.SINKHORN: 1.3}
# Validations, the test, start and compilation.
_BESIDE_STEPS = 1.15
_START = 20
# Large pages make a step faster where glibc allocates.
ENVIRONMENT = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


def environment() -> dict[str, str]:
  """Of training processes: this one's, and large pages unless it says so."""
  return {**ENVIRONMENT, **os.environ}


def step_seconds(
  runs: Iterable[plan.PlannedRun], extra: Sequence[str] = ()
) -> dict[str, float]:
  """Seconds of a training step, by kind of run.

  Args:
    runs: those that are to be trained; the first of each kind is timed.
    extra: further arguments of `launch.train`.
  """
  first = {}
  for run in runs:
    first.setdefault(kind(run), run)
  return {
    name: _time(run, extra) * _GROWTH[run.normalizer]
    for name, run in first.items()
  }


def kind(run: plan.PlannedRun) -> str:
  """Runs of one kind take about as long a step."""
  fields = {
    k: v
    for k, v in run.comparison.overrides.items()
    if k.startswith(('data.', 'batch_size', 'model.num_layers'))
  }
  return f'{run.config_file} {fields}'


def _time(run, extra):
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
      seconds = _seconds(process, workdir)
      code = process.poll()
    finally:
      process.kill()
      _, log = process.communicate()
  if code:
    # No training will get further.
    last = log.strip().splitlines()[-1:] or [f'exit code {code}']
    raise errors.RunError(f'{run.name} cannot be trained: {last[0]}')
  return seconds


def _seconds(process, workdir):
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


def training_seconds(
  run: plan.PlannedRun, step_seconds: dict[str, float]
) -> float:
  """What is left of a run's training."""
  steps = run.config().total_steps - run.steps_done()
  return _START + _BESIDE_STEPS * steps * step_seconds[kind(run)]


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
