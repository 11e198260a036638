"""The study's command: what it refuses, stops, goes on with, and writes."""

import json
import signal
import time

import pytest

from analysis.study import studies
from launch import reproduce
from tests.analysis.study import made_up_runs
from tests.launch import launch_test

MODULE = 'launch.reproduce'


def runs_of(folder):
  (study,) = studies.of('mnist', 'tiny')
  return study.runs(folder)


def command(folder, *arguments):
  return ('--study=mnist', '--preset=tiny', f'--runs={folder}', *arguments)


def test_flags_name_what_there_is():
  expected = {
    'study': (*studies.STUDIES, *studies.GROUPS),
    'preset': studies.PRESETS,
  }
  for flag, names in expected.items():
    assert tuple(reproduce.FLAGS[flag].parser.enum_values) == tuple(names)


def test_wrong_flags():
  for argument, words in (
    ('--study=none', 'study'),
    ('--preset=none', 'preset'),
    ('--workdir=runs', "Unknown command line flag 'workdir'"),
  ):
    line = launch_test.refused(MODULE, argument, code=2)
    assert words in line


def test_a_run_of_another_config_is_refused(tmp_path):
  run = runs_of(tmp_path)[3]
  made_up_runs.make(run, lambda x: x['optimizer'].update(clip_norm=2.0))
  line = launch_test.refused(MODULE, *command(tmp_path), code=1)
  assert 'mnist_sinkhorn_tiny/seed1 is not the run' in line
  assert 'config.optimizer.clip_norm is 2.0, not 1.0' in line


@pytest.mark.slow
def test_stopped_and_gone_on_with(tmp_path):
  """Two pairs from nothing to a page, with a Ctrl-C in between."""
  arguments = command(tmp_path)
  first = runs_of(tmp_path)[0]
  process = launch_test.start(MODULE, *arguments)
  try:
    end = time.monotonic() + 300
    while not (first.workdir / 'checkpoints' / '0').exists():
      assert time.monotonic() < end
      assert process.poll() is None
      time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
  finally:
    process.kill()
  assert process.returncode == 75, stderr
  assert 'The same command goes on' in stderr
  # The time was told before anything was trained.
  assert 'mnist_softmax_tiny/seed0: 20 steps, about' in stdout
  assert 'In all about' in stdout
  done = first.steps_done()
  assert done < 20
  assert not first.is_finished()

  code, stdout, stderr = launch_test.run(MODULE, *arguments, timeout=900)
  assert code == 0, stderr
  where = f', from step {done}' if done else ''
  assert f'mnist_softmax_tiny/seed0: 20 steps{where}, about' in stdout
  assert all(x.is_finished() for x in runs_of(tmp_path))
  output = tmp_path / 'results_tiny' / 'mnist'
  page = (output / 'index.html').read_text()
  content = json.loads((output / 'claims.json').read_text())
  assert ''.join(x['letter'] for x in content['claims']) == 'abcdefhiklmno'
  for claim in content['claims']:
    assert claim['statement'] in page
    # Everything was measured.
    assert {x['count'] for x in claim['tests']} - {0}, claim['letter']
  assert sum(x.stat().st_size for x in output.iterdir()) < 2e6
  assert '2 pairs of runs' in page
  measured = {x: x.stat().st_mtime for x in (tmp_path / 'measured').iterdir()}
  assert measured

  # Once more: nothing is trained or measured, and one claim can be asked for.
  code, stdout, stderr = launch_test.run(
    MODULE, *command(tmp_path, '--claims=a'), timeout=300
  )
  assert code == 0, stderr
  assert 'a. Products of trained attention matrices' in stdout
  assert '0 to be trained' in stdout
  assert 'Measurements: 0' in stdout
  assert measured == {
    x: x.stat().st_mtime for x in (tmp_path / 'measured').iterdir()
  }
