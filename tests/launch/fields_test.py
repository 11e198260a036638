"""Fields on a command line: what people type, and what they are told."""

import pytest

from launch import fields
from sinkformer_jax import configuration
from sinkformer_jax import errors
from tests.conftest import ROOT

PATH = f'{ROOT}/configs/mnist_sinkhorn.py:tiny'
TEXTS = f'{ROOT}/configs/ag_news_sinkhorn.py:tiny'


def all_fields(path, kind):
  config = configuration.flatten(fields.load(path).to_dict())
  return [k for k, v in config.items() if type(v) is kind]


def value_of(config, field):
  return configuration.flatten(config.to_dict())[field]


@pytest.mark.parametrize(
  ('argv', 'rest', 'expected'),
  [
    (['x', '--a=1', '--config.b=2'], ['x', '--a=1'], ['b=2']),
    (['x', '-config.b.c', '2', '--d'], ['x', '--d'], ['b.c=2']),
    (['--config.b', '--config.c='], [], ['b=true', 'c=']),
    (['--config.b'], [], ['b=true']),
    (['--noconfig.b', 'x'], ['x'], ['b=false']),
    (['--noconfig.b=1'], [], ['b=1']),
    (['--config=f', '--config.b=c=d'], ['--config=f'], ['b=c=d']),
    (['--config', 'f'], ['--config', 'f'], []),
    (['--', '--config.b=1'], ['--', '--config.b=1'], []),
    (['--config.b=1', '--config.b=2'], [], ['b=1', 'b=2']),
  ],
)
def test_fields_are_taken_out(argv, rest, expected):
  assert fields.split(argv) == (rest, expected)


@pytest.mark.parametrize('path', [PATH, TEXTS])
def test_what_people_type_for_each_kind(path):
  for kind, typed in (
    (
      int,
      {'7': 7, '1_000': 1_000, '1e3': 1_000, '1000.0': 1_000, '0x10': 16}
      | {' 7 ': 7, '+5': 5, '007': 7, '-3': -3, '9007199254740993': 2**53 + 1},
    ),
    (float, {'1e-3': 0.001, '.5': 0.5, '2': 2.0, '1_0.5': 10.5, '-1': -1.0}),
    (
      bool,
      dict.fromkeys(('true', 'True', 'TRUE', 'yes', 'on', '1', 't', 'Y'), True)
      | dict.fromkeys(('false', 'False', 'no', 'Off', '0', 'f'), False),
    ),
    (
      tuple,
      dict.fromkeys(('(1,2)', '[1, 2]', '1,2', ' ( 1 , 2 ) ', '1,2,'), (1, 2))
      | dict.fromkeys(('()', '[]', '', ' '), ())
      | {'7': (7,), '(7,)': (7,), '[7]': (7,), '1e3,2_000': (1_000, 2_000)},
    ),
    (str, {'a b': 'a b', '': '', '(1,2)': '(1,2)', '7': '7', 'a=b': 'a=b'}),
  ):
    names = all_fields(path, kind)
    assert names
    for field in names:
      for text, expected in typed.items():
        actual = value_of(fields.load(path, [f'{field}={text}']), field)
        assert actual == expected, (field, text)
        assert type(actual) is kind, (field, text)


def test_lists_may_be_given_item_by_item():
  overrides = ['checkpoint.keep_steps=1', 'checkpoint.keep_steps=(2,3)']
  assert fields.load(PATH, overrides).checkpoint.keep_steps == (1, 2, 3)
  overrides = ['batch_size=1', 'batch_size=2']
  assert fields.load(PATH, overrides).batch_size == 2


# Of each kind of field, what is no value of it.
NONSENSE = {
  int: ('None', '', 'many', '2.5', '1,000', '1e400', 'nan', '2**3', '-7'),
  float: ('None', '', 'nan', 'inf', '-1', '0,1', '1/3', 'True'),
  bool: ('None', '', '2', 'maybe', '-1'),
  tuple: ('None', '(1', '1 2', '1;2', '-1,2', '2.5', ',', 'x', '((1,2))'),
}


