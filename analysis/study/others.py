"""Tests of all but decay: claims g to m and o. See `claims`."""

import math

import numpy as np

from analysis import iterations
from analysis import lipschitz as lipschitz_lib
from analysis import matched_control
from analysis import step_time
from analysis import theory
from analysis.common import curves
from analysis.common import naming
from analysis.common import statistics
from analysis.common.statistics import of_pairs
from analysis.study import decay
from analysis.study import evidence as evidence_lib
from analysis.study import measure
from analysis.study import plan
from analysis.study.evidence import Evidence
from analysis.study.evidence import minus
from analysis.study.evidence import NAMES
from analysis.study.evidence import over_seeds
from analysis.study.evidence import Values

Tests = list[statistics.Test]

# Of the test on random matrices: a share of what softmax decays by.
CONTROL_MARGIN = 0.1
# Of the test on 50 iterations, in log10 of the residual.
ITERATIONS_MARGIN = 0.05
# A step that takes this much longer does not cost "little more".
COST_FACTOR = 1.1


def control(evidence: Evidence) -> Tests:
  """g: unrelated random matrices."""
  rows = curves.select(
    evidence.rows,
    analysis='random_control',
    norm='spectral',
    scaling='absolute',
  )
  tests = []
  for ablation in dict.fromkeys(x['ablation'] for x in rows):
    for scale in dict.fromkeys(x['scale'] for x in rows):
      for depth in evidence.depths:
        softmax, sinkhorn = (
          curves.select(
            rows,
            ablation=ablation,
            scale=scale,
            normalizer=normalizer,
            depth=depth,
          )[0]
          for normalizer in NAMES
        )
        tests.append(
          statistics.Test(
            f'logit scale {scale:g}, {ablation}',
            depth,
            statistics.welch(sinkhorn, softmax),
            margin=CONTROL_MARGIN * abs(softmax['mean']),
          )
        )
  return tests


def control_details(evidence: Evidence) -> list[str]:
  """What softmax decays by, and where it does not."""
  rows = curves.select(
    evidence.rows,
    analysis='random_control',
    norm='spectral',
    scaling='absolute',
    normalizer=plan.SOFTMAX,
  )
  lines = []
  for ablation in dict.fromkeys(x['ablation'] for x in rows):
    for scale in dict.fromkeys(x['scale'] for x in rows):
      own = curves.select(rows, ablation=ablation, scale=scale)
      means = {x['depth']: x['mean'] for x in own}
      texts = [f'{means[x]:+.3g} at {x}' for x in evidence.depths]
      lines.append(
        f'Softmax, logit scale {scale:g}, {ablation}: log10 of the residual'
        f' {", ".join(texts)}.'
      )
      if any(means[x] >= 0 for x in evidence.depths):
        lines[-1] += (
          ' Above 0 nothing has decayed, and the margin of the test means'
          ' little.'
        )
  return lines


def random_decays_slower(evidence: Evidence) -> Tests:
  """h: random against trained."""
  tests = []
  for words in (matched_control.OWN, matched_control.UNIT):
    for normalizer, name in NAMES.items():
      for depth in evidence.depths:
        random = evidence.values(
          normalizer,
          analysis='matched_control',
          quantity=f'random path, {words}',
          ablation='no identities',
          norm='spectral',
          scaling='absolute',
          depth=depth,
        )
        trained = evidence.values(normalizer, **decay.PATHS, depth=depth)
        label = f'{name}, random logits of {words}'
        tests.append(of_pairs(label, depth, minus(random, trained)))
  return tests


def iterations_suffice(evidence: Evidence) -> Tests:
  """i: 50 iterations against 1000."""
  tests = []
  for depth in evidence.depths:
    few, many = (
      evidence.values(
        plan.SINKHORN,
        **decay.PATHS
        | {
          'analysis': 'iterations',
          'stack': naming.iterations(count),
          'depth': depth,
        },
      )
      for count in (50, 1000)
    )
    tests.append(
      of_pairs(
        'path products of 50 and of 1000 iterations',
        depth,
        minus(few, many),
        ITERATIONS_MARGIN,
      )
    )
  return tests


