"""Runs of two processes, as they would be on two hosts."""

import json
import os
import signal
import time

import jax
import numpy as np
import pytest

from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
from tests.launch import launch_test
from tests.launch import processes
from tests.training import loop_test
from tests.training import sharding_test

TRAIN = processes.python(
  'launch.train', '--config=configs/mnist_sinkhorn.py:tiny'
)


def codes(pair):
  return [x.end() for x in pair]


# M01
@pytest.mark.slow
def test_two_processes_with_four_devices_train_as_one_does(config, tmp_path):
  config.model.dropout_rate = 0.1
  training.train_and_evaluate(config, tmp_path / 'one')
  two = tmp_path / 'two'
  with processes.pair(
    tmp_path / 'log',
    [*TRAIN, '--config.model.dropout_rate=0.1', f'--workdir={two}'],
    num_devices=4,
    # Compiling takes half as long.
    env={'JAX_DISABLE_MOST_OPTIMIZATIONS': 'True'},
  ) as pair:
    assert codes(pair) == [0, 0], [x.stderr for x in pair]
  sharding_test.assert_same_training(tmp_path / 'one', two)
  results = [
    json.loads((tmp_path / x / 'result.json').read_text())
    for x in ('one', 'two')
  ]
  for split in ('validation', 'test'):
    for name in ('count', 'accuracy', 'loss'):
      first, second = (x[split][name] for x in results)
      assert first == pytest.approx(second, rel=1e-6)
  # The first process alone writes; its log is that of one process.
  names = [x['step'] for x in loop_test.logged(two)]
  assert names == [x['step'] for x in loop_test.logged(tmp_path / 'one')]
  assert len(list((two / 'tensorboard').iterdir())) == 1
  assert 'test accuracy' in pair[0].stdout
  assert 'step 20/20' in pair[0].stderr
  assert 'test accuracy' not in pair[1].stdout
  assert 'step ' not in pair[1].stderr
  start = json.loads((two / 'provenance.json').read_text())['starts'][0]
  assert start['processes'] == 2
  assert len(start['devices']) == 8
  with checkpoints.Checkpoints(two) as saved:
    assert saved.steps == [0, 10, 20]


# M01
def test_missing_process(tmp_path):
  # Known fault: a process waits for ever, or aborts without a word.
  workdir = tmp_path / 'run'
  started = []
  for i in range(2):
    address = f'localhost:{processes.free_port()}'
    process = processes.Process(
      tmp_path / f'{i}',
      [
        *TRAIN,
        f'--workdir={workdir}',
        '--distributed',
        f'--coordinator_address={address}',
        '--num_processes=2',
        f'--process_id={i}',
        '--peer_timeout=3',
      ],
    )
    started.append((process, address))
  for process, address in started:
    assert process.end(60) == 1, process.stderr
    assert 'waited 3 s' in process.error
    assert f'2 at {address}' in process.error
  assert not workdir.exists()


@pytest.mark.parametrize(
  ('code', 'arguments', 'words'),
  [
    (1, ['--distributed'], '--coordinator_address=HOST:PORT'),
    (2, ['--num_processes=2'], 'need each other'),
    (
      2,
      ['--coordinator_address=here:1', '--num_processes=2', '--process_id=0'],
      'and --distributed',
    ),
    (
      2,
      [
        '--distributed',
        '--coordinator_address=here',
        '--num_processes=2',
        '--process_id=0',
      ],
      'HOST:PORT',
    ),
    (
      2,
      [
        '--distributed',
        '--coordinator_address=here:1',
        '--num_processes=2',
        '--process_id=2',
      ],
      'below N',
    ),
  ],
)
def test_refusals(code, arguments, words, tmp_path):
  workdir = f'--workdir={tmp_path / "run"}'
  line = launch_test.refused(*TRAIN[2:], workdir, *arguments, code=code)
  assert words in line


