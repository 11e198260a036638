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

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from analysis.common import naming

FLAGS = command.create_flags(16)
command.define_draws(FLAGS)
# What has to be known of what is analysed.
NEEDS = ('logits',)
OWN, UNIT = 'own spread', 'unit spread'
_PATHS = {f'random path, {x}': x for x in (OWN, UNIT)}


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

  values, examples = runs.collect(
    subject.captures(options, progress, result.notes),
    lambda x: {
      'variance': rank.mechanism.logit_variance(x.logits, x.mask).total,
      'tokens': runs.num_tokens(x)[None],
    },
  )
  variance = values['variance']
  about = subject.about() | {'dtype': 'float64', 'examples': len(examples)}
  own = {'quantity': 'logit spread', 'ablation': naming.ABLATIONS[True, True]}
  statistics = frames.value_statistics(np.sqrt(variance))
  result.summary.append(frames.by_depth(about | own, statistics, first_depth=1))
  if subject.normalizer not in rank.random_control.NORMALIZERS:
    result.notes.append(
      f'{subject.name}: no random matrices under {subject.normalizer!r}.'
    )
    return
  num_tokens = round(float(np.mean(values['tokens'])))
  # The spread about the mean of a row is that of n - 1 of n numbers.
  spread = np.sqrt(np.nanmean(variance, (1, 2)))
  scales = {OWN: spread / np.sqrt(1 - 1 / num_tokens), UNIT: 1.0}
  num_draws = options['num_draws']
  paths = rank.random_control.own_paths(subject.num_layers, num_draws)
  for quantity, words in _PATHS.items():
    if not np.isfinite(scales[words]).all():
      result.notes.append(
        f'{subject.name}: no random matrices of its own spread, which is not'
        ' finite.'
      )
      continue
    attention = rank.random_control.random_attention(
      options['seed'],
      subject.normalizer,
      scales[words],
      num_tokens,
      subject.num_layers,
      num_draws,
      subject.num_iters,
    )
    own = {'quantity': quantity, 'ablation': 'no identities'}
    residuals = rank.path_residuals(attention, paths)
    table = runs.residual_table(about | own | {'draws': num_draws}, residuals)
    result.summary.append(table)


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  import pandas as pd

  rows = frames.select(
    summary, quantity=list(_PATHS), norm='spectral', scaling='absolute'
  )
  spread = frames.select(summary, quantity='logit spread')
  groups = curves.groups(spread)
  words = rows['quantity'].map(_PATHS)
  table = [
    spread.assign(curve=spread['group']),
    rows.assign(curve=rows['group'] + ', ' + words, std=0.0),
  ]
  titles = {
    'logit spread': {'quantity': 'logit spread'},
    'log10 of the residual of random products': {'quantity': list(_PATHS)},
  }
  names = [groups, [f'{x}, {y}' for x in groups for y in (OWN, UNIT)]]
  return [
    curves.panels(
      'matched_control',
      pd.concat(table),
      'Left: standard deviation of the logits about the mean of their row.'
      ' Right: spectral norm of the residual of products of unrelated random'
      ' matrices under the same normalizer, absolute, with logits of that'
      ' spread in each layer, and of unit spread. Mean of log10 over draws.',
      titles,
      by='curve',
      names=dict(zip(titles, names, strict=True)),
      xlabel='layer, or number of factors',
      ylabel='',
      sharey=False,
    )
  ]


def headlines(summary: frames.Table) -> list[str]:
  """The random residual at a few depths, as text."""
  rows = frames.select(
    summary, quantity=list(_PATHS), norm='spectral', scaling='absolute'
  )
  return curves.headlines(
    rows.assign(words=rows['quantity'].map(_PATHS)),
    ('words',),
    'Random matrices, logits of {}, spectral norm',
  )


if __name__ == '__main__':
  command.run('matched_control', FLAGS)
