"""Time of a step: what must hold of any times."""

import jax

from analysis import step_time
from tests.analysis import conftest


def test_step_time(subjects, tmp_path):
  written = conftest.analyse('step_time', subjects, tmp_path)
  rows = written.summary.to_dict('records')
  times = [x for x in rows if x['quantity'] == step_time.SECONDS]
  (ratio,) = (x for x in rows if x['quantity'] == step_time.RATIO)
  assert [x['normalizer'] for x in times] == ['softmax', 'sinkhorn']
  assert ratio['normalizer'] == 'sinkhorn'
  for row in rows:
    assert 0 < row['smallest'] <= row['mean'] <= row['largest']
  softmax, sinkhorn = times
  assert (
    sinkhorn['smallest'] / softmax['largest']
    <= ratio['mean']
    <= sinkhorn['largest'] / softmax['smallest']
  )
  # Weights are still there: the step donates a copy.
  for subject in subjects:
    assert not any(x.is_deleted() for x in jax.tree.leaves(subject.run.params))
  alone = conftest.analyse('step_time', subjects[:1], tmp_path)
  assert alone.summary.empty
  assert 'it needs a softmax and a Sinkhorn run' in alone.notes[0]
