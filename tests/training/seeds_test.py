"""Several seeds trained at once: each as it would have been alone."""

import dataclasses

import jax
import numpy as np
import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import optimizer
from sinkformer_jax.training import steps
from tests.training import loop_test

SEEDS = (0, 2**32 - 1)


@pytest.fixture
def config(config):
  # Compiled in half the time that Sinkhorn takes.
  config.model.normalizer = 'softmax'
  config.model.dropout_rate = 0.1
  config.total_steps = 12
  config.log_every_steps = 1
  config.eval_every_steps = 5
  return config


def assert_same_to_rounding(first, second):
  """Compares logged numbers, and what the models say of some images."""
  for ours, theirs in zip(
    loop_test.logged(first), loop_test.logged(second), strict=True
  ):
    assert ours.keys() == theirs.keys()
    for name in ours:
      np.testing.assert_allclose(
        ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name
      )
  runs = [training.load_run(x) for x in (first, second)]
  images = data.train_batch(data.load(runs[0].config.data), 0, 64, 0)['image']
  # Not the parameters themselves: attention does not depend on the bias of the
  # keys, whose gradient is rounding alone, which Adam makes as large as others.
  logits = [x.model.apply({'params': x.params}, images) for x in runs]
  np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'normalizer', ['softmax', pytest.param('sinkhorn', marks=pytest.mark.slow)]
)
def test_each_is_as_it_would_be_alone(
  config, tmp_path, monkeypatch, normalizer
):
  config.model.normalizer = normalizer
  together = {seed: tmp_path / 'together' / str(seed) for seed in SEEDS}
  alone = {seed: tmp_path / 'alone' / str(seed) for seed in SEEDS}
  # One goes ahead, all are stopped, and one goes on alone.
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 3)
    assert training.train_seeds(config, {0: together[0]}) == {0: None}
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 7)
    stopped = training.train_seeds(config, together)
  assert stopped == dict.fromkeys(SEEDS)
  for seed, expected in zip(SEEDS, (6, 4), strict=True):
    with checkpoints.Checkpoints(together[seed]) as saved:
      assert saved.steps[-1] == expected
  results = training.train_seeds(config, together)
  for seed in SEEDS:
    config.seed = seed
    result = training.train_and_evaluate(config, alone[seed])
    assert_same_to_rounding(together[seed], alone[seed])
    assert results[seed]['test']['loss'] == pytest.approx(
      result['test']['loss'], rel=1e-4
    )
    assert {x.name for x in together[seed].iterdir()} == {
      x.name for x in alone[seed].iterdir()
    }
    # The initial weights are equal bit for bit.
    loop_test.assert_same_state(
      loop_test.restored_state(together[seed], 0),
      loop_test.restored_state(alone[seed], 0),
    )
  # Finished runs are left alone.
  before = loop_test.contents(tmp_path)
  assert training.train_seeds(config, together) == results
  assert loop_test.contents(tmp_path) == before


@pytest.mark.slow
def test_one_that_fails_leaves_the_others_to_go_on(
  config, tmp_path, monkeypatch
):
  original = data.train_batch

  def train_batch(dataset, step, batch_size, seed, rows):
    batch = original(dataset, step, batch_size, seed, rows)
    return loop_test.poison(batch) if (seed, step) == (1, 4) else batch

  monkeypatch.setattr(data, 'train_batch', train_batch)
  workdirs = {seed: tmp_path / str(seed) for seed in (0, 1)}
  with pytest.raises(errors.RunError) as error:
    training.train_seeds(config, workdirs)
  assert '1 of 2 seeds have failed: seed 1: step 5: loss=nan' in str(
    error.value
  )
  assert (workdirs[0] / 'result.json').exists()
  assert not (workdirs[1] / 'result.json').exists()


def test_batches_of_several_lengths_are_refused(config, tmp_path, monkeypatch):
  dataset = dataclasses.replace(data.load(config.data), bucket_lengths=(8, 16))
  monkeypatch.setattr(data, 'load', lambda section: dataset)
  with pytest.raises(errors.ConfigError, match='config.data.bucket_lengths'):
    training.train_seeds(config, {0: tmp_path / '0'})


def test_directory_of_another_run_is_refused(config, tmp_path, monkeypatch):
  loop_test.interrupt(monkeypatch, 1)
  training.train_seeds(config, {0: tmp_path})
  with pytest.raises(errors.RunError, match='config.seed was 0 and is now 1'):
    training.train_seeds(config, {1: tmp_path})
  with pytest.raises(errors.ConfigError, match='config.seed=-1'):
    training.train_seeds(config, {-1: tmp_path})


@pytest.mark.parametrize('seed', [0, 7, 2**31, 2**32 - 1])
@pytest.mark.slow
def test_seed_as_an_argument_is_the_seed(config, seed):
  # Python numbers and arrays take different ways to a key.
  info = data.load(config.data).info
  model = models.create_model(config.model, info)
  tx = optimizer.create_optimizer(config.optimizer, 12)
  first = steps.create_state(model, tx, info, seed)
  second = jax.jit(lambda x: steps.create_state(model, tx, info, x))(
    np.uint32(seed)
  )
  for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  ours, theirs = (
    jax.random.key_data(jax.random.key(x)) for x in (seed, np.uint32(seed))
  )
  np.testing.assert_array_equal(ours, theirs)
