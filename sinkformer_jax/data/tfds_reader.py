"""TensorFlow Datasets: preparing needs TensorFlow, reading does not."""

from collections.abc import Sequence
import importlib.util
import os
import pathlib
import shutil
from typing import Any

from sinkformer_jax import errors
from sinkformer_jax import paths

_PROBE_TIMEOUT_S = 20


def data_dirs(extra: str = '') -> list[pathlib.Path]:
  """Where prepared sets are looked for: `extra`, then TFDS's own place."""
  default = os.environ.get('TFDS_DATA_DIR', '~/tensorflow_datasets')
  return [paths.resolve(x, 'directory') for x in (extra, default) if x]


def can_prepare() -> bool:
  """Whether TensorFlow is installed."""
  return importlib.util.find_spec('tensorflow') is not None


def is_prepared(name: str, data_dir: pathlib.Path) -> bool:
  """Whether `data_dir` holds the set in a format that can be read here.

  Looks at files only. TFDS's default format, tfrecord, needs TensorFlow.
  """
  return any(
    '"array_record"' in path.read_text(errors='replace')
    for path in (data_dir / name).rglob('dataset_info.json')
  )


def open_split(
  name: str,
  data_dir: pathlib.Path,
  split: str,
  encoded: tuple[str, ...] = (),
) -> Sequence[dict[str, Any]]:
  """Opens a split of a prepared set. Never uses the network.

  Args:
    name: name of the set in TFDS.
    data_dir: directory of prepared sets.
    split: name of the split.
    encoded: fields of images that are to stay as they are in their files.

  Returns:
    Its examples, read when they are asked for.

  Raises:
    errors.DataError: if the set cannot be opened.
  """
  try:
    import tensorflow_datasets as tfds  # Slow to import, and seldom needed.
  except ModuleNotFoundError as error:
    raise errors.DataError(
      f'reading {data_dir / name} needs a package that is missing'
      f' ({error.name}): pip install tensorflow-datasets'
    ) from error
  decoders = {field: tfds.decode.SkipDecoding() for field in encoded}
  try:
    return tfds.data_source(
      name,
      data_dir=str(data_dir),
      split=split,
      download=False,
      # An empty dict would mean something else to TFDS.
      decoders=decoders or None,
    )
  except Exception as error:
    raise _unreadable(name, data_dir, error) from error


def _unreadable(name, data_dir, error):
  return errors.DataError(
    f'the prepared set {name!r} in {data_dir} cannot be read'
    f' ({type(error).__name__}: {error}); delete {data_dir / name} and prepare'
    ' it anew with python -m launch.prepare_data.'
  )


def read(
  name: str, data_dir: pathlib.Path, split: str, fields: tuple[str, ...]
) -> list[list]:
  """Reads a split of a prepared set into lists.

  Args:
    name: name of the set in TFDS.
    data_dir: directory of prepared sets.
    split: name of the split.
    fields: names of the fields to read.

  Returns:
    For each field the values of all examples.

  Raises:
    errors.DataError: if the set cannot be read.
  """
  examples = open_split(name, data_dir, split)
  try:
    return columns(examples, fields)
  except Exception as error:
    raise _unreadable(name, data_dir, error) from error


def columns(
  examples: Sequence[dict[str, Any]], fields: tuple[str, ...]
) -> list[list]:
  """For each field the values of all examples of an opened split."""
  values = [[] for _ in fields]
  for i in range(len(examples)):
    example = examples[i]
    for column, field in zip(values, fields, strict=True):
      column.append(example[field])
  return values


def names(origin: str, split: str, count: int) -> list[str]:
  """What the examples of a split are called in errors."""
  return [f'{origin} {split}: example {i + 1}' for i in range(count)]


def as_text(value: bytes | str) -> str:
  """A value of a text field: TFDS gives bytes, which it has made of text."""
  return value.decode() if isinstance(value, bytes) else value


def prepare(
  name: str,
  data_dir: pathlib.Path,
  probe_url: str,
  files_dir: pathlib.Path | None = None,
) -> None:
  """Downloads and prepares a set, or prepares it from downloaded files.

  Leaves nothing half-made behind when it fails.

  Args:
    name: name of the set in TFDS.
    data_dir: where to put it.
    probe_url: an address of the set's host. It is tried first, since TFDS
      itself waits without end for a network that does not answer.
    files_dir: directory with the original files; None to download them.

  Raises:
    errors.DataError: if TensorFlow, the network or a file is missing.
  """
  if not can_prepare():
    raise errors.DataError(
      'preparing a TFDS set needs TensorFlow: pip install -r'
      ' requirements-data.txt'
    )
  if any((data_dir / name).rglob('dataset_info.json')):
    raise errors.DataError(
      f'{data_dir / name} holds the set in another format than array_record,'
      ' or damaged: delete it, or prepare the set elsewhere with python -m'
      ' launch.prepare_data --data_dir=DIR.'
    )
  if files_dir is None:
    _probe(probe_url)
  import tensorflow as tf
  import tensorflow_datasets as tfds

  # TensorFlow must leave accelerators to JAX.
  tf.config.set_visible_devices([], 'GPU')
  existed = data_dir.exists()
  downloads = data_dir / 'downloads'
  try:
    tfds.builder(
      name, data_dir=str(data_dir), file_format='array_record'
    ).download_and_prepare(
      download_dir=str(downloads),
      download_config=tfds.download.DownloadConfig(
        manual_dir=str(files_dir) if files_dir else None
      ),
    )
  except Exception as error:
    if not is_prepared(name, data_dir):
      shutil.rmtree(data_dir / name, ignore_errors=True)
    if not existed:
      shutil.rmtree(data_dir, ignore_errors=True)
    raise errors.DataError(
      f'TFDS could not prepare {name!r} in {data_dir}'
      f' ({type(error).__name__}: {error}).'
    ) from error


def _probe(url):
  import requests

  try:
    requests.head(url, timeout=_PROBE_TIMEOUT_S)
  except requests.RequestException as error:
    raise errors.DataError(
      f'no network: {url} does not answer ({type(error).__name__}). Prepare'
      ' the set from downloaded files instead: python -m launch.prepare_data'
      ' --files=DIR'
    ) from error
