"""Theory beside measurement: bounds of one layer, and the law of depth.

  python -m analysis.theory --output=DIR [--workdir=RUN ...]

One layer of random weights: the residual it gives, softmax and Sinkhorn, beside
first-order formulas and bounds, for logits from tiny to large, without and with
a mean token. Many layers without skip connections around attention: the
exponent of the residual grows as 3^L (Dong et al. 2021; Lapenna et al. 2026),
followed far below what float64 tokens could show, on random weights and on the
encoders of runs, these with the FFN off and on.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from analysis.common import naming

FLAGS = command.create_flags(4, runs='optional')
# What has to be known of what is analysed.
NEEDS = ('model',)
LOGIT_NORMS = tuple(10 ** (x / 4) for x in range(-8, 13))
_TOKENS, _WIDTH, _HEADS, _LAYERS = 64, 32, 4, 8
_NUM_ITERS = 50
# Examples of a run: more change nothing that can be seen.
MAX_EXAMPLES = 16
_MINUS, _RATIO = '-log10 of the residual', 'ratio of successive changes'
_MEANS = {0.0: 'no mean token', 1.0: 'with a mean token'}
LAW_ABLATIONS = {False: 'skip off, FFN off', True: 'skip off, FFN on'}
# Column of the sweep, and what it is called.
SWEEP = {
  'softmax': 'softmax',
  'sinkhorn': f'sinkhorn, {naming.iterations(_NUM_ITERS)}',
  'bound_softmax': 'first-order bound, softmax',
  'bound_sinkhorn': 'first-order bound, sinkhorn',
  'bound_global': 'bound for any logits',
  'bound_paper': 'bound of Lapenna et al., lambda 1',
}


# What all rows have in common.
_COMMON = {'norm': 'spectral', 'scaling': 'absolute', 'dtype': 'float64'}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Sweep over logit scales, and residuals of deep attention alone."""
  result = frames.Result()
  # Whoever asks for one run after the other needs these once.
  if options.get('random_weights', True):
    progress.part('theory: bounds of one layer')
    result.summary += [_sweep(options['seed'], x) for x in _MEANS]
    progress.part('theory: law of depth, random weights')
    result.summary += [_random_law(options['seed'], x) for x in (0, _NUM_ITERS)]
  for subject in subjects:
    progress.part(f'theory: law of depth, {subject.name}')
    _run_law(subject, options, result)
  return result


def _about(quantity, group):
  normalizer = 'softmax' if group == 'softmax' else 'sinkhorn'
  about = frames.about_random('random weights', normalizer, group)
  return about | _COMMON | {'weights': 'random', 'quantity': quantity}


def _sweep(seed, mean_size):
  import pandas as pd

  from sinkformer_jax.rank import theory

  layer = theory.random_layer(seed, _TOKENS, _WIDTH, mean_size)
  sweep = pd.DataFrame(theory.scale_sweep(layer, LOGIT_NORMS, _NUM_ITERS))
  errors = sweep['sinkhorn_column_error']
  parts = [
    sweep[['logit_norm', 'input']].assign(
      **_about('one layer', words),
      ablation=_MEANS[mean_size],
      column_error=errors if column == 'sinkhorn' else np.nan,
      mean=np.log10(sweep[column]),
      count=1,
    )
    for column, words in SWEEP.items()
  ]
  return frames.concat(parts)


def _random_law(seed, num_iters):
  from sinkformer_jax.rank import collapse

  params, embedding = collapse.random_encoder(seed, _LAYERS, _TOKENS, _WIDTH)
  values, _ = collapse.residuals_by_layer(
    params, [embedding], _HEADS, num_iters, norm_position=None
  )
  name = naming.iterations(num_iters)
  about = _about(
    'law of depth', f'sinkhorn, {name}' if num_iters else 'softmax'
  )
  return _law(about | {'ablation': 'no LayerNorm'}, values)


def _law(about, log10):
  from sinkformer_jax.rank import collapse

  exponent = collapse.exponents(log10.mean(1))
  statistics = frames.value_statistics(log10) | {'exponent': exponent}
  return frames.by_depth(about, statistics)


def _run_law(subject, options, result):
  import jax

  from sinkformer_jax import encoder
  from sinkformer_jax.rank import collapse

  model = subject.run.config.model
  num_examples = min(options['num_examples'], MAX_EXAMPLES)
  captures = list(
    subject.captures(
      options | {'num_examples': num_examples},
      lambda *_: None,
      result.notes,
      encoder.Ablation(skip=False, ffn=False),
    )
  )
  embeddings = [x for capture in captures for x in _embeddings(capture)]

  def left_out(why, where='the law of depth'):
    result.notes.append(f'{subject.name} is left out of {where}: {why}.')

  why = _why_not(subject, captures, embeddings)
  if why:
    left_out(why)
    return
  about = subject.about() | _COMMON
  about |= {'setting': None, 'examples': num_examples}
  for ffn, words in LAW_ABLATIONS.items():
    if ffn and model.deepnorm:
      left_out('it has DeepNorm', 'the law of depth with the FFN on')
    if ffn and (model.deepnorm or not model.ffn):
      continue
    absolute, whole = collapse.residuals_by_layer(
      jax.device_get(subject.run.params['encoder']),
      embeddings,
      model.num_heads,
      model.num_iters if model.normalizer == 'sinkhorn' else 0,
      model.norm_position,
      ffn,
    )
    about |= {'quantity': 'law of depth', 'ablation': words}
    scaled = {'absolute': absolute, 'relative': absolute - whole}
    result.summary += [
      _law(about | {'scaling': x}, log10) for x, log10 in scaled.items()
    ]


