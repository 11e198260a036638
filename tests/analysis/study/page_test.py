"""Contents, files and page of a study, from made-up tables."""

import csv
import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.study import content as content_lib
from analysis.study import measure
from analysis.study import page
from analysis.study import results
from analysis.study import studies
from analysis.study.claims import causes
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs
from tests.analysis.study import synthetic


def measured_of(tables, tag):
  """Made-up rows of a comparison; trainings have recorded theirs."""
  rows = [
    x | {'tag': tag, 'setting': tag}
    for x in tables.rows()
    if x['analysis'] != 'training'
  ]
  return measure.Measured(pd.DataFrame(rows), [], 'revision 1')


def study_of(num_pairs, tmp_path, gap=-1.0):
  """Content of a made-up study with this many pairs."""
  (study,) = studies.of('mnist', 'full')
  runs = study.runs(tmp_path / 'runs')[: 2 * num_pairs]
  for run in runs:
    made_up_runs.make(run)
  measured = measured_of(synthetic.Tables(num_pairs=num_pairs, gap=gap), '')
  measured.notes.append('a note')
  return content_lib.of_runs(study, runs, [measured])


def of_ended(study, runs, measured):
  """Content of runs of which some have diverged."""
  finished = [x for x in runs if x.is_finished()]
  diverged = [x for x in runs if x.diverged()]
  return content_lib.of_runs(study, finished, measured, diverged)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Content and folder of a study with 5 pairs."""
  folder = tmp_path_factory.mktemp('study')
  content = study_of(5, folder)
  output = folder / 'mnist'
  content_lib.write(content, output)
  return results.read(output), output


def test_files(written):
  found, folder = written
  names = {x.name for x in folder.iterdir()}
  for name in ('tests', 'pairs', 'curves', 'depths', 'robustness', 'runs'):
    assert {f'{name}.csv', f'{name}.json'} <= names
  for figure in found['figures']:
    assert {f'{figure["name"]}.png', f'{figure["name"]}.svg'} <= names
  assert [x['name'] for x in found['figures']] == [
    'paths',
    'outputs',
    'training',
    'causes',
    'robustness',
    'iterations',
  ]
  assert sum(x.stat().st_size for x in folder.iterdir()) < 2e6
  with (folder / 'tests.csv').open() as file:
    tests = list(csv.DictReader(file))
  assert {x['claim'] for x in tests} == set('abcdefhiklmno')
  (one,) = (x for x in tests if x['claim'] == 'a' and x['depth'] == '12')
  assert float(one['mean']) == pytest.approx(-1, abs=0.1)
  assert one['verdict'] == 'contradicted'


def test_intervals_can_be_computed_from_the_numbers_of_pairs(written):
  """Independently of the code that tests: by scipy, from the files alone."""
  _, folder = written
  tests, pairs = (
    pd.read_csv(folder / f'{x}.csv').fillna({'depth': 0})
    for x in ('tests', 'pairs')
  )
  numbers = pairs.groupby(['claim', 'label', 'depth'])['value'].agg(list)
  checked = 0
  for row in tests.itertuples():
    values = numbers.get((row.claim, row.label, row.depth))
    if values is None:
      assert row.count == 0 or row.claim in 'gj'
      continue
    assert row.mean == pytest.approx(np.mean(values))
    if np.ptp(values) < 1e-12:
      # All are equal: scipy has no interval then.
      assert row.half_width == pytest.approx(0, abs=1e-12)
      continue
    interval = stats.t.interval(
      0.95, len(values) - 1, np.mean(values), stats.sem(values)
    )
    assert row.mean - row.half_width == pytest.approx(interval[0])
    p = stats.ttest_1samp(values, 0).pvalue
    if np.isnan(row.margin):
      assert row.p == pytest.approx(p)
    checked += 1
  assert checked > 50


def test_results_are_written_whole_or_not_at_all(written, monkeypatch):
  found, folder = written
  page.write(found)
  before = (folder / page.PAGE).read_text()

  def stop(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr('pathlib.Path.replace', stop)
    with pytest.raises(KeyboardInterrupt):
      page.write(found | {'notes': ['another']})
  assert (folder / page.PAGE).read_text() == before


def test_page(written):
  found, folder = written
  page.write(found)
  text = (folder / page.PAGE).read_text()
  assert not re.search(r'(src|href)="(?!data:|#)', text)
  assert text.count('data:image/png;base64,') == 6
  assert (
    'Path products of the Sinkhorn model decay faster than those of softmax at'
    ' depths 4, 12 and 24.'
  ) in text
  assert '--study=mnist --preset=full --claims=a' in text
  assert 'a note' in text
  assert 'made from a sample' in text
  for claim in found['claims']:
    assert claim['statement'] in text
  table = (folder / page.CLAIMS).read_text().splitlines()
  assert table[0] == (
    '| claim | study | tested | all | depth 4 | depth 12 | depth 24 | n |'
    ' verdict |'
  )
  labels = {
    (x['letter'], y['label']) for x in found['claims'] for y in x['tests']
  }
  assert len(table) == 2 + len(labels)
  assert table[2].startswith('| a. Products of trained')
  assert table[2].endswith('| 5 | contradicted |')


def test_no_cell_has_more_than_one_interval(written):
  found, folder = written
  page.write(found)
  text = (folder / page.PAGE).read_text()
  cells = re.findall(r'<td[^>]*>(.*?)</td>', text, re.DOTALL)
  lines = (folder / page.CLAIMS).read_text().splitlines()
  cells += [x for line in lines for x in line.split(' | ')]
  assert sum('±' in x for x in cells) > 50
  assert max(x.count('±') for x in cells) == 1


def test_two_pairs_give_no_verdict(tmp_path):
  found = content_lib.as_json(study_of(2, tmp_path))
  assert {x['verdict'] for x in found['claims']} == {'inconclusive'}
  assert any('fewer than 3' in x for x in found['notes'])
  assert any(
    '3 of 5 planned pairs are not finished' in x and '(seed 2, 3, 4)' in x
    for x in found['notes']
  )
  paths, *_ = page.answer(found)
  assert paths.endswith('2 pairs of runs, too few for a verdict.')
  assert {x['mnist'] for x in page.by_study([found])} == {'too few pairs'}


def test_that_less_is_measured_is_said(tmp_path):
  (study,) = studies.of('cats_vs_dogs', 'cpu')
  runs = study.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  measured = measured_of(synthetic.Tables(num_pairs=8), '1050steps')
  notes = content_lib.of_runs(study, runs, [measured]).notes
  assert (
    'Measured of 3 epochs of 1,119 photos, 224 pixels: 16 test examples, 50'
    ' paths of each depth, 8 examples for mechanism.'
  ) in notes
  assert any('pairs of seed 0, 1, 2 are exploratory' in x for x in notes)


def test_page_of_all_links_to_the_pages_of_studies(written):
  found, folder = written
  other = found | {'study': 'other', 'claims': found['claims'][1:2]}
  page.write_all([found, other], folder.parent)
  text = (folder.parent / page.PAGE).read_text()
  assert 'href="mnist/index.html"' in text
  assert 'data:image' not in text
  table = (folder.parent / page.CLAIMS).read_text().splitlines()[2:]
  assert [x.split(' | ')[1] for x in table[1:3]] == ['mnist', 'other']
  assert page.by_study([found, other])[:2] == [
    {
      'claim': 'a. Products of trained attention matrices decay more slowly'
      ' with Sinkhorn.',
      'mnist': 'contradicted',
      'other': '',
      'studies': '',
    },
    {
      'claim': 'b. The outputs of attention layers keep a larger relative'
      ' residual with Sinkhorn.',
      'mnist': 'contradicted',
      'other': 'contradicted',
      'studies': 'agree in 3 of 3 tests',
    },
  ]


def test_studies_that_differ():
  def content(study, verdicts):
    tests = [
      {'label': label, 'depth': depth, 'verdict': verdict, 'count': 3}
      for (label, depth), verdict in verdicts.items()
    ]
    claim = {'letter': 'a', 'statement': 'It is so.', 'verdict': 'long words'}
    return {'study': study, 'claims': [claim | {'tests': tests}]}

  (line,) = page.by_study(
    [
      content('one', {('x', 4): 'supported', ('x', 12): 'contradicted'}),
      content('two', {('x', 4): 'supported', ('y', 4): 'inconclusive'}),
      content('three', {('x', 12): 'supported', ('y', 4): 'supported'}),
    ]
  )
  assert line['one'] == 'long words'  # Of one label.
  assert line['two'] == 'supported in 1, inconclusive in 1 of 2 tests'
  # y is decided by one study alone.
  assert line['studies'] == 'agree in 1, differ in 1 of 2 tests'


def test_exploratory_comparisons_have_no_verdict(tmp_path):
  (study,) = studies.of('variants', 'cpu')
  runs = study.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  measured = [
    measured_of(synthetic.Tables(num_pairs=1, gap=1.0, noise=0.0), x.tag)
    for x in study.comparisons[:3]
  ]
  folder = tmp_path / 'variants'
  content_lib.write(content_lib.of_runs(study, runs, measured), folder)
  found = results.read(folder)
  assert not found['claims']
  assert [x['name'] for x in found['figures']] == ['comparisons', 'trainings']
  tests = found['tables']['comparisons']
  own = tests[tests['training'] == 'without FFN'].set_index(['tested', 'depth'])
  assert own.loc[('path products', 4), 'mean'] == pytest.approx(1)
  expected = {
    causes.NORMALIZER: 1,
    causes.LOGITS: 0,
    causes.EQUALLY_SHARP: 0,
    causes.NO_BIAS: 1,
    causes.REST: -1,
  }
  for name, mean in expected.items():
    assert own.loc[(name, 24), 'mean'] == pytest.approx(mean), name
  assert tests['verdict'].isna().all()
  levels = found['tables']['levels']
  levels = levels[levels['training'] == 'without FFN']
  levels = levels.set_index(['quantity', 'normalizer', 'depth'])['mean']
  assert levels['path products', 'softmax', 12] == pytest.approx(-4.8)
  assert levels['path products', 'Sinkhorn', 12] == pytest.approx(-3.8)
  (exact,) = {x for x, *_ in levels.index if x.startswith('tokens, exact')}
  assert levels[exact, 'softmax', 4] == pytest.approx(-27)
  page.write(found)
  text = (folder / page.PAGE).read_text()
  assert 'Exploratory: no claim is tested' in text
  assert 'id="claims"' not in text
  assert 'inconclusive<' not in text


def test_runs_that_diverged_are_said_to(tmp_path):
  (study,) = studies.of('variants', 'cpu')
  runs = [x for x in study.runs(tmp_path) if x.comparison.tag != 'half_pure']
  lost = 'mnist_softmax_half_noskip/seed0'
  for run in runs:
    made_up_runs.make(run, finished=run.name != lost)
    if run.name == lost:
      record = {'step': 7, 'where': 'the first bad layer is 1'}
      (run.workdir / 'diverged.json').write_text(json.dumps(record))
  tables = synthetic.Tables(num_pairs=1, gap=1.0, noise=0.0)
  measured = [
    measured_of(tables, x.tag)
    for x in study.comparisons
    if x.tag not in ('half_noskip', 'half_pure')
  ]
  found = of_ended(study, runs, measured)
  assert f'{lost} diverged: not finite at step 7' in ' '.join(found.notes)


def test_another_preset_is_refused(written):
  _, folder = written
  results.check_preset(folder, 'full')
  results.check_preset(folder.parent / 'new', 'cpu')
  with pytest.raises(errors.UserError, match='results of --preset=full'):
    results.check_preset(folder, 'cpu')


def test_learning_rates_are_chosen_on_validation_data(tmp_path):
  (study,) = studies.of('mnist', 'cpu')
  runs = [x for x in study.runs(tmp_path) if x.seed < 2]
  best = {'softmax': '1epoch', 'sinkhorn': '1epoch_lr2e-3'}
  for run in runs:
    made_up_runs.make(run)
    path = run.workdir / 'result.json'
    result = json.loads(path.read_text())
    chosen = run.comparison.tag == best[run.normalizer]
    # Seed 1 would choose another rate, but is not there at all rates.
    result['validation']['loss'] = 0.1 if chosen == (run.seed == 0) else 0.2
    # Accuracies say otherwise, and choose nothing.
    result['test']['accuracy'] = 0.5 if chosen else 0.9
    path.write_text(json.dumps(result))
  measured = [
    measured_of(
      synthetic.Tables(
        1 if tag == '1epoch_lr2.5e-4' else 2,
        2.0 if tag == '1epoch_lr2e-3' else 0.0,
        noise=0.0,
      ),
      tag,
    )
    for tag in study.grid
  ]

  def chosen_of(tables):
    own = tables['losses'][tables['losses']['chosen']]
    return own[own['seed'] == 0].set_index('normalizer')

  tables = content_lib.of_runs(study, runs, measured).tables
  assert dict(chosen_of(tables)['tag']) == best
  assert list(chosen_of(tables)['loss']) == [0.1, 0.1]
  tuned = tables['tuned'].set_index(['tested', 'depth'])
  assert tuned.loc[('path products', 4), 'mean'] == pytest.approx(2)
  assert tuned.loc[('path products', 4), 'pairs'] == 2
  (accuracy,) = tables['tuned'][tables['tuned']['tested'] == 'test accuracy'][
    'mean'
  ]
  assert accuracy == pytest.approx(0)
  # One that diverged is not chosen, and hides no other.
  softmax_best = tmp_path / 'mnist_softmax_1epoch' / 'seed0'
  (softmax_best / 'result.json').rename(softmax_best / 'kept')
  (softmax_best / 'diverged.json').write_text('{"step": 3, "where": ""}')
  tables = of_ended(study, runs, measured).tables
  assert chosen_of(tables)['tag']['softmax'] != '1epoch'
  assert np.isinf(tables['losses']['loss']).sum() == 1
  (softmax_best / 'diverged.json').unlink()
  (softmax_best / 'kept').rename(softmax_best / 'result.json')
  # One training of the grid is missing: nothing is chosen.
  rest = [x for x in runs if x.name != 'mnist_sinkhorn_1epoch_lr2e-3/seed0']
  tags = [x for x in study.grid if x != '1epoch_lr2e-3']
  measured = [x for x in measured if x.table['tag'][0] in tags]
  tables = content_lib.of_runs(study, rest, measured).tables
  assert tables['losses'].empty
  assert tables['tuned'].empty


def test_trainings_side_by_side(tmp_path):
  (study,) = studies.of('mnist', 'cpu')
  runs = [x for x in study.runs(tmp_path) if '3epochs' not in x.name]
  for run in runs:
    made_up_runs.make(run)
  measured = []
  for comparison, gap in zip(study.comparisons, (1.0, 3.0), strict=False):
    pairs = len(comparison.seeds)
    tables = synthetic.Tables(pairs, gap, rng_seed=pairs)
    measured.append(measured_of(tables, comparison.tag))
  found = content_lib.of_runs(study, runs, measured)
  written = found.tables['comparisons']
  tests = written.set_index(['training', 'tested', 'depth']).sort_index()
  first, second = (x.title for x in study.comparisons[:2])
  assert tests.loc[(first, 'path products', 4), 'verdict'] == 'supported'
  own = tests.loc[(second, 'path products', 12)]
  assert own['mean'] == pytest.approx(3, abs=0.2)
  assert own['pairs'] == 3
  # Pair by pair: 2 more, whatever the pairs have in common.
  change = tests.loc[(second, 'path products: what it changes')]
  assert list(change['mean']) == pytest.approx([2, 2, 2], abs=0.2)
  assert list(change['verdict']) == [''] * 3
  assert 'trainings' in [x.name for x in found.figures]
  # A test has one verdict, wherever it stands.
  of_claims = {
    (test.test.label, test.test.depth): test.corrected
    for answer in found.answers
    for test in answer.judged
  }
  same = {
    'path products': 'path products',
    causes.NORMALIZER: causes.NORMALIZER,
    causes.MATCHED: causes.MATCHED,
    'column sums of softmax (claim k)': (
      'spread of column sums at step 0 over that at the end'
    ),
  }
  compared = [
    (x['corrected_p'], of_claims[same[x['tested']], x['depth']])
    for x in written.to_dict('records')
    if x['training'] == study.comparisons[0].title and x['tested'] in same
  ]
  assert len(compared) == 12
  assert all(ours == theirs for ours, theirs in compared)
  # Of seed 0 the tests were made.
  assert 'Without the exploratory pair (seed 0)' in str(found.robustness)
