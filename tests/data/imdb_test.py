"""IMDb from its sources, and what is said of damaged ones."""

import gzip
import re

import pytest

from configs import imdb_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import imdb
from tests.data import official


def load(data_dir, **changes):
  section = imdb_sinkhorn.get_config('tiny').data
  section.update(dir=str(data_dir), **changes)
  return data.load(section)


@pytest.mark.usefixtures('no_network')
def test_archive_folder_and_jsonl_are_the_same_set(tmp_path):
  fingerprints = set()
  for kind in ('tar', 'folder', 'jsonl'):
    (tmp_path / kind).mkdir()
    folder = official.write_imdb(tmp_path / kind, kind)
    info = load(tmp_path / kind).info
    assert info.splits == {'train': 54, 'validation': 6, 'test': 20}
    assert info.provenance['origin'].startswith(str(folder))
    assert '60 of 25,000 train' in info.provenance['notice']
    fingerprints.add(info.provenance['fingerprint'])
  assert len(fingerprints) == 1
  # Positive reviews are 1.
  splits, _ = imdb._from_files(str(tmp_path / 'tar'))
  rows = zip(splits['test']['text'], splits['test']['label'], strict=True)
  for text, label in rows:
    assert f'1-{label}' in text or int(text.split()[0][2:]) % 2 == label


@pytest.mark.parametrize(
  ('line', 'words'),
  [
    (b'{"text": "a", "label": 2}', 'line 3 has label 2'),
    (b'{"text": "a", "label": -1}', 'line 3 has label -1'),
    (b'{"text": " ", "label": 1}', 'line 3 has an empty text'),
    (b'{"text": null, "label": 1}', 'line 3 is not an object with'),
    (b'{"text": "a", "label": "1"}', "line 3 has label '1'"),
    (b'{"text": "a"}', 'line 3 is not an object with'),
    (b'[1]', 'line 3 is not an object with'),
    (b'{"text": "a", "lab', 'cut off'),
    (b'{"text": "\xff", "label": 1}', 'line 3 is not UTF-8'),
  ],
)
def test_wrong_lines_are_named(tmp_path, line, words):
  folder = official.write_imdb(tmp_path, 'jsonl')
  path = folder / 'test_rest.jsonl.gz'
  lines = gzip.decompress(path.read_bytes()).splitlines()[:2]
  path.write_bytes(gzip.compress(b'\n'.join([*lines, line])))
  with pytest.raises(errors.DataError, match=re.escape(str(path))) as error:
    load(tmp_path)
  assert words in str(error.value)


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('aclImdb/train/neg/0_3.txt', b'\xff\xfe', 'train/neg/0_3.txt .* UTF-8'),
    ('aclImdb/test/pos/1_8.txt', b' \n', 'test/pos/1_8.txt .* empty text'),
    ('../../train/neg/0_3.txt', b'a', r'\.\./\.\./train.*outside of'),
    ('/etc/train/neg/0_3.txt', b'a', '/etc/train.*outside of'),
  ],
)
def test_wrong_members_are_named(tmp_path, name, content, words):
  folder = tmp_path / 'imdb'
  folder.mkdir()
  path = folder / 'aclImdb_v1.tar.gz'
  official.write_tar(path, {**official.imdb_members(), name: content})
  with pytest.raises(errors.DataError, match=words) as error:
    load(tmp_path)
  assert str(path) in str(error.value)


@pytest.mark.parametrize('damage', ['cut', 'html'])
def test_damaged_archive_is_named(tmp_path, damage):
  folder = official.write_imdb(tmp_path)
  path = folder / 'aclImdb_v1.tar.gz'
  content = path.read_bytes()
  path.write_bytes(content[:-200] if damage == 'cut' else b'<html>404</html>')
  with pytest.raises(errors.DataError, match='is damaged') as error:
    load(tmp_path)
  assert str(path) in str(error.value)
  assert ('HTML page' in str(error.value)) == (damage == 'html')


def test_incomplete_sets_are_named(tmp_path):
  folder = official.write_imdb(tmp_path, test=0)
  with pytest.raises(errors.DataError, match='holds no test/neg'):
    load(tmp_path)
  (folder / 'aclImdb_v1.tar.gz').unlink()
  with pytest.raises(errors.DataError, match='no .tar.gz, no train/neg'):
    load(tmp_path, source='files')
  (folder / 'train.jsonl').write_text('{"text": "a", "label": 1}\n')
  with pytest.raises(errors.DataError, match='test.jsonl.* is missing'):
    load(tmp_path)


@pytest.mark.usefixtures('no_network')
def test_prepared_tfds_set(tmp_path):
  # One level deeper than others: the set has a config of TFDS.
  folder = tmp_path / 'imdb_reviews' / 'plain_text' / '1.0.0'
  rows = {
    split: [
      {'text': x.encode(), 'label': int(name.startswith('pos'))}
      for name, x in official.reviews(count, seed).items()
    ]
    for split, count, seed in (('train', 60, 0), ('test', 20, 1))
  }
  with official.prepared(folder, rows):
    dataset = load(tmp_path)
  provenance = dataset.info.provenance
  assert provenance['source'] == 'tfds'
  # The same texts from the archive are the same set.
  official.write_imdb(tmp_path)
  files = load(tmp_path).info.provenance
  assert files['source'] == 'files'
  assert files['fingerprint'] == provenance['fingerprint']
