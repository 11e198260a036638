"""The matched control: tables of the command against the library."""

import numpy as np

from sinkformer_jax import rank
from tests.analysis import conftest


def test_matched_control(subjects, tmp_path):
  conftest.analyse('matched_control', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'matched_control')
  capture = rank.capture(subjects[0].run, 10, dataset=subjects[0].dataset())
  spread = capture.logits.std(-1)
  variance = (spread**2).mean(-1)  # [layers, batch, heads]
  np.testing.assert_allclose(
    conftest.curve(rows, run='softmax/seed0', quantity='logit spread'),
    np.sqrt(variance).mean((1, 2)),
    rtol=1e-9,
  )
  num_tokens = capture.logits.shape[-1]
  scale = np.sqrt(variance.mean((1, 2)) * num_tokens / (num_tokens - 1))
  attention = rank.random_control.random_attention(
    0, 'softmax', scale, num_tokens, 2, conftest.OPTIONS['num_draws'], 5
  )
  # The matrices have the spread that was asked for.
  logits = np.log(attention)
  np.testing.assert_allclose(
    np.sqrt(logits.var(-1).mean((1, 2, 3))),
    np.sqrt(variance.mean((1, 2))),
    rtol=0.03,
  )
  heads = rank.random_control.own_paths(2, conftest.OPTIONS['num_draws'])
  np.testing.assert_allclose(
    conftest.curve(
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
