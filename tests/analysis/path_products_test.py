"""Residuals of path products: tables of the command against the library."""

import csv
import dataclasses
import gzip
import json

import jax
import numpy as np
import pytest

from sinkformer_jax import rank
from tests.analysis import conftest


@pytest.mark.parametrize('skip', [False, True])
def test_path_products(subjects, tmp_path, skip):
  finished = conftest.analyse('path_products', subjects, tmp_path, skip=skip)
  rows = conftest.read(tmp_path, 'path_products')
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
          conftest.curve(
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
      conftest.curve(
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
  pairs = conftest.read(tmp_path, 'path_products_differences')
  assert {x['num_pairs'] for x in pairs} == {'1'}
  assert {x['half_width'] for x in pairs} == {''}
  captions = json.loads((tmp_path / 'path_products_captions.json').read_text())
  assert 'mlxtend' in captions['path_products']
  assert 'no confidence interval' in captions['path_products']
  for plot in finished.plots:
    for ending in ('png', 'svg'):
      assert (tmp_path / f'{plot.name}.{ending}').stat().st_size > 1000
    assert 'mlxtend' in (tmp_path / f'{plot.name}.svg').read_text()


def test_first_layers_alone(subjects, tmp_path):
  options = {'layers': ['first']}
  finished = conftest.analyse('path_products', subjects, tmp_path, **options)
  assert set(finished.summary['quantity']) == {
    'path, first layers',
    'exact RMS, first layers',
  }
  both = conftest.analyse('path_products', subjects, tmp_path)
  first = both.summary[both.summary['quantity'].str.contains('first')]
  assert list(finished.summary['mean']) == list(first['mean'])


def test_not_finite_is_named_and_left_out(subjects, tmp_path):
  params = jax.device_get(subjects[0].run.params)
  kernel = params['encoder']['blocks']['attention']['query']['kernel'].copy()
  kernel[1, 0, 0] = np.nan
  params['encoder']['blocks']['attention']['query']['kernel'] = kernel
  damaged = dataclasses.replace(
    subjects[0], run=dataclasses.replace(subjects[0].run, params=params)
  )
  finished = conftest.analyse('path_products', [damaged, subjects[1]], tmp_path)
  notes = ' '.join(finished.notes)
  assert 'attention/query/kernel is not finite in layer 2' in notes
  rows = conftest.read(tmp_path, 'path_products')
  common = {
    'run': 'softmax/seed0',
    'quantity': 'path, first layers',
    'norm': 'spectral',
    'scaling': 'absolute',
  }
  assert conftest.curve(rows, 'invalid', **common) == [0, 0, 70]
  assert conftest.curve(rows, 'count', **common) == [70, 70, 0]
  means = conftest.curve(rows, **common)
  assert np.isfinite(means[:2]).all()
  assert np.isnan(means[2])
  assert any('invalid' in x for x in finished.headlines)
