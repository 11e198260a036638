"""Theory: tables of the command against what must hold, and captures."""

import numpy as np
import pytest

from sinkformer_jax import encoder
from sinkformer_jax import rank
from tests.analysis import conftest


def test_theory(subjects, tmp_path):
  conftest.analyse('theory', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'theory')
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
        conftest.curve(
          law, run=subject.name, ablation=ablation, scaling=scaling
        ),
        rank.summarize(residuals, 'spectral', scaling)['mean'],
        atol=1e-6,
      )
