"""What a claim is, and what comes of it."""

from collections.abc import Callable
import dataclasses

from analysis.common import statistics
from analysis.study.evidence import Evidence
from analysis.study.evidence import Values

Tests = list[statistics.Test]

# Studies by what they have; see `studies`.
OF_LENGTH = ('mnist', 'ag_news', 'cats_vs_dogs')
SINKFORMERS = ('sinkformers_cats_vs_dogs', 'sinkformers_imdb')
OF_RUNS = (*OF_LENGTH, 'variants', *SINKFORMERS)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim.

  Attributes:
    letter: short name.
    statement: what is claimed.
    source: by whom, and where.
    definition: what is tested.
    tests: from the evidence; numbers are above 0 where the claim is right.
    studies: names of those that answer it.
    analyses: modules that measure it; none if the training has recorded it.
    details: further numbers, as text.
    unit: of the tests' numbers.
    ratio: if given, the tests' numbers are log10 of this over a ratio, and the
      ratio is what is shown.
  """

  letter: str
  statement: str
  source: str
  definition: str
  tests: Callable[[Evidence], Tests]
  studies: tuple[str, ...]
  analyses: tuple[str, ...] = ()
  details: Callable[[Evidence], list[str]] = lambda evidence: []
  unit: str = 'log10'
  ratio: float | None = None

  def number(self, sample: statistics.Sample) -> str:
    """The mean of a test's numbers and its interval, as text."""
    if self.ratio is None:
      return statistics.number(sample)
    return statistics.ratio(self.ratio, sample)


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


def number(values: Values) -> str:
  """The mean of numbers of pairs with its interval, as text."""
  return statistics.number(statistics.of_pairs('', None, values).sample)


def at_depths(evidence: Evidence, text: Callable[[int], str]) -> str:
  """A text for each depth of the verdicts: ``... at 4, ... at 12``."""
  return ', '.join(f'{text(x)} at {x}' for x in evidence.depths)
