"""Several seeds trained at once: each as it would have been alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import seeds
from tests.training import loop_test

SEEDS = (0, 2**32 - 1)


@pytest.fixture
def config(config):
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


class Counting:
  """In place of a training: its state is a number to which each step adds."""

  @staticmethod
  @jax.jit
  def train_step(state, batch, seed):
    return state + batch['x'].sum() * seed, {'before': state}

  def __init__(self, seed, num_steps, fails_at=None):
    self.seed, self.num_steps, self.fails_at = seed, num_steps, fails_at

  def run(self):
    state, seen = jnp.zeros(()), []
    for step in range(self.num_steps):
      if step == self.fails_at:
        raise errors.RunError(f'failed at {step}')
      batch = {'x': np.full(3, step, np.float32)}
      answer = yield state, batch, np.uint32(self.seed)
      if answer is None:
        break
      state, metrics = answer
      seen.append(float(metrics['before']))
    return float(state), seen

  def alone(self):
    run, answer = self.run(), None
    try:
      while True:
        answer = self.train_step(*run.send(answer))
    except StopIteration as finished:
      return finished.value


class Stop:
  """Stops when it is asked for the n-th time."""

  def __init__(self, after=10**9):
    self.after = after

  def check(self):
    self.after -= 1
    return self.after < 0


def test_steps_are_computed_together():
  # One ends before the others.
  trainings = {3: Counting(3, 5), 1: Counting(1, 2), 7: Counting(7, 5)}
  results = seeds._run(trainings, Stop())
  assert results == {seed: x.alone() for seed, x in trainings.items()}
  assert results[7] == (7 * 3 * 10, [0, 0, 21, 63, 126])


def test_all_stop_at_the_same_step():
  trainings = {3: Counting(3, 5), 1: Counting(1, 4)}
  results = seeds._run(trainings, Stop(after=3))
  assert results == {3: (27, [0, 0, 9]), 1: (9, [0, 0, 3])}


def test_the_others_go_on_when_one_fails():
  trainings = {3: Counting(3, 5, fails_at=2), 1: Counting(1, 5)}
  with pytest.raises(errors.RunError) as error:
    seeds._run(trainings, Stop())
  assert str(error.value) == '1 of 2 seeds have failed: seed 3: failed at 2'


def test_one_device(config, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'device_count', lambda: 2)
  with pytest.raises(errors.ConfigError, match='on one device, and there are'):
    training.train_seeds(config, {0: tmp_path})


@pytest.mark.slow
def test_each_is_as_it_would_be_alone(config, tmp_path, monkeypatch):
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
def test_seed_as_an_argument_is_the_seed(seed):
  # Python numbers and arrays take different ways to a key.
  as_number = jax.random.key(seed)
  as_argument = jax.jit(jax.random.key)(np.uint32(seed))
  np.testing.assert_array_equal(
    *map(jax.random.key_data, (as_number, as_argument))
  )
