"""Trainings side by side: the main numbers of every comparison of a study."""

from collections.abc import Mapping
from collections.abc import Sequence
import math

from analysis.common import curves
from analysis.common import statistics
from analysis.study import decay
from analysis.study import others
from analysis.study import plan
from analysis.study.evidence import Evidence
from analysis.study.evidence import minus
from analysis.study.evidence import NAMES
from analysis.study.evidence import over_seeds

ByTag = Mapping[str, Evidence]
_ACCURACY = 'test accuracy, points'
_SHORT = {
  decay.EQUALLY_SHARP: 'Sinkhorn',
  decay.NO_BIAS: 'softmax without column bias',
  decay.REST: 'Sinkhorn minus that',
}


_PARTS = {
  decay.NORMALIZER: 'normalizer, same logits',
  decay.LOGITS: 'trained logits',
  **_SHORT,
  decay.EQUALLY_SHARP: 'as sharp as softmax on its logits: Sinkhorn',
}


def _judged(evidence: Evidence) -> dict[str, list[statistics.Judged]]:
  """The main numbers of a comparison, Sinkhorn minus softmax.

  Each is corrected with all tests of its claim, so that it has the verdict that
  it has there.
  """
  causes = statistics.by_label(statistics.judge(decay.causes(evidence)))
  column_sums = statistics.judge(others.grows_doubly_stochastic(evidence))
  return {
    'path products': statistics.judge(decay.path_products(evidence)),
    'layer outputs': statistics.judge(decay.layer_results(evidence)),
    'path products, same logits': causes[decay.NORMALIZER],
    'path products, entropy of softmax': causes[decay.MATCHED],
    'column sums of softmax (claim k)': column_sums[: len(evidence.depths)],
    _ACCURACY: statistics.judge(others.accuracy(evidence)),
  }


def rows(study: plan.Study, evidence: ByTag) -> list[dict]:
  """Every number, for a file; see `table`."""
  return [
    {
      'training': comparison.title,
      'tested': name,
      'depth': x.test.depth,
      'mean': x.test.sample.mean,
      'half_width': x.test.sample.half_width,
      'pairs': x.test.sample.count,
      'corrected_p': x.corrected,
      'verdict': x.verdict,
    }
    for comparison in _with_pairs(study, evidence)
    for name, judged in _judged(evidence[comparison.tag]).items()
    for x in judged
  ]


def table(study: plan.Study, evidence: ByTag) -> list[dict[str, str]]:
  """A line for each comparison, and what it changes; empty if there is one."""
  comparisons = _with_pairs(study, evidence)
  if len(comparisons) < 2:
    return []
  first = evidence[study.comparisons[0].tag]
  found = []
  for comparison in comparisons:
    own = evidence[comparison.tag]
    cells = {name: _cell(judged) for name, judged in _judged(own).items()}
    cells[_ACCURACY] += f'\n{_accuracies(own)}'
    cells['logits and entropy of softmax, over softmax (added later)'] = _added(
      own
    )
    pairs = str(len(own.seeds))
    found.append({'training': comparison.title, 'pairs': pairs} | cells)
    if own is not first and len(_shared(own, first)) >= statistics.LEAST_COUNT:
      found.append(_change(comparison, own, first))
  names = dict.fromkeys(name for line in found for name in line)
  return [{k: x.get(k, '') for k in names} for x in found]


def _added(evidence):
  """Causes that were added later: numbers, no verdicts."""
  judged = statistics.judge(decay.added_causes(evidence))
  return '\n'.join(
    f'{_SHORT[label]}: {statistics.numbers(members)}'
    for label, members in statistics.by_label(judged).items()
  )


def _change(comparison, own, first):
  """What another training changes, pair by pair."""
  shared = _shared(own, first)
  line = {
    'training': f'{comparison.title}: what it changes',
    'pairs': str(len(shared)),
  }
  for name, gap in (
    ('path products', decay.FIXED.paths),
    ('layer outputs', decay.FIXED.outputs),
  ):
    tests = []
    for depth in own.depths:
      ours, theirs = (
        {k: v for k, v in gap(x, depth).items() if k in shared}
        for x in (own, first)
      )
      tests.append(statistics.of_pairs(name, depth, minus(ours, theirs)))
    line[name] = _cell(statistics.judge(tests), verdict=False)
  return line


def _shared(own, first):
  return sorted(set(own.seeds) & set(first.seeds))


def exploratory(
  study: plan.Study,
  evidence: ByTag,
  diverged: Sequence[plan.PlannedRun] = (),
) -> list[dict[str, str]]:
  """Of comparisons without verdicts: both models themselves, no tests.

  Args:
    study: the study.
    evidence: of its comparisons.
    diverged: runs that did.
  """
  found = []
  for comparison in study.comparisons:
    own = evidence[comparison.tag]
    lost = [
      f'{NAMES[x.normalizer]} (seed {x.seed}) diverged: {x.diverged()}'
      for x in diverged
      if x.comparison == comparison
    ]
    if not own.seeds:
      if lost:
        line = {'training': comparison.title, 'pairs': '0'}
        found.append(line | {'test accuracy': '\n'.join(lost)})
      continue
    where = f'at {" / ".join(map(str, own.depths))}'
    found.append(
      {
        'training': comparison.title,
        'pairs': str(len(own.seeds)),
        'test accuracy': '\n'.join([_accuracies(own), *lost]),
        f'path products {where}': _both(own, decay.PATHS, decay.FIXED.paths),
        f'layer outputs, relative, {where}': _both(
          own,
          {
            'analysis': 'layer_outputs',
            'quantity': decay.FIXED.output,
            'ablation': decay.FULL,
            'norm': 'spectral',
            'scaling': 'relative',
          },
          decay.FIXED.outputs,
        ),
        f'parts of the difference of path products {where}': _parts(own),
        f'tokens with skips off, exact, {where}': _pure(own),
      }
    )
  names = dict.fromkeys(name for line in found for name in line)
  return [{k: x.get(k, '') for k in names} for x in found]


