"""Tables of `analysis.cost`, for the eye and for other programs."""

import json
import pathlib
from typing import Any

import pandas as pd

from analysis.common import frames
from analysis.common import timing


def _digits(row, name):
  """Three digits or so."""
  x = row[name]
  if x >= 100:
    return f'{x:.0f}'
  return f'{x:.1f}' if x >= 10 else f'{x:.2f}'


def _spread(row, name):
  """``median (smallest to largest)``."""
  parts = (_digits(row, f'{name}{x}') for x in ('', '_min', '_max'))
  return '{} ({} to {})'.format(*parts)


def _ratio(row, name):
  base = row['ratio_to']
  return '' if base == row['name'] else f'{_spread(row, name)} x {base}'


def _memory(row, name):
  return f'{_digits(row, name)} {row["memory_of"].split()[0]}'


def _error(row, name):
  return f'{row[name]:.0e}'


def _exponent(row, name):
  return f'{row[name]:.2f} +- {row["exponent_error"]:.2f}'


def _word(row, name):
  return str(row[name])


# What a column shows: the value that a row must have, and its text. It stands
# in the tables in which any row has one.
_COLUMNS = {
  'ms': ('ms', _spread),
  'rounds': ('repeats', _word),
  'time ratio': ('ratio', _ratio),
  'memory MB': ('memory_mb', _memory),
  'logit spread': ('logit_spread', _digits),
  'column error': ('column_error', _error),
  'value error': ('value_error', _error),
  'gradient error': ('gradient_error', _error),
  'GFLOP/s': ('gflop_per_s', _spread),
  '% of product': ('share_percent', _spread),
  'examples/s': ('examples_per_s', _digits),
  'first load s': ('first_load_s', _digits),
  'load s': ('load_s', _digits),
  'first step s': ('first_step_s', _spread),
  'compile s': ('compile_s', _spread),
  'against': ('of', lambda row, _: row['against']),
  'of': ('of', _word),
  'exponent': ('exponent', _exponent),
  'note': ('note', _word),
}


# Columns that pandas would make floats of where some are missing.
_WHOLE_NUMBERS = (
  *('repeats', 'layers', 'at', 'points'),
  *('iterations', 'tokens', 'batch', 'heads'),
)


def frame(rows: list[timing.Row]) -> frames.Table:
  """The rows of a part as a table; what a row does not have is missing."""
  table = pd.DataFrame(rows)
  whole = [x for x in _WHOLE_NUMBERS if x in table]
  return table.astype(dict.fromkeys(whole, 'Int64'))


def text(table: frames.Table) -> str:
  """Tables to print, one for each value of ``table``."""
  parts = table.groupby('table', sort=False)
  return '\n'.join(_text(title, part) for title, part in parts)


def _text(title, part):
  rows = part.to_dict('records')
  shown = pd.DataFrame({title: part['name'].tolist()})
  for heading, (name, cell) in _COLUMNS.items():
    texts = ['' if pd.isna(x.get(name)) else cell(x, name) for x in rows]
    if any(texts):
      shown[heading] = texts
  # With the headings as the first line.
  lines = shown.T.reset_index().T.apply(
    lambda x: x.str.ljust(x.str.len().max())
  )
  return ''.join(f'{"  ".join(x).rstrip()}\n' for x in lines.to_numpy())


def write_csv(path: pathlib.Path, table: frames.Table) -> None:
  """Writes a table without the single times, which the JSON file has."""
  table.drop(columns='times_ms', errors='ignore').to_csv(path, index=False)


def write_json(
  path: pathlib.Path,
  provenance: dict[str, Any],
  parts: dict[str, frames.Table],
) -> None:
  """Writes all tables as lists of rows, and where they were measured."""
  rows = {
    name: [x.dropna().to_dict() for _, x in table.astype(object).iterrows()]
    for name, table in parts.items()
  }
  content = {'provenance': provenance, 'parts': rows}
  path.write_text(json.dumps(content, indent=1, allow_nan=False) + '\n')
