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
from analysis.common import tables
from launch import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS, num_examples=8)

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
) -> tables.Result:
  """Jacobian norms of each run, with its own and the other normalizer."""
  result = tables.Result([], {'lipschitz_raw': []})
  options = options | {
    'num_examples': min(options['num_examples'], MAX_EXAMPLES)
  }
  for subject in subjects:
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from sinkformer_jax import encoder

  progress.part(f'Lipschitz constants of {subject.name}')
  (capture,) = subject.chunks(
    options['num_examples'], options['seed'], encoder.Ablation(), _silent
  )
  result.notes.extend(subject.problems(capture))
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


def _silent(done, total):
  """The capture takes a second."""
  del done, total


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
  result.raw['lipschitz_raw'].append(
    tables.columns(
      {k: about[k] for k in ('run', 'normalizer', 'seed', 'step', 'quantity')},
      layer=np.arange(1, len(value) + 1)[:, None],
      example=np.array(examples),
      jacobian_norm=value,
      eigen_residual=residual,
      converged=converged,
    )
  )
  statistics = tables.value_statistics(
    np.log10(np.where(converged & (value > 0), value, np.nan))
  )
  comparisons = [(weights_of(subject.normalizer), name)]
  if name == subject.normalizer:
    comparisons.append((OWN, subject.group))
  for ablation, group in comparisons:
    result.summary.extend(
      tables.summary_rows(
        about
        | {
          'group': group,
          'ablation': ablation,
          'norm': 'spectral',
          'scaling': 'absolute',
        },
        statistics,
        first_depth=1,
      )
    )


def plots(summary: Sequence[tables.Row]) -> list[curves.Plot]:
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
  comparisons = list(dict.fromkeys(x['ablation'] for x in rows))
  comparisons.sort(key=lambda x: x != OWN)
  quantities = list(dict.fromkeys(x['quantity'] for x in rows))
  panels = fig.subplots(
    len(quantities),
    len(comparisons),
    sharex=True,
    sharey='row',
    squeeze=False,
  )
  for line, quantity in zip(panels, quantities, strict=True):
    for ax, comparison in zip(line, comparisons, strict=True):
      points = curves.select(rows, quantity=quantity, ablation=comparison)
      curves.draw_group_curves(ax, points, curves.groups(points))
      if ax in panels[0]:
        ax.set_title(comparison)
        ax.legend(fontsize=8)
      if ax in panels[-1]:
        ax.set_xlabel('layer')
    line[0].set_ylabel(f'log10, {quantity}')
  curves.finish(fig, rows)


def headlines(summary: Sequence[tables.Row]) -> list[str]:
  """Constants at a few layers, as text."""
  lines = []
  for ablation in dict.fromkeys(x['ablation'] for x in summary):
    lines += curves.headline(
      curves.select(summary, quantity=ALONE, ablation=ablation),
      f'Lipschitz constant of attention, {ablation}',
      depths=(1, 4, 12),
    )
  return lines


if __name__ == '__main__':
  cli.run(lambda: command.main('lipschitz', FLAGS), FLAGS)
