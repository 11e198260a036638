"""Numbers of iterations: tables of the command against updates by hand."""

import numpy as np

from sinkformer_jax import rank
from tests.analysis import conftest


def test_iterations(subjects, tmp_path):
  conftest.analyse('iterations', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'iterations')
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
        conftest.curve(
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
  found = conftest.curve(rows, group='5 iterations', quantity='column error')
  np.testing.assert_allclose(found, errors_of.mean((1, 2)), atol=1e-12)
  many = conftest.curve(rows, group='1000 iterations', quantity='column error')
  assert max(many) < max(found)
  # A model that is read as it was trained has the tokens it had.
  tokens = rank.residual_norms(capture.hidden)
  np.testing.assert_allclose(
    conftest.curve(
      rows,
      group='5 iterations',
      quantity='hidden',
      ablation='skip on, FFN on',
      **common,
    ),
    rank.summarize(tokens)['mean'],
    atol=1e-9,
  )
  fewer = conftest.curve(
    rows,
    group='5 iterations, ending on columns',
    quantity='hidden',
    ablation='skip on, FFN on',
    **common,
  )
  assert np.abs(np.array(fewer) - rank.summarize(tokens)['mean']).max() > 1e-6
