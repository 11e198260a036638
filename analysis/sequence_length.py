"""Decay of path products against the number of tokens of a text.

  python -m analysis.sequence_length --workdir=RUN --workdir=RUN --output=DIR

Test examples are put into groups of nearly equal size by how many valid tokens
they have; in each, path products through the first k layers, over valid tokens
alone. Images, whose examples all have the same number, make one group.
"""

from collections.abc import Sequence
import dataclasses
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

QUANTITY = 'path, first layers, by length'
_GROUPS = 5
_DEPTHS = (4, 12, 24)


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Path products of each run, by length."""
  result = frames.Result()
  for subject in subjects:
    progress.part(f'path products by length of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  paths = subject.paths(options)
  parts, lengths = [], []
  for capture in subject.captures(options, progress, result.notes):
    residuals = rank.path_residuals(
      capture.attention,
      paths,
      capture.mask,
      norms=('spectral',),
      row_sums=capture.about['row_sums'],
    )
    parts.append(residuals)
    lengths.append(runs.num_tokens(capture))
  whole, lengths = rank.concatenate(parts), np.concatenate(lengths)
  about = subject.about() | {
    'quantity': QUANTITY,
    'ablation': 'skip a choice' if options['skip'] else 'heads only',
    'norm': 'spectral',
    'scaling': 'absolute',
    'dtype': 'float64',
    'examples': options['num_examples'],
    'paths': options['num_paths'],
  }
  result.summary += [
    frames.by_depth(
      about | {'tokens': float(lengths[members].mean())},
      rank.summarize(_choose(whole, members)),
    )
    for members in groups(lengths)
  ]


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


def _choose(residuals, members):
  """Residuals of some examples, the second axis."""
  return dataclasses.replace(
    residuals,
    log10={k: x[:, members] for k, x in residuals.log10.items()},
    log10_whole={k: x[:, members] for k, x in residuals.log10_whole.items()},
    below_resolution=residuals.below_resolution[:, members],
    invalid=residuals.invalid[:, members],
  )


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  rows = frames.select(summary, quantity=QUANTITY)
  if rows.empty or rows['tokens'].nunique() < 2:
    return []  # All are equally long.
  last = int(rows['depth'].max())
  depths = [*(x for x in _DEPTHS if x < last), last]
  return [
    curves.Plot(
      'sequence_length',
      curves.caption(
        rows,
        'Spectral norm of the residual of path products (first k layers),'
        ' absolute, against the number of valid tokens: mean of log10 over'
        ' groups of test examples of similar length, one line for each run.'
        ' Groups with a value below resolution are left out.',
      ),
      (8, 3.5),
      lambda fig: _draw(fig, rows, depths),
    )
  ]


def _draw(fig, rows, depths):
  names = curves.groups(rows)

  def panel(ax, part):
    # What is below resolution or invalid makes the mean that of a selection.
    whole = frames.select(part, below_resolution=0, invalid=0)
    curves.draw_lines(ax, whole, names, 'tokens', 'seed')

  columns = {f'depth {x}': {'depth': x} for x in depths}
  curves.small_multiples(
    fig, rows, columns, panel=panel, xlabel='valid tokens', sharey=False
  )


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
  cli.run(lambda: command.main('sequence_length', FLAGS), FLAGS)
