"""The README: its examples run as they are, its numbers are the results'."""

import json
import re

import pytest

from analysis.common import statistics
from analysis.study import estimate
from analysis.study import page
from analysis.study import results as results_lib
from tests.conftest import ROOT
from tests.launch import launch_test

README = (ROOT / 'README.md').read_text()
# By the heading they stand under.
EXAMPLES = {
  section.partition('\n')[0]: code
  for section in re.split('^#+ ', README, flags=re.MULTILINE)
  for code in re.findall(r'```python\n(.*?)```', section, re.DOTALL)
}
# Signed numbers, with the half width of an interval or without.
EFFECT = re.compile(r'([+-]\d+\.(\d+))(?: ± (\d+\.\d+))?')
CLAIMS = {
  (path.parent.name, claim['letter']): claim
  for path in (ROOT / 'analysis' / 'results').glob('*/claims.json')
  for claim in json.loads(path.read_text())['claims']
}


def test_there_are_examples():
  assert set(EXAMPLES) == {
    'Your own normalizer',
    'Your own data set',
    'Your own measure',
    'Your own attention matrices',
    'What a model computes inside',
  }
  assert len(EXAMPLES) == README.count('```python')


@pytest.mark.parametrize(
  'heading',
  [
    # It trains twice.
    pytest.param(x, marks=pytest.mark.slow) if x == 'Your own measure' else x
    for x in EXAMPLES
  ],
)
def test_example(heading, tmp_path):
  launch_test.run_code(EXAMPLES[heading], cwd=tmp_path)


# Studies by the heads of columns; what MNIST does not answer others do.
STUDIES = {
  'MNIST': 'mnist',
  'AG News': 'ag_news',
  'Cats and Dogs': 'cats_vs_dogs',
}
ALONE = {'g': 'random_control', 'j': 'theory'}
VERDICTS = ('does not hold', 'holds', 'cannot be told')


def table(first):
  """Rows of the table whose head begins so, as cells by head, with letters."""
  (found,) = re.findall(rf'^\| {first} \|.*\n(?:\|.*\n)+', README, re.M)
  head, _, *rows = (
    [x.strip() for x in line.strip('|').split(' | ')]
    for line in found.splitlines()
  )
  return [
    dict(zip(head, row, strict=True)) | {'letter': row[0][0]} for row in rows
  ]


def results(study, name):
  """A file of a study's results, as text."""
  return (ROOT / 'analysis/results' / study / name).read_text('utf-8')


def effects(tests, digits):
  """The effects of tests as the README writes them."""
  for test in tests:
    if test['mean'] is not None:
      mean = f'{test["mean"]:+.{digits}f}'
      yield mean, None
      yield mean, f'{test["half_width"] or 0:.{digits}f}'


def check(claim, text, verdict):
  """That numbers are the claim's, and its tests have just these verdicts."""
  details = ' '.join(claim['details'])
  for mean, digits, half_width in EFFECT.findall(text):
    known = set(effects(claim['tests'], len(digits)))
    told = half_width and f'{mean} ± {half_width}' in details
    assert told or (mean, half_width or None) in known, (text, mean, half_width)
  verdicts = {x['verdict'] for x in claim['tests']}
  assert {x for x in VERDICTS if x in verdict} == verdicts, text


def test_claims_are_those_of_the_results():
  rows = table('claim \\| source')
  assert [x['letter'] for x in rows] == list('abcdefghijklmno')
  for row in rows:
    study = ALONE.get(row['letter'], 'mnist')
    check(CLAIMS[study, row['letter']], row['measured'], row['verdict'])


def test_claims_by_data_set_are_those_of_the_results():
  for row in table('claim \\| MNIST'):
    for name in STUDIES.keys() & row.keys():
      claim = CLAIMS.get((STUDIES[name], row['letter']))
      assert (claim is None) == (not row[name])
      if claim:
        check(claim, row[name], row[name])


