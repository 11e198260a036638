"""The Vision Transformer and its creation from a config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import mnist_sinkhorn
from configs import mnist_softmax
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import models

INFO = data.DatasetInfo('mnist', 10, (28, 28, 1), {}, {})


def init(model, x, seed=0):
  variables = jax.jit(model.init)(jax.random.key(seed), x)
  assert set(variables) == {'params'}
  return variables['params']


def apply(model, params, *args, **kwargs):
  return jax.jit(lambda p: model.apply({'params': p}, *args, **kwargs))(params)


def images(batch=2, height=28):
  rng = np.random.default_rng(0)
  return rng.standard_normal((batch, height, 28, 1)).astype(np.float32)


@pytest.mark.parametrize(
  ('module', 'preset', 'count'),
  [
    # Per block 2 LayerNorms 512, attention 4 (128^2 + 128) = 66,048, FFN
    # 2 (128 * 512) + 640 = 131,712: 24 of them 4,758,528. Patches 2,176, class
    # token 128, positions 6,400, last LayerNorm 256, head 1,290.
    (mnist_sinkhorn, '', 4_768_778),
    (mnist_softmax, '', 4_768_778),
    (mnist_sinkhorn, 'quick', 4_768_778),
    (mnist_softmax, 'quick', 4_768_778),
    (mnist_sinkhorn, 'tiny', 5_738),
    (mnist_softmax, 'tiny', 5_738),
  ],
)
def test_parameter_counts(module, preset, count):
  model = models.create_model(module.get_config(preset).model, INFO)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images())['params']
  assert sum(x.size for x in jax.tree.leaves(shapes)) == count


def test_split_patches_keeps_pixels_of_a_patch_together():
  x = np.arange(2 * 8 * 12 * 3).reshape(2, 8, 12, 3)
  patches = models.split_patches(jnp.asarray(x), 4)
  assert patches.shape == (2, 6, 48)
  np.testing.assert_array_equal(patches[1, 4], x[1, 4:8, 4:8].reshape(-1))
  with pytest.raises(ValueError, match='does not divide'):
    models.split_patches(jnp.asarray(x), 5)


# S03
@pytest.mark.parametrize('pooling', ['cls', 'mean'])
@pytest.mark.parametrize('normalizer', ['softmax', 'sinkhorn'])
def test_padded_patches_change_nothing(config, pooling, normalizer):
  config.model.pooling = pooling
  config.model.normalizer = normalizer
  config.model.patch_size = 4
  model = models.create_model(config.model, INFO)
  full = images()
  params = init(model, full)
  mask = np.arange(49) < 21  # The upper 3 of 7 rows of patches.
  padded = apply(model, params, full, mask=np.stack([mask, mask]))
  tokens = 21 + (pooling == 'cls')
  cut = {**params, 'positions': params['positions'][:, :tokens]}
  expected = apply(model, cut, full[:, :12])
  np.testing.assert_allclose(padded, expected, atol=1e-5)


def test_pool():
  x = np.random.default_rng(0).standard_normal((3, 4, 5))
  mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
  mean = models.pool(jnp.asarray(x), mask, 'mean')
  np.testing.assert_allclose(mean[0], x[0, :2].mean(0), atol=1e-6)
  np.testing.assert_allclose(mean[1], x[1].mean(0), atol=1e-6)
  np.testing.assert_array_equal(mean[2], 0)
  np.testing.assert_allclose(models.pool(x, None, 'cls'), x[:, 0], atol=1e-6)


def test_ablation_and_own_normalizer_reach_the_encoder(config):
  def uniform(logits, mask=None):
    del mask
    return jnp.ones_like(logits) / logits.shape[-1]

  model = models.create_model(config.model, INFO)
  params = init(model, images())
  plain = apply(model, params, images())
  own = models.create_model(config.model, INFO, normalizer=uniform)
  for changed in (
    apply(model, params, images(), ablation=encoder.Ablation(skip=False)),
    apply(model, params, images(), ablation=encoder.Ablation(ffn=False)),
    apply(own, params, images()),
  ):
    assert np.abs(changed - plain).max() > 1e-4


def test_unknown_names_are_refused(config):
  for field in ('name', 'normalizer'):
    wrong = config.copy_and_resolve_references()
    wrong.model[field] = 'other'
    with pytest.raises(ValueError, match=f'model.{field}'):
      models.create_model(wrong.model, INFO)


def test_pair_starts_from_identical_weights(config):
  def initial(normalizer):
    config.model.normalizer = normalizer
    model = models.create_model(config.model, INFO)
    return init(model, images(), config.seed)

  jax.tree.map(
    np.testing.assert_array_equal, initial('softmax'), initial('sinkhorn')
  )
