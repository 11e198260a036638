"""Training, stopping, resuming, and what goes wrong on the way."""

import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import signal

import jax
import numpy as np
import pytest

from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import training
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import evaluation
from sinkformer_jax.training import loop
from sinkformer_jax.training import metrics as metrics_lib
from sinkformer_jax.training import sharding


@pytest.fixture
def workdir(tmp_path):
  return tmp_path / 'run'


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """An undisturbed tiny run with dropout: ``(config, workdir, result)``."""
  from configs import mnist_sinkhorn

  config = mnist_sinkhorn.get_config('tiny')
  config.model.dropout_rate = 0.1
  config.log_every_steps = 1
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  return config, workdir, training.train_and_evaluate(config, workdir)


def restored_state(workdir, step=None):
  """The whole saved state as a flat dict of arrays."""
  from orbax.checkpoint import v1 as ocp

  with ocp.training.Checkpointer(workdir.resolve() / 'checkpoints') as saved:
    return jax.tree.map(np.asarray, saved.load(step))


def assert_same_state(first, second):
  assert jax.tree.structure(first) == jax.tree.structure(second)
  jax.tree.map(np.testing.assert_array_equal, first, second)


def logged(workdir):
  """Metrics without what depends on the clock."""
  clock = ('examples_per_second', 'elapsed_s')
  return [
    {k: v for k, v in line.items() if k not in clock}
    for line in metrics_lib.read_metrics(workdir)
  ]


def at_step(monkeypatch, step, action):
  """Calls `action` when the batch of the update that makes `step` is drawn."""
  original = data.train_batch

  def train_batch(dataset, i, *args):
    batch = original(dataset, i, *args)
    return action(batch) or batch if i == step - 1 else batch

  monkeypatch.setattr(data, 'train_batch', train_batch)


def interrupt(monkeypatch, step, number=signal.SIGTERM):
  at_step(monkeypatch, step, lambda batch: os.kill(os.getpid(), number))


def test_run_directory(finished):
  config, workdir, result = finished
  assert {x.name for x in workdir.iterdir()} == {
    '.lock',
    'config.json',
    'provenance.json',
    'metrics.jsonl',
    'tensorboard',
    'checkpoints',
    'result.json',
  }
  assert json.loads((workdir / 'config.json').read_text())['seed'] == 0
  assert json.loads((workdir / 'result.json').read_text()) == result
  assert result['test']['count'] == result['validation']['count'] == 500
  assert result['step'] == 20
  provenance = json.loads((workdir / 'provenance.json').read_text())
  assert provenance['data']['splits']['train'] == 4000
  assert provenance['starts'][0]['versions']['jax'] == jax.__version__
  assert list((workdir / 'tensorboard').iterdir())
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0, 10, 20]
  lines = metrics_lib.read_metrics(workdir)
  assert [x['step'] for x in lines] == sorted([*range(1, 21), 10, 20])
  for line in lines:
    prefix = 'train' if 'train/loss' in line else 'validation'
    for name in ('loss', 'accuracy', 'row_error', 'column_error'):
      assert np.isfinite(line[f'{prefix}/{name}'])
    assert len(line[f'{prefix}/column_error_by_layer']) == 2
  train = lines[4]
  assert train['epoch'] == 5 / 250
  assert train['train/learning_rate'] == pytest.approx(1e-3)
  assert train['examples_per_second'] > 0
  assert restored_state(workdir, 0)['step'] == 0


def test_logged_numbers_are_those_of_the_batch(finished):
  # Recomputed from the saved state, without the training step.
  config, workdir, _ = finished
  run = training.load_run(workdir, step=10)
  batch = data.train_batch(data.load(config.data), 10, 16, seed=0)

  def loss_fn(params):
    logits = run.model.apply(
      {'params': params},
      batch['image'],
      deterministic=False,
      rngs={'dropout': jax.random.fold_in(jax.random.key(0), 10)},
    )
    picked = jax.nn.log_softmax(logits)[np.arange(16), batch['label']]
    return -picked.mean(), (logits.argmax(-1) == batch['label']).mean()

  (loss, accuracy), gradient = jax.jit(
    jax.value_and_grad(loss_fn, has_aux=True)
  )(run.params)
  norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
  (line,) = (x for x in metrics_lib.read_metrics(workdir) if x['step'] == 11)
  assert line['train/loss'] == pytest.approx(float(loss), rel=1e-5)
  assert line['train/accuracy'] == pytest.approx(float(accuracy))
  assert line['train/gradient_norm'] == pytest.approx(float(norm), rel=1e-4)


