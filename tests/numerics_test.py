"""The environment does not change results, or is told of."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mnist_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import models
from sinkformer_jax import numerics
from sinkformer_jax import training
from sinkformer_jax.training import workdir as workdir_lib
from tests.conftest import ROOT

# Each makes another program, other types or other random numbers of the same
# code, if nothing is done about it.
VARIABLES = {
  'JAX_ENABLE_X64': '1',
  'JAX_DEFAULT_PRNG_IMPL': 'rbg',
  'JAX_THREEFRY_PARTITIONABLE': '0',
  'JAX_NUMPY_DTYPE_PROMOTION': 'strict',
  'JAX_NUMPY_RANK_PROMOTION': 'raise',
  'JAX_RANDOM_SEED_OFFSET': '7',
}


@contextlib.contextmanager
def changed_settings():
  with (
    jax.enable_x64(True),
    jax.default_prng_impl('rbg'),
    jax.threefry_partitionable(False),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


def tiny_config():
  config = mnist_sinkhorn.get_config('tiny')
  config.model.dropout_rate = 0.1
  config.model.talking_heads = True
  config.total_steps = 4
  config.optimizer.weight_decay = 0.01
  config.optimizer.warmup_steps = 1
  return config


def train(workdir, config):
  """Parameters and scores of a training and of an evaluation after it."""
  result = training.train_and_evaluate(config, workdir)
  run = training.load_run(workdir)
  evaluated = training.evaluate_run(run, data.load(config.data), 'test', 100)
  return run.params, result['test'], evaluated


def assert_equal(first, second):
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    np.testing.assert_array_equal(a, b, strict=isinstance(a, jax.Array))


# J08
def test_settings_of_jax_change_nothing(tmp_path):
  config = tiny_config()
  expected = train(tmp_path / 'plain', config)
  with changed_settings():
    assert_equal(train(tmp_path / 'changed', config), expected)
    # A run of the one kind is read, and resumed, under the other.
    assert_equal(training.load_run(tmp_path / 'plain').params, expected[0])
  assert {x.dtype for x in jax.tree.leaves(expected[0])} == {
    np.dtype(np.float32)
  }


# J08
def test_users_own_calls_make_float32_parameters():
  info = data.load(mnist_sinkhorn.get_config('tiny').data).info
  model = models.create_model(tiny_config().model, info)
  with jax.enable_x64(True):
    shapes = jax.eval_shape(
      lambda: model.init(numerics.key(0), info.example())['params']
    )
  assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


@pytest.mark.parametrize('seed', [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_key_is_that_of_an_unchanged_jax(seed):
  # Runs of earlier versions made their keys so.
  expected = jax.random.key_data(jax.random.key(np.uint32(seed)))
  with changed_settings():
    keys = [numerics.key(seed), numerics.key(np.uint32(seed))]
    keys.append(jax.jit(numerics.key)(np.uint32(seed)))
    for key in keys:
      np.testing.assert_array_equal(jax.random.key_data(key), expected)
      assert jax.random.key_impl(key) == 'threefry2x32'


SCRIPT = """
import hashlib, json, sys
import jax
import numpy as np
from tests import numerics_test
params, *scores = numerics_test.train(sys.argv[1], numerics_test.tiny_config())
total = hashlib.sha256()
for x in jax.tree.leaves(params):
  total.update(np.asarray(x))
print(json.dumps([total.hexdigest(), *scores]))
"""


def train_in_a_process(workdir, variables):
  done = subprocess.run(
    [sys.executable, '-c', SCRIPT, str(workdir)],
    env={**os.environ, 'PYTHONPATH': str(ROOT), **variables},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2_000:]
  return json.loads(done.stdout.splitlines()[-1])


# J08
def test_all_variables_at_once(tmp_path):
  plain = train_in_a_process(tmp_path / 'plain', {})
  assert train_in_a_process(tmp_path / 'changed', VARIABLES) == plain


# J08
@pytest.mark.slow
def test_each_variable(tmp_path):
  plain = train_in_a_process(tmp_path / 'plain', {})
  for name, value in VARIABLES.items():
    workdir = tmp_path / name
    assert train_in_a_process(workdir, {name: value}) == plain, name
    # Resumed without the variable from the middle of a run that had it.
    (workdir / 'result.json').unlink()
    (workdir / 'checkpoints' / '4').rename(tmp_path / f'{name}-4')
    assert train_in_a_process(workdir, {}) == plain, name


# J08
def test_settings_that_may_change_results_are_recorded(
  tmp_path, monkeypatch, caplog
):
  config = tiny_config()
  training.train_and_evaluate(config, tmp_path / 'run')
  path = tmp_path / 'run' / 'provenance.json'
  (start,) = json.loads(path.read_text())['starts']
  assert start['settings'] == numerics.settings()
  assert start['settings']['jax_default_matmul_precision'] == 'None'
  (tmp_path / 'run' / 'result.json').unlink()
  caplog.clear()
  training.train_and_evaluate(config, tmp_path / 'run')
  assert 'at the last start' not in caplog.text
  (tmp_path / 'run' / 'result.json').unlink()
  monkeypatch.setenv('XLA_FLAGS', '--xla_cpu_enable_fast_math=true')
  with jax.default_matmul_precision('highest'):
    training.train_and_evaluate(config, tmp_path / 'run')
  assert "jax_default_matmul_precision was 'None'" in caplog.text
  assert "XLA_FLAGS was ''" in caplog.text
  assert "is 'highest' now" in caplog.text
  settings = json.loads(path.read_text())['starts'][-1]['settings']
  assert settings['XLA_FLAGS'] == '--xla_cpu_enable_fast_math=true'


def test_starts_of_earlier_versions_have_no_settings(tmp_path, caplog):
  training.train_and_evaluate(tiny_config(), tmp_path / 'run')
  path = tmp_path / 'run' / 'provenance.json'
  content = workdir_lib.read_json(path)
  del content['starts'][0]['settings']
  path.write_text(json.dumps(content))
  (tmp_path / 'run' / 'result.json').unlink()
  caplog.clear()
  training.train_and_evaluate(tiny_config(), tmp_path / 'run')
  assert 'at the last start' not in caplog.text


def test_float64_is_float64_where_it_is_wanted():
  with jax.numpy_dtype_promotion('strict'), numerics.fixed(x64=True):
    assert (jnp.zeros(2, jnp.float64) + np.float32(1)).dtype == jnp.float64
  with jax.enable_x64(True), numerics.fixed():
    assert jnp.zeros(2).dtype == jnp.float32
