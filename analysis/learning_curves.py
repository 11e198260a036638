"""How the runs learned, from their `metrics.jsonl`.

  python -m analysis.learning_curves --workdir=RUN --workdir=RUN --output=DIR

Loss, accuracy and the largest deviation of a column sum of attention from 1,
against the step.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=None)

# Metric and title; a panel each.
METRICS = {
  'train/loss': 'loss, training batches',
  'validation/loss': 'loss, validation split',
  'train/accuracy': 'accuracy, training batches',
  'validation/accuracy': 'accuracy, validation split',
  'train/gradient_norm': 'gradient norm',
  'train/column_error': 'largest column error, training batches',
}
_LOGARITHMIC = ('loss', 'gradient', 'column')


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> tables.Result:
  """A row for each metric and logged step."""
  del options
  # Imported late: see `command`.
  from sinkformer_jax.training import metrics

  result = tables.Result([])
  for subject in subjects:
    progress.part(f'learning curves of {subject.name}')
    lines = metrics.read_metrics(subject.run.workdir)
    if not lines:
      result.notes.append(f'{subject.name} has no metrics.jsonl.')
    about = subject.about() | {'setting': None}
    result.summary.extend(
      about
      | {'quantity': name, 'step': line['step'], 'mean': line[name], 'count': 1}
      for name in METRICS
      for line in lines
      if name in line
    )
  return result


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  if not summary:
    return []
  return [
    curves.Plot(
      'learning_curves',
      curves.caption(
        summary,
        'Training, a curve for each run (as logged; nothing is smoothed).'
        ' Runs of one normalizer have the same style.',
      ),
      (8, 7.5),
      lambda fig: _draw(fig, summary),
    )
  ]


def _draw(fig, rows):
  names = curves.groups(rows)
  panels = fig.subplots(3, 2, sharex=True)
  for ax, (metric, title) in zip(panels.flat, METRICS.items(), strict=True):
    for number, group in enumerate(names):
      own = curves.select(rows, quantity=metric, group=group)
      for i, run in enumerate(dict.fromkeys(x['run'] for x in own)):
        points = curves.select(own, run=run)
        ax.plot(
          *([x[k] for x in points] for k in ('step', 'mean')),
          **figures.curve(number),
          linewidth=1,
          markevery=max(1, len(points) // 8),
          label=group if i == 0 else None,
        )
    if any(x in metric for x in _LOGARITHMIC):
      ax.set_yscale('log')
    ax.set_title(title)
  for ax in panels[-1]:
    ax.set_xlabel('step')
  panels[0, 0].legend(fontsize=8)
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """The last logged values, as text."""
  lines = []
  for run in dict.fromkeys(x['run'] for x in summary):
    texts = []
    for metric in METRICS:
      points = curves.select(summary, run=run, quantity=metric)
      if points:
        last = points[-1]
        texts.append(f'{metric} {last["mean"]:.4g} (step {last["step"]})')
    lines.append(f'{run}: {", ".join(texts)}')
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('learning_curves', FLAGS), FLAGS)
