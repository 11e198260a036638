"""Path products of unrelated random matrices (the control).

  python -m analysis.random_control --output=DIR

Gaussian logits of several scales, normalized by softmax or Sinkhorn and
multiplied, without and with half of the factors replaced by the identity
(Lapenna et al. 2026, Appendix G). Beside it the false floor: Sinkhorn that ends
on a column update has rows that do not sum to 1, and its products seem to keep
their rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming
from analysis.common import statistics

FLAGS = command.create_flags(runs='none', control=True)
_TITLES = {False: 'no identities', True: 'half of the factors identity'}
_BELOW = 'Sinkhorn minus\nsoftmax, log10'


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """The sweep; `subjects` are not looked at."""
  del subjects
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  result = frames.Result()
  scales = [float(x) for x in options['scales']]
  normalizers = rank.random_control.NORMALIZERS
  sizes = ('num_tokens', 'num_layers', 'num_draws', 'num_iters')
  progress.part('random control')
  sweep = rank.random_control.sweep(
    options['seed'], scales, normalizers, **{k: options[k] for k in sizes}
  )
  for done, control in enumerate(sweep, start=1):
    about = _about(control, options)
    residuals = control.residuals
    raw = runs.raw_residuals(
      {k: about[k] for k in ('normalizer', 'seed', 'scale', 'ablation')},
      rank.of_examples(residuals, 0),
      depth=np.arange(len(residuals.invalid))[:, None],
      draw=np.arange(options['num_draws']),
    )
    result.add_raw('random_control_raw', raw)
    result.summary.append(runs.residual_table(about, residuals))
    progress(done, 2 * len(scales) * len(normalizers), 'curves')
  return result


def _about(control, options):
  group = control.normalizer
  if group != 'softmax':
    closed = control.normalizer != 'sinkhorn_column'
    group = f'sinkhorn, {naming.iterations(options["num_iters"], closed)}'
  return frames.about_random('random logits', control.normalizer, group) | {
    'seed': options['seed'],
    'quantity': f'random path, logit scale {control.scale:g}',
    'scale': control.scale,
    'ablation': _TITLES[control.half_identity],
    'draws': options['num_draws'],
    'row_error': control.row_error,
    'column_error': control.column_error,
  }


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  rows = frames.select(summary, norm='spectral', scaling='absolute')
  closed = rows[rows['normalizer'] != 'sinkhorn_column']
  scales = list(rows['scale'].unique())
  largest = frames.select(rows, scale=scales[-1], ablation=_TITLES[False])
  errors = frames.select(largest, depth=0)
  told = ', '.join(
    f'{group} {error:.1e}'
    for group, error in zip(errors['group'], errors['row_error'], strict=True)
  )
  return [
    curves.panels(
      'random_control',
      closed,
      'Spectral norm of the residual of products of unrelated random attention'
      ' matrices, absolute, against the number of factors, for several standard'
      ' deviations of the Gaussian logits (columns), without and with half of'
      ' the factors (k // 2 of k, drawn) replaced by the identity (upper rows).'
      ' Mean and standard deviation (shaded) of log10 over draws. Below:'
      ' Sinkhorn minus softmax, with 95% Welch intervals.',
      {f'scale {x:g}': {'scale': x} for x in scales},
      {
        **{
          f'{x}\n{curves.RESIDUAL}': {'ablation': x} for x in _TITLES.values()
        },
        _BELOW: {},
      },
      size=(2 + 1.9 * len(scales), 7.5),
      panel={_BELOW: _draw_differences},
      xlabel='factors',
    ),
    curves.panels(
      'random_control_floor',
      largest,
      f'The false floor, at the largest logit scale ({scales[-1]:g}): Sinkhorn'
      ' that ends on a column update, here multiplied plainly, has rows that do'
      ' not sum to 1, and its products end on a floor that looks as if rank'
      f' were kept. Largest |row sum - 1|: {told}.',
      {'': {}},
      size=(6, 4),
      names=list(largest['group'].unique()),
      xlabel='factors',
    ),
  ]


def _draw_differences(ax, rows):
  """Sinkhorn minus softmax, by depth."""
  import pandas as pd

  for number, ablation in enumerate(_TITLES.values()):
    softmax, sinkhorn = (
      frames.select(rows, normalizer=x, ablation=ablation).set_index('depth')
      for x in ('softmax', 'sinkhorn')
    )
    samples = [
      statistics.welch(sinkhorn.loc[x], softmax.loc[x]) for x in softmax.index
    ]
    table = pd.DataFrame(
      {
        'depth': softmax.index,
        'difference': [x.mean for x in samples],
        'half_width': [x.half_width for x in samples],
        'left_out': 0,
      }
    )
    # The first two styles are the normalizers'.
    curves.draw_difference(ax, table, figures.curve(number + 2), ablation)


def headlines(summary: frames.Table) -> list[str]:
  """The residual at a few depths, as text."""
  rows = frames.select(
    summary,
    norm='spectral',
    scaling='absolute',
    normalizer=['softmax', 'sinkhorn'],
  )
  return curves.headlines(
    rows,
    ('scale', 'ablation'),
    'Random matrices, logit scale {:g}, {}, spectral norm',
  )


if __name__ == '__main__':
  command.run('random_control', FLAGS)
