"""AG News: titles and descriptions of news in four classes (Zhang et al. 2015).

The classes World, Sports, Business and Sci/Tech are 1 to 4 in the official
files; here they are 0 to 3.
"""

import csv
import hashlib
import io
import pathlib
import tarfile

import ml_collections

from sinkformer_jax import errors
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import sources
from sinkformer_jax.data import text
from sinkformer_jax.data import tfds_reader

KIND = 'text'
RULES = text.RULES
TITLE = 'AG News'
SOURCES = ('files', 'tfds')
CLASSES = ('World', 'Sports', 'Business', 'Sci/Tech')
TFDS_NAME = 'ag_news_subset'
HOST = 'https://drive.google.com/'
ARCHIVE = 'ag_news_csv.tar.gz'
OFFICIAL_SIZES = {'train': 120_000, 'test': 7_600}
VALIDATION_SHARE = 0.05
HOW_TO_SUPPLY = (
  'Put the official train.csv and test.csv (plain or .gz) into DIR/ag_news and'
  ' pass --config.data.dir=DIR or set $SINKFORMER_DATA_DIR=DIR; or prepare the'
  ' TFDS set with python -m launch.prepare_data --name=ag_news.'
)


def input_shape(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """The largest number of tokens."""
  return (config.max_length,)


def load(source: str, data_dir: str, **settings) -> dataset_lib.Dataset:
  """Loads AG News: 114,000 / 6,000 / 7,600 texts, if none is repeated.

  Args:
    source: 'files' (official csv files), 'tfds' (prepared set, or prepared now
      where TensorFlow is installed), or 'auto': the first of these.
    data_dir: directory with ``ag_news/{train,test}.csv[.gz]`` or with prepared
      TFDS sets; '' for $SINKFORMER_DATA_DIR. TFDS's own directory is looked
      into as well.
    **settings: max_length, bucket_lengths, vocab_size and tokenizer of
      `text.load`.

  Returns:
    The data set. A text is the title, a space, and the description.

  Raises:
    errors.DataError: if no source could be read, or one is damaged.
  """
  splits, provenance = sources.first_found(
    TITLE,
    source,
    data_dir,
    {'files': _from_files, 'tfds': _from_tfds},
    HOW_TO_SUPPLY,
  )
  return text.load(
    'ag_news',
    len(CLASSES),
    splits,
    provenance,
    notice=text.subset_notice(TITLE, splits, OFFICIAL_SIZES),
    validation_share=VALIDATION_SHARE,
    **settings,
  )


def check_files(folder: pathlib.Path) -> None:
  """Refuses a folder without the archive that TFDS prepares its set from."""
  sources.check_archive(folder, ARCHIVE, tarfile.is_tarfile)


def _from_files(data_dir):
  folder = sources.folder(data_dir, 'ag_news')
  found = {x: sources.find_file(folder, f'{x}.csv') for x in ('train', 'test')}
  if not any(found.values()):
    raise sources.NotThereError(f'no train.csv or test.csv in {folder}')
  for split, path in found.items():
    if path is None:
      raise errors.DataError(
        f'{folder / split}.csv[.gz] is missing. {HOW_TO_SUPPLY}'
      )
  splits, checksums = {}, {}
  for split, path in found.items():
    content = sources.read(path)
    checksums[f'{split}.csv'] = hashlib.sha256(content).hexdigest()
    splits[split] = read_csv(path, content)
  return splits, {'origin': str(folder), 'checksums': checksums}


def read_csv(path: pathlib.Path, content: bytes) -> dataset_lib.Arrays:
  """Reads an official file: rows of class (1 to 4), title and description.

  Args:
    path: for errors.
    content: of the file, uncompressed.

  Returns:
    ``{'text', 'label'}`` with labels from 0 to 3.

  Raises:
    errors.DataError: names the line that is wrong.
  """
  if content.count(b'"') % 2:
    raise sources.damaged(path, 'its last row is cut off')
  try:
    decoded = content.decode()
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise errors.DataError(
      f'{path} line {line} is not UTF-8: {error}. Download it again.'
    ) from error
  texts, labels, names = [], [], []
  for line, row in _rows(path, decoded):
    where = f'{path} line {line}'
    if len(row) != 3:
      raise errors.DataError(
        f'{where} has {len(row)} fields and not three: class, title and'
        ' description. Download the file again.'
      )
    if row[0] not in ('1', '2', '3', '4'):
      raise errors.DataError(
        f'{where} has class {row[0]!r}, which must be 1, 2, 3 or 4. The'
        ' official file has no header.'
      )
    # The official classes count from 1.
    labels.append(int(row[0]) - 1)
    texts.append(f'{row[1]} {row[2]}')
    names.append(where)
  return text.examples(texts, labels, len(CLASSES), names)


def _rows(path, decoded):
  """Each row, and the line that it ends in."""
  rows = csv.reader(io.StringIO(decoded, newline=''))
  try:
    for row in rows:
      yield rows.line_num, row
  except csv.Error as error:
    reason = f'line {rows.line_num} cannot be read ({error})'
    raise sources.damaged(path, reason) from error


def _from_tfds(data_dir):
  prepared = sources.find_or_prepare(TFDS_NAME, data_dir, HOST)
  origin = str(prepared / TFDS_NAME)

  def examples(split):
    titles, descriptions, labels = tfds_reader.read(
      TFDS_NAME, prepared, split, ('title', 'description', 'label')
    )
    joined = [
      tfds_reader.as_text(a) + ' ' + tfds_reader.as_text(b)
      for a, b in zip(titles, descriptions, strict=True)
    ]
    names = tfds_reader.names(origin, split, len(labels))
    return text.examples(joined, labels, len(CLASSES), names)

  splits = {split: examples(split) for split in OFFICIAL_SIZES}
  return splits, {'origin': origin, 'checksums': {}}
