"""Claims g to i: random matrices, and how many iterations are needed."""

import itertools

from analysis import iterations
from analysis import matched_control
from analysis.common import frames
from analysis.common import naming
from analysis.common import statistics
from analysis.common.statistics import of_pairs
from analysis.study import measure
from analysis.study import plan
from analysis.study.claims import decay
from analysis.study.claims.claim import at_depths
from analysis.study.claims.claim import Claim
from analysis.study.claims.claim import OF_LENGTH
from analysis.study.claims.claim import Tests
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES

# Of the test on random matrices: a share of what softmax decays by.
CONTROL_MARGIN = 0.1
# Of the test on 50 iterations, in log10 of the residual.
ITERATIONS_MARGIN = 0.05


def control(evidence: Evidence) -> Tests:
  """g: unrelated random matrices."""
  tests = []
  for ablation, scale, curves in _random_curves(evidence):
    softmax, sinkhorn = (curves[x] for x in NAMES)
    for depth in evidence.depths:
      tests.append(
        statistics.Test(
          f'logit scale {scale:g}, {ablation}',
          depth,
          statistics.welch(sinkhorn.loc[depth], softmax.loc[depth]),
          margin=CONTROL_MARGIN * abs(softmax.loc[depth, 'mean']),
        )
      )
  return tests


def _random_curves(evidence):
  """Ablation, logit scale, and the rows of each normalizer by depth."""
  rows = frames.select(
    evidence.table,
    analysis='random_control',
    norm='spectral',
    scaling='absolute',
  )
  if rows.empty:
    return
  for ablation, scale in itertools.product(
    rows['ablation'].unique(), rows['scale'].unique()
  ):
    own = frames.select(rows, ablation=ablation, scale=scale)
    yield (
      ablation,
      scale,
      {x: frames.select(own, normalizer=x).set_index('depth') for x in NAMES},
    )


def _control_details(evidence):
  """What softmax decays by, and where it does not."""
  lines = []
  for ablation, scale, curves in _random_curves(evidence):
    means = curves[plan.SOFTMAX]['mean']
    text = at_depths(evidence, lambda x, y=means: f'{y[x]:+.3g}')
    line = (
      f'Softmax, logit scale {scale:g}, {ablation}: log10 of the residual'
      f' {text}.'
    )
    if any(means[x] >= 0 for x in evidence.depths):
      line += (
        ' Above 0 nothing has decayed, and the margin of the test means little.'
      )
    lines.append(line)
  return lines


def random_decays_slower(evidence: Evidence) -> Tests:
  """h: random against trained."""
  tests = []
  for words in (matched_control.OWN, matched_control.UNIT):
    for normalizer, name in NAMES.items():
      for depth in evidence.depths:
        random = evidence.values(
          normalizer,
          analysis='matched_control',
          quantity=f'random path, {words}',
          ablation='no identities',
          norm='spectral',
          scaling='absolute',
          depth=depth,
        )
        trained = evidence.values(normalizer, **decay.PATHS, depth=depth)
        label = f'{name}, random logits of {words}'
        tests.append(of_pairs(label, depth, random - trained))
  return tests


def iterations_suffice(evidence: Evidence) -> Tests:
  """i: 50 iterations against 1000."""

  def products(count, depth):
    stack = {'analysis': 'iterations', 'stack': naming.iterations(count)}
    return evidence.values(plan.SINKHORN, **decay.PATHS | stack, depth=depth)

  return [
    of_pairs(
      'path products of 50 and of 1000 iterations',
      depth,
      products(50, depth) - products(1000, depth),
      ITERATIONS_MARGIN,
    )
    for depth in evidence.depths
  ]


def _iterations_details(evidence):
  """Column marginal errors, and the logits that cause them."""
  rows = frames.select(evidence.table, seed=evidence.seeds)
  errors = frames.select(
    rows, analysis='iterations', quantity='column error', at=measure.LAST
  )
  texts = []
  for count in iterations.COUNTS:
    own = frames.select(errors, stack=naming.iterations(count))
    if len(own):
      texts.append(
        f'{count}: {own["mean"].max():.1e} ({own["largest"].max():.1e})'
      )
  lines = [
    'Column marginal error of the trained logits by iterations, mean of the'
    f' worst layer (largest of all): {", ".join(texts)}.'
  ]
  for normalizer, name in NAMES.items():
    spread = frames.select(
      rows,
      analysis='matched_control',
      quantity='logit spread',
      normalizer=normalizer,
    )
    if len(spread):
      means = spread['mean']
      lines.append(
        f'Logit spread reached by {name} in training: {means.min():.2f} to'
        f' {means.max():.2f} in a layer, {means.mean():.2f} on average.'
      )
  return lines


CLAIMS = (
  Claim(
    letter='g',
    statement='Products of unrelated random matrices show no difference, also'
    ' with half of them the identity.',
    source='Lapenna et al. 2026, Appendix G',
    definition='Sinkhorn minus softmax, log10, over draws of logits, the same'
    ' for both (Welch intervals: rather too wide than too narrow): no'
    f' difference if it is below {CONTROL_MARGIN:.0%} of what softmax decays'
    ' by.',
    studies=('random_control',),
    analyses=('random_control',),
    tests=control,
    details=_control_details,
  ),
  Claim(
    letter='h',
    statement='Products of random matrices decay more slowly than those of'
    ' trained attention.',
    source='Lapenna et al. 2026, Appendix G',
    definition='Random minus trained, log10, same normalizer; Gaussian logits'
    " of the run's own spread in each layer, and of unit spread.",
    studies=('mnist',),
    analyses=('matched_control', 'path_products'),
    tests=random_decays_slower,
  ),
  Claim(
    letter='i',
    statement='50 iterations suffice.',
    source='Lapenna et al. 2026, Appendix F',
    definition='Path products of the trained logits with 50 minus those with'
    ' 1000 iterations, rows closed by a last update, log10 of the residual:'
    f' they suffice if it is nearer to 0 than {ITERATIONS_MARGIN:g}.',
    studies=OF_LENGTH,
    analyses=('iterations', 'matched_control'),
    tests=iterations_suffice,
    details=_iterations_details,
  ),
)