def _pure(evidence):
  point = decay.pure_point(evidence)
  return f'{_both(evidence, point)}\n({point["ablation"]})'


def _parts(evidence):
  """What the difference of path products is made of, see claim n."""
  means = {}
  for test in [*decay.causes(evidence), *decay.added_causes(evidence)]:
    means.setdefault(test.label, []).append(test.sample.mean)
  return '\n'.join(
    f'{name} {_at_depths(means[label], "+.2f")}'
    for label, name in _PARTS.items()
  )


def _both(evidence, point, gap=None):
  """Means of log10 of each normalizer at all depths, and the difference."""
  lines = []
  for normalizer, name in NAMES.items():
    means = [
      over_seeds(evidence.values(normalizer, **point, depth=x))
      for x in evidence.depths
    ]
    lines.append(f'{name} {_at_depths(means, ".3g")}')
  if gap:
    means = [over_seeds(gap(evidence, x)) for x in evidence.depths]
    lines.append(f'difference {_at_depths(means, "+.2f")}')
  return '\n'.join(lines)


def _at_depths(means, form):
  if all(map(math.isnan, means)):
    return 'no number'
  return ' / '.join(
    'no number' if math.isnan(x) else f'{x:{form}}' for x in means
  )


def _with_pairs(study, evidence) -> list[plan.Comparison]:
  return [x for x in study.comparisons if evidence[x.tag].seeds]


def _cell(judged, verdict=True):
  """Numbers of all depths, and a verdict below them."""
  numbers = statistics.numbers(judged)
  return f'{numbers}\n{statistics.overall(judged)}' if verdict else numbers


def _accuracies(evidence):
  """Test accuracy of both, in percent."""
  texts = []
  for normalizer, name in NAMES.items():
    values = others.trained(evidence, normalizer, 'test accuracy')
    texts.append(f'{name} {100 * over_seeds(values):.2f} %')
  return '\n'.join(texts)


def tuned(
  study: plan.Study,
  evidence: ByTag,
  diverged: Sequence[plan.PlannedRun] = (),
) -> list[dict[str, str]]:
  """The best learning rate of each normalizer, by its validation loss.

  The loss, as accuracies of a few thousand examples differ by less than they
  are known to. It is that of seed 0, which is trained at all rates; the two
  that are chosen are compared over all seeds that both have. Empty until seed 0
  is there at all rates; a training that diverged has an infinite loss.
  """
  losses = {x: _losses(x, study, evidence, diverged) for x in NAMES}
  if not study.grid or any(
    math.isnan(known[0]) for at in losses.values() for known in at.values()
  ):
    return []
  best = {
    normalizer: min(at, key=lambda tag, at=at: at[tag][0])
    for normalizer, at in losses.items()
  }
  titles = {x.tag: x.title for x in study.comparisons}
  found = [
    {
      'what': f'{name}: validation loss of seed 0 (of further seeds)',
      'value': '\n'.join(
        f'{_loss_text(known)}: {titles[tag]}'
        + (' (chosen)' if tag == best[normalizer] else '')
        for tag, known in losses[normalizer].items()
      ),
    }
    for normalizer, name in NAMES.items()
  ]
  chosen = Evidence(
    (
      row
      for normalizer, tag in best.items()
      for row in curves.select(evidence[tag].rows, normalizer=normalizer)
    ),
    evidence[study.grid[0]].depths[-1],
  )
  counted = statistics.pairs_text(len(chosen.seeds))
  for words, tests in (
    ('path products', decay.path_products(chosen)),
    ('layer outputs', decay.layer_results(chosen)),
  ):
    found.append(
      {
        'what': f'{words}, Sinkhorn minus softmax, log10 ({counted})',
        'value': _cell(statistics.judge(tests), verdict=False),
      }
    )
  found.append({'what': 'test accuracy', 'value': _accuracies(chosen)})
  return found


def _losses(normalizer, study, evidence, diverged):
  """Validation losses by comparison of the grid and seed; seed 0 always."""
  lost = {
    (x.comparison.tag, x.seed) for x in diverged if x.normalizer == normalizer
  }
  point = {'analysis': 'training', 'quantity': 'validation loss'}
  return {
    tag: {
      seed: math.inf
      if (tag, seed) in lost
      else evidence[tag].value(normalizer, seed, **point)
      for seed in sorted({0, *evidence[tag].seeds})
    }
    for tag in study.grid
  }


def _loss_text(losses):
  first, *others = (
    'diverged' if math.isinf(x) else f'{x:.4f}' for x in losses.values()
  )
  return f'{first} ({", ".join(others)})' if others else first