def test_how_far_data_sets_agree_is_that_of_the_results():
  (told,) = re.findall(r'^Where two data sets .*\n(?:.+\n)+', README, re.M)
  told = ' '.join(told.split())
  folder = ROOT / 'analysis/results'
  found = [results_lib.read(folder / study) for study in STUDIES.values()]
  lines = [x['studies'] for x in page.by_study(found)]
  tests, agree = (
    sum(int(x) for line in lines for x in re.findall(pattern, line))
    for pattern in (r'of (\d+) tests', r'agree in (\d+)')
  )
  assert f'in {agree} of {tests} tests' in told
  assert tests - agree == 1
  own = {
    (study['study'], test['verdict'], *next(effects([test], 2)))
    for study in found
    for claim in study['claims']
    for test in claim['tests']
    if (test['label'], test['depth'])
    == ('both at the attention entropy of Sinkhorn', 4)
  }
  assert own >= {
    ('mnist', 'contradicted', '-0.18', None),
    ('cats_vs_dogs', 'supported', '+0.06', None),
  }
  assert [x[0] for x in EFFECT.findall(told)] == ['-0.18', '+0.06']


def test_the_answer_is_that_of_the_results():
  answer = README.split('## Two commands')[0]
  content = json.loads(results('mnist', 'claims.json'))
  tests = [y for x in content['claims'] for y in x['tests']]
  for name in ('comparisons.json', 'robustness.json'):
    tests += json.loads(results('mnist', name))
  details = [y for x in content['claims'] for y in x['details']]
  tuned = content['tables']['Learning rate tuned for each normalizer']
  sentences = ' '.join(
    content['robustness'] + details + [x['value'] for x in tuned]
  )
  pairs = ''
  for _, known in variants():
    pairs += re.sub(r' / |\n|$', ' at ', known['path products'])
  found = EFFECT.findall(answer)
  assert found
  for mean, digits, half_width in found:
    if half_width:
      known = (mean, half_width) in set(effects(tests, len(digits)))
      known = known or f'{mean} ± {half_width}' in sentences
    else:  # A single pair.
      known = f'{mean} at ' in pairs
    assert known, (mean, half_width)


def test_losses_of_learning_rates_are_those_of_the_results():
  (told,) = re.findall(r'^With the learning rate .*\n(?:.+\n)+', README, re.M)
  at = re.search(r'loss is (\S+) at 1e-3 and (\S+) at\s5e-4', told).groups()
  for said, tag in zip(at, ('1epoch', '1epoch_lr5e-4'), strict=True):
    losses = [
      x['mean']
      for x in json.loads(results('mnist', 'depths.json'))
      if x['quantity'] == 'validation loss'
      and (x['tag'], x['normalizer']) == (tag, 'sinkhorn')
      and x['seed'] < 3
    ]
    assert len(losses) == 3
    assert said == f'{sum(losses) / 3:.4f}'


def test_other_choices_are_those_of_the_results():
  (paragraph,) = re.findall(r'^What other .*\n(?:.+\n)+', README, re.M)
  tests = json.loads(results('mnist', 'robustness.json'))
  found = EFFECT.findall(paragraph.replace('\n', ' '))
  assert found
  for mean, digits, half_width in found:
    assert (mean, half_width) in set(effects(tests, len(digits)))


@pytest.mark.parametrize(
  ('begins', 'study', 'intervals'),
  [
    (r'\| path products \| at 4', 'mnist', False),
    ('On the logits of', 'mnist', False),
    ('At half the', 'mnist', True),
    ('After three epochs', 'mnist', False),
    ('At twice the', 'mnist', False),
    ('With the learning rate', 'mnist', False),
    ('Of the eight pairs', 'cats_vs_dogs', True),
    ('At 224 pixels', 'cats_vs_dogs', False),
    ('On AG News', 'ag_news', True),
    ('Cats and Dogs as', 'sinkformers_cats_vs_dogs', False),
    ('IMDb as', 'sinkformers_imdb', False),
  ],
)
def test_paragraphs_are_those_of_the_results(begins, study, intervals):
  (paragraph,) = re.findall(rf'^{begins} .*\n(?:.+\n)+', README, re.M)
  found = EFFECT.findall(paragraph.replace('\n', ' '))
  found = [x for x in found if x[2] or not intervals]
  assert found
  text = results(study, 'claims.json')
  for mean, _, half_width in found:
    # A single pair has no interval.
    said = f'{mean} ± {half_width}' if half_width else f'{mean} at '
    assert said in text, (mean, half_width)


