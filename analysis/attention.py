"""What trained attention looks like, layer by layer.

  python -m analysis.attention --workdir=RUN --workdir=RUN --output=DIR

How far attention is from doubly stochastic, how spread out (entropy) and of
what rank it is, and the rank and the cosine similarity of tokens beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from analysis.common import naming

FLAGS = command.create_flags()
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
  # Imported late: see `command`.
  from analysis.common import runs

  result = frames.Result()
  for subject in subjects:
    progress.part(f'attention of {subject.name}')
    dtypes = set()

    def measured(capture, dtypes=dtypes):
      dtypes.add(capture.about['dtype'])
      return _values(capture)

    values, examples = runs.collect(
      subject.captures(options, progress, result.notes), measured
    )
    about = subject.about()
    keys = {k: about[k] for k in ('run', 'normalizer', 'seed', 'step')}
    _add_raw(keys | {'dtype': min(dtypes)}, values, examples, result)
    about |= {
      'ablation': naming.ABLATIONS[True, True],
      'dtype': 'float64',
      'examples': len(examples),
    }
    result.summary += [
      frames.by_depth(
        about | {'quantity': quantity},
        frames.value_statistics(x),
        QUANTITIES[quantity],
      )
      for quantity, x in values.items()
    ]
  return result


def _add_raw(about, values, examples, result):
  """A row for each head, and for tokens one for each example."""
  for table, first in (('attention_raw', 1), ('tokens_raw', 0)):
    own = {k: x for k, x in values.items() if QUANTITIES[k] == first}
    if not own:
      continue
    shape = next(iter(own.values())).shape
    # Heads are the last axis, if there are any.
    numbers = [np.arange(first, first + shape[0]), examples]
    numbers += [np.arange(x) for x in shape[2:]]
    names = ('layer', 'example', 'head')[: len(shape)]
    axes = dict(zip(names, np.ix_(*numbers), strict=True))
    columns = {k.replace(' ', '_'): x for k, x in own.items()}
    result.add_raw(table, frames.raw(about, **axes, **columns))


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
  is_error = summary['quantity'].isin(_LOGARITHMIC)
  found = [x for x in QUANTITIES if x in set(summary['quantity'])]

  def touch(panels):
    # Rounding, but for a fault: its ups and downs say nothing.
    panels.flat[found.index('row error')].set_ylim(1e-17, 1)

  return [
    curves.panels(
      'attention',
      summary.assign(std=summary['std'].where(~is_error, 0.0)),
      'Attention and tokens of trained models against the layer. Row and column'
      ' error: largest deviation of a sum from 1, in an attention matrix.'
      ' Spread of column sums: their root mean square deviation from 1. Entropy'
      ' of attention rows, divided by that of uniform attention. Effective'
      ' rank: exp of the entropy of the normalized singular values (Roy and'
      ' Vetterli 2007). Mean over examples and heads; shaded: standard'
      ' deviation; errors without.',
      {x: {'quantity': x} for x in found},
      size=(8, 9.5),
      wrap=2,
      ylabel='',
      sharey=False,
      logarithmic=_LOGARITHMIC,
      touch=touch,
    )
  ]


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
  command.run('attention', FLAGS)
