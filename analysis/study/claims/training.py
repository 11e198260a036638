"""Claims k to m: column sums along training, accuracy, and cost."""

import math

import numpy as np

from analysis import step_time
from analysis.common import frames
from analysis.common.statistics import of_pairs
from analysis.study import measure
from analysis.study import plan
from analysis.study.claims import decay
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import OF_LENGTH
from analysis.study.claims.claim import OF_RUNS
from analysis.study.claims.claim import SINKFORMERS
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES
from analysis.study.evidence import Values

# A step that takes this much longer does not cost "little more".
COST_FACTOR = 1.1


def grows_doubly_stochastic(evidence: Evidence) -> Tests:
  """k: column sums of softmax attention along training."""
  steps = _steps(evidence)
  if len(steps) < 2:
    return []
  return [
    of_pairs(
      f'spread of column sums at step {start} over that at the end',
      depth,
      _column_spread(evidence, start, depth)
      - _column_spread(evidence, measure.LAST, depth),
    )
    for start in dict.fromkeys([steps[0], steps[1]])
    if start != measure.LAST
    for depth in evidence.depths
  ]


def _steps(evidence):
  found = frames.select(evidence.table, analysis='attention')
  found = found['at'].unique() if len(found) else ()
  return sorted(found, key=lambda x: math.inf if x == measure.LAST else x)


def _column_spread(evidence, at, depth):
  return np.log10(
    evidence.values(
      plan.SOFTMAX,
      analysis='attention',
      quantity='spread of column sums',
      ablation=decay.FULL,
      at=at,
      depth=depth,
    )
  )


def _column_details(evidence):
  """The spread at every kept step."""
  texts = []
  for at in _steps(evidence):
    spreads = [
      10 ** _column_spread(evidence, at, depth).mean()
      for depth in evidence.depths
    ]
    step = 'the last step' if at == measure.LAST else f'step {at}'
    texts.append(f'{", ".join(f"{x:.2g}" for x in spreads)} at {step}')
  where = ', '.join(map(str, evidence.depths))
  return [
    f'Spread of column sums about 1 in layers {where} (geometric mean over'
    f' runs): {"; ".join(texts)}.'
  ]


def recorded(evidence: Evidence, normalizer: str, quantity: str) -> Values:
  """What the trainings themselves recorded, by seed."""
  return evidence.values(normalizer, analysis='training', quantity=quantity)


def accuracy(evidence: Evidence) -> Tests:
  """l: test accuracy."""
  sinkhorn, softmax = (
    recorded(evidence, x, 'test accuracy')
    for x in (plan.SINKHORN, plan.SOFTMAX)
  )
  return [of_pairs('test accuracy', None, 100 * (sinkhorn - softmax))]


def _accuracy_details(evidence):
  """Accuracy and loss themselves."""
  return [
    f'{name}: test accuracy'
    f' {100 * recorded(evidence, x, "test accuracy").mean():.2f} %, test loss'
    f' {recorded(evidence, x, "test loss").mean():.4f}.'
    for x, name in NAMES.items()
  ]


def cost(evidence: Evidence) -> Tests:
  """m: time of a training step, in turn."""
  values = np.log10(COST_FACTOR / _ratios(evidence))
  return [of_pairs('a step, Sinkhorn over softmax', None, values)]


def _ratios(evidence):
  return evidence.values(
    plan.SINKHORN, analysis='step_time', quantity=step_time.RATIO
  )


def _cost_details(evidence):
  """Seconds themselves."""
  seconds = ', '.join(
    f'{name} {found.mean():.2f} s'
    for x, name in NAMES.items()
    for found in [
      evidence.values(x, analysis='step_time', quantity=step_time.SECONDS)
    ]
  )
  listed = ', '.join(f'{x:.2f}' for x in _ratios(evidence))
  epochs = ', '.join(
    f'{name} {_minutes(recorded(evidence, x, "seconds an epoch").mean())}'
    for x, name in NAMES.items()
  )
  return [
    f'A step with trained weights, the two runs in turn: {seconds};'
    f' Sinkhorn over softmax {listed}, pair by pair. From fresh weights, whose'
    ' logits are small, it costs less: `python -m analysis.cost`.',
    f'An epoch of training examples, as they were trained: {epochs}. Whatever'
    ' else the machine did counts, so that these say nothing of the ratio.',
  ]


def _minutes(seconds):
  """As the Sinkformers write it: 3m25s."""
  if math.isnan(seconds):
    return 'no number'
  minutes, rest = divmod(round(seconds), 60)
  return f'{minutes}m{rest:02d}s'


CLAIMS = (
  Claim(
    letter='k',
    statement='Softmax attention grows more doubly stochastic during training.',
    source='Sander et al. 2022, histograms of column sums',
    definition='log10 of the spread of column sums about 1 (root mean square)'
    ' in a layer, at step 0 and at the first kept step after it, minus that at'
    ' the end.',
    studies=(*OF_LENGTH, *SINKFORMERS),
    analyses=('attention',),
    tests=grows_doubly_stochastic,
    details=_column_details,
  ),
  Claim(
    letter='l',
    statement='Sinkhorn raises the accuracy.',
    source='Sander et al. 2022: 79.0 % to 79.5 % on Cats and Dogs',
    definition='Sinkhorn minus softmax, test accuracy.',
    studies=OF_RUNS,
    tests=accuracy,
    details=_accuracy_details,
    unit='percentage points',
  ),
  Claim(
    letter='m',
    statement='A training step costs little more.',
    source='Sander et al. 2022: 3m25s for 3m20s an epoch, with 1 iteration',
    definition='The whole training step with the weights of the trained runs,'
    ' the two of a pair in turn on the same batches: it takes less than'
    f' {COST_FACTOR:g} times as long. log10 of {COST_FACTOR:g} over the ratio.',
    studies=(*OF_LENGTH, *SINKFORMERS),
    analyses=('step_time',),
    tests=cost,
    details=_cost_details,
    unit='',
    ratio=COST_FACTOR,
  ),
)
