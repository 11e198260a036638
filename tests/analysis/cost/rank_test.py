"""What the part `rank` of `analysis.cost` compares is the same work."""

import functools

import numpy as np
import pytest

from analysis.cost import rank as cost_rank
from analysis.cost import setup as cost_setup

SHAPE = (3, 2, 2, 4)


def test_plain_loop():
  """The last matrix of a path is on the left."""
  attention, heads = cost_rank.inputs(SHAPE)
  np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-14)
  products = cost_rank.plain_loop(attention, heads['first'])
  assert products.shape == (2, cost_rank.NUM_PATHS, 4, 4)
  taken = heads['first'][-1, 7]
  factors = [attention[layer, 1, head] for layer, head in enumerate(taken)]
  expected = functools.reduce(np.matmul, factors[::-1])
  np.testing.assert_allclose(products[1, 7], expected, rtol=1e-14)
  # What is timed beside it has the residuals of these.
  sampled = cost_rank._calls(SHAPE)['sampled paths, Frobenius']()
  rest = products - products.mean(-2, keepdims=True)
  np.testing.assert_allclose(
    sampled.log10['frobenius'][-1],
    np.log10(np.linalg.norm(rest, axis=(-2, -1))),
    atol=1e-10,
  )


def test_rows(monkeypatch):
  # A process for each takes seconds.
  monkeypatch.setattr(
    cost_rank.machine, 'child', lambda function, **x: function(**x)
  )
  options = cost_setup.options('tiny', ((4, 2),), 5, 2)
  rows = cost_rank.rank_rows(options)
  by_name = {x['name']: x for x in rows}
  assert len(by_name) == len(rows) == 6
  assert by_name[cost_rank.FROBENIUS]['ratio_to'] == cost_rank.LOOP
  exact = by_name['exact RMS, first layers']
  assert exact['ratio_to'] == cost_rank.FROBENIUS
  assert exact['ms'] > 0
  assert exact['memory_mb'] >= 0
  # Examples and paths are what is asked for.
  preset = options.preset.model
  calls = cost_rank._calls((preset.num_layers, 2, preset.num_heads, 4))
  residuals = calls['sampled paths, Frobenius and spectral']()
  assert set(residuals.log10) == {'frobenius', 'spectral'}
  shape = (preset.num_layers + 1, 2, cost_rank.NUM_PATHS)
  assert residuals.invalid.shape == shape
  with pytest.raises(KeyError):
    cost_rank.call_from_scratch('another', SHAPE)()