@pytest.mark.parametrize('path', [PATH, TEXTS])
def test_what_is_refused_is_named_with_a_remedy(path):
  remedies = {int: 'an integer', float: 'a number', bool: 'True or False'}
  remedies[tuple] = 'a tuple of'
  for kind, texts in NONSENSE.items():
    for field in all_fields(path, kind):
      for text in texts:
        config = fields.load(path, [f'{field}={text}'])
        with pytest.raises(errors.ConfigError) as error:
          configuration.check(config)
        words = str(error.value)
        assert words.startswith(f'config.{field}='), (field, text, words)
        assert remedies[kind] in words, (field, text, words)


@pytest.mark.parametrize('path', [PATH, TEXTS])
def test_names_in_another_case_are_told_the_right_ones(path):
  for field in all_fields(path, str):
    right = value_of(fields.load(path), field)
    for text in (right.upper(), f'{right} ', 'None') if right else ('None',):
      config = fields.load(path, [f'{field}={text}'])
      with pytest.raises(errors.ConfigError) as error:
        configuration.check(config)
      words = str(error.value)
      assert words.startswith(f'config.{field}={text!r} must be'), words
      assert (right or 'nothing after the equals sign') in words.replace(
        repr(text), ''
      )


@pytest.mark.parametrize(
  ('override', 'words'),
  [
    ('optimizer.clip_norm=None', '0 means no clipping'),
    ('model.dropout_rate=None', '0 means no dropout'),
    ('optimizer.weight_decay=', '0 means no decay'),
    ('optimizer.warmup_steps=None', '0 means no warmup'),
    ('model.num_iters=None', '0 means softmax'),
    ('model.normalizer=Softmax', 'softmax, sinkhorn'),
    ('model.normalizer=Sinkhorn', 'softmax, sinkhorn'),
    ('model.dtype=float16', 'one of float32, bfloat16'),
    ('checkpoint.keep_steps=None', '() for none'),
  ],
)
def test_remedies(override, words):
  with pytest.raises(errors.ConfigError) as error:
    configuration.check(fields.load(PATH, [override]))
  assert words in str(error.value)


@pytest.mark.parametrize(
  ('override', 'words'),
  [
    ('model.nm_heads=3', 'Did you mean "num_heads"'),
    ('modle.width=3', 'Did you mean "model"'),
    ('model=3', 'is a section'),
    ('model.width.deep=3', 'no such field: config.model.width.deep'),
    ('=3', 'no such field'),
    ('.model=3', 'no such field'),
    ('__class__=3', 'no such field'),
    ('items=3', 'no such field'),
  ],
)
def test_fields_that_are_not_there(override, words):
  with pytest.raises(errors.ConfigError) as error:
    fields.load(PATH, [override])
  assert words in str(error.value)


OWN = """
import dataclasses
import ml_collections


@dataclasses.dataclass
class Half:
  value: 'float' = 0.5


def get_config(preset=None):
  assert preset in (None, 'a:b', '')
  config = ml_collections.ConfigDict()
  config.rate = Half().value
  config.same = config.get_ref('rate')
  config.rates = (0.5, 1.0)
  config.names = ('x',)
  return config
"""


def test_files_of_ones_own(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text(OWN)
  overrides = ['rate=2', 'rates=1,3', 'names=[y, z]']
  for preset in ('', ':a:b', ':'):
    config = fields.load(f'{path}{preset}', overrides)
    # References follow; items are of the kind of those in the file.
    assert config.to_dict() == {
      'rate': 2.0,
      'same': 2.0,
      'rates': (1.0, 3.0),
      'names': ('y', 'z'),
    }
    assert {type(x) for x in config.rates} == {float}
    with pytest.raises(AttributeError):
      config.new = 1


def test_errors_of_a_file_name_the_line(tmp_path):
  path = tmp_path / 'own.py'
  path.write_text('def get_config():\n  return 1 / 0\n')
  with pytest.raises(errors.ConfigError, match=r'division.*own\.py:2'):
    fields.load(str(path))
