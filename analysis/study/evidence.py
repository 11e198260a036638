"""Summary tables of one comparison, looked up by run and point."""

from collections.abc import Collection
from collections.abc import Mapping
import math
from typing import Any

import pandas as pd

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
# One number a pair, by seed; NaN where there is none.
Values = pd.Series
NAMES = {plan.SOFTMAX: 'softmax', plan.SINKHORN: 'Sinkhorn'}


class Evidence:
  """What has been measured in one comparison.

  A point is a value for each of some columns: ``analysis``, ``quantity``,
  ``ablation``, ``norm``, ``scaling``, ``stack``, ``at`` (the last step unless
  given) and ``depth``; those that do not apply are left out.

  Attributes:
    table: all rows.
    depths: where verdicts are given: 4, 12 and 24, as far as the models are
      deep, and the last layer.
    seeds: of the pairs.
  """

  def __init__(self, table: pd.DataFrame, num_layers: int):
    self.table = table
    self.depths = depths(num_layers)
    self._rows = {
      (row['normalizer'], row['seed'], *_key(row)): row
      for row in table.to_dict('records')
    }
    self.seeds = []
    if len(table):
      # Some analyses read a run with the other normalizer too.
      trained = table['normalizer']
      if 'trained' in table:
        named = table['trained'].fillna('') != ''
        trained = table['trained'].where(named, trained)
      both = (set(table['seed'][trained == x]) for x in NAMES)
      self.seeds = sorted(set.intersection(*both))

  def without(self, seeds: Collection[int]) -> 'Evidence':
    """The same without some pairs."""
    left = self.table[~self.table['seed'].isin(list(seeds))]
    return Evidence(left, self.depths[-1])

  def row(self, normalizer: str, seed: int, **point) -> dict[str, Any] | None:
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
    return math.nan if row is None or is_selection(row) else row[column]

  def values(self, normalizer: str, column: str = 'mean', **point) -> Values:
    """The same number of the runs of all pairs, by seed."""
    found = [self.value(normalizer, x, column, **point) for x in self.seeds]
    return pd.Series(found, self.seeds, float)

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
    return self.values(plan.SINKHORN, column, **own) - self.values(
      plan.SOFTMAX, column, **point
    )


def is_selection(row: Mapping[str, Any]) -> bool:
  """Whether more than `MOST_LEFT_OUT` of its values had to be left out."""
  counts = (row.get(x, 0) for x in ('below_resolution', 'invalid', 'count'))
  below, invalid, count = (0 if x is None or x != x else x for x in counts)
  return below + invalid > MOST_LEFT_OUT * (below + invalid + count)


def _key(point):
  values = (point.get(x) for x in _POINT)
  # What does not apply is missing in a table, and left out in a point.
  return tuple('' if x is None or x != x else x for x in values)


def depths(num_layers: int) -> tuple[int, ...]:
  """4, 12 and 24 for 24 layers; fewer for fewer, the last always."""
  before = [x for x in (4, 12, 24) if x < num_layers] or [1]
  return tuple(dict.fromkeys([*before, num_layers]))


def least(*several: Values) -> Values:
  """The smallest of numbers with the same seed; NaN if one is."""
  return pd.concat(several, axis=1).min(axis=1, skipna=False)


def mean(*several: Values) -> Values:
  """Means of numbers with the same seed; NaN if one is."""
  return pd.concat(several, axis=1).mean(axis=1, skipna=False)
