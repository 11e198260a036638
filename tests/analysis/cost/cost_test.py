"""What Sinkhorn costs: rows, FLOPs, tables, files, flags. No times."""

import csv
import dataclasses
import json
import math

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from analysis.common import machine
from analysis.cost import figures as cost_figures
from analysis.cost import forms
from analysis.cost import loader as cost_loader
from analysis.cost import model as cost_model
from analysis.cost import normalizer as cost_normalizer
from analysis.cost import setup as cost_setup
from analysis.cost import step as cost_step
from analysis.cost import tables as cost_tables
from sinkformer_jax import sinkhorn
from tests.data import official
from tests.launch import launch_test

TINY = cost_setup.PRESETS['tiny']
OPTIONS = cost_setup.Options(TINY, TINY.shapes, num_iters=5, repeats=2)


def setting(**fields):
  return OPTIONS.setting(*TINY.shapes[0], **fields)


def check_time(row):
  assert 0 < row['ms_min'] <= row['ms'] <= row['ms_max']
  assert row['repeats'] == len(row['times_ms']) == 2


@pytest.fixture
def nothing_else(monkeypatch):
  """As if PyTorch and ott-jax were not installed."""
  monkeypatch.setattr(machine.importlib.util, 'find_spec', lambda _: None)


def test_full_preset_is_the_architecture_of_the_study():
  model = cost_setup.PRESETS['full'].model
  fields = ('num_layers', 'width', 'num_heads', 'ffn_dim')
  assert [model[x] for x in fields] == [24, 128, 4, 512]


def test_any_number_of_tokens():
  for tokens in (2, 5, 128):
    base = dataclasses.replace(setting(), tokens=tokens)
    params = jax.eval_shape(lambda base=base: cost_model.create_params(base))
    assert params['positions'].shape == (1, tokens, 16)