@pytest.mark.slow
def test_processes_that_do_not_belong_together(tmp_path):
  def start(*different):
    port = processes.free_port()
    pair = [
      processes.Process(
        tmp_path / f'{time.monotonic_ns()}',
        [
          *TRAIN,
          '--distributed',
          f'--coordinator_address=localhost:{port}',
          '--num_processes=2',
          f'--process_id={i}',
          *own,
        ],
      )
      for i, own in enumerate(different)
    ]
    assert codes(pair) == [1, 1], [x.stderr for x in pair]
    return pair

  a, b = f'--workdir={tmp_path / "a"}', f'--workdir={tmp_path / "b"}'
  pair = start([a], [a, '--config.seed=1', '--config.total_steps=30'])
  assert 'here config.seed=0, config.total_steps=20' in pair[0].error
  assert 'here config.seed=1, config.total_steps=30' in pair[1].error
  assert not (tmp_path / 'a').exists()
  pair = start([a], [b])
  assert f'{tmp_path / "b"} is not the directory' in pair[1].error
  assert 'log says why' in pair[0].error
  # What process 0 finds out, the other knows.
  (tmp_path / 'a' / 'checkpoints' / '0').mkdir(parents=True)
  (tmp_path / 'a' / 'config.json').write_text('{}')
  pair = start([a], [a])
  assert 'belongs to a run with another config' in pair[0].error
  assert 'log says why' in pair[1].error


LONG = (
  *TRAIN,
  '--config.total_steps=40',
  '--config.log_every_steps=1',
  '--config.eval_every_steps=20',
  '--config.eval_batch_size=16',
  '--config.checkpoint.keep_steps=(30,31,32,33)',
)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp('undisturbed')
  with processes.pair(folder, [*LONG, f'--workdir={folder / "run"}']) as pair:
    assert codes(pair) == [0, 0], [x.stderr for x in pair]
  return folder / 'run'


def assert_same_run(first, second):
  """Bit for bit, every logged step and the final parameters."""
  assert loop_test.logged(first) == loop_test.logged(second)
  params = [training.load_run(x).params for x in (first, second)]
  jax.tree.map(np.testing.assert_array_equal, *params)
  left = [x.name for x in (second / 'checkpoints').iterdir()]
  assert not [x for x in left if 'tmp' in x]


def newest(workdir):
  with checkpoints.Checkpoints(workdir) as saved:
    return saved.steps[-1]


# C09
@pytest.mark.slow
def test_signals_stop_both_at_the_same_step(undisturbed, tmp_path):
  workdir = tmp_path / 'run'

  def says(text):
    return lambda pair: text in pair[0].stderr

  def is_saving(pair):
    del pair
    return list((workdir / 'checkpoints').glob('3?.*tmp*'))

  for moment, number, receivers, least, most in (
    # While compiling,
    (says('Starting in'), signal.SIGTERM, [1], 0, 3),
    (says('Going on from'), signal.SIGINT, [0], 0, 6),
    # in a step,
    (says('step 10/40'), signal.SIGINT, [1], 10, 19),
    # in the evaluation that follows it,
    (says('step 20/40'), signal.SIGTERM, [0], 20, 20),
    # and in a save.
    (is_saving, signal.SIGTERM, [0, 1], 30, 35),
  ):
    with processes.pair(tmp_path, [*LONG, f'--workdir={workdir}']) as pair:
      processes.wait_for(lambda: moment(pair), pair)  # noqa: B023
      begin = time.monotonic()
      for i in receivers:
        os.kill(pair[i].popen.pid, number)
      assert codes(pair) == [75, 75], [x.stderr for x in pair]
      assert time.monotonic() - begin < 30
    step = newest(workdir)
    assert least <= step <= most
    assert f'Stopped after step {step} of 40' in pair[0].stderr
    assert not (workdir / 'result.json').exists()
    lines = [x for x in loop_test.logged(workdir) if 'validation/loss' in x]
    # A part of an evaluation is no result.
    assert [x['step'] for x in lines] == ([20] if step > 20 else [])
  with processes.pair(tmp_path, [*LONG, f'--workdir={workdir}']) as pair:
    assert codes(pair) == [0, 0], [x.stderr for x in pair]
  assert_same_run(undisturbed, workdir)


