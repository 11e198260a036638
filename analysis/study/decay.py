"""Tests of decay: claims a to f and n. See `claims`."""

import dataclasses
import math

from analysis import mechanism
from analysis import theory
from analysis.common import naming
from analysis.common import statistics
from analysis.common.statistics import of_pairs
from analysis.study import evidence as evidence_lib
from analysis.study import measure
from analysis.study import plan
from analysis.study.evidence import Evidence
from analysis.study.evidence import minus
from analysis.study.evidence import NAMES
from analysis.study.evidence import over_seeds
from analysis.study.evidence import Values

Tests = list[statistics.Test]

# Below the resolution of float64, whatever the number of tokens.
FLOOR = -11.0
# Of tokens: a residual of this share of the whole.
COLLAPSED = 1e-3

FULL = naming.ABLATIONS[True, True]
NO_FFN = naming.ABLATIONS[True, False]
NO_SKIP = naming.ABLATIONS[False, True]
HEADS, WITH_SKIP = 'heads only', 'skip a choice'
# The headline of path products.
PATHS = {
  'analysis': 'path_products',
  'quantity': 'path, first layers',
  'ablation': HEADS,
  'norm': 'spectral',
  'scaling': 'absolute',
}


@dataclasses.dataclass(frozen=True)
class Choice:
  """What is measured for claims a to c; the defaults are what they rest on.

  Claim c compares ablations, and names them itself.

  Attributes:
    title: for tables.
    norm: of the residual.
    path_scaling: of path products, see `rank.SCALINGS`.
    output_scaling: of layer outputs.
    layers: which k layers a path of depth k goes through.
    average: over examples and paths, a column of summary tables.
    quantity: of products: of sampled paths, or the exact RMS over all.
    factors: of a path: heads alone, or the skip as one more choice.
    output: quantity of layer outputs.
    switches: which parts of the model outputs are of, an ablation.
    at: the step.
    stack: of the Sinkhorn runs, one of `naming.iterations`; '' for their own.
  """

  title: str = 'as fixed'
  norm: str = 'spectral'
  path_scaling: str = 'absolute'
  output_scaling: str = 'relative'
  layers: str = 'first'
  average: str = 'mean'
  quantity: str = 'path'
  factors: str = HEADS
  output: str = 'attention_output'
  switches: str = FULL
  at: str | int = measure.LAST
  stack: str = ''

  def paths(self, evidence: Evidence, depth: int):
    """Path products, Sinkhorn minus softmax, by seed."""
    return evidence.difference(
      self.average,
      self._sinkhorn(),
      analysis='path_products',
      quantity=f'{self.quantity}, {self.layers} layers',
      ablation=self.factors,
      norm=self.norm,
      scaling=self.path_scaling,
      at=self.at,
      depth=depth,
    )

  def outputs(self, evidence: Evidence, depth: int):
    """Layer outputs, Sinkhorn minus softmax, by seed."""
    return evidence.difference(
      self.average,
      self._sinkhorn(),
      analysis='layer_outputs',
      quantity=self.output,
      ablation=self.switches,
      norm=self.norm,
      scaling=self.output_scaling,
      at=self.at,
      depth=depth,
    )

  def _sinkhorn(self):
    if not self.stack:
      return {}
    return {'analysis': 'iterations', 'stack': self.stack}


FIXED = Choice()


def path_products(evidence: Evidence, choice: Choice = FIXED) -> Tests:
  """a: path products."""
  return [
    of_pairs('path products', depth, choice.paths(evidence, depth))
    for depth in evidence.depths
  ]


def layer_results(evidence: Evidence, choice: Choice = FIXED) -> Tests:
  """b: layer outputs."""
  return [
    of_pairs('layer outputs', depth, choice.outputs(evidence, depth))
    for depth in evidence.depths
  ]


def shallow_and_skips(evidence: Evidence, choice: Choice = FIXED) -> Tests:
  """c: where the gap is largest.

  A gap that is below 0 is no larger gap for being nearer to 0 than another.
  """
  return [
    of_pairs(label, depth, evidence_lib.least(gap, minus(gap, other)))
    for label, depth, gap, other in _gaps(evidence, choice)
  ]


def _gaps(evidence, choice):
  """Label, depth, the gap that should be larger, and the other."""
  first, last = evidence.depths[0], evidence.depths[-1]
  with_skip = dataclasses.replace(choice, factors=WITH_SKIP)
  no_skip = dataclasses.replace(choice, switches=NO_SKIP)
  for words, plain, skip_on, skip_off in (
    ('path products', choice.paths, with_skip.paths, choice.paths),
    ('layer outputs', choice.outputs, choice.outputs, no_skip.outputs),
  ):
    at_first, at_last = (plain(evidence, x) for x in (first, last))
    yield f'{words}: gap at {first}, over {last}', None, at_first, at_last
    for depth in evidence.depths:
      label = f'{words}: gap with skip, over without'
      yield label, depth, skip_on(evidence, depth), skip_off(evidence, depth)


