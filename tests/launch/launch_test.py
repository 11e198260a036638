"""The launchers as processes: flags, exit codes, messages, signals, kills."""

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from launch import fields
from launch import train
from sinkformer_jax import cli
from sinkformer_jax import configuration
from tests.conftest import ROOT
from tests.training import loop_test

TINY = '--config=configs/mnist_sinkhorn.py:tiny'


def start(module, *arguments, cwd=ROOT, env=None, **options):
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), **(env or {})}
  return subprocess.Popen(
    [sys.executable, '-m', module, *arguments],
    cwd=cwd,
    env=environment,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **options,
  )


def run(module, *arguments, timeout=120, **options):
  process = start(module, *arguments, **options)
  try:
    stdout, stderr = process.communicate(timeout=timeout)
  finally:
    process.kill()
  return process.returncode, stdout, stderr


def run_code(code, *arguments, cwd=ROOT, env=None):
  """Runs Python code, which has to succeed; its standard output."""
  done = subprocess.run(
    [sys.executable, '-c', code, *arguments],
    cwd=cwd,
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT), **(env or {})},
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def children_s():
  """Seconds that processes which have ended have computed."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def refused(module, *arguments, code, **options):
  """Runs what has to be refused; its one line of error."""
  begin = children_s()
  returncode, _, stderr = run(module, *arguments, **options)
  assert returncode == code, stderr
  # Of computing: the machine may be busy with other tests.
  assert children_s() - begin < 10
  assert 'Traceback' not in stderr
  (line,) = (x for x in stderr.splitlines() if x.startswith('error: '))
  return line


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """A tiny run, started with a relative path with a space in it."""
  folder = tmp_path_factory.mktemp('undisturbed')
  code, stdout, stderr = run(
    'launch.train',
    f'--config={ROOT}/configs/mnist_sinkhorn.py:tiny',
    '--workdir=some runs/a/',
    cwd=folder,
  )
  assert code == 0, stderr
  workdir = folder / 'some runs' / 'a'
  assert (workdir / 'result.json').exists()
  return workdir, stdout, stderr


def test_train(undisturbed):
  workdir, stdout, stderr = undisturbed
  result = json.loads((workdir / 'result.json').read_text())
  assert f'test accuracy {result["test"]["accuracy"]:.4f}' in stdout
  assert 'some runs/a' in stdout
  assert 'NOTE: made from the 5,000-image sample' in stdout
  assert 'step 20/20' in stderr
  assert re.search(r'[\d.]+ s/step, \d\d:\d\d left', stderr)
  # Only our own lines, and no warning from a library.
  for line in stderr.splitlines():
    assert re.match(r'\d\d:\d\d:\d\d ', line), line
  provenance = json.loads((workdir / 'provenance.json').read_text())
  assert any('--workdir' in x for x in provenance['starts'][0]['command'])


def test_finished_run_says_so(undisturbed):
  workdir, _, _ = undisturbed
  before = loop_test.contents(workdir)
  code, stdout, stderr = run('launch.train', TINY, f'--workdir={workdir}')
  assert code == 0
  assert 'is finished' in stderr
  assert 'test accuracy' in stdout
  assert loop_test.contents(workdir) == before


def test_evaluate(undisturbed, tmp_path):
  workdir, _, _ = undisturbed
  output = tmp_path / 'test.json'
  code, stdout, stderr = run(
    'launch.evaluate', f'--workdir={workdir}', f'--output={output}'
  )
  assert code == 0, stderr
  expected = json.loads((workdir / 'result.json').read_text())['test']
  actual = json.loads(output.read_text())
  assert actual['accuracy'] == expected['accuracy']
  assert actual['loss'] == pytest.approx(expected['loss'], rel=1e-6)
  assert f'accuracy {expected["accuracy"]:.4f}, 500 examples' in stdout
  assert 'NOTE' in stdout
  line = refused(
    'launch.evaluate', f'--workdir={workdir}', f'--output={output}', code=1
  )
  assert 'exists' in line


@pytest.mark.slow
def test_evaluate_refusals(undisturbed):
  workdir, _, _ = undisturbed
  here = f'--workdir={workdir}'
  for code, arguments, words in (
    (1, [f'{here}/checkpoints/10'], f'Did you mean {workdir}'),
    (1, [here, '--step=7'], 'no checkpoint of step 7'),
    (1, [here, '--output=no/x.json'], 'no directory /'),
    (1, [here, '--data_dir=/nowhere'], '/nowhere'),
    (1, ['--workdir=~nobody_here/x'], 'nobody_here'),
    (1, [here, '--output=~nobody_here/x'], '--output'),
    (1, [here, '--data_dir=~nobody_here/x'], 'nobody_here'),
    (2, [here, '--split=dev'], 'dev'),
    (2, [], 'workdir'),
  ):
    assert words in refused('launch.evaluate', *arguments, code=code)


# C01
def test_evaluate_with_a_relative_path_and_a_home(undisturbed):
  workdir, _, _ = undisturbed
  for path, options in (
    ('a/', {'cwd': workdir.parent}),
    ('~/some runs/a', {'env': {'HOME': str(workdir.parent.parent)}}),
  ):
    code, stdout, stderr = run(
      'launch.evaluate', f'--workdir={path}', '--split=validation', **options
    )
    assert code == 0, stderr
    assert str(workdir) in stdout


# L01
@pytest.mark.parametrize(
  ('code', 'arguments', 'words'),
  [
    (1, [TINY, '--config.model.num_heads=3'], 'config.model.num_heads=3'),
    (1, [TINY, '--config.data.dir=None'], 'config.data.dir'),
    (1, [TINY, '--config.data.dir=~nobody_here/x'], 'config.data.dir'),
    (1, [TINY, '--config.model.num_layers=2.5'], 'num_layers=2.5 must be'),
    (1, [TINY, '--config.model.nm_heads=3'], 'Did you mean "num_heads"'),
    (1, [TINY, '--config.optimizer.clip_norm=None'], '0 means no clipping'),
    (1, ['--config=configs/mnist_sinkhorn.py:fast'], 'use one of quick'),
    (1, ['--config=configs/none.py'], 'none.py'),
    (1, ['--config', 'configs/none.py'], 'none.py'),
    (2, [], 'config'),
    (2, [TINY, 'stray'], 'stray'),
    (2, [TINY, '--wrokdir=x'], 'wrokdir'),
  ],
)
def test_train_refusals(code, arguments, words, tmp_path):
  workdir = tmp_path / 'run'
  line = refused('launch.train', *arguments, f'--workdir={workdir}', code=code)
  assert words in line
  assert not workdir.exists()


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    (b'def get_config(:\n', 'own.py'),
    (b'def get_config():\n  return undefined\n', 'undefined'),
    (b'import nowhere\n', 'nowhere'),
    (b'x = 1\n', 'get_config'),
    (b'\xff\xfe', 'own.py'),
    (b'def get_config():\n  return {}\n', 'ConfigDict'),
    (
      b'import ml_collections\n'
      b'def get_config():\n  return ml_collections.ConfigDict()\n',
      'is missing',
    ),
  ],
)
def test_broken_config_files(content, words, tmp_path):
  path = tmp_path / 'own.py'
  path.write_bytes(content)
  line = refused('launch.train', f'--config={path}', code=1)
  assert words in line


def test_workdirs_that_cannot_be_used(tmp_path):
  file = tmp_path / 'file'
  file.write_text('mine')
  line = refused('launch.train', TINY, f'--workdir={file}', code=1)
  assert str(file) in line
  assert '--workdir' in line
  assert file.read_text() == 'mine'
  line = refused('launch.train', TINY, '--workdir=/proc/nowhere', code=1)
  assert '/proc/nowhere' in line


def test_damaged_data_file(tmp_path):
  folder = tmp_path / 'mnist'
  folder.mkdir()
  (folder / 'train-images-idx3-ubyte.gz').write_bytes(b'<html>')
  command = (
    'launch.train',
    '--config=configs/mnist_softmax.py',
    f'--config.data.dir={tmp_path}',
    f'--workdir={tmp_path / "run"}',
  )
  line = refused(*command, code=1)
  assert 'is missing' in line
  for name in ('train-labels-idx1', 't10k-images-idx3', 't10k-labels-idx1'):
    (folder / f'{name}-ubyte.gz').write_bytes(b'<html>')
  line = refused(*command, code=1)
  assert 'train-images-idx3-ubyte.gz (6 bytes) is damaged' in line


def test_prepare_data_refusals(tmp_path):
  arguments = ['launch.prepare_data', f'--data_dir={tmp_path / "new"}']
  line = refused(*arguments, f'--files={tmp_path}', code=1)
  assert f'no idx files in {tmp_path}' in line
  line = refused(*arguments, '--files=nowhere', code=1)
  assert 'is not a directory' in line
  assert not list(tmp_path.iterdir())


# L01
def test_every_field_can_be_overridden(config):
  # With its own value, and with another legal one, in one process each.
  fields = configuration.flatten(config.to_dict())
  others = {
    'data.dir': 'elsewhere',
    'data.source': 'files',
    'data.name': 'mnist',
    'model.name': 'vit',
    'model.normalizer': 'softmax',
    'model.norm_position': 'post',
    'model.dtype': 'bfloat16',
    'model.pooling': 'mean',
    'optimizer.schedule': 'step',
    'optimizer.step_boundaries': (13, 15),
    'checkpoint.keep_steps': (7,),
    'model.num_heads': 4,
    'model.width': 64,
    'model.patch_size': 14,
    'model.dropout_rate': 0.5,
    'optimizer.b1': 0.5,
    'optimizer.b2': 0.5,
  }

  def other(field, value):
    if field in others:
      return others[field]
    return (
      (not value) if isinstance(value, bool) else type(value)(2 * value + 2)
    )

  changed = {field: other(field, value) for field, value in fields.items()}
  script = (
    'import json, sys\n'
    'from launch import fields\n'
    'from sinkformer_jax import configuration\n'
    '(_, path), overrides = fields.split(sys.argv)\n'
    "config = fields.load(path.removeprefix('--config='), overrides)\n"
    'configuration.check(config)\n'
    'print(json.dumps(configuration.flatten(config.to_dict())))\n'
  )
  for wanted in (fields, changed):
    overrides = [f'--config.{k}={v}' for k, v in wanted.items()]
    actual = json.loads(run_code(script, TINY, *overrides))
    assert actual == json.loads(json.dumps(wanted))
    for field, value in wanted.items():
      if not isinstance(value, tuple):
        assert type(actual[field]) is type(value), field


def test_default_workdir():
  path = 'configs/mnist_softmax.py'
  for preset, overrides, expected in (
    ('', [], 'mnist_softmax'),
    (':quick', [], 'mnist_softmax_quick'),
    (':quick', ['model.num_iters=5'], 'mnist_softmax_quick_num_iters=5'),
    # Where the data lies does not make another run.
    ('', ['data.dir=/x'], 'mnist_softmax'),
  ):
    config = fields.load(path + preset, ['seed=3', *overrides])
    workdir = train.default_workdir(path + preset, config)
    assert str(workdir) == f'runs/{expected}/seed3'


# L02
@pytest.mark.parametrize(
  'module',
  ['launch.train', 'launch.evaluate', 'launch.prepare_data', 'analysis.cost'],
)
def test_help(module):
  code, stdout, stderr = run(module, '--help', env={'JAX_PLATFORMS': 'none'})
  assert code == 0, stderr
  assert f'python -m {module}' in stdout


# J06, L02
def test_imports_have_no_side_effects(tmp_path):
  script = (
    'import sys\n'
    'import sinkformer_jax, launch.train, launch.evaluate\n'
    'import launch.prepare_data, analysis.cost\n'
    'import sinkformer_jax.training, sinkformer_jax.data\n'
    'from absl import flags\n'
    'import jax\n'
    'assert not flags.FLAGS.is_parsed()\n'
    'assert not jax._src.xla_bridge.backends_are_initialized()\n'
    "assert 'matplotlib.pyplot' not in sys.modules\n"
    "assert 'tensorflow' not in sys.modules\n"
    "assert 'tensorflow_datasets' not in sys.modules\n"
  )
  run_code(script, cwd=tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('silenced', [False, True])
def test_coroutines_that_orbax_leaves_are_not_told(silenced):
  script = (
    'import sys\n'
    'from sinkformer_jax import cli\n'
    "if sys.argv[1] == 'True':\n"
    '  cli._silence_tasks()\n'
    'async def read():\n'
    '  pass\n'
    'read()\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', script, str(silenced)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert ('never awaited' in done.stderr) != silenced


# C09
def test_sigterm_then_the_same_command(undisturbed, tmp_path):
  workdir = tmp_path / 'run'
  process = start('launch.train', TINY, f'--workdir={workdir}')
  wait_for(lambda: (workdir / 'checkpoints' / '0').exists(), process)
  process.send_signal(signal.SIGTERM)
  _, stderr = process.communicate(timeout=60)
  assert process.returncode == 75, stderr
  assert 'goes on from there' in stderr
  code, _, stderr = run('launch.train', TINY, f'--workdir={workdir}')
  assert code == 0, stderr
  assert_same_run(workdir, undisturbed[0])


def assert_same_run(first, second):
  loop_test.assert_same_state(
    loop_test.restored_state(first), loop_test.restored_state(second)
  )
  assert loop_test.logged(first) == loop_test.logged(second)


def wait_for(condition, process, timeout=60):
  begin = time.monotonic()
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() - begin < timeout
    time.sleep(0.02)


@pytest.mark.slow
def test_full_disk(tmp_path):
  # Larger files than this cannot be written, which is what a full disk is to
  # the second save.
  workdir = tmp_path / 'run'
  process = start('launch.train', TINY, f'--workdir={workdir}')
  wait_for(lambda: (workdir / 'checkpoints' / '0').exists(), process)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
  _, stderr = process.communicate(timeout=120)
  assert process.returncode == 1, stderr
  assert 'could not be written' in stderr
  code, stdout, stderr = run('launch.evaluate', f'--workdir={workdir}')
  assert code == 0, stderr
  assert 'step 0' in stdout


def test_log_without_a_reader(tmp_path):
  # As in `train 2>&1 | tee log` after Ctrl-C, which ends tee first.
  workdir = tmp_path / 'run'
  process = start('launch.train', TINY, f'--workdir={workdir}')
  wait_for(lambda: (workdir / 'checkpoints' / '0').exists(), process)
  process.stderr.close()
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=60) == 75


# C03
@pytest.mark.slow
def test_sigkill_at_random_moments(tmp_path):
  rng = np.random.default_rng(0)
  overrides = ['--config.checkpoint.every_steps=1', '--config.total_steps=40']
  workdir, expected = tmp_path / 'run', tmp_path / 'expected'
  code, _, stderr = run(
    'launch.train', TINY, *overrides, f'--workdir={expected}'
  )
  assert code == 0, stderr
  for after in range(1, 31, 3):
    process = start('launch.train', TINY, *overrides, f'--workdir={workdir}')
    wait_for((workdir / 'checkpoints' / f'{after}').exists, process)
    # A save takes a fifth of a second: some of these fall into one.
    time.sleep(rng.uniform(0, 0.3))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  code, _, stderr = run(
    'launch.train', TINY, *overrides, f'--workdir={workdir}'
  )
  assert code == 0, stderr
  assert_same_run(workdir, expected)
  left = [x.name for x in (workdir / 'checkpoints').iterdir()]
  assert not [x for x in left if 'tmp' in x]


# C09
@pytest.mark.slow
def test_sigterm_during_saves(tmp_path):
  overrides = ['--config.checkpoint.every_steps=1', '--config.total_steps=40']
  workdir, expected = tmp_path / 'run', tmp_path / 'expected'
  run('launch.train', TINY, *overrides, f'--workdir={expected}')
  for after in (3, 12, 21):
    process = start('launch.train', TINY, *overrides, f'--workdir={workdir}')
    folder = workdir / 'checkpoints'
    # A save that has begun.
    wait_for(lambda: list(folder.glob(f'{after}.*tmp*')), process)  # noqa: B023
    process.terminate()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 75, stderr
    assert (folder / f'{after}').exists()
  code, _, stderr = run(
    'launch.train', TINY, *overrides, f'--workdir={workdir}'
  )
  assert code == 0, stderr
  assert_same_run(workdir, expected)


DIGEST = """
import sys
from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
print(checkpoints._checksums(training.load_run(sys.argv[1]).params))
"""


# C02
@pytest.mark.slow
@pytest.mark.parametrize(('before', 'after'), [(8, 1), (1, 8), (8, 2)])
def test_another_number_of_devices(tmp_path, before, after):
  workdir = tmp_path / 'run'

  def devices(count):
    flag = f'--xla_force_host_platform_device_count={count}'
    return {'XLA_FLAGS': flag}

  process = start(
    'launch.train',
    TINY,
    f'--workdir={workdir}',
    '--config.total_steps=2000',
    env=devices(before),
  )
  wait_for(lambda: (workdir / 'checkpoints' / '10').exists(), process)
  process.terminate()
  process.communicate(timeout=60)
  assert process.returncode == 75
  evaluated, digests = [], []
  for count in (before, after):
    digests.append(run_code(DIGEST, str(workdir), env=devices(count)))
    output = tmp_path / f'{count}.json'
    code, stdout, stderr = run(
      'launch.evaluate',
      f'--workdir={workdir}',
      f'--output={output}',
      env=devices(count),
    )
    assert code == 0, stderr
    assert 'harding' not in stderr
    evaluated.append(json.loads(output.read_text()))
  assert digests[0] == digests[1]
  for name, tolerance in (('accuracy', 1e-7), ('loss', 1e-5), ('count', 0)):
    values = [x[name] for x in evaluated]
    assert values[0] == pytest.approx(values[1], abs=tolerance)
  stopped_at = newest(workdir)
  process = start(
    'launch.train',
    TINY,
    f'--workdir={workdir}',
    '--config.total_steps=2000',
    env=devices(after),
  )
  wait_for(lambda: newest(workdir) > stopped_at, process)
  process.terminate()
  _, stderr = process.communicate(timeout=60)
  assert process.returncode == 75, stderr
  assert 'Going on from step' in stderr
  assert 'harding' not in stderr


def newest(workdir):
  saved = (workdir / 'checkpoints').iterdir()
  return max(int(x.name) for x in saved if x.name.isdigit())


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path))
  cli._keep_compiled_programs()
  directory = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])
  assert directory.parent == tmp_path
  # What the user has chosen stays.
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path / 'other'))
  cli._keep_compiled_programs()
  assert os.environ['JAX_COMPILATION_CACHE_DIR'] == str(directory)
