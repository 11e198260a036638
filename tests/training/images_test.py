"""Training on photos: augmented, from a mapped file, odd files recorded."""

import json

import pytest

from configs import cats_vs_dogs_softmax
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import training
from tests.data import official
from tests.training import loop_test


# D03
def test_tiny_preset(tmp_path, monkeypatch):
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path / 'cache'))
  members = official.pet_members()
  broken = {'PetImages/Cat/99.jpg': b'broken'}
  official.write_pets(tmp_path, {**members, **broken})
  config = cats_vs_dogs_softmax.get_config('tiny')
  config.data.dir = str(tmp_path)
  config.total_steps = 6
  config.eval_every_steps = 6
  config.eval_batch_size = 8
  workdir = tmp_path / 'run'
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 2)
    assert training.train_and_evaluate(config, workdir) is None
  result = training.train_and_evaluate(config, workdir)
  assert result['test']['count'] == 8
  assert 'made from 81 of 25,000' in result['notice']
  provenance = json.loads((workdir / 'provenance.json').read_text())
  (name,) = provenance['data']['unreadable']
  assert name.endswith('PetImages/Cat/99.jpg')
  # Undisturbed, it is the same run.
  again = tmp_path / 'again'
  assert training.train_and_evaluate(config, again)['test'] == result['test']
  loop_test.assert_same_state(
    loop_test.restored_state(workdir), loop_test.restored_state(again)
  )
  run = training.load_run(workdir)
  dataset = data.load(run.config.data)
  assert training.evaluate_run(run, dataset, 'test', 8) == result['test']
  # A set with one photo more is another one.
  members['PetImages/Cat/98.jpg'] = official.photo(0, 98)
  official.write_pets(tmp_path, members)
  with pytest.raises(errors.RunError, match='was trained on'):
    training.evaluate_run(run, data.load(run.config.data), 'test', 8)
