"""Contents, files and page of a study, from made-up tables."""

import csv
import json
import re

import pytest

from analysis.study import content as content_lib
from analysis.study import decay
from analysis.study import measure
from analysis.study import page
from analysis.study import studies
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs
from tests.analysis.study import synthetic


def measured_of(tables, tag):
  """Made-up rows of a comparison; trainings have recorded theirs."""
  return [
    x | {'tag': tag, 'setting': tag}
    for x in tables.rows()
    if x['analysis'] != 'training'
  ]


def study_of(num_pairs, tmp_path, gap=-1.0):
  """Content of a made-up study with this many pairs."""
  (study,) = studies.of('mnist', 'full')
  runs = study.runs(tmp_path / 'runs')[: 2 * num_pairs]
  for run in runs:
    made_up_runs.make(run)
  rows = measured_of(synthetic.Tables(num_pairs=num_pairs, gap=gap), '')
  measured = measure.Measured(rows, ['a note'], 'revision 1')
  return content_lib.of_runs(study, runs, [measured])


def of_ended(study, runs, measured):
  """Content of runs of which some have diverged."""
  finished = [x for x in runs if x.is_finished()]
  diverged = [x for x in runs if x.diverged()]
  return content_lib.of_runs(study, finished, [measured], diverged)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Content and folder of a study with 5 pairs."""
  folder = tmp_path_factory.mktemp('study')
  content = study_of(5, folder)
  output = folder / 'mnist'
  return content_lib.write(content, output), output


def test_files(written):
  found, folder = written
  names = {x.name for x in folder.iterdir()}
  for name in ('tests', 'curves', 'differences', 'depths', 'robustness'):
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
  assert one['verdict'] == 'does not hold'
  assert content_lib.read(folder)['claims'] == json.loads(
    json.dumps(found['claims'])
  )


def test_results_are_written_whole_or_not_at_all(
  written, tmp_path, monkeypatch
):
  found, folder = written
  page.write([found], [folder], tmp_path)
  before = (tmp_path / page.PAGE).read_text()

  def stop(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr('pathlib.Path.replace', stop)
  with pytest.raises(KeyboardInterrupt):
    page.write([found | {'notes': ['another']}], [folder], tmp_path)
  assert (tmp_path / page.PAGE).read_text() == before


def test_page(written):
  found, folder = written
  page.write([found], [folder], folder)
  text = (folder / page.PAGE).read_text()
  assert not re.search(r'(src|href)="(?!data:)', text)
  assert text.count('data:image/png;base64,') == 6
  assert re.search(
    'With Sinkhorn, products of trained attention matrices decay faster at'
    r' depth 4 \(-(0\.9|1\.0)',
    text,
  )
  assert '--study=mnist --preset=full --claims=a' in text
  assert 'a note' in text
  assert 'made from a sample' in text
  for claim in found['claims']:
    assert claim['statement'] in text
  table = (folder / page.CLAIMS).read_text().splitlines()
  assert table[0] == '| claim | tested | measured | n | verdict |'
  assert len(table) == 2 + sum(len(x['lines']) for x in found['claims'])
  assert table[2].startswith('| a. Products of trained')
  assert table[2].endswith('log10 | 5 | does not hold |')


def test_two_pairs_give_no_verdict(tmp_path):
  found = content_lib.as_json(study_of(2, tmp_path))
  assert {x['verdict'] for x in found['claims']} == {'cannot be told'}
  assert any('fewer than 3' in x for x in found['notes'])
  assert any(
    '3 of 5 planned pairs are not finished' in x and '(seed 2, 3, 4)' in x
    for x in found['notes']
  )
  about, paths, *_ = page.answer(found)
  assert '2 pairs of runs' in about
  assert about.endswith('not tested:')
  assert 'differ from those of softmax by -' in paths
  assert {x['mnist'] for x in page.by_study([found])} == {'too few pairs'}


def test_that_less_is_measured_is_said(tmp_path):
  (study,) = studies.of('cats_vs_dogs', 'cpu')
  runs = study.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  rows = measured_of(synthetic.Tables(num_pairs=8), '1050steps')
  measured = measure.Measured(rows, [], 'revision 1')
  notes = content_lib.of_runs(study, runs, [measured]).notes
  assert (
    'Measured of 3 epochs of 1,119 photos, 224 pixels: 16 test examples, 50'
    ' paths of each depth, 8 examples for mechanism.'
  ) in notes
  assert any(x.startswith('All pairs but those of seed 0, 1, 2') for x in notes)


def test_several_studies_on_one_page(written, tmp_path):
  found, folder = written
  other = found | {'study': 'other'}
  page.write([found, other], [folder, folder], tmp_path)
  text = (tmp_path / page.PAGE).read_text()
  assert text.count('data:image/png;base64,') == 12
  table = (tmp_path / page.CLAIMS).read_text().splitlines()[2:]
  assert [x.split(' | ')[1] for x in table[:2]] == ['mnist', 'other']


def test_table_of_claims_by_study(written, tmp_path):
  found, folder = written
  other = found | {'study': 'other', 'claims': found['claims'][1:2]}
  assert page.by_study([found, other])[:2] == [
    {
      'claim': 'a. Products of trained attention matrices decay more slowly'
      ' with Sinkhorn.',
      'mnist': 'does not hold',
      'other': '',
      'studies': '',
    },
    {
      'claim': 'b. So do the outputs of the layers.',
      'mnist': 'does not hold',
      'other': 'does not hold',
      'studies': 'agree in 3 of 3 tests',
    },
  ]
  page.write([found, other], [folder, folder], tmp_path)
  assert '<th>other</th>' in (tmp_path / page.PAGE).read_text()


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
      content('one', {('x', 4): 'holds', ('x', 12): 'does not hold'}),
      content('two', {('x', 4): 'holds', ('y', 4): 'cannot be told'}),
      content('three', {('x', 12): 'holds', ('y', 4): 'holds'}),
    ]
  )
  assert line['one'] == 'long words'  # Of one label.
  assert line['two'] == 'holds in 1, cannot be told in 1 of 2 tests'
  # y is decided by one study alone.
  assert line['studies'] == 'agree in 1, differ in 1 of 2 tests'


def test_exploratory_comparisons_have_no_verdict(tmp_path):
  (study,) = studies.of('variants', 'cpu')
  runs = study.runs(tmp_path)
  rows = []
  for run in runs:
    made_up_runs.make(run)
  for comparison in study.comparisons[:3]:
    tables = synthetic.Tables(num_pairs=1, gap=1.0, noise=0.0)
    rows += measured_of(tables, comparison.tag)
  measured = measure.Measured(rows, [], 'revision 1')
  content = content_lib.of_runs(study, runs, [measured])
  found = content_lib.write(content, tmp_path / 'variants')
  assert not found['claims']
  assert [x['name'] for x in found['figures']] == ['comparisons', 'trainings']
  table = found['tables']['Trainings side by side']
  assert table[1]['training'] == 'without FFN'
  assert table[1]['path products at 4 / 12 / 24'] == (
    'softmax -1.6 / -4.8 / -9.6\nSinkhorn -0.6 / -3.8 / -8.6\n'
    'difference +1.00 / +1.00 / +1.00'
  )
  name = 'parts of the difference of path products at 4 / 12 / 24'
  assert table[1][name].splitlines() == [
    'normalizer, same logits +1.00 / +1.00 / +1.00',
    'trained logits +0.00 / +0.00 / +0.00',
    'as sharp as softmax on its logits: Sinkhorn +0.00 / +0.00 / +0.00',
    'softmax without column bias +1.00 / +1.00 / +1.00',
    'Sinkhorn minus that -1.00 / -1.00 / -1.00',
  ]
  name = 'tokens with skips off, exact, at 4 / 12 / 24'
  assert table[2][name].startswith('softmax -27 /')
  assert 'cannot be told' not in str(table)
  page.write([found], [tmp_path / 'variants'], tmp_path / 'variants')
  text = (tmp_path / 'variants' / page.PAGE).read_text()
  assert 'Exploratory: no claim is tested' in text
  assert 'Claims' not in text


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
  rows = [
    x
    for comparison in study.comparisons
    if comparison.tag not in ('half_noskip', 'half_pure')
    for x in measured_of(tables, comparison.tag)
  ]
  measured = measure.Measured(rows, [], 'revision 1')
  found = of_ended(study, runs, measured)
  table = {x['training']: x for x in found.tables['Trainings side by side']}
  (line,) = (x for k, x in table.items() if k.startswith('without skips'))
  assert line['pairs'] == '0'
  assert line['test accuracy'] == (
    'softmax (seed 0) diverged: not finite at step 7'
  )
  assert not any('pure' in x for x in table)
  assert f'{lost} diverged: not finite at step 7' in ' '.join(found.notes)


def test_another_preset_is_refused(written):
  _, folder = written
  content_lib.check_preset(folder, 'full')
  content_lib.check_preset(folder.parent / 'new', 'cpu')
  with pytest.raises(errors.UserError, match='results of --preset=full'):
    content_lib.check_preset(folder, 'cpu')


def test_learning_rates_are_chosen_on_validation_data(tmp_path):
  (study,) = studies.of('mnist', 'cpu')
  runs = [x for x in study.runs(tmp_path) if x.seed < 2]
  rows = []
  for run in runs:
    made_up_runs.make(run)
    path = run.workdir / 'result.json'
    result = json.loads(path.read_text())
    best = {'softmax': '1epoch', 'sinkhorn': '1epoch_lr2e-3'}
    chosen = run.comparison.tag == best[run.normalizer]
    # Seed 1 would choose another rate, but is not there at all rates.
    result['validation']['loss'] = 0.1 if chosen == (run.seed == 0) else 0.2
    # Accuracies say otherwise, and choose nothing.
    result['test']['accuracy'] = 0.5 if chosen else 0.9
    path.write_text(json.dumps(result))
  for tag in study.grid:
    gap = 2.0 if tag == '1epoch_lr2e-3' else 0.0
    pairs = 1 if tag == '1epoch_lr2.5e-4' else 2
    tables = synthetic.Tables(pairs, gap, noise=0.0)
    rows += measured_of(tables, tag)
  measured = measure.Measured(rows, [], 'revision 1')
  found = content_lib.of_runs(study, runs, [measured])
  softmax, sinkhorn, paths, _, accuracy = found.tables[
    'Learning rate tuned for each normalizer'
  ]
  rates = {'1epoch': '1e-3', '1epoch_lr2e-3': '2e-3'}
  for line, normalizer in ((softmax, 'softmax'), (sinkhorn, 'sinkhorn')):
    (chosen,) = re.findall(r'(.*) \(chosen\)', line['value'])
    assert chosen.startswith('0.1000 (0.2000): ')
    assert chosen.endswith(f'learning rate {rates[best[normalizer]]}')
  assert '(2 pairs)' in paths['what']
  assert paths['value'].startswith('+2.00 at 4')
  assert accuracy['value'] == 'softmax 50.00 %\nSinkhorn 50.00 %'
  # One that diverged is not chosen, and hides no other.
  softmax_best = tmp_path / 'mnist_softmax_1epoch' / 'seed0'
  (softmax_best / 'result.json').rename(softmax_best / 'kept')
  (softmax_best / 'diverged.json').write_text('{"step": 3, "where": ""}')
  found = of_ended(study, runs, measured)
  line, *_ = found.tables['Learning rate tuned for each normalizer']
  assert 'diverged (0.2000): one epoch at learning rate 1e-3\n' in line['value']
  assert line['value'].count('(chosen)') == 1
  (softmax_best / 'diverged.json').unlink()
  (softmax_best / 'kept').rename(softmax_best / 'result.json')
  # One training of the grid is missing: nothing is chosen.
  rest = [x for x in runs if x.name != 'mnist_sinkhorn_1epoch_lr2e-3/seed0']
  rows = [x for x in rows if x['tag'] != '1epoch_lr2e-3']
  measured = measure.Measured(rows, [], 'revision 1')
  found = content_lib.of_runs(study, rest, [measured])
  assert not found.tables['Learning rate tuned for each normalizer']


def test_trainings_side_by_side(tmp_path):
  (study,) = studies.of('mnist', 'cpu')
  runs = [x for x in study.runs(tmp_path) if '3epochs' not in x.name]
  for run in runs:
    made_up_runs.make(run)
  rows = []
  for comparison, gap in zip(study.comparisons, (1.0, 3.0), strict=False):
    pairs = len(comparison.seeds)
    tables = synthetic.Tables(pairs, gap, rng_seed=pairs)
    rows += measured_of(tables, comparison.tag)
  measured = measure.Measured(rows, [], 'revision 1')
  found = content_lib.of_runs(study, runs, [measured])
  first, second, change, *_ = found.tables['Trainings side by side']
  assert first['path products'].endswith('holds')
  assert second['pairs'] == '3'
  # Pair by pair: 2 more, whatever the pairs have in common.
  assert change['training'].endswith('5e-4: what it changes')
  numbers = re.findall(r'([+-][\d.]+) ±', change['path products'])
  assert [float(x) for x in numbers] == pytest.approx([2, 2, 2], abs=0.2)
  names = [x.name for x in found.figures]
  assert 'trainings' in names
  written = found.large_tables['comparisons']
  (one,) = (
    x
    for x in written
    if x['training'] == study.comparisons[1].title
    and (x['tested'], x['depth']) == ('path products', 12)
  )
  assert one['mean'] == pytest.approx(3, abs=0.2)
  assert one['pairs'] == 3
  # A test has one verdict, wherever it stands.
  of_claims = {
    (test.test.label, test.test.depth): test.corrected
    for answer in found.answers
    for test in answer.judged
  }
  same = {
    'path products': 'path products',
    'path products, same logits': decay.NORMALIZER,
    'path products, entropy of softmax': decay.MATCHED,
    'column sums of softmax (claim k)': (
      'spread of column sums at step 0 over that at the end'
    ),
  }
  compared = [
    (x['corrected_p'], of_claims[same[x['tested']], x['depth']])
    for x in written
    if x['training'] == study.comparisons[0].title and x['tested'] in same
  ]
  assert len(compared) == 12
  assert all(ours == theirs for ours, theirs in compared)
  # Of seed 0 the tests were made.
  assert 'Without the pair that had been looked at beforehand' in str(
    found.robustness
  )
