"""Sweeps: lists, runs in turn, arrays for Slurm."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from launch import fields as fields_lib
from launch import sweep
from launch import train
from tests.conftest import ROOT
from tests.launch import in_one_process
from tests.launch import launch_test
from tests.training import loop_test

CONFIG = f'--config={ROOT}/configs/mnist_sinkhorn.py:tiny'
SHORT = ('--config.total_steps=4', '--config.optimizer.warmup_steps=1')
NAME = 'mnist_sinkhorn_tiny'
CHANGED = f'{NAME}_warmup_steps=1_total_steps=4'


@pytest.mark.parametrize(
  ('text', 'values'),
  [
    ('softmax,sinkhorn', ['softmax', 'sinkhorn']),
    ('3', ['3']),
    ('(1,2),(3,)', ['(1,2)', '(3,)']),
    ('"a,b",c', ['"a,b"', 'c']),
    ("{'a': [1, 2]},()", ["{'a': [1, 2]}", '()']),
    ('1,', ['1', '']),
    ('', ['']),
  ],
)
def test_values_are_split_at_commas_of_their_own(text, values):
  argv = ['x', '--seeds=0,1', f'--config.a.b={text}', '--dry_run']
  rest, fields = sweep.split_fields(argv)
  assert rest == ['x', '--seeds=0,1', '--dry_run']
  assert fields == {'a.b': values}


def listed(stdout):
  """``{run directory: state}`` of a list, and its command lines."""
  runs = dict(re.findall(r'^(runs/\S+)  (.+)$', stdout, re.MULTILINE))
  commands = [
    shlex.split(x)
    for x in stdout.splitlines()
    if x.startswith('  ') and '-m launch.train' in x
  ]
  return runs, commands


LIST = (
  f'--config={ROOT}/configs/mnist_softmax.py:tiny',
  '--seeds=0,1',
  '--config.model.num_iters=5,7',
  '--dry_run',
)
SETS = (
  '--config.model.normalizer=softmax,sinkhorn',
  '--config.optimizer.learning_rate=1e-3,2e-3',
  '--dry_run',
)
SLURM = (
  '--config.model.normalizer=softmax,sinkhorn',
  '--seeds=0,1',
  '--slurm=array.sh',
)
REFUSALS = [
  (['--config.model.width=16,17'], 'config.model.num_heads=2 does not'),
  (['--config.model.width=16,x'], 'width'),
  (['--config.model.widht=16'], 'widht'),
  (['--config.seed=1,2'], '--seeds=0,1,2'),
  (['--config.model.width=16,'], 'config.model.width: write'),
  (['--config.model.width=16,16'], 'two runs would be in runs/'),
  ([CONFIG], 'two runs would be in runs/'),
  (['--seeds=0,x'], '--seeds=0,x must be integers'),
  (['--seeds='], '--seeds is empty'),
  (['--seeds=0,0'], 'each once'),
  (['--slurm=array.sh'], 'array.sh exists'),
  (['--slurm=no/array.sh'], 'there is no directory'),
  (['--seeds=5000000000'], 'config.seed=5000000000'),
]


@pytest.fixture(scope='module')
def launched(tmp_path_factory):
  """A directory, and what came of each command line in it."""
  folder = tmp_path_factory.mktemp('launched')
  lines = [LIST, SETS, SLURM, *(x for x, _ in REFUSALS)]
  cases = [['launch.sweep', CONFIG, *x] for x in lines]
  cases.append(
    ['launch.train', CONFIG, '--vmap_seeds=0,1', f'--workdir={folder}']
  )
  return folder, in_one_process.launch_all(cases, folder)


def test_list(launched):
  _, [(code, stdout, stderr, _), *_] = launched
  assert code == 0, stderr
  runs, commands = listed(stdout)
  names = [
    f'runs/mnist_{kind}_tiny{iters}/seed{seed}'
    for seed in (0, 1)
    for kind in ('sinkhorn', 'softmax')
    for iters in ('', '_num_iters=7')
  ]
  assert runs == dict.fromkeys(names, 'new')
  for name, command in zip(names, commands, strict=True):
    assert f'--workdir={name}' in command
    # It is the directory that training takes by itself.
    overrides = [
      x.removeprefix('--config.') for x in command if x.startswith('--config.')
    ]
    path = command[3].removeprefix('--config=')
    config = fields_lib.load(path, overrides)
    assert str(train.default_workdir(path, config)) == name
  # All may be compared: one analysis.
  (report,) = re.findall('python -m analysis.report .*', stdout)
  assert all(f'--workdir={x} ' in report for x in names)


def test_sets_that_cannot_be_compared_are_analysed_apart(launched):
  _, [_, (code, stdout, _, _), *_] = launched
  assert code == 0
  reports = re.findall('python -m analysis.report .*', stdout)
  assert len(reports) == 2
  assert [x.count('--workdir=') for x in reports] == [2, 2]
  assert len({x.rpartition('--output=')[2] for x in reports}) == 2


def test_refusals(launched):
  folder, [_, _, _, *results] = launched
  words = [*(words for _, words in REFUSALS), 'write {seed} where']
  for expected, (code, _, stderr, _) in zip(words, results, strict=True):
    (line,) = (x for x in stderr.splitlines() if x.startswith('error: '))
    assert code == 1
    assert expected in line
  # Nothing but the script has been written.
  assert [x.name for x in folder.iterdir()] == ['array.sh']


def test_default_workdirs():
  path = f'{ROOT}/configs/mnist_sinkhorn.py'
  for arguments, expected in (
    ([], 'mnist_sinkhorn/seed0'),
    (
      ['seed=3', 'data.dir=elsewhere', 'data.source=files'],
      'mnist_sinkhorn/seed3',
    ),
    (['model.normalizer=sinkhorn'], 'mnist_sinkhorn/seed0'),
    (['model.normalizer=softmax'], 'mnist_sinkhorn_normalizer=softmax/seed0'),
    (
      ['checkpoint.keep_steps=(1,2)', 'optimizer.learning_rate=2e-3'],
      'mnist_sinkhorn_keep_steps=1-2_learning_rate=0.002/seed0',
    ),
  ):
    config = fields_lib.load(path, arguments)
    assert str(train.default_workdir(path, config)) == f'runs/{expected}'


def train_sweep(tmp_path, *arguments, **options):
  return launch_test.run(
    'launch.sweep',
    CONFIG,
    *SHORT,
    '--config.model.normalizer=softmax,sinkhorn',
    *arguments,
    cwd=tmp_path,
    timeout=600,
    **options,
  )


@pytest.mark.slow
def test_runs_in_turn(tmp_path):
  # One is stopped before, one fails, and two have yet to begin.
  stopped = tmp_path / 'runs' / CHANGED / 'seed0'
  command = ['launch.train', CONFIG, *SHORT, f'--workdir={stopped}']
  process = launch_test.start(*command)
  launch_test.wait_for((stopped / 'checkpoints' / '0').exists, process, 300)
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=300)
  assert process.returncode == 75
  broken = tmp_path / 'runs' / CHANGED / 'seed1'
  broken.parent.mkdir(exist_ok=True)
  broken.write_text('a file')
  code, stdout, _ = train_sweep(tmp_path, '--seeds=0,1')
  assert code == 1
  assert '0 runs are finished, 4 processes to run' in stdout
  failed = [x for x in stdout.splitlines() if x.startswith('FAILED: ')]
  assert len(failed) == 1
  assert f'--workdir=runs/{CHANGED}/seed1' in failed[0]
  assert f'runs/{CHANGED}/seed1.log: error: workdir ' in stdout
  assert 'Going on from step' in (stopped.parent / 'seed0.log').read_text()
  finished = list(tmp_path.glob('runs/*/*/result.json'))
  assert len(finished) == 3
  (report,) = re.findall('python -m analysis.report .*', stdout)
  assert report.count('--workdir=') == 3
  # What is finished is left alone, what failed is tried again.
  before = loop_test.contents(stopped)
  broken.unlink()
  code, stdout, _ = train_sweep(tmp_path, '--seeds=0,1')
  assert code == 0
  assert '3 runs are finished, 1 processes to run' in stdout
  assert loop_test.contents(stopped) == before
  code, stdout, _ = train_sweep(tmp_path, '--seeds=0,1', '--dry_run')
  assert set(listed(stdout)[0].values()) == {'finished'}
  # The set goes straight into the analysis.
  (report,) = re.findall('python -m (analysis.report .*)', stdout)
  code, stdout, stderr = launch_test.run(
    *shlex.split(report),
    *('--num_examples=3', '--num_paths=3', '--num_draws=2', '--num_tokens=5'),
    *('--num_layers=2', '--scales=1'),
    cwd=tmp_path,
    timeout=600,
  )
  assert code == 0, stderr


@pytest.mark.slow
def test_sigterm_is_passed_on(tmp_path):
  process = launch_test.start(
    'launch.sweep', CONFIG, '--config.total_steps=4000', cwd=tmp_path
  )
  workdir = tmp_path / 'runs' / f'{NAME}_total_steps=4000' / 'seed0'
  launch_test.wait_for((workdir / 'checkpoints' / '10').exists, process, 300)
  process.send_signal(signal.SIGTERM)
  stdout, _ = process.communicate(timeout=120)
  assert process.returncode == 75
  assert 'stopped after' in stdout
  assert 'The same command goes on from there' in stdout
  assert 'Stopped after step' in (workdir.parent / 'seed0.log').read_text()


@pytest.mark.slow
def test_seeds_at_once(tmp_path):
  code, stdout, _ = train_sweep(tmp_path, '--seeds=0,1', '--vmap_seeds')
  assert code == 0
  assert '2 processes to run' in stdout
  for folder in tmp_path.glob('runs/*'):
    for seed in (0, 1):
      text = (folder / f'seed{seed}' / 'config.json').read_text()
      assert json.loads(text)['seed'] == seed
    assert (folder / 'seeds0,1.log').exists()
  # Each is a run that can be evaluated.
  code, stdout, stderr = launch_test.run(
    'launch.evaluate', f'--workdir={folder}/seed1', timeout=300
  )
  assert code == 0, stderr
  assert 'step 4, test' in stdout


def test_slurm_array(launched, tmp_path):
  folder, [_, _, (code, stdout, stderr, _), *_] = launched
  assert code == 0, stderr
  assert '4 tasks: sbatch array.sh' in stdout
  text = (folder / 'array.sh').read_text()
  assert '#SBATCH --array=0-3\n' in text
  assert f'cd {folder} ||' in text
  # In place of Python, a program that does what the test says.
  fake = tmp_path / 'fake'
  fake.mkdir()
  (fake / 'python').write_text(
    '#!/bin/bash\n'
    'echo "$@"\n'
    'trap "exit 75" TERM\n'
    '[ "$WAIT" ] && touch begun && while :; do sleep 0.05; done\n'
    'exit ${CODE:-0}\n'
  )
  (fake / 'scontrol').write_text('#!/bin/bash\necho "$@" >>requeued\n')
  for path in fake.iterdir():
    path.chmod(0o755)
  script = tmp_path / 'array.sh'
  text = text.replace(f'cd {folder} ||', f'cd {tmp_path} ||')
  script.write_text(text.replace(f'({sys.executable} ', '(python '))

  def start(task, **environment):
    return subprocess.Popen(
      ['bash', str(script)],
      env={
        **os.environ,
        'PATH': f'{fake}:{os.environ["PATH"]}',
        'SLURM_ARRAY_TASK_ID': str(task),
        'SLURM_ARRAY_JOB_ID': '7',
        **environment,
      },
      stderr=subprocess.PIPE,
    )

  for task, number, kind in ((0, 0, '_normalizer=softmax'), (3, 1, '')):
    assert start(task).wait(timeout=60) == 0
    log = tmp_path / 'runs' / f'{NAME}{kind}' / f'seed{number}.log'
    assert f'--config.seed={number} ' in log.read_text()
  assert start(0, CODE='1').wait(timeout=60) == 1
  assert start(4).wait(timeout=60) == 1
  # Near the end of its time it goes into the queue again; cancelled, it does
  # not.
  for number, requeued in ((signal.SIGTERM, False), (signal.SIGUSR1, True)):
    (tmp_path / 'begun').unlink(missing_ok=True)
    process = start(2, WAIT='1')
    launch_test.wait_for((tmp_path / 'begun').exists, process)
    process.send_signal(number)
    assert process.wait(timeout=60) == 75
    assert (tmp_path / 'requeued').exists() == requeued
  assert (tmp_path / 'requeued').read_text() == 'requeue 7_2\n'
