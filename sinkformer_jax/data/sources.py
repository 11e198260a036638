"""Where data comes from: sources in order of preference, and their files."""

from collections.abc import Callable
from collections.abc import Mapping
import gzip
import pathlib
from typing import Any
import zlib

from sinkformer_jax import errors
from sinkformer_jax import paths
from sinkformer_jax.data import tfds_reader


class NotThereError(errors.DataError):
  """A source that is absent; a damaged one is a plain DataError."""


def first_found(
  title: str,
  source: str,
  data_dir: str,
  readers: Mapping[str, Callable[[str], tuple[Any, dict[str, Any]]]],
  how_to_supply: str,
) -> tuple[Any, dict[str, Any]]:
  """Reads the first source that is there.

  Args:
    title: of the data set, for people.
    source: one of `readers`; 'auto' for all of them, in this order.
    data_dir: where to look; '' for $SINKFORMER_DATA_DIR.
    readers: by source, functions of the directory that return the content and
      its provenance.
    how_to_supply: what a user can do if there is none.

  Returns:
    What the reader returned, with ``source`` and ``tried`` in the provenance.

  Raises:
    NotThereError: if there is none; says what was tried.
    errors.DataError: if one is there and damaged: that ends the search, since
      another one would hide it.
  """
  data_dir = paths.data_dir(data_dir)
  tried = {}
  for name in readers if source == 'auto' else (source,):
    try:
      content, provenance = readers[name](data_dir)
    except NotThereError as error:
      tried[name] = str(error)
    else:
      return content, {'source': name, 'tried': tried, **provenance}
  reasons = '; '.join(f'{name}: {reason}' for name, reason in tried.items())
  raise NotThereError(f'{title} was not found. {reasons}. {how_to_supply}')


def folder(data_dir: str, name: str) -> pathlib.Path:
  """``data_dir/name``.

  Raises:
    NotThereError: if no directory is given, or it has none of this name.
  """
  if not data_dir:
    raise NotThereError('no directory given')
  path = paths.resolve(data_dir, 'directory') / name
  if not path.is_dir():
    raise NotThereError(f'there is no directory {path}')
  return path


def find_file(folder: pathlib.Path, name: str) -> pathlib.Path | None:
  """``folder/name.gz`` or ``folder/name``; None if there is neither."""
  for path in (folder / f'{name}.gz', folder / name):
    if path.is_file():
      return path
  return None


def find_or_prepare(name: str, data_dir: str, host: str) -> pathlib.Path:
  """The directory of a prepared TFDS set; prepares it where TensorFlow is.

  Args:
    name: name of the set in TFDS.
    data_dir: looked into before TFDS's own directory; may be ''.
    host: an address of the set's host.

  Raises:
    NotThereError: if it is not there and cannot be prepared.
  """
  directories = tfds_reader.data_dirs(data_dir)
  prepared = [x for x in directories if tfds_reader.is_prepared(name, x)]
  if prepared:
    return prepared[0]
  looked_in = ' or '.join(map(str, directories))
  if not tfds_reader.can_prepare():
    raise NotThereError(
      f'no prepared set in {looked_in}, and TensorFlow is not installed to'
      ' prepare one'
    )
  try:
    tfds_reader.prepare(name, directories[-1], host)
  except errors.DataError as error:
    raise NotThereError(f'no prepared set in {looked_in}; {error}') from error
  return directories[-1]


def read(path: pathlib.Path) -> bytes:
  """The content of a file, uncompressed if its name ends in ``.gz``.

  Raises:
    errors.DataError: if it cannot be read, or is an HTML page; names it.
  """
  try:
    # Before gzip, whose errors are OSErrors too.
    path.open('rb').close()
  except OSError as error:
    raise errors.DataError(
      f'{path} cannot be read: {error.strerror}.'
    ) from error
  try:
    opener = gzip.open if path.suffix == '.gz' else open
    with opener(path, 'rb') as f:
      content = f.read()
  except (OSError, EOFError, zlib.error) as error:
    raise damaged(path, error) from error
  if is_html(content):
    raise damaged(path, 'it is an HTML page')
  return content


def damaged(path: pathlib.Path, reason: Any) -> errors.DataError:
  """The error for a file that is not what it should be."""
  with path.open('rb') as f:
    if is_html(f.read(512)):
      reason = f'it is an HTML page ({reason})'
  size = path.stat().st_size
  return errors.DataError(
    f'{path} ({size} bytes) is damaged: {reason}. Download it again.'
  )


def is_html(content: bytes) -> bool:
  """Whether it begins like a page, as failed downloads do."""
  head = content[:512].lstrip().lower()
  return head.startswith((b'<html', b'<!doctype', b'<?xml'))


def check_archive(
  folder: pathlib.Path, name: str, is_archive: Callable[[pathlib.Path], bool]
) -> None:
  """Refuses a folder that does not hold the original archive of a set.

  Args:
    folder: where it should be.
    name: its official name.
    is_archive: whether a file is an archive of its kind.

  Raises:
    errors.DataError: if it is not there or not an archive.
  """
  path = folder / name
  if not path.is_file():
    raise errors.DataError(
      f'{folder} does not hold the original archive {name}, which the TFDS set'
      ' is prepared from.'
    )
  if not is_archive(path):
    raise damaged(path, 'it is not an archive, or cut off')


def check_member(archive: pathlib.Path, name: str) -> None:
  """Refuses the name of an archive's member that leads out of the archive.

  Raises:
    errors.DataError: names the archive and the member.
  """
  path = pathlib.PurePosixPath(name.replace('\\', '/'))
  drive = path.parts and path.parts[0].endswith(':')
  if path.is_absolute() or '..' in path.parts or drive:
    raise errors.DataError(
      f'{archive} holds a file named {name!r}, outside of the archive: it is'
      ' not the official one. Download it again.'
    )
