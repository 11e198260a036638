"""Paths that users give, and the commit of the code."""

import os
import pathlib
import subprocess

from sinkformer_jax import errors


def resolve(path: str | os.PathLike, name: str) -> pathlib.Path:
  """Makes a path absolute, with ``~`` resolved.

  Args:
    path: the path.
    name: what the user knows it by, for the error.

  Raises:
    errors.UserError: for the home directory of an unknown user, and for names
      that Orbax and JSON could not hold.
  """
  text = os.fspath(path)
  if '\0' in text or text.encode(errors='replace').decode() != text:
    raise errors.UserError(f'{name}={text!r} is not text in UTF-8.')
  try:
    return pathlib.Path(path).expanduser().absolute()
  except RuntimeError as error:
    raise errors.UserError(f'{name}={path}: {error}') from error


def cache_dir() -> pathlib.Path:
  """Where what can be made again is kept between runs.

  $SINKFORMER_CACHE_DIR, or else ``sinkformer_jax`` in the user's cache.
  """
  own = os.environ.get('SINKFORMER_CACHE_DIR')
  if own:
    return resolve(own, '$SINKFORMER_CACHE_DIR')
  users = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return resolve(users, '$XDG_CACHE_HOME') / 'sinkformer_jax'


def data_dir(given: str) -> str:
  """The directory of data sets: `given`, or else $SINKFORMER_DATA_DIR."""
  return given or os.environ.get('SINKFORMER_DATA_DIR', '')


def write_whole(path: pathlib.Path, content: bytes) -> None:
  """Writes a file whole or not at all, beside others who do the same."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(content)
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)


def git_commit() -> str:
  """The commit of this code, '' where it is not a git checkout."""
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
  folder = pathlib.Path(__file__).parent
  try:
    described = subprocess.run(
      command, cwd=folder, capture_output=True, text=True, check=False
    )
  except FileNotFoundError:
    return ''
  return described.stdout.strip()
