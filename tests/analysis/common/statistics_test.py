"""Tests, corrections and verdicts against hand-worked values."""

import math

import pytest

from analysis.common import statistics


def made(values, depth=4, label='x', margin=None):
  return statistics.of_pairs(label, depth, dict(enumerate(values)), margin)


def test_holm_by_hand():
  # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2 (not below the one before), 0.5 x 1.
  corrected = statistics.holm([0.03, 0.5, 0.01, 0.02])
  assert corrected == pytest.approx([0.06, 0.5, 0.04, 0.06])
  # Never above 1, and a smaller p never gets a larger correction.
  assert statistics.holm([0.9, 0.4]) == pytest.approx([0.9, 0.8])
  assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
  assert statistics.holm([]) == []


def test_t_by_hand():
  # 3 pairs: Student's t with 2 degrees of freedom has a closed form.
  test = made([1.0, 2.0, 6.0])
  t = 3 / math.sqrt(7 / 3)
  assert test.p_value == pytest.approx(1 - t / math.sqrt(t**2 + 2))
  quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)
  assert test.sample.half_width == pytest.approx(quantile * math.sqrt(7 / 3))


@pytest.mark.parametrize(
  ('count', 'quantile'),
  # Student 1908 and every table since: two-sided, 5 %.
  [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (31, 2.042)],
)
def test_published_quantiles(count, quantile):
  found = statistics.sample([0.0, 1.0] + [0.5] * (count - 2))
  assert found.half_width / found.error == pytest.approx(quantile, abs=5e-4)
  # At the edge of the interval the test is at 5 %.
  edge = made([x + found.half_width for x in (-0.5, 0.5, *[0.0] * (count - 2))])
  expected = 0.05 if count >= statistics.LEAST_COUNT else 1
  assert edge.p_value == pytest.approx(expected)


def test_what_does_not_exist():
  assert math.isnan(statistics.sample([5.0]).half_width)
  assert math.isnan(statistics.sample([]).mean)
  assert math.isnan(statistics.sample([1.0, 2.0, math.nan]).mean)


def test_margin_by_hand():
  # Mean 1, error sqrt(1 / 3): how far inside 3, and how far outside 0.5.
  values = [0.0, 1.0, 2.0]
  for margin, distance, agrees in ((3.0, 2.0, True), (0.5, 0.5, False)):
    test = made(values, margin=margin)
    t = distance / math.sqrt(1 / 3)
    assert test.p_value == pytest.approx(1 - t / math.sqrt(t**2 + 2))
    assert test.agrees == agrees


def test_welch_by_hand():
  first = {'mean': 2.0, 'std': 3.0, 'count': 10}
  second = {'mean': 0.5, 'std': 4.0, 'count': 5}
  found = statistics.welch(first, second)
  # Errors of means: 9 / 9 and 16 / 4, from deviations over n.
  assert found.mean == 1.5
  assert found.error == pytest.approx(math.sqrt(1 + 4))
  assert found.freedom == pytest.approx(25 / (1 / 9 + 16 / 4))
  assert found.count == 5


@pytest.mark.parametrize(
  ('values', 'verdict'),
  [
    ([1.0, 1.1, 0.9, 1.05], statistics.SUPPORTED),
    ([-1.0, -1.1, -0.9, -1.05], statistics.CONTRADICTED),
    ([1.0, -1.1, 0.9, -1.05], statistics.INCONCLUSIVE),
    ([1.0, 1.0], statistics.INCONCLUSIVE),
    ([1.0, 1.0, 1.0], statistics.SUPPORTED),
    ([0.0, 0.0, 0.0], statistics.INCONCLUSIVE),
    ([], statistics.INCONCLUSIVE),
    # What could not be measured is no pair.
    ([1.0, 1.1, math.nan, math.nan], statistics.INCONCLUSIVE),
    ([1.0, 1.1, 0.9, math.nan], statistics.SUPPORTED),
  ],
)
def test_verdict(values, verdict):
  (judged,) = statistics.judge([made(values)])
  assert judged.verdict == verdict


@pytest.mark.parametrize(
  ('values', 'verdict'),
  [
    ([0.01, -0.01, 0.02], statistics.SUPPORTED),
    ([1.01, 0.99, 1.02], statistics.CONTRADICTED),
    ([-1.01, -0.99, -1.02], statistics.CONTRADICTED),
    ([0.0, 0.4, -0.4], statistics.INCONCLUSIVE),
    ([0.01, -0.01], statistics.INCONCLUSIVE),
  ],
)
def test_verdict_with_a_margin(values, verdict):
  (judged,) = statistics.judge([made(values, margin=0.1)])
  assert judged.verdict == verdict


def test_correction_is_over_all_tests_of_a_claim():
  values = [1.0, 1.3, 0.7, 1.1, 0.6]
  assert made(values).p_value < 0.01
  (alone,) = statistics.judge([made(values)])
  noise = [made([1.0, -1.0, 0.5]) for _ in range(50)]
  first, *_ = statistics.judge([made(values), *noise])
  assert (alone.verdict, first.verdict) == (
    statistics.SUPPORTED,
    statistics.INCONCLUSIVE,
  )
  # One that cannot be made counts too.
  first, *_ = statistics.judge([made(values), *[made([])] * 50])
  assert first.corrected == pytest.approx(51 * alone.corrected)


def test_overall():
  up, down = [1.0, 1.1, 0.9, 1.0], [-1.0, -1.1, -0.9, -1.0]
  assert statistics.overall([]) == 'not measured'
  judged = statistics.judge([made(up, 4), made(up, 12)])
  assert statistics.overall(judged) == 'supported'
  judged = statistics.judge([made(up, 4), made(down, 12), made([], 24)])
  assert (
    statistics.overall(judged)
    == 'supported at 4; contradicted at 12; inconclusive at 24'
  )
  judged = statistics.judge(
    [made(up, 4, 'paths'), made(up, 12, 'paths'), made(down, 4, 'b')]
  )
  assert (
    statistics.overall(judged)
    == 'supported: paths at 4, 12; contradicted: b at 4'
  )


def test_numbers_as_text():
  def text(*values):
    return statistics.number(statistics.sample(values))

  assert text() == 'no number'
  assert text(-1.234) == '-1.23'
  assert text(1.0, 2.0, 6.0) == '+3.00 ± 6.57'
  assert text(0.0) == '+0.00'
  # What two decimals would not show.
  assert text(0.0003) == '+3.0e-04'
  assert text(0.0011, 0.0012) == '+1.1e-03 ± 6.4e-04'
  assert text(-54321.0) == '-5.4e+04'
