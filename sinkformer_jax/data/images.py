"""Image files to classify: decoded once, kept in one file, split, augmented."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
from typing import Any
import warnings

import numpy as np
import PIL
from PIL import Image

from sinkformer_jax import errors
from sinkformer_jax import paths
from sinkformer_jax.data import dataset as dataset_lib

logger = logging.getLogger(__name__)

# Changes when the way images are kept does.
_RECIPE = 'RGB, squashed to a square, bilinear'
_FORMATS = ('JPEG', 'PNG', 'BMP', 'GIF', 'WEBP')
# More than this, and the source is damaged rather than a few of its images.
_MOST_UNREADABLE = 0.1
_LEAST_PER_CLASS = 10
SHARES = {'validation': 0.1, 'test': 0.1}
# Of a random crop (Szegedy et al. 2015): part of the area, width by height.
_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)


@dataclasses.dataclass(frozen=True)
class ImageFile:
  """An image that has not been read yet.

  Attributes:
    name: in its archive or folder.
    label: its class.
    read: gives its encoded bytes.
  """

  name: str
  label: int
  read: Callable[[], bytes]


@dataclasses.dataclass(frozen=True)
class Files:
  """All images of a source.

  Attributes:
    identity: changes if any of them does.
    count: how many there are.
    read: lists them; asked only if the cache has none of this identity.
  """

  identity: str
  count: int
  read: Callable[[], Sequence[ImageFile]]


def load(
  name: str,
  num_classes: int,
  files: Files,
  provenance: Mapping[str, Any],
  *,
  notice: str,
  image_size: int,
  augment: bool,
) -> dataset_lib.Dataset:
  """Makes a data set of image files, split 80/10/10.

  The first time, images are decoded and squashed to squares, which are kept in
  one file in the cache; it is mapped into memory, never read whole. Images
  that occur twice are taken once.

  Args:
    name: of the set, in configs.
    num_classes: labels are below this.
    files: the images.
    provenance: with ``source`` and ``origin``.
    notice: see `dataset.DatasetInfo`.
    image_size: side of the squares.
    augment: crop and flip training images at random.

  Returns:
    The data set; the provenance has ``unreadable`` (names, and why) and
    ``left_out``.

  Raises:
    errors.DataError: if there are too few images, too many cannot be read, or
      the cache cannot be written.
  """
  index, images = _cached(files, num_classes, image_size)
  splits, contents, start = {}, {}, 0
  for split, labels in index['labels'].items():
    stop = start + len(labels)
    label = np.array(labels, np.int32)
    splits[split] = {'image': images[start:stop], 'label': label}
    contents[split] = {
      'image': np.array(index['digests'][split]),
      'label': label,
    }
    start = stop
  info = dataset_lib.DatasetInfo(
    name=name,
    num_classes=num_classes,
    input_shape=(image_size, image_size, 3),
    splits={split: len(x['label']) for split, x in splits.items()},
    provenance={
      'checksums': {},
      **provenance,
      'notice': notice,
      'split_rule': dataset_lib.SPLIT_RULE,
      'fingerprint': dataset_lib.fingerprint(contents),
      'left_out': index['left_out'],
      'unreadable': index['unreadable'],
    },
  )
  logger.info('%s from %s: %s', name, provenance['origin'], dict(info.splits))
  for what in ('left_out', 'unreadable'):
    if index[what]:
      logger.warning('%s images of %s: %s', what, name, index[what])
  if notice:
    logger.warning('RESULTS ARE %s', notice.upper())
  return dataset_lib.Dataset(
    info, splits, preprocess, augment=crop_and_flip if augment else None
  )


def preprocess(batch: dataset_lib.Arrays) -> dataset_lib.Arrays:
  """Maps pixels from 0 to 255 to floats from -1 to 1."""
  image = batch['image'].astype(np.float32)
  # In place: a batch of photos is large.
  image /= 127.5
  image -= 1
  return {**batch, 'image': image}


def crop_and_flip(
  arrays: dataset_lib.Arrays, keys: np.ndarray
) -> dataset_lib.Arrays:
  """Cuts a random part out of each image, and mirrors half of them.

  The part has 8 to 100 % of the area and a ratio of sides from 3/4 to 4/3
  (sides longer than the image's are cut), and is stretched to the whole.

  Args:
    arrays: with ``image``, ``[batch, size, size, 3]`` of uint8.
    keys: ``[batch, ...]``, integers; the result depends on nothing else.

  Returns:
    The arrays, with other images of the same shape.
  """
  images = [
    _crop_and_flip(image, np.random.default_rng(key))
    for image, key in zip(arrays['image'], keys, strict=True)
  ]
  return {**arrays, 'image': np.stack(images)}


def _crop_and_flip(image, rng):
  size = len(image)
  area = rng.uniform(*_CROP_AREA)
  ratio = np.exp(rng.uniform(*np.log(_CROP_RATIO)))
  sides = size * np.minimum(np.sqrt([area * ratio, area / ratio]), 1)
  left, top = rng.uniform(0, size - sides)
  box = (left, top, left + sides[0], top + sides[1])
  # Rounding must not lead out of the image.
  box = tuple(min(float(x), size) for x in box)
  cropped = Image.fromarray(image).resize(
    (size, size), Image.Resampling.BILINEAR, box
  )
  result = np.asarray(cropped)
  return result[:, ::-1] if rng.random() < 0.5 else result


def decode(content: bytes, image_size: int) -> np.ndarray:
  """Decodes an image and squashes it to ``[image_size, image_size, 3]``.

  Raises:
    Exception: of many kinds, if it cannot be read whole.
  """
  with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
    square = image.convert('RGB').resize(
      (image_size, image_size), Image.Resampling.BILINEAR
    )
  return np.asarray(square)


def _cached(files, num_classes, image_size):
  """The index of the kept images, and the images mapped from their file."""
  inputs = f'{_RECIPE} {PIL.__version__} {image_size} {files.identity}'
  key = hashlib.sha256(inputs.encode()).hexdigest()
  folder = paths.cache_dir() / 'images'
  pixels, about = folder / f'{key}.uint8', folder / f'{key}.json'
  if not about.exists():
    try:
      index = _build(files.read(), num_classes, image_size, pixels)
      # Written last: the index says that the pixels are there whole.
      paths.write_whole(about, json.dumps(index, indent=1).encode())
    except OSError as error:
      raise errors.DataError(
        f'decoded images could not be kept in {folder}:'
        f' {error.strerror or error}. Set $SINKFORMER_CACHE_DIR to a place with'
        ' room.'
      ) from error
  try:
    index = json.loads(about.read_text())
    count = sum(map(len, index['labels'].values()))
    shape = (count, image_size, image_size, 3)
    if pixels.stat().st_size != np.prod(shape):
      raise ValueError('its size is wrong')
    return index, np.memmap(pixels, np.uint8, 'r', shape=shape)
  except (OSError, ValueError, KeyError) as error:
    raise errors.DataError(
      f'the cached images {pixels} are damaged ({error}); delete {about} to'
      ' have them made again.'
    ) from error


def _build(files, num_classes, image_size, path):
  """Decodes the images into a file, split by split; returns its index."""
  files, digests, left_out = _distinct(files)
  labels = np.array([x.label for x in files], np.int32)
  counts = np.bincount(labels, minlength=num_classes)
  if counts.min() < _LEAST_PER_CLASS:
    raise errors.DataError(
      f'too few images: {counts.tolist()} of the classes; at least'
      f' {_LEAST_PER_CLASS} of each are needed.'
    )
  # Split before decoding: what can be read has no say in it.
  order = np.argsort(digests, kind='stable')
  arrays = {'label': labels[order], 'place': order}
  sizes = {x: round(share * len(files)) for x, share in SHARES.items()}
  sizes['train'] = len(files) - sum(sizes.values())
  parts = dataset_lib.split(arrays, sizes)
  index = {
    'labels': {},
    'digests': {},
    'names': {},
    'unreadable': {},
    'left_out': left_out,
  }
  logger.info('Decoding %d images (once)', len(files))
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  try:
    with temporary.open('wb') as f:
      for split in ('train', 'validation', 'test'):
        chosen = [files[i] for i in parts[split]['place']]
        kept = []
        for i, result in _decoded(chosen, image_size):
          if isinstance(result, np.ndarray):
            f.write(result)
            kept.append(parts[split]['place'][i])
          else:
            index['unreadable'][chosen[i].name] = result
        index['labels'][split] = [files[i].label for i in kept]
        index['digests'][split] = [digests[i] for i in kept]
        index['names'][split] = [files[i].name for i in kept]
    _check_unreadable(index['unreadable'], len(files))
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)
  return index


def _distinct(files):
  """Files of different content with one label, their digests, and the rest."""
  found: dict[str, list[ImageFile]] = {}
  for file in sorted(files, key=lambda x: x.name):
    try:
      content = file.read()
    except Exception:
      # Said when it is decoded; its name stands for what it holds.
      content = file.name.encode()
    found.setdefault(hashlib.sha256(content).hexdigest(), []).append(file)
  distinct, left_out = {}, {}
  for digest, same in found.items():
    if len({x.label for x in same}) > 1:
      left_out.update({x.name: 'has two labels' for x in same})
      continue
    distinct[digest] = same[0]
    left_out.update({x.name: f'equals {same[0].name}' for x in same[1:]})
  return list(distinct.values()), list(distinct), left_out


def _decoded(
  files: Sequence[ImageFile], image_size: int
) -> Iterator[tuple[int, np.ndarray | str]]:
  """Decodes files in order: ``(place, image or why it cannot be read)``."""

  def attempt(file):
    try:
      return decode(file.read(), image_size)
    except PIL.UnidentifiedImageError:
      # Its text names an address in memory.
      return 'it is no image, or empty'
    except Exception as error:
      # Pillow and zipfile raise many kinds.
      return f'{type(error).__name__}: {error}'

  with (
    warnings.catch_warnings(),
    concurrent.futures.ThreadPoolExecutor() as pool,
  ):
    # Of odd metadata.
    warnings.simplefilter('ignore')
    # A few at a time, so that results do not pile up.
    for batch in _batched(enumerate(files), 256):
      results = pool.map(attempt, [file for _, file in batch])
      yield from zip([place for place, _ in batch], results, strict=True)


def _batched(items: Iterable, size: int) -> Iterator[list]:
  iterator = iter(items)
  while batch := list(itertools.islice(iterator, size)):
    yield batch


def _check_unreadable(unreadable, count):
  if len(unreadable) > _MOST_UNREADABLE * count:
    name, reason = next(iter(unreadable.items()))
    raise errors.DataError(
      f'{len(unreadable)} of {count} images cannot be read, as {name}'
      f' ({reason}): the source is damaged. Download it again.'
    )
