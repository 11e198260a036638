"""AG News from its sources, and what is said of damaged files."""

import gzip
import re

import numpy as np
import pytest

from configs import ag_news_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import ag_news
from tests.data import official


@pytest.fixture
def folder(tmp_path):
  return official.write_ag_news(tmp_path)


def load(data_dir, **changes):
  section = ag_news_sinkhorn.get_config('tiny').data
  section.update(dir=str(data_dir), **changes)
  return data.load(section)


@pytest.mark.usefixtures('no_network')
def test_files(folder, tmp_path):
  dataset = load(tmp_path)
  info = dataset.info
  assert info.splits == {'train': 57, 'validation': 3, 'test': 20}
  assert info.num_classes == 4
  assert info.input_shape == (32,)
  assert info.provenance['source'] == 'files'
  assert info.provenance['origin'] == str(folder)
  assert '60 of 120,000 train' in info.provenance['notice']
  for path in folder.glob('*.gz'):
    path.with_suffix('').write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
  again = load(tmp_path).info.provenance
  for key in ('fingerprint', 'checksums', 'tokenizer'):
    assert again[key] == info.provenance[key]


def test_complete_set_has_no_notice(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(ag_news, 'OFFICIAL_SIZES', {'train': 60, 'test': 20})
  assert load(tmp_path).info.provenance['notice'] == ''


def test_classes_and_texts_are_those_of_the_rows(tmp_path):
  rows = [['3', ' A "b"', 'c\\d '], ['1', 'E', 'f\ng']]
  arrays = ag_news.read_csv(tmp_path / 'x.csv', official.csv_content(rows))
  assert list(arrays['text']) == ['A "b" c\\d', 'E f\ng']
  np.testing.assert_array_equal(arrays['label'], [2, 0])


@pytest.mark.parametrize(
  ('content', 'words'),
  [
    (b'"1","a","b"\n"5","c","d"\n', "line 2 has class '5'"),
    (b'Class Index,Title,Description\n1,a,b\n', 'no header'),
    (b'"1","a","b"\n"2","c"\n', 'line 2 has 2 fields'),
    (b'"1","a","b"\n"2"," ",""\n', 'line 2 has an empty text'),
    (b'"1","a","b"\n"2","c\xff","d"\n', 'line 2 is not UTF-8'),
    (b'"1","a","b"\n"2","c","d is cut of', 'its last row is cut off'),
    (b'"1","a","b"\n"2","' + b'c' * 200_000 + b'","d"\n', 'line 2 cannot be'),
    (b'<!DOCTYPE html><p>404', 'it is an HTML page'),
  ],
  ids=['class', 'header', 'fields', 'empty', 'bytes', 'cut', 'long', 'page'],
)
@pytest.mark.parametrize('zipped', [True, False])
def test_wrong_rows_are_named(folder, tmp_path, content, words, zipped):
  path = folder / 'train.csv.gz'
  path.unlink()
  if zipped:
    content = gzip.compress(content)
  else:
    path = path.with_suffix('')
  path.write_bytes(content)
  with pytest.raises(errors.DataError, match=re.escape(str(path))) as error:
    load(tmp_path)
  assert words in str(error.value)


@pytest.mark.parametrize('damage', ['cut', 'html', 'empty'])
def test_damaged_archive_is_named(folder, tmp_path, damage):
  path = folder / 'test.csv.gz'
  content = path.read_bytes()
  changed = {'cut': content[:-30], 'html': b'<html>404', 'empty': b'\x1f'}
  path.write_bytes(changed[damage])
  with pytest.raises(errors.DataError, match='test.csv.gz .* is damaged'):
    load(tmp_path)


def test_missing_file_is_named(folder, tmp_path):
  (folder / 'test.csv.gz').unlink()
  with pytest.raises(errors.DataError, match=r'test\.csv\[\.gz\] is missing'):
    load(tmp_path)


@pytest.mark.usefixtures('no_network')
def test_prepared_tfds_set(tmp_path):
  rows = {
    split: [
      {'title': a.encode(), 'description': b.encode(), 'label': int(label) - 1}
      for label, a, b in official.ag_news_rows(count, seed)
    ]
    for split, count, seed in (('train', 60, 0), ('test', 20, 1))
  }
  with official.prepared(tmp_path / 'ag_news_subset' / '1.0.0', rows):
    provenance = load(tmp_path).info.provenance
  assert provenance['source'] == 'tfds'
  assert provenance['origin'] == str(tmp_path / 'ag_news_subset')
  # The same texts from the official files are the same set.
  official.write_ag_news(tmp_path)
  files = load(tmp_path).info.provenance
  assert files['source'] == 'files'
  assert files['fingerprint'] == provenance['fingerprint']
