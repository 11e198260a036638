"""A training that is killed again and again ends as if it had not been."""

import random
import signal
import subprocess
import time

import pytest

from tests.launch import launch_test
from tests.training import loop_test

pytestmark = pytest.mark.slow

KILLS = 30
TIMEOUT_S = 900  # Of the whole training, on a busy machine.
ARGUMENTS = (
  launch_test.TINY,
  '--config.total_steps=400',
  '--config.eval_every_steps=25',
  '--config.checkpoint.every_steps=2',
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
# C03
def test_killed_thirty_times(tmp_path, capsys):
  rng = random.Random(0)
  expected, workdir = tmp_path / 'expected', tmp_path / 'run'
  process = start(expected)
  begin = time.monotonic()
  launch_test.wait_for(
    (expected / 'checkpoints' / '2').exists, process, timeout=TIMEOUT_S
  )
  until_first_save = time.monotonic() - begin
  assert process.wait(timeout=TIMEOUT_S) == 0, process.communicate()
  seen, reached = [], -1
  while len(seen) < KILLS:
    process = start(workdir)
    number = rng.choice((signal.SIGKILL, signal.SIGTERM))
    try:
      process.wait(timeout=rng.uniform(0, 1.5) * until_first_save)
    except subprocess.TimeoutExpired:
      process.send_signal(number)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    # Terminated before it has handlers for signals; stopped with a checkpoint;
    # killed. It must not end by itself, well or not.
    allowed = {signal.SIGKILL: (-9,), signal.SIGTERM: (-15, 75)}[number]
    assert process.returncode in allowed, (process.returncode, stderr)
    assert newest(workdir) >= reached
    reached = newest(workdir)
    seen.append((number.name, process.returncode, reached))
    assert len(list((workdir / 'checkpoints').glob('*'))) <= 8
  assert reached < 400, 'it was finished before the last kill: make it longer'
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