def gap_details(evidence: Evidence) -> list[str]:
  """The gaps themselves."""
  return [
    f'{label}{"" if depth is None else f" at {depth}"}: {_number(gap)} and'
    f' {_number(other)}, difference {_number(minus(gap, other))}.'
    for label, depth, gap, other in _gaps(evidence, FIXED)
  ]


def _number(values):
  return statistics.number(of_pairs('', None, values).sample)


def mean_decay(evidence: Evidence) -> list[str]:
  """The two curves that claim a compares."""
  lines = []
  for normalizer, name in NAMES.items():
    texts = []
    for depth in evidence.depths:
      values = evidence.values(normalizer, **PATHS, depth=depth)
      texts.append(f'{over_seeds(values):.2f} at {depth}')
    lines.append(f'{name}: log10 of the residual {", ".join(texts)}.')
  return lines


def skips_matter_most(evidence: Evidence) -> Tests:
  """d: the skip against the FFN and the normalizer."""
  tests = []
  for depth in evidence.depths:
    full, no_skip, no_ffn = (
      {x: _hidden(evidence, x, ablation, depth) for x in NAMES}
      for ablation in (FULL, NO_SKIP, NO_FFN)
    )
    skip, ffn = (
      evidence_lib.mean(*(minus(full[x], other[x]) for x in NAMES))
      for other in (no_skip, no_ffn)
    )
    normalizer = minus(full[plan.SINKHORN], full[plan.SOFTMAX])
    values = {
      seed: skip[seed] - max(abs(ffn[seed]), abs(normalizer[seed]))
      for seed in skip
    }
    tests.append(
      of_pairs('skip minus the larger of FFN and normalizer', depth, values)
    )
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
  for seed in values:
    row = evidence.row(normalizer, seed, **point)
    if row and row['below_resolution'] and not row['invalid']:
      below, count = row['below_resolution'], row['count']
      # The mean of no value is NaN.
      resolved = count * row['mean'] if count else 0
      values[seed] = (resolved + below * FLOOR) / (count + below)
  return values


