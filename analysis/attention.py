"""What trained attention looks like, layer by layer.

  python -m analysis.attention --workdir=RUN --workdir=RUN --output=DIR

How far attention is from doubly stochastic, how spread out (entropy) and of
what rank it is, and the rank and the cosine similarity of tokens beside it.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)

# Quantity, and where its first layer is: 0 is the embedding.
QUANTITIES = {
  'row error': 1,
  'column error': 1,
  'spread of column sums': 1,
  'relative entropy': 1,
  'effective rank of attention': 1,
  'effective rank of tokens': 0,
  'cosine similarity of tokens': 0,
}
_LOGARITHMIC = ('row error', 'column error', 'spread of column sums')


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> tables.Result:
  """Statistics of attention and tokens of each run."""
  result = tables.Result([], {'attention_raw': [], 'tokens_raw': []})
  for subject in subjects:
    progress.part(f'attention of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from sinkformer_jax import encoder

  about = subject.about()
  values = {quantity: [] for quantity in QUANTITIES}
  for capture in subject.chunks(
    options['num_examples'], options['seed'], encoder.Ablation(), progress
  ):
    result.notes.extend(subject.problems(capture))
    found = _values(capture)
    for quantity, x in found.items():
      values[quantity].append(x)
    named = {k.replace(' ', '_'): v for k, v in found.items()}
    short = {k: about[k] for k in ('run', 'normalizer', 'seed', 'step')}
    short['dtype'] = capture.about['dtype']
    examples = np.array(capture.about['examples'])
    for table, first in (('attention_raw', 1), ('tokens_raw', 0)):
      own = {
        name.replace(' ', '_'): named[name.replace(' ', '_')]
        for name, start in QUANTITIES.items()
        if start == first
      }
      shape = next(iter(own.values())).shape
      layer = np.arange(first, first + shape[0])
      if first:
        result.raw[table].append(
          tables.columns(
            short,
            layer=layer[:, None, None],
            example=examples[:, None],
            head=np.arange(shape[2]),
            **own,
          )
        )
      else:
        result.raw[table].append(
          tables.columns(short, layer=layer[:, None], example=examples, **own)
        )
  for quantity, parts in values.items():
    result.summary.extend(
      tables.summary_rows(
        about
        | {
          'quantity': quantity,
          'ablation': 'skip on, FFN on',
          'dtype': 'float64',
          'examples': options['num_examples'],
        },
        tables.value_statistics(np.concatenate(parts, 1)),
        QUANTITIES[quantity],
      )
    )


def _values(capture):
  """By quantity, ``[layers, batch, heads]`` or ``[layers, batch]``."""
  from sinkformer_jax import rank

  attention, mask = capture.attention, capture.mask
  of_heads = None if mask is None else mask[:, None, :]
  row_error, column_error = rank.marginal_errors(attention, mask)
  pairs = attention
  tokens = capture.hidden
  if mask is not None:
    # Padding would count as further, zero, rows.
    valid = of_heads[..., None] & of_heads[..., None, :]
    pairs = np.where(valid, attention, 0)
    tokens = np.where(mask[..., None], tokens, 0)
  return {
    'row error': row_error,
    'column error': column_error,
    'spread of column sums': rank.column_spread(attention, mask),
    'relative entropy': rank.attention_entropy(attention, of_heads, True),
    'effective rank of attention': rank.effective_rank(
      rank.singular_values(pairs)
    ),
    'effective rank of tokens': rank.effective_rank(
      rank.singular_values(tokens)
    ),
    'cosine similarity of tokens': rank.mean_cosine_similarity(tokens, mask),
  }


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
  """Figures of a summary table."""
  return [
    curves.Plot(
      'attention',
      curves.caption(
        summary,
        'Attention and tokens of trained models against the layer. Row and'
        ' column error: largest deviation of a sum from 1, in an attention'
        ' matrix. Spread of column sums: their root mean square deviation from'
        ' 1. Entropy of attention rows, divided by that of uniform'
        ' attention. Effective rank: exp of the entropy of the normalized'
        ' singular values (Roy and Vetterli 2007). Mean over examples and'
        ' heads; shaded: standard deviation; errors without.',
      ),
      (8, 9.5),
      lambda fig: _draw(fig, summary),
    )
  ]


def _draw(fig, rows):
  names = curves.groups(rows)
  panels = fig.subplots(4, 2, sharex=True)
  panels[-1, -1].axis('off')
  for ax, quantity in zip(panels.flat, QUANTITIES, strict=False):
    points = curves.select(rows, quantity=quantity)
    if quantity in _LOGARITHMIC:
      points = [x | {'std': 0.0} for x in points]
      ax.set_yscale('log')
    if quantity == 'row error':
      # Rounding, but for a fault: its ups and downs say nothing.
      ax.set_ylim(1e-17, 1)
    curves.draw_group_curves(ax, points, names)
    ax.set_title(quantity)
  for ax in panels[-1]:
    ax.set_xlabel('layer')
  panels[0, 0].legend(fontsize=8)
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """Largest errors, and means over layers, as text."""
  lines = []
  for run in dict.fromkeys(x['run'] for x in summary):
    rows = curves.select(summary, run=run)
    texts = []
    for quantity in QUANTITIES:
      points = curves.select(rows, quantity=quantity)
      if quantity in _LOGARITHMIC:
        largest = np.fmax.reduce([x['largest'] for x in points])
        text = f'{largest:.1e} at most'
      else:
        text = f'{points[0]["mean"]:.3g} to {points[-1]["mean"]:.3g}'
      if any(x['invalid'] for x in points):
        text += ' (some are invalid and left out)'
      texts.append(f'{quantity} {text}')
    lines.append(f'{run}: {"; ".join(texts)} (first to last layer)')
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('attention', FLAGS), FLAGS)
