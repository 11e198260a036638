"""Claim n: the normalizer, the logits, sharpness, and column bias."""

from collections.abc import Mapping

import pandas as pd

from analysis import mechanism
from analysis.common.statistics import of_pairs
from analysis.study import plan
from analysis.study.claims import decay
from analysis.study.claims.claim import at_depths
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import number
from analysis.study.claims.claim import OF_RUNS
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import Values

_SOFTMAX, _SINKHORN = mechanism.SOFTMAX, mechanism.SINKHORN
_SWAPPED = mechanism.PANELS['normalizer swapped']
NORMALIZER = 'Sinkhorn in place of softmax, with the logits held fixed'
LOGITS = 'logits of the Sinkhorn-trained model, with the normalizer held fixed'
MATCHED = "Sinkhorn model at matched attention entropy (softmax's)"
# Weights of the stacks of `analysis.mechanism`. The first two add up to the
# whole difference of a pair.
_CAUSES = {
  NORMALIZER: {
    f'{_SOFTMAX}sinkhorn': 0.5,
    f'{_SINKHORN}sinkhorn': 0.5,
    f'{_SOFTMAX}softmax': -0.5,
    f'{_SINKHORN}softmax': -0.5,
  },
  LOGITS: {
    f'{_SINKHORN}softmax': 0.5,
    f'{_SINKHORN}sinkhorn': 0.5,
    f'{_SOFTMAX}softmax': -0.5,
    f'{_SOFTMAX}sinkhorn': -0.5,
  },
  MATCHED: {
    f"{_SINKHORN}sinkhorn, softmax's entropy": 1,
    f'{_SOFTMAX}softmax': -1,
  },
  "Sinkhorn model at matched attention entropy (Sinkhorn's)": {
    f'{_SINKHORN}sinkhorn': 1,
    f"{_SOFTMAX}softmax, sinkhorn's entropy": -1,
  },
  'softmax without the column bias of its logits': {
    f'{_SOFTMAX}softmax, bias removed': 1,
    f'{_SOFTMAX}softmax': -1,
  },
}
_SAME = "logits of softmax, at matched attention entropy (softmax's):"
EQUALLY_SHARP = f'{_SAME} Sinkhorn in place of softmax'
NO_BIAS = f'{_SAME} softmax without the column bias'
REST = f'{_SAME} Sinkhorn in place of softmax without the column bias'
_SHARP_SINKHORN = f"{_SOFTMAX}sinkhorn, softmax's entropy"
_SHARP_NO_BIAS = f"{_SOFTMAX}softmax, bias removed, softmax's entropy"
# Added when results had been seen. The last two add up to the first.
_ADDED_CAUSES = {
  EQUALLY_SHARP: {_SHARP_SINKHORN: 1, f'{_SOFTMAX}softmax': -1},
  NO_BIAS: {_SHARP_NO_BIAS: 1, f'{_SOFTMAX}softmax': -1},
  REST: {_SHARP_SINKHORN: 1, _SHARP_NO_BIAS: -1},
}
_AT_SINKHORN = "on logits of Sinkhorn at matched attention entropy (Sinkhorn's)"
# Told beside the tests: the simple effects that the first two are means of, and
# the first of those added on the other logits. Each is the first stack minus
# the second.
_MORE_CAUSES = {
  'Sinkhorn in place of softmax, on logits of softmax': (
    f'{_SOFTMAX}sinkhorn',
    f'{_SOFTMAX}softmax',
  ),
  'Sinkhorn in place of softmax, on logits of Sinkhorn': (
    f'{_SINKHORN}sinkhorn',
    f'{_SINKHORN}softmax',
  ),
  'Logits of the Sinkhorn-trained model, under softmax': (
    f'{_SINKHORN}softmax',
    f'{_SOFTMAX}softmax',
  ),
  'Logits of the Sinkhorn-trained model, under Sinkhorn': (
    f'{_SINKHORN}sinkhorn',
    f'{_SOFTMAX}sinkhorn',
  ),
  'Softmax without the column bias, on logits of Sinkhorn': (
    f'{_SINKHORN}softmax, bias removed',
    f'{_SINKHORN}softmax',
  ),
  f'Sinkhorn in place of softmax, {_AT_SINKHORN}': (
    f'{_SINKHORN}sinkhorn',
    f"{_SINKHORN}softmax, sinkhorn's entropy",
  ),
  f'Softmax without the column bias, {_AT_SINKHORN}': (
    f"{_SINKHORN}softmax, bias removed, sinkhorn's entropy",
    f"{_SINKHORN}softmax, sinkhorn's entropy",
  ),
  f'Sinkhorn in place of softmax without the column bias, {_AT_SINKHORN}': (
    f'{_SINKHORN}sinkhorn',
    f"{_SINKHORN}softmax, bias removed, sinkhorn's entropy",
  ),
}


