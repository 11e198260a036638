"""Tiny runs, trained once for all tests of the analysis; reading tables."""

import csv
import pathlib

import pytest

from analysis.common import command
from analysis.common import runs as runs_lib
from configs import mnist_sinkhorn
from sinkformer_jax import training

HERE = pathlib.Path(__file__).parent
OPTIONS = {
  'seed': 0,
  'num_examples': 10,
  'num_paths': 7,
  'skip': False,
  'scales': ['1', '3'],
  'num_draws': 6,
  'num_tokens': 8,
  'num_layers': 5,
  'num_iters': 4,
}


def pytest_collection_modifyitems(items):
  """Tests that need trained runs are slow ones: minutes of one core."""
  for item in items:
    if 'runs' in item.fixturenames and item.path.is_relative_to(HERE):
      item.add_marker(pytest.mark.slow)


def tiny_config(normalizer, seed=0):
  config = mnist_sinkhorn.get_config('tiny')
  config.model.normalizer = normalizer
  config.seed = seed
  config.total_steps = 5
  return config


@pytest.fixture(scope='session')
def runs(tmp_path_factory):
  """Directories of two pairs: ``{(normalizer, seed): workdir}``."""
  root = tmp_path_factory.mktemp('runs')
  workdirs = {}
  for normalizer in ('softmax', 'sinkhorn'):
    for seed in (0, 1):
      workdir = root / normalizer / f'seed{seed}'
      training.train_and_evaluate(tiny_config(normalizer, seed), workdir)
      workdirs[normalizer, seed] = workdir
  return workdirs


@pytest.fixture(scope='session')
def pair(runs):
  """The two directories of a pair."""
  return [runs['softmax', 0], runs['sinkhorn', 0]]


@pytest.fixture(scope='session')
def subjects(pair):
  return runs_lib.load(pair)


def analyse(name, subjects, output, **options):
  return command.analyse(
    name, subjects, OPTIONS | options, output, command.Progress()
  )


def read(output, name):
  with (output / f'{name}.csv').open() as file:
    return list(csv.DictReader(file))


def curve(rows, column='mean', **values):
  """One column over depth of the rows with these values."""
  rows = [x for x in rows if all(x[k] == str(v) for k, v in values.items())]
  depths = [int(x['depth']) for x in rows]
  assert depths == list(range(depths[0], depths[0] + len(rows)))
  return [float(x[column] or 'nan') for x in rows]
