"""Texts: what is kept, how they are tokenized, and their batches."""

import dataclasses

import numpy as np
import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import text
from sinkformer_jax.data import tokenizer as tokenizer_lib
from tests.data import official


def texts(count, seed=0):
  rng = np.random.default_rng(seed)
  return [
    f'{seed} {i} {official.sentence(rng, i % 2, rng.integers(1, 12))}'
    for i in range(count)
  ]


def examples(values, labels=None):
  labels = np.arange(len(values)) % 2 if labels is None else labels
  names = [f'example {i}' for i in range(len(values))]
  return text.examples(values, labels, 2, names)


def load(train, test, **changes):
  settings = {
    'notice': '',
    'validation_share': 0.1,
    'max_length': 24,
    'bucket_lengths': (8, 16),
    'vocab_size': 300,
    'tokenizer': '',
    **changes,
  }
  splits, provenance = {'train': train, 'test': test}, {'origin': 'made up'}
  return text.load('made_up', 2, splits, provenance, **settings)


@pytest.fixture(scope='module')
def dataset():
  return load(examples(texts(110)), examples(texts(30, seed=1)))


@pytest.mark.parametrize(
  ('values', 'labels', 'words'),
  [
    (['a', ' \n'], [0, 1], 'example 1 has an empty text'),
    (['a', 'b'], [0, 2], 'example 1 has label 2'),
    (['a', 'b'], [-1, 0], 'example 0 has label -1'),
    ([b'a', b'\xff'], [0, 1], 'example 1 is not UTF-8'),
    (['a', 'b\ud800'], [0, 1], 'example 1 is not UTF-8'),
  ],
)
def test_wrong_examples_are_named(values, labels, words):
  with pytest.raises(errors.DataError, match=words):
    examples(values, labels)


def test_too_few_texts():
  with pytest.raises(errors.DataError, match='made up: 4 training texts'):
    load(examples(texts(4)), examples(texts(9, seed=1)))
  with pytest.raises(errors.DataError, match='and 0 test texts are too few'):
    load(examples(texts(99)), examples([]))


# D04
def test_repeated_texts_reach_one_split():
  values = texts(60)
  train = [*values, values[3], values[4], values[5], values[6], 'unsure']
  labels = [*(np.arange(60) % 2), 1, 0, 0, 0, 0]
  # Number 5 comes with both labels; 50 to 52 are in the test split.
  test = [*values[50:53], *texts(10, seed=1)]
  made = load(examples(train, labels), examples(test))
  assert made.info.provenance['left_out'] == {
    'in the test split': 3,
    'with two labels': 2,
    'repeated': 3,
  }
  assert made.info.splits['test'] == 13
  assert made.info.splits['train'] + made.info.splits['validation'] == 57
  rows = [
    {x.tobytes() for x in arrays['tokens']} for arrays in made.splits.values()
  ]
  assert sum(map(len, rows)) == len(set.union(*rows)) == 70


def test_splits_depend_on_content_alone(dataset):
  order = np.random.default_rng(0).permutation(110)
  train = {k: v[order] for k, v in examples(texts(110)).items()}
  again = load(train, examples(texts(30, seed=1)))
  assert again.info == dataset.info
  for split, arrays in dataset.splits.items():
    for key, array in arrays.items():
      np.testing.assert_array_equal(array, again.splits[split][key])
  other = load(examples(texts(110)), examples(texts(29, seed=1)))
  prints = [x.info.provenance['fingerprint'] for x in (dataset, other)]
  assert prints[0] != prints[1]


def test_long_texts_are_cut_and_counted(dataset):
  tokens = dataset.tokenizer.encode(['a ' * 100, 'a'])
  cut, lengths = tokenizer_lib.to_array(tokens, 24)
  assert list(lengths) == [24, len(tokens[1])]
  np.testing.assert_array_equal(cut[0], tokens[0][:24])
  assert not cut[1, len(tokens[1]) :].any()
  long = load(
    examples([*texts(40), 'long ' * 60]), examples(['long ' * 61, 'short'])
  )
  assert long.info.provenance['cut']['test'] == 1
  assert sum(long.info.provenance['cut'].values()) >= 2


def test_tokenizer_is_kept_and_is_a_function_of_the_texts(
  dataset, tmp_path, monkeypatch
):
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path / 'cache'))
  train, test = examples(texts(110)), examples(texts(30, seed=1))
  for _ in range(2):
    again = load(train, test)
    assert again.info == dataset.info
    assert again.tokenizer.content == dataset.tokenizer.content
    for key, array in dataset.splits['train'].items():
      np.testing.assert_array_equal(again.splits['train'][key], array)
  (kept,) = (tmp_path / 'cache' / 'tokenizers').iterdir()
  assert kept.read_bytes() == dataset.tokenizer.content
  # The second time it came from there.
  stamp = kept.stat().st_mtime_ns
  load(train, test)
  assert kept.stat().st_mtime_ns == stamp
  (tokens,) = (tmp_path / 'cache' / 'tokens').iterdir()
  for path in (tokens, kept):
    path.write_text('{')
    with pytest.raises(errors.DataError, match=str(path)):
      load(train, test)
    path.unlink()
  assert load(train, test, vocab_size=280).info.vocab_size == 280


