"""Residual of path products, layer by layer (quantity A).

  python -m analysis.path_products --workdir=RUN --workdir=RUN --output=DIR

A path takes one head in each of its layers; its matrix is the product of their
attention matrices. Two ways to choose the layers of a path of depth k: the
first k (Lapenna et al. 2026), or k drawn without replacement (Dong et al.
2021). Paths are sampled, the same for all runs; the root mean square over all
paths is exact. Writes the residuals of every example, path and depth in all
norms, a summary, differences of pairs, and figures.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)
command.define_paths(FLAGS)

LAYERS = ('first', 'drawn')
flags.DEFINE_multi_enum(
  'layers',
  LAYERS,
  LAYERS,
  'Which k layers a path of depth k goes through; drawn ones take 10 times as'
  ' long.',
  flag_values=FLAGS,
)


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> tables.Result:
  """Residuals of sampled paths and the exact RMS, of each run."""
  result = tables.Result([], {'path_products_raw': []})
  for subject in subjects:
    progress.part(f'path products of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import encoder
  from sinkformer_jax import rank

  model = subject.run.config.model
  kinds = options.get('layers', LAYERS)
  heads = {
    layers: rank.sample_paths(
      options['seed'],
      model.num_layers,
      model.num_heads,
      options['num_paths'],
      layers,
      options['skip'],
    )
    for layers in kinds
  }
  about = subject.about() | {
    'ablation': 'skip a choice' if options['skip'] else 'heads only'
  }
  parts = {(what, layers): [] for what in ('path', 'rms') for layers in kinds}
  marginals = []
  done = 0
  for capture in subject.chunks(
    options['num_examples'], options['seed'], encoder.Ablation(), progress
  ):
    result.notes.extend(subject.problems(capture))
    marginals.append(rank.marginal_errors(capture.attention, capture.mask))
    row_sums = capture.about['row_sums']
    for layers in kinds:
      sampled = rank.path_residuals(
        capture.attention, heads[layers], capture.mask, row_sums=row_sums
      )
      parts['path', layers].append(sampled)
      rms = rank.exact_rms(
        capture.attention,
        capture.mask,
        layers=layers,
        skip=options['skip'],
        row_sums=row_sums,
      )
      parts['rms', layers].append(rms)
      result.raw['path_products_raw'].append(
        _raw(about, layers, capture.about['examples'], sampled)
      )
    done += len(capture.about['examples'])
  row_error, column_error = (
    float(np.max(np.concatenate(x, 1))) for x in zip(*marginals, strict=True)
  )
  for (what, layers), chunks in parts.items():
    quantity = 'path' if what == 'path' else 'exact RMS'
    rows = about | {
      'quantity': f'{quantity}, {layers} layers',
      'examples': options['num_examples'],
      'paths': options['num_paths'] if what == 'path' else None,
      'row_error': row_error,
      'column_error': column_error,
    }
    result.summary.extend(runs.residual_rows(rows, runs.concatenate(chunks)))


def _raw(about, layers, examples, residuals):
  depths, _, num_paths = residuals.invalid.shape
  return tables.columns(
    {k: about[k] for k in ('run', 'normalizer', 'seed', 'step', 'ablation')}
    | {'layers': layers, 'dtype': residuals.dtype},
    example=np.array(examples)[:, None],
    path=np.arange(num_paths),
    depth=np.arange(depths)[:, None, None],
    **{f'log10_{k}': v for k, v in residuals.log10.items()},
    **{f'log10_whole_{k}': v for k, v in residuals.log10_whole.items()},
    below_resolution=residuals.below_resolution,
    invalid=residuals.invalid,
  )


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  paths = curves.select(summary, norm='spectral', scaling='absolute')
  return [
    curves.Plot(
      'path_products',
      curves.caption(
        paths,
        'Spectral norm of the residual of path products against path depth,'
        ' absolute, for paths through the first k layers and through k drawn'
        ' layers.',
        curves.LEGEND,
        curves.DIFFERENCE,
        curves.describe_pairs(tables.differences(paths)),
      ),
      (8, 6),
      lambda fig: _draw_paths(fig, paths),
    ),
    curves.Plot(
      'path_products_rms',
      curves.caption(
        curves.select(summary, norm='frobenius', scaling='absolute'),
        'Frobenius norm of the residual of path products, absolute. Typical'
        ' paths (mean of log10 over sampled paths) beside the root mean square'
        ' over all paths and examples, which is exact over paths. An RMS is'
        ' ruled by the rare paths that keep most.',
      ),
      (8, 3.8),
      lambda fig: _draw_rms(
        fig, curves.select(summary, norm='frobenius', scaling='absolute')
      ),
    ),
  ]


def _draw_paths(fig, rows):
  names = curves.groups(rows)
  differences = tables.differences(rows)
  kinds = _kinds(rows)
  lines = fig.subplots(
    2 if differences else 1,
    len(kinds),
    sharex=True,
    sharey='row',
    squeeze=False,
  )
  for column, layers in enumerate(kinds):
    quantity = f'path, {layers} layers'
    ax = lines[0, column]
    curves.draw_group_curves(ax, curves.select(rows, quantity=quantity), names)
    ax.set_title(
      f'{layers} k layers' if layers == 'first' else 'k drawn layers'
    )
    if differences:
      _draw_differences(lines[1, column], differences, quantity, names)
    lines[-1, column].set_xlabel('path depth k')
  lines[0, 0].set_ylabel('log10 of the residual')
  lines[0, 0].legend()
  if differences:
    lines[1, 0].set_ylabel('difference from softmax')
    lines[1, 0].set_title(curves.describe_pairs(differences), fontsize=8)
  curves.finish(fig, rows)


def _kinds(rows):
  found = {x['quantity'] for x in rows}
  return [x for x in LAYERS if f'path, {x} layers' in found]


def _draw_differences(ax, differences, quantity, names):
  for number, group in enumerate(names):
    found = curves.select(differences, quantity=quantity, group=group)
    if found:
      curves.draw_difference(ax, found, figures.curve(number), group)


def _draw_rms(fig, rows):
  names = curves.groups(rows)
  kinds = _kinds(rows)
  panels = fig.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
  for ax, layers in zip(panels, kinds, strict=True):
    number = 0
    for group in names:
      sampled = curves.select(
        rows, group=group, quantity=f'path, {layers} layers'
      )
      exact = curves.select(
        rows, group=group, quantity=f'exact RMS, {layers} layers'
      )
      exact = [x | {'mean': x['log10_of_rms'], 'std': 0} for x in exact]
      for label, points in (('typical', sampled), ('RMS', exact)):
        curves.draw(ax, points, figures.curve(number), f'{group}: {label}')
        number += 1
    ax.set_xlabel('path depth k')
    ax.set_title(
      f'{layers} k layers' if layers == 'first' else 'k drawn layers'
    )
  panels[0].set_ylabel('log10 of the Frobenius residual')
  panels[0].legend(fontsize=7)
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """The residual at a few depths, as text."""
  return curves.headline(
    curves.select(
      summary,
      quantity='path, first layers',
      norm='spectral',
      scaling='absolute',
    ),
    'Path products, first k layers, spectral norm',
  )


if __name__ == '__main__':
  cli.run(lambda: command.main('path_products', FLAGS), FLAGS)
