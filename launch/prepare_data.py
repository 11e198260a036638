"""Prepares data sets, and says what is there.

  python -m launch.prepare_data --name=imdb
  python -m launch.prepare_data --name=imdb --files=DIR
  python -m launch.prepare_data --check --data_dir=DIR

The first downloads the original files and prepares the TFDS set; the second
takes them from DIR, where they have been downloaded already. Both need
TensorFlow (`pip install -r requirements-data.txt`); training does not. The
third reads all sets in DIR, original files or prepared by TFDS, and prints
counts, sizes, checksums, and how to get what is missing.
Exit code 0 if what was asked for is there and whole.
"""

import hashlib
import importlib

from absl import flags

from sinkformer_jax import cli

NAMES = ('mnist', 'ag_news', 'cats_vs_dogs', 'imdb')
FLAGS = flags.FlagValues()
_NAME = flags.DEFINE_enum(
  'name',
  None,
  NAMES,
  'Data set; mnist if not given, and all of them for --check.',
  flag_values=FLAGS,
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir',
  '',
  'Where to put it; $TFDS_DATA_DIR or ~/tensorflow_datasets if'
  ' not given. Train with --config.data.dir=DIR if it is another place. For'
  ' --check, the directory to look into; $SINKFORMER_DATA_DIR if not given.',
  flag_values=FLAGS,
)
_FILES = flags.DEFINE_string(
  'files',
  '',
  'Directory of the original files; downloads them if not given.',
  flag_values=FLAGS,
)
_CHECK = flags.DEFINE_bool(
  'check', False, 'Say what is there, and prepare nothing.', flag_values=FLAGS
)
# Beyond this many files, or images that were left out, they are counted.
_MOST_LISTED = 10


def main() -> int:
  """Prepares a set, or checks what is there."""
  if _CHECK.value:
    return _check_all()
  return _prepare(_NAME.value or 'mnist')


def _prepare(name):
  from sinkformer_jax import data
  from sinkformer_jax import errors
  from sinkformer_jax import paths
  from sinkformer_jax.data import tfds_reader

  module = data.DATASETS[name]
  data_dir = tfds_reader.data_dirs(_DATA_DIR.value)[0]
  files = paths.resolve(_FILES.value, '--files') if _FILES.value else None
  if files and not files.is_dir():
    raise errors.DataError(f'--files={files} is not a directory.')
  if tfds_reader.is_prepared(module.TFDS_NAME, data_dir):
    print(f'{data_dir / module.TFDS_NAME} is there already.')
  else:
    if files:
      # TFDS would go looking for a missing file in the network.
      module.check_files(files)
    print(f'Preparing {name} in {data_dir}')
    tfds_reader.prepare(module.TFDS_NAME, data_dir, module.HOST, files)
  dataset = _load(name, 'tfds', str(data_dir))
  print(f'{name}: {dict(dataset.info.splits)} examples')
  return 0


def _load(name, source, data_dir):
  """Loads a set as its config does, but for source and directory."""
  from sinkformer_jax import data

  config = importlib.import_module(f'configs.{name}_sinkhorn').get_config()
  config.data.update(source=source, dir=data_dir)
  return data.load(config.data)


def _check_all():
  from sinkformer_jax import errors
  from sinkformer_jax import paths
  from sinkformer_jax.data import dataset

  data_dir = paths.data_dir(_DATA_DIR.value)
  if data_dir and not paths.resolve(data_dir, '--data_dir').is_dir():
    raise errors.DataError(f'--data_dir={data_dir} is not a directory.')
  names = [_NAME.value] if _NAME.value else NAMES
  found = {name: _check(name, data_dir) for name in names}
  right = [name for name, state in found.items() if state]
  wrong = [name for name, state in found.items() if state is None]
  print(f'Usable: {", ".join(right) or "none"}.')
  if wrong:
    print(f'NOT USABLE: {", ".join(wrong)}.')
  print(f'Splits are {dataset.SPLIT_RULE}.')
  path = paths.resolve(data_dir, '--data_dir')
  if not right and path.name in NAMES:
    print(f'Did you mean --data_dir={path.parent}?')
  # A directory need not hold every set, but what it holds has to be whole.
  return 0 if right and not wrong else cli.EXIT_ERROR


def _check(name, data_dir):
  """Prints what is there of a set; False if nothing, None if damaged."""
  from sinkformer_jax import data
  from sinkformer_jax import errors
  from sinkformer_jax.data import sources
  from sinkformer_jax.data import tfds_reader

  tfds_name = data.DATASETS[name].TFDS_NAME
  where = tfds_reader.data_dirs(data_dir)
  prepared = any(tfds_reader.is_prepared(tfds_name, x) for x in where)
  missing, found = '', False
  for source in ('files', 'tfds') if prepared else ('files',):
    try:
      dataset = _load(name, source, data_dir)
    except sources.NotThereError as error:
      missing = str(error)
    except errors.DataError as error:
      print(f'{name}, {source}: NOT USABLE: {error}\n')
      return None
    else:
      found = True
      _report(name, source, data_dir, dataset)
  if not found:
    print(f'{name}: {missing}\n')
  return found


def _report(name, source, data_dir, dataset):
  import numpy as np

  from sinkformer_jax.data import sources

  info, provenance = dataset.info, dataset.info.provenance
  print(f'{name}, {source}: {provenance["origin"]}')
  print(f'  {"split":12}{"examples":>9}  of each class')
  for split, arrays in dataset.splits.items():
    counts = np.bincount(arrays['label'], minlength=info.num_classes)
    print(f'  {split:12}{counts.sum():9,}  {" ".join(map(str, counts))}')
  if source == 'files':
    _print_files(sources.folder(data_dir, name))
  if provenance['notice']:
    print(f'  {provenance["notice"]}')
  if 'cut' in provenance:
    cut = _listed(provenance['cut'])
    print(f'  texts cut to {info.input_shape[0]} tokens: {cut}')
  for what in ('left_out', 'unreadable', 'ignored'):
    if provenance.get(what):
      print(f'  {what.replace("_", " ")}: {_listed(provenance[what])}')
  print()


def _listed(found):
  """``key: value`` of a few, and how many more there are."""
  items = [f'{key}: {value}' for key, value in found.items()]
  more = len(items) - _MOST_LISTED
  return '; '.join(items[:_MOST_LISTED]) + (f'; {more} more' * (more > 0))


def _print_files(folder):
  files = sorted(x for x in folder.rglob('*') if x.is_file())
  sizes = [x.stat().st_size for x in files]
  if len(files) > _MOST_LISTED:
    print(f'  {len(files):,} files of {sum(sizes):,} bytes')
    return
  names = [str(x.relative_to(folder)) for x in files]
  width = 2 + max(map(len, names))
  print(f'  {"file":{width}}{"bytes":>13}  sha256')
  for path, name, size in zip(files, names, sizes, strict=True):
    with path.open('rb') as f:
      sha256 = hashlib.file_digest(f, 'sha256').hexdigest()
    print(f'  {name:{width}}{size:13,}  {sha256}')


if __name__ == '__main__':
  cli.run(main, FLAGS)
