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
from analysis.common import frames

FLAGS = command.create_flags(paths=True)
LAYERS = ('first', 'drawn')
flags.DEFINE_multi_enum(
  'layers',
  LAYERS,
  LAYERS,
  'Which k layers a path of depth k goes through; drawn ones take 10 times as'
  ' long.',
  flag_values=FLAGS,
)
_TITLES = {'first': 'first k layers', 'drawn': 'k layers without replacement'}
_FACTORS = {False: 'heads only', True: 'skip a choice'}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Residuals of sampled paths and the exact RMS, of each run."""
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  result = frames.Result()
  kinds = options.get('layers', LAYERS)
  for subject in subjects:
    progress.part(f'path products of {subject.name}')
    paths = {layers: subject.paths(options, layers) for layers in kinds}

    def measured(capture, paths=paths):
      found = runs.marginal_errors(capture.attention, capture.mask)
      common = {'row_sums': capture.about['row_sums']}
      for layers, heads in paths.items():
        found[layers, 'path'] = rank.path_residuals(
          capture.attention, heads, capture.mask, **common
        )
        found[layers, 'exact RMS'] = rank.exact_rms(
          capture.attention,
          capture.mask,
          layers=layers,
          skip=options['skip'],
          **common,
        )
      return found

    values, examples = runs.collect(
      subject.captures(options, progress, result.notes), measured
    )
    about = subject.about() | {'ablation': _FACTORS[options['skip']]}
    keys = ('run', 'normalizer', 'seed', 'step', 'ablation')
    for layers in kinds:
      sampled = values[layers, 'path']
      raw = runs.raw_residuals(
        {k: about[k] for k in keys} | {'layers': layers},
        sampled,
        example=examples[:, None],
        path=np.arange(options['num_paths']),
        depth=np.arange(len(sampled.invalid))[:, None, None],
      )
      result.add_raw('path_products_raw', raw)
    about |= {'examples': len(examples), **runs.largest_errors(values)}
    for what, num_paths in (
      ('path', options['num_paths']),
      ('exact RMS', None),
    ):
      for layers in kinds:
        quantity = {'quantity': f'{what}, {layers} layers', 'paths': num_paths}
        table = runs.residual_table(about | quantity, values[layers, what])
        result.summary.append(table)
  return result


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  paths = frames.select(summary, norm='spectral', scaling='absolute')
  names = curves.groups(paths)
  pairs = frames.differences(paths)
  below = f'difference from softmax\n{curves.describe_pairs(pairs)}'
  # Typical paths and the RMS are groups of one figure.
  roots = frames.select(summary, norm='frobenius', scaling='absolute')
  exact = roots['quantity'].str.startswith('exact')
  roots = roots.assign(
    group=roots['group'] + exact.map({True: ': RMS', False: ': typical'}),
    mean=roots['mean'].where(~exact, roots['log10_of_rms']),
    std=roots['std'].where(~exact, 0.0),
  )
  return [
    curves.panels(
      'path_products',
      paths,
      'Spectral norm of the residual of path products against path depth,'
      ' absolute, for paths through the first k layers and through k layers'
      ' sampled without replacement.',
      _columns(paths, 'path'),
      {curves.RESIDUAL: {}} | ({below: {}} if len(pairs) else {}),
      panel={
        below: lambda ax, part: curves.draw_group_differences(
          ax, frames.differences(part), names
        )
      },
      size=(8, 6),
      more=(curves.LEGEND, curves.DIFFERENCE, curves.describe_pairs(pairs)),
      xlabel='path depth k',
    ),
    curves.panels(
      'path_products_rms',
      roots,
      'Frobenius norm of the residual of path products, absolute. Typical'
      ' paths (mean of log10 over sampled paths) beside the root mean square'
      ' over all paths and examples, which is exact over paths. Rare paths'
      ' that decay least dominate an RMS.',
      _columns(roots, 'path', 'exact RMS'),
      xlabel='path depth k',
      ylabel='log10 of the Frobenius residual',
    ),
  ]


def _columns(rows, *kinds):
  columns = {
    title: {'quantity': [f'{kind}, {x} layers' for kind in kinds]}
    for x, title in _TITLES.items()
  }
  return {k: v for k, v in columns.items() if len(frames.select(rows, **v))}


def headlines(summary: frames.Table) -> list[str]:
  """The residual at a few depths, as text."""
  rows = frames.select(
    summary, quantity='path, first layers', norm='spectral', scaling='absolute'
  )
  return curves.headline(rows, 'Path products, first k layers, spectral norm')


if __name__ == '__main__':
  command.run('path_products', FLAGS)
