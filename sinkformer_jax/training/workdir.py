"""A run directory: claimed for one config, with a record of every start."""

from collections.abc import Mapping
import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import secrets
import sys
from typing import Any

import jax
import ml_collections

from sinkformer_jax import configuration
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import numerics
from sinkformer_jax import paths
from sinkformer_jax.training import hosts

logger = logging.getLogger(__name__)

# Where the data lies may differ between machines; that it is the same data, and
# the same tokenizer, is checked by its content.
MAY_DIFFER = ('data.dir', 'data.source', 'data.tokenizer')
_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'numpy',
  'pillow',
  'sentencepiece',
  'tokenizers',
)


# Where a training that stopped at values that are not finite says so.
DIVERGED = 'diverged.json'


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
    temporary.write_text(text, 'utf-8')
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
    content = json.loads(path.read_text('utf-8'))
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

  Several processes of one run claim it together.

  Raises:
    errors.RunError: if it cannot be written, is in use by another process,
      belongs to a run with another config, or is not the same directory for
      all processes of this one.
  """
  fields = configuration.flatten(config.to_dict())
  hosts.check_same(
    {f'config.{k}': v for k, v in fields.items() if k not in MAY_DIFFER}
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
      check_config(workdir, config)
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


def _has_checkpoints(workdir):
  saved = (workdir / 'checkpoints').glob('*')
  return any(x.name.isdigit() for x in saved)


def check_config(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """Refuses a directory that belongs to a run with another config.

  Raises:
    errors.RunError: names the fields.
  """
  has_result = (workdir / 'result.json').exists()
  if not has_result and not _has_checkpoints(workdir):
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


def check_data(workdir: pathlib.Path, info: data.DatasetInfo) -> None:
  """Refuses data that is not what the run began with, if it has begun.

  Raises:
    errors.RunError: if the examples or the tokenizer are others.
  """
  if not (workdir / 'provenance.json').exists():
    return
  old, new = _read_provenance(workdir)['data'], info.provenance
  if old['fingerprint'] != new['fingerprint']:
    raise errors.RunError(
      f'{workdir} was trained on other data: {old["origin"]}, not'
      f' {new["origin"]}. Choose another --workdir, or that data.'
    )
  check_tokenizer(workdir, old, new)


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

  Warns of settings that are not those of the start before.
  """
  path = workdir / 'provenance.json'
  dataset = {
    'name': info.name,
    'num_classes': info.num_classes,
    'input_shape': list(info.input_shape),
    'vocab_size': info.vocab_size,
    'splits': dict(info.splits),
    **info.provenance,
  }
  starts = _read_provenance(workdir)['starts'] if path.exists() else []
  start = {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'step': step,
    'command': sys.argv,
    'git_commit': paths.git_commit(),
    'python': platform.python_version(),
    'versions': {x: importlib.metadata.version(x) for x in _PACKAGES},
    'platform': jax.default_backend(),
    'devices': [x.device_kind for x in jax.devices()],
    'processes': jax.process_count(),
    'settings': numerics.settings(),
  }
  if starts:
    _warn_of_settings(path, starts[-1], start['settings'])
  _, filled_in = read_config(workdir)
  if filled_in:
    start['filled_in'] = filled_in
  write_json(path, {'data': dataset, 'starts': [*starts, start]})


def _warn_of_settings(path, last, settings):
  # Starts of earlier versions have recorded none.
  before = last.get('settings', settings)
  for name in sorted(settings):
    if before.get(name, settings[name]) != settings[name]:
      logger.warning(
        '%s was %r at the last start (%s) and is %r now: results may differ'
        ' from those of a run that was never stopped.',
        name,
        before[name],
        path,
        settings[name],
      )


def read_info(workdir: pathlib.Path) -> data.DatasetInfo:
  """The data set of a run, without loading it."""
  recorded = _read_provenance(workdir)['data']
  return data.DatasetInfo(
    name=recorded.pop('name'),
    num_classes=recorded.pop('num_classes'),
    input_shape=tuple(recorded.pop('input_shape')),
    splits=recorded.pop('splits'),
    vocab_size=recorded.pop('vocab_size', None),
    provenance=recorded,
  )


def save_tokenizer(workdir: pathlib.Path, dataset: data.Dataset) -> None:
  """Keeps the tokenizer of texts as ``tokenizer.json`` or ``.model``."""
  if dataset.tokenizer and hosts.is_first():
    path = workdir / f'tokenizer{dataset.tokenizer.suffix}'
    with writing(path):
      paths.write_whole(path, dataset.tokenizer.content)


def own_tokenizer(workdir: pathlib.Path) -> pathlib.Path | None:
  """The file of the tokenizer that a run has kept; None without."""
  for suffix in ('.json', '.model'):
    path = workdir / f'tokenizer{suffix}'
    if path.exists():
      return path
  return None


def data_config(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> ml_collections.ConfigDict:
  """`config.data`; a run that goes on keeps to its own tokenizer."""
  section = config.data.copy_and_resolve_references()
  path = own_tokenizer(workdir)
  # Without checkpoints it may be left from another config.
  if path and _has_checkpoints(workdir) and not section.tokenizer:
    section.tokenizer = str(path)
  return section


def use_own_tokenizer(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  info: data.DatasetInfo,
) -> None:
  """Lets `config.data` name the tokenizer that a run has kept, if it has.

  Raises:
    errors.RunError: if it is lost, or not the one of the checkpoints.
  """
  recorded = info.provenance.get('tokenizer')
  if not recorded:
    return
  path = own_tokenizer(workdir)
  if path is None:
    raise errors.RunError(f'{workdir} has lost its tokenizer.json or .model.')
  sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
  if sha256 != recorded['sha256']:
    raise errors.RunError(
      f'{path} does not belong to the checkpoints of the run: its sha256 is'
      f' {sha256}, theirs was {recorded["sha256"]}.'
    )
  config.data.tokenizer = str(path)


def check_tokenizer(
  workdir: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
  """Refuses a tokenizer that is not the one of a run's checkpoints.

  Args:
    workdir: the run directory.
    old: provenance of the run's data.
    new: provenance of the data to be used.

  Raises:
    errors.RunError: names both.
  """
  ours, theirs = (x.get('tokenizer', {}) for x in (old, new))
  if ours.get('sha256') != theirs.get('sha256'):
    raise errors.RunError(
      f'the vocabulary of {theirs["pieces"]} pieces ({theirs["origin"]}) does'
      f' not belong to the checkpoints of {workdir}, which have one of'
      f' {ours["pieces"]} pieces. Leave config.data.tokenizer unset: the run'
      ' has kept its own.'
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
