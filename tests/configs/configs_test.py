"""Shipped configs, and what is refused."""

import importlib
import pathlib
import re

import pytest

from sinkformer_jax import configuration
from sinkformer_jax import errors
from tests.conftest import ROOT

CONFIGS = sorted(x.stem for x in (ROOT / 'configs').glob('[a-z]*.py'))
PRESETS = ('', 'quick', 'tiny')
SETS = [x.removesuffix('_softmax') for x in CONFIGS if x.endswith('_softmax')]


def get(name, preset=''):
  return importlib.import_module(f'configs.{name}').get_config(preset)


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('name', CONFIGS)
def test_shipped_configs_are_right(name, preset):
  config = get(name, preset)
  configuration.check(config)
  # A field of None or of a list could not be overridden on the command line.
  for value in configuration.flatten(config.to_dict()).values():
    assert isinstance(value, (bool, int, float, str, tuple))


def presets(name):
  return importlib.import_module(f'configs.{name}_sinkhorn').PRESETS


@pytest.mark.parametrize(
  ('name', 'preset'), [(x, preset) for x in SETS for preset in presets(x)]
)
def test_pair_differs_in_the_normalizer_alone(name, preset):
  softmax, sinkhorn = (
    get(f'{name}_{x}', preset).to_dict() for x in ('softmax', 'sinkhorn')
  )
  assert configuration.differences(softmax, sinkhorn) == {
    'model.normalizer': ('softmax', 'sinkhorn')
  }


def test_architecture_of_the_paper():
  model = get('mnist_sinkhorn').model
  assert (model.num_layers, model.width, model.num_heads) == (24, 128, 4)
  assert (model.patch_size, model.num_iters) == (4, 50)
  model = get('ag_news_sinkhorn').model
  assert (model.num_layers, model.width, model.num_heads) == (24, 128, 4)
  assert model.num_iters == 50
  assert get('ag_news_sinkhorn').data.max_length == 128
  for name in CONFIGS:
    assert get(name, 'quick').model.to_dict() == get(name).model.to_dict()


def test_docstrings_give_source_and_command():
  for name in CONFIGS:
    docstring = importlib.import_module(f'configs.{name}').__doc__
    assert f'--config=configs/{name}.py' in docstring
    assert re.search('Source:|`[a-z_]+_sinkhorn`', docstring)


def test_unknown_preset_is_refused():
  for name in CONFIGS:
    with pytest.raises(ValueError, match='quick'):
      get(name, 'fast')


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('model.num_heads', 3, 'does not divide'),
    ('model.patch_size', 5, 'does not divide'),
    ('model.num_iters', -1, 'integer of at least 0'),
    ('model.normalizer', 'sinkhron', 'softmax'),
    ('model.name', 'resnet', 'vit'),
    ('model.dropout_rate', 1.0, 'below 1'),
    ('model.dtype', 'float16', 'bfloat16'),
    ('model.deepnorm', True, 'norm_position'),
    ('model.norm_position', 'middle', 'pre, post'),
    ('model.pooling', 'sum', 'cls, mean, max'),
    ('total_steps', 0, 'at least 1'),
    ('batch_size', 0, 'at least 1'),
    ('optimizer.learning_rate', -1.0, 'number'),
    ('optimizer.learning_rate', float('nan'), 'number'),
    ('optimizer.schedule', 'linear', 'cosine'),
    ('optimizer.schedule', 'step', 'step_boundaries'),
    ('optimizer.step_boundaries', (3,), 'schedule'),
    ('optimizer.warmup_steps', 99_999, 'total_steps'),
    ('seed', 2**32, 'below'),
    ('data.name', 'cifar', 'mnist'),
    ('model.name', 'text', 'is for texts'),
    ('data.source', 'network', 'sample'),
    ('data.dir', 'None', 'unset'),
    ('checkpoint.keep_steps', (1, -2), 'tuple of steps'),
  ],
)
def test_wrong_values_are_named(config, field, value, words):
  config.update_from_flattened_dict({field: value})
  with pytest.raises(errors.ConfigError) as error:
    configuration.check(config)
  message = str(error.value)
  assert f'config.{field}' in message
  assert words in message
  assert '\n' not in message


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('data.max_length', 0, 'at least 1'),
    ('data.bucket_lengths', (16, 16), 'rising'),
    ('data.bucket_lengths', (16, 32), 'below config.data.max_length=32'),
    ('data.vocab_size', 255, 'at least 256'),
    ('data.tokenizer', 'None', 'unset'),
    ('data.source', 'sample', 'tfds'),
    ('model.positions', 'rotary', 'sinusoidal'),
    ('model.name', 'vit', 'is for images'),
  ],
)
def test_wrong_values_for_texts_are_named(field, value, words):
  config = get('ag_news_sinkhorn', 'tiny')
  test_wrong_values_are_named(config, field, value, words)


def test_fields_of_another_model_are_unknown():
  config = get('ag_news_sinkhorn', 'tiny')
  config.model.patch_size = 4
  with pytest.raises(errors.ConfigError, match='patch_size is not a field'):
    configuration.check(config)


@pytest.mark.parametrize(
  'value', [2.5, True, '3', None], ids=('float', 'bool', 'text', 'none')
)
def test_wrong_types_are_named(config, value):
  config = config.copy_and_resolve_references()
  with config.ignore_type():
    config.model.num_iters = value
  with pytest.raises(errors.ConfigError, match='config.model.num_iters'):
    configuration.check(config)


@pytest.mark.parametrize('boundaries', [(3, 3), (6, 5), (5,), (1, 7)])
def test_boundaries_have_to_rise_from_above_the_warmup(config, boundaries):
  config.optimizer.update(schedule='step', step_boundaries=boundaries)
  assert config.optimizer.warmup_steps == 5
  with pytest.raises(errors.ConfigError, match='must rise'):
    configuration.check(config)


def test_a_dict_is_not_a_config(config):
  with pytest.raises(errors.ConfigError, match='ConfigDict'):
    configuration.check(config.to_dict())


def test_missing_and_unknown_fields_are_named(config):
  del config.model.width
  with pytest.raises(errors.ConfigError, match='config.model.width is missing'):
    configuration.check(config)
  config.model.width = 16
  config.model.hidden = 3
  with pytest.raises(errors.ConfigError, match='config.model.hidden is not'):
    configuration.check(config)


def test_differences_take_tuples_for_lists():
  old = {'a': {'b': [1, 2]}, 'c': 1}
  new = {'a': {'b': (1, 2)}, 'c': 2, 'd': 3}
  assert configuration.differences(old, new) == {'c': (1, 2), 'd': (None, 3)}


def test_configs_hold_values_only():
  for path in pathlib.Path(ROOT / 'configs').glob('*.py'):
    assert 'sinkformer_jax' not in path.read_text()