def _why_not(subject, captures, embeddings):
  """What keeps a run from being followed; '' if nothing does."""
  if subject.normalizer not in ('softmax', 'sinkhorn'):
    made_for = 'it is made for softmax and Sinkhorn, not for'
    return f'{made_for} {subject.normalizer}'
  if any(x.about['non_finite_layers'] for x in captures):
    return 'it has values that are not finite'
  if min(map(len, embeddings)) < 2:
    return 'it has an example of fewer than 2 tokens'
  return ''


def _embeddings(capture):
  """Of each example, ``[n, width]``: padded tokens are cut off."""
  tokens, mask = capture.hidden[0], capture.mask
  if mask is None:
    return list(tokens)
  return [x[valid] for x, valid in zip(tokens, mask, strict=True)]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  sweep = frames.select(summary, quantity='one layer')
  law = frames.select(summary, quantity='law of depth', scaling='absolute')
  runs = ''
  if (law['weights'] != 'random').any():
    runs = ' and of runs (with LayerNorm, FFN off and on)'
  return [
    curves.panels(
      'theory_bounds',
      sweep,
      'Spectral norm of the residual of one attention layer of random weights'
      f' ({_TOKENS} tokens, width {_WIDTH}, one head) against the spectral norm'
      ' of the logits, beside bounds. Tokens are scaled. The first-order bounds'
      ' hold for small logits alone; that of Lapenna et al. is shown for'
      ' lambda = 1, with beta as the product of the weight norms, which is our'
      ' reading.',
      {x: {'ablation': x} for x in _MEANS.values()},
      size=(8, 4.5),
      panel=_draw_bounds,
      xlabel='spectral norm of the logits',
      ylabel='log10 of the residual, or of its bound',
    ),
    curves.panels(
      'theory_law',
      _law_lines(law),
      'Attention without skip connections, of random weights'
      f' ({_HEADS} heads, no FFN, no LayerNorm)'
      f'{runs}. Left: minus log10 of the'
      ' residual against the layer, where it is positive; right: ratio of its'
      ' change in a layer to that in the layer before. The law of depth says 3'
      ' (dotted).',
      {x: {'panel': x} for x in (_MINUS, _RATIO)},
      size=(8, 4.5),
      by='curve',
      ylabel='',
      sharey=False,
      logarithmic=(_MINUS,),
      bars=False,
      band=False,
      touch=_touch_law,
    ),
  ]


def _draw_bounds(ax, rows):
  names = list(SWEEP.values())
  curves.draw_lines(ax, rows, names, 'logit_norm', 'run', markevery=4)
  ax.set_xscale('log')


def _law_lines(law):
  """What the two panels show, the column `mean`."""
  import pandas as pd

  law = law.assign(
    curve=law[['group', 'weights', 'ablation']].agg(', '.join, 1)
  )
  means = law.groupby(['curve', 'depth'])['mean'].transform('mean')
  # Of one run: those of all lie on each other.
  first = law['run'] == law.groupby('curve')['run'].transform('first')
  ratios = law[first & np.isfinite(law['exponent'])]
  return pd.concat(
    [
      law[means < 0].assign(mean=-law['mean'], panel=_MINUS),
      ratios.assign(mean=ratios['exponent'], panel=_RATIO),
    ]
  )


def _touch_law(panels):
  panels[0, 1].axhline(3, color='#888888', linestyle=':')
  panels[0, 1].set_ylim(0, 6)


def headlines(summary: frames.Table) -> list[str]:
  """Where the bounds lie, and the last exponents, as text."""
  lines = []
  small = min(LOGIT_NORMS, key=lambda x: abs(np.log10(x) + 0.5))
  sweep = frames.select(summary, quantity='one layer', logit_norm=small)
  for words, rows in sweep.groupby('ablation', sort=False):
    texts = [
      f'{group} {mean:.3f}'
      for group, mean in zip(rows['group'], rows['mean'], strict=True)
    ]
    lines.append(
      f'One layer, {words}, logits of norm {small:.3g}, log10 of the residual:'
      f' {", ".join(texts)}'
    )
  law = frames.select(summary, quantity='law of depth', scaling='absolute')
  for curve, rows in law.groupby(['run', 'group', 'ablation'], sort=False):
    last = rows.iloc[-1]
    lines.append(
      f'No skip, {", ".join(curve)}: log10 of the residual'
      f' {last["mean"]:.6g} after {last["depth"]:.0f} layers, last exponent'
      f' {last["exponent"]:.6f}'
    )
  return lines


if __name__ == '__main__':
  command.run('theory', FLAGS)