def iterations_details(evidence: Evidence) -> list[str]:
  """How far off columns are, and the logits that make them so."""
  rows = [x for x in evidence.rows if x['seed'] in evidence.seeds]
  errors = curves.select(
    rows, analysis='iterations', quantity='column error', at=measure.LAST
  )
  texts = []
  for count in iterations.COUNTS:
    own = curves.select(errors, stack=naming.iterations(count))
    if own:
      largest = max(x['largest'] for x in own)
      worst = max(x['mean'] for x in own)
      texts.append(f'{count}: {worst:.1e} ({largest:.1e})')
  lines = [
    'Column error of the trained logits by iterations, mean of the worst layer'
    f' (largest of all): {", ".join(texts)}.'
  ]
  for normalizer, name in NAMES.items():
    spread = curves.select(
      rows,
      analysis='matched_control',
      quantity='logit spread',
      normalizer=normalizer,
    )
    if spread:
      means = [x['mean'] for x in spread]
      lines.append(
        f'Logit spread reached by {name} in training: {min(means):.2f} to'
        f' {max(means):.2f} in a layer, {np.mean(means):.2f} on average.'
      )
  return lines


def bounds_hold(evidence: Evidence) -> Tests:
  """j: bounds of one layer of random weights."""
  tests = []
  for bound in _BOUNDS:
    for normalizer, name in NAMES.items():
      slack = _slack(evidence, normalizer, bound)
      # Nothing is random here: a bound holds if it does everywhere.
      least = statistics.Sample(min(slack), 0.0, len(slack) - 1, len(slack))
      tests.append(statistics.Test(f'{name}, {bound}', None, least))
  return tests


def bounds_details(evidence: Evidence) -> list[str]:
  """How loose each bound is."""
  lines = []
  for bound in _BOUNDS:
    slack = [y for x in NAMES for y in _slack(evidence, x, bound)]
    lines.append(
      f'{bound[0].upper()}{bound[1:]}: 10^{min(slack):.2f} to'
      f' 10^{max(slack):.2f} times what is measured, median'
      f' 10^{np.median(slack):.2f}.'
    )
  return lines


# Bounds that are stated for small logits are asked there alone.
_BOUNDS = (
  'first-order bound',
  'bound for any logits',
  'bound of Lapenna et al.',
)
SMALL = 0.1


def _slack(evidence, normalizer, bound):
  """log10 of a bound over what it bounds, at each norm of the logits.

  Tokens without and with a mean token.
  """
  sweep = curves.select(evidence.rows, quantity='one layer')
  limit = math.inf if bound == 'bound for any logits' else SMALL
  measured, bounding = (
    next(x for x in theory.SWEEP.values() if is_it(x))
    for is_it in (
      lambda x: x.startswith(normalizer),
      lambda x: (
        x.startswith(bound) and ('first' not in bound or x.endswith(normalizer))
      ),
    )
  )
  below, above = (
    {
      (x['ablation'], x['logit_norm']): x['mean']
      for x in curves.select(sweep, group=group)
      if x['logit_norm'] <= limit
    }
    for group in (measured, bounding)
  )
  return [above[x] - below[x] for x in below]


def grows_doubly_stochastic(evidence: Evidence) -> Tests:
  """k: column sums of softmax attention along training."""
  steps = _steps(evidence)
  if len(steps) < 2:
    return []
  starts = dict.fromkeys([steps[0], steps[1]])
  return [
    of_pairs(
      f'spread of column sums at step {start} over that at the end',
      depth,
      minus(_column_spread(evidence, start, depth), last),
    )
    for start in starts
    if start != measure.LAST
    for depth in evidence.depths
    for last in [_column_spread(evidence, measure.LAST, depth)]
  ]


def _steps(evidence):
  found = {x['at'] for x in evidence.rows if x['analysis'] == 'attention'}
  return sorted(found, key=lambda x: math.inf if x == measure.LAST else x)


