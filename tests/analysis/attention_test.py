"""Statistics of attention: tables of the command against the library."""

import numpy as np
import pytest

from sinkformer_jax import errors
from sinkformer_jax import rank
from tests.analysis import conftest


def test_attention(subjects, tmp_path):
  conftest.analyse('attention', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'attention')
  capture = rank.capture(subjects[1].run, 10, dataset=subjects[1].dataset())
  expected = {
    'column error': rank.marginal_errors(capture.attention)[1],
    'spread of column sums': capture.attention.sum(-2).std(-1),
    'relative entropy': rank.attention_entropy(
      capture.attention, relative=True
    ),
    'effective rank of attention': rank.effective_rank(
      rank.singular_values(capture.attention)
    ),
    'effective rank of tokens': rank.effective_rank(
      rank.singular_values(capture.hidden)
    ),
  }
  for quantity, values in expected.items():
    np.testing.assert_allclose(
      conftest.curve(rows, run='sinkhorn/seed0', quantity=quantity),
      values.reshape(len(values), -1).mean(1),
      rtol=1e-9,
    )


def test_more_examples_than_there_are(subjects, tmp_path):
  with pytest.raises(errors.UserError, match=r'num_examples=501 .* 500'):
    conftest.analyse('attention', subjects, tmp_path, num_examples=501)
