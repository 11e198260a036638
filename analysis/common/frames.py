"""Tables of the analyses: pandas frames with one schema.

A summary table has one row for each curve and depth (tidy, or long, form). Its
columns are those of `SCHEMA`, as far as they apply. Raw tables have one row for
each example, path or draw; their values are named ``log10_<norm>`` and so on.

pandas is imported when it is used: `--help` need not wait for it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import gzip
import json
import pathlib
from typing import Any
from typing import TYPE_CHECKING

import numpy as np

from analysis.common import statistics

if TYPE_CHECKING:
  from pandas import DataFrame as Table
else:
  Table = 'pandas.DataFrame'

# Columns of summary tables: what they mean.
SCHEMA = {
  # Keys: the run.
  'run': 'name of the run, ``<directory>/seed<seed>``; random for a control',
  'data': 'name of its data set',
  'notice': 'what a reader must know about that data; empty if nothing',
  'normalizer': 'name of the normalizer in the config of the run',
  'group': 'runs that differ in their seed alone; one curve of a figure',
  'setting': 'number of the training setting; runs of one setting make pairs;'
  ' missing where none are made',
  'seed': 'of the run',
  'step': 'training step of the checkpoint',
  'weights': 'trained, step 0 or random',
  # Keys: the point.
  'quantity': 'what is measured',
  'ablation': 'what of the model, or of a path, is switched off or added',
  'norm': 'spectral, frobenius or composite; empty for plain numbers',
  'scaling': 'absolute, relative (to the whole) or initial (to layer 0)',
  'tokens': 'mean number of valid tokens, where examples are grouped by it',
  'depth': 'layer, or number of factors of a path product',
  # Values.
  'mean': 'mean; of residuals that of log10',
  'std': 'standard deviation over examples and paths or draws',
  'log10_of_mean': 'log10 of the mean residual',
  'log10_of_rms': 'log10 of the root mean square residual',
  'count': 'number of values in the mean',
  'below_resolution': 'number of values below the resolution of their dtype',
  'invalid': 'number of values that are not finite',
  'largest': 'largest value',
  'row_error': 'largest |row sum - 1| of the attention',
  'column_error': 'largest |column sum - n_q / n_k| of the attention',
  # Sizes.
  'examples': 'number of examples',
  'paths': 'number of sampled paths',
  'draws': 'number of random draws',
  'dtype': 'of the computation',
}
# What the runs of a group, or of a pair, have in common at one point.
POINT = (
  'weights',
  'quantity',
  'ablation',
  'norm',
  'scaling',
  'tokens',
  'depth',
)
_COMMON = (
  'data',
  'notice',
  'dtype',
  'group',
  'normalizer',
  'examples',
  'paths',
)
# Columns that pandas would make floats of where some are missing.
_WHOLE_NUMBERS = (
  'setting',
  'seed',
  'step',
  'depth',
  'count',
  'examples',
  'paths',
  'draws',
  'below_resolution',
  'invalid',
)
_LEFT_OUT = ('below_resolution', 'invalid')


@dataclasses.dataclass
class Result:
  """What an analysis measured.

  Attributes:
    summary: parts of the summary table.
    raw: parts of raw tables, by the name of the table.
    notes: what a reader has to know, such as layers that are invalid.
  """

  summary: list[Table] = dataclasses.field(default_factory=list)
  raw: dict[str, list[Table]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)

  def table(self) -> Table:
    """The whole summary table."""
    return concat(self.summary)

  def add_raw(self, name: str, part: Table) -> None:
    """Adds rows to a raw table."""
    self.raw.setdefault(name, []).append(part)


def about_random(data: str, normalizer: str, group: str) -> dict[str, Any]:
  """What identifies random matrices or weights in a table: no run, no pairs."""
  return {
    'run': 'random',
    'data': data,
    'notice': '',
    'normalizer': normalizer,
    'group': group,
    'setting': None,
    'seed': None,
    'step': None,
  }


def concat(parts: Sequence[Table]) -> Table:
  """Tables below each other; what a part lacks is missing there."""
  import pandas as pd

  return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def by_depth(
  about: Mapping[str, Any],
  values: Mapping[str, np.ndarray],
  first_depth: int = 0,
) -> Table:
  """Rows of a summary table, one a depth.

  Args:
    about: columns that are the same in all rows.
    values: columns ``[depths]``.
    first_depth: depth of the first row.
  """
  import pandas as pd

  table = pd.DataFrame(dict(values))
  table.insert(0, 'depth', first_depth + np.arange(len(table)))
  return _with_constants(about, table)


def raw(about: Mapping[str, Any], **arrays: np.ndarray) -> Table:
  """Rows of a raw table.

  Args:
    about: columns that are the same in all rows.
    **arrays: columns; broadcast to one shape and flattened.
  """
  import pandas as pd

  arrays = dict(zip(arrays, np.broadcast_arrays(*arrays.values()), strict=True))
  table = pd.DataFrame({name: x.ravel() for name, x in arrays.items()})
  return _with_constants(about, table)


def _with_constants(about, table):
  import pandas as pd

  constants = pd.DataFrame(
    {k: [v] * len(table) for k, v in about.items()}, index=table.index
  )
  return pd.concat([constants, table], axis=1)


def select(table: Table, **values: Any) -> Table:
  """Rows with these values; of a list of values, with one of them.

  A column that the table lacks is missing everywhere, and has no value.
  """
  chosen = np.ones(len(table), bool)
  for name, value in values.items():
    if name not in table:
      return table[:0]
    if isinstance(value, (list, tuple, set)):
      chosen &= table[name].isin(list(value)).to_numpy()
    else:
      chosen &= (table[name] == value).fillna(False).to_numpy(bool)
  return table[chosen]


def value_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
  """Statistics of plain numbers by layer; NaN ones are invalid and left out.

  Args:
    values: ``[layers, ...]``.

  Returns:
    ``mean``, ``std`` (of these values), ``largest``, ``count`` and ``invalid``,
    each ``[layers]``; NaN for a layer without any value.
  """
  import pandas as pd

  rows = pd.DataFrame(values.reshape(len(values), -1)).T
  return {
    'mean': rows.mean().to_numpy(),
    'std': rows.std(ddof=0).to_numpy(),
    'largest': rows.max().to_numpy(),
    'count': rows.count().to_numpy(),
    'invalid': rows.isna().sum().to_numpy(),
  }


def over_seeds(table: Table) -> Table:
  """Curves of groups of runs that differ in the seed alone.

  Args:
    table: a summary table.

  Returns:
    For each group and point ``mean`` over runs; ``std_examples``, the mean of
    the standard deviations within a run, over examples and paths or draws;
    ``std_seeds``, that of the runs' means (n - 1; NaN of a single run);
    ``num_seeds``; ``seeds`` and ``steps``; and the summed ``count``,
    ``below_resolution`` and ``invalid``. A point that a run has no value at is
    NaN.
  """
  if 'group' not in table:
    return table[:0]  # Nothing has been measured.
  table = _complete(table, 'std', 'seed', 'step', 'count', *_LEFT_OUT)
  grouped = _grouped(table)
  return _finished(
    grouped,
    mean=grouped['mean'].mean(skipna=False),
    std_examples=grouped['std'].mean(skipna=False),
    std_seeds=grouped['mean'].std(skipna=False),
    num_seeds=grouped.size(),
    seeds=grouped['seed'].agg(_listed),
    steps=grouped['step'].agg(_listed),
    **{x: grouped[x].sum() for x in ('count', *_LEFT_OUT)},
  )


def differences(table: Table) -> Table:
  """Differences from softmax, over pairs of runs with one seed.

  Args:
    table: a summary table. Rows without a ``setting`` make no pairs.

  Returns:
    For each group of other runs and each point ``difference`` (the mean over
    pairs of the other mean minus that of softmax); ``half_width`` of its 95% t
    interval, NaN for a single pair; ``num_pairs`` and their ``seeds``;
    ``left_out``, how many values of the pairs were below resolution or invalid:
    where there are any, the means are those of a selection. Points without a
    pair are not there.
  """
  if 'group' not in table:
    return table[:0]  # Nothing has been measured.
  table = _complete(table, 'setting', 'seed', 'mean', 'normalizer', *_LEFT_OUT)
  table = table[table['setting'].notna()]
  keys = ['setting', 'seed', *POINT]
  is_softmax = table['normalizer'] == 'softmax'
  softmax = table[is_softmax][[*keys, 'mean', *_LEFT_OUT]]
  pairs = table[~is_softmax].merge(softmax, on=keys, suffixes=('', '_softmax'))
  pairs['difference'] = pairs['mean'] - pairs['mean_softmax']
  pairs['left_out'] = sum(
    pairs[f'{x}{end}'] for x in _LEFT_OUT for end in ('', '_softmax')
  )
  grouped = _grouped(pairs)
  number = grouped.size()
  return _finished(
    grouped,
    difference=grouped['difference'].mean(skipna=False),
    half_width=statistics.half_width(
      grouped['difference'].std(skipna=False) / np.sqrt(number), number - 1
    ),
    num_pairs=number,
    seeds=grouped['seed'].agg(_listed),
    left_out=grouped['left_out'].sum(),
  )


def _complete(table, *names):
  """The same with columns for keys, and for counts, that it lacks."""
  absent = [x for x in (*POINT, *names) if x not in table]
  table = table.assign(**dict.fromkeys(absent))
  counts = [x for x in names if x in _LEFT_OUT]
  # Parts without such values have no such columns.
  return table.assign(**{x: table[x].fillna(0).astype(int) for x in counts})


def _grouped(table):
  # Keys that do not apply are missing, and rows with them must not be dropped.
  return table.groupby(['group', *POINT], dropna=False, sort=False)


def _finished(grouped, **columns):
  """Keys, what the rows of a group have in common, and columns."""
  import pandas as pd

  common = [x for x in _COMMON if x in grouped.obj and x != 'group']
  return pd.concat([grouped[common].first(), pd.DataFrame(columns)], axis=1)[
    [*common, *columns]
  ].reset_index()


def _listed(values):
  return ' '.join(str(int(x)) for x in values.dropna())


def write(path: pathlib.Path, table: Table) -> None:
  """Writes ``path.csv`` and ``path.json`` (a list of rows).

  What is missing is empty in CSV. log10 of an exact 0 is ``-inf`` in CSV. Both
  are null in JSON.
  """
  whole = [x for x in _WHOLE_NUMBERS if x in table]
  table = table.astype(dict.fromkeys(whole, 'Int64'))
  table.to_csv(f'{path}.csv', index=False)
  table.to_json(f'{path}.json', orient='records', lines=False, indent=0)


def write_raw(path: pathlib.Path, table: Table) -> None:
  """Writes ``path.csv.gz`` and ``path.json.gz`` (a list for each column)."""
  # Level 1 takes a fourth of the time of the default.
  compression = {'method': 'gzip', 'compresslevel': 1}
  table.to_csv(
    f'{path}.csv.gz', index=False, float_format='%.10g', compression=compression
  )
  with gzip.open(f'{path}.json.gz', 'wt', 1) as file:
    finite = table.replace([np.inf, -np.inf], None)
    columns = finite.astype(object).where(finite.notna(), None)
    json.dump(columns.to_dict('list'), file)
