"""Configs on a command line: a file, its preset, and fields that are changed.

A config file has a function ``get_config(preset='')`` which returns an
`ml_collections.ConfigDict`. Fields are read by the kind of the value that they
have there; what a value must be is said by `configuration.check` alone.
"""

from collections.abc import Sequence
import difflib
import importlib.machinery
import importlib.util
import pathlib
import sys
import traceback
from typing import Any

import ml_collections

from sinkformer_jax import errors

_PREFIXES = ('--config.', '-config.')
_NEGATIONS = ('--noconfig.', '-noconfig.')
_BOOLEANS = {
  **dict.fromkeys(('true', 't', 'yes', 'y', 'on', '1'), True),
  **dict.fromkeys(('false', 'f', 'no', 'n', 'off', '0'), False),
}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Takes the config's fields out of a command line.

  Args:
    argv: with ``--config.FIELD=VALUE``, ``--config.FIELD VALUE``, or, for what
      is True or False, ``--config.FIELD`` and ``--noconfig.FIELD``.

  Returns:
    What is left of it, and ``['FIELD=VALUE', ...]``.
  """
  rest, fields = [], []
  arguments = iter(range(len(argv)))
  for i in arguments:
    argument, following = argv[i], argv[i + 1 : i + 2]
    name, equals, _ = argument.partition('=')
    _, _, field = argument.partition('.')
    if argument == '--':
      return [*rest, *argv[i:]], fields
    if name.startswith(_NEGATIONS):
      # With a value it is nothing that can be meant; it is refused by `load`.
      fields.append(field if equals else f'{field}=false')
    elif not name.startswith(_PREFIXES):
      rest.append(argument)
    elif equals:
      fields.append(field)
    elif following and not following[0].startswith('-'):
      fields.append(f'{field}={following[0]}')
      next(arguments)
    else:
      fields.append(f'{field}=true')
  return rest, fields


def load(path: str, overrides: Sequence[str] = ()) -> ml_collections.ConfigDict:
  """Loads a config file and changes fields.

  Args:
    path: of the file, with a preset after a colon if there is one.
    overrides: as ``'model.num_layers=12'``. A value that does not fit its field
      is taken as it stands, and refused by `configuration.check`.

  Returns:
    The config; no fields can be added to it.

  Raises:
    errors.ConfigError: if the file cannot be used, or a field is not there.
  """
  config = _get_config(path)
  texts = {}
  for override in overrides:
    field, _, text = override.partition('=')
    texts.setdefault(field, []).append(text)
  for field, values in texts.items():
    section, name = _place(config, field)
    default = section[name]
    if isinstance(default, ml_collections.ConfigDict):
      raise errors.ConfigError(
        f'config.{field} is a section: give its fields, as in'
        f' --config.{field}.{next(iter(default), "NAME")}=VALUE.'
      )
    if isinstance(default, tuple):
      # A list may be given item by item.
      value = tuple(x for text in values for x in _items(text, default))
    else:
      value = _value(values[-1], default)
    with section.ignore_type():
      section[name] = value
  return config.lock()


def _get_config(path):
  name, *preset = path.split(':', 1)
  if not pathlib.Path(name).is_file():
    raise errors.ConfigError(f'--config: there is no file {name!r}.')
  loader = importlib.machinery.SourceFileLoader('config_file', name)
  spec = importlib.util.spec_from_loader(loader.name, loader)
  module = importlib.util.module_from_spec(spec)
  # Where dataclasses of the file look for it.
  sys.modules[loader.name] = module
  try:
    loader.exec_module(module)
    config = module.get_config(*preset)
  except (Exception, SystemExit) as error:
    # The file is code, which may raise anything.
    last = traceback.extract_tb(error.__traceback__)[-1]
    raise errors.ConfigError(
      f'--config={path}: {error} ({type(error).__name__},'
      f' {last.filename}:{last.lineno})'
    ) from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.ConfigError(
      f'--config={path}: get_config returned a {type(config).__name__}, not an'
      ' ml_collections.ConfigDict.'
    )
  return config


def _place(config, field):
  """The section that a field is in, and its name there."""
  section, (*sections, name) = config, field.split('.')
  for part in [*sections, name]:
    known = (
      list(section) if isinstance(section, ml_collections.ConfigDict) else []
    )
    if part not in known:
      near = difflib.get_close_matches(part, known, n=1)
      hint = f'Did you mean "{near[0]}"? ' if near else ''
      listed = f'There is {", ".join(known)}.' if known else ''
      raise errors.ConfigError(f'no such field: config.{field}. {hint}{listed}')
    parent, section = section, section[part]
  return parent, name


def _value(text: str, default: Any) -> Any:
  """What a text means for a field; the text itself if it means nothing."""
  if isinstance(default, bool):
    return _BOOLEANS.get(text.strip().lower(), text)
  if isinstance(default, int):
    return _integer(text)
  if isinstance(default, float):
    return _float(text)
  return text


def _integer(text):
  try:
    return int(text, 0)
  except ValueError:
    pass
  # As 1e4 and 1000.0; beyond 2 ** 53 such a number is not exact.
  number = _float(text)
  if isinstance(number, float) and number.is_integer() and number < 2**53:
    return int(number)
  return number


def _float(text):
  try:
    return float(text)
  except ValueError:
    return text


def _items(text, default):
  """Values of ``(1, 2)``, ``[1, 2]`` or ``1,2``."""
  text = text.strip()
  if text[:1] + text[-1:] in ('()', '[]'):
    text = text[1:-1].strip()
  items = text.split(',')
  if not items[-1].strip():
    items.pop()
  return [_value(x.strip(), default[0] if default else 0) for x in items]
