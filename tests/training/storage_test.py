"""Disks that are full, checkpoints that are damaged, runs that are older."""

import contextlib
import json
import resource
import shutil

import jax
import pytest

from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import evaluation
from tests.training import checkpoints_test
from tests.training import loop_test

pytestmark = checkpoints_test.pytestmark


@pytest.fixture
def workdir(tmp_path):
  return tmp_path / 'run'


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """A run of `short`, and its result."""
  from configs import mnist_sinkhorn

  config = short(mnist_sinkhorn.get_config('tiny'))
  workdir = tmp_path_factory.mktemp('undisturbed') / 'run'
  return workdir, training.train_and_evaluate(config, workdir)


def short(config):
  """Eight steps that are all saved, with validations at 2, 4, 6 and 8."""
  config.total_steps = 8
  config.log_every_steps = config.checkpoint.every_steps = 1
  config.eval_every_steps = 2
  return config


def assert_same_run(first, second):
  loop_test.assert_same_state(
    loop_test.restored_state(first), loop_test.restored_state(second)
  )
  assert loop_test.logged(first) == loop_test.logged(second)


@contextlib.contextmanager
def full_disk(limit):
  """Files cannot be larger than this, as if the disk were full."""
  # JAX would cut short what it keeps of compiled programs for all tests.
  name = 'jax_persistent_cache_min_compile_time_secs'
  least, (soft, hard) = (
    getattr(jax.config, name),
    resource.getrlimit(resource.RLIMIT_FSIZE),
  )
  jax.config.update(name, float('inf'))
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    jax.config.update(name, least)


# C04: no room for a file, whichever it is.
@pytest.mark.parametrize('limit', [0, 300, 2_000])
def test_full_disk(config, workdir, limit):
  with (
    full_disk(limit),
    pytest.raises(errors.RunError, match='could not be written'),
  ):
    training.train_and_evaluate(short(config), workdir)
  with checkpoints.Checkpoints(workdir, writable=True) as saved:
    assert saved.steps == []


# C04
@pytest.mark.slow
@pytest.mark.parametrize('limit', [0, 2_000, 30_000])
def test_full_disk_that_is_no_longer_full(config, workdir, undisturbed, limit):
  with (
    full_disk(limit),
    pytest.raises(errors.RunError, match='could not be written'),
  ):
    training.train_and_evaluate(short(config), workdir)
  assert not (workdir / 'result.json').exists()
  training.train_and_evaluate(config, workdir)
  assert_same_run(workdir, undisturbed[0])
  assert not list(workdir.rglob('*tmp*'))


# C03: the run goes on from the last complete step, and comes out the same.
@pytest.mark.slow
def test_damaged_newest_checkpoint(
  config, workdir, undisturbed, monkeypatch, caplog
):
  config = short(config)
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 5)
    training.train_and_evaluate(config, workdir)
  newest = workdir / 'checkpoints' / '5'
  for path in (newest / 'state' / 'd').iterdir():
    path.write_bytes(b'damaged')
  training.train_and_evaluate(config, workdir)
  assert f'{newest} is damaged' in caplog.text
  assert 'going back to step 4' in caplog.text
  assert (workdir / 'damaged_checkpoints' / '5').is_dir()
  assert_same_run(workdir, undisturbed[0])
  starts = json.loads((workdir / 'provenance.json').read_text())['starts']
  assert [x['step'] for x in starts] == [0, 4]


@pytest.mark.slow
def test_best_by_validation_loss_is_kept(config, workdir, monkeypatch):
  config = short(config)
  config.checkpoint.every_steps = 5
  config.checkpoint.keep = 1
  losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}
  original, evaluated = evaluation.evaluate, iter(losses.values())

  def evaluate(eval_step, params, dataset, split, *args):
    result = original(eval_step, params, dataset, split, *args)
    if split == 'validation':
      result['loss'] = next(evaluated)
    return result

  monkeypatch.setattr(evaluation, 'evaluate', evaluate)
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 3)
    training.train_and_evaluate(config, workdir)
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0, 2, 3]
  with monkeypatch.context() as m:
    loop_test.interrupt(m, 7)
    training.train_and_evaluate(config, workdir)
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0, 4, 7]
  result = training.train_and_evaluate(config, workdir)
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0, 4, 8]
  assert result['best_step'] == 4
  assert training.load_run(workdir, step=4).step == 4


