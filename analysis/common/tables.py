"""Tables of the analyses: raw values, summaries, and statistics over runs.

A table is a list of rows, or for raw values, which are many, columns of equal
length. log10 of an exact 0 is ``-inf`` in CSV and null in JSON, and is flagged
as below resolution; what does not exist is empty in CSV and null in JSON.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import csv
import dataclasses
import gzip
import json
import math
import pathlib
from typing import Any

import numpy as np

from analysis.common import statistics

Row = dict[str, Any]
Columns = dict[str, np.ndarray]

# What the runs of a group, or of a pair, have in common at one point.
_POINT = ('weights', 'quantity', 'ablation', 'norm', 'scaling', 'depth')
_COMMON = (
  'data',
  'notice',
  'dtype',
  'group',
  'normalizer',
  'examples',
  'paths',
)


def columns(about: Mapping[str, Any], **arrays: np.ndarray) -> Columns:
  """Columns of one part of a raw table.

  Args:
    about: what is the same in all its rows.
    **arrays: columns; broadcast to one shape and flattened.
  """
  arrays = dict(zip(arrays, np.broadcast_arrays(*arrays.values()), strict=True))
  size = next(iter(arrays.values())).size
  constant = {k: np.full(size, v) for k, v in about.items()}
  return constant | {k: v.ravel() for k, v in arrays.items()}


def write_raw(
  path: pathlib.Path, parts: Sequence[Columns], progress=None
) -> None:
  """Writes columns as ``path.csv.gz`` and ``path.json.gz`` (by column)."""
  names = list(dict.fromkeys(name for part in parts for name in part))
  # Level 1 takes a fourth of the time of the default.
  with gzip.open(f'{path}.csv.gz', 'wt', 1) as file:
    file.write(','.join(names) + '\n')
    for part in parts:
      size = len(next(iter(part.values())))
      texts = [_texts(part[x]) if x in part else [''] * size for x in names]
      file.writelines(','.join(row) + '\n' for row in zip(*texts, strict=True))
  with gzip.open(f'{path}.json.gz', 'wt', 1) as file:
    for i, name in enumerate(names):
      file.write('{' if i == 0 else ',')
      values = [
        value
        for part in parts
        for value in _values(part, name, len(next(iter(part.values()))))
      ]
      file.write(f'\n{json.dumps(name)}: {json.dumps(values)}')
    file.write('}\n')


def _texts(values):
  if values.dtype.kind == 'f':
    return ['' if x != x else f'{x:.10g}' for x in values.tolist()]
  if values.dtype.kind == 'U':
    # Names of runs are whatever people call directories.
    return [_quoted(x) for x in values.tolist()]
  return [str(x) for x in values.tolist()]


def _quoted(text):
  if not {',', '"', '\n'} & set(text):
    return text
  return '"' + text.replace('"', '""') + '"'


def _values(part, name, size):
  if name not in part:
    return [None] * size
  values = part[name].tolist()
  if part[name].dtype.kind != 'f':
    return values
  return [x if math.isfinite(x) else None for x in values]


def write(path: pathlib.Path, rows: Sequence[Row]) -> None:
  """Writes rows as ``path.csv`` and ``path.json``."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  with open(f'{path}.csv', 'w', newline='') as file:
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(
      {k: '' if _missing(v) else v for k, v in row.items()} for row in rows
    )
  with open(f'{path}.json', 'w') as file:
    rows = [{k: _finite(v) for k, v in row.items()} for row in rows]
    file.write('[\n' + ',\n'.join(map(json.dumps, rows)) + '\n]\n')


def _missing(x):
  return x is None or (isinstance(x, float) and math.isnan(x))


def _finite(x):
  return None if isinstance(x, float) and not math.isfinite(x) else x


def summary_rows(
  about: Mapping[str, Any],
  statistics: Mapping[str, np.ndarray],
  first_depth: int = 0,
) -> list[Row]:
  """A row for each depth, of statistics ``[depths]``."""
  return [
    {
      **about,
      'depth': first_depth + depth,
      **{name: values[depth].item() for name, values in statistics.items()},
    }
    for depth in range(len(next(iter(statistics.values()))))
  ]


