"""A training that is killed again and again ends as if it had not been."""

import random
import signal
import time

import pytest

from tests.launch import launch_test
from tests.training import loop_test

pytestmark = pytest.mark.slow

KILLS = 30
TIMEOUT_S = 900  # Of the whole training, on a busy machine.
ARGUMENTS = (
  launch_test.TINY,
  '--config.total_steps=180',
  '--config.eval_every_steps=10',
  '--config.checkpoint.every_steps=1',
  '--config.log_every_steps=1',
  '--config.model.dropout_rate=0.1',
)


def start(workdir):
  return launch_test.start(
    'launch.train', *ARGUMENTS, f'--workdir={workdir}', cwd=launch_test.ROOT
  )


def newest(workdir):
  names = [x.name for x in (workdir / 'checkpoints').glob('*')]
  return max((int(x) for x in names if x.isdigit()), default=-1)


def files(workdir):
  """What a run has on disk, down to its checkpoints."""
  folders = (workdir, workdir / 'checkpoints')
  return {x.name for folder in folders for x in folder.iterdir()}


# C03, C07, C09: SIGKILL and SIGTERM at any moment, from the start of Python to
# the last save.
def test_killed_thirty_times(tmp_path, capsys):
  rng = random.Random(0)
  expected, workdir = tmp_path / 'expected', tmp_path / 'run'
  process = start(expected)
  assert process.wait(timeout=TIMEOUT_S) == 0, process.communicate()
  seen, reached, until_save = [], -1, 10.0
  while len(seen) < KILLS:
    begin, process = time.monotonic(), start(workdir)
    number = rng.choice((signal.SIGKILL, signal.SIGTERM))
    if rng.random() < 1 / 3:
      # While it starts: imports, data, reading of a checkpoint, compilation.
      time.sleep(rng.uniform(0, until_save))
    else:
      # Some steps later, within or between saves and evaluations.
      wait_for_step(workdir, reached + 1, process)
      until_save = time.monotonic() - begin
      wait_for_step(workdir, reached + rng.randint(1, 5), process)
      time.sleep(rng.uniform(0, 0.3))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    # Killed; or terminated before it has handlers for signals, or stopped with
    # a checkpoint. It must not end by itself, well or not.
    allowed = {signal.SIGKILL: (-9,), signal.SIGTERM: (-15, 75)}[number]
    assert process.returncode in allowed, (process.returncode, stderr)
    assert newest(workdir) >= reached
    reached = newest(workdir)
    seen.append((number.name, process.returncode, reached))
    # Two that are kept, the first, the best, and what a kill has left.
    if reached >= 0:
      assert len(list((workdir / 'checkpoints').iterdir())) <= 6
  process = start(workdir)
  _, stderr = process.communicate(timeout=TIMEOUT_S)
  assert process.returncode == 0, stderr
  loop_test.assert_same_state(
    loop_test.restored_state(workdir), loop_test.restored_state(expected)
  )
  assert loop_test.logged(workdir) == loop_test.logged(expected)
  assert files(workdir) == files(expected)
  with capsys.disabled():
    print('\nkills (signal, exit code, newest step):', seen)


def wait_for_step(workdir, step, process):
  launch_test.wait_for(lambda: newest(workdir) >= step, process, TIMEOUT_S)
