"""Curves over depth: one look, and one caption, for all analyses."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import textwrap
from typing import Any

from matplotlib import axes
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from analysis.common import figures
from analysis.common import frames

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
RESIDUAL = 'log10 of the residual'
_GREY = '#888888'


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


def source(table: frames.Table) -> str:
  """Where the numbers are from, in short; stands on the figure itself."""

  def values(name):
    found = table[name].dropna().unique() if name in table else ()
    return [x for x in found if x != '']

  def listed(name, form='{}'):
    return ', '.join(form.format(x) for x in values(name))

  data = listed('data')
  parts = [f'data: {data}' if data else '', listed('notice'), listed('dtype')]
  seeds = len(values('seed'))
  parts.append(f'{seeds} seed{"s" * (seeds > 1)}' if seeds else '')
  for name in ('examples', 'paths', 'draws'):
    parts.append(f'{listed(name, "{:.0f}")} {name}' if values(name) else '')
  return '; '.join(x for x in parts if x)


def caption(table: frames.Table, what: str, *more: str) -> str:
  """A whole caption: what it shows, where from, how to read it."""
  text = source(table)
  return ' '.join([what, f'{text[0].upper()}{text[1:]}.', *more])


def finish(fig: figure.Figure, table: frames.Table) -> None:
  """Writes below a figure where its numbers are from."""
  width = int(fig.get_figwidth() * 17)
  text = '\n'.join(textwrap.wrap(source(table), width))
  fig.supxlabel(text, fontsize=7, color='#444444', x=0.01, ha='left')


def legend_above(fig: figure.Figure, ncols: int = 2, **settings: Any) -> None:
  """One legend above all panels, of what is drawn in any of them."""
  found = {}
  for ax in fig.axes:
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
      found.setdefault(label, handle)
  fig.legend(
    found.values(),
    found.keys(),
    loc='outside upper center',
    ncols=ncols,
    **settings,
  )


def groups(table: frames.Table) -> list[str]:
  """Names of the groups, softmax first: the n-th has the n-th style."""
  if table.empty:
    return []
  found = table[['normalizer', 'group']].drop_duplicates()
  pairs = zip(found['normalizer'] != 'softmax', found['group'], strict=True)
  return list(dict.fromkeys(group for _, group in sorted(pairs)))


def draw(
  ax: axes.Axes,
  table: frames.Table,
  style: dict,
  label: str | None = None,
  bars: bool = True,
  band: bool = True,
) -> None:
  """Draws one curve over depth, of the runs of a group.

  Args:
    ax: where to.
    table: a summary table; all of one group and quantity.
    style: of `figures.curve`.
    label: for the legend.
    bars: whether to show the standard deviation between seeds.
    band: whether to show that over examples.
  """
  points = frames.over_seeds(table).sort_values('depth')
  partly = (points['below_resolution'] + points['invalid'] > 0).to_numpy(bool)
  whole = points[~partly & np.isfinite(points['mean'])]
  if label and whole.empty:
    label = f'{label} (no complete values)'
  _line(ax, whole, 'mean', style, label)
  if band:
    _band(ax, whole, 'mean', 'std_examples', style)
  if bars and np.isfinite(whole['std_seeds']).any():
    ax.errorbar(
      whole['depth'],
      whole['mean'],
      whole['std_seeds'],
      fmt='none',
      ecolor=style['color'],
      capsize=2,
    )
  _draw_open(ax, points[partly], 'mean', style)
  # There is no half a layer.
  ax.xaxis.set_major_locator(ticker.MaxNLocator('auto', integer=True))


def _line(ax, points, value, style, label):
  # A marker on each of few points, on some of many.
  every = max(1, len(points) // 12)
  ax.plot(points['depth'], points[value], **style, label=label, markevery=every)


def _band(ax, points, value, half, style):
  ax.fill_between(
    points['depth'],
    points[value] - points[half],
    points[value] + points[half],
    color=style['color'],
    alpha=0.15,
    lw=0,
  )


def _draw_open(ax, points, value, style):
  """Means of a selection: they are not part of the curve."""
  ax.plot(
    points['depth'],
    points[value],
    color=style['color'],
    marker=style['marker'],
    linestyle='none',
    markerfacecolor='white',
  )


def draw_difference(
  ax: axes.Axes,
  differences: frames.Table,
  style: dict,
  label: str | None = None,
) -> None:
  """Draws the difference of a group from softmax over depth.

  Args:
    ax: where to.
    differences: of one group and quantity, see `frames.differences`.
    style: of `figures.curve`.
    label: for the legend.
  """
  points = differences.sort_values('depth')
  partly = points['left_out'] > 0
  ax.axhline(0, color=_GREY, linewidth=0.8)
  _line(ax, points[~partly], 'difference', style, label)
  if np.isfinite(points['half_width']).any():
    _band(ax, points[~partly], 'difference', 'half_width', style)
  _draw_open(ax, points[partly], 'difference', style)


def draw_groups(
  ax: axes.Axes,
  table: frames.Table,
  names: Sequence[Hashable] = (),
  by: str = 'group',
  styles: Mapping[Hashable, dict] | None = None,
  **settings: Any,
) -> None:
  """One curve for each group.

  Args:
    ax: where to.
    table: a summary table, of one quantity.
    names: all groups of the figure, so that each has one style in all panels;
      those of the table if not given.
    by: the column whose values are the groups.
    styles: of `figures.curve`, by name, where they are not in that order.
    **settings: of `draw`.
  """
  for number, name in enumerate(names or groups(table)):
    points = frames.select(table, **{by: name})
    if len(points):
      style = styles[name] if styles else figures.curve(number)
      draw(ax, points, style, str(name), **settings)


def draw_lines(
  ax: axes.Axes,
  table: frames.Table,
  names: Sequence[Hashable],
  x: str,
  each: str,
  **settings: Any,
) -> None:
  """One line for each run, or the like, in the style of its group.

  Args:
    ax: where to.
    table: with ``group``, ``mean`` and the two columns.
    names: the groups.
    x: the column on the horizontal axis.
    each: the column that tells lines from each other.
    **settings: of `Axes.plot`.
  """
  for number, name in enumerate(names):
    own = frames.select(table, group=name)
    style = figures.curve(number) | settings
    for index, (_, points) in enumerate(own.groupby(each, sort=False)):
      label = None if index else str(name)
      every = settings.get('markevery', max(1, len(points) // 8))
      ax.plot(
        points[x],
        points['mean'],
        **style | {'markevery': every},
        label=label,
      )


def draw_group_differences(
  ax: axes.Axes,
  differences: frames.Table,
  names: Sequence[Hashable],
  by: str = 'group',
) -> None:
  """One difference for each group, in the style of its curve.

  Args:
    ax: where to.
    differences: of one quantity, see `frames.differences`.
    names: all groups of the figure.
    by: the column whose values are the groups.
  """
  for number, name in enumerate(names):
    points = frames.select(differences, **{by: name})
    if len(points):
      draw_difference(ax, points, figures.curve(number), str(name))


Selections = Mapping[str, Mapping[str, Any]]
Panel = Callable[[axes.Axes, frames.Table], None]


def small_multiples(
  fig: figure.Figure,
  table: frames.Table,
  columns: Selections,
  rows: Selections | None = None,
  *,
  wrap: int = 0,
  by: str = 'group',
  names: Sequence[Hashable] | Mapping[str, Sequence[Hashable]] = (),
  panel: Panel | Mapping[str, Panel] | None = None,
  xlabel: str = 'layer',
  ylabel: str = RESIDUAL,
  sharey: str | bool = 'row',
  logarithmic: Collection[str] = (),
  ncols: int = 2,
  **settings: Any,
) -> np.ndarray:
  """Panels of one look, one for each selection of rows of a table.

  Args:
    fig: an empty figure.
    table: all that is drawn.
    columns: title of each column of panels, and what it selects.
    rows: the same for the lines of panels; the title goes to the y axis.
    wrap: panels in a line, where there are columns alone; 0 for all.
    by: the column of the table whose values are the curves.
    names: the curves, in the order of their styles; those of the table if not
      given. Where columns have curves of their own: names by title, and the
      legends are below the columns.
    panel: draws a panel from its rows, for all panels or by the title of the
      line; a curve for each name if not given.
    xlabel: below the lowest panels.
    ylabel: left of each line that has no title.
    sharey: of `Figure.subplots`.
    logarithmic: titles of the panels whose y axis is.
    ncols: columns of the legend above all panels.
    **settings: of `draw_groups`.

  Returns:
    The panels, ``[rows, columns]``, for further touches.
  """
  if not names:
    names = groups(table) if by == 'group' else list(table[by].unique())
  own = isinstance(names, Mapping)
  panel = panel or {}
  lines = rows or {'': {}}
  shape = (len(lines), len(columns))
  if wrap:
    shape = (-(-len(columns) // wrap), wrap)
  panels = fig.subplots(*shape, sharex=True, sharey=sharey, squeeze=False)
  places = [(above, title) for above in lines for title in columns]
  for ax, (above, title) in zip(panels.flat, places, strict=False):
    part = frames.select(table, **lines[above], **columns[title])
    draw_panel = panel.get(above) if isinstance(panel, Mapping) else panel
    if draw_panel:
      draw_panel(ax, part)
    else:
      draw_groups(ax, part, names[title] if own else names, by, **settings)
    if title in logarithmic:
      ax.set_yscale('log')
    if wrap or ax in panels[0]:
      ax.set_title(title, fontsize=9)
  for ax in panels.flat[len(places) :]:
    ax.axis('off')
  for ax in panels[-1]:
    ax.set_xlabel(xlabel)
    if own:
      # Below, so that no curve is hidden.
      ax.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.16))
  above = list(lines) if rows else [''] * len(panels)
  for ax, text in zip(panels[:, 0], above, strict=True):
    ax.set_ylabel(text or ylabel)
  if not own:
    legend_above(fig, ncols)
  finish(fig, table)
  return panels


def panels(
  name: str,
  table: frames.Table,
  what: str,
  columns: Selections,
  rows: Selections | None = None,
  *,
  size: tuple[float, float] = (8, 4),
  more: Sequence[str] = (),
  touch: Callable[[np.ndarray], None] | None = None,
  **settings: Any,
) -> Plot:
  """The figure that `small_multiples` draws, with its caption.

  Args:
    name: of its files.
    table: see `small_multiples`.
    what: it shows, the first sentences of the caption.
    columns: see `small_multiples`.
    rows: the same.
    size: width and height in inches.
    more: last sentences of the caption.
    touch: is given the panels when they are drawn.
    **settings: of `small_multiples`.
  """

  def draw_panels(fig):
    drawn = small_multiples(fig, table, columns, rows, **settings)
    if touch:
      touch(drawn)

  return Plot(name, caption(table, what, *more), size, draw_panels)


def describe_pairs(differences: frames.Table) -> str:
  """How many pairs a difference is of, for captions and titles."""
  numbers = (
    sorted(differences['num_pairs'].unique()) if len(differences) else []
  )
  if not numbers:
    return 'No pair of runs: no difference.'
  if numbers[-1] == 1:
    return 'One pair of runs: no confidence interval.'
  return f'{", ".join(map(str, numbers))} pairs of runs.'


def headline(
  table: frames.Table,
  title: str,
  depths: Sequence[int] = (1, 4, 12, 24),
) -> list[str]:
  """Means of log10 at a few depths, and differences, as lines of text."""
  last = table['depth'].max() if len(table) else 0
  depths = sorted({x for x in (*depths, last) if x <= last})
  curves = frames.over_seeds(table)
  differences = frames.differences(table)
  lines = {
    group: [_mean_text(curves, group, x) for x in depths]
    for group in groups(table)
  }
  lines |= {
    f'difference of {group}': [
      _difference_text(differences, group, x) for x in depths
    ]
    for group in groups(differences)
  }
  import pandas as pd

  text = pd.DataFrame.from_dict(lines, 'index', columns=depths).to_string()
  found = [
    f'{title}; mean of log10 (standard deviation) at depth',
    *text.splitlines(),
  ]
  if len(differences):
    found.append(f'({describe_pairs(differences)})')
  if '*' in text:
    found.append('(* values below resolution or invalid are left out.)')
  return found


def headlines(
  table: frames.Table, by: Sequence[str], title: str, **settings: Any
) -> list[str]:
  """`headline` of each part of a table.

  Args:
    table: a summary table.
    by: columns that tell the parts from each other.
    title: of a part; a form with a place for each of its values.
    **settings: of `headline`.
  """
  parts = table.groupby(list(by), sort=False)
  return [
    line
    for values, part in parts
    for line in headline(part, title.format(*values), **settings)
  ]


def _mean_text(curves, group, depth):
  points = frames.select(curves, group=group, depth=depth)
  if points.empty:
    return 'not measured'
  point = points.iloc[0]
  if not np.isfinite(point['mean']):
    return 'invalid' if point['invalid'] else 'below resolution'
  star = '*' if point['below_resolution'] or point['invalid'] else ''
  return f'{point["mean"]:.3f} ({point["std_examples"]:.3f}){star}'


def _difference_text(differences, group, depth):
  points = frames.select(differences, group=group, depth=depth)
  if points.empty or not np.isfinite(points.iloc[0]['difference']):
    return '-'
  point = points.iloc[0]
  half, star = point['half_width'], '*' if point['left_out'] else ''
  interval = '' if np.isnan(half) else f' ± {half:.3f}'
  return f'{point["difference"]:+.3f}{interval}{star}'