def value_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
  """Statistics of plain numbers by layer; NaN ones are invalid and left out.

  Args:
    values: ``[layers, ...]``.

  Returns:
    ``mean``, ``std`` (of these values), ``largest``, ``count`` and ``invalid``,
    each ``[layers]``; NaN for a layer without any value.
  """
  values = values.reshape(len(values), -1)
  used = ~np.isnan(values)
  count = used.sum(1)
  some = np.where(count, count, np.nan)
  mean = np.where(used, values, 0).sum(1) / some
  deviation = np.where(used, values - mean[:, None], 0)
  largest = np.where(used, values, -np.inf).max(1, initial=-np.inf)
  return {
    'mean': mean,
    'std': np.sqrt((deviation**2).sum(1) / some),
    'largest': np.where(count, largest, np.nan),
    'count': count,
    'invalid': (~used).sum(1),
  }


def over_seeds(rows: Iterable[Row]) -> list[Row]:
  """Curves of a group of runs that differ in the seed alone.

  Args:
    rows: of a summary table.

  Returns:
    For each group and point ``mean`` over runs; ``std_examples``, the mean of
    the standard deviations within a run, over examples and paths or draws;
    ``std_seeds``, that of the runs' means (n - 1; NaN of a single run);
    ``num_seeds``; and the summed ``count``, ``below_resolution`` and
    ``invalid``. A point that a run has no value at is NaN.
  """
  result = []
  for key, members in _grouped(rows):
    means = [x['mean'] for x in members]
    n = len(means)
    result.append(
      {
        **key,
        'mean': math.fsum(means) / n,
        'std_examples': math.fsum(x['std'] for x in members) / n,
        'std_seeds': float(np.std(means, ddof=1)) if n > 1 else math.nan,
        'num_seeds': n,
        'seeds': ' '.join(str(x['seed']) for x in members),
        'steps': ' '.join(str(x['step']) for x in members),
        **{
          name: sum(x.get(name, 0) for x in members)
          for name in ('count', 'below_resolution', 'invalid')
        },
      }
    )
  return result


def differences(rows: Iterable[Row]) -> list[Row]:
  """Sinkhorn minus softmax, over pairs of runs with one seed.

  Args:
    rows: of a summary table, with ``mean``. Those with a ``setting`` of None
      make no pairs.

  Returns:
    For each group of Sinkhorn runs and point: ``difference`` of the means, its
    mean over pairs; ``half_width`` of its 95% t interval, NaN for a single
    pair; ``num_pairs`` and their ``seeds``; ``left_out``, how many values of
    the pairs were below resolution or invalid: where there are any, the means
    are those of a selection. Points without a pair are not there.
  """
  rows = [x for x in rows if x['setting'] is not None]
  softmax = {
    _point(x, x['setting'], x['seed']): x
    for x in rows
    if x['normalizer'] == 'softmax'
  }
  others = [x for x in rows if x['normalizer'] != 'softmax']
  result = []
  for key, members in _grouped(others):
    pairs = [
      (x, softmax[point])
      for x in members
      if (point := _point(x, x['setting'], x['seed'])) in softmax
    ]
    if not pairs:
      continue
    sample = statistics.sample(x['mean'] - y['mean'] for x, y in pairs)
    result.append(
      {
        **key,
        'difference': sample.mean,
        'half_width': sample.half_width,
        'num_pairs': len(pairs),
        'seeds': ' '.join(str(x['seed']) for x, _ in pairs),
        'left_out': sum(
          z.get(name, 0)
          for pair in pairs
          for z in pair
          for name in ('below_resolution', 'invalid')
        ),
      }
    )
  return result


def _point(row, *key):
  return (*key, *(row.get(x) for x in _POINT))


def _grouped(rows):
  """``(what they have in common, rows)`` of each group and point."""
  groups = {}
  for row in rows:
    groups.setdefault(_point(row, row['group']), []).append(row)
  return [
    ({k: x[0][k] for k in (*_COMMON, *_POINT) if k in x[0]}, x)
    for x in groups.values()
  ]


@dataclasses.dataclass(frozen=True)
class Result:
  """What an analysis measured.

  Attributes:
    summary: the summary table.
    raw: raw tables by name.
    notes: what a reader has to know, such as layers that are invalid.
  """

  summary: list[Row]
  raw: dict[str, list[Columns]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)
