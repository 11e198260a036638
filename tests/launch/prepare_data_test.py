"""What `prepare_data` says of a directory, and what it refuses."""

import hashlib

import pytest

from launch import prepare_data
from sinkformer_jax import errors
from sinkformer_jax.data import tfds_reader
from tests.data import official
from tests.launch import launch_test


@pytest.fixture(autouse=True)
def no_preparation(monkeypatch, tmp_path):
  def refuse(*args):
    raise AssertionError('something is prepared')

  monkeypatch.setattr(tfds_reader, 'prepare', refuse)
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(tmp_path / 'cache'))
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path / 'tfds'))


def run(*arguments):
  prepare_data.FLAGS(['prepare_data', *arguments])
  try:
    return prepare_data.main()
  finally:
    prepare_data.FLAGS.unparse_flags()
    for flag in ('name', 'data_dir', 'files', 'check'):
      prepare_data.FLAGS[flag].unparse()


def test_check(tmp_path, capsys):
  folder = tmp_path / 'data'
  folder.mkdir()
  news = official.write_ag_news(folder)
  official.write_imdb(folder, 'folder')
  pets = {**official.pet_members(), 'PetImages/Cat/99.jpg': b'broken'}
  official.write_pets(folder, pets)
  assert run('--check', f'--data_dir={folder}') == 0
  printed = capsys.readouterr().out
  content = (news / 'train.csv.gz').read_bytes()
  sha256 = hashlib.sha256(content).hexdigest()
  for words in (
    f'mnist: MNIST was not found. files: there is no directory {folder}/mnist',
    'Put the four official files',
    f'ag_news, files: {news}',
    'train              57  1',
    f' {len(content):,}  {sha256}',
    'made from 60 of 120,000 train examples',
    'texts cut to 128 tokens: train: 0',
    'unreadable: kagglecatsanddogs_5340.zip/PetImages/Cat/99.jpg: it is no',
    'Usable: ag_news, cats_vs_dogs, imdb.',
    'Splits are stratified by class',
    # A folder of many files is counted, not listed.
    '83 files of',
  ):
    assert words in printed, words
  assert '0_3.txt' not in printed
  # A set that was asked for has to be there.
  assert run('--check', f'--data_dir={folder}', '--name=mnist') == 1
  assert run('--check', f'--data_dir={folder}', '--name=imdb') == 0
  capsys.readouterr()
  (news / 'test.csv.gz').write_bytes(b'<html>404')
  assert run('--check', f'--data_dir={folder}') == 1
  printed = capsys.readouterr().out
  assert f'ag_news, files: NOT USABLE: {news}/test.csv.gz' in printed
  assert '\nNOT USABLE: ag_news.' in printed
  # The others are reported all the same.
  assert 'imdb, files' in printed


def test_check_of_nothing(tmp_path, capsys):
  assert run('--check', f'--data_dir={tmp_path}') == 1
  printed = capsys.readouterr().out
  for name in prepare_data.NAMES:
    assert f'there is no directory {tmp_path}/{name}. Put ' in printed
  assert not list(tmp_path.iterdir())


def test_check_of_wrong_directories(tmp_path, capsys):
  with pytest.raises(errors.DataError, match='nowhere is not a directory'):
    run('--check', f'--data_dir={tmp_path / "nowhere"}')
  folder = official.write_ag_news(tmp_path)
  assert run('--check', f'--data_dir={folder}') == 1
  assert f'mean --data_dir={tmp_path}?' in capsys.readouterr().out
  # Of another set.
  (tmp_path / 'cats_vs_dogs').mkdir()
  (tmp_path / 'cats_vs_dogs' / 'train.csv').write_text('a')
  assert run('--check', f'--data_dir={tmp_path}', '--name=cats_vs_dogs') == 1
  assert 'holds no images named like' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['ag_news', 'cats_vs_dogs', 'imdb'])
def test_files_are_looked_at_first(tmp_path, name):
  from sinkformer_jax import data

  archive = data.DATASETS[name].ARCHIVE
  arguments = [f'--name={name}', f'--files={tmp_path}']
  arguments.append(f'--data_dir={tmp_path / "new"}')
  with pytest.raises(errors.DataError, match=f'archive {archive}'):
    run(*arguments)
  (tmp_path / archive).write_bytes(b'<!DOCTYPE html>')
  with pytest.raises(errors.DataError, match='HTML page') as error:
    run(*arguments)
  assert str(tmp_path / archive) in str(error.value)


def test_command(tmp_path):
  official.write_ag_news(tmp_path)
  code, stdout, stderr = launch_test.run(
    'launch.prepare_data', '--check', f'--data_dir={tmp_path}'
  )
  assert code == 0, stderr
  assert 'ag_news, files' in stdout
  line = launch_test.refused('launch.prepare_data', '--name=wiki', code=2)
  assert 'wiki' in line
