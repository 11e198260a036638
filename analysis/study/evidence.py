"""Summary tables of one comparison, looked up by run and point."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
import math

from analysis.common import tables
from analysis.study import measure
from analysis.study import plan

# Where more of a run's values than this are below the resolution of float64 or
# invalid, their mean is that of a selection, and is not used.
MOST_LEFT_OUT = 0.01

_POINT = (
  'analysis',
  'quantity',
  'ablation',
  'norm',
  'scaling',
  'stack',
  'at',
  'depth',
)
Values = dict[int, float]
NAMES = {plan.SOFTMAX: 'softmax', plan.SINKHORN: 'Sinkhorn'}


class Evidence:
  """What has been measured in one comparison.

  A point is a value for each of some columns: ``analysis``, ``quantity``,
  ``ablation``, ``norm``, ``scaling``, ``stack``, ``at`` (the last step unless
  given) and ``depth``; those that do not apply are left out.

  Attributes:
    rows: all of them.
    depths: where verdicts are given: 4, 12 and 24, as far as the models are
      deep, and the last layer.
    seeds: of the pairs.
  """

  def __init__(self, rows: Iterable[tables.Row], num_layers: int):
    self.rows = list(rows)
    self.depths = depths(num_layers)
    self._rows = {}
    seeds = {}
    for row in self.rows:
      self._rows[row['normalizer'], row['seed'], *_key(row)] = row
      trained = row.get('trained') or row['normalizer']
      seeds.setdefault(trained, set()).add(row['seed'])
    both = (seeds.get(x, set()) for x in (plan.SOFTMAX, plan.SINKHORN))
    self.seeds = sorted(set.intersection(*both))

  def without(self, seeds: Collection[int]) -> 'Evidence':
    """The same without some pairs."""
    rows = [x for x in self.rows if x['seed'] not in seeds]
    return Evidence(rows, self.depths[-1])

  def row(self, normalizer: str, seed: int, **point) -> tables.Row | None:
    """One row; None if it has not been measured."""
    point = {'at': measure.LAST} | point
    return self._rows.get((normalizer, seed, *_key(point)))

  def value(
    self, normalizer: str, seed: int, column: str = 'mean', **point
  ) -> float:
    """One number of a run.

    NaN if it has not been measured, or if more than `MOST_LEFT_OUT` of what it
    is a mean of had to be left out.
    """
    row = self.row(normalizer, seed, **point)
    if row is None or is_selection(row):
      return math.nan
    return row[column]

  def values(self, normalizer: str, column: str = 'mean', **point) -> Values:
    """The same number of the runs of all pairs, by seed."""
    return {x: self.value(normalizer, x, column, **point) for x in self.seeds}

  def difference(
    self, column: str = 'mean', sinkhorn: Mapping | None = None, **point
  ) -> Values:
    """Sinkhorn minus softmax, by seed.

    Args:
      column: the number that is compared.
      sinkhorn: what is different in the point of the Sinkhorn run.
      **point: of both.
    """
    own = point | dict(sinkhorn or {})
    return minus(
      self.values(plan.SINKHORN, column, **own),
      self.values(plan.SOFTMAX, column, **point),
    )


def is_selection(row: tables.Row) -> bool:
  """Whether more than `MOST_LEFT_OUT` of its values had to be left out."""
  left_out = row.get('below_resolution', 0) + row.get('invalid', 0)
  return left_out > MOST_LEFT_OUT * (left_out + row['count'])


def _key(point):
  values = (point.get(x) for x in _POINT)
  return tuple('' if x is None else x for x in values)


def depths(num_layers: int) -> tuple[int, ...]:
  """4, 12 and 24 for 24 layers; fewer for fewer, the last always."""
  before = [x for x in (4, 12, 24) if x < num_layers] or [1]
  return tuple(dict.fromkeys([*before, num_layers]))


def minus(first: Values, second: Values) -> Values:
  """Differences, by seed."""
  return {k: first[k] - second[k] for k in first}


def least(*several: Values) -> Values:
  """The smallest of numbers with the same seed; NaN if one is."""
  return {
    k: math.nan
    if any(math.isnan(x[k]) for x in several)
    else min(x[k] for x in several)
    for k in several[0]
  }


def mean(*several: Values) -> Values:
  """Means of numbers with the same seed."""
  return {
    k: math.fsum(x[k] for x in several) / len(several) for k in several[0]
  }


def over_seeds(values: Values) -> float:
  """The mean of what exists; NaN if nothing does."""
  numbers = [x for x in values.values() if not math.isnan(x)]
  return math.fsum(numbers) / len(numbers) if numbers else math.nan
