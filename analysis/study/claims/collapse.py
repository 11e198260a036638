"""Claims d to f: skip connections, pure attention and the FFN."""

import math

import numpy as np

from analysis import theory
from analysis.common.statistics import of_pairs
from analysis.study import evidence as evidence_lib
from analysis.study import plan
from analysis.study.claims import decay
from analysis.study.claims.claim import at_depths
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import OF_LENGTH
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES

# Below the resolution of float64, whatever the number of tokens.
FLOOR = -11.0
# Of tokens: a residual of this share of the whole.
COLLAPSED = 1e-3


def skips_matter_most(evidence: Evidence) -> Tests:
  """d: the skip against the FFN and the normalizer."""
  tests = []
  for depth in evidence.depths:
    full, no_skip, no_ffn = (
      {x: _hidden(evidence, x, ablation, depth) for x in NAMES}
      for ablation in (decay.FULL, decay.NO_SKIP, decay.NO_FFN)
    )
    skip, ffn = (
      evidence_lib.mean(*(full[x] - other[x] for x in NAMES))
      for other in (no_skip, no_ffn)
    )
    normalizer = full[plan.SINKHORN] - full[plan.SOFTMAX]
    # The larger of the two, and NaN if one is.
    other = -evidence_lib.least(-ffn.abs(), -normalizer.abs())
    label = 'skip minus the larger of FFN and normalizer'
    tests.append(of_pairs(label, depth, skip - other))
  return tests


def _hidden_point(ablation, depth):
  return {
    'analysis': 'layer_outputs',
    'quantity': 'hidden',
    'ablation': ablation,
    'norm': 'spectral',
    'scaling': 'relative',
    'depth': depth,
  }


def _hidden(evidence, normalizer, ablation, depth):
  """Relative residual of hidden states, `FLOOR` where float64 has no more."""
  point = _hidden_point(ablation, depth)
  values = evidence.values(normalizer, **point)
  for seed in values.index:
    row = evidence.row(normalizer, seed, **point)
    if row and row['below_resolution'] and not row['invalid']:
      below, count = row['below_resolution'], row['count']
      # The mean of no value is NaN.
      resolved = count * row['mean'] if count else 0
      values[seed] = (resolved + below * FLOOR) / (count + below)
  return values


def _floor_details(evidence):
  """How much of claim d is the floor."""
  texts = []
  for depth in evidence.depths:
    rows = [
      evidence.row(x, seed, **_hidden_point(decay.NO_SKIP, depth))
      for x in NAMES
      for seed in evidence.seeds
    ]
    rows = [x for x in rows if x]
    below = sum(x['below_resolution'] for x in rows)
    total = below + sum(x['count'] for x in rows)
    if below:
      texts.append(f'{100 * below / total:.0f} % at {depth}')
  if not texts:
    return []
  return [
    f'Of the values without skip these lie below float64: {", ".join(texts)}.'
    f' They count as 1e{FLOOR:.0f}, so that the skip matters at least as much'
    ' as the number says; where it is all of them, the interval is that of the'
    ' other terms alone.'
  ]


def pure_attention(evidence: Evidence) -> Tests:
  """e: without FFN and skip."""
  return [
    of_pairs(
      f'{name}: ratio of changes minus 1',
      depth,
      _speed_up(evidence, normalizer, depth),
    )
    for normalizer, name in NAMES.items()
    for depth in evidence.depths
    if depth > 1
  ]


def _speed_up(evidence, normalizer, depth):
  """Below 0 as well where the residual grew in the layer."""
  change = _law(evidence, normalizer, False, depth, 'exponent') - 1
  before, after = (
    _law(evidence, normalizer, False, x) for x in (depth - 1, depth)
  )
  return change.where(after < before, -change.abs())


def pure_point(evidence: Evidence) -> dict[str, str]:
  """Tokens with skips off, relative, however far they collapse.

  With the FFN where the model has one.
  """
  for ffn in (True, False):
    found = _law_point(ffn, 'relative')
    row = found | {'depth': evidence.depths[-1]}
    if any(evidence.row(x, evidence.seeds[0], **row) for x in NAMES):
      break
  return found


