"""Attention matrices of other software, through the commands."""

import numpy as np
import pandas as pd
import pytest

from analysis import report
from analysis.common import command
from analysis.common import own
from sinkformer_jax import errors
from sinkformer_jax import rank

OPTIONS = {
  'num_examples': 3,
  'num_paths': 7,
  'num_draws': 4,
  'num_tokens': 6,
  'num_layers': 4,
  'num_iters': 5,
  'scales': ['1'],
  'seed': 0,
  'skip': False,
}
SHAPE = 4, 3, 2, 6, 6


def logits(seed):
  return np.random.default_rng(seed).standard_normal(SHAPE)


def weights(normalizer, seed):
  num_iters = {'softmax': 0, 'sinkhorn': 50}[normalizer]
  return rank.mechanism.normalize(logits(seed), num_iters)


@pytest.fixture
def files(tmp_path):
  """Two pairs, of which the first have logits too."""
  paths = []
  for key, seed in (('a', 1), ('b', 2)):
    for normalizer in ('softmax', 'sinkhorn'):
      paths.append(tmp_path / f'{normalizer}_{key}.npz')
      arrays = {'attention': weights(normalizer, seed)}
      if key == 'a':
        arrays['logits'] = logits(seed)
      np.savez(paths[-1], **arrays)
  return [str(x) for x in paths]


def test_path_products_are_those_of_the_library(files, tmp_path):
  subjects = own.load(files)
  output = tmp_path / 'out'
  output.mkdir()
  command.analyse(
    'path_products', subjects, OPTIONS, output, command.Progress()
  )
  table = pd.read_csv(output / 'path_products.csv')
  paths = rank.sample_paths(0, 4, 2, 7)
  for subject, (normalizer, seed) in zip(
    subjects,
    [(x, y) for y in (1, 2) for x in ('softmax', 'sinkhorn')],
    strict=True,
  ):
    residuals = rank.path_residuals(weights(normalizer, seed), paths)
    found = table[
      (table['run'] == subject.name)
      & (table['quantity'] == 'path, first layers')
      & (table['norm'] == 'spectral')
      & (table['scaling'] == 'absolute')
    ]
    expected = rank.summarize(residuals, 'spectral')['mean']
    np.testing.assert_allclose(found['mean'], expected, rtol=1e-9, atol=1e-12)
  # Pairs by name.
  pairs = pd.read_csv(output / 'path_products_differences.csv')
  assert set(pairs['num_pairs']) == {2}


def test_report_of_files_says_what_needs_a_model(files, tmp_path):
  output = tmp_path / 'out'
  output.mkdir()
  subjects = own.load(files[:2])
  finished = [
    command.analyse(x, subjects, OPTIONS, output, command.Progress())
    for x in report.ANALYSES
  ]
  notes = command.notes(subjects, finished)
  assert 'softmax_a is left out of lipschitz: it has no model.' in notes
  assert 'softmax_a is left out of layer_outputs: it has no hidden.' in notes
  page = report.render(subjects, finished, output, {})
  assert 'sinkhorn_a' in page
  mechanism = pd.read_csv(output / 'mechanism.csv')
  assert set(mechanism['run']) == {'softmax_a and sinkhorn_a'}


def test_what_a_name_says(files, tmp_path):
  first, second, third, fourth = own.load(files)
  assert [x.normalizer for x in (first, second)] == ['softmax', 'sinkhorn']
  assert (first.seed, second.seed, third.seed, fourth.seed) == (0, 0, 1, 1)
  np.savez(tmp_path / 'mine.npz', attention=weights('softmax', 0))
  (mine,) = own.load([str(tmp_path / 'mine.npz')])
  assert (mine.normalizer, mine.seed) == ('', None)
  assert mine.about()['group'] == 'mine'
  assert mine.about()['setting'] is None


def test_rows_that_do_not_sum_to_1_are_said_to(tmp_path):
  np.savez(tmp_path / 'open.npz', attention=weights('softmax', 0) * 1.1)
  (subject,) = own.load([str(tmp_path / 'open.npz')])
  assert any('0.1 only' in x for x in subject.notes())
  assert not any('only' in x for x in own.load([closed(tmp_path)])[0].notes())


def closed(tmp_path):
  path = tmp_path / 'closed.npz'
  np.savez(path, attention=weights('softmax', 0))
  return str(path)


@pytest.mark.parametrize(
  ('arrays', 'words'),
  [
    ({'logits': np.zeros(SHAPE)}, r'no array "attention".*it has logits'),
    (
      {'attention': np.zeros(SHAPE[1:])},
      r'attention must be floats \[layers, batch, heads, n, n\], got \(3, 2',
    ),
    ({'attention': np.zeros(SHAPE, int)}, 'attention must be floats.*got int'),
    (
      {'attention': np.zeros(SHAPE), 'mask': np.ones((3, 5), bool)},
      r'mask must be booleans \[batch, n\] = \(3, 6\)',
    ),
  ],
)
def test_files_that_are_refused(tmp_path, arrays, words):
  path = tmp_path / 'x.npz'
  np.savez(path, **arrays)
  with pytest.raises(errors.UserError, match=words):
    own.load([str(path)])


def test_two_files_of_one_name(files):
  with pytest.raises(errors.UserError, match='two files are named softmax_a'):
    own.load([files[0], files[0]])


def test_files_make_no_pairs_with_runs(files):
  (subject,) = own.load(files[:1])
  # Settings of runs count from 0.
  assert subject.about()['setting'] < 0
  assert subject.about()['group'] == 'softmax, files'


def test_pairs_must_fit(files, tmp_path):
  path = tmp_path / 'sinkhorn_c.npz'
  np.savez(path, attention=weights('sinkhorn', 0)[:, :2])
  other = tmp_path / 'softmax_c.npz'
  np.savez(other, attention=weights('softmax', 0))
  with pytest.raises(errors.UserError, match=r'attention.*\(4, 2, 2, 6, 6\)'):
    own.load([str(path), str(other)])


def test_what_is_not_finite_is_named(tmp_path):
  attention = weights('softmax', 0)
  attention[2, 1, 0, 3, 3] = np.nan
  path = tmp_path / 'softmax_a.npz'
  np.savez(path, attention=attention)
  (subject,) = own.load([str(path)])
  notes = []
  (capture,) = subject.captures(OPTIONS, lambda *_: None, notes)
  assert notes == ['softmax_a: attention of layer 3 not finite']
  assert capture.about['non_finite_layers'] == [3]


def test_the_same_capture_in_float32(tmp_path):
  """Computed in float64, with the resolution of float32."""
  attention = weights('softmax', 0).astype(np.float32)
  path = tmp_path / 'softmax_a.npz'
  np.savez(path, attention=attention)
  output = tmp_path / 'out'
  output.mkdir()
  subjects = own.load([str(path)])
  finished = command.analyse(
    'path_products', subjects, OPTIONS, output, command.Progress()
  )
  residuals = rank.path_residuals(attention, rank.sample_paths(0, 4, 2, 7))
  assert residuals.dtype == 'float32'
  assert set(finished.summary['dtype']) == {'float32'}
  found = finished.summary.query(
    "quantity == 'path, first layers' and norm == 'spectral'"
    " and scaling == 'absolute'"
  )
  expected = rank.summarize(residuals)
  np.testing.assert_allclose(found['mean'], expected['mean'], rtol=1e-12)
  assert list(found['below_resolution']) == list(expected['below_resolution'])
