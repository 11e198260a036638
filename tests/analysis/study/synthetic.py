"""Summary tables of made-up pairs, with effects that are known."""

import numpy as np
import pandas as pd

from analysis import iterations
from analysis import layer_outputs
from analysis import matched_control
from analysis import mechanism
from analysis import step_time
from analysis import theory
from analysis.common import naming
from analysis.study import evidence
from analysis.study import measure
from sinkformer_jax import rank

DEPTHS = (4, 12, 24)


def row(analysis, normalizer, seed, mean, depth=None, **more):
  return {
    'run': f'{normalizer}/seed{seed}',
    'analysis': analysis,
    'tag': 't',
    'setting': 't',
    'data': 'made up',
    'notice': '',
    'dtype': 'float64',
    'normalizer': normalizer,
    'group': normalizer,
    'seed': seed,
    'step': 859 if more.get('at', measure.LAST) == measure.LAST else 0,
    'at': measure.LAST,
    'stack': '',
    'depth': depth,
    'mean': float(mean),
    'log10_of_mean': float(mean) + 0.1,
    'log10_of_rms': float(mean) + 0.2,
    'std': 0.1,
    'largest': float(mean),
    'count': 100,
    'below_resolution': 0,
    'invalid': 0,
    **more,
  }


class Tables:
  """Rows of pairs.

  Args:
    num_pairs: with seeds from 0.
    gap: what Sinkhorn is above softmax, in every decay.
    noise: standard deviation over pairs.
  """

  def __init__(self, num_pairs=5, gap=0.0, noise=0.05, rng_seed=0):
    self.rng = np.random.default_rng(rng_seed)
    self.num_pairs, self.gap, self.noise = num_pairs, gap, noise

  def evidence(self, num_layers=24):
    return evidence.Evidence(self.table(), num_layers)

  def table(self):
    return pd.DataFrame(self.rows())

  def rows(self):
    for seed in range(self.num_pairs):
      for normalizer in ('softmax', 'sinkhorn'):
        yield from self.of_run(normalizer, seed)
      yield from self.of_pair(seed)

  def draw(self, mean):
    return mean + self.noise * self.rng.standard_normal()

  def own(self, normalizer):
    return self.gap if normalizer == 'sinkhorn' else 0.0

  def of_run(self, normalizer, seed):
    gap = self.own(normalizer)

    def make(analysis, mean, **more):
      name = more.pop('normalizer', normalizer)
      return row(analysis, name, seed, self.draw(mean), **more)

    for depth in range(1, max(DEPTHS) + 1):
      for ffn, ablation in theory.LAW_ABLATIONS.items():
        for scaling in ('absolute', 'relative'):
          yield make(
            'theory',
            -(3.0 ** (depth - ffn)),
            quantity='law of depth',
            ablation=ablation,
            norm='spectral',
            scaling=scaling,
            depth=depth,
            exponent=self.draw(3),
          )
    for depth in DEPTHS:
      for norm in rank.NORMS:
        for scaling in rank.SCALINGS:
          common = {'norm': norm, 'scaling': scaling, 'depth': depth}
          for ablation in ('heads only', 'skip a choice'):
            for layers in ('first', 'drawn'):
              for at in (measure.LAST, 0):
                for what in ('path', 'exact RMS'):
                  yield make(
                    'path_products',
                    gap - 0.4 * depth,
                    quantity=f'{what}, {layers} layers',
                    ablation=ablation,
                    at=at,
                    **common,
                  )
          for ablation in naming.ABLATIONS.values():
            for quantity in layer_outputs.QUANTITIES:
              for at in (measure.LAST, 0):
                yield make(
                  'layer_outputs',
                  gap - (5 if 'skip off' in ablation else 0),
                  quantity=quantity,
                  ablation=ablation,
                  at=at,
                  **common,
                )
          if normalizer == 'sinkhorn' and norm == 'spectral':
            for stack in iterations.PATHS:
              for ablation in ('heads only', 'skip a choice'):
                yield make(
                  'iterations',
                  # Rows that are not closed have a floor.
                  gap - (0.4 * depth if stack[1] else 1),
                  quantity='path, first layers',
                  ablation=ablation,
                  stack=naming.iterations(*stack),
                  row_error_of_stack=0.1,
                  **common,
                )
          for words, mean in ((matched_control.OWN, 1), ('unit spread', -1)):
            yield make(
              'matched_control',
              mean - 0.4 * depth,
              quantity=f'random path, {words}',
              ablation='no identities',
              **common,
            )
      for at, spread in ((0, 0.1), (100, 3.0), (measure.LAST, 1.0)):
        yield row(
          'attention',
          normalizer,
          seed,
          10 ** self.draw(np.log10(spread)),
          quantity='spread of column sums',
          ablation='skip on, FFN on',
          at=at,
          depth=depth,
        )
      for count in iterations.COUNTS if normalizer == 'sinkhorn' else ():
        yield row(
          'iterations',
          normalizer,
          seed,
          1 / count,
          quantity='column error',
          ablation='skip on, FFN on',
          stack=naming.iterations(count),
          depth=depth,
        )
      for quantity in ('attention', 'attention after LayerNorm'):
        for name in ('softmax', 'sinkhorn'):
          for ablation in (
            'own normalizer',
            f'weights of the {normalizer} run',
          ):
            if name == normalizer or ablation != 'own normalizer':
              yield make(
                'lipschitz',
                # The normalizer does all of it, whatever the weights.
                -self.own(name),
                normalizer=name,
                trained=normalizer,
                quantity=quantity,
                ablation=ablation,
                norm='spectral',
                scaling='absolute',
                depth=depth,
              )
    for quantity, value in (
      ('test accuracy', 0.97 + gap / 100),
      ('validation accuracy', 0.97),
      ('test loss', 0.1),
    ):
      yield row(
        'training',
        normalizer,
        seed,
        value + 1e-4 * self.rng.standard_normal(),
        quantity=quantity,
      )

  def of_pair(self, seed):
    seconds = {'softmax': 1.0, 'sinkhorn': 10 ** self.draw(0.3)}
    for normalizer, value in seconds.items():
      yield row('step_time', normalizer, seed, value, quantity='seconds a step')
    ratio = seconds['sinkhorn'] / seconds['softmax']
    quantity = step_time.RATIO
    yield row('step_time', 'sinkhorn', seed, ratio, quantity=quantity)
    soft, sink = mechanism.SOFTMAX, mechanism.SINKHORN
    # The normalizer does all of it, but at matched entropy nothing is left of
    # the whole; on the same logits the column bias makes up for the rest.
    means = {
      f'{soft}softmax': 0,
      f'{sink}softmax': 0,
      f'{soft}sinkhorn': self.gap,
      f'{sink}sinkhorn': self.gap,
      f'{soft}softmax, bias removed': 0,
      f"{sink}sinkhorn, softmax's entropy": 0,
      f"{soft}softmax, sinkhorn's entropy": self.gap,
      f'{sink}softmax, bias removed': 0,
      f"{sink}softmax, sinkhorn's entropy": self.gap,
      f"{sink}softmax, bias removed, sinkhorn's entropy": self.gap,
      f"{soft}sinkhorn, softmax's entropy": 0,
      f"{soft}softmax, bias removed, softmax's entropy": self.gap,
    }
    for depth in DEPTHS:
      for stack, mean in means.items():
        yield row(
          'mechanism',
          'softmax',
          seed,
          self.draw(mean),
          depth,
          quantity='path, first layers',
          ablation='heads only',
          norm='spectral',
          scaling='absolute',
          stack=stack,
          group=stack,
          entropy=3.4 if stack.endswith('sinkhorn') else 2.4,
        )
