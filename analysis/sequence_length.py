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
from analysis.common import figures
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)
command.define_paths(FLAGS)

QUANTITY = 'path, first layers, by length'
_GROUPS = 5
_DEPTHS = (4, 12, 24)


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> tables.Result:
  """Path products of each run, by length."""
  result = tables.Result([])
  for subject in subjects:
    progress.part(f'path products by length of {subject.name}')
    result.summary.extend(_rows(subject, options, progress, result.notes))
  return result


def _rows(subject, options, progress, notes):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import encoder
  from sinkformer_jax import rank

  model = subject.run.config.model
  paths = rank.sample_paths(
    options['seed'],
    model.num_layers,
    model.num_heads,
    options['num_paths'],
    skip=options['skip'],
  )
  parts, lengths = [], []
  for capture in subject.chunks(
    options['num_examples'], options['seed'], encoder.Ablation(), progress
  ):
    notes.extend(subject.problems(capture))
    parts.append(
      rank.path_residuals(
        capture.attention,
        paths,
        capture.mask,
        norms=('spectral',),
        row_sums=capture.about['row_sums'],
      )
    )
    lengths.append(runs.num_tokens(capture))
  whole, lengths = runs.concatenate(parts), np.concatenate(lengths)
  for members in groups(lengths):
    yield from tables.summary_rows(
      subject.about()
      | {
        'quantity': QUANTITY,
        'ablation': 'skip a choice' if options['skip'] else 'heads only',
        'norm': 'spectral',
        'scaling': 'absolute',
        'dtype': 'float64',
        'examples': options['num_examples'],
        'paths': options['num_paths'],
        'tokens': float(lengths[members].mean()),
      },
      rank.summarize(_choose(whole, members)),
    )


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


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  rows = curves.select(summary, quantity=QUANTITY)
  if len({x['tokens'] for x in rows}) < 2:
    return []  # All are equally long.
  last = max((x['depth'] for x in rows), default=0)
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
  panels = fig.subplots(1, len(depths), squeeze=False)[0]
  for ax, depth in zip(panels, depths, strict=True):
    for number, group in enumerate(curves.groups(rows)):
      own = curves.select(rows, group=group, depth=depth)
      for index, seed in enumerate(dict.fromkeys(x['seed'] for x in own)):
        points = curves.select(own, seed=seed, below_resolution=0, invalid=0)
        ax.plot(
          [x['tokens'] for x in points],
          [x['mean'] for x in points],
          **figures.curve(number),
          label=None if index else group,
        )
    ax.set_title(f'depth {depth}')
    ax.set_xlabel('valid tokens')
  panels[0].set_ylabel('log10 of the residual')
  curves.legend_above(fig, panels[0])
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """The residual of the shortest and of the longest examples, as text."""
  rows = curves.select(summary, quantity=QUANTITY)
  lines = []
  for run in dict.fromkeys(x['run'] for x in rows):
    own = curves.select(rows, run=run)
    depth = max(x['depth'] for x in own)
    points = curves.select(own, depth=depth)
    texts = [f'{x["mean"]:.3f} at {x["tokens"]:.0f} tokens' for x in points]
    lines.append(
      f'{run}, depth {depth}: log10 of the residual {", ".join(texts)}'
    )
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('sequence_length', FLAGS), FLAGS)
