"""What the study's command refuses, says and analyses, in this process."""

import dataclasses

import numpy as np
import pytest

from analysis.study import content
from analysis.study import estimate
from analysis.study import reproduction
from analysis.study import results
from analysis.study import studies
from sinkformer_jax import data
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs
from tests.analysis.study import page_test


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


def test_a_run_that_diverged_is_not_tried_again(tmp_path, capsys):
  lost, *rest = runs_of(tmp_path)
  for run in rest:
    made_up_runs.make(run)
  made_up_runs.make(lost, finished=False)
  (lost.workdir / 'diverged.json').write_text('{"step": 7, "where": ""}')
  assert not reproduce(tmp_path).run(dry_run=True)
  text = capsys.readouterr().out
  assert '4 planned, 3 finished, 0 to be trained' in text
  assert f'{lost.name} diverged (not finite at step 7)' in text
  assert f'remove {lost.workdir} to do so' in text


def test_nothing_to_analyse(tmp_path):
  softmax, sinkhorn, *_ = runs_of(tmp_path)
  made_up_runs.make(softmax)
  made_up_runs.make(sinkhorn, finished=False)
  with pytest.raises(errors.RunError, match='No pair of runs .* of mnist is'):
    reproduce(tmp_path, analyse_only=True).run()


def test_results_of_runs_that_are_elsewhere_are_kept(tmp_path, capsys):
  (study,) = studies.of('mnist', 'tiny')
  there = dataclasses.replace(page_test.study_of(2, tmp_path), study=study)
  folder = tmp_path / 'out' / 'mnist'
  content.write(there, folder)
  found = (folder / results.CONTENT).read_text()
  names = ('mnist', 'random_control')
  reproduce(tmp_path, *names, analyse_only=True).run()
  assert 'Not analysed. No pair of runs' in capsys.readouterr().out
  # A pair more here than there does not replace the two.
  for run in runs_of(tmp_path)[:2]:
    made_up_runs.make(run)
  reproduce(tmp_path, *names, analyse_only=True).run()
  text = capsys.readouterr().out
  assert f'Not analysed. {folder} has results of runs that' in text
  assert 'mnist_softmax/seed1' in text
  assert (folder / results.CONTENT).read_text() == found
  # They are on the page of all the same.
  assert f'Page of all studies: {tmp_path}/out/index.html' in text
  rows = (tmp_path / 'out' / 'claims.md').read_text()
  assert '| mnist | path products' in rows
  assert '| random_control |' in rows
  # So they are if another study alone is done.
  reproduce(tmp_path, 'random_control', analyse_only=True).run()
  assert (tmp_path / 'out' / 'claims.md').read_text() == rows
  with pytest.raises(errors.RunError, match='choose another --output'):
    reproduce(tmp_path, analyse_only=True).run()


@pytest.fixture
def second_steps(monkeypatch):
  """Steps of the runs that are timed take a second; gives their names."""
  timed = []

  def time_step(run, extra):
    timed.append(run.name)
    return 1.0

  monkeypatch.setattr(estimate, 'time_step', time_step)
  return timed


def test_a_study_without_data_is_left_out_of_several(
  tmp_path, capsys, second_steps, monkeypatch
):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  asked = {'data_dir': str(tmp_path)}
  names = ('ag_news', 'variants')
  assert not reproduce(tmp_path, *names, **asked).run(dry_run=True)
  text = capsys.readouterr().out
  assert 'ag_news: not trained. AG News was not found' in text
  assert '18 planned, 0 finished, 14 to be trained' in text
  assert 'mnist_softmax_tiny_pure/seed0: 20 steps, about 1 min' in text
  with pytest.raises(errors.DataError, match='AG News was not found'):
    reproduce(tmp_path, 'ag_news', **asked).run(dry_run=True)


def test_single_claims_need_the_main_comparison_alone(
  tmp_path, capsys, second_steps
):
  wanted = studies.of('variants', 'tiny')
  asked = reproduction.Reproduction(
    wanted, tmp_path, tmp_path / 'out', letters=['a']
  )
  asked.run(dry_run=True)
  assert '2 planned, 0 finished, 2 to be trained' in capsys.readouterr().out


def test_a_run_of_two_studies_is_trained_once(tmp_path, capsys, second_steps):
  reproduce(tmp_path, 'mnist', 'variants').run(dry_run=True)
  text = capsys.readouterr().out
  # 4 and 14, and the first pair is of both.
  assert '16 planned, 0 finished, 16 to be trained' in text
  assert text.count('mnist_softmax_tiny/seed0:') == 1
  # Of each normalizer one is timed.
  assert second_steps == [
    'mnist_softmax_tiny/seed0',
    'mnist_sinkhorn_tiny/seed0',
  ]


def test_time_of_a_training(tmp_path, second_steps):
  softmax, sinkhorn, *_ = runs_of(tmp_path)
  seconds = estimate.Estimator().seconds([softmax, sinkhorn])
  # 20 steps of 16 images; two validations and a test cost a third an image.
  splits = data.load(softmax.config().data).info.splits
  images = 2 * splits['validation'] + splits['test']
  evaluations = images / 3 / 16
  assert seconds[softmax.name] == pytest.approx(20 + 20 + evaluations)
  assert seconds[sinkhorn.name] == pytest.approx(20 + 1.3 * 20 + evaluations)


def test_work_of_texts_is_that_of_their_buckets():
  config = studies.of('ag_news', 'tiny')[0].runs(None)[0].config()
  config.model.update(num_layers=2, width=10, ffn_dim=30, ffn=True)
  dataset = data.Dataset(
    data.DatasetInfo(
      'made up', 2, (20,), {'train': 3, 'validation': 1, 'test': 1}, {}, 100
    ),
    {'train': {'length': np.array([3, 4, 9])}},
    preprocess=lambda batch: batch,
    bucket_lengths=(4, 20),
  )

  def layer(n):
    return 2 * n * (4 * 10**2 + 2 * 10 * 30) + 4 * n**2 * 10

  n = int(config.model.pooling == 'cls')
  mean = (2 * layer(4 + n) + layer(20 + n)) / 3
  work = estimate.training_work(config, dataset)
  assert work.step == pytest.approx(3 * config.batch_size * 2 * mean)
