"""The cost table."""

import json

from analysis import cost
from tests.launch import launch_test


def test_rows():
  rows = cost.normalizer_rows(length=6, matrices=4, num_iters=3, repeats=2)
  assert [x['normalizer'] for x in rows[::2]] == [
    'softmax',
    'sinkhorn',
    'reference',
  ]
  for row in rows:
    assert 0 < row['min_ms'] <= row['median_ms'] <= row['max_ms']
    assert row['scratch_mb'] >= 0
  gradients = {x['normalizer']: x for x in rows if x['what'] != 'value'}
  # Both forms of Sinkhorn are the same function.
  errors = [gradients[x]['column_error'] for x in ('sinkhorn', 'reference')]
  assert abs(errors[0] - errors[1]) < 1e-5
  assert errors[0] < gradients['softmax']['column_error']


def test_command(tmp_path):
  output = tmp_path / 'cost.json'
  arguments = ['--lengths=5', '--matrices=2', '--repeats=1', '--num_iters=2']
  code, stdout, stderr = launch_test.run(
    'analysis.cost', *arguments, f'--output={output}'
  )
  assert code == 0, stderr
  assert 'times faster than automatic differentiation' in stdout
  assert len(json.loads(output.read_text())) == 6
  for wrong, words in (
    (f'--output={output}', 'exists'),
    ('--lengths=0', 'lengths'),
  ):
    line = launch_test.refused('analysis.cost', *arguments, wrong, code=1)
    assert words in line
  line = launch_test.refused(
    'analysis.cost', *arguments, '--num_iters=-1', code=2
  )
  assert 'num_iters' in line
