"""Small made-up data in the official formats of the data sets."""

import contextlib
import csv
import gzip
import io
import json
import tarfile
import zipfile

import numpy as np
from PIL import Image

WORDS = [
  ['ministry', 'talks', 'border', 'election', 'treaty'],
  ['match', 'season', 'coach', 'goal', 'league'],
  ['shares', 'profit', 'market', 'bank', 'prices'],
  ['software', 'chip', 'browser', 'network', 'probe'],
]


def sentence(rng, label, num_words):
  """A text that tells its class."""
  return ' '.join(rng.choice(WORDS[label % 4], num_words))


def ag_news_rows(count, seed):
  """``[class from 1 to 4, title, description]``, no two alike."""
  rng = np.random.default_rng(seed)
  rows = []
  for i in range(count):
    title = f'No. {seed}-{i} "{sentence(rng, i % 4, 1)}"'
    description = sentence(rng, i % 4, 1 + i % 9) + ', caf\u00e9 \\$5'
    rows.append([str(1 + i % 4), title, description])
  return rows


def csv_content(rows):
  """As the official files are written: every field quoted, no header."""
  text = io.StringIO(newline='')
  csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator='\n').writerows(rows)
  return text.getvalue().encode()


def write_ag_news(data_dir, train=60, test=20):
  """``data_dir/ag_news/{train,test}.csv.gz``; the folder."""
  folder = data_dir / 'ag_news'
  folder.mkdir()
  for seed, (split, count) in enumerate((('train', train), ('test', test))):
    content = csv_content(ag_news_rows(count, seed))
    (folder / f'{split}.csv.gz').write_bytes(gzip.compress(content))
  return folder


def reviews(count, seed):
  """``{'neg/0_3.txt': text}`` as in a split of the official archive."""
  rng = np.random.default_rng(seed)
  found = {}
  for i in range(count):
    label, rating = (('neg', 3), ('pos', 8))[i % 2]
    body = sentence(rng, i % 2, 2 + i % 20)
    found[f'{label}/{i}_{rating}.txt'] = f'{seed}-{i} caf\u00e9<br />{body}'
  return found


def imdb_members(train=60, test=20):
  """``{'aclImdb/train/neg/0_3.txt': content}``, with what else is in there."""
  members = {'aclImdb/README': b'readme'}
  for split, count, seed in (('train', train, 0), ('test', test, 1)):
    for name, review in reviews(count, seed).items():
      members[f'aclImdb/{split}/{name}'] = review.encode()
  members['aclImdb/train/unsup/0_0.txt'] = b'without a label'
  members['aclImdb/train/urls_neg.txt'] = b'http://example.com'
  return members


def write_tar(path, members):
  """A ``.tar.gz`` of ``{name: content}``."""
  with tarfile.open(path, 'w:gz') as archive:
    for name, content in members.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))


def write_imdb(data_dir, kind='tar', **counts):
  """``data_dir/imdb`` as the archive, its folder, or jsonl; the folder."""
  folder = data_dir / 'imdb'
  folder.mkdir()
  members = imdb_members(**counts)
  if kind == 'tar':
    write_tar(folder / 'aclImdb_v1.tar.gz', members)
  elif kind == 'folder':
    for name, content in members.items():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_bytes(content)
  else:
    for split in ('train', 'test'):
      lines = [
        json.dumps({'text': x.decode(), 'label': int('/pos/' in name)}) + '\n'
        for name, x in members.items()
        if f'{split}/neg' in name or f'{split}/pos' in name
      ]
      # In two files: all of train*.jsonl.gz is taken.
      for part, chosen in (('', lines[::2]), ('_rest', lines[1::2])):
        content = gzip.compress(''.join(chosen).encode())
        (folder / f'{split}{part}.jsonl.gz').write_bytes(content)
  return folder


def encoded(image, kind='JPEG'):
  """An array ``[height, width, 3]`` (or another mode) as a file."""
  content = io.BytesIO()
  image = image if isinstance(image, Image.Image) else Image.fromarray(image)
  image.save(content, kind, quality=90)
  return content.getvalue()


def photo(label, seed, height=40, width=30):
  """A picture of its class: cats are dark above, dogs below."""
  rng = np.random.default_rng((label, seed))
  image = rng.integers(100, 256, (height, width, 3), np.uint8)
  half = slice(0, height // 2) if label == 0 else slice(height // 2, None)
  image[half] //= 3
  return encoded(image)


def pet_members(count=40, layout='microsoft'):
  """``{name: content}`` of `count` photos of each class."""
  members = {}
  for label, name in enumerate(('Cat', 'Dog')):
    for i in range(count):
      path = f'PetImages/{name}/{i}.jpg'
      if layout == 'kaggle':
        path = f'train/{name.lower()}.{i}.jpg'
      members[path] = photo(label, i)
  return members


@contextlib.contextmanager
def prepared(folder, splits):
  """A TFDS set in `folder`, of ``{split: rows}``; how it was asked for."""
  import tensorflow_datasets as tfds

  folder.mkdir(parents=True)
  (folder / 'dataset_info.json').write_text('{"fileFormat": "array_record"}')
  asked = []

  def as_data_source(self, split, **options):
    asked.append(options)
    return splits[split]

  with tfds.testing.mock_data(as_data_source_fn=as_data_source):
    yield asked


def write_zip(path, members):
  """A zip archive of ``{name: content}``."""
  with zipfile.ZipFile(path, 'w') as archive:
    for name, content in members.items():
      archive.writestr(name, content)


def write_pets(data_dir, members=None):
  """``data_dir/cats_vs_dogs/kagglecatsanddogs_5340.zip``; the folder."""
  folder = data_dir / 'cats_vs_dogs'
  folder.mkdir(exist_ok=True)
  members = pet_members() if members is None else members
  write_zip(folder / 'kagglecatsanddogs_5340.zip', members)
  return folder
