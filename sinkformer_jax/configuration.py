"""Checks of a config before data or devices are touched."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import copy
import itertools
import json
from typing import Any

import ml_collections

from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import models

# A rule says in words what a value must be, or None if it is right.
Rule = Callable[[Any], str | None]


# Steps are counted in 32 bits, and sizes beyond this fit no machine.
_MOST_STEPS = 2**31
_MOST_UNITS = 2**20


def _integer(least: int, below: int = _MOST_STEPS) -> Rule:
  words = f'an integer of at least {least} and below {below}'

  def rule(value):
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return None if is_integer and least <= value < below else words

  return rule


def _number(least: float, below: float = float('inf')) -> Rule:
  words = f'a number from {least:g}'
  words += f' to below {below:g}' if below < float('inf') else ' up'

  def rule(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and least <= value < below else words

  return rule


def _one_of(choices: Collection[str]) -> Rule:
  # Looked at when a config is checked: users may add to the choices.
  words = lambda: f'one of {", ".join(choices)}'
  return lambda x: None if isinstance(x, str) and x in choices else words()


def _boolean(value):
  return None if isinstance(value, bool) else 'True or False'


def _text(value):
  if isinstance(value, str) and value != 'None':
    return None
  return "a text; '' if unset"


def _steps(value):
  if isinstance(value, tuple) and all(_integer(0)(x) is None for x in value):
    return None
  return 'a tuple of steps, like (0, 100)'


def _lengths(value):
  if (
    isinstance(value, tuple)
    and all(_integer(1)(x) is None for x in value)
    and all(a < b for a, b in itertools.pairwise(value))
  ):
    return None
  return 'a tuple of rising lengths, like (48, 72), or ()'


RULES: dict[str, Rule] = {
  'seed': _integer(0, below=2**32),
  'total_steps': _integer(1),
  'batch_size': _integer(1, below=_MOST_UNITS),
  'eval_batch_size': _integer(1, below=_MOST_UNITS),
  'log_every_steps': _integer(1),
  'eval_every_steps': _integer(1),
  'checkpoint.every_steps': _integer(1),
  'checkpoint.keep': _integer(1),
  'checkpoint.keep_steps': _steps,
  'data.name': _one_of(data.DATASETS),
  'data.source': _text,
  'data.dir': _text,
  'model.name': _one_of(models.MODELS),
  'model.num_layers': _integer(1, below=_MOST_UNITS),
  'model.width': _integer(1, below=_MOST_UNITS),
  'model.num_heads': _integer(1, below=_MOST_UNITS),
  'model.ffn_dim': _integer(1, below=_MOST_UNITS),
  'model.pooling': _one_of(models.POOLINGS),
  'model.normalizer': _one_of(attention.NORMALIZERS),
  'model.num_iters': _integer(0, below=_MOST_UNITS),
  'model.norm_position': _one_of(('pre', 'post')),
  'model.skip': _boolean,
  'model.ffn': _boolean,
  'model.talking_heads': _boolean,
  'model.deepnorm': _boolean,
  'model.dropout_rate': _number(0, 1),
  'model.dtype': _one_of(('float32', 'bfloat16')),
  'model.remat': _boolean,
  'optimizer.learning_rate': _number(0),
  'optimizer.schedule': _one_of(('constant', 'cosine', 'step')),
  'optimizer.warmup_steps': _integer(0),
  'optimizer.step_boundaries': _steps,
  'optimizer.step_factor': _number(0),
  'optimizer.b1': _number(0, 1),
  'optimizer.b2': _number(0, 1),
  'optimizer.epsilon': _number(0),
  'optimizer.weight_decay': _number(0),
  'optimizer.clip_norm': _number(0),
}
# Fields that only some models and data sets have.
MODEL_RULES: dict[str, dict[str, Rule]] = {
  'vit': {'model.patch_size': _integer(1, below=_MOST_UNITS)},
  'text': {'model.positions': _one_of(models.POSITIONS)},
}
_TEXT_RULES: dict[str, Rule] = {
  'data.max_length': _integer(1, below=_MOST_UNITS),
  'data.bucket_lengths': _lengths,
  'data.vocab_size': _integer(
    256, below=_MOST_UNITS
  ),  # Every byte has a piece.
  'data.tokenizer': _text,
}
DATA_RULES: dict[str, dict[str, Rule]] = {
  'ag_news': _TEXT_RULES,
  'cats_vs_dogs': {
    'data.image_size': _integer(1, below=_MOST_UNITS),
    'data.augment': _boolean,
  },
  'imdb': _TEXT_RULES,
  'mnist': {},
}


# Fields that came after runs were saved without them, each with the value by
# which the code does what it did then.
ADDED: dict[str, Any] = {}


def complete(
  saved: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Fills in the fields that a saved config is older than.

  Args:
    saved: the nested dict of a saved config.

  Returns:
    The whole nested dict, and what was filled in: ``{'model.width': 128}``.
  """
  whole = copy.deepcopy(dict(saved))
  known = flatten(whole)
  filled_in = {k: v for k, v in ADDED.items() if k not in known}
  for field, value in filled_in.items():
    *sections, name = field.split('.')
    place = whole
    for section in sections:
      place = place.setdefault(section, {})
    place[name] = value
  return whole, filled_in


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses a config that could not be trained.

  Args:
    config: a whole config.

  Raises:
    errors.ConfigError: names the field, its value, and what it must be.
  """
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.ConfigError(
      f'the config is a {type(config).__name__}, not an'
      ' ml_collections.ConfigDict.'
    )
  fields = flatten(config.to_dict())
  for field in ('data.name', 'model.name'):
    _check_field(fields, field, RULES[field])
  reads = models.MODELS[config.model.name]
  has = data.DATASETS[config.data.name].KIND
  if reads != has:
    raise errors.ConfigError(
      f'config.model.name={config.model.name!r} is for {reads}s,'
      f' config.data.name={config.data.name!r} has {has}s.'
    )
  names = f'model {config.model.name!r} on {config.data.name!r}'
  rules = {
    **RULES,
    **MODEL_RULES[config.model.name],
    # A data set of the user's own has no fields but what all have.
    **DATA_RULES.get(config.data.name, {}),
  }
  for field in sorted(fields.keys() - rules.keys()):
    raise errors.ConfigError(
      f'config.{field} is not a field that is known of the {names}.'
    )
  for field, rule in rules.items():
    _check_field(fields, field, rule)
  _check_combinations(config)


def _check_field(fields, field, rule):
  if field not in fields:
    raise errors.ConfigError(f'config.{field} is missing.')
  wanted = rule(fields[field])
  if wanted:
    raise errors.ConfigError(
      f'config.{field}={fields[field]!r} must be {wanted}.'
    )


def _check_combinations(config):
  model, optimizer = config.model, config.optimizer
  dataset = data.DATASETS[config.data.name]
  if model.width % model.num_heads:
    raise errors.ConfigError(
      f'config.model.num_heads={model.num_heads} does not divide'
      f' config.model.width={model.width}.'
    )
  if dataset.KIND == 'image':
    height, width, _ = dataset.input_shape(config.data)
    if height % model.patch_size or width % model.patch_size:
      raise errors.ConfigError(
        f'config.model.patch_size={model.patch_size} does not divide the'
        f' {height} x {width} images of {config.data.name}.'
      )
  elif config.data.bucket_lengths[-1:] >= (config.data.max_length,):
    raise errors.ConfigError(
      f'config.data.bucket_lengths={config.data.bucket_lengths} must stay below'
      f' config.data.max_length={config.data.max_length}.'
    )
  if model.deepnorm and model.norm_position != 'post':
    raise errors.ConfigError(
      'config.model.deepnorm=True needs config.model.norm_position=post.'
    )
  sources = ('auto', *dataset.SOURCES)
  if config.data.source not in sources:
    raise errors.ConfigError(
      f'config.data.source={config.data.source!r} must be one of'
      f' {", ".join(sources)}.'
    )
  if optimizer.warmup_steps > config.total_steps:
    raise errors.ConfigError(
      f'config.optimizer.warmup_steps={optimizer.warmup_steps} is more than'
      f' config.total_steps={config.total_steps}.'
    )
  if bool(optimizer.step_boundaries) != (optimizer.schedule == 'step'):
    raise errors.ConfigError(
      f'config.optimizer.schedule={optimizer.schedule!r} does not go with'
      f' config.optimizer.step_boundaries={optimizer.step_boundaries}: they are'
      " for 'step', which needs them."
    )
  steps = (optimizer.warmup_steps, *optimizer.step_boundaries)
  if any(a >= b for a, b in itertools.pairwise(steps)):
    raise errors.ConfigError(
      f'config.optimizer.step_boundaries={optimizer.step_boundaries} must rise,'
      f' from above config.optimizer.warmup_steps={optimizer.warmup_steps}.'
    )


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """``{'model.width': 128, ...}`` of a nested dict."""
  fields = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      fields.update(flatten(value, f'{prefix}{name}.'))
    else:
      fields[prefix + name] = value
  return fields


def differences(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """Fields that differ between nested dicts: ``{field: (old, new)}``.

  Tuples count as the lists that JSON makes of them.
  """
  old, new = (flatten(json.loads(json.dumps(x))) for x in (old, new))
  return {
    field: (old.get(field), new.get(field))
    for field in sorted(old.keys() | new.keys())
    if old.get(field) != new.get(field)
  }
