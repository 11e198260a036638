"""What the study's command refuses, says and analyses, in this process."""

import pytest

from analysis.study import estimate
from analysis.study import reproduction
from analysis.study import studies
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs


def reproduce(folder, *names, **changed):
  wanted = [y for x in names or ['mnist'] for y in studies.of(x, 'tiny')]
  return reproduction.Reproduction(wanted, folder, folder / 'out', **changed)


def runs_of(folder):
  (study,) = studies.of('mnist', 'tiny')
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
  names = ('mnist', 'random_control', 'theory')
  assert not reproduce(tmp_path, *names).run(dry_run=True)
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


def test_a_study_without_data_is_left_out_of_several(
  tmp_path, capsys, monkeypatch
):
  def step_seconds(runs, extra):
    if any('ag_news' in x.name for x in runs):
      raise errors.RunError('There is no AG News.')
    return {estimate.kind(x): 3.0 for x in runs}

  monkeypatch.setattr(estimate, 'step_seconds', step_seconds)
  assert not reproduce(tmp_path, 'ag_news', 'variants').run(dry_run=True)
  text = capsys.readouterr().out
  assert 'ag_news: not trained. There is no AG News.' in text
  assert '18 planned, 0 finished, 14 to be trained' in text
  assert 'mnist_softmax_tiny_pure/seed0: 20 steps, about 1 min' in text
  with pytest.raises(errors.RunError, match='no AG News'):
    reproduce(tmp_path, 'ag_news').run(dry_run=True)


def test_a_run_of_two_studies_is_trained_once(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(
    estimate,
    'step_seconds',
    lambda runs, extra: {estimate.kind(x): 1.0 for x in runs},
  )
  reproduce(tmp_path, 'mnist', 'variants').run(dry_run=True)
  text = capsys.readouterr().out
  # 4 and 14, and the first pair is of both.
  assert '16 planned, 0 finished, 16 to be trained' in text
  assert text.count('mnist_softmax_tiny/seed0:') == 1
