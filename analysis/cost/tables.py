"""Tables of `analysis.cost`, for the eye and for other programs."""

from collections.abc import Callable
import csv
import itertools
import pathlib

from analysis.common import timing


def _digits(x):
  """Three digits or so."""
  if x >= 100:
    return f'{x:.0f}'
  return f'{x:.1f}' if x >= 10 else f'{x:.2f}'


def _value(name: str) -> Callable[[timing.Row], str]:
  return lambda row: _digits(row[name]) if name in row else ''


def _spread(name):
  """``median (smallest to largest)``."""

  def cell(row):
    if name not in row:
      return ''
    parts = (_digits(row[f'{name}{x}']) for x in ('', '_min', '_max'))
    return '{} ({} to {})'.format(*parts)

  return cell


def _error(name):
  return lambda row: f'{row[name]:.0e}' if name in row else ''


def _ratio(row):
  if 'ratio' not in row or row['ratio_to'] == row['name']:
    return ''
  return f'{_spread("ratio")(row)} x {row["ratio_to"]}'


def _memory(row):
  if 'memory_mb' not in row:
    return ''
  return f'{_digits(row["memory_mb"])} {row["memory_of"].split()[0]}'


def _exponent(row):
  if 'exponent' not in row:
    return ''
  return f'{row["exponent"]:.2f} +- {row["exponent_error"]:.2f}'


# A column is shown in the tables in which any row has it.
_COLUMNS: dict[str, Callable[[timing.Row], str]] = {
  'ms': _spread('ms'),
  'rounds': lambda row: str(row.get('repeats', '')),
  'time ratio': _ratio,
  'memory MB': _memory,
  'logit spread': _value('logit_spread'),
  'column error': _error('column_error'),
  'value error': _error('value_error'),
  'gradient error': _error('gradient_error'),
  'GFLOP/s': _spread('gflop_per_s'),
  '% of product': _spread('share_percent'),
  'examples/s': _value('examples_per_s'),
  'first load s': _value('first_load_s'),
  'load s': _value('load_s'),
  'first step s': _spread('first_step_s'),
  'compile s': _spread('compile_s'),
  'against': lambda row: row.get('against', '') if 'of' in row else '',
  'of': lambda row: row.get('of', ''),
  'exponent': _exponent,
  'note': lambda row: row.get('note', ''),
}


def text(rows: list[timing.Row]) -> str:
  """Rows as tables to print, one for each value of ``table``."""
  tables = itertools.groupby(rows, key=lambda row: row['table'])
  return '\n'.join(_table(title, list(group)) for title, group in tables)


def _table(title, rows):
  lines = [[title, *_COLUMNS]]
  lines += [[x['name'], *(f(x) for f in _COLUMNS.values())] for x in rows]
  columns = [x for x in zip(*lines, strict=True) if any(x[1:])]
  widths = [max(map(len, x)) for x in columns]
  return ''.join(
    '  '.join(
      x.ljust(width) for x, width in zip(line, widths, strict=True)
    ).rstrip()
    + '\n'
    for line in zip(*columns, strict=True)
  )


def write_csv(path: pathlib.Path, rows: list[timing.Row]) -> None:
  """Writes rows; cells of columns that a row does not have are empty.

  Single times are not among them; they are in the JSON file.
  """
  names = dict.fromkeys(name for row in rows for name in row)
  names.pop('times_ms', None)
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, list(names), extrasaction='ignore')
    writer.writeheader()
    writer.writerows(rows)
