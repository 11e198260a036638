"""IMDb: film reviews, negative (0) and positive (1) (Maas et al. 2011)."""

from collections.abc import Iterator
import hashlib
import json
import pathlib
import re
import tarfile
import zlib

import ml_collections

from sinkformer_jax import errors
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import sources
from sinkformer_jax.data import text
from sinkformer_jax.data import tfds_reader

KIND = 'text'
RULES = text.RULES
TITLE = 'IMDb'
SOURCES = ('files', 'tfds')
CLASSES = ('neg', 'pos')
TFDS_NAME = 'imdb_reviews'
HOST = 'https://ai.stanford.edu/'
ARCHIVE = 'aclImdb_v1.tar.gz'
OFFICIAL_SIZES = {'train': 25_000, 'test': 25_000}
VALIDATION_SHARE = 0.1
HOW_TO_SUPPLY = (
  'Put aclImdb_v1.tar.gz, or its folder aclImdb, or train.jsonl and test.jsonl'
  ' (plain or .gz) into DIR/imdb and pass --config.data.dir=DIR or set'
  ' $SINKFORMER_DATA_DIR=DIR; or prepare the TFDS set with python -m'
  ' launch.prepare_data --name=imdb.'
)
_REVIEW = re.compile(r'(?:^|/)(train|test)/(neg|pos)/[^/]+\.txt$')


def input_shape(config: ml_collections.ConfigDict) -> tuple[int, ...]:
  """The largest number of tokens."""
  return (config.max_length,)


def load(source: str, data_dir: str, **settings) -> dataset_lib.Dataset:
  """Loads IMDb: some 22,400 / 2,500 / 25,000 reviews.

  Args:
    source: 'files' (the official archive or folder, or jsonl), 'tfds'
      (prepared set, or prepared now where TensorFlow is installed), or 'auto':
      the first of these.
    data_dir: directory with ``imdb/aclImdb_v1.tar.gz``, ``imdb/aclImdb`` or
      ``imdb/{train,test}*.jsonl[.gz]`` (each line an object with ``label`` and
      ``text``), or with prepared TFDS sets; '' for $SINKFORMER_DATA_DIR.
      TFDS's own directory is looked into as well.
    **settings: max_length, bucket_lengths, vocab_size and tokenizer of
      `text.load`.

  Returns:
    The data set. Texts are as published, with ``<br />``.

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
    'imdb',
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
  folder = sources.folder(data_dir, 'imdb')
  archives = sorted(folder.glob('*.tar.gz'))
  jsonl = {
    split: sorted(x for x in folder.glob(f'{split}*.jsonl*') if x.is_file())
    for split in OFFICIAL_SIZES
  }
  if len(archives) > 1:
    raise errors.DataError(
      f'{folder} holds {len(archives)} archives; leave one of them.'
    )
  if archives:
    return _from_reviews(_in_archive(archives[0]), archives[0])
  if any(folder.rglob('train/neg')):
    return _from_reviews(_in_folder(folder), folder)
  if any(jsonl.values()):
    return _from_jsonl(folder, jsonl)
  raise sources.NotThereError(
    f'no .tar.gz, no train/neg and no train*.jsonl in {folder}'
  )


def _from_reviews(reviews, origin):
  """Splits from ``(name, content)`` of files as the archive has them."""
  found = {split: [] for split in OFFICIAL_SIZES}
  for name, content in reviews:
    split, label = _REVIEW.search(name).groups()
    row = (content, CLASSES.index(label), f'{name} of {origin}')
    found[split].append(row)
  for split, rows in found.items():
    if not rows:
      raise errors.DataError(
        f'{origin} holds no {split}/neg/*.txt and {split}/pos/*.txt: it is'
        ' incomplete. Download it again.'
      )
  splits = {split: _examples(rows) for split, rows in found.items()}
  return splits, {'origin': str(origin), 'checksums': {}}


def _examples(rows):
  texts, labels, names = zip(*rows, strict=True)
  return text.examples(texts, labels, len(CLASSES), names)


def _in_archive(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  try:
    with tarfile.open(path) as archive:
      for member in archive:
        sources.check_member(path, member.name)
        if member.isfile() and _REVIEW.search(member.name):
          yield member.name, archive.extractfile(member).read()
  except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
    raise sources.damaged(path, error) from error


def _in_folder(folder: pathlib.Path) -> Iterator[tuple[str, bytes]]:
  for path in sorted(folder.rglob('*.txt')):
    name = path.relative_to(folder).as_posix()
    if _REVIEW.search(name):
      yield name, path.read_bytes()


def _from_jsonl(folder, files):
  splits, checksums = {}, {}
  for split, paths_of_split in files.items():
    if not paths_of_split:
      raise errors.DataError(
        f'{folder / split}.jsonl[.gz] is missing. {HOW_TO_SUPPLY}'
      )
    rows = []
    for path in paths_of_split:
      content = sources.read(path)
      checksums[path.name.removesuffix('.gz')] = hashlib.sha256(
        content
      ).hexdigest()
      for i, line in enumerate(content.splitlines(), start=1):
        where = f'{path} line {i}'
        rows.append((*_parse(where, line), where))
    if not rows:
      raise errors.DataError(f'{path} is empty. Download it again.')
    splits[split] = _examples(rows)
  return splits, {'origin': str(folder), 'checksums': checksums}


def _parse(where, line):
  try:
    review = json.loads(line)
    content, label = review['text'], review['label']
    if not isinstance(content, str):
      raise TypeError(f'its text is {content!r}')
  except UnicodeDecodeError as error:
    raise errors.DataError(f'{where} is not UTF-8: {error}.') from error
  except (ValueError, KeyError, TypeError) as error:
    raise errors.DataError(
      f'{where} is not an object with "text" and "label": {error}. Is the file'
      ' cut off?'
    ) from error
  return content, label


def _from_tfds(data_dir):
  prepared = sources.find_or_prepare(TFDS_NAME, data_dir, HOST)
  origin = str(prepared / TFDS_NAME)

  def examples(split):
    texts, labels = tfds_reader.read(
      TFDS_NAME, prepared, split, ('text', 'label')
    )
    names = tfds_reader.names(origin, split, len(labels))
    return text.examples(texts, labels, len(CLASSES), names)

  splits = {split: examples(split) for split in OFFICIAL_SIZES}
  return splits, {'origin': origin, 'checksums': {}}
