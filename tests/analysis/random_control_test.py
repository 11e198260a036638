"""The random control: tables of the command against the library."""

import numpy as np

from sinkformer_jax import rank
from tests.analysis import conftest


def test_random_control(tmp_path):
  conftest.analyse('random_control', [], tmp_path)
  rows = conftest.read(tmp_path, 'random_control')
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
    conftest.curve(
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
