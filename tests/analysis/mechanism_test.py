"""Experiments on pairs: tables of the command against the library."""

import numpy as np

from analysis import mechanism
from sinkformer_jax import rank
from tests.analysis import conftest


def test_mechanism(subjects, tmp_path):
  finished = conftest.analyse('mechanism', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'mechanism')
  capture = rank.capture(subjects[1].run, 10, dataset=subjects[1].dataset())
  heads = rank.sample_paths(0, 2, 2, 7)
  # What its own normalizer makes of its logits is what was captured.
  residuals = rank.path_residuals(capture.attention, heads)
  np.testing.assert_allclose(
    conftest.curve(
      rows, group='sinkhorn logits, sinkhorn', quantity='path, first layers'
    ),
    rank.summarize(residuals)['mean'],
    atol=1e-9,
  )
  swapped = conftest.curve(
    rows, group='sinkhorn logits, softmax', quantity='path, first layers'
  )
  assert abs(swapped[2] - rank.summarize(residuals)['mean'][2]) > 1e-9
  assert len(finished.plots) == 2
  names = {x['group'] for x in rows if x['quantity'] == 'path, first layers'}
  assert names == {y for x in mechanism.PANELS.values() for y in x}
  # Softmax on these logits, as sharp as Sinkhorn is on them.
  entropy = rank.mechanism.mean_entropy(capture.attention)
  for name in ('sinkhorn', "softmax, sinkhorn's entropy"):
    found = conftest.curve(
      rows,
      'entropy',
      group=f'sinkhorn logits, {name}',
      quantity='path, first layers',
    )
    np.testing.assert_allclose(found, entropy.mean(), atol=1e-8)
  _, attention = rank.mechanism.match_entropy(capture.logits, entropy, 0)
  np.testing.assert_allclose(
    conftest.curve(
      rows,
      group="sinkhorn logits, softmax, sinkhorn's entropy",
      quantity='path, first layers',
    ),
    rank.summarize(rank.path_residuals(attention, heads))['mean'],
    atol=1e-6,
  )


def test_mechanism_without_a_pair(subjects, tmp_path):
  finished = conftest.analyse('mechanism', subjects[:1], tmp_path)
  assert 'needs a softmax and a Sinkhorn run' in finished.notes[0]