def test_every_text_can_be_encoded(dataset):
  # Every byte has a piece.
  sequences = dataset.tokenizer.encode(
    ['\u4e2d\U0001f600 \x00 caf\u00e9', 'zq']
  )
  assert all(sequences)
  assert max(map(max, sequences)) < dataset.info.vocab_size == 300


def test_given_tokenizer(dataset, tmp_path):
  path = tmp_path / 'own.json'
  path.write_bytes(dataset.tokenizer.content)
  train, test = examples(texts(40, seed=2)), examples(texts(9, seed=3))
  made = load(train, test, tokenizer=str(path))
  assert made.tokenizer.content == dataset.tokenizer.content
  assert made.info.provenance['tokenizer'] == {
    'origin': str(path),
    'pieces': 300,
    'sha256': dataset.tokenizer.sha256,
  }
  for name, content, words in (
    ('none.json', None, 'there is no tokenizer'),
    ('other.txt', b'a b c', 'must be a .json file'),
    ('damaged.json', b'{"model": 3}', 'cannot be read'),
    ('damaged.model', b'<html>', 'cannot be read'),
  ):
    path = tmp_path / name
    if content:
      path.write_bytes(content)
    with pytest.raises(errors.DataError, match=words) as error:
      load(train, test, tokenizer=str(path))
    assert str(path) in str(error.value)


def test_sentencepiece(tmp_path):
  import sentencepiece

  values = texts(200)
  prefix = tmp_path / 'own'
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(values),
    model_prefix=str(prefix),
    vocab_size=60,
    minloglevel=2,
  )
  made = load(
    examples(values), examples(texts(9, seed=3)), tokenizer=f'{prefix}.model'
  )
  assert made.info.vocab_size == 60
  processor = sentencepiece.SentencePieceProcessor(model_file=f'{prefix}.model')
  (tokens,) = made.tokenizer.encode(['goal market'])
  assert processor.decode(tokens) == 'goal market'


def test_tokenizer_without_a_piece_for_a_text_is_refused(tmp_path):
  import tokenizers

  path = tmp_path / 'words.json'
  words = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0}, []))
  words.save(str(path))
  train = examples([*('a' * i for i in range(1, 20)), 'b'])
  with pytest.raises(errors.DataError, match=r"no tokens of the text 'b'"):
    load(train, examples(['a a']), tokenizer=str(path))


def row(batch, i):
  return batch['tokens'][i][batch['mask'][i]].tobytes()


def expected_rows(arrays):
  return {
    tokens[:length].tobytes(): label
    for tokens, length, label in zip(
      arrays['tokens'], arrays['length'], arrays['label'], strict=True
    )
  }


def test_training_batches_are_of_a_few_lengths(dataset):
  steps = data.steps_per_epoch(dataset, 8)
  rows = expected_rows(dataset.splits['train'])
  epochs, widths = [], []
  for epoch in range(2):
    seen = []
    for step in range(epoch * steps, (epoch + 1) * steps):
      batch = data.train_batch(dataset, step, 8, seed=0)
      width = batch['tokens'].shape[1]
      assert width in (8, 16, 24)
      widths.append(width)
      lengths = batch['mask'].sum(1)
      # No narrower bucket would do.
      assert lengths.max() > {8: 0, 16: 8, 24: 16}[width]
      for i in range(8):
        seen.append(row(batch, i))
        assert rows[seen[-1]] == batch['label'][i]
      # Any step can be drawn again, alone.
      again = data.train_batch(dataset, step, 8, seed=0)
      for key in batch:
        np.testing.assert_array_equal(batch[key], again[key])
    assert len(set(seen)) == steps * 8
    epochs.append(seen)
  assert epochs[0] != epochs[1]
  # Batches of all lengths come in no order.
  assert len(set(widths)) == 3
  assert widths != sorted(widths)
  # Mixed batches: at most one at each border of two buckets.
  mixed = 0
  for step in range(steps):
    batch = data.train_batch(dataset, step, 8, seed=0)
    buckets = np.searchsorted((8, 16, 24), batch['mask'].sum(1))
    mixed += len(set(buckets)) > 1
  assert mixed <= 2


@pytest.mark.parametrize('batch_size', [1, 7, 30, 64])
def test_evaluation_covers_every_text_once(dataset, batch_size):
  rows = expected_rows(dataset.splits['test'])
  seen = []
  for batch in data.eval_batches(dataset, 'test', batch_size):
    assert len(batch['label']) == len(batch['_mask']) == batch_size
    for i in np.flatnonzero(batch['_mask']):
      seen.append(row(batch, i))
      assert rows[seen[-1]] == batch['label'][i]
  assert sorted(seen) == sorted(rows)


def test_buckets_leave_the_batches_of_others_alone(dataset):
  # Without buckets a batch is a stretch of the epoch's permutation.
  plain = dataclasses.replace(dataset, bucket_lengths=())
  order = np.random.default_rng((5, 0)).permutation(99)[8:16]
  batch = data.train_batch(plain, 1, 8, seed=5)
  np.testing.assert_array_equal(
    batch['mask'].sum(1), dataset.splits['train']['length'][order]
  )


def test_fingerprint_sees_every_label():
  train, test = examples(texts(30)), examples(texts(9, seed=1))
  first = load(train, test).info.provenance['fingerprint']
  train['label'][0] = 1 - train['label'][0]
  assert load(train, test).info.provenance['fingerprint'] != first
  assert dataset_lib.digests(['a'])[0].startswith('ca978112ca1bbdca')
