"""Why one model keeps tokens apart better: experiments on pairs of runs.

  python -m analysis.mechanism --workdir=SOFTMAX_RUN --workdir=SINKHORN_RUN
    --output=DIR

Is it the normalizer, or the logits that training under it has found? Logits of
both models go through both normalizers. Is it the column bias of the logits,
which Sinkhorn is nearly blind to? It is removed. Is it that one model attends
more sharply? Temperatures give both the same entropy in each layer, also where
the logits are the same, or the bias is removed. Each time the residual of path
products (first k layers) is measured. With talking heads, the weights are those
before the second mix.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames

FLAGS = command.create_flags(16, paths=True)
# Raised whenever other numbers come of the same runs, see `measure.Store`.
VERSION = 1
NEEDS = ('logits',)
# All examples of a pair are held at once: no more than this.
MAX_EXAMPLES = 16

SOFTMAX, SINKHORN = 'softmax logits, ', 'sinkhorn logits, '
PANELS = {
  'normalizer swapped': (
    f'{SOFTMAX}softmax',
    f'{SOFTMAX}sinkhorn',
    f'{SINKHORN}softmax',
    f'{SINKHORN}sinkhorn',
  ),
  'column bias removed': (
    f'{SOFTMAX}softmax',
    f'{SOFTMAX}softmax, bias removed',
    f'{SINKHORN}softmax',
    f'{SINKHORN}softmax, bias removed',
    f'{SINKHORN}sinkhorn',
  ),
  'entropy matched': (
    f'{SOFTMAX}softmax',
    f"{SOFTMAX}softmax, sinkhorn's entropy",
    f'{SINKHORN}sinkhorn',
    f"{SINKHORN}sinkhorn, softmax's entropy",
  ),
  'swapped or removed, entropy matched': (
    f'{SOFTMAX}softmax',
    f"{SOFTMAX}sinkhorn, softmax's entropy",
    f"{SOFTMAX}softmax, bias removed, softmax's entropy",
    f'{SINKHORN}sinkhorn',
    f"{SINKHORN}softmax, sinkhorn's entropy",
    f"{SINKHORN}softmax, bias removed, sinkhorn's entropy",
  ),
}
_NUM_STACKS = len({name for names in PANELS.values() for name in names})
LOGITS = {
  'column bias': 'share of column bias in the variance of logits',
  'logit spread': 'standard deviation of logits in a row',
  'bias dependence': 'effect of the bias on weights (total variation)',
}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Decay of all stacks, and statistics of logits, for each pair."""
  # Imported late: see `command`.
  from analysis.common import runs

  result = frames.Result()
  options = options | {
    'num_examples': min(options['num_examples'], MAX_EXAMPLES)
  }
  pairs = runs.pairs(subjects)
  if not pairs:
    result.notes.append(
      'No mechanism: it needs a softmax and a Sinkhorn run with one seed.'
    )
  for softmax, sinkhorn in pairs:
    progress.part(f'mechanism: {softmax.name} and {sinkhorn.name}')
    _measure_pair(softmax, sinkhorn, options, progress, result)
  return result


def _measure_pair(softmax, sinkhorn, options, progress, result):
  from analysis.common import runs
  from sinkformer_jax import rank

  name = f'{softmax.name} and {sinkhorn.name}'
  logits, bad = {}, False
  for source, subject in (('softmax', softmax), ('sinkhorn', sinkhorn)):
    capture = subject.whole(options, progress, result.notes)
    bad = bad or bool(capture.about['non_finite_layers'])
    # No more of it is kept: that of long texts takes gigabytes.
    logits[source] = capture.logits
    mask, examples = capture.mask, np.array(capture.about['examples'])
    del capture
  if bad:
    result.notes.append(f'No mechanism of {name}: logits are not finite.')
    return
  about = softmax.about() | {
    'run': name,
    'setting': None,
    'examples': len(examples),
    'dtype': 'float64',
    'norm': 'spectral',
    'scaling': 'absolute',
  }
  paths, num_iters = softmax.paths(options), sinkhorn.num_iters
  stacks = rank.mechanism.experiments(
    *logits.values(),
    num_iters,
    mask,
    # One curve is missing, and is said to be; the others stand.
    lambda stack, error: result.notes.append(
      f'{name}: no curve "{stack}": {error}'
    ),
  )
  for done, (stack, attention) in enumerate(stacks, start=1):
    residuals = rank.path_residuals(attention, paths, mask, norms=('spectral',))
    own = about | {
      'group': stack,
      'quantity': 'path, first layers',
      'ablation': 'skip a choice' if options['skip'] else 'heads only',
      'paths': options['num_paths'],
      'entropy': float(rank.mechanism.mean_entropy(attention, mask).mean()),
      **runs.largest_errors(runs.marginal_errors(attention, mask)),
    }
    raw = frames.raw(
      {k: own[k] for k in ('run', 'seed', 'step', 'group', 'dtype')},
      example=examples[:, None],
      path=np.arange(options['num_paths']),
      depth=np.arange(len(residuals.invalid))[:, None, None],
      log10_spectral=residuals.log10['spectral'],
      below_resolution=residuals.below_resolution,
      invalid=residuals.invalid,
    )
    result.add_raw('mechanism_raw', raw)
    statistics = rank.summarize(residuals, 'spectral')
    result.summary.append(frames.by_depth(own, statistics))
    progress(done, _NUM_STACKS, 'stacks')
  plain = {'norm': '', 'scaling': ''}
  for source, count in (('softmax', 0), ('sinkhorn', num_iters)):
    values = rank.mechanism.logit_statistics(logits[source], count, mask)
    own = about | plain | {'group': source, 'normalizer': source}
    result.summary += [
      frames.by_depth(own | {'quantity': k}, frames.value_statistics(x), 1)
      for k, x in values.items()
    ]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  return [
    curves.panels(
      'mechanism_paths',
      frames.select(summary, quantity='path, first layers'),
      'Spectral norm of the residual of path products (first k layers),'
      ' absolute. Left: logits of the softmax and of the Sinkhorn model through'
      ' either normalizer. Second: without the column bias of the logits.'
      ' Third: at temperatures that give, in each layer, the mean entropy of'
      ' the other model. Right: at temperatures that give that of the model as'
      ' trained, after swapping the normalizer or removing the bias. Mean of'
      ' log10; standard deviations are in the table.',
      {title: {'group': list(names)} for title, names in PANELS.items()},
      size=(13, 4.8),
      names=PANELS,
      xlabel='path depth k',
      band=False,
    ),
    curves.panels(
      'mechanism_logits',
      frames.select(summary, quantity=list(LOGITS)),
      'Logits of each model against the layer: the share of the column bias in'
      ' their variance within rows; their standard deviation within rows; and'
      ' how much removing the bias changes the weights under the own'
      ' normalizer, as total variation. Mean and standard deviation (shaded)'
      ' over examples and heads.',
      {title: {'quantity': x} for x, title in LOGITS.items()},
      size=(10, 3.6),
      ylabel='',
      sharey=False,
    ),
  ]


def headlines(summary: frames.Table) -> list[str]:
  """The residual of each stack at a few depths, as text."""
  return curves.headline(
    frames.select(summary, quantity='path, first layers'),
    'Path products, first k layers, spectral norm',
  )


if __name__ == '__main__':
  command.run('mechanism', FLAGS)
