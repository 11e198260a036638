"""Claims a to c under other choices of what is measured.

One choice is changed at a time, but norms and scalings together. A choice that
changes a verdict is one that a paper has to name.
"""

from collections.abc import Sequence
import dataclasses

import pandas as pd

from analysis import iterations
from analysis.common import frames
from analysis.common import naming
from analysis.common import statistics
from analysis.study import claims as claims_lib
from analysis.study.claims import decay
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
# What norms and scalings are called.
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
_EXACT = 'exact RMS over all paths, Frobenius norm'
_COLUMNS = (
  'claim',
  'choice',
  'quantity',
  'depth',
  'mean',
  'half_width',
  'pairs',
  'corrected_p',
  'verdict',
  'verdict_as_fixed',
  'changes',
)


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
  add('ac', 'layers of a path sampled without replacement', layers='drawn')
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


def variations(evidence: Evidence, claims: str) -> pd.DataFrame:
  """Each claim under each choice, the fixed one first.

  Args:
    evidence: of the pairs.
    claims: letters; of those that no choice is about nothing is said.

  Returns:
    A row for each claim, ``choice``, ``quantity`` (the test's label) and
    ``depth``: ``mean``, ``half_width``, ``pairs``, ``corrected_p``,
    ``verdict``, ``verdict_as_fixed`` (of the choice that was fixed beforehand)
    and ``changes`` (whether the choice changes the verdict; where there are too
    few pairs for one it cannot).
  """
  rows = []
  for claim in [x for x in _TESTS if x in claims]:
    fixed = statistics.judge(_TESTS[claim](evidence))
    mine = [choice for letter, choice in choices() if letter == claim]
    for choice in (decay.FIXED, *mine):
      judged = statistics.judge(_TESTS[claim](evidence, choice))
      if choice != decay.FIXED and not any(x.test.sample.count for x in judged):
        continue  # Not measured in this study.
      rows += [
        _row(claim, choice.title, x, y.verdict)
        for x, y in zip(judged, fixed, strict=True)
      ]
  return pd.DataFrame(rows, columns=_COLUMNS)


def _row(claim, choice, judged, fixed):
  test = judged.test
  enough = test.sample.count >= statistics.LEAST_COUNT
  values = (
    claim,
    choice,
    test.label,
    test.depth,
    test.sample.mean,
    test.sample.half_width,
    test.sample.count,
    judged.corrected,
    judged.verdict,
    fixed,
    enough and judged.verdict != fixed,
  )
  return dict(zip(_COLUMNS, values, strict=True))


def without(
  answers: Sequence[claims_lib.Answer],
  evidence: Evidence,
  seeds: Sequence[int],
) -> list[str]:
  """Which verdicts change when exploratory pairs are left out, in a sentence.

  Args:
    answers: with all pairs.
    evidence: of all pairs.
    seeds: of those that are left out.
  """
  rest = evidence.without(seeds)
  if len(rest.seeds) < statistics.LEAST_COUNT:
    return []
  changed, count = [], 0
  for answer in answers:
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
    'exploratory pair' if len(seeds) == 1 else f'{len(seeds)} exploratory pairs'
  )
  return [
    f'Without the {which} (seed {", ".join(map(str, seeds))}) {len(changed)} of'
    f' {count} verdicts change{listed}.'
  ]


def summary(found: pd.DataFrame) -> list[str]:
  """Which choices change a verdict, and what the papers may have seen."""
  if found.empty:
    return []
  if found['pairs'].max() < statistics.LEAST_COUNT:
    lines = [
      'There are too few pairs for a verdict that a choice could change.'
    ]
    return lines + _column_closed(found)
  lines = []
  for claim, mine in found.groupby('claim'):
    changing = mine[mine['changes']]['choice'].unique()
    text = f': {"; ".join(changing)}' if len(changing) else ''
    lines.append(
      f'Claim {claim}: {len(changing)} of {mine["choice"].nunique() - 1} other'
      f' choices change a verdict{text}.'
    )
  return lines + _column_closed(found)


def _column_closed(found):
  """What products that end on a column update would have shown."""
  title = f'Sinkhorn read with {naming.iterations(50, closed=False)}'
  fixed, ended = (
    frames.select(found, claim='a', choice=x).set_index('depth')['mean']
    for x in (decay.FIXED.title, title)
  )
  both = pd.DataFrame({'closed': fixed, 'ended': ended}).dropna()
  if both.empty:
    return []
  lifted = both[both['ended'] > both['closed'] + _FLOOR].index
  turned = both[(both['closed'] <= 0) & (both['ended'] > 0)].index
  more = both[(both['closed'] > 0) & (both['ended'] > 2 * both['closed'])].index
  line = (
    'Rows of the same 50 iterations, ended on a column update, do not sum to 1.'
  )
  line += (
    f' At depth {_listed(lifted)} their products end on a floor that is no'
    ' property of the tokens.'
    if len(lifted)
    else ' The floor on which such products end is not reached at these depths.'
  )
  for depths, words in (
    (turned, 'a difference in the claimed direction'),
    (more, 'more than twice the claimed difference'),
  ):
    if len(depths):
      line += (
        f' An implementation that stops on a column update would see {words} at'
        f' depth {_listed(depths)}. The paper does not say where it stops.'
      )
  return [line]


def _listed(depths):
  return ' and '.join(str(int(x)) for x in depths)
