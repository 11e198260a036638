"""Claims on made-up tables: a known effect is found, and none is invented."""

import math

import pandas as pd
import pytest

from analysis.common import statistics
from analysis.study import claims
from analysis.study import evidence
from analysis.study import measure
from analysis.study import page
from analysis.study import robustness
from analysis.study.claims import causes
from analysis.study.claims import collapse
from analysis.study.claims import controls
from analysis.study.claims import decay
from analysis.study.claims import layers
from tests.analysis.study import synthetic

SUPPORTED, CONTRADICTED, INCONCLUSIVE = statistics.VERDICTS


def of(rows):
  """The evidence of rows."""
  return evidence.Evidence(pd.DataFrame(list(rows)), 24)


def verdicts(letter, tables):
  judged = claims.answer(claims.CLAIMS[letter], tables.evidence()).judged
  found = {}
  for x in judged:
    found.setdefault(x.test.label, []).append(x.verdict)
  return found


@pytest.mark.parametrize('letter', 'abl')
def test_gap_between_normalizers(letter):
  for gap, verdict in (
    (1.0, SUPPORTED),
    (-1.0, CONTRADICTED),
    (0.0, INCONCLUSIVE),
  ):
    found = verdicts(letter, synthetic.Tables(gap=gap))
    assert {x for y in found.values() for x in y} == {verdict}, gap
  # The same effect in 2 pairs is no verdict.
  found = verdicts(letter, synthetic.Tables(num_pairs=2, gap=1.0))
  assert {x for y in found.values() for x in y} == {INCONCLUSIVE}


def test_noise_seldom_gives_a_verdict():
  """Wrong verdicts under no effect: at most 5 % of claims, by Holm."""
  wrong = 0
  for seed in range(60):
    tables = synthetic.Tables(rng_seed=seed, noise=1.0)
    tests = causes.causes(
      of(
        [x for s in range(5) for x in tables.of_pair(s)]
        + [synthetic.row('x', 'sinkhorn', s, 0.0) for s in range(5)]
      )
    )
    wrong += any(x.verdict != INCONCLUSIVE for x in statistics.judge(tests))
  assert wrong <= 8  # 3 are expected; 9 or more have a chance of 0.4 %.


def test_where_the_gap_is():
  tables = synthetic.Tables(gap=1.0, rng_seed=1)

  def rows():
    for row in tables.rows():
      if row['normalizer'] == 'sinkhorn':
        if row['analysis'] == 'layer_outputs' and row['depth'] == 24:
          row['mean'] -= 0.9
        if row.get('ablation') == decay.WITH_SKIP:
          row['mean'] += 2
      yield row

  tests = decay.shallow_and_skips(of(rows()))
  found = {
    (x.test.label, x.test.depth): x.verdict for x in statistics.judge(tests)
  }
  assert found['layer outputs: gap at 4, over 24', None] == SUPPORTED
  assert found['path products: gap at 4, over 24', None] == INCONCLUSIVE
  label = 'path products: gap with skip, over without'
  assert [found[label, x] for x in synthetic.DEPTHS] == [SUPPORTED] * 3
  label = 'layer outputs: gap with skip, over without'
  assert [found[label, x] for x in synthetic.DEPTHS] == [INCONCLUSIVE] * 3


def test_a_smaller_deficit_is_no_larger_gap():
  tables = synthetic.Tables(gap=-3.0)

  def rows():
    for row in tables.rows():
      if row['normalizer'] == 'sinkhorn' and row['depth'] in (4, 12):
        row['mean'] += 1
      yield row

  found = of(rows())
  (label, _, gap, other), *_ = decay._gaps(found, decay.FIXED)
  assert label == 'path products: gap at 4, over 24'
  # -2 at 4 is above -3 at 24, and yet the claim is wrong.
  assert (gap - other).mean() > 0.8
  test = decay.shallow_and_skips(found)[0]
  assert test.sample.mean == pytest.approx(-2, abs=0.2)
  assert statistics.judge([test])[0].verdict == CONTRADICTED


