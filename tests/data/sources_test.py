"""What is said where a data set is missing."""

import importlib

import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import tfds_reader

NAMES = ('ag_news', 'cats_vs_dogs', 'imdb')


def load(name, data_dir):
  section = importlib.import_module(f'configs.{name}_softmax').get_config().data
  section.dir = data_dir
  return data.load(section)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.usefixtures('no_network')
def test_nothing_there(name, tmp_path, monkeypatch):
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: False)
  with pytest.raises(errors.DataError) as error:
    load(name, str(tmp_path))
  for words in (
    f'there is no directory {tmp_path}/{name}',
    f'no prepared set in {tmp_path}',
    'TensorFlow is not installed',
    f'into DIR/{name}',
    f'launch.prepare_data --name={name}',
  ):
    assert words in str(error.value)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', NAMES)
def test_no_network(name, tmp_path, monkeypatch):
  monkeypatch.setattr(tfds_reader, 'can_prepare', lambda: True)
  monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))
  with pytest.raises(errors.DataError, match='no network: https:') as error:
    load(name, '')
  assert f'into DIR/{name}' in str(error.value)
  assert not list(tmp_path.iterdir())
