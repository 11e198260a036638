"""The README: its examples run as they are, its numbers are the results'."""

import json
import re

import pytest

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


def claim_rows(study):
  """Letter, what was measured and verdict, of a study's table of claims."""
  section = README.split('## The study')[1].split('\n## ')[0]
  rows = re.findall(r'^\| ([a-o])\. .* \| (.*) \| (.*) \|$', section, re.M)
  others = {'g': 'random_control', 'j': 'theory'}
  return [x for x in rows if others.get(x[0], 'mnist') == study]


def effects(claim, digits):
  """The effects of a claim's tests as the README writes them."""
  for test in claim['tests']:
    if test['mean'] is not None:
      mean = f'{test["mean"]:+.{digits}f}'
      yield mean, None
      yield mean, f'{test["half_width"] or 0:.{digits}f}'


@pytest.mark.parametrize('study', ['mnist', 'random_control', 'theory'])
def test_claims_are_those_of_the_results(study):
  rows = claim_rows(study)
  assert {x[0] for x in rows} == {y for x, y in CLAIMS if x == study}
  for letter, measured, verdict in rows:
    claim = CLAIMS[study, letter]
    for mean, digits, half_width in EFFECT.findall(measured):
      known = set(effects(claim, len(digits)))
      assert (mean, half_width or None) in known, (letter, mean, half_width)
    verdicts = {x['verdict'] for x in claim['tests']}
    for words in ('holds', 'does not hold', 'cannot be told'):
      assert (words in verdict) == (words in verdicts), (letter, words)


def test_the_answer_is_that_of_the_results():
  answer = README.split('## Two commands')[0]
  found = [x for x in EFFECT.findall(answer) if x[2]]
  assert found
  text = (ROOT / 'analysis/results/mnist/claims.json').read_text('utf-8')
  sentences = ' '.join(json.loads(text)['robustness'])
  for mean, digits, half_width in found:
    known = {
      effect
      for (study, _), claim in CLAIMS.items()
      if study == 'mnist'
      for effect in effects(claim, len(digits))
    }
    said = f'{mean} ± {half_width}' in sentences
    assert said or (mean, half_width) in known, (mean, half_width)
