"""Decay of path products against the number of tokens of a text.

  python -m analysis.sequence_length --workdir=RUN --workdir=RUN --output=DIR

Test examples are put into groups of nearly equal size by how many valid tokens
they have; in each, path products through the first k layers, over valid tokens
alone. Images, whose examples all have the same number, make one group.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames

FLAGS = command.create_flags(paths=True)
QUANTITY = 'path, first layers, by length'
_GROUPS = 5
_DEPTHS = (4, 12, 24)


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Path products of each run, by length."""
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  result = frames.Result()
  for subject in subjects:
    progress.part(f'path products by length of {subject.name}')
    paths = subject.paths(options)

    def measured(capture, paths=paths):
      return {
        'tokens': runs.num_tokens(capture)[None],
        'residuals': rank.path_residuals(
          capture.attention,
          paths,
          capture.mask,
          norms=('spectral',),
          row_sums=capture.about['row_sums'],
        ),
      }

    values, examples = runs.collect(
      subject.captures(options, progress, result.notes), measured
    )
    about = subject.about() | {
      'quantity': QUANTITY,
      'ablation': 'skip a choice' if options['skip'] else 'heads only',
      'norm': 'spectral',
      'scaling': 'absolute',
      'dtype': 'float64',
      'examples': len(examples),
      'paths': options['num_paths'],
    }
    (lengths,) = values['tokens']
    result.summary += [
      frames.by_depth(
        about | {'tokens': float(lengths[members].mean())},
        rank.summarize(rank.of_examples(values['residuals'], members)),
      )
      for members in groups(lengths)
    ]
  return result


def groups(lengths: np.ndarray) -> list[np.ndarray]:
  """Indices of examples, in groups that are no longer and no shorter.

  Args:
    lengths: of the examples.

  Returns:
    At most 5 groups from short to long; examples of one length are together.
  """
  edges = np.quantile(lengths, np.arange(1, _GROUPS) / _GROUPS)
  number = np.searchsorted(np.unique(edges), lengths, side='left')
  return [np.flatnonzero(number == x) for x in np.unique(number)]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  rows = frames.select(summary, quantity=QUANTITY)
  if rows.empty or rows['tokens'].nunique() < 2:
    return []  # All are equally long.
  last = int(rows['depth'].max())
  depths = [*(x for x in _DEPTHS if x < last), last]
  names = curves.groups(rows)

  def panel(ax, part):
    whole = frames.select(part, below_resolution=0, invalid=0)
    curves.draw_lines(ax, whole, names, 'tokens', 'seed')

  return [
    curves.panels(
      'sequence_length',
      rows,
      'Spectral norm of the residual of path products (first k layers),'
      ' absolute, against the number of valid tokens: mean of log10 over groups'
      ' of test examples of similar length, one line for each run. Groups with'
      ' a value below resolution are left out.',
      {f'depth {x}': {'depth': x} for x in depths},
      size=(8, 3.5),
      panel=panel,
      xlabel='valid tokens',
      sharey=False,
    )
  ]


def headlines(summary: frames.Table) -> list[str]:
  """The residual of the shortest and of the longest examples, as text."""
  rows = frames.select(summary, quantity=QUANTITY)
  if rows.empty:
    return []
  lines = []
  for run, own in rows.groupby('run', sort=False):
    depth = int(own['depth'].max())
    points = frames.select(own, depth=depth)
    texts = [
      f'{mean:.3f} at {tokens:.0f} tokens'
      for mean, tokens in zip(points['mean'], points['tokens'], strict=True)
    ]
    lines.append(
      f'{run}, depth {depth}: log10 of the residual {", ".join(texts)}'
    )
  return lines


if __name__ == '__main__':
  command.run('sequence_length', FLAGS)
