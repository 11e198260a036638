"""The models and their creation from a config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import ag_news_sinkhorn
from configs import mnist_sinkhorn
from configs import mnist_softmax
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import models

INFO = data.DatasetInfo('mnist', 10, (28, 28, 1), {}, {})
TEXT_INFO = data.DatasetInfo('ag_news', 4, (128,), {}, {}, vocab_size=16_000)
TINY_INFO = data.DatasetInfo('ag_news', 4, (64,), {}, {}, vocab_size=50)


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


@pytest.mark.parametrize(
  ('pooling', 'positions', 'count'),
  [
    # 24 blocks as above 4,758,528, tokens 2,048,000, positions 16,384, last
    # LayerNorm 256, head 516.
    ('max', 'learned', 6_823_684),
    ('mean', 'sinusoidal', 6_807_300),
    # A class token and a position for it.
    ('cls', 'learned', 6_823_940),
  ],
)
def test_parameter_counts_of_text(pooling, positions, count):
  config = ag_news_sinkhorn.get_config().model
  config.update(pooling=pooling, positions=positions)
  model = models.create_model(config, TEXT_INFO)
  shapes = jax.eval_shape(model.init, jax.random.key(0), TEXT_INFO.example())
  assert sum(x.size for x in jax.tree.leaves(shapes)) == count


def text_model(**changes):
  config = ag_news_sinkhorn.get_config('tiny').model
  config.update(changes)
  model = models.create_model(config, TINY_INFO)
  return model, init(model, TINY_INFO.example())


def random_tokens(lengths, width, filler=0):
  """Tokens and their mask, ``[len(lengths), width]``."""
  rng = np.random.default_rng(0)
  tokens = np.full((len(lengths), width), filler, np.int32)
  for row, length in zip(tokens, lengths, strict=True):
    row[:length] = rng.integers(1, 50, length)
  return tokens, np.arange(width) < np.array(lengths)[:, None]


@pytest.mark.parametrize(
  ('changes', 'tolerance'),
  [
    (dict(normalizer='softmax', pooling='max'), 1e-5),
    (dict(normalizer='sinkhorn', pooling='mean', num_layers=24), 1e-4),
    (
      dict(
        normalizer='sinkhorn',
        pooling='cls',
        norm_position='post',
        positions='sinusoidal',
      ),
      1e-5,
    ),
  ],
  ids=['softmax-max', 'sinkhorn-mean-24', 'sinkhorn-cls-post'],
)
def test_padding_of_texts_changes_nothing(changes, tolerance):
  model, params = text_model(**changes)
  tokens, _ = random_tokens([9], 9)
  alone = apply(model, params, tokens)
  # Beside texts of other lengths, whatever fills it up.
  others, mask = random_tokens([9, 64, 3], 64, filler=49)
  result = apply(model, params, others, mask=mask)
  np.testing.assert_allclose(result[0], alone[0], atol=tolerance)
  assert np.abs(result[1] - result[0]).max() > 1e-2


@pytest.mark.parametrize('normalizer', ['softmax', 'sinkhorn'])
def test_padding_leaves_gradients_alone(normalizer):
  model, params = text_model(pooling='max', normalizer=normalizer)
  tokens, mask = random_tokens([9, 4, 12, 5], 16)

  @jax.jit
  def gradient(params, mask):
    def loss(params):
      logits = model.apply({'params': params}, tokens, mask=mask)
      return jax.nn.log_softmax(logits)[:3, 0].sum()

    return jax.grad(loss)(params)

  expected = gradient(params, mask)
  # A text without tokens, and whatever the embedding of padding holds.
  empty = mask & (np.arange(4) < 3)[:, None]
  for value in (0.0, 1e4, np.inf, np.nan):
    table = params['token_embedding']['embedding'].at[0].set(value)
    changed = {**params, 'token_embedding': {'embedding': table}}
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      gradient(changed, empty),
      expected,
    )


def test_embedding_of_texts():
  model, params = text_model(normalizer='softmax')
  table = params['token_embedding']['embedding']
  # Of unit spread once scaled, as the positions are.
  assert np.std(4 * table) == pytest.approx(1, abs=0.1)
  assert np.std(params['position_embedding']) == pytest.approx(1, abs=0.1)
  tokens, _ = random_tokens([9], 9)
  _, sown = jax.jit(
    lambda p: model.apply({'params': p}, tokens, mutable=[encoder.CAPTURE])
  )(params)
  np.testing.assert_allclose(
    sown[encoder.CAPTURE]['encoder']['embedding'],
    4 * table[tokens] + params['position_embedding'][:, :9],
    atol=1e-6,
  )


@pytest.mark.parametrize('positions', models.text.POSITIONS)
def test_order_of_tokens_matters(positions):
  model, params = text_model(
    positions=positions, pooling='mean', normalizer='softmax'
  )
  tokens, _ = random_tokens([9], 9)
  both = apply(model, params, np.concatenate([tokens, tokens[:, ::-1]]))
  assert np.abs(both[0] - both[1]).max() > 1e-3


def test_sinusoids():
  table = models.sinusoids(7, 6)
  for position in range(7):
    for pair in range(3):
      angle = position / 10_000 ** (2 * pair / 6)
      expected = [np.sin(angle), np.cos(angle)]
      actual = table[position, 2 * pair : 2 * pair + 2]
      np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_texts_that_are_too_long_are_refused():
  model, params = text_model()
  with pytest.raises(ValueError, match='65 tokens are longer than max_length'):
    model.apply({'params': params}, np.zeros((1, 65), np.int32))


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
  largest = models.pool(jnp.asarray(x), mask, 'max')
  np.testing.assert_allclose(largest[0], x[0, :2].max(0), atol=1e-6)
  np.testing.assert_allclose(largest[1], x[1].max(0), atol=1e-6)
  np.testing.assert_array_equal(largest[2], 0)
  np.testing.assert_allclose(models.pool(x, None, 'max'), x.max(1), atol=1e-6)
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
