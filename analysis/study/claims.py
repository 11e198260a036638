"""The claims, one by one: what is tested, and where the claim is from.

What is tested was fixed when one pair (MNIST, one epoch, seed 0) had been
looked at, before all others; `page` says what was corrected later. A claim is a
function from the evidence to its tests, whose numbers are above 0 where the
claim is right. Residuals are log10 of the spectral norm, means over the same
test examples, and for products over the same sampled paths, of both runs of a
pair.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from analysis import theory
from analysis.common import statistics
from analysis.study import decay
from analysis.study import others
from analysis.study.evidence import Evidence

Tests = list[statistics.Test]


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim.

  Attributes:
    letter: short name.
    statement: what is claimed.
    source: by whom, and where.
    definition: what is tested.
    tests: from the evidence.
    analyses: modules that measure it; none if the training has recorded it.
    details: further numbers, as text.
    unit: of the tests' numbers.
    number: how these are written.
  """

  letter: str
  statement: str
  source: str
  definition: str
  tests: Callable[[Evidence], Tests]
  analyses: tuple[str, ...] = ()
  details: Callable[[Evidence], list[str]] = lambda evidence: []
  unit: str = 'log10'
  number: Callable[[statistics.Sample], str] = statistics.number


@dataclasses.dataclass(frozen=True)
class Answer:
  """A claim, and what came of it.

  Attributes:
    claim: the claim.
    judged: its tests.
    verdict: in words.
    details: further numbers, as text.
  """

  claim: Claim
  judged: list[statistics.Judged]
  verdict: str
  details: list[str]


def answer(claim: Claim, evidence: Evidence) -> Answer:
  """Tests a claim."""
  judged = statistics.judge(claim.tests(evidence))
  verdict = statistics.overall(judged)
  return Answer(claim, judged, verdict, claim.details(evidence))


_GAP = (
  'Sinkhorn minus softmax, mean of log10 of the spectral norm of the residual.'
)
_LIST = (
  Claim(
    letter='a',
    statement='Products of trained attention matrices decay more slowly with'
    ' Sinkhorn.',
    source='Lapenna et al. 2026, path products, main result',
    definition=f'{_GAP} Products along paths through the first k layers,'
    ' absolute.',
    analyses=('path_products',),
    tests=decay.path_products,
    details=decay.mean_decay,
  ),
  Claim(
    letter='b',
    statement='So do the outputs of the layers.',
    source='Lapenna et al. 2026, outputs of self-attention by layer, main'
    ' result',
    definition=f'{_GAP} Results of the attention sublayers, relative to their'
    ' own norm.',
    analyses=('layer_outputs',),
    tests=decay.layer_results,
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
    analyses=('path_products', 'layer_outputs'),
    tests=decay.shallow_and_skips,
    details=decay.gap_details,
  ),
  Claim(
    letter='d',
    statement='Skip connections matter most.',
    source='Dong et al. 2021; Lapenna et al. 2026, factors varied',
    definition='Relative residual of hidden states, log10: what switching the'
    ' skip off takes away (mean of both normalizers) minus the larger of what'
    ' the FFN and the normalizer change. Residuals beyond float64 count as'
    f' {decay.FLOOR:g}, which understates the skip.',
    analyses=('layer_outputs',),
    tests=decay.skips_matter_most,
    details=decay.floor_details,
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
    analyses=('theory',),
    tests=decay.pure_attention,
    details=decay.pure_attention_details,
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
    analyses=('theory',),
    tests=decay.ffn_slows_collapse,
    unit='layers',
  ),
  Claim(
    letter='g',
    statement='Products of unrelated random matrices show no difference, also'
    ' with half of them the identity.',
    source='Lapenna et al. 2026, Appendix G',
    definition='Sinkhorn minus softmax, log10, over draws of logits, the same'
    ' for both (Welch intervals: rather too wide than too narrow): no'
    f' difference if it is below {others.CONTROL_MARGIN:.0%} of what softmax'
    ' decays by.',
    analyses=('random_control',),
    tests=others.control,
    details=others.control_details,
  ),
  Claim(
    letter='h',
    statement='Products of random matrices decay more slowly than those of'
    ' trained attention.',
    source='Lapenna et al. 2026, Appendix G',
    definition='Random minus trained, log10, same normalizer; Gaussian logits'
    " of the run's own spread in each layer, and of unit spread.",
    analyses=('matched_control', 'path_products'),
    tests=others.random_decays_slower,
  ),
  Claim(
    letter='i',
    statement='50 iterations suffice.',
    source='Lapenna et al. 2026, Appendix F',
    definition='Path products of the trained logits with 50 minus those with'
    ' 1000 iterations, rows closed by a last update, log10 of the residual:'
    f' they suffice if it is nearer to 0 than {others.ITERATIONS_MARGIN:g}.',
    analyses=('iterations', 'matched_control'),
    tests=others.iterations_suffice,
    details=others.iterations_details,
  ),
  Claim(
    letter='j',
    statement='The bounds hold.',
    source='Lapenna et al. 2026, theorem; Nair 2025, constant of softmax;'
    ' first-order bounds derived here',
    definition='log10 of the bound over the residual of one layer of random'
    f' weights, the least over {len(theory.LOGIT_NORMS)} logit norms (up to'
    f' {others.SMALL:g} for bounds that are stated for small logits).',
    analyses=('theory',),
    tests=others.bounds_hold,
    details=others.bounds_details,
  ),
  Claim(
    letter='k',
    statement='Softmax attention grows more doubly stochastic during training.',
    source='Sander et al. 2022, histograms of column sums',
    definition='log10 of the spread of column sums about 1 (root mean square)'
    ' in a layer, at step 0 and at the first kept step after it, minus that at'
    ' the end.',
    analyses=('attention',),
    tests=others.grows_doubly_stochastic,
    details=others.column_details,
  ),
  Claim(
    letter='l',
    statement='Sinkhorn raises the accuracy.',
    source='Sander et al. 2022: 79.0 % to 79.5 % on Cats and Dogs',
    definition='Sinkhorn minus softmax, test accuracy.',
    tests=others.accuracy,
    details=others.accuracy_details,
    unit='percentage points',
  ),
  Claim(
    letter='m',
    statement='A training step costs little more.',
    source='Sander et al. 2022: 3m25s for 3m20s an epoch, with 1 iteration',
    definition='The whole training step with the weights of the trained runs,'
    ' the two of a pair in turn on the same batches: it takes less than'
    f' {others.COST_FACTOR:g} times as long. log10 of {others.COST_FACTOR:g}'
    ' over the ratio.',
    analyses=('step_time',),
    tests=others.cost,
    details=others.cost_details,
    unit='',
    number=others.cost_number,
  ),
  Claim(
    letter='n',
    statement='The normalizer itself slows decay: on the same logits, and at'
    ' the same attention entropy.',
    source='left open in Lapenna et al. 2026',
    definition='Path products, log10. Logits of both models go through both'
    ' normalizers (main effects of the 2 x 2 table); temperatures give both'
    ' models the same entropy in each layer; the column bias of the logits is'
    ' taken out. Above 0 is slower decay.',
    analyses=('mechanism',),
    tests=decay.causes,
    details=decay.causes_details,
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
    analyses=('lipschitz',),
    tests=others.lipschitz,
  ),
)
CLAIMS = {x.letter: x for x in _LIST}


def answers(letters: Sequence[str], evidence: Evidence) -> list[Answer]:
  """Tests some claims."""
  return [answer(CLAIMS[x], evidence) for x in letters]
