"""Cats and Dogs: photos of two classes (Elson et al. 2007).

From Microsoft's archive (``PetImages/Cat/0.jpg``), Kaggle's
(``train/cat.0.jpg``) or TFDS, which holds the photos encoded anew. There is no
published split.
"""

import functools
import hashlib
import pathlib
import re
import zipfile

import ml_collections

from sinkformer_jax import errors
from sinkformer_jax import rules
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import images
from sinkformer_jax.data import sources
from sinkformer_jax.data import tfds_reader

KIND = 'image'
RULES = {
  'data.image_size': rules.integer(1, below=rules.MOST_UNITS),
  'data.augment': rules.boolean,
}
SOURCES = ('files', 'tfds')
CLASSES = ('cat', 'dog')
TFDS_NAME = 'cats_vs_dogs'
HOST = 'https://download.microsoft.com/'
ARCHIVE = 'kagglecatsanddogs_5340.zip'
# TFDS has 23,262, Microsoft's and Kaggle's archives 25,000.
_ABOUT_ALL = 23_000
HOW_TO_SUPPLY = (
  'Put the archive (kagglecatsanddogs_5340.zip of Microsoft, or train.zip of'
  ' Kaggle), or the folders Cat and Dog, into DIR/cats_vs_dogs and pass'
  ' --config.data.dir=DIR or set $SINKFORMER_DATA_DIR=DIR; or prepare the TFDS'
  ' set with python -m launch.prepare_data --name=cats_vs_dogs.'
)
_NAME = re.compile(
  r'(?:^|/)(?P<label>cat|dog)(?:/[^/]*|\.\d+)\.jpe?g$', re.IGNORECASE
)


def input_shape(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """Shape of an image."""
  return (config.image_size, config.image_size, 3)


def load(source: str, data_dir: str, **settings) -> dataset_lib.Dataset:
  """Loads Cats and Dogs, split 80/10/10.

  Args:
    source: 'files' (archives or folders), 'tfds' (prepared set, or prepared
      now where TensorFlow is installed), or 'auto': the first of these.
    data_dir: directory with ``cats_vs_dogs/*.zip`` or ``cats_vs_dogs/**/Cat``,
      or with prepared TFDS sets; '' for $SINKFORMER_DATA_DIR. TFDS's own
      directory is looked into as well.
    **settings: image_size and augment of `images.load`.

  Returns:
    The data set. Cats are 0, dogs 1.

  Raises:
    errors.DataError: if no source could be read, or one is damaged.
  """
  found, provenance = sources.first_found(
    'Cats and Dogs',
    source,
    data_dir,
    {'files': _from_files, 'tfds': _from_tfds},
    HOW_TO_SUPPLY,
  )
  notice = f'made from {found.count:,} of 25,000 images of Cats and Dogs'
  return images.load(
    'cats_vs_dogs',
    len(CLASSES),
    found,
    provenance,
    notice='' if found.count >= _ABOUT_ALL else notice,
    **settings,
  )


def check_files(folder: pathlib.Path) -> None:
  """Refuses a folder without the archive that TFDS prepares its set from."""
  sources.check_archive(folder, ARCHIVE, zipfile.is_zipfile)


def _from_files(data_dir):
  folder = sources.folder(data_dir, 'cats_vs_dogs')
  archives = sorted(folder.glob('*.zip'))
  if archives:
    listed = [x for path in archives for x in _in_archive(path)]
  else:
    listed = list(_in_folder(folder))
  files, ignored = [], []
  for name, stamp, read in listed:
    match = _NAME.search(name)
    if match:
      label = CLASSES.index(match['label'].lower())
      files.append((images.ImageFile(name, label, read), stamp))
    else:
      ignored.append(name)
  if not files:
    held = f' but {ignored[0]} and {len(ignored) - 1} others' if ignored else ''
    message = (
      f'{folder} holds no images named like PetImages/Cat/0.jpg or'
      f' train/cat.0.jpg{held}'
    )
    if archives:
      raise errors.DataError(
        f'{message}. Archives within the archive have to be unpacked.'
      )
    raise sources.NotThereError(message)
  inputs = sorted((file.name, *stamp) for file, stamp in files)
  found = images.Files(
    identity=hashlib.sha256(repr(inputs).encode()).hexdigest(),
    count=len(files),
    read=lambda: [file for file, _ in files],
  )
  origin = ', '.join(map(str, archives)) if archives else str(folder)
  about = {'count': len(ignored), 'first': ignored[:5]} if ignored else {}
  return found, {'origin': origin, 'ignored': about}


def _in_archive(path):
  """Name, size and checksum, and reader of each file in a zip archive."""
  try:
    archive = zipfile.ZipFile(path)
  except (zipfile.BadZipFile, OSError) as error:
    raise sources.damaged(path, error) from error
  for member in archive.infolist():
    sources.check_member(path, member.filename)
    if not member.is_dir():
      yield (
        f'{path.name}/{member.filename}',
        (member.file_size, member.CRC),
        functools.partial(archive.read, member),
      )


def _in_folder(folder):
  """The same of each file in a folder, with its time for a checksum."""
  for path in sorted(folder.rglob('*')):
    if path.is_file():
      stat = path.stat()
      yield (
        path.relative_to(folder).as_posix(),
        (stat.st_size, stat.st_mtime_ns),
        path.read_bytes,
      )


def _from_tfds(data_dir):
  prepared = sources.find_or_prepare(TFDS_NAME, data_dir, HOST)
  examples = tfds_reader.open_split(
    TFDS_NAME, prepared, 'train', encoded=('image',)
  )

  def read():
    names, labels = tfds_reader.columns(examples, ('image/filename', 'label'))
    return [
      images.ImageFile(
        tfds_reader.as_text(name),
        int(label),
        lambda i=i: examples[i]['image'],
      )
      for i, (name, label) in enumerate(zip(names, labels, strict=True))
    ]

  parts = sorted((prepared / TFDS_NAME).rglob('*'))
  inputs = [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in parts]
  found = images.Files(
    identity=hashlib.sha256(repr(inputs).encode()).hexdigest(),
    count=len(examples),
    read=read,
  )
  return found, {'origin': str(prepared / TFDS_NAME)}
