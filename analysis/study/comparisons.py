"""Trainings side by side: the main numbers of every comparison of a study."""

from collections.abc import Mapping
from collections.abc import Sequence
import math

import pandas as pd

from analysis.common import frames
from analysis.common import statistics
from analysis.study import plan
from analysis.study.claims import causes
from analysis.study.claims import collapse
from analysis.study.claims import decay
from analysis.study.claims import training
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES

ByTag = Mapping[str, Evidence]
ACCURACY = 'test accuracy, points'


def tests(study: plan.Study, evidence: ByTag) -> pd.DataFrame:
  """The main numbers of every comparison, Sinkhorn minus softmax.

  Returns:
    A row for each ``training`` (title of the comparison), ``tested`` and
    ``depth``: ``mean``, ``half_width``, ``pairs``, ``corrected_p`` and
    ``verdict``. Verdicts are those of the claims; causes that were added later
    and what a training changes, pair by pair, have none. Verdicts of an
    exploratory study are empty.
  """
  rows = []
  for comparison in _with_pairs(study, evidence):
    own = evidence[comparison.tag]
    for tested, judged in _judged(own).items():
      rows += [_row(comparison, tested, x) for x in judged]
    rows += [
      _row(comparison, x.test.label, x, verdict=False)
      for x in statistics.judge(causes.added_causes(own))
    ]
    first = evidence[study.comparisons[0].tag]
    shared = sorted(set(own.seeds) & set(first.seeds))
    if own is not first and len(shared) >= statistics.LEAST_COUNT:
      rows += _changes(comparison, own, first, shared)
  table = pd.DataFrame(rows)
  if study.exploratory and len(table):
    table['verdict'] = ''
  return table


def _judged(evidence):
  """Corrected with all tests of their claims, so that verdicts are those."""
  of_causes = statistics.by_label(statistics.judge(causes.causes(evidence)))
  column_sums = statistics.judge(training.grows_doubly_stochastic(evidence))
  return {
    'path products': statistics.judge(decay.path_products(evidence)),
    'layer outputs': statistics.judge(decay.layer_results(evidence)),
    **{x: of_causes[x] for x in (causes.NORMALIZER, causes.LOGITS)},
    causes.MATCHED: of_causes[causes.MATCHED],
    'column sums of softmax (claim k)': column_sums[: len(evidence.depths)],
    ACCURACY: statistics.judge(training.accuracy(evidence)),
  }


def _row(comparison, tested, judged, verdict=True):
  test = judged.test
  return {
    'training': comparison.title,
    'tested': tested,
    'depth': test.depth,
    'mean': test.sample.mean,
    'half_width': test.sample.half_width,
    'pairs': test.sample.count,
    'corrected_p': judged.corrected if verdict else math.nan,
    'verdict': judged.verdict if verdict else '',
  }


def _changes(comparison, own, first, shared):
  """What another training changes, pair by pair."""
  for name, gap in (
    ('path products', decay.FIXED.paths),
    ('layer outputs', decay.FIXED.outputs),
  ):
    for depth in own.depths:
      ours, theirs = (gap(x, depth)[shared] for x in (own, first))
      test = statistics.of_pairs(name, depth, ours - theirs)
      (judged,) = statistics.judge([test])
      yield _row(comparison, f'{name}: what it changes', judged, verdict=False)


def levels(study: plan.Study, evidence: ByTag) -> pd.DataFrame:
  """Both models of every comparison by themselves, means over pairs.

  Returns:
    A row for each ``training``, ``quantity``, ``normalizer`` and ``depth``
    (missing for accuracies): ``mean``.
  """
  rows = []
  for comparison in _with_pairs(study, evidence):
    own = evidence[comparison.tag]
    quantities = {
      'path products': decay.PATHS,
      'layer outputs, relative': {
        'analysis': 'layer_outputs',
        'quantity': decay.FIXED.output,
        'ablation': decay.FULL,
        'norm': 'spectral',
        'scaling': 'relative',
      },
    }
    if study.exploratory:
      point = collapse.pure_point(own)
      quantities[f'tokens, exact, {point["ablation"]}'] = point
    for normalizer, name in NAMES.items():
      about = {'training': comparison.title, 'normalizer': name}
      found = training.recorded(own, normalizer, 'test accuracy').mean()
      rows.append(about | {'quantity': 'test accuracy, %', 'mean': 100 * found})
      rows += [
        about
        | {
          'quantity': quantity,
          'depth': depth,
          'mean': own.values(normalizer, **point, depth=depth).mean(),
        }
        for quantity, point in quantities.items()
        for depth in own.depths
      ]
  return pd.DataFrame(rows)


def _with_pairs(study, evidence) -> list[plan.Comparison]:
  return [x for x in study.comparisons if evidence[x.tag].seeds]


def losses(
  study: plan.Study,
  evidence: ByTag,
  diverged: Sequence[plan.PlannedRun] = (),
) -> pd.DataFrame:
  """Validation losses of the study's grid of trainings.

  Of each normalizer the training with the lowest loss of seed 0 is ``chosen``:
  the loss, as accuracies of a few thousand examples differ by less than they
  are known to, and of seed 0, which is trained at all rates. A training that
  diverged has an infinite loss. Empty until seed 0 is there at all rates.

  Returns:
    A row for each ``normalizer``, ``training`` and ``seed``: ``loss``, and
    whether it is of the ``chosen`` training.
  """
  lost = {(x.comparison.tag, x.normalizer, x.seed) for x in diverged}
  titles = {x.tag: x.title for x in study.comparisons}
  point = {'analysis': 'training', 'quantity': 'validation loss'}
  table = pd.DataFrame(
    [
      {
        'normalizer': normalizer,
        'tag': tag,
        'training': titles[tag],
        'seed': seed,
        'loss': math.inf
        if (tag, normalizer, seed) in lost
        else evidence[tag].value(normalizer, seed, **point),
      }
      for normalizer in NAMES
      for tag in study.grid
      for seed in sorted({0, *evidence[tag].seeds})
    ]
  )
  if table.empty or table[table['seed'] == 0]['loss'].isna().any():
    return pd.DataFrame()
  at_zero = table[table['seed'] == 0]
  best = at_zero.loc[at_zero.groupby('normalizer')['loss'].idxmin()]
  chosen = set(zip(best['normalizer'], best['tag'], strict=True))
  pairs = zip(table['normalizer'], table['tag'], strict=True)
  return table.assign(chosen=[x in chosen for x in pairs])


def tuned(
  study: plan.Study, evidence: ByTag, found: pd.DataFrame
) -> pd.DataFrame:
  """Path products and layer outputs, each normalizer at its own best training.

  Args:
    study: the study.
    evidence: of its comparisons.
    found: see `losses`.

  Returns:
    As `tests`, without verdicts; over all seeds that both trainings have.
  """
  if found.empty:
    return found
  chosen = found[found['chosen'] & (found['seed'] == 0)]
  best = dict(zip(chosen['normalizer'], chosen['tag'], strict=True))
  rows = [
    frames.select(evidence[tag].table, normalizer=normalizer)
    for normalizer, tag in best.items()
  ]
  own = Evidence(frames.concat(rows), evidence[study.grid[0]].depths[-1])
  title = 'each normalizer at its best learning rate'
  comparison = plan.Comparison('', title, tuple(own.seeds))
  return pd.DataFrame(
    [
      _row(comparison, test.label, judged, verdict=False)
      for tests_of in (
        decay.path_products,
        decay.layer_results,
        training.accuracy,
      )
      for judged in statistics.judge(tests_of(own))
      for test in [judged.test]
    ]
  )
