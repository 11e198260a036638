"""Random matrices as sharp as those of a run: the control, matched.

  python -m analysis.matched_control --workdir=RUN --workdir=RUN --output=DIR

Products of unrelated random matrices decay at a rate that the scale of their
logits decides. So trained path products are compared with random ones whose
Gaussian logits have, layer by layer, the spread of the run's own logits (their
standard deviation about the mean of a row), under the run's normalizer; and
with those of unit spread.
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
command.define_runs(FLAGS, num_examples=16)
flags.DEFINE_integer(
  'num_draws',
  100,
  'Random matrices for each factor.',
  lower_bound=1,
  flag_values=FLAGS,
)

# What has to be known of what is analysed.
NEEDS = ('logits',)
OWN, UNIT = 'own spread', 'unit spread'


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Logit spread by layer, and decay of random products, of each run."""
  result = frames.Result()
  for subject in subjects:
    progress.part(f'matched control of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import rank

  totals, tokens = [], []
  for capture in subject.captures(options, progress, result.notes):
    totals.append(
      rank.mechanism.logit_variance(capture.logits, capture.mask).total
    )
    tokens.append(runs.num_tokens(capture))
  totals = np.concatenate(totals, 1)
  about = subject.about() | {
    'dtype': 'float64',
    'examples': options['num_examples'],
  }
  result.summary.append(
    frames.by_depth(
      about | {'quantity': 'logit spread', 'ablation': 'skip on, FFN on'},
      frames.value_statistics(np.sqrt(totals)),
      first_depth=1,
    )
  )
  spread = np.sqrt(np.nanmean(totals, (1, 2)))
  num_tokens = round(float(np.mean(np.concatenate(tokens))))
  # The spread about the mean of a row is that of n - 1 of n numbers.
  scale = spread / np.sqrt(1 - 1 / num_tokens)
  paths = rank.random_control.own_paths(
    subject.num_layers, options['num_draws']
  )
  for words, scales in ((OWN, scale), (UNIT, 1.0)):
    if subject.normalizer not in rank.random_control.NORMALIZERS:
      result.notes.append(
        f'{subject.name}: no random matrices under {subject.normalizer!r}.'
      )
      return
    if not np.isfinite(scales).all():
      result.notes.append(
        f'{subject.name}: no random matrices of its own spread, which is not'
        ' finite.'
      )
      continue
    attention = rank.random_control.random_attention(
      options['seed'],
      subject.normalizer,
      scales,
      num_tokens,
      subject.num_layers,
      options['num_draws'],
      subject.num_iters,
    )
    residuals = rank.path_residuals(attention, paths)
    rows = about | {
      'quantity': f'random path, {words}',
      'ablation': 'no identities',
      'draws': options['num_draws'],
    }
    result.summary.append(runs.residual_table(rows, residuals))


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  rows = frames.select(summary, norm='spectral', scaling='absolute')
  spread = frames.select(summary, quantity='logit spread')
  return [
    curves.Plot(
      'matched_control',
      curves.caption(
        rows,
        'Left: standard deviation of the logits about the mean of their row.'
        ' Right: spectral norm of the residual of products of unrelated random'
        ' matrices under the same normalizer, absolute, with logits of that'
        ' spread in each layer, and of unit spread. Mean of log10 over draws.',
      ),
      (8, 4),
      lambda fig: _draw(fig, spread, rows),
    )
  ]


def _draw(fig, spread, rows):
  left, right = fig.subplots(1, 2)
  curves.draw_groups(left, spread)
  of_spread = rows['quantity'].str.removeprefix('random path')
  rows = rows.assign(curve=rows['group'] + of_spread)
  names = [f'{x}, {y}' for x in curves.groups(spread) for y in (OWN, UNIT)]
  curves.draw_groups(right, rows, names, by='curve', band=False)
  left.set_xlabel('layer')
  left.set_ylabel('logit spread')
  right.set_xlabel('factors')
  right.set_ylabel(curves.RESIDUAL)
  left.legend()
  right.legend(fontsize=7)
  curves.finish(fig, rows)


def headlines(summary: frames.Table) -> list[str]:
  """The random residual at a few depths, as text."""
  lines = []
  for words in (OWN, UNIT):
    rows = frames.select(
      summary,
      quantity=f'random path, {words}',
      norm='spectral',
      scaling='absolute',
    )
    title = f'Random matrices, logits of {words}, spectral norm'
    lines += curves.headline(rows, title)
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('matched_control', FLAGS), FLAGS)
