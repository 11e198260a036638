"""Claims a to c: decay of path products and of layer outputs."""

import dataclasses

from analysis.common import naming
from analysis.common.statistics import of_pairs
from analysis.study import evidence as evidence_lib
from analysis.study import measure
from analysis.study.claims.claim import at_depths
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import number
from analysis.study.claims.claim import OF_LENGTH
from analysis.study.claims.claim import OF_RUNS
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES
from analysis.study.evidence import Values

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

  def paths(self, evidence: Evidence, depth: int) -> Values:
    """Path products, Sinkhorn minus softmax, by seed."""
    return self._difference(
      evidence,
      analysis='path_products',
      quantity=f'{self.quantity}, {self.layers} layers',
      ablation=self.factors,
      scaling=self.path_scaling,
      depth=depth,
    )

  def outputs(self, evidence: Evidence, depth: int) -> Values:
    """Layer outputs, Sinkhorn minus softmax, by seed."""
    return self._difference(
      evidence,
      analysis='layer_outputs',
      quantity=self.output,
      ablation=self.switches,
      scaling=self.output_scaling,
      depth=depth,
    )

  def _difference(self, evidence, **point):
    read = {'analysis': 'iterations', 'stack': self.stack} if self.stack else {}
    return evidence.difference(
      self.average, read, norm=self.norm, at=self.at, **point
    )


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
    of_pairs(label, depth, evidence_lib.least(gap, gap - other))
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


def _gap_details(evidence):
  """The gaps themselves."""
  return [
    f'{label}{"" if depth is None else f" at {depth}"}: {number(gap)} and'
    f' {number(other)}, difference {number(gap - other)}.'
    for label, depth, gap, other in _gaps(evidence, FIXED)
  ]


def _mean_decay(evidence):
  """The two curves that claim a compares."""

  def residual(normalizer, depth):
    return evidence.values(normalizer, **PATHS, depth=depth).mean()

  return [
    f'{name}: log10 of the residual'
    f' {at_depths(evidence, lambda x, y=normalizer: f"{residual(y, x):.2f}")}.'
    for normalizer, name in NAMES.items()
  ]


_GAP = (
  'Sinkhorn minus softmax, mean of log10 of the spectral norm of the residual.'
)
CLAIMS = (
  Claim(
    letter='a',
    statement='Products of trained attention matrices decay more slowly with'
    ' Sinkhorn.',
    source='Lapenna et al. 2026, path products, main result',
    definition=f'{_GAP} Products along paths through the first k layers,'
    ' absolute.',
    studies=OF_RUNS,
    analyses=('path_products',),
    tests=path_products,
    details=_mean_decay,
  ),
  Claim(
    letter='b',
    statement='The outputs of attention layers keep a larger relative residual'
    ' with Sinkhorn.',
    source='Lapenna et al. 2026, outputs of self-attention by layer, main'
    ' result',
    definition=f'{_GAP} Results of the attention sublayers, relative to their'
    ' own norm.',
    studies=OF_RUNS,
    analyses=('layer_outputs',),
    tests=layer_results,
  ),
  Claim(
    letter='c',
    statement='The gap is largest in shallow layers, and with skip'
    ' connections.',
    source='Lapenna et al. 2026, main result',
    definition='Gap as in a and b, Sinkhorn minus softmax. In a shallow layer'
    ' it should be above 0, and above that in the last; with the skip on (for'
    ' paths: a choice in each layer) above 0, and above that with it off. The'
    ' number is the smaller of the gap and of what it exceeds the other by.'
    ' Without skip, residuals soon lie below float64: no test there.',
    studies=OF_LENGTH,
    analyses=('path_products', 'layer_outputs'),
    tests=shallow_and_skips,
    details=_gap_details,
  ),
)
