"""A run directory: claimed for one config, with a record of every start."""

from collections.abc import Mapping
import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import pathlib
import platform
import secrets
import subprocess
import sys
from typing import Any

import jax
import ml_collections

from sinkformer_jax import configuration
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.training import hosts

# Where the data lies may differ between machines; that it is the same data is
# checked by its fingerprint.
_MAY_DIFFER = ('data.dir', 'data.source')
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
  """Writes a file whole or not at all; the first process alone does."""
  if not hosts.is_first():
    return
  temporary = path.with_name(path.name + '.tmp')
  with writing(path):
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON file whole or not at all; the first process alone does."""
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
  except (OSError, ValueError) as error:
    raise errors.RunError(f'{path} cannot be read: {error}') from error
  if not isinstance(content, dict):
    raise errors.RunError(f'{path} is damaged: it does not hold an object.')
  return content


@contextlib.contextmanager
def claim(workdir: pathlib.Path, config: ml_collections.ConfigDict):
  """Makes the directory this run's, for as long as the context lasts.

  Several processes of one run claim it together.

  Raises:
    errors.RunError: if it cannot be written, is in use by another process,
      belongs to a run with another config, or is not the same directory for
      all processes of this one.
  """
  fields = configuration.flatten(config.to_dict())
  hosts.check_same(
    {f'config.{k}': v for k, v in fields.items() if k not in _MAY_DIFFER}
  )
  start = hosts.from_first(secrets.randbits(31))
  with contextlib.ExitStack() as held:
    with hosts.first_then_others():
      if hosts.is_first():
        held.enter_context(_lock(workdir, start))
      elif not _has_lock_of(workdir, start):
        raise errors.RunError(
          f'workdir {workdir} is not the directory that process 0 writes to.'
          ' Give all processes the same --workdir, on a disk that they share.'
        )
      _check_config(workdir, config)
    yield


@contextlib.contextmanager
def _lock(workdir, start):
  path = workdir / '.lock'
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = path.open('a')
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
    with writing(path):
      path.write_text(str(start))
    yield


def _has_lock_of(workdir, start):
  path = workdir / '.lock'
  return path.is_file() and path.read_text() == str(start)


def _check_config(workdir, config):
  saved = (workdir / 'checkpoints').glob('*')
  has_result = (workdir / 'result.json').exists()
  if not has_result and not any(x.name.isdigit() for x in saved):
    # Nothing depends on the config yet.
    return
  old = read_json(workdir / 'config.json')
  changed = configuration.differences(old, config.to_dict())
  changed = {k: v for k, v in changed.items() if k not in _MAY_DIFFER}
  if changed:
    listed = ', '.join(
      f'config.{field} was {old!r} and is now {new!r}'
      for field, (old, new) in changed.items()
    )
    raise errors.RunError(
      f'{workdir} belongs to a run with another config: {listed}. Choose'
      ' another --workdir, or the config of that run.'
    )


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
    'processes': jax.process_count(),
  }
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
  known = {'name', 'num_classes', 'input_shape', 'splits', 'fingerprint'}
  recorded = content.get('data')
  if not isinstance(recorded, dict) or known - recorded.keys():
    raise errors.RunError(f'{path} is damaged: it does not describe the data.')
  return content


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
