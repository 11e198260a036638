"""Residual of tokens, layer by layer (quantity B).

  python -m analysis.layer_outputs --workdir=RUN --workdir=RUN --output=DIR

The residual of the hidden states and of what attention gives, after each layer,
layer 0 being the embedding. Trained models are read with attention skip and FFN
on and off (Lapenna et al. 2026; Dong et al. 2021), and so is step 0 of the same
runs: what training has not changed is no effect of it.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from analysis.common import naming

FLAGS = command.create_flags()
# What has to be known of what is analysed.
NEEDS = ('hidden',)
QUANTITIES = {
  'hidden': 'hidden states',
  'attention_output': 'results of the attention sublayer',
}
_SCALINGS = {
  'relative': 'divided by the norm of what it is the residual of',
  'initial': 'divided by that of the embedding (layer 0)',
}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Residuals at every layer of each run, trained and at step 0."""
  result = frames.Result()
  for subject in subjects:
    for state in subject.states():
      for switches in state.ablations():
        progress.part(
          f'layer outputs of {state.name}, step {state.about()["step"]},'
          f' {naming.ABLATIONS[switches]}'
        )
        _measure_state(state, switches, options, progress, result)
  return result


def _measure_state(subject, switches, options, progress, result):
  # Imported late: see `command`.
  from analysis.common import runs
  from sinkformer_jax import encoder

  captures = subject.captures(
    options, progress, result.notes, encoder.Ablation(*switches)
  )
  values, examples = runs.collect(
    captures,
    lambda x: residuals(x) | runs.marginal_errors(x.attention, x.mask),
  )
  errors = runs.largest_errors(values)
  keys = ('run', 'normalizer', 'seed', 'step', 'ablation', 'quantity')
  # A file of other software may lack one.
  for quantity in [x for x in QUANTITIES if x in values]:
    found = values[quantity]
    about = subject.about() | {
      'ablation': naming.ABLATIONS[switches],
      'quantity': quantity,
      'examples': len(examples),
    }
    raw = runs.raw_residuals(
      {k: about[k] for k in keys},
      found,
      example=examples,
      depth=np.arange(len(found.invalid))[:, None],
    )
    result.add_raw('layer_outputs_raw', raw)
    result.summary.append(runs.residual_table(about | errors, found))


def residuals(capture, **settings: Any) -> dict:
  """Those of tokens at every layer, by quantity, ``[layers + 1, batch]``.

  Args:
    capture: of a run, or of other software.
    **settings: of `rank.residual_norms`.
  """
  from sinkformer_jax import rank

  tokens = {'hidden': capture.hidden}
  if capture.attention_output is not None:
    # Layer 0 of both is the embedding.
    outputs = [capture.hidden[:1], capture.attention_output]
    tokens['attention_output'] = np.concatenate(outputs)
  return {
    quantity: rank.residual_norms(x, capture.mask, **settings)
    for quantity, x in tokens.items()
  }


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  spectral = frames.select(summary, norm='spectral')
  spectral = spectral.assign(
    curve=spectral['group'] + ', ' + spectral['weights']
  )
  result = []
  for (quantity, words), (scaling, meaning) in itertools.product(
    QUANTITIES.items(), _SCALINGS.items()
  ):
    rows = frames.select(spectral, quantity=quantity, scaling=scaling)
    if rows.empty:
      continue
    plot = curves.panels(
      f'layer_outputs_{quantity}_{scaling}',
      rows,
      f'Spectral norm of the residual of {words}, {meaning}, against the'
      ' layer, of trained models and of step 0 of the same runs, read with'
      ' attention skip and FFN on and off.',
      {x: {'ablation': x} for x in naming.ABLATIONS.values()},
      size=(8, 6),
      more=(curves.LEGEND,),
      wrap=2,
      by='curve',
      # Trained models first, then step 0, each in the order of the groups.
      names=[
        f'{group}, {weights}'
        for weights in ('trained', 'step 0')
        for group in curves.groups(rows)
      ],
      ylabel=f'log10 of the residual,\n{scaling}',
      sharey=False,
    )
    result.append(plot)
  rows = frames.select(spectral, scaling='relative', weights='trained')
  pairs = frames.differences(rows)
  if len(pairs):
    result.append(_differences(rows, pairs))
  return result


def _differences(rows, pairs):
  others = curves.groups(pairs)

  def curve(table):
    if len(others) == 1:
      return table['ablation']
    return table['group'] + ', ' + table['ablation']

  names = list(curve(pairs).unique())

  def panel(ax, part):
    found = frames.differences(part)
    found = found.assign(curve=curve(found))
    curves.draw_group_differences(ax, found, names, 'curve')

  return curves.panels(
    'layer_outputs_differences',
    rows,
    'Difference of the relative spectral residual of trained models, log10,'
    ' against the layer.',
    {words: {'quantity': x} for x, words in QUANTITIES.items()},
    more=(
      curves.DIFFERENCE,
      curves.describe_pairs(pairs),
      'Open markers: values were left out in a run of the pair.',
    ),
    panel=panel,
    ylabel='difference from softmax, log10',
  )


def headlines(summary: frames.Table) -> list[str]:
  """Relative residuals at a few layers, as text."""
  rows = frames.select(summary, norm='spectral', scaling='relative')
  rows = rows.assign(words=rows['quantity'].map(QUANTITIES))
  return curves.headlines(
    rows,
    ('words', 'ablation', 'weights'),
    '{}, {}, {}, relative spectral residual',
  )


if __name__ == '__main__':
  command.run('layer_outputs', FLAGS)
