"""Pages: HTML from the templates beside this file, one file, no network.

Text is escaped by the templates, so that names of runs are whatever people call
directories.
"""

import base64
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math
import pathlib
from typing import Any

import jinja2
import pandas as pd

from analysis.common import statistics

_ENVIRONMENT = jinja2.Environment(
  loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / 'templates'),
  autoescape=True,
  trim_blocks=True,
  lstrip_blocks=True,
  undefined=jinja2.StrictUndefined,
)
_ENVIRONMENT.globals['verdicts'] = statistics.VERDICTS
# Of an interval plot, in pixels.
_HALF_WIDTH, _LINE_HEIGHT = 60, 9


def render(template: str, **content: Any) -> str:
  """The page of a template, such as 'study.html'."""
  return _ENVIRONMENT.get_template(template).render(**content)


def image(path: pathlib.Path) -> str:
  """A PNG file as the address of an image."""
  return 'data:image/png;base64,' + base64.b64encode(path.read_bytes()).decode()


@dataclasses.dataclass(frozen=True)
class Effect:
  """One number with its interval, in a cell and as a mark of a plot.

  Attributes:
    text: the number and its interval.
    verdict: one of `statistics.VERDICTS`; '' for none.
    middle: where the mean is, in pixels from the left; None without a number.
    low: where the interval begins; as `middle` without an interval.
    high: where it ends.
    y: from above.
  """

  text: str
  verdict: str
  middle: float | None
  low: float | None
  high: float | None
  y: float


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of a table of effects: a quantity at all depths.

  Attributes:
    label: what is compared.
    effects: by column, see `columns`; what is missing was not tested.
    pairs: how many pairs, runs or draws.
    verdict: of all of them, in words; '' for none.
    height: of its plot, in pixels.
  """

  label: str
  effects: dict[str, Effect]
  pairs: str
  verdict: str
  height: float


def columns(depths: Iterable[float | None]) -> list[str]:
  """Columns of a table of effects: '' (no depth) first, then depths."""
  found = {-1 if x is None or x != x else int(x) for x in depths}
  return ['' if x < 0 else str(x) for x in sorted(found)]


def limit(means: Iterable[float]) -> float:
  """The end of a common scale: most means lie within; others at its edge."""
  sizes = pd.Series([abs(x) for x in means], dtype=float).dropna()
  largest = sizes.quantile(0.8) if len(sizes) else 1.0
  return 1.25 * largest or 1.0


def lines(
  tests: pd.DataFrame, end: float, number=statistics.number
) -> list[Line]:
  """Lines of a table of effects.

  Args:
    tests: with ``label``, ``depth``, ``mean``, ``half_width``, ``count`` and
      ``verdict``.
    end: of the scale of the plots, see `limit`.
    number: a mean with its interval as text, from a `statistics.Sample`.
  """
  return [
    _line(label, members, end, number)
    for label, members in tests.groupby('label', sort=False)
  ]


def _line(label, members, end, number):
  effects = {}
  for i, row in enumerate(members.to_dict('records')):
    (column,) = columns([row['depth']])
    effects[column] = _effect(row, end, number, i)
  counts = sorted(set(members['count']))
  pairs = f'{counts[0]}' if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'
  verdict = summary(members)
  return Line(label, effects, pairs, verdict, len(effects) * _LINE_HEIGHT + 4)


def _effect(row, end, number, index):
  mean, half = (
    math.nan if row[x] is None else row[x] for x in ('mean', 'half_width')
  )

  def place(value):
    return _HALF_WIDTH * (1 + max(-0.95, min(0.95, 0.95 * value / end)))

  known = not math.isnan(mean)
  interval = 0.0 if math.isnan(half) else half
  return Effect(
    number(_Known(mean, half)),
    row['verdict'] if isinstance(row['verdict'], str) else '',
    place(mean) if known else None,
    place(mean - interval) if known else None,
    place(mean + interval) if known else None,
    index * _LINE_HEIGHT + _LINE_HEIGHT / 2 + 2,
  )


@dataclasses.dataclass(frozen=True)
class _Known:
  """A sample whose interval is known already."""

  mean: float
  half_width: float


def summary(tests: pd.DataFrame) -> str:
  """The verdict of tests that differ in the depth alone, in words."""
  verdicts = [x for x in tests['verdict'] if isinstance(x, str) and x]
  if len(set(verdicts)) < 2:
    return verdicts[0] if verdicts else ''
  parts = []
  for verdict in statistics.VERDICTS:
    where = tests['depth'][tests['verdict'] == verdict]
    if len(where):
      parts.append(f'{verdict} at {", ".join(columns(where))}')
  return '; '.join(parts)


def table(rows: pd.DataFrame, names: Sequence[str] = ()) -> dict[str, Any]:
  """Head and cells of a plain table; numbers with four digits.

  Args:
    rows: the table.
    names: heads of its columns; their own names if not given.
  """
  heads = names or [str(x).replace('_', ' ') for x in rows]
  return {
    'heads': heads,
    'rows': [[_cell(x) for x in row] for row in rows.itertuples(index=False)],
  }


def _cell(value):
  if value is None or value != value:
    return ''
  if isinstance(value, float):
    return f'{value:.0f}' if value.is_integer() else f'{value:.4g}'
  return str(value)
