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

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=16)
command.define_paths(FLAGS)

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

  num_iters = sinkhorn.num_iters
  logits, bad = {}, False
  for name, subject in ((SOFTMAX, softmax), (SINKHORN, sinkhorn)):
    capture = subject.whole(options, progress, result.notes)
    bad = bad or bool(capture.about['non_finite_layers'])
    # No more of it is kept: that of long texts takes gigabytes.
    logits[name] = capture.logits
    mask, examples = capture.mask, capture.about['examples']
    del capture
  if bad:
    result.notes.append(
      f'No mechanism of {softmax.name} and {sinkhorn.name}: logits are not'
      ' finite.'
    )
    return
  about = softmax.about() | {
    'run': f'{softmax.name} and {sinkhorn.name}',
    'setting': None,
    'examples': options['num_examples'],
    'dtype': 'float64',
    'norm': 'spectral',
    'scaling': 'absolute',
  }
  paths = softmax.paths(options)
  stacks = _stacks(logits, num_iters, mask, result, about['run'])
  for done, (name, attention) in enumerate(stacks, start=1):
    marginals = runs.Marginals()
    marginals.see(attention, mask)
    _add(
      about
      | {
        'group': name,
        'quantity': 'path, first layers',
        'ablation': 'skip a choice' if options['skip'] else 'heads only',
        'paths': options['num_paths'],
        'entropy': float(rank.mechanism.mean_entropy(attention, mask).mean()),
        **marginals.columns(),
      },
      rank.path_residuals(attention, paths, mask, norms=('spectral',)),
      examples,
      result,
    )
    progress(done, _NUM_STACKS, 'stacks')
  _add_logits(about, logits, num_iters, mask, result)


def _stacks(logits, num_iters, mask, result, pair):
  """Name and attention of each experiment, one at a time."""
  from sinkformer_jax import errors
  from sinkformer_jax.rank import mechanism

  iterations = {'softmax': 0, 'sinkhorn': num_iters}
  entropies = {}
  for source, x in logits.items():
    for normalizer, count in iterations.items():
      attention = mechanism.normalize(x, count, mask)
      if source.startswith(normalizer):
        entropies[source] = mechanism.mean_entropy(attention, mask)
      yield f'{source}{normalizer}', attention
    centered = mechanism.remove_column_bias(x, mask)
    yield (
      f'{source}softmax, bias removed',
      mechanism.normalize(centered, 0, mask),
    )
    del centered
  for source, normalizer, entropy, bias in (
    (SOFTMAX, 'softmax', SINKHORN, True),
    (SINKHORN, 'sinkhorn', SOFTMAX, True),
    (SOFTMAX, 'sinkhorn', SOFTMAX, True),
    (SINKHORN, 'softmax', SINKHORN, True),
    (SOFTMAX, 'softmax', SOFTMAX, False),
    (SINKHORN, 'softmax', SINKHORN, False),
  ):
    removed = '' if bias else ', bias removed'
    name = f"{source}{normalizer}{removed}, {entropy.split()[0]}'s entropy"
    x = logits[source]
    if not bias:
      x = mechanism.remove_column_bias(x, mask)
    try:
      _, attention = mechanism.match_entropy(
        x, entropies[entropy], iterations[normalizer], mask
      )
    except errors.DataError as error:
      # One curve is missing, and is said to be; the others stand.
      result.notes.append(f'{pair}: no curve "{name}": {error}')
      continue
    yield name, attention


def _add(about, residuals, examples, result):
  from sinkformer_jax import rank

  depths, _, num_paths = residuals.invalid.shape
  result.add_raw(
    'mechanism_raw',
    frames.raw(
      {k: about[k] for k in ('run', 'seed', 'step', 'group', 'dtype')},
      example=np.array(examples)[:, None],
      path=np.arange(num_paths),
      depth=np.arange(depths)[:, None, None],
      log10_spectral=residuals.log10['spectral'],
      below_resolution=residuals.below_resolution,
      invalid=residuals.invalid,
    ),
  )
  statistics = rank.summarize(residuals, 'spectral')
  result.summary.append(frames.by_depth(about, statistics))


def _add_logits(about, logits, num_iters, mask, result):
  from sinkformer_jax.rank import mechanism

  for source, x in logits.items():
    variance = mechanism.logit_variance(x, mask)
    count = 0 if source == SOFTMAX else num_iters
    _, variation = mechanism.bias_dependence(x, count, mask)
    values = {
      'column bias': variance.fraction,
      'logit spread': np.sqrt(variance.total),
      'bias dependence': variation,
    }
    name = source.split()[0]
    own = about | {
      'group': name,
      'normalizer': name,
      'norm': '',
      'scaling': '',
    }
    result.summary += [
      frames.by_depth(
        own | {'quantity': quantity},
        frames.value_statistics(value),
        first_depth=1,
      )
      for quantity, value in values.items()
    ]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  paths = frames.select(summary, quantity='path, first layers')
  logits = frames.select(summary, quantity=list(LOGITS))
  return [
    curves.Plot(
      'mechanism_paths',
      curves.caption(
        paths,
        'Spectral norm of the residual of path products (first k layers),'
        ' absolute. Left: logits of the softmax and of the Sinkhorn model'
        ' through either normalizer. Second: without the column bias of the'
        ' logits. Third: at temperatures that give, in each layer, the mean'
        ' entropy of the other model. Right: at temperatures that give that of'
        ' the model as trained, after swapping the normalizer or removing the'
        ' bias. Mean of log10; standard deviations are in the table.',
      ),
      (13, 4.8),
      lambda fig: _draw_paths(fig, paths),
    ),
    curves.Plot(
      'mechanism_logits',
      curves.caption(
        logits,
        'Logits of each model against the layer: the share of the column bias'
        ' in their variance within rows; their standard deviation within rows;'
        ' and how much removing the bias changes the weights under the own'
        ' normalizer, as total variation. Mean and standard deviation (shaded)'
        ' over examples and heads.',
      ),
      (10, 3.6),
      lambda fig: _draw_logits(fig, logits),
    ),
  ]


def _draw_paths(fig, rows):
  panels = fig.subplots(1, len(PANELS), sharey=True)
  for ax, (title, names) in zip(panels, PANELS.items(), strict=True):
    curves.draw_groups(ax, rows, names, band=False)
    ax.set_title(title)
    ax.set_xlabel('path depth k')
    # Below, so that no curve is hidden.
    ax.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.16))
  panels[0].set_ylabel(curves.RESIDUAL)
  curves.finish(fig, rows)


def _draw_logits(fig, rows):
  titles = {title: {'quantity': x} for x, title in LOGITS.items()}
  curves.small_multiples(fig, rows, titles, ylabel='', sharey=False)


def headlines(summary: frames.Table) -> list[str]:
  """The residual of each stack at a few depths, as text."""
  return curves.headline(
    frames.select(summary, quantity='path, first layers'),
    'Path products, first k layers, spectral norm',
  )


if __name__ == '__main__':
  cli.run(lambda: command.main('mechanism', FLAGS), FLAGS)