# C07
def test_same_seed_gives_the_same_run(finished, tmp_path):
  config, workdir, result = finished
  again = training.train_and_evaluate(config, tmp_path / 'again')
  assert again['test'] == result['test']
  assert_same_state(restored_state(tmp_path / 'again'), restored_state(workdir))
  assert logged(tmp_path / 'again') == logged(workdir)


# C07
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_resumed_equals_undisturbed(
  finished, workdir, monkeypatch, number
):
  config, undisturbed, result = finished
  for step in (1, 7, 13):
    with monkeypatch.context() as m:
      interrupt(m, step, number)
      assert training.train_and_evaluate(config, workdir) is None
    assert not (workdir / 'result.json').exists()
    with checkpoints.Checkpoints(workdir) as saved:
      assert saved.steps[-1] == step
  resumed = training.train_and_evaluate(config, workdir)
  assert resumed['test'] == result['test']
  assert_same_state(restored_state(workdir), restored_state(undisturbed))
  assert logged(workdir) == logged(undisturbed)
  provenance = json.loads((workdir / 'provenance.json').read_text())
  assert [x['step'] for x in provenance['starts']] == [0, 1, 7, 13]


# C09
@pytest.mark.parametrize('evaluation_number', [1, 2])
def test_stopped_during_evaluation(
  finished, workdir, monkeypatch, evaluation_number
):
  config, undisturbed, _ = finished
  original, calls = data.eval_batches, []

  def eval_batches(*args):
    calls.append(args)
    for i, batch in enumerate(original(*args)):
      if len(calls) == evaluation_number and i == 1:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  with monkeypatch.context() as m:
    m.setattr(data, 'eval_batches', eval_batches)
    assert training.train_and_evaluate(config, workdir) is None
  step = (10, 20)[evaluation_number - 1]
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps[-1] == step
  # A part of an evaluation is no result.
  assert len(logged(workdir)) == (10, 21)[evaluation_number - 1]
  training.train_and_evaluate(config, workdir)
  assert logged(workdir) == logged(undisturbed)


def test_signal_handlers_are_put_back(finished):
  config, workdir, _ = finished
  before = signal.getsignal(signal.SIGTERM)
  training.train_and_evaluate(config, workdir)
  assert signal.getsignal(signal.SIGTERM) is before


def contents(directory):
  return {
    x.relative_to(directory): (x.stat().st_mtime_ns, x.read_bytes())
    for x in pathlib.Path(directory).rglob('*')
    if x.is_file() and x.name != '.lock'
  }


# C06
def test_finished_run_is_left_alone(finished):
  config, workdir, result = finished
  before = contents(workdir)
  assert training.train_and_evaluate(config, workdir) == result
  assert contents(workdir) == before


# C06
@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('model.num_iters', 6),
    ('model.num_layers', 3),
    ('optimizer.learning_rate', 0.5),
    ('total_steps', 10),
    ('checkpoint.keep_steps', (3,)),
  ],
)
def test_changed_config_is_refused(finished, field, value):
  config, workdir, _ = finished
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict({field: value})
  before = contents(workdir)
  with pytest.raises(errors.RunError, match=re.escape(f'config.{field} was')):
    training.train_and_evaluate(config, workdir)
  assert contents(workdir) == before


def test_result_without_checkpoints_belongs_to_its_config(finished, tmp_path):
  config, workdir, result = finished
  copy = tmp_path / 'run'
  shutil.copytree(workdir, copy)
  shutil.rmtree(copy / 'checkpoints')
  assert training.train_and_evaluate(config, copy) == result
  other = config.copy_and_resolve_references()
  other.seed = 3
  with pytest.raises(errors.RunError, match='config.seed was 0'):
    training.train_and_evaluate(other, copy)


def test_start_killed_in_its_first_save_holds_nothing(config, workdir):
  (workdir / 'checkpoints' / '0.orbax-checkpoint-tmp').mkdir(parents=True)
  (workdir / 'config.json').write_text('{"seed": 5}')
  config.total_steps = 5
  assert training.train_and_evaluate(config, workdir)['step'] == 5


def test_other_data_is_refused(config, workdir, monkeypatch):
  with monkeypatch.context() as m:
    interrupt(m, 3)
    training.train_and_evaluate(config, workdir)
  original = data.load

  def load(data_config):
    dataset = original(data_config)
    changed = {**dataset.info.provenance, 'fingerprint': 'another'}
    info = dataclasses.replace(dataset.info, provenance=changed)
    return dataclasses.replace(dataset, info=info)

  monkeypatch.setattr(data, 'load', load)
  with pytest.raises(errors.RunError, match='trained on other data'):
    training.train_and_evaluate(config, workdir)


