"""What the study's command refuses, says and analyses, in this process."""

import pytest

from analysis.study import plan
from analysis.study import reproduction
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs


def reproduce(folder, study='mnist', **changed):
  studies = plan.studies(study, 'tiny')
  return reproduction.Reproduction(studies, folder, folder / 'out', **changed)


def runs_of(folder):
  (study,) = plan.studies('mnist', 'tiny')
  return study.runs(folder)


def test_claims_that_there_are_not(tmp_path):
  reproduce(tmp_path, letters=['a', 'o']).check()
  for letters in (['a', 'g'], ['ab'], ['']):
    with pytest.raises(errors.UserError, match='none of the claims of mnist'):
      reproduce(tmp_path, letters=letters).check()


def test_results_of_another_preset_are_left_alone(tmp_path):
  folder = tmp_path / 'out' / 'mnist'
  folder.mkdir(parents=True)
  (folder / 'claims.json').write_text('{"preset": "cpu"}')
  with pytest.raises(errors.UserError, match='holds results of --preset=cpu'):
    reproduce(tmp_path).check()
  # Claims alone are printed, and nothing is written.
  reproduce(tmp_path, letters=['a']).check()


def test_what_would_be_done(tmp_path, capsys):
  for run in runs_of(tmp_path):
    made_up_runs.make(run)
  assert not reproduce(tmp_path, 'all').run(dry_run=True)
  text = capsys.readouterr().out
  assert 'Studies: mnist, random_control, theory; preset tiny.' in text
  assert '4 planned, 4 finished, 0 to be trained' in text
  assert f'Results: {tmp_path}/out' in text
  assert not (tmp_path / 'out').exists()
  assert not (tmp_path / 'measured').exists()


def test_nothing_to_analyse(tmp_path):
  softmax, sinkhorn, *_ = runs_of(tmp_path)
  made_up_runs.make(softmax)
  made_up_runs.make(sinkhorn, finished=False)
  with pytest.raises(errors.RunError, match='No pair of runs .* of mnist is'):
    reproduce(tmp_path, analyse_only=True).run()
