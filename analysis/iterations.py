"""How many Sinkhorn iterations trained logits need, and what closes the rows.

  python -m analysis.iterations --workdir=SINKHORN_RUN --output=DIR

The logits of a trained Sinkhorn model, normalized with fewer and with more
iterations: how far columns are off, and how path products decay (first k
layers). The same without the closing row update: rows are then off 1, products
are plain ones, and they end on a floor. Beside it tokens layer by layer, when
the whole model is read with fewer iterations. Softmax runs are passed over.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming

FLAGS = command.create_flags(16, paths=True)
# What has to be known of what is analysed.
NEEDS = ('logits',)
# Of the column errors; the last is as good as converged.
COUNTS = (5, 10, 20, 50, 100, 1000)
# (iterations, row-closed) of path products, and of models that are read.
PATHS = (
  *((x, True) for x in (5, 20, 50, 1000)),
  *((x, False) for x in (5, 20, 50)),
)
READ = tuple(x for x in PATHS if x[0] <= 50)
_FACTORS = {'heads only': False, 'skip a choice': True}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Column errors, path products and tokens for several iterations."""
  result = frames.Result()
  used = [x for x in subjects if x.normalizer == 'sinkhorn']
  if not used:
    result.notes.append('No iterations: it needs a Sinkhorn run.')
  for subject in used:
    progress.part(f'iterations: {subject.name}')
    _measure_logits(subject, options, progress, result)
    for stack in READ if subject.has('model') else ():
      name = naming.iterations(*stack)
      progress.part(f'iterations: {subject.name} read with {name}')
      _measure_tokens(subject, stack, options, progress, result)
  return result


def _about(subject, stack, examples):
  return subject.about() | {
    'group': naming.iterations(*stack),
    'setting': None,
    'dtype': 'float64',
    'examples': len(examples),
  }


def _measure_logits(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  paths = {
    words: subject.paths(options | {'skip': skip})
    for words, skip in _FACTORS.items()
  }

  def measured(capture):
    found = {}
    for stack in dict.fromkeys((*((x, True) for x in COUNTS), *PATHS)):
      count, closed = stack
      attention = rank.mechanism.normalize(
        capture.logits, count, capture.mask, closed
      )
      found[stack, 'row error'], found[stack, 'column error'] = (
        rank.marginal_errors(attention, capture.mask)
      )
      for words, heads in paths.items() if stack in PATHS else ():
        found[stack, words] = rank.path_residuals(
          attention, heads, capture.mask, norms=('spectral',), plain=not closed
        )
    return found

  values, examples = runs.collect(
    subject.captures(options, progress, result.notes), measured
  )
  for count in COUNTS:
    stack = count, True
    about = _about(subject, stack, examples) | {
      'quantity': 'column error',
      'ablation': naming.ABLATIONS[True, True],
    }
    statistics = frames.value_statistics(values[stack, 'column error'])
    result.summary.append(frames.by_depth(about, statistics, first_depth=1))
  for stack in PATHS:
    about = _about(subject, stack, examples) | {
      'quantity': 'path, first layers',
      'paths': options['num_paths'],
      # Not of the run's own attention, which is `row_error` elsewhere.
      'row_error_of_stack': float(np.max(values[stack, 'row error'])),
    }
    result.summary += [
      runs.residual_table(about | {'ablation': words}, values[stack, words])
      for words in paths
    ]


def _measure_tokens(subject, stack, options, progress, result):
  from analysis import layer_outputs
  from analysis.common import runs
  from sinkformer_jax import encoder
  from sinkformer_jax import normalizers

  count, closed = stack
  read = subject.read_with(
    normalizers.create('sinkhorn_half_updates', 2 * count + closed)
  )
  for switches in ((True, True), (False, True)):
    # What is wrong with a capture is said by `_measure_logits`.
    values, examples = runs.collect(
      read.captures(options, progress, [], encoder.Ablation(*switches)),
      lambda x: layer_outputs.residuals(x, norms=('spectral',)),
    )
    about = _about(subject, stack, examples)
    about |= {'ablation': naming.ABLATIONS[switches]}
    result.summary += [
      runs.residual_table(about | {'quantity': quantity}, residuals)
      for quantity, residuals in values.items()
    ]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  import pandas as pd

  paths = _paths(summary)
  errors = frames.select(summary, quantity='column error')
  errors = errors[errors['mean'] > 0]
  # Errors after many iterations differ by decades between seeds: no bars.
  errors = frames.over_seeds(errors.assign(mean=np.log10(errors['mean'])))
  titles = {
    'log10 of the column error': {'quantity': 'column error'},
    'log10 of the residual of path products': {
      'quantity': 'path, first layers'
    },
  }
  names = [
    [naming.iterations(x) for x in COUNTS],
    [naming.iterations(*x) for x in PATHS],
  ]
  return [
    curves.panels(
      'iterations',
      pd.concat([paths, errors]),
      'Logits of trained Sinkhorn models, normalized with several numbers of'
      ' iterations. Left: largest deviation of a column sum from 1, mean over'
      ' examples and heads, log10; mean over seeds. Right: spectral norm of the'
      ' residual of path products (first k layers), absolute; bars: standard'
      ' deviation between seeds. All row-closed ones lie on one curve;'
      ' column-closed ones are plain products of matrices whose rows do not sum'
      ' to 1, with row errors of up to'
      f' {paths["row_error_of_stack"].max():.1e}.',
      titles,
      size=(9, 4.8),
      names=dict(zip(titles, names, strict=True)),
      styles=_styles(),
      xlabel='layer, or path depth k',
      ylabel='',
      sharey=False,
      band=False,
    )
  ]


def _styles():
  """A number of iterations looks the same in both panels."""
  return {
    naming.iterations(count, closed): figures.curve(number)
    | ({} if closed else {'markerfacecolor': 'white'})
    for number, count in enumerate(COUNTS)
    for closed in (True, False)
  }


def _paths(summary):
  return frames.select(
    summary,
    quantity='path, first layers',
    ablation='heads only',
    scaling='absolute',
  )


def headlines(summary: frames.Table) -> list[str]:
  """Column errors and the residual at a few depths, as text."""
  errors = frames.select(summary, quantity='column error')
  worst = errors.groupby(['run', 'group'], sort=False)['mean'].max()
  lines = []
  for run in errors['run'].unique():
    texts = [
      f'{count}: {worst[run, naming.iterations(count)]:.1e}' for count in COUNTS
    ]
    lines.append(
      f'{run}: mean column error of the worst layer by iterations:'
      f' {", ".join(texts)}'
    )
  return lines + curves.headline(
    _paths(summary), 'Path products, first k layers, spectral norm'
  )


if __name__ == '__main__':
  command.run('iterations', FLAGS)