def variants():
  """Of each variant: its name, and the results by the beginning of a head."""
  content = json.loads(results('variants', 'claims.json'))
  for line in content['tables']['Trainings side by side']:
    yield (
      line['training'],
      {
        begins: next(v for k, v in line.items() if k.startswith(begins))
        for begins in ('test accuracy', 'path products', 'layer out', 'parts')
      },
    )


def test_variants_are_those_of_the_results():
  rows = table('trained')
  assert [x['trained'] for x in rows] == [name for name, _ in variants()]
  for row, (_, known) in zip(rows, variants(), strict=True):
    paths, layers, parts = (
      known[x].splitlines() for x in ('path products', 'layer out', 'parts')
    )
    right = re.findall(r'[\d.]+', known['test accuracy'])
    assert row['right, %: softmax, Sinkhorn'].split(', ') == right
    assert f'softmax {row["path products of softmax"]}' in paths
    assert f'difference {row["Sinkhorn minus softmax"]}' in paths
    assert f'normalizer, same logits {row["on the same logits"]}' in parts
    outputs = row['layer outputs, Sinkhorn minus softmax']
    assert f'difference {outputs}' in layers


def test_what_goes_with_column_sums_is_that_of_the_results():
  (told,) = re.findall(r'^- The exception is .*\n(?:  .+\n)+', README, re.M)
  told = ' '.join(told.split())
  runs = json.loads(results('variants', 'claims.json'))['tables']['Runs']
  errors = {x['run']: x['largest column error'] for x in runs}
  # In the order in which they are told.
  tags = ('_noffn', '_deepnorm', '', '_talking', '_post')
  (said,) = re.findall(r'\(([^)]*)\)', told)
  assert re.findall(r'(\d+) (?:as|with)', said) == [
    errors[f'mnist_softmax_half{x}/seed0'] for x in tags
  ]
  titles = ('without FFN', 'DeepNorm', 'as in', 'talking', 'post-LayerNorm')
  at_24 = [
    [part.split(' / ')[-1] for part in known['parts'].splitlines()]
    for title in titles
    for name, known in variants()
    if name.startswith(title)
  ]
  expected = [x[2] for x in at_24] + [x[3] for x in at_24]
  assert [x[0] for x in EFFECT.findall(told)] == expected


def test_gaps_by_length_are_those_of_the_results():
  (paragraph,) = re.findall(r'^Products of texts .*\n(?:.+\n)+', README, re.M)
  means = {
    (x['normalizer'], x['seed'], f'{x["tokens"]:.0f}'): x['mean']
    for x in json.loads(results('ag_news', 'depths.json'))
    if x['analysis'] == 'sequence_length' and x['depth'] == 4
  }
  found = re.findall(
    EFFECT.pattern + r' at (\d+)', paragraph.replace('\n', ' ')
  )
  assert len(found) == 3
  for mean, _, half_width, tokens in found:
    gap = statistics.sample(
      means['sinkhorn', seed, tokens] - means['softmax', seed, tokens]
      for seed in range(3)
    )
    known = f'{gap.mean:+.2f}', f'{gap.half_width:.2f}'
    assert known == (mean, half_width), tokens


def test_the_makefile_and_the_readme_set_what_the_study_sets():
  (tunables,) = estimate.ENVIRONMENT.values()
  assert f'export GLIBC_TUNABLES={tunables}\n' in README
  makefile = (ROOT / 'Makefile').read_text()
  assert f'export GLIBC_TUNABLES ?= {tunables}\n' in makefile
