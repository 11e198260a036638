"""Intervals, tests and verdicts over pairs of runs.

The unit is the pair of runs with one seed. A test is about the mean over pairs
of one number a pair: that it is above 0, or, with a margin, that it is nearer
to 0 than that. It is a two-sided t test. All tests of a claim are corrected
together (Holm 1979). With fewer than 3 pairs every verdict is inconclusive.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math

import numpy as np

LEVEL = 0.05
LEAST_COUNT = 3
SUPPORTED = 'supported'
CONTRADICTED = 'contradicted'
INCONCLUSIVE = 'inconclusive'
VERDICTS = (SUPPORTED, CONTRADICTED, INCONCLUSIVE)


@dataclasses.dataclass(frozen=True)
class Sample:
  """The mean of some numbers, and how well it is known.

  Attributes:
    mean: NaN without a number.
    error: standard error of the mean; NaN with fewer than 2 numbers.
    freedom: degrees of freedom of the error.
    count: how many numbers: pairs, runs or draws.
  """

  mean: float
  error: float
  freedom: float
  count: int

  @property
  def half_width(self) -> float:
    """Of the 95% t interval; NaN with fewer than 2 numbers."""
    return math.nan if self.count < 2 else half_width(self.error, self.freedom)


def half_width(error, freedom):
  """Half the width of the 95% t interval; 0 for an error of 0.

  Args:
    error: standard error of the mean, a number or an array.
    freedom: degrees of freedom.
  """
  # Imported late: it takes a second, and `--help` has no use for it.
  from scipy import stats

  return stats.t.ppf(1 - LEVEL / 2, freedom) * error


def sample(values: Iterable[float]) -> Sample:
  """Of numbers, one a pair; NaN if one of them is."""
  values = np.array(list(values), float)
  count = len(values)
  mean = float(values.mean()) if count else math.nan
  error = (
    float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
  )
  return Sample(mean, error, count - 1, count)


def number(sample: Sample) -> str:
  """A mean with its interval, as text."""
  if math.isnan(sample.mean):
    return 'no number'
  half = sample.half_width
  size = max(abs(sample.mean), 0 if math.isnan(half) else half)
  form = '.1e' if 0 < size < 0.005 or size >= 1000 else '.2f'
  if math.isnan(half) or not half:
    return f'{sample.mean:+{form}}'
  return f'{sample.mean:+{form}} ± {half:{form}}'


def ratio(factor: float, sample: Sample) -> str:
  """A ratio with its interval, as text.

  Args:
    factor: the numbers are log10 of this over the ratio.
    sample: of the numbers.
  """
  middle, half = factor / 10**sample.mean, 10**sample.half_width
  if math.isnan(half):
    return f'{middle:.2f}'
  return f'{middle:.2f} ({middle / half:.2f} to {middle * half:.2f})'


def welch(first: Mapping, second: Mapping) -> Sample:
  """Difference of the means of two independent samples, first minus second.

  Args:
    first: ``mean``, ``std`` (of the values themselves) and ``count``, as
      summary tables have them.
    second: the same.
  """
  squares = [x['std'] ** 2 / (x['count'] - 1) for x in (first, second)]
  total = sum(squares)
  freedom = math.inf
  if total:
    parts = zip(squares, (first, second), strict=True)
    freedom = total**2 / sum(s**2 / (x['count'] - 1) for s, x in parts)
  return Sample(
    first['mean'] - second['mean'],
    math.sqrt(total),
    freedom,
    int(min(first['count'], second['count'])),
  )


@dataclasses.dataclass(frozen=True)
class Test:
  """One test of a claim. Numbers are signed so that above 0 is as claimed.

  Attributes:
    label: what is compared; tests that differ in the depth alone share it.
    depth: layer or path depth; None where there is none.
    sample: of the numbers.
    margin: if given, the claim is that the mean is nearer to 0 than this.
    pairs: the numbers by seed, where they are those of pairs.
  """

  label: str
  depth: int | None
  sample: Sample
  margin: float | None = None
  pairs: Mapping[int, float] = dataclasses.field(default_factory=dict)

  @property
  def agrees(self) -> bool:
    """Whether the mean is as claimed."""
    if self.margin is None:
      return self.sample.mean > 0
    return abs(self.sample.mean) < self.margin

  @property
  def p_value(self) -> float:
    """Two-sided, not corrected; 1 where there is nothing to test."""
    if self.sample.count < LEAST_COUNT or math.isnan(self.sample.mean):
      return 1.0
    distance = abs(self.sample.mean)
    if self.margin is not None:
      # From the nearer end of the margin.
      distance = abs(distance - self.margin)
    if not self.sample.error:
      return 0.0 if distance else 1.0
    from scipy import stats

    t = distance / self.sample.error
    return min(1.0, 2 * float(stats.t.sf(t, self.sample.freedom)))


def pairs_text(count: int) -> str:
  """How many pairs, such as ``3 pairs``."""
  return f'{count} pair{"s" * (count != 1)}'


def of_pairs(
  label: str,
  depth: int | None,
  values: Mapping[int, float],
  margin: float | None = None,
) -> Test:
  """The test of numbers of pairs, by seed; what is NaN is no pair."""
  pairs = {k: float(v) for k, v in values.items() if not math.isnan(v)}
  return Test(label, depth, sample(pairs.values()), margin, pairs)


@dataclasses.dataclass(frozen=True)
class Judged:
  """A test and what came of it.

  Attributes:
    test: the test.
    corrected: its p-value after Holm's correction.
    verdict: one of `VERDICTS`.
  """

  test: Test
  corrected: float
  verdict: str


def holm(p_values: Sequence[float]) -> list[float]:
  """Corrected p-values (Holm 1979): the k-th smallest of m times m + 1 - k.

  None is smaller than one before it, or larger than 1.
  """
  order = sorted(range(len(p_values)), key=p_values.__getitem__)
  corrected = [0.0] * len(p_values)
  largest = 0.0
  for rank, index in enumerate(order):
    largest = max(largest, p_values[index] * (len(p_values) - rank))
    corrected[index] = min(1.0, largest)
  return corrected


def judge(tests: Sequence[Test]) -> list[Judged]:
  """Verdicts of all tests of a claim, corrected together.

  A test that cannot be made counts in the correction: which tests there are is
  fixed beforehand.
  """
  corrected = holm([x.p_value for x in tests])
  return [
    Judged(test, p, _verdict(test, p))
    for test, p in zip(tests, corrected, strict=True)
  ]


def _verdict(test, corrected):
  if corrected >= LEVEL:
    return INCONCLUSIVE
  return SUPPORTED if test.agrees else CONTRADICTED


def by_label(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
  """Tests that differ in the depth alone, together."""
  found = {}
  for x in judged:
    found.setdefault(x.test.label, []).append(x)
  return found


def overall(judged: Sequence[Judged]) -> str:
  """The verdict of a whole claim: where it is supported, and where not."""
  found = {x.verdict for x in judged}
  if not judged:
    return 'not measured'
  if len(found) == 1:
    return found.pop()
  several = len(by_label(judged)) > 1
  parts = []
  for verdict in VERDICTS:
    members = by_label(x for x in judged if x.verdict == verdict)
    places = [_place(k, v, several) for k, v in members.items()]
    if verdict == INCONCLUSIVE and several:
      # The others are named; their labels are long.
      places = ['the rest'] * bool(places)
    if places:
      colon = ':' * several
      parts.append(f'{verdict}{colon} {", ".join(places)}')
  return '; '.join(parts)


def _place(label, judged, several):
  numbers = ', '.join(str(x.test.depth) for x in judged if x.test.depth)
  where = f'at {numbers}' if numbers else ''
  return f'{label} {where}'.strip() if several or not where else where
