"""Residual of tokens, layer by layer (quantity B).

  python -m analysis.layer_outputs --workdir=RUN --workdir=RUN --output=DIR

The residual of the hidden states and of what attention gives, after each layer,
layer 0 being the embedding. Trained models are read with attention skip and FFN
on and off (Lapenna et al. 2026; Dong et al. 2021), and so is step 0 of the same
runs: what training has not changed is no effect of it.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import figures
from analysis.common import naming
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)

QUANTITIES = {
  'hidden': 'hidden states',
  'attention_output': 'results of the attention sublayer',
}


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> tables.Result:
  """Residuals at every layer of each run, trained and at step 0."""
  result = tables.Result([], {'layer_outputs_raw': []})
  for subject in subjects:
    states = [subject]
    if subject.run.step:
      states.append(subject.at_step(0))
    for state in states:
      for switches in naming.ABLATIONS:
        progress.part(
          f'layer outputs of {state.name}, step {state.run.step},'
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
  marginals = []
  for capture in subject.chunks(
    options['num_examples'],
    options['seed'],
    encoder.Ablation(*switches),
    progress,
  ):
    result.notes.extend(subject.problems(capture))
    marginals.append(rank.marginal_errors(capture.attention, capture.mask))
    for quantity, x in tokens(capture).items():
      residuals = rank.residual_norms(x, capture.mask)
      parts[quantity].append(residuals)
      examples = capture.about['examples']
      result.raw['layer_outputs_raw'].append(
        _raw(about | {'quantity': quantity}, examples, residuals)
      )
  row_error, column_error = (
    float(np.max(np.concatenate(x, 1))) for x in zip(*marginals, strict=True)
  )
  for quantity, chunks in parts.items():
    rows = about | {
      'quantity': quantity,
      'examples': options['num_examples'],
      'row_error': row_error,
      'column_error': column_error,
    }
    result.summary.extend(runs.residual_rows(rows, runs.concatenate(chunks)))


def tokens(capture) -> dict[str, np.ndarray]:
  """What residuals are of, by quantity, ``[layers + 1, batch, n, width]``.

  Layer 0 of both is the embedding.
  """
  outputs = [capture.hidden[:1], capture.attention_output]
  return {
    'hidden': capture.hidden,
    'attention_output': np.concatenate(outputs),
  }


def _raw(about, examples, residuals):
  names = ('run', 'normalizer', 'seed', 'step', 'ablation', 'quantity')
  return tables.columns(
    {k: about[k] for k in names} | {'dtype': residuals.dtype},
    example=np.array(examples),
    depth=np.arange(len(residuals.invalid))[:, None],
    **{f'log10_{k}': v for k, v in residuals.log10.items()},
    **{f'log10_whole_{k}': v for k, v in residuals.log10_whole.items()},
    below_resolution=residuals.below_resolution,
    invalid=residuals.invalid,
  )


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  scalings = {
    'relative': 'divided by the norm of what it is the residual of',
    'initial': 'divided by that of the embedding (layer 0)',
  }
  result = []
  for quantity, words in QUANTITIES.items():
    for scaling, meaning in scalings.items():
      rows = curves.select(
        summary, quantity=quantity, norm='spectral', scaling=scaling
      )
      result.append(
        curves.Plot(
          f'layer_outputs_{quantity}_{scaling}',
          curves.caption(
            rows,
            f'Spectral norm of the residual of {words}, {meaning}, against the'
            ' layer, of trained models and of step 0 of the same runs, read'
            ' with attention skip and FFN on and off.',
            curves.LEGEND,
          ),
          (8, 6),
          lambda fig, rows=rows, what=f'{words}, {scaling}': _draw(
            fig, rows, what
          ),
        )
      )
  rows = curves.select(summary, norm='spectral', scaling='relative')
  if tables.differences(rows):
    result.append(
      curves.Plot(
        'layer_outputs_differences',
        curves.caption(
          rows,
          'Difference of the relative spectral residual of trained models,'
          ' log10, against the layer.',
          curves.DIFFERENCE,
          curves.describe_pairs(tables.differences(rows)),
          'Open markers: values were left out in a run of the pair.',
        ),
        (8, 4),
        lambda fig: _draw_differences(fig, rows),
      )
    )
  return result


def _draw(fig, rows, what):
  names = curves.groups(rows)
  panels = fig.subplots(2, 2, sharex=True)
  for ax, ablation in zip(panels.flat, naming.ABLATIONS.values(), strict=True):
    number = 0
    for weights in ('trained', 'step 0'):
      for group in names:
        points = curves.select(
          rows, ablation=ablation, group=group, weights=weights
        )
        if points:
          style = figures.curve(number)
          curves.draw(ax, points, style, f'{group}, {weights}')
        number += 1
    ax.set_title(ablation)
  fig.supylabel(f'log10 of the residual of {what}', fontsize='medium')
  for ax in panels[-1]:
    ax.set_xlabel('layer')
  curves.legend_above(fig, panels[0, 0])
  curves.finish(fig, rows)


def _draw_differences(fig, rows):
  differences = curves.select(tables.differences(rows), weights='trained')
  names = curves.groups(rows)
  panels = fig.subplots(1, 2, sharey=True)
  for ax, (quantity, words) in zip(panels, QUANTITIES.items(), strict=True):
    number = 0
    for group in names:
      for ablation in naming.ABLATIONS.values():
        found = curves.select(
          differences, group=group, ablation=ablation, quantity=quantity
        )
        if found:
          label = ablation if len(names) == 2 else f'{group}, {ablation}'
          curves.draw_difference(ax, found, figures.curve(number), label)
          number += 1
    ax.set_title(words)
    ax.set_xlabel('layer')
  panels[0].set_ylabel('difference from softmax, log10')
  panels[0].legend(fontsize=7)
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """Relative residuals at a few layers, as text."""
  lines = []
  for quantity, words in QUANTITIES.items():
    for ablation in naming.ABLATIONS.values():
      rows = curves.select(
        summary,
        quantity=quantity,
        ablation=ablation,
        norm='spectral',
        scaling='relative',
      )
      for weights in dict.fromkeys(x['weights'] for x in rows):
        lines += curves.headline(
          curves.select(rows, weights=weights),
          f'{words}, {ablation}, {weights}, relative spectral residual',
        )
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('layer_outputs', FLAGS), FLAGS)
