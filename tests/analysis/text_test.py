"""The analysis of text runs: padding changes no number."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from analysis import report
from analysis.common import command
from analysis.common import runs as runs_lib
from configs import ag_news_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import training
from sinkformer_jax.data import text
from tests.analysis import conftest
from tests.data import official

# They train runs: a minute of one core.
pytestmark = pytest.mark.slow

# And how far a number may move: power iterations end at a tolerance.
ANALYSES = {
  'path_products': 1e-9,
  'layer_outputs': 1e-9,
  'attention': 1e-9,
  'mechanism': 1e-9,
  'lipschitz': 4e-3,
  'theory': 1e-9,
  'iterations': 1e-9,
  'matched_control': 1e-9,
  'sequence_length': 1e-9,
}
# Of the summary tables; what a run is called is no number.
EXACT = ('count', 'below_resolution', 'invalid')


def get_config(root, normalizer):
  """Made-up news in buckets of 64 and 96 tokens."""
  config = ag_news_sinkhorn.get_config('tiny')
  config.data.update(dir=str(root), max_length=96, bucket_lengths=(64,))
  config.model.normalizer = normalizer
  config.total_steps = 5
  return config


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory):
  root = tmp_path_factory.mktemp('texts')
  official.write_ag_news(root, train=200, test=50)
  workdirs = []
  for normalizer in ('softmax', 'sinkhorn'):
    workdirs.append(root / normalizer / 'seed0')
    training.train_and_evaluate(get_config(root, normalizer), workdirs[-1])
  return workdirs


@pytest.fixture(scope='module')
def subjects(workdirs):
  return runs_lib.load(workdirs)


@pytest.mark.parametrize('name', ANALYSES)
def test_padding_changes_no_number(subjects, name, monkeypatch, tmp_path):
  def summary(folder):
    (tmp_path / folder).mkdir()
    return conftest.analyse(name, subjects, tmp_path / folder).summary

  short = summary('short')
  dataset = subjects[0].dataset()
  batch = {k: x[:10] for k, x in dataset.splits['test'].items()}
  assert dataset.preprocess(batch)['tokens'].shape == (10, 64)
  assert len(set(batch['length'])) > 3
  padded = dataclasses.replace(
    dataset, preprocess=lambda batch: text.pad(batch, (96,))
  )
  monkeypatch.setattr(runs_lib.Subject, 'dataset', lambda self: padded)
  long = summary('long')
  assert len(short) == len(long) > 0
  assert list(short) == list(long)
  for name_of_column, column in short.items():
    other = long[name_of_column]
    if column.dtype.kind == 'f' and name_of_column not in EXACT:
      # Row errors are rounding.
      np.testing.assert_allclose(other, column, rtol=0, atol=ANALYSES[name])
    else:
      pd.testing.assert_series_equal(other, column)
  # A curve that is there, and not all of it.
  assert np.isfinite(short['mean']).any()


def test_report(subjects, tmp_path):
  finished = [conftest.analyse(x, subjects, tmp_path) for x in report.ANALYSES]
  page = report.render(subjects, finished, tmp_path, {})
  assert '190 training examples' in page
  assert 'made from 200 of 120,000 train examples' in page
  notes = command.notes(subjects, finished)
  assert not [x for x in notes if 'left out' in x or 'not finite' in x]


def test_another_vocabulary_is_other_data(workdirs, tmp_path):
  config = get_config(workdirs[0].parent.parent, 'softmax')
  section = config.data.copy_and_resolve_references()
  section.vocab_size = 280
  other = tmp_path / 'other.json'
  other.write_bytes(data.load(section).tokenizer.content)
  config.data.tokenizer = str(other)
  training.train_and_evaluate(config, tmp_path / 'run')
  with pytest.raises(errors.UserError, match='vocabulary of 280 pieces'):
    runs_lib.load([workdirs[1], tmp_path / 'run'])
