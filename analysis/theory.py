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


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Sweep over logit scales, and residuals of deep attention alone."""
  result = frames.Result()
  # Whoever asks for one run after the other needs these once.
  if options.get('random_weights', True):
    progress.part('theory: bounds of one layer')
    for mean in _MEANS:
      result.summary.append(_sweep(options['seed'], mean))
    progress.part('theory: law of depth, random weights')
    for num_iters in (0, _NUM_ITERS):
      result.summary.append(_random_law(options['seed'], num_iters))
  for subject in subjects:
    progress.part(f'theory: law of depth, {subject.name}')
    _run_law(subject, options, result)
  return result


def _about(quantity, group):
  return {
    'run': 'random',
    'data': 'random weights',
    'notice': '',
    'normalizer': 'softmax' if group == 'softmax' else 'sinkhorn',
    'group': group,
    'setting': None,
    'seed': None,
    'step': None,
    'weights': 'random',
    'quantity': quantity,
    'norm': 'spectral',
    'scaling': 'absolute',
    'dtype': 'float64',
  }


def _sweep(seed, mean_size):
  import pandas as pd

  from sinkformer_jax import rank

  layer = rank.theory.random_layer(seed, _TOKENS, _WIDTH, mean_size)
  rows = [
    _about('one layer', words)
    | {
      'ablation': _MEANS[mean_size],
      'logit_norm': row['logit_norm'],
      'input': row['input'],
      'column_error': row['sinkhorn_column_error']
      if column == 'sinkhorn'
      else None,
      'mean': float(np.log10(row[column])),
      'count': 1,
    }
    for row in rank.theory.scale_sweep(layer, LOGIT_NORMS, _NUM_ITERS)
    for column, words in SWEEP.items()
  ]
  return pd.DataFrame(rows)


def _random_law(seed, num_iters):
  from sinkformer_jax import rank

  params, embedding = rank.collapse.random_encoder(
    seed, _LAYERS, _TOKENS, _WIDTH
  )
  states = rank.collapse.propagate(
    params, embedding, _HEADS, num_iters, norm_position=None
  )
  name = naming.iterations(num_iters)
  group = f'sinkhorn, {name}' if num_iters else 'softmax'
  about = _about('law of depth', group) | {'ablation': 'no LayerNorm'}
  values = np.array([x.log10_residual() for x in states])
  return frames.by_depth(about, _law_statistics(values[:, None]))


def _run_law(subject, options, result):
  import jax

  from sinkformer_jax import encoder
  from sinkformer_jax import rank

  model = subject.run.config.model
  num_examples = min(options['num_examples'], MAX_EXAMPLES)
  off = encoder.Ablation(skip=False, ffn=False)
  captures = list(
    subject.captures(
      options | {'num_examples': num_examples},
      lambda *_: None,
      result.notes,
      off,
    )
  )
  examples = [x for capture in captures for x in _embeddings(capture)]
  refused = {
    f'it is made for softmax and Sinkhorn, not for {subject.normalizer}': (
      subject.normalizer not in ('softmax', 'sinkhorn')
    ),
    'it has values that are not finite': any(
      x.about['non_finite_layers'] for x in captures
    ),
    'it has an example of fewer than 2 tokens': min(map(len, examples)) < 2,
  }
  for why, applies in refused.items():
    if applies:
      result.notes.append(
        f'{subject.name} is left out of the law of depth: {why}.'
      )
      return
  params = jax.device_get(subject.run.params['encoder'])
  about = subject.about() | {
    'setting': None,
    'quantity': 'law of depth',
    'norm': 'spectral',
    'dtype': 'float64',
    'examples': num_examples,
  }
  for ffn, words in LAW_ABLATIONS.items():
    if ffn and model.deepnorm:
      result.notes.append(
        f'{subject.name} is left out of the law of depth with the FFN on: it'
        ' has DeepNorm.'
      )
    if ffn and (model.deepnorm or not model.ffn):
      continue
    states = [
      rank.collapse.propagate(
        params,
        x,
        model.num_heads,
        model.num_iters if model.normalizer == 'sinkhorn' else 0,
        model.norm_position,
        ffn,
      )
      for x in examples
    ]
    absolute, whole = (
      np.array([[getattr(y, name)() for y in x] for x in states]).T
      for name in ('log10_residual', 'log10_whole')
    )
    for scaling, values in (
      ('absolute', absolute),
      ('relative', absolute - whole),
    ):
      result.summary.append(
        frames.by_depth(
          about | {'ablation': words, 'scaling': scaling},
          _law_statistics(values),
        )
      )


def _embeddings(capture):
  """Of each example, ``[n, width]``: padded tokens are cut off."""
  tokens, mask = capture.hidden[0], capture.mask
  if mask is None:
    return list(tokens)
  return [x[valid] for x, valid in zip(tokens, mask, strict=True)]


def _law_statistics(values):
  from sinkformer_jax import rank

  exponent = rank.collapse.exponents(values.mean(1))
  return frames.value_statistics(values) | {'exponent': exponent}


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
