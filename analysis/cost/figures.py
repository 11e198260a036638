"""Figures of `analysis.cost`, made from its rows alone."""

import itertools
import pathlib

from analysis.common import figures
from analysis.common import timing

_AXES = {
  'iterations': 'Sinkhorn iterations',
  'tokens': 'tokens',
  'heads': 'heads',
  'batch': 'batch',
}


def save(output: pathlib.Path, part: str, rows: list[timing.Row]) -> None:
  """Saves the figures of a part; parts without any are passed over."""
  if part == 'growth':
    for what in dict.fromkeys(x['what'] for x in rows):
      own = [x for x in rows if x['what'] == what]
      figures.save(
        output / f'growth_{what}',
        lambda fig, own=own: draw_growth(fig, own),
        (10, 5),
      )
  elif part in ('step', 'normalizer'):
    timed = [x for x in rows if 'ms' in x]
    height = 1 + 0.25 * len(timed)
    figures.save(output / part, lambda fig: draw_times(fig, timed), (7, height))


def draw_times(fig, rows: list[timing.Row]) -> None:
  """Median times as dots, with fastest and slowest as bars; one panel a table.

  Args:
    fig: an empty figure.
    rows: rows with times.
  """
  tables = {
    title: list(group)
    for title, group in itertools.groupby(rows, key=lambda x: x['table'])
  }
  heights = [len(x) for x in tables.values()]
  axes = fig.subplots(
    len(tables), sharex=True, squeeze=False, height_ratios=heights
  )
  for ax, (title, group) in zip(axes[:, 0], tables.items(), strict=True):
    medians = [x['ms'] for x in group]
    sides = [
      [x['ms'] - x['ms_min'] for x in group],
      [x['ms_max'] - x['ms'] for x in group],
    ]
    ax.errorbar(
      medians, range(len(group)), xerr=sides, fmt='o', color='k', capsize=3
    )
    ax.set_yticks(range(len(group)), [x['name'] for x in group])
    ax.set_ylim(len(group) - 0.5, -0.5)
    ax.set_xscale('log')
    ax.set_title(title, loc='left')
  axes[-1, 0].set_xlabel('time, ms (median, fastest to slowest)')


def draw_growth(fig, rows: list[timing.Row]) -> None:
  """Time and memory against each size, with exponents.

  Args:
    fig: an empty figure.
    rows: rows of the part `growth` about one thing, exponents included.
  """
  swept = list(dict.fromkeys(x['against'] for x in rows))
  forms = list(dict.fromkeys(x['form'] for x in rows))
  axes = fig.subplots(2, len(swept), sharex='col', squeeze=False)
  quantities = (
    ('time', 'ms', 'time, ms'),
    ('memory', 'memory_mb', 'scratch, MB'),
  )
  for (of, column, label), line in zip(quantities, axes, strict=True):
    for against, ax in zip(swept, line, strict=True):
      for number, form in enumerate(forms):
        own = [x for x in rows if (x['against'], x['form']) == (against, form)]
        _draw_curve(ax, own, of, column, form, figures.curve(number))
      # 0 iterations are shown too.
      ax.set_xscale('symlog' if against == 'iterations' else 'log')
      ax.set_yscale('log')
      # Room above the curves for the exponents.
      low, high = ax.get_ylim()
      ax.set_ylim(low, high * (high / low) ** 0.6)
      ax.legend(
        title='exponent', fontsize=7, title_fontsize=7, loc='upper left'
      )
    line[0].set_ylabel(label)
  for against, ax in zip(swept, axes[-1], strict=True):
    ax.set_xlabel(_AXES[against])
    values = sorted(
      {x['at'] for x in rows if x['against'] == against and 'at' in x}
    )
    ax.set_xticks(values, [str(x) for x in values], fontsize=8)
    ax.minorticks_off()
  handles = [
    axes[0, 0].plot([], [], **figures.curve(number), label=form)[0]
    for number, form in enumerate(forms)
  ]
  fig.legend(handles, forms, loc='outside upper center', ncols=len(forms))


def _draw_curve(ax, rows, of, column, form, style):
  (fit,) = (x for x in rows if x.get('of') == of)
  points = [x for x in rows if x.get(column)]
  label = 'none'
  if 'exponent' in fit:
    label = f'{fit["exponent"]:.2f} ± {fit["exponent_error"]:.2f}'
  x, y = ([point[key] for point in points] for key in ('at', column))
  ax.plot(x, y, **style, label=label)
  if of == 'time':
    low, high = ([p[key] for p in points] for key in ('ms_min', 'ms_max'))
    ax.fill_between(x, low, high, color=style['color'], alpha=0.15)
