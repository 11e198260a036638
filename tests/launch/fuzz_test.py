"""Wrong and odd input of every kind: a line that says what is wrong, soon.

Nothing ends in a traceback or a hang. Each case is drawn with a fixed seed.
"""

import json
import random
import shutil

import numpy as np
import pytest

from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax import training
from sinkformer_jax.training import metrics as metrics_lib
from tests.conftest import ROOT
from tests.launch import in_one_process
from tests.training import loop_test

TINY = f'--config={ROOT}/configs/mnist_sinkhorn.py:tiny'
LIMIT_S = 15
VALUES = (
  *('', ' ', 'None', 'nan', 'inf', '-inf', '-1', '-0', '0', '+5', '2.5'),
  *('1e3', '1e400', '1e-400', '1_000', '0x10', '9' * 30, '0' * 5_000),
  *('True', 'true', 'yes', '[]', '()', '(1,2)', '1,2', ',', '(1,', '((((['),
  *("{'a': 1}", "'", '"', '=', '--', '%s', '$HOME', '~', '~nobody_here/x'),
  *('../../..', '/dev/null', '/proc/nowhere', 'a b', 'a\nb', 'ü☃', '１２'),
  *('x' * 100_000, '[' * 3_000, 'softmax ', 'SOFTMAX', 'lambda: 1', '\udce4'),
)
# As they stand, whatever the values are.
ODD = (
  *('--config.', '--config..model', '--config.model', '--config.model=3'),
  *('--config.model={}', '--config.model.num_layers.deep=3', '-', '---', '='),
  *('--config.__class__=3', '--config.model.__dict__=1', '--config.items=3'),
  *('--noconfig.model.skip', '--noconfig.model.width', '--config.seed=1,2'),
  *('--config.total_steps', '--config.model.width=2=3', '--config.ü=1', '--'),
  *('--flagfile=/nowhere', '--flagfile', '--undefok=x', '--workdir', '-v'),
  *('--vmap_seeds=1,1', '--vmap_seeds=²', '--vmap_seeds=0,1', '--helpfull'),
)
FLAGS = {
  'launch.train': ('config', 'vmap_seeds'),
  'launch.evaluate': ('workdir', 'step', 'split', 'batch_size', 'output'),
  'launch.prepare_data': ('name', 'files', 'nothing'),
  'launch.sweep': (
    *('config', 'seeds', 'slurm', 'vmap_seeds', 'config.model.normalizer'),
    *('config.seed', 'config.nothing', 'config.checkpoint.keep_steps'),
  ),
  'analysis.path_products': ('workdir', 'step', 'num_examples', 'output'),
  'analysis.cost': ('workdir', 'output', 'tables'),
}


def command_lines(config):
  rng = random.Random(0)
  fields = list(configuration.flatten(config.to_dict()))
  for _ in range(200):
    yield [
      'launch.train',
      TINY,
      f'--config.{rng.choice(fields)}={rng.choice(VALUES)}',
    ]
  for argument in ODD:
    yield ['launch.train', *rng.choice(([TINY, argument], [argument, TINY]))]
    yield ['launch.sweep', '--dry_run', TINY, argument]
  for module, names in FLAGS.items():
    for _ in range(15):
      name = rng.choice(names)
      case = [module, f'--{name}={rng.choice(VALUES)}']
      if module in ('launch.train', 'launch.sweep') and name != 'config':
        case.insert(1, TINY)
      # Nothing is trained, downloaded or measured if it is right after all.
      case += {
        'launch.sweep': ['--dry_run'],
        'launch.prepare_data': ['--data_dir=new', '--files=nowhere'][
          : 1 if name == 'files' else 2
        ],
        'launch.evaluate': ['--workdir=nowhere'] * (name != 'workdir'),
        'analysis.path_products': ['--workdir=nowhere'] * (name != 'workdir'),
        'analysis.cost': ['--preset=nothing'],
      }.get(module, [])
      yield case


# L01
def test_command_lines(config, tmp_path):
  cases = list(command_lines(config))
  assert len(cases) > 300
  results = in_one_process.launch_all(cases, tmp_path)
  codes = []
  for case, (code, _, stderr, seconds) in zip(cases, results, strict=True):
    told = [x for x in stderr.splitlines() if x.startswith('error: ')]
    about = f'{str(case)[:300]}: {code} {stderr[-500:]}'
    assert code in (0, 1, 2, 75), about
    assert 'Traceback' not in stderr, about
    assert len(told) == (code in (1, 2)), about
    assert len(stderr) < 5_000, about
    assert seconds < LIMIT_S, about
    codes.append(code)
  # Some are right, and both kinds of refusal are there.
  assert {1, 2, 75} <= set(codes)
  assert not list(tmp_path.glob('runs*'))


