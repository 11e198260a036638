"""Timing in turn, ratios and fits."""

import time

import numpy as np
import pytest

from analysis.common import timing

Alternative = timing.Alternative


def test_alternatives_take_turns():
  order = []
  calls = {
    # Longer than a sample, so that each is called once.
    name: Alternative(lambda name=name: _spend(0.025, order.append, name))
    for name in 'abc'
  }
  timing.compare('table', calls, repeats=3)
  # Two first calls each, then rounds, there and back again.
  assert ''.join(order) == 'abcabc' + 'abccbaabc'


def _spend(seconds, function, *arguments):
  function(*arguments)
  end = time.perf_counter() + seconds
  while time.perf_counter() < end:
    pass


def test_rows(monkeypatch):
  times = {'a': [1.0, 2.0, 4.0], 'b': [2.0, 8.0]}
  monkeypatch.setattr(timing, '_round_robin', lambda *_: times)
  alternatives = {
    'a': Alternative(print, {'size': 3}, ratio_to='a'),
    'b': Alternative(print, ratio_to='a'),
    'c': Alternative(None, {'note': 'not installed'}, ratio_to='a'),
    'd': Alternative(None, {'note': 'not installed'}),
  }
  rows = timing.compare('table', alternatives, 3)
  assert [x['name'] for x in rows] == list(alternatives)
  a, b, c, d = rows
  assert (a['size'], a['ms'], a['ms_min'], a['ms_max']) == (3, 2.0, 1.0, 4.0)
  assert a['repeats'] == 3
  assert a['times_ms'] == times['a']
  # Ratios within the rounds in which both were timed: 2 / 1 and 8 / 2.
  assert (b['ratio'], b['ratio_min'], b['ratio_max']) == (3.0, 2.0, 4.0)
  assert b['repeats'] == 2
  assert c == {'table': 'table', 'name': 'c', 'note': 'not installed'}
  assert 'ms' not in d


def test_slow_calls_sit_out(monkeypatch):
  monkeypatch.setattr(timing, '_SLOW_S', 0.05)
  calls = []
  alternatives = {
    'slow': Alternative(lambda: _spend(0.06, calls.append, 'slow')),
    'quick': Alternative(lambda: None),
  }
  slow, quick = timing.compare('table', alternatives, 4)
  assert (slow['repeats'], quick['repeats']) == (2, 4)
  # A first call, which was enough to know, and two rounds.
  assert len(calls) == 3


def test_short_calls_fill_a_sample():
  calls = []
  (row,) = timing.compare(
    'table', {'a': Alternative(lambda: calls.append(1))}, 2
  )
  assert len(calls) > 100
  assert row['ms'] < timing._SAMPLE_S * 1e3


def test_fit_recovers_an_exponent():
  x = [1, 2, 5, 10, 100]
  exponent, error = timing.fit_exponent(x, [3 * value**1.7 for value in x])
  assert exponent == pytest.approx(1.7)
  assert error == pytest.approx(0, abs=1e-7)


def test_fit_of_what_does_not_grow():
  assert timing.fit_exponent([1, 2, 5], [3, 3, 3]) == (0, 0)


def test_fit_against_numpy():
  rng = np.random.default_rng(0)
  x = rng.uniform(1, 100, 8)
  y = 2 * x**0.5 * np.exp(rng.normal(size=8))
  (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
  exponent, error = timing.fit_exponent(list(x), list(y))
  assert exponent == pytest.approx(slope)
  assert error == pytest.approx(covariance[0, 0] ** 0.5)


@pytest.mark.parametrize(
  ('x', 'y'),
  [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([0, 1, 2], [1, 2, 3])],
)
def test_fit_refuses(x, y):
  with pytest.raises(ValueError, match='no exponent'):
    timing.fit_exponent(x, y)