def test_directory_in_use_is_refused(config, workdir):
  from sinkformer_jax.training import workdir as workdir_lib

  with (
    workdir_lib.claim(workdir, config),
    pytest.raises(errors.RunError, match='in use'),
  ):
    training.train_and_evaluate(config, workdir)


# C04
def test_last_step_off_the_interval_is_saved(config, workdir):
  config.total_steps = 7
  config.checkpoint.every_steps = 3
  config.checkpoint.keep = 1
  config.checkpoint.keep_steps = (2,)
  training.train_and_evaluate(config, workdir)
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0, 2, 7]
  assert training.load_run(workdir).step == 7


def poison(batch):
  image = batch['image'].copy()
  image[3, 2, 2] = np.nan
  return {**batch, 'image': image}


# C10
def test_nan_stops_the_run_before_it_reaches_a_checkpoint(
  config, workdir, monkeypatch
):
  config.checkpoint.every_steps = 2
  config.checkpoint.keep = 2
  with monkeypatch.context() as m:
    at_step(m, 12, poison)
    with pytest.raises(errors.RunError) as error:
      training.train_and_evaluate(config, workdir)
  message = str(error.value)
  assert 'step 12: loss=nan' in message
  assert 'first bad layer is 1' in message
  assert str(workdir / 'checkpoints' / '10') in message
  state = restored_state(workdir)
  assert state['step'] == 10
  for leaf in jax.tree.leaves(state):
    assert np.isfinite(leaf).all()
  record = workdir / 'diverged.json'
  said = json.loads(record.read_text())
  assert said['step'] == 12
  assert 'first bad layer is 1' in said['where']
  # Without the bad batch it goes on.
  assert training.train_and_evaluate(config, workdir)['step'] == 20
  assert not record.exists()


# C10
def test_exploding_learning_rate_stops_the_run(config, workdir):
  config.optimizer.learning_rate = 1e30
  config.optimizer.warmup_steps = 0
  with pytest.raises(errors.RunError, match='step 1: .*parameter_norm=inf'):
    training.train_and_evaluate(config, workdir)
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.steps == [0]


# J05
def test_debug_nans_and_donation_go_together(config, workdir, monkeypatch):
  config.log_every_steps = config.eval_every_steps = 1
  config.checkpoint.every_steps = 1
  config.total_steps = 4
  config.optimizer.warmup_steps = 1
  with jax.debug_nans(True):
    with monkeypatch.context() as m:
      interrupt(m, 2)
      training.train_and_evaluate(config, workdir)
    result = training.train_and_evaluate(config, workdir)
  run = training.load_run(workdir)
  again = training.evaluate_run(run, data.load(run.config.data), 'test', 128)
  assert again == result['test']


# J04
def test_one_compilation_of_each_step(config, workdir, caplog):
  config.total_steps = 260  # More than an epoch, and evaluations.
  config.eval_every_steps = 100
  config.log_every_steps = 50
  config.checkpoint.every_steps = 100
  with jax.log_compiles(True), caplog.at_level(logging.WARNING):
    training.train_and_evaluate(config, workdir)
  compiled = [
    name
    for record in caplog.records
    for name in re.findall(r'Compiling jit\((\w+)\)', record.getMessage())
  ]
  assert compiled.count('train_step') == 1
  assert compiled.count('eval_step') == 1


# C04
def test_failed_save_is_an_error_and_leaves_the_others(
  config, workdir, monkeypatch
):
  from orbax.checkpoint import v1 as ocp

  original = ocp.training.Checkpointer.save

  def save(self, step, *args, **kwargs):
    if step == 10:
      raise OSError(28, 'No space left on device')
    return original(self, step, *args, **kwargs)

  monkeypatch.setattr(ocp.training.Checkpointer, 'save', save)
  with pytest.raises(errors.RunError, match='No space left on device'):
    training.train_and_evaluate(config, workdir)
  assert training.load_run(workdir).step == 0


# C03
def test_stale_temporary_directory_is_cleared(
  finished, config, workdir, monkeypatch
):
  config, undisturbed, _ = finished
  with monkeypatch.context() as m:
    interrupt(m, 7)
    training.train_and_evaluate(config, workdir)
  stale = workdir / 'checkpoints' / '10.orbax-checkpoint-tmp'
  stale.mkdir()
  (stale / 'half').write_text('half')
  # Readers leave it alone.
  assert training.load_run(workdir).step == 7
  assert stale.exists()
  training.train_and_evaluate(config, workdir)
  assert not stale.exists()
  assert_same_state(restored_state(workdir), restored_state(undisturbed))


