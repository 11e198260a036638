"""Tests of decay: claims a to f and n. See `claims`."""

import dataclasses
import math

from analysis import layer_outputs
from analysis import mechanism
from analysis import statistics
from analysis import theory
from analysis.statistics import of_pairs
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

FULL = layer_outputs.ABLATIONS[True, True]
NO_FFN = layer_outputs.ABLATIONS[True, False]
NO_SKIP = layer_outputs.ABLATIONS[False, True]
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

  Attributes:
    title: for tables.
    norm: of the residual.
    path_scaling: of path products, see `rank.SCALINGS`.
    output_scaling: of layer outputs.
    layers: which k layers a path of depth k goes through.
    output: quantity of layer outputs.
    at: the step.
    stack: of the Sinkhorn runs, one of `iterations.name`; '' for their own.
  """

  title: str = 'as fixed'
  norm: str = 'spectral'
  path_scaling: str = 'absolute'
  output_scaling: str = 'relative'
  layers: str = 'first'
  output: str = 'attention_output'
  at: str | int = measure.LAST
  stack: str = ''

  def paths(self, evidence: Evidence, depth: int, ablation: str = HEADS):
    """Path products, Sinkhorn minus softmax, by seed."""
    return evidence.difference(
      self._sinkhorn(),
      analysis='path_products',
      quantity=f'path, {self.layers} layers',
      ablation=ablation,
      norm=self.norm,
      scaling=self.path_scaling,
      at=self.at,
      depth=depth,
    )

  def outputs(self, evidence: Evidence, depth: int, ablation: str = FULL):
    """Layer outputs, Sinkhorn minus softmax, by seed."""
    return evidence.difference(
      self._sinkhorn(),
      analysis='layer_outputs',
      quantity=self.output,
      ablation=ablation,
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
  """c: where the gap is largest."""
  first, last = evidence.depths[0], evidence.depths[-1]
  gaps = {
    'path products': (choice.paths, WITH_SKIP, HEADS),
    'layer outputs': (choice.outputs, FULL, NO_SKIP),
  }
  tests = []
  for words, (gap, skip_on, skip_off) in gaps.items():
    plain = HEADS if words == 'path products' else FULL
    difference = minus(gap(evidence, first, plain), gap(evidence, last, plain))
    label = f'{words}: gap at {first} minus gap at {last}'
    tests.append(of_pairs(label, None, difference))
    tests += [
      of_pairs(
        f'{words}: gap with skip minus gap without',
        depth,
        minus(gap(evidence, depth, skip_on), gap(evidence, depth, skip_off)),
      )
      for depth in evidence.depths
    ]
  return tests


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


def _hidden(evidence, normalizer, ablation, depth):
  """Relative residual of hidden states, `FLOOR` where float64 has no more."""
  point = {
    'analysis': 'layer_outputs',
    'quantity': 'hidden',
    'ablation': ablation,
    'norm': 'spectral',
    'scaling': 'relative',
    'depth': depth,
  }
  values = evidence.values(normalizer, **point)
  for seed, value in values.items():
    row = evidence.row(normalizer, seed, **point)
    if math.isnan(value) and row and row['below_resolution']:
      values[seed] = FLOOR
  return values


def pure_attention(evidence: Evidence) -> Tests:
  """e: without FFN and skip."""
  return [
    of_pairs(
      f'{name}: ratio of changes minus 1',
      depth,
      {k: v - 1 for k, v in ratios.items()},
    )
    for normalizer, name in NAMES.items()
    for depth in evidence.depths
    if depth > 1
    for ratios in [_law(evidence, normalizer, False, depth, 'exponent')]
  ]


def _law(evidence, normalizer, ffn, depth, column='mean', scaling='absolute'):
  return evidence.values(
    normalizer,
    column,
    analysis='theory',
    quantity='law of depth',
    ablation=theory.LAW_ABLATIONS[ffn],
    norm='spectral',
    scaling=scaling,
    depth=depth,
  )


def pure_attention_details(evidence: Evidence) -> list[str]:
  """How far it has collapsed."""
  lines = []
  for normalizer, name in NAMES.items():
    texts = []
    for depth in evidence.depths:
      residual = over_seeds(_law(evidence, normalizer, False, depth))
      texts.append(f'{residual:.3g} at {depth}')
    lines.append(
      f'{name}: log10 of the residual {", ".join(texts)}; the law of depth says'
      ' that the ratio of its successive changes tends to 3.'
    )
  return lines


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
  tests = []
  for label, parts in _CAUSES.items():
    for depth in evidence.depths:
      values = {
        seed: math.fsum(
          weight * _stack(evidence, seed, name, depth)
          for name, weight in parts.items()
        )
        for seed in evidence.seeds
      }
      tests.append(of_pairs(label, depth, values))
  return tests


def _stack(evidence, seed, name, depth):
  return evidence.value(
    # A pair's rows are under the normalizer of its first run.
    plan.SOFTMAX,
    seed,
    **PATHS | {'analysis': 'mechanism', 'stack': name, 'depth': depth},
  )


_SOFTMAX, _SINKHORN = mechanism.SOFTMAX, mechanism.SINKHORN
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


def whole_difference(evidence: Evidence, depth: int) -> Values:
  """Sinkhorn minus softmax as trained, on the examples of `causes`."""
  return {
    seed: _stack(evidence, seed, f'{_SINKHORN}sinkhorn', depth)
    - _stack(evidence, seed, f'{_SOFTMAX}softmax', depth)
    for seed in evidence.seeds
  }


def causes_details(evidence: Evidence) -> list[str]:
  """What there is to be explained."""
  texts = [
    f'{over_seeds(whole_difference(evidence, depth)):+.2f} at {depth}'
    for depth in evidence.depths
  ]
  return [
    'The whole difference on these examples, Sinkhorn minus softmax, which the'
    f' first two parts add up to: {", ".join(texts)}.'
  ]