def test_skip_against_the_rest():
  # Switching the skip off takes 5 away, the normalizer changes less or more.
  (found,) = verdicts('d', synthetic.Tables(gap=1.0)).values()
  assert found == [SUPPORTED] * 3
  (found,) = verdicts('d', synthetic.Tables(gap=8.0)).values()
  assert found == [CONTRADICTED] * 3


def test_residuals_below_float64_understate_the_skip():
  tables = synthetic.Tables(noise=0.0)

  def rows():
    for row in tables.rows():
      if 'skip off' in row.get('ablation', ''):
        row |= {'mean': -30.0, 'below_resolution': 50}
      yield row

  found = of(rows())
  tests = collapse.skips_matter_most(found)
  # 100 values of -30 and 50 below: those count as the floor, each by itself.
  mean = (100 * -30 + 50 * collapse.FLOOR) / 150
  assert [x.sample.mean for x in tests] == pytest.approx([-mean] * 3)
  (line,) = collapse._floor_details(found)
  assert '33 % at 4, 33 % at 12, 33 % at 24' in line
  assert not collapse._floor_details(tables.evidence())


def test_collapse():
  found = verdicts('e', synthetic.Tables())
  assert len(found) == 2
  assert {x for y in found.values() for x in y} == {SUPPORTED}
  tests = others_of('f', synthetic.Tables(noise=0.0))
  # One layer later, but for the 1 that is added before the logarithm.
  for test in tests:
    exact = math.log((1 + 3.0**test.depth) / (1 + 3.0 ** (test.depth - 1)), 3)
    assert test.sample.mean == pytest.approx(exact)


def others_of(letter, tables):
  return claims.CLAIMS[letter].tests(tables.evidence())


def test_random_and_trained():
  found = verdicts('h', synthetic.Tables())
  assert found['softmax, random logits of own spread'] == [SUPPORTED] * 3
  assert found['Sinkhorn, random logits of unit spread'] == [CONTRADICTED] * 3


def test_iterations():
  assert list(verdicts('i', synthetic.Tables(noise=0.005)).values()) == [
    [SUPPORTED] * 3
  ]
  tables = synthetic.Tables(noise=0.005)

  def rows():
    for row in tables.rows():
      if row['stack'] == '50 iterations':
        row['mean'] -= 0.3
      yield row

  tests = controls.iterations_suffice(of(rows()))
  assert [x.verdict for x in statistics.judge(tests)] == [CONTRADICTED] * 3


def test_column_sums():
  found = verdicts('k', synthetic.Tables())
  label = 'spread of column sums at step {} over that at the end'
  assert found[label.format(0)] == [CONTRADICTED] * 3
  assert found[label.format(100)] == [SUPPORTED] * 3


def test_cost():
  # 10^0.3 = 2 times as long is not "little more".
  assert list(verdicts('m', synthetic.Tables()).values()) == [[CONTRADICTED]]
  tables = synthetic.Tables(noise=0.0).evidence()
  answer = claims.answer(claims.CLAIMS['m'], tables)
  assert 'softmax 1.00 s, Sinkhorn 2.00 s' in answer.details[0]
  assert 'Sinkhorn over softmax 2.00, 2.00' in answer.details[0]


