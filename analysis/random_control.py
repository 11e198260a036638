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

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming
from analysis.common import statistics
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_control(FLAGS)

_TITLES = {False: 'no identities', True: 'half of the factors identity'}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """The sweep; `subjects` are not looked at."""
  del subjects
  # Imported late: see `command`.
  from sinkformer_jax import rank

  result = frames.Result()
  scales = [float(x) for x in options['scales']]
  normalizers = rank.random_control.NORMALIZERS
  total = 2 * len(scales) * len(normalizers)
  progress.part('random control')
  sweep = rank.random_control.sweep(
    options['seed'],
    scales,
    normalizers,
    num_tokens=options['num_tokens'],
    num_layers=options['num_layers'],
    num_draws=options['num_draws'],
    num_iters=options['num_iters'],
  )
  for done, control in enumerate(sweep, start=1):
    _add(control, options, result)
    progress(done, total, 'curves')
  return result


def _add(control, options, result):
  from analysis.common import runs
  from sinkformer_jax import rank

  residuals = control.residuals
  group = control.normalizer
  if group != 'softmax':
    closed = control.normalizer != 'sinkhorn_column'
    group = f'sinkhorn, {naming.iterations(options["num_iters"], closed)}'
  about = {
    'run': 'random',
    'data': 'random logits',
    'notice': '',
    'normalizer': control.normalizer,
    'group': group,
    'setting': None,
    'seed': options['seed'],
    'step': None,
    'quantity': f'random path, logit scale {control.scale:g}',
    'scale': control.scale,
    'ablation': _TITLES[control.half_identity],
  }
  raw = runs.raw_residuals(
    {k: about[k] for k in ('normalizer', 'seed', 'scale', 'ablation')},
    rank.of_one_example(residuals),
    depth=np.arange(len(residuals.invalid))[:, None],
    draw=np.arange(options['num_draws']),
  )
  result.add_raw('random_control_raw', raw)
  about |= {
    'draws': options['num_draws'],
    'row_error': control.row_error,
    'column_error': control.column_error,
  }
  result.summary.append(runs.residual_table(about, residuals))


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
    curves.Plot(
      'random_control',
      curves.caption(
        closed,
        'Spectral norm of the residual of products of unrelated random'
        ' attention matrices, absolute, against the number of factors, for'
        ' several standard deviations of the Gaussian logits (columns), without'
        ' and with half of the factors (k // 2 of k, drawn) replaced by the'
        ' identity (upper rows). Mean and standard deviation (shaded) of log10'
        ' over draws. Below: Sinkhorn minus softmax, with 95% Welch intervals.',
      ),
      (2 + 1.9 * len(scales), 7.5),
      lambda fig: _draw(fig, closed, scales),
    ),
    curves.Plot(
      'random_control_floor',
      curves.caption(
        largest,
        'The false floor, at the largest logit scale'
        f' ({scales[-1]:g}): Sinkhorn that ends on a column update, here'
        ' multiplied plainly, has rows that do not sum to 1, and its products'
        ' end on a floor that looks as if rank were kept. Largest'
        f' |row sum - 1|: {told}.',
      ),
      (6, 4),
      lambda fig: _draw_floor(fig, largest),
    ),
  ]


def _draw(fig, rows, scales):
  names = curves.groups(rows)
  *panels, below = fig.subplots(
    3, len(scales), sharex=True, sharey='row', squeeze=False
  )
  for line, ablation in zip(panels, _TITLES.values(), strict=True):
    for ax, scale in zip(line, scales, strict=True):
      points = frames.select(rows, ablation=ablation, scale=scale)
      curves.draw_groups(ax, points, names)
      ax.set_title(f'scale {scale:g}')
    line[0].set_ylabel(f'{ablation}\n{curves.RESIDUAL}')
  for ax, scale in zip(below, scales, strict=True):
    for number, ablation in enumerate(_TITLES.values()):
      # The first two styles are the normalizers'.
      style = figures.curve(number + 2)
      points = frames.select(rows, ablation=ablation, scale=scale)
      curves.draw_difference(ax, _differences(points), style, ablation)
    ax.set_xlabel('factors')
  below[0].set_ylabel('Sinkhorn minus\nsoftmax, log10')
  below[0].legend(fontsize=7)
  curves.legend_above(fig, panels[0][0])
  curves.finish(fig, rows)


def _differences(rows):
  """Sinkhorn minus softmax, by depth, as `curves.draw_difference` takes it."""
  import pandas as pd

  softmax, sinkhorn = (
    frames.select(rows, normalizer=x).set_index('depth')
    for x in ('softmax', 'sinkhorn')
  )
  samples = {
    depth: statistics.welch(sinkhorn.loc[depth], softmax.loc[depth])
    for depth in softmax.index
  }
  return pd.DataFrame(
    {
      'depth': list(samples),
      'difference': [x.mean for x in samples.values()],
      'half_width': [x.half_width for x in samples.values()],
      'left_out': 0,
    }
  )


def _draw_floor(fig, rows):
  ax = fig.subplots()
  curves.draw_groups(ax, rows, list(rows['group'].unique()))
  ax.set_xlabel('factors')
  ax.set_ylabel(curves.RESIDUAL)
  ax.legend()
  curves.finish(fig, rows)


def headlines(summary: frames.Table) -> list[str]:
  """The residual at a few depths, as text."""
  rows = frames.select(
    summary,
    norm='spectral',
    scaling='absolute',
    normalizer=['softmax', 'sinkhorn'],
  )
  lines = []
  for (ablation, scale), part in rows.groupby(
    ['ablation', 'scale'], sort=False
  ):
    title = f'Random matrices, logit scale {scale:g}, {ablation}, spectral norm'
    lines += curves.headline(part, title)
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('random_control', FLAGS), FLAGS)
