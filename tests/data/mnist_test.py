"""MNIST from its sources, and what is said of missing or damaged ones."""

import gzip
import hashlib
import struct

import numpy as np
import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import mnist
from sinkformer_jax.data import tfds_reader


@pytest.fixture
def files(tmp_path, monkeypatch):
  """Small idx files in the official layout, under ``tmp_path/mnist``."""
  rng = np.random.default_rng(0)
  folder = tmp_path / 'mnist'
  folder.mkdir()
  for prefix, count in (('train', 60), ('t10k', 20)):
    for kind, shape in (
      ('images-idx3', (count, 28, 28)),
      ('labels-idx1', (count,)),
    ):
      high = 256 if 'images' in kind else 10
      array = rng.integers(0, high, shape, np.uint8)
      header = struct.pack('>HBB', 0, 8, len(shape))
      header += struct.pack(f'>{len(shape)}i', *shape)
      content = header + array.tobytes()
      name = f'{prefix}-{kind}-ubyte'
      with gzip.open(folder / f'{name}.gz', 'wb') as f:
        f.write(content)
      monkeypatch.setitem(
        mnist.FILES, name, hashlib.sha256(content).hexdigest()
      )
  monkeypatch.setattr(mnist, 'VALIDATION_SIZE', 10)
  return folder


# D01
def test_sample(no_network):
  dataset = mnist.load('sample', '')
  info = dataset.info
  assert info.splits == {'train': 4000, 'validation': 500, 'test': 500}
  for arrays in dataset.splits.values():
    counts = np.bincount(arrays['label'])
    assert set(counts) == {len(arrays['label']) // 10}
  digests = [
    set(dataset_lib.digests(x['image'])) for x in dataset.splits.values()
  ]
  assert len(set.union(*digests)) == 5000
  assert 'sample' in info.provenance['notice']
  # The content of the package's file: another one would be another data set.
  assert info.provenance['fingerprint'].startswith('ebe0a67e791cf15c')
  batch = data.train_batch(dataset, 0, 64, seed=0)
  assert batch['image'].dtype == np.float32
  # mnist's digits are a tenth to a fifth ink.
  assert -0.43 < batch['image'].min() < -0.42
  assert 2.8 < batch['image'].max() < 2.83


def test_auto_falls_back_to_the_sample_and_says_why(no_network, monkeypatch):
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: False)
  provenance = mnist.load('auto', '').info.provenance
  assert provenance['source'] == 'sample'
  assert set(provenance['tried']) == {'files', 'tfds'}


def test_files(files, tmp_path, no_network, monkeypatch):
  dataset = mnist.load('auto', str(tmp_path))
  assert dataset.info.splits == {'train': 50, 'validation': 10, 'test': 20}
  assert dataset.info.provenance['source'] == 'files'
  assert dataset.info.provenance['notice'] == ''
  monkeypatch.setenv('SINKFORMER_DATA_DIR', str(tmp_path))
  again = mnist.load('auto', '')
  fingerprints = [x.info.provenance['fingerprint'] for x in (dataset, again)]
  assert fingerprints[0] == fingerprints[1]
  # Uncompressed files do as well.
  for path in files.glob('*.gz'):
    path.with_suffix('').write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
  plain = mnist.load('files', str(tmp_path))
  assert plain.info.provenance['fingerprint'] == fingerprints[0]


@pytest.mark.parametrize('damage', ['cut', 'flip', 'other', 'html'])
def test_damaged_file_is_named(files, tmp_path, damage):
  path = files / 't10k-labels-idx1-ubyte.gz'
  content = path.read_bytes()
  path.write_bytes(
    {
      'cut': content[:-20],
      'flip': content[:-12] + bytes([content[-12] ^ 255]) + content[-11:],
      'other': gzip.compress(b'\0\0\x08\x01\0\0\0\x01\x07'),
      'html': b'<html>404</html>',
    }[damage]
  )
  with pytest.raises(errors.DataError) as error:
    mnist.load('auto', str(tmp_path))
  message = str(error.value)
  assert str(path) in message
  assert f'({path.stat().st_size} bytes)' in message
  assert 'Download it again' in message


def test_missing_file_is_named(files, tmp_path):
  (files / 'train-images-idx3-ubyte.gz').unlink()
  with pytest.raises(errors.DataError, match='train-images-idx3-ubyte.gz'):
    mnist.load('auto', str(tmp_path))


def test_given_directory_without_data_is_no_reason_for_the_sample(tmp_path):
  with pytest.raises(errors.DataError) as error:
    mnist.load('auto', str(tmp_path))
  message = str(error.value)
  assert str(tmp_path / 'mnist') in message
  assert 'DIR/mnist' in message
  assert not list(tmp_path.iterdir())


def test_variable_without_data_is_no_reason_for_the_sample(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('SINKFORMER_DATA_DIR', str(tmp_path / 'typo'))
  with pytest.raises(errors.DataError, match='typo'):
    mnist.load('auto', '')


def test_preparing_without_tensorflow_says_what_to_install(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: False)
  with pytest.raises(errors.DataError, match='requirements-data.txt'):
    tfds_reader.prepare('mnist', tmp_path / 'new', mnist.HOST)
  assert not list(tmp_path.iterdir())


# D01
def test_no_network_is_an_answer(tmp_path, monkeypatch):
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: True)
  monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')
  with pytest.raises(errors.DataError, match='no network'):
    tfds_reader.prepare('mnist', tmp_path / 'new', mnist.HOST)
  with pytest.raises(errors.DataError, match='no network'):
    mnist.load('tfds', str(tmp_path / 'new'))
  assert not list(tmp_path.iterdir())


# J06
def test_prepared_tfds_set_is_read_without_tensorflow(
  tmp_path, monkeypatch, no_network
):
  import tensorflow_datasets as tfds

  prepared = tmp_path / 'mnist' / '3.0.1'
  prepared.mkdir(parents=True)
  (prepared / 'dataset_info.json').write_text('{"fileFormat": "array_record"}')
  monkeypatch.setattr(mnist, 'VALIDATION_SIZE', 5)
  with tfds.testing.mock_data(num_examples=30):
    dataset = mnist.load('auto', str(tmp_path))
  assert dataset.info.provenance['source'] == 'tfds'
  assert dataset.info.splits == {'train': 25, 'validation': 5, 'test': 30}
  assert dataset.splits['train']['image'].shape == (25, 28, 28, 1)
  assert dataset.splits['train']['label'].dtype == np.int32


def test_damaged_tfds_set_is_named(tmp_path):
  prepared = tmp_path / 'mnist' / '3.0.1'
  prepared.mkdir(parents=True)
  (prepared / 'dataset_info.json').write_text('{"array_record"')
  with pytest.raises(errors.DataError, match='prepared set .* delete'):
    mnist.load('tfds', str(tmp_path))


def test_tfds_set_in_another_format_is_not_taken(tmp_path, monkeypatch):
  prepared = tmp_path / 'mnist' / '3.0.1'
  prepared.mkdir(parents=True)
  (prepared / 'dataset_info.json').write_text('{"fileFormat": "tfrecord"}')
  assert not tfds_reader.is_prepared('mnist', tmp_path)
  with pytest.raises(errors.DataError, match='no prepared set'):
    mnist.load('tfds', str(tmp_path))
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: True)
  with pytest.raises(errors.DataError, match='another format'):
    tfds_reader.prepare('mnist', tmp_path, mnist.HOST)
  # The default config goes on to the sample, and says why.
  provenance = mnist.load('auto', '').info.provenance
  assert 'another format' in provenance['tried']['tfds']