def product_flops(jaxpr):
  """Of all matrix products of a jaxpr, scans as often as they run."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      left, result = equation.invars[0].aval, equation.outvars[0].aval
      inner = math.prod(left.shape[i] for i in contracted)
      total += 2 * inner * math.prod(result.shape)
    times = equation.params.get('length', 1)
    for inside in jax_core.jaxprs_in_params(equation.params):
      total += times * product_flops(inside)
  return total


def test_flops_against_the_program():
  base = setting(normalizer='softmax')
  shapes = jax.eval_shape(
    lambda: (cost_model.create_params(base), cost_model.create_batch(base))
  )
  step = jax.make_jaxpr(cost_model.loss_and_gradient(base))(*shapes)
  # The formula is three forward passes; no step needs the gradient of pixels,
  # and the backward pass computes logits and mixtures of values again.
  pixels = base.batch * base.patches * base.model.patch_size**2
  expected = cost_model.model_flops(base) - 2 * pixels * base.model.width
  again = 4 * base.tokens**2 * base.model.width
  expected += base.batch * base.model.num_layers * again
  assert product_flops(step.jaxpr) == expected


def test_flops_of_the_study():
  # By hand, MFLOP of a layer and example at 50 tokens: queries, keys, values
  # and output 4 * 1.6384, FFN 2 * 6.5536, logits and mixing 2 * 0.64.
  layer = 4 * 1.6384 + 2 * 6.5536 + 2 * 0.64
  ends = 2 * 49 * 16 * 128 / 1e6 + 2 * 128 * 10 / 1e6
  base = cost_model.Setting(cost_setup.PRESETS['full'].model, 50, 64)
  expected = 3 * 64 * (24 * layer + ends) * 1e6
  assert cost_model.model_flops(base) == pytest.approx(expected)


@pytest.mark.slow
def test_logit_spread():
  base = setting(normalizer='sinkhorn')
  params = cost_model.create_params(base)
  scaled = cost_model.set_logit_spread(base, params, 3)
  images = cost_model.create_batch(dataclasses.replace(base, batch=8))['image']
  _, sown = cost_model.create_model(base).apply(
    {'params': scaled}, images, mutable=['capture']
  )
  logits = np.asarray(
    sown['capture']['encoder']['blocks']['attention']['logits'], np.float64
  )
  centred = logits - logits.mean(-1, keepdims=True)
  spread = np.sqrt((centred**2).mean((1, 2, 3, 4)))
  np.testing.assert_allclose(spread, 3, rtol=0.02)
  # Only queries differ.
  same = jax.tree_util.tree_map_with_path(
    lambda path, x, y: (x == y).all() or 'query' in str(path), params, scaled
  )
  assert jax.tree.all(same)


@pytest.mark.slow
def test_step_donates_and_learns():
  base = setting(normalizer='sinkhorn')
  call = cost_model.training(base)
  losses = [float(call()) for _ in range(20)]
  assert losses[-1] < losses[0]
  # The given parameters are copied: they can be used again.
  params = cost_model.create_params(base)
  first = [float(cost_model.training(base, params)()) for _ in range(2)]
  assert first == [losses[0]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures('nothing_else')
def test_step_rows():
  rows = cost_step.step_rows(OPTIONS)
  assert [(x['table'], x['name']) for x in rows] == [
    ('5 tokens, batch 4', 'softmax'),
    ('5 tokens, batch 4', 'sinkhorn'),
    ('5 tokens, batch 4', 'sinkhorn, logit spread 1'),
    ('5 tokens, batch 4', 'sinkhorn, logit spread 3'),
    ('5 tokens, batch 4', 'PyTorch softmax'),
    ('5 tokens, batch 4', 'PyTorch sinkhorn'),
  ]
  absent = [x for x in rows if 'PyTorch' in x['name']]
  for row in absent:
    assert 'requirements-dev.txt' in row['note']
    assert 'ms' not in row
  for row in (x for x in rows if x not in absent):
    check_time(row)
    assert row['ratio_to'] == 'softmax'
    assert row['memory_mb'] > 0
  spreads = [x['logit_spread'] for x in rows[2:4]]
  np.testing.assert_allclose(spreads, [1, 3], rtol=0.01)
  # Sinkhorn is nearer to doubly stochastic, and less so for larger logits.
  columns = [x['column_error'] for x in rows[:4]]
  assert columns[2] < columns[3] < columns[0]


def test_too_much_memory(monkeypatch):
  # 24 layers of 64 examples of 4 heads of 100 matrices of 50 x 50 float32.
  full = cost_model.Setting(cost_setup.PRESETS['full'].model, 50, 64)
  needed_mb = 24 * 64 * 4 * 100 * 50**2 * 4 / 1e6
  monkeypatch.setattr(machine, 'available_memory_mb', lambda: 0.9 * needed_mb)
  with pytest.raises(machine.NotHereError, match='MB are free'):
    cost_step._require_memory(full)
  monkeypatch.setattr(machine, 'available_memory_mb', lambda: 1e6)
  cost_step._require_memory(full)


@pytest.mark.usefixtures('nothing_else')
def test_rate_rows():
  rows = cost_step.rate_rows(OPTIONS)
  product, absent, softmax, _, _ = rows
  assert 'note' in absent
  check_time(product)
  assert product['gflop'] == 2 * 64**3 / 1e9
  assert product['share_percent'] == 100
  flops = cost_model.model_flops(setting())
  best = product['gflop'] / np.array(product['times_ms'])
  own = flops / 1e9 / np.array(softmax['times_ms'])
  assert softmax['share_percent'] == pytest.approx(np.median(100 * own / best))
  assert softmax['gflop_per_s'] == pytest.approx(np.median(1e3 * own))


@pytest.mark.usefixtures('nothing_else')
def test_normalizer_rows():
  rows = cost_normalizer.normalizer_rows(OPTIONS)
  tables = {x['table']: [] for x in rows}
  for row in rows:
    tables[row['table']].append(row)
  assert list(tables) == [
    f'5 tokens, 8 matrices, logit spread {spread}, {what}'
    for spread in (1, 3)
    for what in ('value', 'value and gradient')
  ]
  ours = ['softmax', 'sinkhorn', 'sinkhorn in XLA', 'log-space reference']
  for group in tables.values():
    assert [x['name'] for x in group[:4]] == ours
    assert [x['name'] for x in group[4:]] == [
      'ott-jax, unrolled',
      'ott-jax, implicit',
      'PyTorch autograd',
    ]
    assert all('note' in x for x in group[4:])
    for row in group[:4]:
      check_time(row)
    softmax, *errors = (x['column_error'] for x in group[:4])
    assert errors == pytest.approx(errors[:1] * 3, abs=1e-5)
    assert errors[0] < softmax
    assert all(x['value_error'] < 1e-5 for x in group[1:4])
    for row in group[1:4]:
      assert row.get('gradient_error', 0) < 1e-5
      has_gradient = row['table'].endswith('gradient')
      assert ('gradient_error' in row) == has_gradient


def test_errors_are_seen():
  logits, cotangent = np.random.default_rng(0).normal(size=(2, 3, 6, 6))
  exact = forms.exact(logits, cotangent, 20)
  weights, gradient = (jnp.asarray(x, jnp.float32) for x in exact)
  right = forms.errors((weights, gradient), exact)
  assert right['value_error'] < 1e-6
  assert right['gradient_error'] < 1e-6
  changed = weights.at[0, 0, 0].add(0.1 * exact[0].max())
  wrong = forms.errors((changed, 1.5 * gradient), exact)
  assert wrong['value_error'] == pytest.approx(0.1, rel=1e-3)
  assert wrong['gradient_error'] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
  ('implicit', 'num_iters', 'tolerance'), [(False, 3, 2e-6), (True, 50, 1e-5)]
)
def test_ott_is_the_same_sinkhorn(implicit, num_iters, tolerance):
  pytest.importorskip('ott')
  from analysis.cost import ott as cost_ott

  keys = jax.random.split(jax.random.key(0))
  logits, cotangent = (jax.random.normal(key, (2, 5, 5)) for key in keys)

  def both(normalizer):
    function = forms.value_and_gradient(normalizer)
    return jax.jit(function)(logits, cotangent)

  theirs = both(
    lambda x: cost_ott.sinkhorn(x, num_iters=num_iters, implicit=implicit)
  )
  ours = both(lambda x: sinkhorn.sinkhorn(x, num_iters))
  for actual, expected in zip(theirs, ours, strict=True):
    np.testing.assert_allclose(actual, expected, atol=tolerance)


@pytest.mark.slow
def test_growth_rows(monkeypatch):
  base = {'tokens': 5, 'batch': 4, 'heads': 2}
  sweeps = {'tokens': ((4, 8, 16), base)}
  preset = dataclasses.replace(TINY, sweeps=sweeps)
  options = dataclasses.replace(OPTIONS, preset=preset)
  step = cost_normalizer._GROWTH['step'](options, 5, 4, 2, 5)
  assert list(step) == ['softmax', 'sinkhorn']
  monkeypatch.delitem(cost_normalizer._GROWTH, 'step')
  rows = cost_normalizer.growth_rows(options)
  timed, fits = rows[:9], rows[9:]
  for row in timed:
    check_time(row)
    assert row['tokens'] == row['at']
    assert row['batch'] == 4
  assert len(fits) == 6
  for fit in fits:
    assert fit['points'] == 3
    assert math.isfinite(fit['exponent'])


def test_exponents():
  rows = [
    {
      'what': 'step',
      'against': 'iterations',
      'form': 'sinkhorn',
      'at': at,
      'ms': 5.0 * max(at, 1) ** 0.5,
      'memory_mb': memory_mb,
    }
    for at, memory_mb in ((0, 1.0), (1, 0.0), (4, 0.0), (9, 2.0))
  ]
  time, memory = cost_normalizer.exponent_rows(rows)
  # 0 iterations have no logarithm.
  assert (time['of'], time['points']) == ('time', 3)
  assert time['exponent'] == pytest.approx(0.5)
  assert (memory['of'], memory['points']) == ('memory', 1)
  assert 'exponent' not in memory
  assert memory['note']


def test_compile_rows(monkeypatch):
  calls = []

  def child(function, environment, **arguments):
    calls.append(environment['JAX_COMPILATION_CACHE_DIR'])
    assert function is cost_step.first_step
    return function(**arguments)

  monkeypatch.setattr(cost_step.machine, 'child', child)
  monkeypatch.setattr(cost_step, 'FORMS', ('softmax',))
  preset = dataclasses.replace(TINY, depths=(2,))
  options = dataclasses.replace(OPTIONS, preset=preset)
  rows = cost_step.compile_rows(options)
  assert [(x['layers'], x['cache']) for x in rows] == [
    (2, 'empty'),
    (2, 'warm'),
  ]
  for row in rows:
    assert row['first_step_s'] > 0
    assert row['compile_s'] > 0
    assert row['first_step_s_min'] <= row['first_step_s']
  # The same directory for both, and a new one in each round.
  first, second, third, fourth = calls
  assert first == second != third == fourth


@pytest.mark.slow
def test_accelerator_rows():
  rows = cost_normalizer.accelerator_rows(OPTIONS)
  tables = [x['table'] for x in rows]
  for dtype in ('float32', 'bfloat16'):
    own = [x for x in rows if x['table'].startswith(dtype)]
    assert len({x['table'] for x in own}) == 3
    assert [x['name'] for x in own] == 3 * list(forms.FORMS)
  assert len(tables) == 6 * len(forms.FORMS)
  for row in rows:
    check_time(row)
    if row['name'] == 'sinkhorn' and 'matrices' in row['table']:
      assert row['value_error'] < 1e-5


ROWS = [
  {
    'table': 'one',
    'name': 'a',
    'ms': 1234.5,
    'ms_min': 1.0,
    'ms_max': 2000.0,
    'repeats': 5,
    'times_ms': [1.0, 1234.5, 2000.0],
    'ratio_to': 'a',
    'ratio': 1.0,
    'ratio_min': 1.0,
    'ratio_max': 1.0,
  },
  {'table': 'one', 'name': 'b', 'note': 'not installed'},
  {'table': 'two', 'name': 'c', 'memory_mb': 12.34, 'memory_of': 'peak growth'},
]


def test_tables():
  one, two = cost_tables.text(cost_tables.frame(ROWS)).split('\n\n')
  assert one.splitlines() == [
    'one  ms                   rounds  note',
    'a    1234 (1.00 to 2000)  5',
    'b                                 not installed',
  ]
  assert two.splitlines()[1].split() == ['c', '12.3', 'peak']


def test_csv(tmp_path):
  cost_tables.write_csv(tmp_path / 'x.csv', cost_tables.frame(ROWS))
  with (tmp_path / 'x.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [x['name'] for x in rows] == ['a', 'b', 'c']
  assert float(rows[0]['ms']) == 1234.5
  assert rows[1]['ms'] == ''
  assert rows[1]['note'] == 'not installed'
  assert 'times_ms' not in rows[0]


def test_figures(tmp_path):
  timed = cost_tables.frame([ROWS[0], {**ROWS[0], 'name': 'second'}, ROWS[1]])
  cost_figures.save(tmp_path, 'step', timed)
  growth = [
    {
      **ROWS[0],
      'what': 'normalizer',
      'form': form,
      'against': against,
      'at': at,
      'memory_mb': float(at),
    }
    for form in ('softmax', 'sinkhorn')
    for against in ('iterations', 'tokens')
    for at in (0, 2, 4, 8)
  ]
  growth += cost_normalizer.exponent_rows(growth)
  cost_figures.save(tmp_path, 'growth', cost_tables.frame(growth))
  cost_figures.save(tmp_path, 'rate', timed)
  names = {x.name for x in tmp_path.iterdir()}
  assert names == {
    f'{stem}.{ending}'
    for stem in ('step', 'growth_normalizer')
    for ending in ('png', 'svg')
  }
  drawn = (tmp_path / 'growth_normalizer.svg').read_text()
  for words in ('sinkhorn', 'Sinkhorn iterations', 'time, ms', '1.00 ± 0.00'):
    assert words in drawn
  assert 'second' in (tmp_path / 'step.svg').read_text()


def test_command(tmp_path):
  output = tmp_path / 'new' / 'cost'
  arguments = ['--preset=tiny', '--parts=rate', '--repeats=2', '--num_iters=5']
  code, stdout, stderr = launch_test.run(
    'analysis.cost', *arguments, f'--output={output}'
  )
  assert code == 0, stderr
  assert 'part 1 of 1, rate' in stderr
  assert 'round 2 of 2' in stderr
  assert '% of product' in stdout
  content = json.loads((output / 'cost.json').read_text())
  provenance = content['provenance']
  assert provenance['versions']['jax'] == jax.__version__
  assert provenance['threads'] >= 1
  assert 'XLA_FLAGS' in provenance['environment']
  check_time(content['parts']['rate'][0])
  assert (output / 'rate.csv').exists()
  line = launch_test.refused(
    'analysis.cost', *arguments, f'--output={output}', code=1
  )
  assert 'not empty' in line


@pytest.mark.parametrize(
  ('arguments', 'code', 'words'),
  [
    (['--parts=step,spets'], 2, 'spets'),
    (['--parts=step,step'], 2, 'each once'),
    (['--shapes=50'], 2, 'tokens x batch'),
    (['--shapes=1x8'], 2, 'at least 2 tokens'),
    (['--repeats=0'], 2, 'repeats'),
    (['--num_iters=-1'], 2, 'num_iters'),
    (['--preset=huge'], 2, 'preset'),
    (['--output=/proc/x'], 1, '--output=/proc/x'),
    (['--platform=gpu'], 1, 'requirements-gpu.txt'),
  ],
)
def test_refusals(arguments, code, words):
  assert words in launch_test.refused('analysis.cost', *arguments, code=code)


@pytest.mark.slow
def test_loader_rows(tmp_path, monkeypatch, caplog):
  official.write_ag_news(tmp_path, train=100, test=20)
  monkeypatch.setenv('SINKFORMER_DATA_DIR', str(tmp_path))
  caplog.set_level('INFO', 'sinkformer_jax.cost')
  rows = cost_loader.loader_rows(OPTIONS)
  said = [x.getMessage() for x in caplog.records]
  # Cats and Dogs and IMDb are not there; of MNIST the sample is.
  assert [x.partition(' is')[0] for x in said if 'left out' in x] == [
    'cats_vs_dogs',
    'imdb',
  ]
  assert [(x['table'], x['name']) for x in rows] == [
    ('ag_news, batch 16x32', 'loader'),
    ('ag_news, batch 16x32', cost_loader.STEP),
    ('mnist, batch 16x28x28x1', 'loader'),
    ('mnist, batch 16x28x28x1', cost_loader.STEP),
  ]
  for row in rows:
    check_time(row)
    assert row['examples_per_s'] == pytest.approx(16e3 / row['ms'])
  for loader, step in zip(rows[::2], rows[1::2], strict=True):
    assert loader['first_load_s'] > 0 < loader['load_s']
    assert step['ratio_to'] == 'loader'
    assert step['ratio_min'] <= step['ratio'] <= step['ratio_max']
  assert 'first load s' in cost_tables.text(cost_tables.frame(rows))