def odd_value(rng):
  return rng.choice(
    (
      *(None, True, -1, 0, 1, 2.5, 10**30, float('nan'), float('inf'), '', 'x'),
      *((), (1, 'a'), [1], {}, {'a': 1}, {1}, b'x', object(), np.float32(2)),
      *(np.int64(3), np.arange(3), np.nan, complex(1), range(3), int, 'a\0b'),
    )
  )


def test_configs(config):
  rng = random.Random(0)
  fields = list(configuration.flatten(config.to_dict()))
  refused = 0
  for _ in range(300):
    changed = config.copy_and_resolve_references()
    for field in rng.sample(fields, rng.choice((1, 1, 3))):
      section, _, name = field.rpartition('.')
      place = changed[section] if section else changed
      kind = rng.random()
      with changed.ignore_type():
        if kind < 0.1:
          del place[name]
        elif kind < 0.2:
          place[f'{name}_'] = odd_value(rng)
        else:
          place[name] = odd_value(rng)
    try:
      configuration.check(changed)
    except errors.ConfigError:
      refused += 1
  assert 200 < refused < 300


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  """A run that was stopped before its first step."""
  from configs import mnist_sinkhorn

  workdir = tmp_path_factory.mktemp('stopped') / 'run'
  with pytest.MonkeyPatch.context() as m:
    loop_test.interrupt(m, 1)
    config = mnist_sinkhorn.get_config('tiny')
    training.train_seeds(config, {0: workdir})
  return workdir


def change_json(path, rng):
  """Changes or removes one value of a JSON file, however deep."""
  content = json.loads(path.read_text())
  places, todo = [], [content]
  while todo:
    part = todo.pop()
    keys = list(part) if isinstance(part, dict) else range(len(part))
    places += [(part, key) for key in keys]
    todo += [part[key] for key in keys if isinstance(part[key], (dict, list))]
  part, key = rng.choice(places)
  if rng.random() < 0.3:
    del part[key]
  else:
    part[key] = rng.choice(
      (None, True, 0, -1, 1.5, 10**30, '', 'x', [], [1], {}, {'a': 1}, [[]])
    )
  path.write_text(json.dumps(content))


def change_run(workdir, rng):
  """Damages a run in one of many ways."""
  kind = rng.randrange(10)
  saved = workdir / 'checkpoints'
  name = rng.choice(('config.json', 'provenance.json'))
  if kind < 4:
    change_json(workdir / name, rng)
  elif kind == 4:
    (workdir / name).unlink()
    if rng.random() < 0.5:
      (workdir / name).mkdir()
  elif kind == 5:
    content = rng.choice((b'[' * 100_000, b'\xff\xfe\0', b'{"a"', b'', b'3'))
    (workdir / name).write_bytes(content)
  elif kind == 6:
    shutil.rmtree(saved)
    if rng.random() < 0.5:
      saved.write_text('a file')
  elif kind == 7:
    shutil.rmtree(saved / '0')
    (saved / '0').symlink_to('/nowhere')
  else:
    odd = rng.choice(('abc', '30', '-5', '٣', '007', '9' * 30, '5.x-tmp'))
    (saved / odd).mkdir()


# C06
def test_run_directories(stopped, tmp_path):
  rng = random.Random(0)
  outcomes = []
  for number in range(12):
    workdir = tmp_path / str(number)
    shutil.copytree(stopped, workdir)
    change_run(workdir, rng)
    before = loop_test.contents(workdir)
    try:
      outcomes.append(training.load_run(workdir).step)
    except errors.UserError as error:
      outcomes.append(str(error))
    assert loop_test.contents(workdir) == before
  assert 0 in outcomes
  assert len(set(outcomes)) >= 4


@pytest.mark.parametrize(
  'line',
  [
    *(b'[]', b'3', b'null', b'{}', b'{"step": "x"}', b'{"step": null}', b'NaN'),
    *(b'{"step": 5, "validation/loss": "a"}', b'\xff\xfe\0', b'{"st'),
    *(b'{"step": 5, "a": NaN}', b'[' * 100_000, b'{"step": 5, "a": [{}]}'),
  ],
)
def test_damaged_metrics(tmp_path, line, caplog):
  whole = b'{"step": 1, "train/loss": 2.5, "by_layer": [1, 2.0]}\n'
  (tmp_path / 'metrics.jsonl').write_bytes(whole + line + b'\n' + whole)
  assert len(metrics_lib.read_metrics(tmp_path)) == 2
  assert 'dropped line 2' in caplog.text


def test_metrics_that_cannot_be_read(tmp_path):
  (tmp_path / 'metrics.jsonl').mkdir()
  with pytest.raises(errors.RunError, match='metrics.jsonl cannot be read'):
    metrics_lib.read_metrics(tmp_path)


def test_model_that_has_no_room(config, tmp_path):
  config.model.width = config.model.ffn_dim = 2**19
  with pytest.raises(errors.ConfigError, match='GiB.*config.model.width'):
    training.train_and_evaluate(config, tmp_path / 'run')