def test_causes():
  found = verdicts('n', synthetic.Tables(gap=1.0))
  assert found == {
    causes.NORMALIZER: [SUPPORTED] * 3,
    causes.LOGITS: [INCONCLUSIVE] * 3,
    causes.MATCHED: [INCONCLUSIVE] * 3,
    "Sinkhorn model at matched attention entropy (Sinkhorn's)": [INCONCLUSIVE]
    * 3,
    'softmax without the column bias of its logits': [INCONCLUSIVE] * 3,
  }
  tables = synthetic.Tables(gap=1.0).evidence()
  text = ' '.join(causes._details(tables))
  assert 'softmax logits, softmax +2.40; softmax logits, sinkhorn +3.40' in text
  # The two main effects are all there is.
  tests = causes.causes(tables)
  for i, depth in enumerate(synthetic.DEPTHS):
    whole = causes.whole_difference(tables, depth).mean()
    assert tests[i].sample.mean + tests[i + 3].sample.mean == pytest.approx(
      whole
    )
  # Nor is there more to the normalizer on the logits of softmax than these.
  added = [x.sample.mean for x in causes.added_causes(tables)]
  for i in range(3):
    assert added[i] == pytest.approx(added[i + 3] + added[i + 6])
    assert added[i] == pytest.approx(0, abs=0.2)
    assert added[i + 3] == pytest.approx(1, abs=0.2)


def test_control():
  rows = [
    synthetic.row(
      'random_control',
      normalizer,
      0,
      mean * depth,
      depth,
      norm='spectral',
      scaling='absolute',
      ablation='no identities',
      scale=scale,
    )
    for depth in synthetic.DEPTHS
    for scale, means in ((1.0, (-0.70, -0.72)), (3.0, (-0.2, -0.3)))
    for normalizer, mean in zip(('softmax', 'sinkhorn'), means, strict=True)
  ]
  table = of(rows)
  details = controls._control_details(table)
  assert '-2.8 at 4, -8.4 at 12, -16.8 at 24' in details[0]
  assert len(details) == 2
  assert 'means little' not in ' '.join(details)
  tests = controls.control(table)
  judged = statistics.judge(tests)
  found = {}
  for x in judged:
    found.setdefault(x.test.label, []).append(x.verdict)
  assert found == {
    'logit scale 1, no identities': [SUPPORTED] * 3,
    'logit scale 3, no identities': [CONTRADICTED] * 3,
  }


def test_bounds():
  def rows(slack):
    for group in ('softmax', 'sinkhorn, 50 iterations'):
      yield group, -3.0
    for group in (
      'first-order bound, softmax',
      'first-order bound, sinkhorn',
      'bound for any logits',
      'bound of Lapenna et al., lambda 1',
    ):
      yield group, -3.0 + slack

  for slack, verdict in ((0.5, SUPPORTED), (-0.1, CONTRADICTED)):
    table = [
      synthetic.row(
        'theory',
        group.split(',')[0],
        None,
        mean,
        quantity='one layer',
        ablation='no mean token',
        group=group,
        logit_norm=norm,
      )
      for norm in (0.01, 0.03, 0.1)
      for group, mean in rows(slack)
    ]
    tests = layers.bounds_hold(of(table))
    assert len(tests) == 6
    assert {x.verdict for x in statistics.judge(tests)} == {verdict}


def test_lipschitz():
  for gap, verdict in ((1.0, SUPPORTED), (0.0, INCONCLUSIVE)):
    found = verdicts('o', synthetic.Tables(gap=gap))
    assert {x for y in found.values() for x in y} == {verdict}


def test_every_claim_says_where_it_is_from():
  assert ''.join(claims.CLAIMS) == 'abcdefghijklmno'
  for claim in claims.CLAIMS.values():
    assert claim.source
    assert claim.definition
    assert claim.statement.endswith('.')


def test_a_selection_is_not_used():
  rows = synthetic.Tables(gap=1.0).rows()
  table = list(rows)
  for row in table:
    if row['depth'] == 24 and row['analysis'] == 'path_products':
      row['below_resolution'] = 2
  tests = decay.path_products(of(table))
  assert [x.sample.count for x in tests] == [5, 5, 0]
  assert [x.verdict for x in statistics.judge(tests)] == [
    SUPPORTED,
    SUPPORTED,
    INCONCLUSIVE,
  ]


def test_depths():
  assert evidence.depths(24) == (4, 12, 24)
  assert evidence.depths(6) == (4, 6)
  assert evidence.depths(2) == (1, 2)
  assert evidence.depths(4) == (1, 4)


