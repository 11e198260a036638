"""Learning curves: the table against the logged metrics."""

import json

from tests.analysis import conftest


def test_learning_curves(subjects, tmp_path):
  conftest.analyse('learning_curves', subjects, tmp_path)
  rows = conftest.read(tmp_path, 'learning_curves')
  logged = [
    json.loads(x)
    for x in (subjects[0].run.workdir / 'metrics.jsonl').read_text().split('\n')
    if x
  ]
  assert [
    float(x['mean'])
    for x in rows
    if x['run'] == 'softmax/seed0' and x['quantity'] == 'train/loss'
  ] == [x['train/loss'] for x in logged if 'train/loss' in x]