def floor_details(evidence: Evidence) -> list[str]:
  """How much of claim d is the floor."""
  texts = []
  for depth in evidence.depths:
    rows = [
      evidence.row(x, seed, **_hidden_point(NO_SKIP, depth))
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
  ratios = _law(evidence, normalizer, False, depth, 'exponent')
  before, after = (
    _law(evidence, normalizer, False, x) for x in (depth - 1, depth)
  )
  return {
    k: v - 1 if after[k] < before[k] else -abs(v - 1) for k, v in ratios.items()
  }


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


def pure_attention_details(evidence: Evidence) -> list[str]:
  """How far it has collapsed, and where."""
  lines = [
    'That the ratio is 3 once tokens have collapsed is an identity; measured is'
    ' that they collapse.'
  ]
  for normalizer, name in NAMES.items():
    texts = []
    for depth in evidence.depths:
      residual = over_seeds(_law(evidence, normalizer, False, depth))
      texts.append(f'{residual:.3g} at {depth}')
    layers = _collapsed(evidence, normalizer)
    lines.append(
      f'{name}: log10 of the residual {", ".join(texts)}; relative to the whole'
      f' it is below {COLLAPSED:g} from layer'
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
  return [
    of_pairs(
      f'{name}: collapse comes later by',
      depth,
      minus(
        _collapse(evidence, normalizer, False, depth),
        _collapse(evidence, normalizer, True, depth),
      ),
    )
    for normalizer, name in NAMES.items()
    for depth in evidence.depths
  ]


def _collapse(evidence, normalizer, ffn, depth):
  """How far collapsed, in layers: each multiplies the log of it by 3."""
  values = _law(evidence, normalizer, ffn, depth, scaling='relative')
  return {k: math.log(1 - v, 3) for k, v in values.items()}


def causes(evidence: Evidence) -> Tests:
  """n: the normalizer, the logits, sharpness, column bias."""
  return [
    of_pairs(label, depth, _weighted(evidence, parts, depth))
    for label, parts in _CAUSES.items()
    for depth in evidence.depths
  ]


def _entropy(evidence, name):
  """Of a stack, in words; the same at all depths."""
  values = {
    seed: _stack(evidence, seed, name, evidence.depths[-1], 'entropy')
    for seed in evidence.seeds
  }
  return f'{name} {_number(values)}'


def added_causes(evidence: Evidence) -> Tests:
  """What was added when results had been seen: to be shown, not for verdicts.

  On the logits of softmax, at its entropy: the normalizer, as the sum of what
  the column bias does and of the rest.
  """
  return [
    of_pairs(label, depth, _weighted(evidence, parts, depth))
    for label, parts in _ADDED_CAUSES.items()
    for depth in evidence.depths
  ]


def _weighted(evidence, parts, depth):
  return {
    seed: math.fsum(
      weight * _stack(evidence, seed, name, depth)
      for name, weight in parts.items()
    )
    for seed in evidence.seeds
  }


def _stack(evidence, seed, name, depth, column='mean'):
  return evidence.value(
    # A pair's rows are under the normalizer of its first run.
    plan.SOFTMAX,
    seed,
    column,
    **PATHS | {'analysis': 'mechanism', 'stack': name, 'depth': depth},
  )


_SOFTMAX, _SINKHORN = mechanism.SOFTMAX, mechanism.SINKHORN
_SWAPPED = mechanism.PANELS['normalizer swapped']
NORMALIZER = 'Sinkhorn in place of softmax, the same logits'
LOGITS = 'logits trained under Sinkhorn, the same normalizer'
MATCHED = 'both at the attention entropy of softmax'
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
  'both at the attention entropy of Sinkhorn': {
    f'{_SINKHORN}sinkhorn': 1,
    f"{_SOFTMAX}softmax, sinkhorn's entropy": -1,
  },
  'softmax without the column bias of its logits': {
    f'{_SOFTMAX}softmax, bias removed': 1,
    f'{_SOFTMAX}softmax': -1,
  },
}
_SAME = 'same logits, same entropy:'
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
# Told beside the tests of n: the simple effects that the first two are means
# of, and the first of those added on the other logits.
_MORE_CAUSES = {
  'Sinkhorn in place of softmax, on logits of softmax': {
    f'{_SOFTMAX}sinkhorn': 1,
    f'{_SOFTMAX}softmax': -1,
  },
  'Sinkhorn in place of softmax, on logits of Sinkhorn': {
    f'{_SINKHORN}sinkhorn': 1,
    f'{_SINKHORN}softmax': -1,
  },
  'Logits trained under Sinkhorn in place of those under softmax, softmax': {
    f'{_SINKHORN}softmax': 1,
    f'{_SOFTMAX}softmax': -1,
  },
  'Logits trained under Sinkhorn in place of those under softmax, Sinkhorn': {
    f'{_SINKHORN}sinkhorn': 1,
    f'{_SOFTMAX}sinkhorn': -1,
  },
  'Softmax without the column bias, on logits of Sinkhorn': {
    f'{_SINKHORN}softmax, bias removed': 1,
    f'{_SINKHORN}softmax': -1,
  },
  'Sinkhorn in place of softmax, on logits of Sinkhorn at its entropy': {
    f'{_SINKHORN}sinkhorn': 1,
    f"{_SINKHORN}softmax, sinkhorn's entropy": -1,
  },
  'Softmax without the column bias, on logits of Sinkhorn at its entropy': {
    f"{_SINKHORN}softmax, bias removed, sinkhorn's entropy": 1,
    f"{_SINKHORN}softmax, sinkhorn's entropy": -1,
  },
  'Sinkhorn in place of softmax without the column bias, on logits of Sinkhorn'
  ' at its entropy': {
    f'{_SINKHORN}sinkhorn': 1,
    f"{_SINKHORN}softmax, bias removed, sinkhorn's entropy": -1,
  },
}


def whole_difference(evidence: Evidence, depth: int) -> Values:
  """Sinkhorn minus softmax as trained, on the examples of `causes`."""
  return {
    seed: _stack(evidence, seed, f'{_SINKHORN}sinkhorn', depth)
    - _stack(evidence, seed, f'{_SOFTMAX}softmax', depth)
    for seed in evidence.seeds
  }


def causes_details(evidence: Evidence) -> list[str]:
  """What there is to be explained, and what the two effects are made of."""
  texts = [
    f'{over_seeds(whole_difference(evidence, depth)):+.2f} at {depth}'
    for depth in evidence.depths
  ]
  lines = [
    'The whole difference on these examples, Sinkhorn minus softmax, which the'
    f' first two parts add up to: {", ".join(texts)}.'
  ]
  lines.append(
    'Attention entropy in nats, mean over layers: '
    f'{"; ".join(_entropy(evidence, x) for x in _SWAPPED)}.'
  )
  lines += [_in_words(evidence, *x) for x in _MORE_CAUSES.items()]
  lines.append(
    'Added when results had been seen, and without verdict, are these, on the'
    ' logits of softmax. The last two add up to the first.'
  )
  lines += [_in_words(evidence, *x) for x in _ADDED_CAUSES.items()]
  return lines


def _in_words(evidence, label, parts):
  texts = [
    f'{_number(_weighted(evidence, parts, depth))} at {depth}'
    for depth in evidence.depths
  ]
  return f'{label[0].upper()}{label[1:]}: {", ".join(texts)}.'
