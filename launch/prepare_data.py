"""Prepares a TFDS set: `python -m launch.prepare_data --name=mnist`.

Needs TensorFlow (`pip install -r requirements-data.txt`); training does not.
Downloads the original files, or takes them from `--files=DIR` where they have
been downloaded already.
"""

from absl import flags

from launch import cli

FLAGS = flags.FlagValues()
_NAME = flags.DEFINE_enum(
  'name', 'mnist', ['mnist'], 'Data set.', flag_values=FLAGS
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir',
  '',
  'Where to put it; $TFDS_DATA_DIR or ~/tensorflow_datasets if'
  ' not given. Train with --config.data.dir=DIR if it is another place.',
  flag_values=FLAGS,
)
_FILES = flags.DEFINE_string(
  'files',
  '',
  'Directory of the original files; downloads them if not given.',
  flag_values=FLAGS,
)


def main() -> None:
  """Prepares the set, reads it once, and says what is there."""
  from sinkformer_jax import data
  from sinkformer_jax import errors
  from sinkformer_jax import paths
  from sinkformer_jax.data import tfds_reader

  data_dir = tfds_reader.data_dirs(_DATA_DIR.value)[0]
  files = paths.resolve(_FILES.value, '--files') if _FILES.value else None
  if files and not files.is_dir():
    raise errors.DataError(f'--files={files} is not a directory.')
  if tfds_reader.is_prepared(_NAME.value, data_dir):
    print(f'{data_dir / _NAME.value} is there already.')
  else:
    if files:
      # TFDS would go looking for a missing file in the network.
      data.DATASETS[_NAME.value].read_files(files, gzipped=True)
    print(f'Preparing {_NAME.value} in {data_dir}')
    host = data.DATASETS[_NAME.value].HOST
    tfds_reader.prepare(_NAME.value, data_dir, host, files)
  dataset = data.DATASETS[_NAME.value].load('tfds', str(data_dir))
  print(f'{_NAME.value}: {dict(dataset.info.splits)} examples')


if __name__ == '__main__':
  cli.run(main, FLAGS)
