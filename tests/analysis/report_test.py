"""The report, its notes and its flags."""

import math
import re

import pandas as pd

from analysis import report
from analysis.common import command
from sinkformer_jax import training
from tests.launch import launch_test


def test_columns_that_are_off_are_named(subjects):
  subject = subjects[1]
  row = {'run': subject.name, 'column_error': 2.5e-2}

  def notes(subject, *rows):
    finished = command.Finished('path_products', pd.DataFrame(rows), [], [], [])
    text = ' '.join(command.notes([subject], [finished]))
    return 'not doubly' in text and '0.025' in text

  assert notes(subject, row | {'column_error': math.nan}, row)
  assert not notes(subject, row | {'column_error': 1e-3})
  assert not notes(subjects[0], row | {'run': subjects[0].name})


def flags_of(pair, output):
  workdirs = [f'--workdir={x}' for x in pair]
  return [*workdirs, f'--output={output}']


def test_report(runs, tmp_path):
  code, stdout, stderr = launch_test.run(
    'analysis.report',
    *flags_of(runs.values(), tmp_path / 'report'),
    '--num_examples=4',
    '--num_paths=5',
    '--num_draws=3',
    '--num_tokens=6',
    '--num_layers=3',
    '--scales=1',
    timeout=300,
  )
  assert code == 0, stderr
  assert '±' in stdout
  page = (tmp_path / 'report' / 'report.html').read_text()
  # Nothing is fetched.
  assert not re.search(r'(src|href)="(?!data:|#)', page)
  assert page.count('data:image/png;base64,') >= 10
  for name, title in report.ANALYSES.items():
    assert f'<h2 id="{name}">{title}</h2>' in page
  for words in (
    '2 pairs of runs.',
    'largest |column sum - 1|',
    'mlxtend',
    'softmax/seed1',
    'fingerprint',
    'Not finished',
  ):
    assert (words in page) == (words != 'Not finished'), words
  workdir = runs['softmax', 0]
  assert training.load_run(workdir).config.seed == 0


def test_wrong_flags(pair, tmp_path):
  (tmp_path / 'used').write_text('')
  for arguments, code, words in (
    (flags_of(pair, tmp_path), 1, 'is not empty'),
    ([f'--workdir={pair[0]}'], 2, 'output'),
    (
      [*flags_of(pair, tmp_path / 'new'), '--num_examples=0'],
      2,
      'num_examples',
    ),
    ([*flags_of([tmp_path], tmp_path / 'new')], 1, 'not a run directory'),
  ):
    line = launch_test.refused('analysis.path_products', *arguments, code=code)
    assert words in line
