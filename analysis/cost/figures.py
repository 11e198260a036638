"""Figures of `analysis.cost`, made from its tables alone."""

import functools
import pathlib

from analysis.common import figures
from analysis.common import frames

_AXES = {'iterations': 'Sinkhorn iterations'}


def save(output: pathlib.Path, part: str, table: frames.Table) -> None:
  """Saves the figures of a part; parts without any are passed over."""
  if part == 'growth':
    for what, own in table.groupby('what', sort=False):
      draw = functools.partial(_draw_growth, table=own)
      figures.save(output / f'growth_{what}', draw, (10, 5))
  elif part in ('step', 'normalizer'):
    timed = table[table['ms'].notna()]
    draw = functools.partial(_draw_times, table=timed)
    figures.save(output / part, draw, (9, 1 + 0.25 * len(timed)))


def _draw_times(fig, table):
  """Median times as dots, with fastest and slowest as bars; one panel each."""
  tables = table.groupby('table', sort=False)
  axes = fig.subplots(
    len(tables),
    sharex=True,
    squeeze=False,
    height_ratios=tables.size(),
  )
  for ax, (title, own) in zip(axes[:, 0], tables, strict=True):
    sides = [own['ms'] - own['ms_min'], own['ms_max'] - own['ms']]
    places = range(len(own))
    ax.errorbar(own['ms'], places, xerr=sides, fmt='o', color='k', capsize=3)
    ax.set_yticks(places, own['name'])
    ax.set_ylim(len(own) - 0.5, -0.5)
    ax.set_xscale('log')
    ax.set_title(title, loc='left')
  axes[-1, 0].set_xlabel('time, ms (median, fastest to slowest)')


def _draw_growth(fig, table):
  """Time and memory against each size, with exponents."""
  swept, forms = table['against'].unique(), table['form'].unique()
  axes = fig.subplots(2, len(swept), sharex='col', squeeze=False)
  for against, (of_time, of_memory) in zip(swept, axes.T, strict=True):
    own = frames.select(table, against=against)
    _draw_curves(of_time, own, forms, 'time', 'ms')
    _draw_curves(of_memory, own, forms, 'memory', 'memory_mb')
    # 0 iterations are shown too.
    of_time.set_xscale('symlog' if against == 'iterations' else 'log')
    of_memory.set_xlabel(_AXES.get(against, against))
    values = sorted(own['at'].dropna().unique())
    of_memory.set_xticks(values, [str(x) for x in values], fontsize=8)
    of_memory.minorticks_off()
  axes[0, 0].set_ylabel('time, ms')
  axes[1, 0].set_ylabel('scratch, MB')
  handles = axes[0, 0].get_lines()
  fig.legend(handles, forms, loc='outside upper center', ncols=len(forms))


def _draw_curves(ax, table, forms, of, column):
  for number, form in enumerate(forms):
    own, style = frames.select(table, form=form), figures.curve(number)
    ((exponent, error),) = frames.select(own, of=of)[
      ['exponent', 'exponent_error']
    ].to_numpy()
    label = f'{exponent:.2f} ± {error:.2f}' if exponent == exponent else 'none'
    points = own[own[column] > 0]
    ax.plot(points['at'], points[column], **style, label=label)
    if of == 'time':
      sides = points['ms_min'], points['ms_max']
      ax.fill_between(points['at'], *sides, color=style['color'], alpha=0.15)
  ax.set_yscale('log')
  # Room above the curves for the exponents.
  low, high = ax.get_ylim()
  ax.set_ylim(low, high * (high / low) ** 0.6)
  ax.legend(title='exponent', fontsize=7, title_fontsize=7, loc='upper left')
