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
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)
command.define_paths(FLAGS)

LAYERS = ('first', 'drawn')
_TITLES = {'first': 'first k layers', 'drawn': 'k layers without replacement'}
_FACTORS = {False: 'heads only', True: 'skip a choice'}
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
) -> frames.Result:
  """Residuals of sampled paths and the exact RMS, of each run."""
  result = frames.Result()
  for subject in subjects:
    progress.part(f'path products of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  kinds = options.get('layers', LAYERS)
  paths = {layers: subject.paths(options, layers) for layers in kinds}
  about = subject.about() | {'ablation': _FACTORS[options['skip']]}
  parts = {(what, layers): [] for what in ('path', 'rms') for layers in kinds}
  marginals = runs.Marginals()
  for capture in subject.captures(options, progress, result.notes):
    marginals.see(capture.attention, capture.mask)
    row_sums = capture.about['row_sums']
    for layers in kinds:
      sampled = rank.path_residuals(
        capture.attention, paths[layers], capture.mask, row_sums=row_sums
      )
      parts['path', layers].append(sampled)
      parts['rms', layers].append(
        rank.exact_rms(
          capture.attention,
          capture.mask,
          layers=layers,
          skip=options['skip'],
          row_sums=row_sums,
        )
      )
      examples = capture.about['examples']
      result.add_raw(
        'path_products_raw', _raw(about, layers, examples, sampled)
      )
  for (what, layers), chunks in parts.items():
    quantity = 'path' if what == 'path' else 'exact RMS'
    rows = about | {
      'quantity': f'{quantity}, {layers} layers',
      'examples': options['num_examples'],
      'paths': options['num_paths'] if what == 'path' else None,
      **marginals.columns(),
    }
    result.summary.append(runs.residual_table(rows, rank.concatenate(chunks)))


def _raw(about, layers, examples, residuals):
  from analysis.common import runs

  depths, _, num_paths = residuals.invalid.shape
  names = ('run', 'normalizer', 'seed', 'step', 'ablation')
  return runs.raw_residuals(
    {k: about[k] for k in names} | {'layers': layers},
    residuals,
    example=np.array(examples)[:, None],
    path=np.arange(num_paths),
    depth=np.arange(depths)[:, None, None],
  )


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  paths = frames.select(summary, norm='spectral', scaling='absolute')
  frobenius = frames.select(summary, norm='frobenius', scaling='absolute')
  return [
    curves.Plot(
      'path_products',
      curves.caption(
        paths,
        'Spectral norm of the residual of path products against path depth,'
        ' absolute, for paths through the first k layers and through k layers'
        ' sampled without replacement.',
        curves.LEGEND,
        curves.DIFFERENCE,
        curves.describe_pairs(frames.differences(paths)),
      ),
      (8, 6),
      lambda fig: _draw_paths(fig, paths),
    ),
    curves.Plot(
      'path_products_rms',
      curves.caption(
        frobenius,
        'Frobenius norm of the residual of path products, absolute. Typical'
        ' paths (mean of log10 over sampled paths) beside the root mean square'
        ' over all paths and examples, which is exact over paths. Rare paths'
        ' that decay least dominate an RMS.',
      ),
      (8, 3.8),
      lambda fig: _draw_rms(fig, frobenius),
    ),
  ]


def _kinds(rows):
  found = set(rows['quantity'])
  return [x for x in LAYERS if f'path, {x} layers' in found]


def _draw_paths(fig, rows):
  names, kinds = curves.groups(rows), _kinds(rows)
  differences = frames.differences(rows)
  has_pairs = bool(len(differences))
  panels = fig.subplots(
    1 + has_pairs, len(kinds), sharex=True, sharey='row', squeeze=False
  )
  for column, layers in zip(panels.T, kinds, strict=True):
    quantity = f'path, {layers} layers'
    own = frames.select(rows, quantity=quantity)
    curves.draw_groups(column[0], own, names)
    column[0].set_title(_TITLES[layers])
    if has_pairs:
      own = frames.select(differences, quantity=quantity)
      curves.draw_group_differences(column[1], own, names)
    column[-1].set_xlabel('path depth k')
  panels[0, 0].set_ylabel(curves.RESIDUAL)
  panels[0, 0].legend()
  if has_pairs:
    panels[1, 0].set_ylabel('difference from softmax')
    panels[1, 0].set_title(curves.describe_pairs(differences), fontsize=8)
  curves.finish(fig, rows)


def _draw_rms(fig, rows):
  exact = rows['quantity'].str.startswith('exact')
  # Both kinds of curves are groups of one figure.
  words = rows['group'] + exact.map({True: ': RMS', False: ': typical'})
  table = rows.assign(
    group=words,
    mean=rows['mean'].where(~exact, rows['log10_of_rms']),
    std=rows['std'].where(~exact, 0.0),
  )
  curves.small_multiples(
    fig,
    table,
    {
      _TITLES[x]: {'quantity': [f'path, {x} layers', f'exact RMS, {x} layers']}
      for x in _kinds(rows)
    },
    xlabel='path depth k',
    ylabel='log10 of the Frobenius residual',
  )


def headlines(summary: frames.Table) -> list[str]:
  """The residual at a few depths, as text."""
  rows = frames.select(
    summary, quantity='path, first layers', norm='spectral', scaling='absolute'
  )
  return curves.headline(rows, 'Path products, first k layers, spectral norm')


if __name__ == '__main__':
  cli.run(lambda: command.main('path_products', FLAGS), FLAGS)
