"""Curves over depth: one look, and one caption, for all analyses."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import textwrap
from typing import Any

from matplotlib import axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from analysis.common import figures
from analysis.common import tables

SELECTION = (
  'Open markers off the curve: some values were below resolution or invalid and'
  ' are left out, so that the mean is that of a selection; where none is left'
  ' there is no point.'
)
LEGEND = (
  'Curves: mean over seeds of the mean of log10; shaded: standard deviation'
  ' over what a run was measured on; bars, with several seeds: standard'
  f' deviation between seeds. {SELECTION}'
)
DIFFERENCE = (
  'Differences are Sinkhorn minus softmax of pairs of runs with one seed, of'
  ' the means of log10; shaded: 95% t interval over pairs.'
)


@dataclasses.dataclass(frozen=True)
class Plot:
  """A figure to be saved.

  Attributes:
    name: of the files, without ending.
    caption: what it shows, and of what.
    size: width and height in inches.
    draw: draws it on an empty figure.
  """

  name: str
  caption: str
  size: tuple[float, float]
  draw: Callable[[figure.Figure], None]


def select(rows: Iterable[tables.Row], **values) -> list[tables.Row]:
  """Rows with these values."""
  return [x for x in rows if all(x.get(k) == v for k, v in values.items())]


def source(rows: Sequence[tables.Row]) -> str:
  """Where the numbers are from, in short; stands on the figure itself."""

  def listed(name):
    values = dict.fromkeys(
      x[name] for x in rows if x.get(name) not in ('', None)
    )
    return ', '.join(map(str, values))

  parts = [f'data: {listed("data")}' if listed('data') else '']
  parts.append(listed('notice'))
  parts.append(listed('dtype'))
  seeds = {x['seed'] for x in rows if x.get('seed') is not None}
  if seeds:
    parts.append(f'{len(seeds)} seed{"s" * (len(seeds) > 1)}')
  for name in ('examples', 'paths', 'draws'):
    if listed(name):
      parts.append(f'{listed(name)} {name}')
  return '; '.join(x for x in parts if x)


def caption(rows: Sequence[tables.Row], what: str, *more: str) -> str:
  """A whole caption: what it shows, where from, how to read it."""
  text = source(rows)
  return ' '.join([what, f'{text[0].upper()}{text[1:]}.', *more])


def legend_above(
  fig: figure.Figure, ax: axes.Axes, ncols: int = 2, **settings: Any
) -> None:
  """One legend above all panels, of what is drawn in one of them."""
  handles, labels = ax.get_legend_handles_labels()
  fig.legend(
    handles, labels, loc='outside upper center', ncols=ncols, **settings
  )


def finish(fig: figure.Figure, rows: Sequence[tables.Row]) -> None:
  """Writes below a figure where its numbers are from."""
  width = int(fig.get_figwidth() * 17)
  text = '\n'.join(textwrap.wrap(source(rows), width))
  fig.supxlabel(text, fontsize=7, color='#444444', x=0.01, ha='left')


def groups(rows: Iterable[tables.Row]) -> list[str]:
  """Names of the groups, softmax first: the n-th has the n-th style."""
  found = dict.fromkeys(
    (x['normalizer'] != 'softmax', x['group']) for x in rows
  )
  return [group for _, group in sorted(found)]


def draw(
  ax: axes.Axes,
  rows: Iterable[tables.Row],
  style: dict,
  label: str | None = None,
  bars: bool = True,
) -> None:
  """Draws one curve over depth, of the runs of a group.

  Args:
    ax: where to.
    rows: of a summary table; all of one group and quantity.
    style: of `figures.curve`.
    label: for the legend.
    bars: whether to show the standard deviation between seeds.
  """
  points = sorted(tables.over_seeds(rows), key=lambda x: x['depth'])
  partly = [x for x in points if x['below_resolution'] or x['invalid']]
  whole = [x for x in points if x not in partly and np.isfinite(x['mean'])]
  depth, mean, inner, outer = (
    np.array([x[k] for x in whole])
    for k in ('depth', 'mean', 'std_examples', 'std_seeds')
  )
  label = label if whole or not label else f'{label} (no complete values)'
  ax.plot(depth, mean, **style, label=label, markevery=_every(whole))
  ax.fill_between(
    depth, mean - inner, mean + inner, color=style['color'], alpha=0.15, lw=0
  )
  if bars and np.isfinite(outer).any():
    ax.errorbar(
      depth, mean, outer, fmt='none', ecolor=style['color'], capsize=2
    )
  _draw_open(ax, partly, 'mean', style)
  # There is no half a layer.
  ax.xaxis.set_major_locator(ticker.MaxNLocator('auto', integer=True))


def _every(points):
  """A marker on each of few points, on some of many."""
  return max(1, len(points) // 12)


def _draw_open(ax, points, value, style):
  """Means of a selection: they are not part of the curve."""
  points = [x for x in points if np.isfinite(x[value])]
  ax.plot(
    *([x[k] for x in points] for k in ('depth', value)),
    color=style['color'],
    marker=style['marker'],
    linestyle='none',
    markerfacecolor='white',
  )


def draw_difference(
  ax: axes.Axes,
  rows: Sequence[tables.Row],
  style: dict,
  label: str | None = None,
) -> None:
  """Draws the difference of a group from softmax over depth."""
  points = sorted(rows, key=lambda x: x['depth'])
  partly = [x for x in points if x['left_out']]
  whole = [x for x in points if x not in partly]
  depth, mean, half = (
    np.array([x[k] for x in whole])
    for k in ('depth', 'difference', 'half_width')
  )
  ax.axhline(0, color='#888888', linewidth=0.8)
  ax.plot(depth, mean, **style, label=label, markevery=_every(whole))
  if np.isfinite(half).any():
    ax.fill_between(
      depth, mean - half, mean + half, color=style['color'], alpha=0.15, lw=0
    )
  _draw_open(ax, partly, 'difference', style)


def describe_pairs(differences: Sequence[tables.Row]) -> str:
  """How many pairs a difference is of, for captions and titles."""
  numbers = {x['num_pairs'] for x in differences}
  if not numbers:
    return 'No pair of runs: no difference.'
  if max(numbers) == 1:
    return 'One pair of runs: no confidence interval.'
  return f'{", ".join(map(str, sorted(numbers)))} pairs of runs.'


def headline(
  rows: Sequence[tables.Row],
  title: str,
  depths: Sequence[int] = (1, 4, 12, 24),
) -> list[str]:
  """Means of log10 at a few depths, and differences, as lines of text."""
  last = max((x['depth'] for x in rows), default=0)
  depths = sorted({x for x in (*depths, last) if x <= last})
  lines = [f'{title}; mean of log10 (standard deviation) at depth']
  width = max([len(x['group']) for x in rows] + [24])
  lines.append(' ' * width + ''.join(f'{x:>17d}' for x in depths))
  points = tables.over_seeds(rows)
  for group in groups(rows):
    cells = []
    for depth in depths:
      (point,) = select(points, group=group, depth=depth) or (None,)
      if point is None or not np.isfinite(point['mean']):
        cells.append(_why_missing(point))
      else:
        star = '*' if point['below_resolution'] or point['invalid'] else ' '
        cells.append(
          f'{point["mean"]:9.3f} ({point["std_examples"]:.3f}){star}'
        )
    lines.append(f'{group:{width}s}' + ''.join(f'{x:>17}' for x in cells))
  differences = tables.differences(rows)
  for group in groups(differences) if differences else ():
    cells = []
    for depth in depths:
      found = select(differences, group=group, depth=depth)
      if not found or not np.isfinite(found[0]['difference']):
        cells.append('-')
      else:
        half = found[0]['half_width']
        interval = '' if np.isnan(half) else f' ± {half:.3f}'
        star = '*' if found[0]['left_out'] else ' '
        cells.append(f'{found[0]["difference"]:+.3f}{interval}{star}')
    lines.append(
      f'{"difference":{width}s}' + ''.join(f'{x:>17}' for x in cells)
    )
  if differences:
    lines.append(f'({describe_pairs(differences)})')
  if any('*' in x for x in lines):
    lines.append('(* values below resolution or invalid are left out.)')
  return lines


def _why_missing(point):
  if point is None:
    return 'not measured'
  return 'invalid' if point['invalid'] else 'below resolution'


def draw_group_curves(
  ax: axes.Axes, rows: Sequence[tables.Row], names: Sequence[str]
) -> None:
  """One curve for each group."""
  for number, group in enumerate(names):
    draw(ax, select(rows, group=group), figures.curve(number), group)
