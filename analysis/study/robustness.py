"""Claims a to c under other choices of what is measured.

One choice is changed at a time, but norms and scalings together. A choice that
changes a verdict is one that a paper has to name.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math

from analysis import iterations
from analysis.common import naming
from analysis.common import statistics
from analysis.study import claims as claims_lib
from analysis.study import decay
from analysis.study.evidence import Evidence
from sinkformer_jax.rank import NORMS
from sinkformer_jax.rank import SCALINGS

# What a floor lifts a residual by at least, log10.
_FLOOR = 0.1

_TESTS = {
  'a': decay.path_products,
  'b': decay.layer_results,
  'c': decay.shallow_and_skips,
}
_SHORT = {
  statistics.HOLDS: 'holds',
  statistics.FAILS: 'does not',
  statistics.UNKNOWN: '?',
}
# How norms and scalings are called.
_NORMS = {'spectral': 'spectral', 'frobenius': 'Frobenius', 'composite': 'Dong'}
_SCALINGS = {
  'absolute': 'absolute',
  'relative': 'relative to the whole',
  'initial': 'relative to layer 0',
}
_AVERAGES = {
  'log10_of_mean': 'mean of residuals instead of log10',
  'log10_of_rms': 'RMS of residuals instead of mean of log10',
}
_CHANGED = 'c, what changes'
_EXACT = 'exact RMS over all paths, Frobenius norm'


@dataclasses.dataclass(frozen=True)
class Variation:
  """A test of a claim under a choice.

  Attributes:
    claim: its letter.
    choice: title of the choice.
    judged: the test.
    fixed: the verdict of the choice that was fixed beforehand.
  """

  claim: str
  choice: str
  judged: statistics.Judged
  fixed: str

  @property
  def changes(self) -> bool:
    """Whether the choice changes the verdict; where there is none it cannot."""
    return self.is_judged and self.judged.verdict != self.fixed

  @property
  def is_judged(self) -> bool:
    """Whether enough pairs have a number."""
    return self.judged.test.sample.count >= statistics.LEAST_COUNT


def choices() -> list[tuple[str, decay.Choice]]:
  """Claims and choices that differ from the fixed one."""
  found = []

  def add(claims, title, **fields):
    choice = dataclasses.replace(decay.FIXED, title=title, **fields)
    found.extend((claim, choice) for claim in claims)

  for norm in NORMS:
    for scaling in SCALINGS:
      words = f'{_NORMS[norm]} norm, {_SCALINGS[scaling]}'
      # Products of no factor are the same for both: relative to them is as
      # absolute.
      fixed = (norm, scaling) == (decay.FIXED.norm, decay.FIXED.path_scaling)
      if not fixed and scaling != 'initial':
        add('a', words, norm=norm, path_scaling=scaling)
      if (norm, scaling) != (decay.FIXED.norm, decay.FIXED.output_scaling):
        add('b', words, norm=norm, output_scaling=scaling)
      add('c', words, norm=norm, path_scaling=scaling, output_scaling=scaling)
  for average, words in _AVERAGES.items():
    add('abc', words, average=average)
  add('ac', _EXACT, quantity='exact RMS', norm='frobenius')
  add('ac', 'layers of a path drawn', layers='drawn')
  add('a', 'a skip as one more choice in each layer', factors=decay.WITH_SKIP)
  add('b', 'the FFN off', switches=decay.NO_FFN)
  add('b', 'attention skips off', switches=decay.NO_SKIP)
  add('bc', 'hidden states instead of attention results', output='hidden')
  add('abc', 'initial weights (step 0)', at=0)
  for num_iters, closed in iterations.READ:
    stack = naming.iterations(num_iters, closed)
    if (num_iters, closed) != (50, True):
      add('abc', f'Sinkhorn read with {stack}', stack=stack)
  return found


def variations(evidence: Evidence, claims: str) -> list[Variation]:
  """Each claim under each choice, the fixed one first.

  Args:
    evidence: of the pairs.
    claims: letters; of those that no choice is about nothing is said.
  """
  found = []
  for claim, tests in _TESTS.items():
    if claim not in claims:
      continue
    fixed = statistics.judge(tests(evidence))
    mine = [choice for letter, choice in choices() if letter == claim]
    for choice in (decay.FIXED, *mine):
      judged = statistics.judge(tests(evidence, choice))
      if choice != decay.FIXED and not any(x.test.sample.count for x in judged):
        continue  # Not measured in this study.
      found += [
        Variation(claim, choice.title, x, y.verdict)
        for x, y in zip(judged, fixed, strict=True)
      ]
  return found


def rows(found: Iterable[Variation]) -> list[dict]:
  """As a table."""
  return [
    {
      'claim': x.claim,
      'choice': x.choice,
      'quantity': x.judged.test.label,
      'depth': x.judged.test.depth,
      'mean': x.judged.test.sample.mean,
      'half_width': x.judged.test.sample.half_width,
      'pairs': x.judged.test.sample.count,
      'corrected_p': x.judged.corrected,
      'verdict': x.judged.verdict,
      'verdict_as_fixed': x.fixed,
      'changes': x.changes,
    }
    for x in found
  ]


def matrix(found: Sequence[Variation]) -> list[dict[str, str]]:
  """A line for each choice: verdicts, with a star where they are others.

  Of claim c, which has more tests, those that are others. None where there are
  too few pairs for any.
  """
  lines = {}
  if _most_pairs(found) < statistics.LEAST_COUNT:
    return []
  for x in found:
    line = lines.setdefault(x.choice, {'choice': x.choice})
    test, verdict = x.judged.test, 'too few'
    if x.is_judged:
      verdict = _SHORT[x.judged.verdict]
    where = '' if test.depth is None else f' at {test.depth}'
    if x.claim != 'c':
      line[f'{x.claim}{where}'] = f'{verdict}{" *" if x.changes else ""}'
      continue
    changed = line.setdefault(_CHANGED, '')
    if x.changes:
      also = f'{test.label}{where}: {verdict} *'
      line[_CHANGED] = f'{changed}\n{also}' if changed else also
  names = dict.fromkeys(name for line in lines.values() for name in line)
  return [{k: x.get(k, '') for k in names} for x in lines.values()]


def without(
  claims: Sequence[claims_lib.Answer],
  evidence: Evidence,
  seeds: Sequence[int],
) -> list[str]:
  """Which verdicts change when pairs are left out.

  Args:
    claims: with all pairs.
    evidence: of all pairs.
    seeds: of those that are left out; they had been looked at.
  """
  rest = evidence.without(seeds)
  if len(rest.seeds) < statistics.LEAST_COUNT:
    return []
  changed, count = [], 0
  for answer in claims:
    again = claims_lib.answer(answer.claim, rest)
    for before, after in zip(answer.judged, again.judged, strict=True):
      count += 1
      if before.verdict != after.verdict:
        test = before.test
        where = '' if test.depth is None else f' at {test.depth}'
        changed.append(
          f'{answer.claim.letter}, {test.label}{where}: {after.verdict}'
          f' ({before.verdict} with it)'
        )
  listed = f': {"; ".join(changed)}' if changed else ''
  which = (
    'pair that had been looked at beforehand'
    if len(seeds) == 1
    else f'{len(seeds)} pairs that had been looked at before others were added'
  )
  return [
    f'Without the {which} (seed {", ".join(map(str, seeds))}) {len(changed)} of'
    f' {count} verdicts change{listed}.'
  ]


def summary(found: list[Variation]) -> list[str]:
  """Which choices change a verdict, and what the papers may have seen."""
  if _most_pairs(found) < statistics.LEAST_COUNT:
    lines = ['Too few pairs for a verdict that a choice could change.']
    return lines * bool(found) + _open_rows(found)
  lines = []
  for claim in dict.fromkeys(x.claim for x in found):
    mine = [x for x in found if x.claim == claim]
    changing = dict.fromkeys(x.choice for x in mine if x.changes)
    number = len({x.choice for x in mine}) - 1
    text = f': {"; ".join(changing)}' if changing else ''
    lines.append(
      f'Claim {claim}: {len(changing)} of {number} other choices change a'
      f' verdict{text}.'
    )
  return lines + _open_rows(found)


def _most_pairs(found):
  return max((x.judged.test.sample.count for x in found), default=0)


def _open_rows(found):
  """What ending on a column update would have shown."""
  open_rows = f'Sinkhorn read with {naming.iterations(50, closed=False)}'
  at = {
    (x.choice, x.judged.test.depth): x.judged
    for x in found
    if x.claim == 'a' and not math.isnan(x.judged.test.sample.mean)
  }
  both = {
    depth: (at[decay.FIXED.title, depth], judged)
    for (choice, depth), judged in at.items()
    if choice == open_rows and (decay.FIXED.title, depth) in at
  }
  if not both:
    return []
  closed, ended = zip(*both.values(), strict=True)
  means = {d: [x.test.sample.mean for x in pair] for d, pair in both.items()}
  lifted = [d for d, (before, now) in means.items() if now > before + _FLOOR]
  turned = [d for d, (before, now) in means.items() if before <= 0 < now]
  more = [d for d, (before, now) in means.items() if now > 2 * before > 0]
  line = (
    'Path products of Sinkhorn minus those of softmax, log10, with rows closed:'
    f' {statistics.numbers(closed)}; if the same 50 iterations end on a column'
    f' update instead: {statistics.numbers(ended)}.'
  )
  line += (
    f' Rows are then off 1, and at {_listed(lifted)} products end on a floor'
    ' that has nothing to do with tokens.'
    if lifted
    else ' The floor on which such products end is not reached there.'
  )
  for depths, words in (
    (turned, 'the claimed direction'),
    (more, 'more of the claimed difference than there is'),
  ):
    if depths:
      line += (
        ' An implementation that stops on a column update would have seen'
        f' {words} at {_listed(depths)}; the paper does not say which it has.'
      )
  return [line]


def _listed(depths):
  return ' and '.join(map(str, depths))
