"""Local Lipschitz constant of each attention layer, softmax beside Sinkhorn.

  python -m analysis.lipschitz --workdir=RUN --workdir=RUN --output=DIR

How much the result of a layer's attention can change with its input: the
spectral norm of its Jacobian at the tokens that the run itself brings to the
layer. Also with the other normalizer in the same layer, at the same tokens and
weights, so that it alone differs.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from analysis.common import command
from analysis.common import curves
from analysis.common import frames

FLAGS = command.create_flags(8)
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
    progress.part(f'Lipschitz constants of {subject.name}')
    _measure_run(subject, options, progress, result)
  return result


def _measure_run(subject, options, progress, result):
  # Imported late: see `command`.
  from sinkformer_jax.rank import lipschitz

  # The capture takes a second: its progress is not shown.
  (capture,) = subject.captures(options, lambda *_: None, result.notes)
  damaged = capture.about['non_finite_layers']
  model = subject.run.config.model
  names = dict.fromkeys((subject.normalizer, 'softmax', 'sinkhorn'))
  # With LayerNorm behind the skip, attention has its input as it is.
  quantities = (ALONE, AFTER_NORM)[: 1 + (model.norm_position == 'pre')]
  total = len(names) * len(quantities) * model.num_layers
  count = itertools.count(1)
  for name, quantity in itertools.product(names, quantities):
    found = lipschitz.encoder_lipschitz(
      subject.run.params['encoder'],
      capture.hidden,
      model.num_heads,
      lipschitz.differentiable(name, model.num_iters),
      capture.mask,
      norm_position=model.norm_position,
      with_norm=quantity == AFTER_NORM,
      num_finite=min([model.num_layers + 1, *damaged]) - 1,
      tolerance=TOLERANCE,
      progress=lambda: progress(next(count), total, 'layers'),
    )
    if not found.converged.all():
      result.notes.append(
        f'{subject.name}, {name}, {quantity}: {(~found.converged).sum()} of'
        f' {found.converged.size} Lipschitz constants did not converge (or have'
        ' no finite input) and are left out.'
      )
    examples = np.array(capture.about['examples'])
    about = subject.about() | {'normalizer': name, 'quantity': quantity}
    _add(about, subject, examples, found, result)


def _add(about, subject, examples, found, result):
  keys = ('run', 'normalizer', 'seed', 'step', 'quantity')
  raw = frames.raw(
    {k: about[k] for k in keys},
    layer=np.arange(1, len(found.value) + 1)[:, None],
    example=examples,
    jacobian_norm=found.value,
    eigen_residual=found.eigen_residual,
    converged=found.converged,
  )
  result.add_raw('lipschitz_raw', raw)
  usable = found.converged & (found.value > 0)
  statistics = frames.value_statistics(
    np.log10(np.where(usable, found.value, np.nan))
  )
  about |= {
    'examples': len(examples),
    'dtype': 'float64',
    'norm': 'spectral',
    'scaling': 'absolute',
  }
  comparisons = {weights_of(subject.normalizer): about['normalizer']}
  if about['normalizer'] == subject.normalizer:
    comparisons[OWN] = subject.group
  result.summary += [
    frames.by_depth(about | {'group': y, 'ablation': x}, statistics, 1)
    for x, y in comparisons.items()
  ]


def plots(summary: frames.Table) -> list[curves.Plot]:
  """Figures of a summary table."""
  comparisons = sorted(summary['ablation'].unique(), key=lambda x: x != OWN)
  return [
    curves.panels(
      'lipschitz',
      summary,
      'Local Lipschitz constant (spectral norm of the Jacobian) of attention,'
      ' all heads together, at the tokens of the run, against the layer, as'
      ' log10. Left: each run with its own normalizer. Others: both normalizers'
      ' in the same layers, at the same weights and tokens. Upper row:'
      ' attention alone; lower row: with the LayerNorm in front, whose slope'
      ' falls as tokens grow.',
      {x: {'ablation': x} for x in comparisons},
      {f'log10, {x}': {'quantity': x} for x in summary['quantity'].unique()},
      size=(10, 6),
      more=(
        'Curves: mean over examples and seeds; shaded: standard deviation over'
        ' examples.',
      ),
      names={
        x: curves.groups(frames.select(summary, ablation=x))
        for x in comparisons
      },
    )
  ]


def headlines(summary: frames.Table) -> list[str]:
  """Constants at a few layers, as text."""
  return curves.headlines(
    frames.select(summary, quantity=ALONE),
    ('ablation',),
    'Lipschitz constant of attention, {}',
    depths=(1, 4, 12),
  )


if __name__ == '__main__':
  command.run('lipschitz', FLAGS)
