"""Residuals of tokens: tables of the command against the library."""

import numpy as np

from sinkformer_jax import encoder
from sinkformer_jax import rank
from tests.analysis import conftest


def test_layer_outputs(subjects, tmp_path):
  conftest.analyse('layer_outputs', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'layer_outputs')
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
          conftest.curve(
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