@pytest.mark.slow
def test_killed_process_ends_the_other(undisturbed, tmp_path):
  workdir = tmp_path / 'run'
  for killed, text in ((1, 'step 8/40'), (0, 'step 15/40')):
    with processes.pair(tmp_path, [*LONG, f'--workdir={workdir}']) as pair:
      processes.wait_for(lambda: text in pair[0].stderr, pair)  # noqa: B023
      begin = time.monotonic()
      pair[killed].popen.kill()
      survivor = pair[1 - killed]
      code = survivor.end(60)
      # Closed connections tell at once.
      assert time.monotonic() - begin < 15
      if killed == 1:
        assert code == 1, survivor.stderr
        assert 'its log says why. Start them all again' in survivor.error
      else:
        # JAX misses its coordinator as well, and may abort first.
        assert code in (1, -signal.SIGABRT), survivor.stderr
        assert 'log' in survivor.stderr
  assert newest(workdir) == 10
  with processes.pair(tmp_path, [*LONG, f'--workdir={workdir}']) as pair:
    assert codes(pair) == [0, 0], [x.stderr for x in pair]
  assert 'Going on from step 10' in pair[0].stderr
  assert_same_run(undisturbed, workdir)


@pytest.mark.slow
@pytest.mark.parametrize('frozen', [0, 1])
def test_process_that_does_not_answer_ends_the_other(tmp_path, frozen):
  # As on a machine that is cut off: its connections stay open.
  with processes.pair(
    tmp_path,
    [
      *LONG,
      f'--workdir={tmp_path / "run"}',
      '--config.total_steps=4000',
      '--peer_timeout=10',
    ],
  ) as pair:
    processes.wait_for(lambda: 'step 5/4000' in pair[0].stderr, pair)
    os.kill(pair[frozen].popen.pid, signal.SIGSTOP)
    begin = time.monotonic()
    survivor = pair[1 - frozen]
    assert survivor.end(90) not in (0, 75), survivor.stderr
    assert time.monotonic() - begin < 10 + 20
    assert 'another task died' in survivor.stderr
    assert 'all end within 10 s' in pair[0].stderr


@pytest.mark.slow
def test_slurm_script(tmp_path):
  """`launch/slurm.sh`, with an `srun` that starts two tasks as Slurm does."""
  srun = tmp_path / 'srun'
  srun.write_text(f"""#!/bin/bash
    shift  # --kill-on-bad-exit
    for i in 0 1; do
      SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 \
        SLURM_STEP_NODELIST=localhost "$@" &
      echo $! > {tmp_path}/pid$i
    done
    for i in 0 1; do
      wait $(cat {tmp_path}/pid$i) || code=$?
    done
    exit ${{code:-0}}
  """)
  requeue = tmp_path / 'scontrol'
  requeue.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/requeued\n')
  for path in (srun, requeue):
    path.chmod(0o755)

  def start():
    return processes.Process(
      tmp_path / f'{time.monotonic_ns()}',
      ['launch/slurm.sh', *TRAIN[3:], f'--workdir={tmp_path / "run"}'],
      {
        'PATH': f'{tmp_path}:{os.environ["PATH"]}',
        'PYTHON': TRAIN[0],
        'SLURM_JOB_ID': str(processes.free_port()),
      },
    )

  job = start()
  processes.wait_for(lambda: 'Starting in' in job.stderr, [job])
  os.kill(int((tmp_path / 'pid1').read_text()), signal.SIGTERM)
  assert job.end() == 75, job.stderr
  assert (tmp_path / 'requeued').read_text().startswith('requeue ')
  job = start()
  assert job.end() == 0, job.stderr
  assert 'Going on from step' in job.stderr
  assert job.stdout.count('test accuracy') == 1
