"""Checks of a config before data or devices are touched."""

from collections.abc import Mapping
import copy
import itertools
import json
from typing import Any

import ml_collections

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import normalizers
from sinkformer_jax import rules

RULES: dict[str, rules.Rule] = {
  'seed': rules.integer(0, below=2**32),
  'total_steps': rules.integer(1),
  'batch_size': rules.integer(1, below=rules.MOST_UNITS),
  'eval_batch_size': rules.integer(1, below=rules.MOST_UNITS),
  'log_every_steps': rules.integer(1),
  'eval_every_steps': rules.integer(1),
  'checkpoint.every_steps': rules.integer(1),
  'checkpoint.keep': rules.integer(1),
  'checkpoint.keep_steps': rules.steps,
  'data.name': rules.one_of(data.DATASETS),
  'data.dir': rules.text,
  'model.name': rules.one_of(models.MODELS),
  'model.num_layers': rules.integer(1, below=rules.MOST_UNITS),
  'model.width': rules.integer(1, below=rules.MOST_UNITS),
  'model.num_heads': rules.integer(1, below=rules.MOST_UNITS),
  'model.ffn_dim': rules.integer(1, below=rules.MOST_UNITS),
  'model.pooling': rules.one_of(models.POOLINGS),
  'model.normalizer': rules.one_of(normalizers.NORMALIZERS),
  'model.num_iters': rules.integer(
    0, below=rules.MOST_UNITS, note='; 0 means softmax'
  ),
  'model.norm_position': rules.one_of(('pre', 'post')),
  'model.skip': rules.boolean,
  'model.ffn': rules.boolean,
  'model.talking_heads': rules.boolean,
  'model.deepnorm': rules.boolean,
  'model.dropout_rate': rules.number(0, 1, note='; 0 means no dropout'),
  'model.dtype': rules.one_of(('float32', 'bfloat16')),
  'model.remat': rules.boolean,
  'optimizer.learning_rate': rules.number(0),
  'optimizer.schedule': rules.one_of(('constant', 'cosine', 'step')),
  'optimizer.warmup_steps': rules.integer(0, note='; 0 means no warmup'),
  'optimizer.step_boundaries': rules.steps,
  'optimizer.step_factor': rules.number(0),
  'optimizer.b1': rules.number(0, 1),
  'optimizer.b2': rules.number(0, 1),
  'optimizer.epsilon': rules.number(0),
  'optimizer.weight_decay': rules.number(0, note='; 0 means no decay'),
  'optimizer.clip_norm': rules.number(0, note='; 0 means no clipping'),
}

# Fields that do not change what is learned; that the data is the same is
# checked by its content.
WITHOUT_EFFECT = (
  'model.remat',
  'data.source',
  'data.dir',
  'data.tokenizer',
  'eval_batch_size',
  'log_every_steps',
  'eval_every_steps',
  'checkpoint.every_steps',
  'checkpoint.keep',
  'checkpoint.keep_steps',
)
# What runs that are compared may differ in: what is compared, and these.
MAY_DIFFER = (
  'seed',
  'model.normalizer',
  'model.num_iters',
  *WITHOUT_EFFECT,
)

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
  model = models.MODELS[config.model.name]
  dataset = data.DATASETS[config.data.name]
  reads, has = model.KIND, dataset.KIND
  if reads != has:
    raise errors.ConfigError(
      f'config.model.name={config.model.name!r} is for {reads}s,'
      f' config.data.name={config.data.name!r} has {has}s.'
    )
  names = f'model {config.model.name!r} on {config.data.name!r}'
  # A data set of the user's own may have no fields but what all have.
  known = {**RULES, **model.RULES, **getattr(dataset, 'RULES', {})}
  known['data.source'] = rules.one_of(('auto', *dataset.SOURCES))
  for field in sorted(fields.keys() - known.keys()):
    raise errors.ConfigError(
      f'config.{field} is not a field that is known of the {names}.'
    )
  for field, rule in known.items():
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
  if model.normalizer == 'sinkhorn_half_updates' and not model.num_iters:
    raise errors.ConfigError(
      'config.model.num_iters=0 must be at least 1 with'
      " config.model.normalizer='sinkhorn_half_updates', which counts"
      ' half-updates.'
    )
  if model.deepnorm and model.norm_position != 'post':
    raise errors.ConfigError(
      'config.model.deepnorm=True needs config.model.norm_position=post.'
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