def test_pair_sees_identical_batches_from_identical_weights(
  config, tmp_path, monkeypatch
):
  batches, original = {'softmax': [], 'sinkhorn': []}, data.train_batch
  for normalizer, seen in batches.items():

    def train_batch(*args, seen=seen):
      seen.append(original(*args))
      return seen[-1]

    monkeypatch.setattr(data, 'train_batch', train_batch)
    config.model.normalizer = normalizer
    config.total_steps = 5
    training.train_and_evaluate(config, tmp_path / normalizer)
  jax.tree.map(np.testing.assert_array_equal, *batches.values())
  softmax, sinkhorn = (restored_state(tmp_path / x, 0) for x in batches)
  assert_same_state(softmax, sinkhorn)
  softmax, sinkhorn = (restored_state(tmp_path / x, 5) for x in batches)
  head = [x['params']['head']['kernel'] for x in (softmax, sinkhorn)]
  assert (head[0] != head[1]).any()


def test_own_normalizer_can_be_trained(config, workdir, monkeypatch):
  def uniform(logits, mask=None):
    del mask
    return jax.numpy.ones_like(logits) / logits.shape[-1]

  monkeypatch.setitem(
    normalizers.NORMALIZERS, 'uniform', lambda num_iters: uniform
  )
  config.model.normalizer = 'uniform'
  config.total_steps = 5
  training.train_and_evaluate(config, workdir)
  line = metrics_lib.read_metrics(workdir)[0]
  assert line['train/column_error'] < 1e-6
  assert training.load_run(workdir, normalizer=uniform).step == 5
  monkeypatch.undo()
  with pytest.raises(errors.RunError, match='normalizer='):
    training.load_run(workdir)
  assert training.load_run(workdir, normalizer=uniform).step == 5


# J02
@pytest.mark.slow
def test_every_option_trains(config, tmp_path):
  for i, options in enumerate(
    (
      dict(
        talking_heads=True,
        dropout_rate=0.2,
        norm_position='post',
        deepnorm=True,
        remat=True,
      ),
      dict(skip=False, ffn=False, pooling='mean', dtype='bfloat16'),
    )
  ):
    changed = config.copy_and_resolve_references()
    changed.total_steps = 5
    changed.model.update(options)
    workdir = tmp_path / str(i)
    training.train_and_evaluate(changed, workdir)
    state = restored_state(workdir)
    # Nothing that is captured or monitored gets into a checkpoint.
    assert set(state) == {'step', 'params', 'opt_state'}
    assert set(state['params']) <= {
      'encoder',
      'head',
      'cls',
      'positions',
      'patch_embedding',
    }


# C01
def test_load_run(finished):
  config, workdir, result = finished
  run = training.load_run(workdir, step=0)
  assert run.step == 0
  assert run.config.to_dict()['model'] == config.model.to_dict()
  with pytest.raises(
    errors.RunError, match=r'no checkpoint of step 3; .*\[0, 10'
  ):
    training.load_run(workdir, step=3)
  with pytest.raises(errors.RunError, match='not a run directory'):
    training.load_run(workdir.parent)
  for deep in (workdir / 'checkpoints', workdir / 'checkpoints' / '10'):
    with pytest.raises(errors.RunError, match=f'Did you mean {workdir}'):
      training.load_run(deep)


# D06
@pytest.mark.parametrize('batch_size', [1, 16, 32, 103, 128])
def test_evaluation_does_not_depend_on_the_batch(finished, batch_size):
  _, workdir, _ = finished
  run = training.load_run(workdir)
  dataset = data.load(run.config.data)
  arrays = {k: v[:103] for k, v in dataset.splits['test'].items()}
  splits = {**dataset.splits, 'test': arrays}
  info = dataclasses.replace(
    dataset.info, splits={**dataset.info.splits, 'test': 103}
  )
  dataset = data.Dataset(info, splits, dataset.preprocess)
  images = dataset.preprocess(arrays)['image']
  logits = np.asarray(run.model.apply({'params': run.params}, images))
  log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
  log_p = log_p[np.arange(103), arrays['label']]
  result = training.evaluate_run(run, dataset, 'test', batch_size)
  assert result['count'] == 103
  accuracy = (np.argmax(logits, -1) == arrays['label']).mean()
  assert result['accuracy'] == pytest.approx(accuracy, abs=1e-7)
  assert result['loss'] == pytest.approx(-log_p.mean(), abs=1e-5)


