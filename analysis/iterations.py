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

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=16)
command.define_paths(FLAGS)

# What has to be known of what is analysed.
NEEDS = ('logits',)
# Of the column errors; the last is as good as converged.
COUNTS = (5, 10, 20, 50, 100, 1000)
# (iterations, rows closed) of path products, and of models that are read.
PATHS = (
  *((x, True) for x in (5, 20, 50, 1000)),
  *((x, False) for x in (5, 20, 50)),
)
READ = tuple(x for x in PATHS if x[0] <= 50)


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
      progress.part(
        f'iterations: {subject.name} read with {naming.iterations(*stack)}'
      )
      _measure_tokens(subject, *stack, options, progress, result)
  return result


def _about(subject, options, stack):
  return subject.about() | {
    'group': stack,
    'setting': None,
    'dtype': 'float64',
    'examples': options['num_examples'],
  }


def _measure_logits(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  chosen = {
    words: subject.paths(options | {'skip': skip})
    for words, skip in (('heads only', False), ('skip a choice', True))
  }
  parts = {(stack, words): [] for stack in PATHS for words in chosen}
  errors = {x: [] for x in COUNTS}
  marginals = {stack: runs.Marginals() for stack in PATHS}
  for capture in subject.captures(options, progress, result.notes):
    mask = capture.mask
    for count in COUNTS:
      attention = rank.mechanism.normalize(capture.logits, count, mask)
      errors[count].append(rank.marginal_errors(attention, mask)[1])
    for stack in PATHS:
      attention = _stack(capture.logits, *stack, mask)
      marginals[stack].see(attention, mask)
      for words, paths in chosen.items():
        residuals = rank.path_residuals(
          attention, paths, mask, norms=('spectral',), plain=not stack[1]
        )
        parts[stack, words].append(residuals)
  for count, values in errors.items():
    about = _about(subject, options, naming.iterations(count)) | {
      'quantity': 'column error',
      'ablation': naming.ABLATIONS[True, True],
    }
    statistics = frames.value_statistics(np.concatenate(values, 1))
    result.summary.append(frames.by_depth(about, statistics, first_depth=1))
  for (stack, words), chunks in parts.items():
    about = _about(subject, options, naming.iterations(*stack)) | {
      'quantity': 'path, first layers',
      'ablation': words,
      'paths': options['num_paths'],
      # Not of the run's own attention, which is `row_error` elsewhere.
      'row_error_of_stack': marginals[stack].row_error,
    }
    result.summary.append(runs.residual_table(about, rank.concatenate(chunks)))


def _stack(logits, num_iters, closed, mask):
  from sinkformer_jax.rank import mechanism

  if closed:
    return mechanism.normalize(logits, num_iters, mask)
  # One less, as its last row update is the closing one.
  return end_on_columns(mechanism.normalize(logits, num_iters - 1, mask))


def end_on_columns(weights):
  """Columns that sum to 1, and rows that do not; arrays of any kind."""
  sums = weights.sum(-2, keepdims=True)
  return weights / (sums + (sums == 0))  # Padding has columns of 0.


def _measure_tokens(subject, num_iters, closed, options, progress, result):
  from analysis import layer_outputs
  from analysis.common import runs
  from sinkformer_jax import encoder
  from sinkformer_jax import rank
  from sinkformer_jax import sinkhorn

  def normalizer(logits, mask=None):
    weights = sinkhorn.sinkhorn(logits, num_iters - (not closed), mask)
    return weights if closed else end_on_columns(weights)

  read = subject.read_with(normalizer)
  for switches in ((True, True), (False, True)):
    parts = {quantity: [] for quantity in layer_outputs.QUANTITIES}
    # What is wrong with a capture is said by `_measure_logits`.
    for capture in read.captures(
      options, progress, [], encoder.Ablation(*switches)
    ):
      for quantity, x in layer_outputs.tokens(capture).items():
        parts[quantity].append(
          rank.residual_norms(x, capture.mask, norms=('spectral',))
        )
    for quantity, chunks in parts.items():
      about = _about(subject, options, naming.iterations(num_iters, closed)) | {
        'quantity': quantity,
        'ablation': naming.ABLATIONS[switches],
      }
      table = runs.residual_table(about, rank.concatenate(chunks))
      result.summary.append(table)


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  paths = _paths(summary)
  errors = frames.select(summary, quantity='column error')
  return [
    curves.Plot(
      'iterations',
      curves.caption(
        paths,
        'Logits of trained Sinkhorn models, normalized with several numbers of'
        ' iterations. Left: largest deviation of a column sum from 1, mean over'
        ' examples and heads, log10; mean over seeds. Right: spectral norm of'
        ' the residual of path products (first k layers), absolute; bars:'
        ' standard deviation between seeds. All row-closed ones lie on one'
        ' curve; column-closed ones are plain products of matrices whose rows'
        ' do not sum to 1, with row errors of up to'
        f' {paths["row_error_of_stack"].max():.1e}.',
      ),
      (9, 4.8),
      lambda fig: _draw(fig, errors, paths),
    )
  ]


def _paths(summary):
  return frames.select(
    summary,
    quantity='path, first layers',
    ablation='heads only',
    scaling='absolute',
  )


def _draw(fig, errors, paths):
  left, right = fig.subplots(1, 2)
  # A number of iterations looks the same in both.
  styles = {x: figures.curve(number) for number, x in enumerate(COUNTS)}
  errors = errors[errors['mean'] > 0]
  errors = errors.assign(mean=np.log10(errors['mean']))
  for count, style in styles.items():
    name = naming.iterations(count)
    points = frames.select(errors, group=name)
    # Errors after many iterations differ by decades between seeds.
    curves.draw(left, points, style, name, bars=False, band=False)
  left.set_xlabel('layer')
  left.set_ylabel('log10 of the column error')
  for stack in PATHS:
    name = naming.iterations(*stack)
    style = styles[stack[0]]
    style = style if stack[1] else style | {'markerfacecolor': 'white'}
    points = frames.select(paths, group=name)
    curves.draw(right, points, style, name, band=False)
  right.set_xlabel('path depth k')
  right.set_ylabel(curves.RESIDUAL)
  for ax in (left, right):
    ax.legend(
      fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.14), ncols=2
    )
  curves.finish(fig, paths)


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
  cli.run(lambda: command.main('iterations', FLAGS), FLAGS)
