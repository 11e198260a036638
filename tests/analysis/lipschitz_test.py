"""Lipschitz constants: tables of the command against the library."""

import jax
import numpy as np
import pytest

from sinkformer_jax import rank
from sinkformer_jax import sinkhorn
from tests.analysis import conftest


def test_lipschitz(subjects, tmp_path):
  conftest.analyse('lipschitz', subjects, tmp_path, num_examples=3)
  rows = conftest.read(tmp_path, 'lipschitz')
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
      mean = conftest.curve(
        rows, quantity=quantity, ablation=ablation, group=group, run=run
      )[1]
      assert mean == pytest.approx(np.log10(expected.value).mean(), abs=2e-3)
  pairs = conftest.read(tmp_path, 'lipschitz_differences')
  assert {x['ablation'] for x in pairs} == {
    'own normalizer',
    'weights of the softmax run',
    'weights of the sinkhorn run',
  }
