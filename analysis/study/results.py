"""Results of studies that are on disk, read again.

Those of the first edition, whose verdicts had other names, are read too.
"""

import pathlib
import re
from typing import Any

import pandas as pd

from analysis.common import statistics
from sinkformer_jax import errors
from sinkformer_jax.training import workdir as workdir_lib

CONTENT = 'claims.json'


def read(folder: pathlib.Path) -> dict[str, Any] | None:
  """What `content.write` has written; None if nothing is there.

  With ``folder``, and under ``tables`` its small tables by name.
  """
  path = folder / CONTENT
  if not path.exists():
    return None
  found = _renewed(workdir_lib.read_json(path))
  names = ('comparisons', 'levels', 'losses', 'tuned', 'robustness', 'runs')
  tables = {
    name: pd.read_csv(folder / f'{name}.csv')
    for name in names
    if (folder / f'{name}.csv').exists()
  }
  if 'runs' not in tables and found.get('tables', {}).get('Runs'):
    tables['runs'] = pd.DataFrame(found['tables']['Runs'])
  return found | {
    'folder': folder,
    'tables': {name: _renewed(table) for name, table in tables.items()},
  }


# Verdicts in the words of the first edition, and what they are called now.
_OLD_VERDICTS = {
  'holds': statistics.SUPPORTED,
  'does not hold': statistics.CONTRADICTED,
  'cannot be told': statistics.INCONCLUSIVE,
}
_OLD = re.compile('does not hold|holds|cannot be told')


def _renewed(found):
  """Results of the first edition with today's words for verdicts."""
  if isinstance(found, pd.DataFrame):
    names = [x for x in ('verdict', 'verdict_as_fixed') if x in found]
    return found.assign(**{x: found[x].replace(_OLD_VERDICTS) for x in names})
  claims = [
    claim
    | {
      'verdict': _OLD.sub(lambda x: _OLD_VERDICTS[x[0]], claim['verdict']),
      'tests': [
        x | {'verdict': _OLD_VERDICTS.get(x['verdict'], x['verdict'])}
        for x in claim['tests']
      ],
    }
    for claim in found.get('claims', ())
  ]
  return found | {'claims': claims}


def check_preset(folder: pathlib.Path, preset: str) -> None:
  """Refuses a directory with results of another preset.

  Raises:
    errors.UserError: names both.
  """
  there = read(folder)
  if there and there['preset'] != preset:
    raise errors.UserError(
      f'{folder} holds results of --preset={there["preset"]}, not of'
      f' --preset={preset}. Choose another --output.'
    )