def test_runs_without_a_partner_are_left_out():
  tables = synthetic.Tables(num_pairs=3, gap=1.0)
  # The softmax run has been read with Sinkhorn too, which is no pair.
  assert ('lipschitz', 'sinkhorn') in {
    (x['analysis'], x['normalizer']) for x in tables.of_run('softmax', 2)
  }
  rows = [
    x
    for x in tables.rows()
    if (x.get('trained', x['normalizer']), x['seed']) != ('sinkhorn', 2)
  ]
  assert of(rows).seeds == [0, 1]


def test_robustness():
  # Closed rows: a difference against the claim. Rows that are not closed end
  # on a floor, far above.
  tables = synthetic.Tables(gap=-1.0)
  found = robustness.variations(tables.evidence(), 'abcn')
  changed = found[found['changes'] & (found['claim'] == 'a')]
  assert set(changed['choice']) == {
    f'Sinkhorn read with {n} iterations, ending on columns' for n in (5, 20, 50)
  }
  text = ' '.join(robustness.summary(found))
  assert 'Claim a: 3 of' in text
  assert (
    'column update would see a difference in the claimed direction at depth 12'
    ' and 24.'
  ) in text
  fixed = found[found['choice'] == decay.FIXED.title]
  assert not fixed['changes'].any()
  assert set(found['claim']) == {'a', 'b', 'c'}
  # Nothing of the kind is said where closed rows show the claimed direction.
  found = robustness.variations(synthetic.Tables(gap=3.0).evidence(), 'ab')
  assert set(found['claim']) == {'a', 'b'}
  assert not any(x.startswith('Claim c') for x in robustness.summary(found))
  assert 'in the claimed direction' not in ' '.join(robustness.summary(found))


def test_exploratory_pairs_can_be_left_out():
  # What five pairs tell, the last three do not.
  rows = [
    row | {'mean': row['mean'] + 3.0 * (row['seed'] - 3)}
    if row['seed'] > 1 and row['normalizer'] == 'sinkhorn'
    else row
    for row in synthetic.Tables(gap=9.0).rows()
  ]
  all_pairs = of(rows)
  answers = claims.answers('a', all_pairs)
  assert {x.verdict for x in answers[0].judged} == {SUPPORTED}
  (line,) = robustness.without(answers, all_pairs, (0, 1))
  assert line.startswith(
    'Without the 2 exploratory pairs (seed 0, 1) 3 of 3 verdicts change: a,'
    ' path products at 4: inconclusive'
  )
  # Two pairs alone have no verdict.
  assert not robustness.without(answers, all_pairs, (0, 1, 2))


def test_a_number_that_is_missing_changes_no_verdict():
  table = list(synthetic.Tables(gap=1.0).rows())
  for row in table:
    skipless = row['analysis'] == 'layer_outputs' and (
      'skip off' in row['ablation']
    )
    if skipless and row['depth'] > 4:
      row['below_resolution'] = 50
  found = robustness.variations(of(table), 'abc')
  own = found[found['choice'] == 'attention skips off']
  assert list(own['pairs']) == [5, 0, 0]
  assert set(own['verdict_as_fixed']) == {SUPPORTED}
  assert not own['changes'][1:].any()
  choices = page._choices(found)
  (row,) = (x for x in choices['rows'] if x['choice'] == 'attention skips off')
  assert row['cells'][choices['heads'].index('b at 12')] == 'too few'


def test_steps_are_kept_apart():
  tables = synthetic.Tables(gap=1.0)

  def rows():
    for row in tables.rows():
      if row['at'] != measure.LAST and row['normalizer'] == 'sinkhorn':
        row['mean'] -= 2
      yield row

  found = of(rows())
  initial = decay.path_products(found, decay.Choice(at=0))
  assert [x.verdict for x in statistics.judge(initial)] == [CONTRADICTED] * 3
  assert [x.verdict for x in statistics.judge(decay.path_products(found))] == [
    SUPPORTED
  ] * 3
