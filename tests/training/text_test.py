"""Training on texts: buckets, and the tokenizer that a run keeps."""

import json
import logging
import re

import jax
import numpy as np
import pytest

from configs import ag_news_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import training
from tests.data import official
from tests.training import loop_test


@pytest.fixture(scope='module')
def text_config(tmp_path_factory):
  """The tiny preset on made-up official files; short, with dropout."""
  folder = tmp_path_factory.mktemp('data')
  official.write_ag_news(folder, train=200, test=50)
  config = ag_news_sinkhorn.get_config('tiny')
  config.data.dir = str(folder)
  config.data.max_length = 48
  config.data.bucket_lengths = (24,)
  config.model.dropout_rate = 0.1
  config.model.normalizer = 'softmax'  # Compiles sooner.
  config.log_every_steps = 1
  config.eval_batch_size = 8
  return config


@pytest.fixture(scope='module')
def finished(text_config, tmp_path_factory):
  """A run: its directory, its result, and what was compiled for it."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  compiled = []

  class Compilations(logging.Handler):
    def emit(self, record):
      compiled.extend(
        re.findall(r'Compiling jit\((\w+)\)', record.getMessage())
      )

  handler = Compilations()
  logging.getLogger('jax').addHandler(handler)
  try:
    with jax.log_compiles(True):
      result = training.train_and_evaluate(text_config, workdir)
  finally:
    logging.getLogger('jax').removeHandler(handler)
  return workdir, result, compiled


def test_result(finished):
  workdir, result, _ = finished
  assert result['test']['count'] == 50
  assert 'of 120,000 train examples' in result['notice']
  provenance = json.loads((workdir / 'provenance.json').read_text())
  assert provenance['data']['vocab_size'] == 300
  run = training.load_run(workdir)
  assert run.info.vocab_size == 300
  dataset = data.load(run.config.data)
  again = training.evaluate_run(run, dataset, 'test', batch_size=50)
  assert again['loss'] == pytest.approx(result['test']['loss'], abs=1e-5)
  assert again['accuracy'] == result['test']['accuracy']


# S03
def test_loss_does_not_depend_on_the_buckets(finished):
  # Recomputed with every text alone and without padding.
  workdir, result, _ = finished
  run = training.load_run(workdir)
  arrays = data.load(run.config.data).splits['test']
  padded = jax.jit(
    lambda tokens, mask: run.model.apply(
      {'params': run.params}, tokens, mask=mask
    )
  )
  losses = []
  for tokens, length, label in zip(
    arrays['tokens'], arrays['length'], arrays['label'], strict=True
  ):
    logits = padded(tokens[None], (np.arange(48) < length)[None])[0]
    losses.append(-jax.nn.log_softmax(logits)[label])
  assert result['test']['loss'] == pytest.approx(np.mean(losses), abs=1e-5)


def test_stopped_and_resumed_equals_undisturbed(
  text_config, finished, tmp_path, monkeypatch
):
  undisturbed, result, _ = finished
  workdir = tmp_path / 'run'
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 7)
    assert training.train_and_evaluate(text_config, workdir) is None
  # Without the cache: the run has its own tokenizer.
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path / 'cache'))
  resumed = training.train_and_evaluate(text_config, workdir)
  assert resumed == {**result, 'train_s': resumed['train_s']}
  assert not (tmp_path / 'cache' / 'tokenizers').exists()
  loop_test.assert_same_state(
    loop_test.restored_state(workdir), loop_test.restored_state(undisturbed)
  )
  assert loop_test.logged(workdir) == loop_test.logged(undisturbed)


def test_one_compilation_for_each_length(finished):
  _, _, compiled = finished
  assert compiled.count('train_step') == 2
  assert compiled.count('eval_step') == 2


def test_tokenizer_of_a_run(text_config, finished, tmp_path):
  workdir, _, _ = finished
  kept = workdir / 'tokenizer.json'
  run = training.load_run(workdir)
  assert run.config.data.tokenizer == str(kept)
  assert data.load(run.config.data).tokenizer.content == kept.read_bytes()
  # Another one, of as many pieces, is refused.
  official.write_ag_news(tmp_path, train=90, test=10)
  section = text_config.data.copy_and_resolve_references()
  section.dir = str(tmp_path)
  other = tmp_path / 'other.json'
  other.write_bytes(data.load(section).tokenizer.content)
  section.update(dir=text_config.data.dir, tokenizer=str(other))
  dataset = data.load(section)
  assert dataset.info.vocab_size == run.info.vocab_size
  with pytest.raises(errors.RunError, match='does not belong to the check'):
    training.evaluate_run(run, dataset, 'test', 50)
  good = kept.read_bytes()
  try:
    kept.write_bytes(other.read_bytes())
    with pytest.raises(errors.RunError, match='tokenizer.json does not belong'):
      training.load_run(workdir)
    kept.unlink()
    with pytest.raises(errors.RunError, match='lost its tokenizer'):
      training.load_run(workdir)
  finally:
    kept.write_bytes(good)


def test_resuming_with_another_tokenizer_is_refused(
  text_config, tmp_path, monkeypatch
):
  config = text_config.copy_and_resolve_references()
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 3)
    training.train_and_evaluate(config, tmp_path / 'run')
  other = config.data.copy_and_resolve_references()
  other.vocab_size = 280
  path = tmp_path / 'other.json'
  path.write_bytes(data.load(other).tokenizer.content)
  config.data.tokenizer = str(path)
  with pytest.raises(errors.RunError, match='vocabulary of 280 pieces'):
    training.train_and_evaluate(config, tmp_path / 'run')
