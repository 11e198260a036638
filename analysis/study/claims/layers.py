"""Claims j and o: bounds of one layer, and local Lipschitz constants."""

import math

import numpy as np

from analysis import lipschitz as lipschitz_lib
from analysis import theory
from analysis.common import frames
from analysis.common import statistics
from analysis.common.statistics import of_pairs
from analysis.study import evidence as evidence_lib
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES

# Bounds that are stated for small logits are asked there alone.
_BOUNDS = (
  'first-order bound',
  'bound for any logits',
  'bound of Lapenna et al.',
)
SMALL = 0.1


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


def _bounds_details(evidence):
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


def _slack(evidence, normalizer, bound):
  """log10 of a bound over what it bounds, at each norm of the logits.

  Tokens without and with a mean token.
  """
  limit = math.inf if bound == 'bound for any logits' else SMALL
  sweep = frames.select(evidence.table, quantity='one layer')
  sweep = sweep[sweep['logit_norm'] <= limit]
  of_normalizer = 'first' in bound
  measured = next(x for x in theory.SWEEP.values() if x.startswith(normalizer))
  bounding = next(
    x
    for x in theory.SWEEP.values()
    if x.startswith(bound) and (not of_normalizer or x.endswith(normalizer))
  )
  below, above = (
    frames.select(sweep, group=x).set_index(['ablation', 'logit_norm'])['mean']
    for x in (measured, bounding)
  )
  return (above - below).tolist()


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
        tests.append(of_pairs(label, depth, softmax - sinkhorn))
  return tests


CLAIMS = (
  Claim(
    letter='j',
    statement='The bounds hold.',
    source='Lapenna et al. 2026, theorem; Nair 2025, constant of softmax;'
    ' first-order bounds derived here',
    definition='log10 of the bound over the residual of one layer of random'
    f' weights, the least over {len(theory.LOGIT_NORMS)} logit norms (up to'
    f' {SMALL:g} for bounds that are stated for small logits).',
    studies=('theory',),
    analyses=('theory',),
    tests=bounds_hold,
    details=_bounds_details,
  ),
  Claim(
    letter='o',
    statement='Sinkhorn attention has smaller local Lipschitz constants.',
    source='left open in Lapenna et al. 2026; for softmax Nair 2025, Kim et al.'
    ' 2021',
    definition='Spectral norm of the Jacobian of a trained attention layer at'
    ' its own inputs, log10: softmax minus Sinkhorn, each run with its own'
    ' normalizer, and both normalizers on the same weights (mean over those of'
    ' both runs).',
    studies=('mnist',),
    analyses=('lipschitz',),
    tests=lipschitz,
  ),
)
