"""A run directory: claimed for one config, with a record of every start."""

from collections.abc import Mapping
import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import logging
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax
import ml_collections

from sinkformer_jax import configuration
from sinkformer_jax import data
from sinkformer_jax import errors

logger = logging.getLogger(__name__)

# Where the data lies may differ between machines; that it is the same data is
# checked by its fingerprint.
MAY_DIFFER = ('data.dir', 'data.source')
_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


@contextlib.contextmanager
def writing(path: pathlib.Path):
  """Says which file could not be written.

  Raises:
    errors.RunError: in place of the OSError of a full disk and the like.
  """
  try:
    yield
  except OSError as error:
    raise errors.RunError(
      f'{path} could not be written: {error.strerror or error}. Checkpoints'
      ' are intact; the same command goes on from the newest.'
    ) from error


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file whole or not at all."""
  temporary = path.with_name(path.name + '.tmp')
  with writing(path):
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON file whole or not at all."""
  write_text(path, json.dumps(content, indent=2, allow_nan=False) + '\n')


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON file of a run.

  Raises:
    errors.RunError: if it is not there or damaged.
  """
  try:
    content = json.loads(path.read_text())
  except FileNotFoundError as error:
    hint = ''
    if (path.parent.parent / path.name).exists():
      hint = f' Did you mean {path.parent.parent}?'
    elif (path.parent.parent.parent / path.name).exists():
      hint = f' Did you mean {path.parent.parent.parent}?'
    raise errors.RunError(
      f'{path.parent} is not a run directory: it has no {path.name}.{hint}'
    ) from error
  except (OSError, ValueError, RecursionError) as error:
    raise errors.RunError(f'{path} cannot be read: {error}') from error
  if not isinstance(content, dict):
    raise errors.RunError(f'{path} is damaged: it does not hold an object.')
  return content


@contextlib.contextmanager
def claim(workdir: pathlib.Path, config: ml_collections.ConfigDict):
  """Makes the directory this run's, for as long as the context lasts.

  Raises:
    errors.RunError: if it cannot be written, is in use by another process, or
      belongs to a run with another config.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / '.lock').open('w')
  except OSError as error:
    raise errors.RunError(
      f'workdir {workdir} cannot be used: {error.strerror}. Choose another with'
      ' --workdir.'
    ) from error
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise errors.RunError(
        f'workdir {workdir} is in use by another process.'
      ) from error
    check_config(workdir, config)
    yield


def check_config(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Refuses a directory that belongs to a run with another config.

  Raises:
    errors.RunError: names the fields.
  """
  saved = (workdir / 'checkpoints').glob('*')
  has_result = (workdir / 'result.json').exists()
  if not has_result and not any(x.name.isdigit() for x in saved):
    # Nothing depends on the config yet.
    return
  say_filled_in(workdir, read_config(workdir)[1])
  changed = changed_fields(workdir, config)
  if changed:
    listed = ', '.join(
      f'config.{field} was {old!r} and is now {new!r}'
      for field, (old, new) in changed.items()
    )
    raise errors.RunError(
      f'{workdir} belongs to a run with another config: {listed}. Choose'
      ' another --workdir, or the config of that run.'
    )


def changed_fields(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> dict[str, tuple[Any, Any]]:
  """Fields by which a config is not that of a run: ``{field: (old, new)}``."""
  old, _ = read_config(workdir)
  changed = configuration.differences(old, config.to_dict())
  return {k: v for k, v in changed.items() if k not in MAY_DIFFER}


def read_config(
  workdir: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The config of a run, as a nested dict, and what was filled in.

  Fields that came after the run have the value by which the code does what it
  did then (`configuration.complete`).

  Raises:
    errors.RunError: if there is no such run, or its config is damaged.
  """
  fields = read_json(workdir / 'config.json')
  return configuration.complete(_tuples(fields))


def say_filled_in(workdir: pathlib.Path, filled_in: Mapping[str, Any]) -> None:
  """Logs what `read_config` has filled in."""
  for field, value in filled_in.items():
    logger.warning(
      '%s is from before config.%s: read as %r, which is what was done then.',
      workdir / 'config.json',
      field,
      value,
    )


def _tuples(fields):
  """JSON made lists of a config's tuples."""
  if isinstance(fields, dict):
    return {name: _tuples(value) for name, value in fields.items()}
  return tuple(fields) if isinstance(fields, list) else fields


def finished_result(workdir: pathlib.Path) -> dict[str, Any] | None:
  """What `result.json` of a finished run holds; None if it has not finished.

  Raises:
    errors.RunError: if it is damaged.
  """
  path = workdir / 'result.json'
  if not path.exists():
    return None
  logger.info('%s is finished; nothing to do.', workdir)
  return read_json(path)


def record_start(
  workdir: pathlib.Path, info: data.DatasetInfo, step: int
) -> None:
  """Adds this start to `provenance.json`.

  Raises:
    errors.RunError: if the run began with other data.
  """
  path = workdir / 'provenance.json'
  dataset = {
    'name': info.name,
    'num_classes': info.num_classes,
    'input_shape': list(info.input_shape),
    'splits': dict(info.splits),
    **info.provenance,
  }
  starts = []
  if path.exists():
    old = _read_provenance(workdir)
    if old['data']['fingerprint'] != dataset['fingerprint']:
      raise errors.RunError(
        f'{workdir} was trained on other data: {old["data"]["origin"]}, not'
        f' {dataset["origin"]}. Choose another --workdir, or that data.'
      )
    starts = old['starts']
  start = {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'step': step,
    'command': sys.argv,
    'git_commit': _git_commit(),
    'python': platform.python_version(),
    'versions': {x: importlib.metadata.version(x) for x in _PACKAGES},
    'platform': jax.default_backend(),
    'devices': [x.device_kind for x in jax.devices()],
  }
  _, filled_in = read_config(workdir)
  if filled_in:
    start['filled_in'] = filled_in
  write_json(path, {'data': dataset, 'starts': [*starts, start]})


def read_info(workdir: pathlib.Path) -> data.DatasetInfo:
  """The data set of a run, without loading it."""
  recorded = _read_provenance(workdir)['data']
  return data.DatasetInfo(
    name=recorded.pop('name'),
    num_classes=recorded.pop('num_classes'),
    input_shape=tuple(recorded.pop('input_shape')),
    splits=recorded.pop('splits'),
    provenance=recorded,
  )


def _read_provenance(workdir):
  path = workdir / 'provenance.json'
  content = read_json(path)
  if not _describes_data(content.get('data')):
    raise errors.RunError(f'{path} is damaged: it does not describe the data.')
  starts = content.get('starts')
  if not isinstance(starts, list) or not all(
    isinstance(x, dict) for x in starts
  ):
    raise errors.RunError(f'{path} is damaged: it does not list the starts.')
  return content


def _describes_data(recorded):
  kinds = {
    'name': str,
    'num_classes': int,
    'input_shape': list,
    'splits': dict,
    'origin': str,
    'notice': str,
    'fingerprint': str,
  }
  if not isinstance(recorded, dict):
    return False
  if not all(isinstance(recorded.get(k), kind) for k, kind in kinds.items()):
    return False
  sizes = [*recorded['input_shape'], *recorded['splits'].values()]
  return all(isinstance(x, int) and x > 0 for x in sizes)


def _git_commit():
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
