"""Learning rates and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax.training import optimizer


def rates(config, total_steps):
  schedule = optimizer.create_schedule(config, total_steps)
  return np.array([schedule(jnp.asarray(i)) for i in range(total_steps)])


def test_warmup_and_cosine(config):
  config = config.optimizer
  config.update(learning_rate=2.0, warmup_steps=4, schedule='cosine')
  actual = rates(config, 14)
  np.testing.assert_allclose(actual[:5], [0.5, 1.0, 1.5, 2.0, 2.0])
  expected = 1 + np.cos(np.pi * np.arange(10) / 10)
  np.testing.assert_allclose(actual[4:], expected, rtol=1e-5)
  assert actual[-1] > 0


@pytest.mark.parametrize('warmup', [0, 1, 3])
def test_constant(config, warmup):
  config = config.optimizer
  config.update(learning_rate=3.0, warmup_steps=warmup, schedule='constant')
  actual = rates(config, 6)
  expected = [3.0 * min(1, (i + 1) / max(warmup, 1)) for i in range(6)]
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize('warmup', [0, 2, 3])
def test_step(config, warmup):
  config = config.optimizer
  config.update(
    learning_rate=1.0,
    warmup_steps=warmup,
    schedule='step',
    step_boundaries=(4, 6),
    step_factor=0.1,
  )
  actual = rates(config, 8)
  np.testing.assert_allclose(
    actual[2:], [1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-5
  )


def test_adam_against_numpy(config):
  config = config.optimizer
  config.update(
    learning_rate=0.1,
    warmup_steps=0,
    schedule='constant',
    clip_norm=1.0,
    weight_decay=0.01,
  )
  tx = optimizer.create_optimizer(config, 5)
  params = {'w': jnp.array([1.0, -2.0])}
  state = tx.init(params)
  w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
  for step in range(1, 4):
    g = 3.0 * np.array([step, 1.0])
    updates, state = tx.update({'w': jnp.asarray(g)}, state, params)
    params = jax.tree.map(lambda p, u: p + u, params, updates)
    g = g / np.linalg.norm(g)
    m = config.b1 * m + (1 - config.b1) * g
    v = config.b2 * v + (1 - config.b2) * g**2
    m_hat, v_hat = m / (1 - config.b1**step), v / (1 - config.b2**step)
    w = w - 0.1 * (m_hat / (np.sqrt(v_hat) + config.epsilon) + 0.01 * w)
    np.testing.assert_allclose(params['w'], w, rtol=1e-5)
