"""Tiny runs, trained once for all tests of the analysis."""

import pathlib

import pytest

from configs import mnist_sinkhorn
from sinkformer_jax import training

HERE = pathlib.Path(__file__).parent


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
