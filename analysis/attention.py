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
from analysis.common import frames
from analysis.common import naming
from sinkformer_jax import cli

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
) -> frames.Result:
  """Statistics of attention and tokens of each run."""
  result = frames.Result()
  for subject in subjects:
    progress.part(f'attention of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  about = subject.about()
  values = {quantity: [] for quantity in QUANTITIES}
  for capture in subject.captures(options, progress, result.notes):
    found = _values(capture)
    for quantity, x in found.items():
      values[quantity].append(x)
    keys = {k: about[k] for k in ('run', 'normalizer', 'seed', 'step')}
    _add_raw(keys | {'dtype': capture.about['dtype']}, found, capture, result)
  about |= {
    'ablation': naming.ABLATIONS[True, True],
    'dtype': 'float64',
    'examples': options['num_examples'],
  }
  result.summary += [
    frames.by_depth(
      about | {'quantity': quantity},
      frames.value_statistics(np.concatenate(parts, 1)),
      QUANTITIES[quantity],
    )
    for quantity, parts in values.items()
    if parts
  ]


def _add_raw(about, found, capture, result):
  """A row for each head, and for tokens one for each example."""
  examples = np.array(capture.about['examples'])
  for table, first in (('attention_raw', 1), ('tokens_raw', 0)):
    own = {
      name.replace(' ', '_'): found[name]
      for name, start in QUANTITIES.items()
      if start == first and name in found
    }
    if not own:
      continue
    shape = next(iter(own.values())).shape
    layers = np.arange(first, first + shape[0])
    axes = {'layer': layers[:, None], 'example': examples}
    if first:
      axes = {
        'layer': layers[:, None, None],
        'example': examples[:, None],
        'head': np.arange(shape[2]),
      }
    result.add_raw(table, frames.raw(about, **axes, **own))


def _values(capture):
  """By quantity, ``[layers, batch, heads]`` or ``[layers, batch]``."""
  from sinkformer_jax import rank

  attention, mask = capture.attention, capture.mask
  of_heads = None if mask is None else mask[:, None, :]
  row_error, column_error = rank.marginal_errors(attention, mask)
  # Padding would count as further, zero, rows.
  if mask is not None:
    valid = of_heads[..., None] & of_heads[..., None, :]
    found = rank.singular_values(np.where(valid, attention, 0))
  else:
    found = rank.singular_values(attention)
  values = {
    'row error': row_error,
    'column error': column_error,
    'spread of column sums': rank.column_spread(attention, mask),
    'relative entropy': rank.attention_entropy(attention, of_heads, True),
    'effective rank of attention': rank.effective_rank(found),
  }
  tokens = capture.hidden
  if tokens is None:
    return values
  if mask is not None:
    tokens = np.where(mask[..., None], tokens, 0)
  return values | {
    'effective rank of tokens': rank.effective_rank(
      rank.singular_values(tokens)
    ),
    'cosine similarity of tokens': rank.mean_cosine_similarity(tokens, mask),
  }


def plots(summary: frames.Table) -> list[curves.Plot]:
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

  def panel(ax, part):
    is_logarithmic = part['quantity'].isin(_LOGARITHMIC).any()
    curves.draw_groups(ax, part, names, band=not is_logarithmic)
    if is_logarithmic:
      ax.set_yscale('log')
    if (part['quantity'] == 'row error').any():
      # Rounding, but for a fault: its ups and downs say nothing.
      ax.set_ylim(1e-17, 1)

  curves.small_multiples(
    fig,
    rows,
    {x: {'quantity': x} for x in QUANTITIES if x in set(rows['quantity'])},
    wrap=2,
    panel=panel,
    ylabel='',
    sharey=False,
  )


def headlines(summary: frames.Table) -> list[str]:
  """Largest errors, and means over layers, as text."""
  lines = []
  for run, rows in summary.groupby('run', sort=False):
    texts = []
    for quantity in QUANTITIES:
      points = frames.select(rows, quantity=quantity)
      if points.empty:
        continue
      if quantity in _LOGARITHMIC:
        text = f'{points["largest"].max():.1e} at most'
      else:
        first, last = points['mean'].iloc[[0, -1]]
        text = f'{first:.3g} to {last:.3g}'
      if points['invalid'].any():
        text += ' (some are invalid and left out)'
      texts.append(f'{quantity} {text}')
    lines.append(f'{run}: {"; ".join(texts)} (first to last layer)')
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('attention', FLAGS), FLAGS)
