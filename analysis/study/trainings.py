"""The trainings of a study: in turn, each in a process of its own."""

from collections.abc import Mapping
from collections.abc import Sequence
import subprocess
import sys

from analysis.common import machine
from analysis.study import estimate
from analysis.study import plan
from sinkformer_jax import cli


def train(
  runs: Sequence[plan.PlannedRun],
  seconds: Mapping[str, float],
  extra: Sequence[str] = (),
) -> list[str]:
  """Trains runs in turn, or goes on with them.

  Args:
    runs: those that are not finished.
    seconds: how long each will take, by name.
    extra: further arguments of `launch.train`.

  Returns:
    Names of those that failed.

  Raises:
    KeyboardInterrupt: if this process or a training is told to stop; the
      training has saved a checkpoint then.
  """
  failed = []
  left = estimate.Countdown([seconds[x.name] for x in runs])
  for number, run in enumerate(runs, start=1):
    print(
      f'Training {number} of {len(runs)}: {run.name}; about {left.next()} left'
      ' for all',
      file=sys.stderr,
      flush=True,
    )
    code = _train(run, extra)
    if code == cli.EXIT_STOPPED:
      raise KeyboardInterrupt
    if code:
      failed.append(run.name)
  return failed


def _train(run, extra):
  process = subprocess.Popen(
    [sys.executable, *run.command(), *extra],
    cwd=machine.ROOT,
    env=estimate.environment(),
    # Ctrl-C comes here alone, and is passed on once.
    start_new_session=True,
  )
  try:
    return process.wait()
  except KeyboardInterrupt:
    process.terminate()  # It finishes its step and saves.
    try:
      process.wait()
    except KeyboardInterrupt:
      process.kill()
      process.wait()
    raise