# S06
def test_columns_far_off_are_warned_of(finished, caplog):
  _, workdir, _ = finished
  run = training.load_run(workdir)
  kernel = run.params['encoder']['blocks']['attention']['query']['kernel']
  kernel = kernel.at[1].multiply(1000)
  run.params['encoder']['blocks']['attention']['query']['kernel'] = kernel
  with caplog.at_level(logging.WARNING):
    result = training.evaluate_run(
      run, data.load(run.config.data), 'validation', 128
    )
  assert result['row_error'] < 1e-5
  assert result['column_error_by_layer'][1] > evaluation.COLUMN_ERROR_THRESHOLD
  assert 'not doubly stochastic' in caplog.text


# D07
def test_batches_that_devices_do_not_divide_are_refused():
  class Mesh:
    size = 3

  with pytest.raises(errors.ConfigError, match='x=16 .*3 devices'):
    sharding.check_batch_size(Mesh, 'x', 16)


def test_elapsed_time_goes_on_in_a_resumed_run(config, workdir, monkeypatch):
  # Stopped right after an evaluation, whose line has no elapsed time.
  with monkeypatch.context() as m:
    interrupt(m, 10)
    training.train_and_evaluate(config, workdir)
  result = training.train_and_evaluate(config, workdir)
  times = [
    x['elapsed_s']
    for x in metrics_lib.read_metrics(workdir)
    if 'elapsed_s' in x
  ]
  assert len(times) == 4
  assert times == sorted(times)
  assert result['train_s'] == times[-1]


def test_start_that_fails_does_not_claim_the_directory(config, workdir):
  config.batch_size = 100_000
  with pytest.raises(errors.ConfigError, match='config.batch_size=100000'):
    training.train_and_evaluate(config, workdir)
  config.batch_size = 16
  config.total_steps = 5
  assert training.train_and_evaluate(config, workdir)['step'] == 5


def test_metrics_that_cannot_be_written_are_an_error(
  config, workdir, monkeypatch
):
  from tensorboardX import event_file_writer

  original, count = event_file_writer.EventsWriter.write_event, [0]

  def write_event(self, event):
    count[0] += 1
    if count[0] > 20:
      raise OSError(28, 'No space left on device')
    return original(self, event)

  monkeypatch.setattr(
    event_file_writer.EventsWriter, 'write_event', write_event
  )
  with pytest.raises(errors.RunError, match='No space left'):
    training.train_and_evaluate(config, workdir)
  monkeypatch.undo()
  assert training.train_and_evaluate(config, workdir)['step'] == 20


def test_evaluation_that_is_not_finite_is_no_result(
  config, workdir, monkeypatch
):
  original = data.eval_batches

  def eval_batches(*args):
    for batch in original(*args):
      yield poison(batch)

  monkeypatch.setattr(data, 'eval_batches', eval_batches)
  with pytest.raises(errors.RunError, match='validation examples is not'):
    training.train_and_evaluate(config, workdir)
  assert not (workdir / 'result.json').exists()


def test_marginal_errors_are_those_of_the_weights_used(config, tmp_path):
  # Talking heads mix the weights after the normalizer.
  config.model.talking_heads = True
  config.total_steps = 5
  training.train_and_evaluate(config, tmp_path / 'run')
  run = training.load_run(tmp_path / 'run')
  mix = run.params['encoder']['blocks']['attention']['weights_mix']
  run.params['encoder']['blocks']['attention']['weights_mix'] = 1.5 * mix
  result = training.evaluate_run(run, data.load(config.data), 'test', 128)
  sums = 1.5 * np.abs(np.asarray(mix).sum(1) - 1 / 1.5)
  np.testing.assert_allclose(
    result['row_error_by_layer'], sums.max(-1), atol=1e-4
  )


def test_damaged_run_files_are_named(config, workdir):
  config.total_steps = 5
  training.train_and_evaluate(config, workdir)
  for name, content in (
    ('config.json', b'[]'),
    ('config.json', b'{"model"'),
    ('config.json', b'\xff\xfe'),
    ('config.json', b'{}'),
    (
      'config.json',
      json.dumps(
        {'model': {**config.model.to_dict(), 'dtype': 'float31'}}
      ).encode(),
    ),
    ('provenance.json', b'{}'),
  ):
    path = workdir / name
    good = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(errors.RunError, match=name):
      training.load_run(workdir)
    path.write_bytes(good)
  assert training.load_run(workdir).step == 5
  # What is loaded is the config it was trained with.
  assert training.load_run(workdir).config.to_dict() == config.to_dict()


def test_own_names_are_used_for_what_is_patched_here():
  # The tests above replace functions of `data`; the loop has to look them up
  # there.
  assert loop.data is data
