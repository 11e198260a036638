"""How the runs learned, from their `metrics.jsonl`.

  python -m analysis.learning_curves --workdir=RUN --workdir=RUN --output=DIR

Loss, accuracy and the largest deviation of a column sum of attention from 1,
against the step.
"""

from collections.abc import Sequence
from typing import Any

from analysis.common import command
from analysis.common import curves
from analysis.common import frames

FLAGS = command.create_flags(None)
# What has to be known of what is analysed.
NEEDS = ('model',)
# Metric and title; a panel each.
METRICS = {
  'train/loss': 'loss, training batches',
  'validation/loss': 'loss, validation split',
  'train/accuracy': 'accuracy, training batches',
  'validation/accuracy': 'accuracy, validation split',
  'train/gradient_norm': 'gradient norm',
  'train/column_error': 'largest column error, training batches',
}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """A row for each metric and logged step."""
  del options
  # Imported late: see `command`.
  import pandas as pd

  from sinkformer_jax.training import metrics

  result = frames.Result()
  for subject in subjects:
    progress.part(f'learning curves of {subject.name}')
    lines = pd.DataFrame(metrics.read_metrics(subject.run.workdir))
    if lines.empty:
      result.notes.append(f'{subject.name} has no metrics.jsonl.')
      continue
    names = [x for x in METRICS if x in lines]
    found = lines.melt('step', names, 'quantity', 'mean').dropna()
    about = subject.about() | {'setting': None, 'count': 1}
    del about['step']
    result.summary.append(found.assign(**about))
  return result


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  names = curves.groups(summary)
  return [
    curves.panels(
      'learning_curves',
      summary,
      'Training, a curve for each run (as logged; nothing is smoothed). Runs of'
      ' one normalizer have the same style.',
      {title: {'quantity': x} for x, title in METRICS.items()},
      size=(8, 7.5),
      wrap=2,
      panel=lambda ax, part: curves.draw_lines(
        ax, part, names, 'step', 'run', linewidth=1
      ),
      xlabel='step',
      ylabel='',
      sharey=False,
      logarithmic=[y for x, y in METRICS.items() if 'accuracy' not in x],
    )
  ]


def headlines(summary: frames.Table) -> list[str]:
  """The last logged values, as text."""
  lines = []
  for run, rows in summary.groupby('run', sort=False):
    last = rows.groupby('quantity', sort=False).last()
    texts = [
      f'{metric} {mean:.4g} (step {step})'
      for metric, mean, step in zip(
        last.index, last['mean'], last['step'], strict=True
      )
    ]
    lines.append(f'{run}: {", ".join(texts)}')
  return lines


if __name__ == '__main__':
  command.run('learning_curves', FLAGS)
