"""Which runs a study has, and which directories it takes for them."""

import json

import pytest

from analysis import theory
from analysis.study import measure
from analysis.study import plan
from analysis.study import studies
from sinkformer_jax import configuration
from sinkformer_jax import errors
from tests.analysis.study import made_up_runs


def study(name='mnist', preset='cpu'):
  (found,) = studies.of(name, preset)
  return found


def test_runs_of_a_night(tmp_path):
  runs = study().runs(tmp_path)
  assert len({x.name for x in runs}) == len(runs) == 26
  primary = [x for x in runs if x.comparison.tag == '1epoch']
  assert [x.name for x in primary[:3]] == [
    'mnist_softmax_1epoch/seed0',
    'mnist_sinkhorn_1epoch/seed0',
    'mnist_softmax_1epoch/seed1',
  ]
  assert len(measure.pairs(primary)) == 5
  by_name = {x.name: x for x in runs}
  slow = by_name['mnist_sinkhorn_1epoch_lr5e-4/seed2']
  assert slow.config().optimizer.learning_rate == 5e-4
  assert (slow.config().total_steps, slow.config().seed) == (859, 2)
  assert '--config.optimizer.learning_rate=0.0005' in slow.command()
  assert by_name['mnist_softmax_3epochs/seed0'].config().total_steps == 2577
  assert study().grid == (
    '1epoch',
    '1epoch_lr5e-4',
    '1epoch_lr2e-3',
    '1epoch_lr2.5e-4',
  )


def test_presets():
  assert {x.name for x in studies.of('all', 'quick')} == set(studies.STUDIES)
  for preset in studies.PRESETS:
    for found in studies.of('all', preset):
      assert found.preset == preset
      assert bool(found.comparisons) != bool(found.alone)
  # What `make quickstart` has trained is used.
  (softmax, _) = study(preset='quick').runs(made_up_runs.NOWHERE)
  assert softmax.name == 'mnist_softmax_quick/seed0'
  assert '--config=configs/mnist_softmax.py:quick' in softmax.command()


def test_every_planned_run_could_be_trained():
  for preset in studies.PRESETS:
    planned = {}
    for found in studies.of('all', preset):
      for run in found.runs(made_up_runs.NOWHERE):
        config = run.config()
        configuration.check(config)
        # A directory that two studies have is of the same run.
        text = config.to_json()
        assert planned.setdefault(run.name, text) == text
      for pair in measure.pairs(found.runs(made_up_runs.NOWHERE)):
        first, second = (x.config() for x in pair)
        different = configuration.differences(first.to_dict(), second.to_dict())
        assert set(different) <= {'model.normalizer', 'model.num_iters'}


def test_runs_that_are_there(tmp_path):
  runs = study(preset='tiny').runs(tmp_path)
  assert not any(x.is_finished() for x in runs)
  assert runs[0].kept_steps() == [0, 20]
  made_up_runs.make(runs[0])
  made_up_runs.make(runs[1], finished=False, step=10)
  assert runs[0].is_finished()
  assert (runs[1].is_finished(), runs[1].steps_done()) == (False, 10)
  plan.check(runs)


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda x: x.update(total_steps=30), 'config.total_steps is 30, not 20'),
    (lambda x: x['model'].update(width=32), 'config.model.width is 32, not 16'),
    (lambda x: x.update(seed=4), 'config.seed is 4, not 0'),
  ],
)
def test_another_config_is_refused(tmp_path, change, words):
  runs = study(preset='tiny').runs(tmp_path)
  made_up_runs.make(runs[0], change)
  with pytest.raises(errors.RunError) as error:
    plan.check(runs)
  assert words in str(error.value)
  assert str(runs[0].workdir) in str(error.value)


def test_what_changes_no_training_is_let_pass(tmp_path):
  def change(fields):
    fields['data'].update(dir='elsewhere', source='auto')
    fields.update(log_every_steps=1)
    # A field that older code did not have.
    del fields['model']['deepnorm']
    # It means nothing to softmax.
    fields['model']['num_iters'] = 99

  runs = study(preset='tiny').runs(tmp_path)
  made_up_runs.make(runs[0], change)
  plan.check(runs)
  made_up_runs.make(runs[1], change)
  with pytest.raises(errors.RunError, match='num_iters is 99, not 5'):
    plan.check(runs)


def test_other_data_is_refused(tmp_path):
  runs = study(preset='tiny').runs(tmp_path)
  made_up_runs.make(runs[0])
  made_up_runs.make(runs[1])
  path = runs[1].workdir / 'provenance.json'
  content = json.loads(path.read_text())
  content['data'].update(fingerprint='other', origin='elsewhere')
  path.write_text(json.dumps(content))
  with pytest.raises(errors.RunError, match='was trained on elsewhere, and'):
    plan.check(runs)