@pytest.mark.slow
def test_last_step_can_be_the_best(undisturbed):
  workdir, result = undisturbed
  losses = {
    x['step']: x['validation/loss']
    for x in loop_test.logged(workdir)
    if 'validation/loss' in x
  }
  assert list(losses) == [2, 4, 6, 8]
  with checkpoints.Checkpoints(workdir) as saved:
    assert result['best_step'] in saved.steps
  assert losses[result['best_step']] == min(losses.values())


def begin(config, workdir):
  """A run that was stopped before its first step."""
  with pytest.MonkeyPatch.context() as m:
    loop_test.interrupt(m, 1)
    training.train_seeds(config, {config.seed: workdir})


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
  from configs import mnist_sinkhorn

  workdir = tmp_path_factory.mktemp('begun') / 'run'
  begin(short(mnist_sinkhorn.get_config('tiny')), workdir)
  return workdir


@pytest.fixture
def grown(config, begun, workdir, monkeypatch):
  """A stopped run from before config.model.remat and config.checkpoint."""
  config = short(config)
  shutil.copytree(begun, workdir)
  path = workdir / 'config.json'
  fields = json.loads(path.read_text())
  del fields['model']['remat'], fields['checkpoint']
  path.write_text(json.dumps(fields))
  added = {
    'model.remat': False,
    **{f'checkpoint.{k}': v for k, v in config.checkpoint.items()},
  }
  monkeypatch.setattr(configuration, 'ADDED', added)
  return config, added


def test_older_run_is_read(grown, workdir, caplog):
  config, added = grown
  run = training.load_run(workdir)
  assert run.config.to_dict() == config.to_dict()
  for field, value in added.items():
    assert f'from before config.{field}: read as {value!r}' in caplog.text


@pytest.mark.slow
def test_older_run_goes_on(grown, workdir, undisturbed, caplog):
  config, added = grown
  before = (workdir / 'config.json').read_bytes()
  training.train_and_evaluate(config, workdir)
  assert 'from before config.model.remat: read as False' in caplog.text
  assert_same_run(workdir, undisturbed[0])
  assert (workdir / 'config.json').read_bytes() == before
  starts = json.loads((workdir / 'provenance.json').read_text())['starts']
  assert 'filled_in' not in starts[0]
  assert starts[1]['filled_in'] == json.loads(json.dumps(added))


def test_older_run_keeps_its_ways(grown, workdir):
  # The new field cannot be changed for it.
  config, _ = grown
  config.model.remat = True
  with pytest.raises(errors.RunError, match='config.model.remat was False'):
    training.train_and_evaluate(config, workdir)


def test_config_without_a_field_that_it_must_have(grown, workdir, monkeypatch):
  monkeypatch.setattr(configuration, 'ADDED', {})
  with pytest.raises(errors.RunError, match='remat'):
    training.load_run(workdir)


def test_fields_that_were_added_are_right(config):
  fields = configuration.flatten(config.to_dict())
  for field, value in configuration.ADDED.items():
    if field in fields:
      config.update_from_flattened_dict({field: value})
  configuration.check(config)


def test_complete_leaves_whole_configs_alone(config):
  fields = config.to_dict()
  assert configuration.complete(fields) == (fields, {})


def test_an_older_run_says_so_in_the_analysis(grown, workdir):
  from analysis.common import runs

  (subject,) = runs.load([workdir])
  assert any('model.remat' in x for x in subject.notes())
  # It can be compared with one that has the field.
  config, _ = grown
  config.model.normalizer = 'softmax'
  other = workdir.parent / 'other'
  begin(config, other)
  assert len(runs.pairs(runs.load([workdir, other]))) == 1