def _column_spread(evidence, at, depth):
  values = evidence.values(
    plan.SOFTMAX,
    analysis='attention',
    quantity='spread of column sums',
    ablation=decay.FULL,
    at=at,
    depth=depth,
  )
  return {k: math.log10(v) for k, v in values.items()}


def column_details(evidence: Evidence) -> list[str]:
  """The spread at every kept step."""
  texts = []
  for at in _steps(evidence):
    spreads = [
      10 ** over_seeds(_column_spread(evidence, at, depth))
      for depth in evidence.depths
    ]
    step = 'the last step' if at == measure.LAST else f'step {at}'
    texts.append(f'{", ".join(f"{x:.2g}" for x in spreads)} at {step}')
  where = ', '.join(map(str, evidence.depths))
  return [
    f'Spread of column sums about 1 in layers {where} (geometric mean over'
    f' runs): {"; ".join(texts)}.'
  ]


def accuracy(evidence: Evidence) -> Tests:
  """l: test accuracy."""
  difference = evidence.difference(
    analysis='training', quantity='test accuracy'
  )
  values = {k: 100 * v for k, v in difference.items()}
  return [of_pairs('test accuracy', None, values)]


def accuracy_details(evidence: Evidence) -> list[str]:
  """Accuracy and loss themselves."""
  lines = []
  for normalizer, name in NAMES.items():
    share, loss = (
      over_seeds(trained(evidence, normalizer, x))
      for x in ('test accuracy', 'test loss')
    )
    lines.append(
      f'{name}: test accuracy {100 * share:.2f} %, test loss {loss:.4f}.'
    )
  return lines


def cost(evidence: Evidence) -> Tests:
  """m: time of a training step, in turn."""
  values = {
    seed: math.log10(COST_FACTOR) - math.log10(ratio)
    for seed, ratio in _ratios(evidence).items()
  }
  return [of_pairs('a step, Sinkhorn over softmax', None, values)]


def _ratios(evidence):
  return evidence.values(
    plan.SINKHORN, analysis='step_time', quantity=step_time.RATIO
  )


def cost_number(sample: statistics.Sample) -> str:
  """The ratio itself, and its interval."""
  factor, half = COST_FACTOR / 10**sample.mean, 10**sample.half_width
  if math.isnan(half):
    return f'{factor:.2f}'
  return f'{factor:.2f} ({factor / half:.2f} to {factor * half:.2f})'


def trained(evidence: Evidence, normalizer: str, quantity: str) -> Values:
  """What the trainings themselves recorded, by seed."""
  return evidence.values(normalizer, analysis='training', quantity=quantity)


def cost_details(evidence: Evidence) -> list[str]:
  """Seconds themselves."""
  texts = []
  for normalizer, name in NAMES.items():
    seconds = evidence.values(
      normalizer, analysis='step_time', quantity=step_time.SECONDS
    )
    texts.append(f'{name} {over_seeds(seconds):.2f} s')
  listed = ', '.join(f'{x:.2f}' for x in _ratios(evidence).values())
  epochs = ', '.join(
    f'{name} {_minutes(over_seeds(trained(evidence, x, "seconds an epoch")))}'
    for x, name in NAMES.items()
  )
  return [
    f'A step with trained weights, the two runs in turn: {", ".join(texts)};'
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


def lipschitz(evidence: Evidence) -> Tests:
  """o: local Lipschitz constants."""
  tests = []
  for quantity in (lipschitz_lib.ALONE, lipschitz_lib.AFTER_NORM):
    for words, comparisons in (
      ('each run its own', (lipschitz_lib.OWN,)),
      ('the same weights', tuple(map(lipschitz_lib.weights_of, NAMES))),
    ):
      for depth in evidence.depths:
        softmax, sinkhorn = (
          evidence_lib.mean(
            *(
              evidence.values(
                normalizer,
                analysis='lipschitz',
                quantity=quantity,
                ablation=comparison,
                norm='spectral',
                scaling='absolute',
                depth=depth,
              )
              for comparison in comparisons
            )
          )
          for normalizer in NAMES
        )
        label = f'{quantity}, {words}'
        tests.append(of_pairs(label, depth, minus(softmax, sinkhorn)))
  return tests