def test_schedules_of_the_sinkformers_are_shortened_in_proportion(tmp_path):
  for name in studies.GROUPS['sinkformers']:
    whole, *_ = (x.config() for x in study(name, 'full').runs(tmp_path))
    (boundary,) = whole.optimizer.step_boundaries
    for preset in ('quick', 'cpu', 'tiny'):
      for run in study(name, preset).runs(tmp_path):
        config = run.config()
        (own,) = config.optimizer.step_boundaries
        share = boundary / whole.total_steps
        assert own == round(share * config.total_steps)


def test_jobs(tmp_path):
  found = study(preset='tiny')
  runs = found.runs(tmp_path)
  for run in runs[:3]:
    made_up_runs.make(run)
  finished = [x for x in runs if x.is_finished()]
  everything = {
    'path_products',
    'iterations',
    'mechanism',
    'attention',
    'step_time',
  }
  jobs = measure.jobs(found, finished, everything)
  # One pair, and one Sinkhorn run.
  assert [x.analysis for x in jobs].count('mechanism') == 1
  assert [x.analysis for x in jobs].count('iterations') == 1
  assert [x.analysis for x in jobs].count('step_time') == 1
  steps = [x.step for x in jobs if x.analysis == 'attention']
  assert steps == [0, 20] * 3
  assert all(x.seconds > 0 for x in jobs)
  assert not measure.jobs(found, finished, ())


def test_longer_sequences_take_longer_to_measure(tmp_path):
  found = study('cats_vs_dogs')
  runs = found.runs(tmp_path)
  small, large = (
    min(
      x.seconds / x.options['num_examples']
      for x in measure.jobs(found, [run], ['attention'])
    )
    for run in (runs[0], runs[-1])
  )
  # 17 and 197 tokens: (197 / 17)^2.3 = 280 times, but for what is fixed.
  assert 50 < large / small < 280


def test_a_measure_of_ones_own_is_measured_of_every_run(tmp_path):
  found = study(preset='tiny')
  runs = found.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  jobs = measure.jobs(found, runs, {'weight_of_self'})
  assert [x.runs[0].name for x in jobs] == [x.name for x in runs]
  assert {(x.analysis, x.step) for x in jobs} == {('weight_of_self', 20)}
  assert all(x.seconds > 0 for x in jobs)


def test_pure_attention_is_followed_exactly_where_it_was_trained(tmp_path):
  found = study('variants', 'tiny')
  runs = found.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  jobs = measure.jobs(found, runs, {'theory', 'attention'})
  assert {x.analysis for x in jobs} == {'theory'}
  assert len(jobs) == len(runs)


def test_of_long_sequences_less_is_measured(tmp_path):
  found = study('cats_vs_dogs')
  runs = found.runs(tmp_path)
  for run in runs:
    made_up_runs.make(run)
  jobs = measure.jobs(found, runs, {'path_products', 'mechanism', 'own'})
  sizes = {
    (job.runs[0].comparison.tag, job.analysis): job.options['num_examples']
    for job in jobs
  }
  assert sizes == {
    ('1050steps', 'path_products'): 64,
    ('1050steps', 'mechanism'): 16,
    ('1050steps', 'own'): 64,
    ('224px', 'path_products'): 16,
    ('224px', 'mechanism'): 8,
    ('224px', 'own'): 16,
  }


def test_column_sums_are_followed_in_all_comparisons(tmp_path):
  found = study()
  runs = [x for x in found.runs(tmp_path) if '3epochs' in x.name]
  for run in runs:
    made_up_runs.make(run)
  jobs = measure.jobs(found, runs, {'attention', 'lipschitz'})
  assert [x.step for x in jobs] == [0, 2577] * 2


def test_what_a_training_has_recorded(tmp_path):
  (run, *_) = study(preset='tiny').runs(tmp_path)
  made_up_runs.make(run)
  values = measure.training_table(run).set_index('quantity')['mean']
  # 32 examples a second, 4000 an epoch.
  assert values['seconds an epoch'] == 125


def test_a_name_for_what_is_measured(tmp_path, monkeypatch):
  found = study(preset='tiny')
  runs = found.runs(tmp_path)
  for run in runs[:2]:
    made_up_runs.make(run)
  first, second = measure.jobs(found, runs[:2], {'theory'})
  store = measure.Store(tmp_path / 'measured')
  names = {store.path(first), store.path(second)}
  # A run that was trained anew is another one.
  made_up_runs.make(runs[0], started='later')
  names.add(store.path(first))
  (more,) = measure.jobs(found, runs[:1], {'theory'})
  names.add(store.path(more))
  assert len(names) == 3
  assert not store.has(first)
  # So is one that was begun anew where another had been; one that went on not.
  path = runs[0].workdir / 'provenance.json'
  provenance = json.loads(path.read_text())
  for step, count in ((7, 3), (0, 4)):
    provenance['starts'].append({'time': f'start {step}', 'step': step})
    path.write_text(json.dumps(provenance))
    assert len(names | {store.path(more)}) == count
  # And an analysis that gives other numbers is too.
  monkeypatch.setattr(theory, 'VERSION', 'another', raising=False)
  assert store.path(more) not in names
