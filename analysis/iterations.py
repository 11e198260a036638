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
from analysis.common import naming
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=16)
command.define_paths(FLAGS)

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
) -> tables.Result:
  """Column errors, path products and tokens for several iterations."""
  result = tables.Result([])
  used = [x for x in subjects if x.normalizer == 'sinkhorn']
  if not used:
    result.notes.append('No iterations: it needs a Sinkhorn run.')
  for subject in used:
    progress.part(f'iterations: {subject.name}')
    _measure_logits(subject, options, progress, result)
    for num_iters, closed in READ:
      progress.part(
        f'iterations: {subject.name} read with'
        f' {naming.iterations(num_iters, closed)}'
      )
      _measure_tokens(subject, num_iters, closed, options, progress, result)
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
  from sinkformer_jax import encoder
  from sinkformer_jax import rank
  from sinkformer_jax.rank import mechanism

  model = subject.run.config.model
  heads = {
    words: rank.sample_paths(
      options['seed'],
      model.num_layers,
      model.num_heads,
      options['num_paths'],
      skip=skip,
    )
    for words, skip in (('heads only', False), ('skip a choice', True))
  }
  parts = {(*stack, words): [] for stack in PATHS for words in heads}
  errors = {x: [] for x in COUNTS}
  row_errors = {stack: [] for stack in PATHS}

  def measure_paths(stack, attention, mask):
    row_errors[stack].append(rank.marginal_errors(attention, mask)[0].max())
    for words, paths in heads.items():
      parts[*stack, words].append(
        rank.path_residuals(
          attention, paths, mask, norms=('spectral',), plain=not stack[1]
        )
      )

  for capture in subject.chunks(
    options['num_examples'], options['seed'], encoder.Ablation(), progress
  ):
    result.notes.extend(subject.problems(capture))
    mask = capture.mask
    for num_iters in COUNTS:
      attention = mechanism.normalize(capture.logits, num_iters, mask)
      errors[num_iters].append(rank.marginal_errors(attention, mask)[1])
      if (num_iters, True) in PATHS:
        measure_paths((num_iters, True), attention, mask)
    for num_iters, closed in PATHS:
      if not closed:
        # One less, as its last row update is the closing one.
        attention = mechanism.normalize(capture.logits, num_iters - 1, mask)
        measure_paths((num_iters, False), end_on_columns(attention), mask)
  result.summary.extend(_error_rows(subject, options, errors))
  for (*stack, words), chunks in parts.items():
    about = _about(subject, options, naming.iterations(*stack)) | {
      'quantity': 'path, first layers',
      'ablation': words,
      'paths': options['num_paths'],
      # Not of the run's own attention, which is `row_error` elsewhere.
      'row_error_of_stack': float(max(row_errors[*stack])),
    }
    result.summary.extend(runs.residual_rows(about, runs.concatenate(chunks)))


def _error_rows(subject, options, errors):
  for num_iters, values in errors.items():
    yield from tables.summary_rows(
      _about(subject, options, naming.iterations(num_iters))
      | {'quantity': 'column error', 'ablation': 'skip on, FFN on'},
      tables.value_statistics(np.concatenate(values, 1)),
      first_depth=1,
    )


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
    for capture in read.chunks(
      options['num_examples'],
      options['seed'],
      encoder.Ablation(*switches),
      progress,
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
      result.summary.extend(runs.residual_rows(about, runs.concatenate(chunks)))


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  if not summary:
    return []
  paths = curves.select(
    summary,
    quantity='path, first layers',
    ablation='heads only',
    scaling='absolute',
  )
  errors = curves.select(summary, quantity='column error')
  return [
    curves.Plot(
      'iterations',
      curves.caption(
        paths,
        'Logits of trained Sinkhorn models, normalized with several numbers of'
        ' iterations. Left: largest deviation of a column sum from 1, mean over'
        ' examples and heads, log10; mean over seeds. Right: spectral norm of'
        ' the residual of path products (first k layers), absolute; bars:'
        ' standard deviation between seeds. All that are closed by a row update'
        ' lie on one curve; those that end on a column update are plain'
        ' products of matrices whose rows are off 1, by up to'
        f' {max(x["row_error_of_stack"] for x in paths):.1e}.',
      ),
      (9, 4.8),
      lambda fig: _draw(fig, errors, paths),
    )
  ]


def _draw(fig, errors, paths):
  left, right = fig.subplots(1, 2)
  # A number of iterations looks the same in both.
  styles = {x: figures.curve(number) for number, x in enumerate(COUNTS)}
  for count in COUNTS:
    points = [
      x | {'mean': float(np.log10(x['mean'])), 'std': 0.0}
      for x in curves.select(errors, group=naming.iterations(count))
      if x['mean'] > 0
    ]
    # Errors after many iterations differ by decades between seeds.
    curves.draw(
      left, points, styles[count], naming.iterations(count), bars=False
    )
  left.set_xlabel('layer')
  left.set_ylabel('log10 of the column error')
  for count, closed in PATHS:
    points = curves.select(paths, group=naming.iterations(count, closed))
    points = [x | {'std': 0.0} for x in points]
    style = styles[count] | ({} if closed else {'markerfacecolor': 'white'})
    curves.draw(right, points, style, naming.iterations(count, closed))
  right.set_xlabel('path depth k')
  right.set_ylabel('log10 of the residual')
  for ax in (left, right):
    ax.legend(
      fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.14), ncols=2
    )
  curves.finish(fig, paths)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """Column errors and the residual at a few depths, as text."""
  lines = []
  for run in dict.fromkeys(x['run'] for x in summary):
    own = curves.select(summary, run=run, quantity='column error')
    worst = {
      count: max(
        x['mean'] for x in curves.select(own, group=naming.iterations(count))
      )
      for count in COUNTS
    }
    texts = [f'{count}: {error:.1e}' for count, error in worst.items()]
    lines.append(
      f'{run}: mean column error of the worst layer by iterations:'
      f' {", ".join(texts)}'
    )
  paths = curves.select(
    summary,
    quantity='path, first layers',
    ablation='heads only',
    scaling='absolute',
  )
  if paths:
    lines += curves.headline(
      paths, 'Path products, first k layers, spectral norm'
    )
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('iterations', FLAGS), FLAGS)