def causes(evidence: Evidence) -> Tests:
  """n: what was fixed beforehand."""
  return _tests(evidence, _CAUSES)


def added_causes(evidence: Evidence) -> Tests:
  """What was added when results had been seen: to be shown, not for verdicts.

  On the logits of softmax, at its entropy: the normalizer, as the sum of what
  the column bias does and of the rest.
  """
  return _tests(evidence, _ADDED_CAUSES)


def _tests(evidence, weights):
  return [
    of_pairs(label, depth, _weighted(evidence, parts, depth))
    for label, parts in weights.items()
    for depth in evidence.depths
  ]


def _weighted(evidence, parts: Mapping[str, float], depth: int) -> Values:
  stacks = [w * _stack(evidence, name, depth) for name, w in parts.items()]
  return pd.concat(stacks, axis=1).sum(axis=1, skipna=False)


def _stack(evidence, name, depth, column='mean'):
  point = {'analysis': 'mechanism', 'stack': name, 'depth': depth}
  # A pair's rows are under the normalizer of its first run.
  return evidence.values(plan.SOFTMAX, column, **decay.PATHS | point)


def whole_difference(evidence: Evidence, depth: int) -> Values:
  """Sinkhorn minus softmax as trained, on the examples of `causes`."""
  softmax, *_, sinkhorn = _SWAPPED
  return _stack(evidence, sinkhorn, depth) - _stack(evidence, softmax, depth)


def _details(evidence):
  """What there is to be explained, and what the two effects are made of."""

  def told(label, parts):
    text = at_depths(
      evidence, lambda depth: number(_weighted(evidence, parts, depth))
    )
    return f'{label[0].upper()}{label[1:]}: {text}.'

  def whole(depth):
    return f'{whole_difference(evidence, depth).mean():+.2f}'

  # The entropy of a stack is the same at all depths.
  last = evidence.depths[-1]
  entropies = '; '.join(
    f'{x} {number(_stack(evidence, x, last, "entropy"))}' for x in _SWAPPED
  )
  return [
    'The whole difference on these examples, Sinkhorn minus softmax, which the'
    f' first two parts add up to: {at_depths(evidence, whole)}.',
    f'Attention entropy in nats, mean over layers: {entropies}.',
    *(
      told(label, {more: 1, less: -1})
      for label, (more, less) in _MORE_CAUSES.items()
    ),
    'Exploratory, without verdict, are these, on the logits of softmax. The'
    ' last two add up to the first.',
    *(told(*x) for x in _ADDED_CAUSES.items()),
  ]


CLAIMS = (
  Claim(
    letter='n',
    statement='The normalizer itself slows decay: with the logits held fixed,'
    ' and at matched attention entropy.',
    source='left open in Lapenna et al. 2026',
    definition='Path products, log10. Logits of both models go through both'
    ' normalizers (main effects of the 2 x 2 table); temperatures give both'
    ' models the same entropy in each layer; the column bias of the logits is'
    ' taken out. Above 0 is slower decay.',
    studies=OF_RUNS,
    analyses=('mechanism',),
    tests=causes,
    details=_details,
  ),
)