def _law_point(ffn, scaling):
  return {
    'analysis': 'theory',
    'quantity': 'law of depth',
    'ablation': theory.LAW_ABLATIONS[ffn],
    'norm': 'spectral',
    'scaling': scaling,
  }


def _law(evidence, normalizer, ffn, depth, column='mean', scaling='absolute'):
  point = _law_point(ffn, scaling)
  return evidence.values(normalizer, column, **point, depth=depth)


def _pure_attention_details(evidence):
  """How far it has collapsed, and where."""
  lines = [
    'That the ratio is 3 once tokens have collapsed is an identity; measured is'
    ' that they collapse.'
  ]
  for normalizer, name in NAMES.items():

    def residual(depth, normalizer=normalizer):
      return f'{_law(evidence, normalizer, False, depth).mean():.3g}'

    layers = _collapsed(evidence, normalizer)
    lines.append(
      f'{name}: log10 of the residual {at_depths(evidence, residual)}; relative'
      f' to the whole it is below {COLLAPSED:g} from layer'
      f' {"/".join(map(str, layers)) or "(none)"} on, pair by pair.'
    )
  return lines


def _collapsed(evidence, normalizer):
  """The first layer that has collapsed, of each pair that has one."""
  point, found = _law_point(False, 'relative'), []
  for seed in evidence.seeds:
    for depth in range(1, evidence.depths[-1] + 1):
      value = evidence.value(normalizer, seed, **point, depth=depth)
      if value < math.log10(COLLAPSED):
        found.append(depth)
        break
  return found


def ffn_slows_collapse(evidence: Evidence) -> Tests:
  """f: FFN on against off, without skip."""

  def collapse(normalizer, ffn, depth):
    """How far collapsed, in layers: each multiplies the log of it by 3."""
    values = _law(evidence, normalizer, ffn, depth, scaling='relative')
    return np.log(1 - values) / math.log(3)

  return [
    of_pairs(
      f'{name}: collapse comes later by',
      depth,
      collapse(normalizer, False, depth) - collapse(normalizer, True, depth),
    )
    for normalizer, name in NAMES.items()
    for depth in evidence.depths
  ]


CLAIMS = (
  Claim(
    letter='d',
    statement='Skip connections matter most.',
    source='Dong et al. 2021; Lapenna et al. 2026, factors varied',
    definition='Relative residual of hidden states, log10: what switching the'
    ' skip off takes away (mean of both normalizers) minus the larger of what'
    ' the FFN and the normalizer change. Residuals beyond float64 count as'
    f' {FLOOR:g}, which understates the skip.',
    studies=OF_LENGTH,
    analyses=('layer_outputs',),
    tests=skips_matter_most,
    details=_floor_details,
  ),
  Claim(
    letter='e',
    statement='Pure attention (no skip, no FFN) collapses with either'
    ' normalizer, doubly exponentially.',
    source='Dong et al. 2021 and Lapenna et al. 2026, theorems',
    definition='The change of log10 of the residual in a layer over that in the'
    ' layer before, minus 1: above 0 is faster than exponential; the theorems'
    ' say 2. Below 0 also where the residual grew in the layer. Exact however'
    ' far it collapses.',
    studies=OF_LENGTH,
    analyses=('theory',),
    tests=pure_attention,
    details=_pure_attention_details,
    unit='',
  ),
  Claim(
    letter='f',
    statement='The FFN slows collapse.',
    source='Dong et al. 2021',
    definition='Skip off: by how many layers collapse comes later with the FFN'
    ' on. A layer of pure attention triples log10 of the relative residual, so'
    ' layers are counted as log to the base 3 of 1 minus that. Exact however'
    ' far it collapses; once it has, the number stays the same with depth.',
    studies=OF_LENGTH,
    analyses=('theory',),
    tests=ffn_slows_collapse,
    unit='layers',
  ),
)
