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

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)

# What has to be known of what is analysed.
NEEDS = ('hidden',)
QUANTITIES = {
  'hidden': 'hidden states',
  'attention_output': 'results of the attention sublayer',
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
  from sinkformer_jax import rank

  about = subject.about() | {'ablation': naming.ABLATIONS[switches]}
  parts = {quantity: [] for quantity in QUANTITIES}
  marginals = runs.Marginals()
  for capture in subject.captures(
    options, progress, result.notes, encoder.Ablation(*switches)
  ):
    marginals.see(capture.attention, capture.mask)
    for quantity, x in tokens(capture).items():
      residuals = rank.residual_norms(x, capture.mask)
      parts[quantity].append(residuals)
      examples = capture.about['examples']
      raw = _raw(about | {'quantity': quantity}, examples, residuals)
      result.add_raw('layer_outputs_raw', raw)
  for quantity, chunks in parts.items():
    if not chunks:
      continue  # A file of other software may lack it.
    rows = about | {
      'quantity': quantity,
      'examples': options['num_examples'],
      **marginals.columns(),
    }
    result.summary.append(runs.residual_table(rows, rank.concatenate(chunks)))


def tokens(capture) -> dict[str, np.ndarray]:
  """What residuals are of, by quantity, ``[layers + 1, batch, n, width]``.

  Layer 0 of both is the embedding.
  """
  found = {'hidden': capture.hidden}
  if capture.attention_output is not None:
    outputs = [capture.hidden[:1], capture.attention_output]
    found['attention_output'] = np.concatenate(outputs)
  return found


def _raw(about, examples, residuals):
  from analysis.common import runs

  keys = ('run', 'normalizer', 'seed', 'step', 'ablation', 'quantity')
  return runs.raw_residuals(
    {k: about[k] for k in keys},
    residuals,
    example=np.array(examples),
    depth=np.arange(len(residuals.invalid))[:, None],
  )


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  scalings = {
    'relative': 'divided by the norm of what it is the residual of',
    'initial': 'divided by that of the embedding (layer 0)',
  }
  result = []
  for quantity, words in QUANTITIES.items():
    for scaling, meaning in scalings.items():
      rows = frames.select(
        summary, quantity=quantity, norm='spectral', scaling=scaling
      )
      caption = curves.caption(
        rows,
        f'Spectral norm of the residual of {words}, {meaning}, against the'
        ' layer, of trained models and of step 0 of the same runs, read with'
        ' attention skip and FFN on and off.',
        curves.LEGEND,
      )
      what = f'log10 of the residual of {words}, {scaling}'
      result.append(
        curves.Plot(
          f'layer_outputs_{quantity}_{scaling}',
          caption,
          (8, 6),
          lambda fig, rows=rows, what=what: _draw(fig, rows, what),
        )
      )
  rows = frames.select(summary, norm='spectral', scaling='relative')
  differences = frames.differences(rows)
  if len(differences):
    result.append(
      curves.Plot(
        'layer_outputs_differences',
        curves.caption(
          rows,
          'Difference of the relative spectral residual of trained models,'
          ' log10, against the layer.',
          curves.DIFFERENCE,
          curves.describe_pairs(differences),
          'Open markers: values were left out in a run of the pair.',
        ),
        (8, 4),
        lambda fig: _draw_differences(fig, rows, differences),
      )
    )
  return result


def _draw(fig, rows, what):
  # Trained models first, then step 0, each in the order of the groups.
  names = [
    f'{group}, {weights}'
    for weights in ('trained', 'step 0')
    for group in curves.groups(rows)
  ]
  rows = rows.assign(curve=rows['group'] + ', ' + rows['weights'])
  curves.small_multiples(
    fig,
    rows,
    {x: {'ablation': x} for x in naming.ABLATIONS.values()},
    wrap=2,
    panel=lambda ax, part: curves.draw_groups(ax, part, names, by='curve'),
    sharey=False,
  )
  # Said once, for all panels.
  for ax in fig.axes:
    ax.set_ylabel('')
  fig.supylabel(what, fontsize='medium')


def _draw_differences(fig, rows, differences):
  differences = frames.select(differences, weights='trained')
  groups = [x for x in curves.groups(rows) if x in set(differences['group'])]
  panels = fig.subplots(1, 2, sharey=True)
  for ax, (quantity, words) in zip(panels, QUANTITIES.items(), strict=True):
    choices = itertools.product(groups, naming.ABLATIONS.values())
    for number, (group, ablation) in enumerate(choices):
      found = frames.select(
        differences, group=group, ablation=ablation, quantity=quantity
      )
      label = ablation if len(groups) == 1 else f'{group}, {ablation}'
      curves.draw_difference(ax, found, figures.curve(number), label)
    ax.set_title(words)
    ax.set_xlabel('layer')
  panels[0].set_ylabel('difference from softmax, log10')
  panels[0].legend(fontsize=7)
  curves.finish(fig, rows)


def headlines(summary: frames.Table) -> list[str]:
  """Relative residuals at a few layers, as text."""
  rows = frames.select(summary, norm='spectral', scaling='relative')
  lines = []
  for quantity, words in QUANTITIES.items():
    for ablation in naming.ABLATIONS.values():
      own = frames.select(rows, quantity=quantity, ablation=ablation)
      for weights, part in own.groupby('weights', sort=False):
        title = f'{words}, {ablation}, {weights}, relative spectral residual'
        lines += curves.headline(part, title)
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('layer_outputs', FLAGS), FLAGS)
