"""Local Lipschitz constant of each attention layer, softmax beside Sinkhorn.

  python -m analysis.lipschitz --workdir=RUN --workdir=RUN --output=DIR

How much the result of a layer's attention can change with its input: the
spectral norm of its Jacobian at the tokens that the run itself brings to the
layer. Also with the other normalizer in the same layer, at the same tokens and
weights, so that it alone differs.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any

from absl import flags
import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=8)

# What has to be known of what is analysed.
NEEDS = ('model',)
# A power iteration for each example and layer: no more than this.
MAX_EXAMPLES = 8
# Of the eigen-residual; some singular value lies within half of it, and that
# is 0.002 in log10.
TOLERANCE = 0.01

ALONE, AFTER_NORM = 'attention', 'attention after LayerNorm'
OWN = 'own normalizer'


def weights_of(normalizer: str) -> str:
  """Name of the comparison on the weights of one run."""
  return f'weights of the {normalizer} run'


def measure(
  subjects: Sequence, options: dict[str, Any], progress: command.Progress
) -> frames.Result:
  """Jacobian norms of each run, with its own and the other normalizer."""
  result = frames.Result()
  options = options | {
    'num_examples': min(options['num_examples'], MAX_EXAMPLES)
  }
  for subject in subjects:
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  progress.part(f'Lipschitz constants of {subject.name}')
  # The capture takes a second: its progress is not shown.
  (capture,) = subject.captures(options, lambda *_: None, result.notes)
  model = subject.run.config.model
  names = dict.fromkeys((subject.normalizer, 'softmax', 'sinkhorn'))
  quantities = _quantities(model)
  total = len(names) * len(quantities) * model.num_layers
  count = itertools.count(1)
  for name in names:
    for quantity in quantities:
      value, residual, converged = _layers(
        subject,
        capture,
        _normalizer(name, model.num_iters),
        quantity == AFTER_NORM,
        lambda: progress(next(count), total, 'layers'),
      )
      if not converged.all():
        result.notes.append(
          f'{subject.name}, {name}, {quantity}: {(~converged).sum()} of'
          f' {converged.size} Lipschitz constants did not converge (or have no'
          ' finite input) and are left out.'
        )
      _add(
        subject,
        name,
        {'quantity': quantity, 'examples': options['num_examples']},
        capture.about['examples'],
        (value, residual, converged),
        result,
      )


def _quantities(model):
  """With LayerNorm behind the skip, attention has its input as it is."""
  return (ALONE, AFTER_NORM) if model.norm_position == 'pre' else (ALONE,)


@functools.cache
def _normalizer(name, num_iters):
  """One object for each, so that each is compiled once."""
  from sinkformer_jax import normalizers
  from sinkformer_jax import sinkhorn

  if name != 'sinkhorn':
    return normalizers.NORMALIZERS[name](num_iters)
  # The fast form has no derivatives in forward mode.
  return lambda logits, mask: sinkhorn.sinkhorn_reference(
    logits, num_iters, mask
  )


def _layers(subject, capture, normalizer, after_norm, done):
  """Value, eigen-residual and convergence, each ``[layers, batch]``."""
  import jax

  from sinkformer_jax import rank

  model = subject.run.config.model
  blocks = jax.device_get(subject.run.params['encoder']['blocks'])
  damaged = capture.about['non_finite_layers']
  found = []
  for layer in range(model.num_layers):
    if any(x <= layer + 1 for x in damaged):
      shape = (len(capture.about['examples']),)
      found.append((*np.full((2, *shape), np.nan), np.zeros(shape, bool)))
      continue
    params = jax.tree.map(lambda x, layer=layer: x[layer], blocks)
    tokens, norm = capture.hidden[layer], params['attention_norm']
    if model.norm_position == 'pre' and not after_norm:
      tokens, norm = rank.lipschitz.layer_norm(tokens, norm), None
    elif not after_norm:
      norm = None
    x = rank.lipschitz.attention_lipschitz(
      params['attention'],
      tokens,
      model.num_heads,
      normalizer,
      capture.mask,
      norm,
      TOLERANCE,
    )
    found.append((x.value, x.eigen_residual, x.converged))
    done()
  return tuple(np.stack(x) for x in zip(*found, strict=True))


def _add(subject, name, more, examples, values, result):
  value, residual, converged = values
  about = subject.about() | {'normalizer': name, 'dtype': 'float64'} | more
  result.add_raw(
    'lipschitz_raw',
    frames.raw(
      {k: about[k] for k in ('run', 'normalizer', 'seed', 'step', 'quantity')},
      layer=np.arange(1, len(value) + 1)[:, None],
      example=np.array(examples),
      jacobian_norm=value,
      eigen_residual=residual,
      converged=converged,
    ),
  )
  statistics = frames.value_statistics(
    np.log10(np.where(converged & (value > 0), value, np.nan))
  )
  comparisons = [(weights_of(subject.normalizer), name)]
  if name == subject.normalizer:
    comparisons.append((OWN, subject.group))
  about |= {'norm': 'spectral', 'scaling': 'absolute'}
  result.summary += [
    frames.by_depth(
      about | {'group': group, 'ablation': ablation},
      statistics,
      first_depth=1,
    )
    for ablation, group in comparisons
  ]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  return [
    curves.Plot(
      'lipschitz',
      curves.caption(
        summary,
        'Local Lipschitz constant (spectral norm of the Jacobian) of attention,'
        ' all heads together, at the tokens of the run, against the layer, as'
        ' log10. Left: each run with its own normalizer. Others: both'
        ' normalizers in the same layers, at the same weights and tokens. Upper'
        ' row: attention alone; lower row: with the LayerNorm in front, whose'
        ' slope falls as tokens grow.',
        'Curves: mean over examples and seeds; shaded: standard deviation over'
        ' examples.',
      ),
      (10, 6),
      lambda fig: _draw(fig, summary),
    )
  ]


def _draw(fig, rows):
  # Groups are named after the normalizer alone where both are compared.
  comparisons = sorted(rows['ablation'].unique(), key=lambda x: x != OWN)
  panels = curves.small_multiples(
    fig,
    rows,
    {x: {'ablation': x} for x in comparisons},
    {x: {'quantity': x} for x in rows['quantity'].unique()},
    panel=curves.draw_groups,
    ylabel='log10',
  )
  fig.legends[0].remove()
  for ax in panels[0]:
    ax.legend(fontsize=8)


def headlines(summary: frames.Table) -> list[str]:
  """Constants at a few layers, as text."""
  own = frames.select(summary, quantity=ALONE)
  lines = []
  for ablation, rows in own.groupby('ablation', sort=False):
    title = f'Lipschitz constant of attention, {ablation}'
    lines += curves.headline(rows, title, depths=(1, 4, 12))
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('lipschitz', FLAGS), FLAGS)
