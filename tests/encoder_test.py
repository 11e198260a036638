"""Attention and encoder against a forward pass written out in NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn
from tests.sinkhorn import sinkhorn_test

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 3, 2, 8, 6, 2
NUM_ITERS = 4


def make(normalizer='sinkhorn', **options):
  defaults = dict(num_layers=LAYERS, num_heads=HEADS, ffn_dim=12)
  return encoder.Encoder(
    normalizer=normalizers.NORMALIZERS[normalizer](NUM_ITERS),
    **{**defaults, **options},
  )


def inputs(seed=0, length=LENGTH, batch=BATCH):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((batch, length, WIDTH)).astype(np.float32)


def init(model, x):
  """Parameters with every bias and scale moved off its special value."""
  variables = jax.jit(model.init)(jax.random.key(1), x)
  assert set(variables) == {'params'}
  rng = np.random.default_rng(2)
  return jax.tree.map(
    lambda p: p + 0.1 * rng.standard_normal(p.shape).astype(p.dtype),
    variables['params'],
  )


def apply(model, params, *args, **kwargs):
  return jax.jit(lambda p: model.apply({'params': p}, *args, **kwargs))(params)


# The oracle: float64, one layer and one head after the other.


def layer_norm(x, p):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  return x * p['scale'] + p['bias']


def dense(x, p):
  return x @ p['kernel'] + p['bias']


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oracle_attention(x, p, mask, num_iters, talking_heads):
  query, key, value = (dense(x, p[name]) for name in ('query', 'key', 'value'))
  size = WIDTH // HEADS
  slices = [slice(h * size, (h + 1) * size) for h in range(HEADS)]
  logits = np.stack(
    [
      query[..., s] @ key[..., s].swapaxes(-1, -2) / np.sqrt(size)
      for s in slices
    ],
    axis=1,
  )
  if talking_heads:
    logits = np.einsum('bhij,hg->bgij', logits, p['logits_mix'])
  valid = np.broadcast_to(mask[:, None], (*logits.shape[:2], logits.shape[-1]))
  weights = sinkhorn_test.oracle(logits, num_iters, valid, valid)
  if talking_heads:
    weights = np.einsum('bhij,hg->bgij', weights, p['weights_mix'])
  mixed = [weights[:, h] @ value[..., s] for h, s in enumerate(slices)]
  return logits, weights, dense(np.concatenate(mixed, -1), p['out'])


def oracle(
  params,
  x,
  mask=None,
  *,
  num_iters,
  norm_position='pre',
  skip=True,
  ffn=True,
  talking_heads=False,
  alpha=1.0,
):
  """Everything the encoder captures, and its result."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  x = np.asarray(x, np.float64)
  if mask is None:
    mask = np.ones(x.shape[:2], bool)
  x = np.where(mask[..., None], x, 0)
  captured = {k: [] for k in ('logits', 'attention', 'attention_output')}
  captured['hidden'] = [x]
  for layer in range(LAYERS):
    p = jax.tree.map(lambda a, layer=layer: a[layer], params['blocks'])

    def attend(y, p=p):
      logits, weights, output = oracle_attention(
        y, p['attention'], mask, num_iters, talking_heads
      )
      captured['logits'].append(logits)
      captured['attention'].append(weights)
      captured['attention_output'].append(output)
      return output

    def feed_forward(y, p=p):
      return dense(gelu(dense(y, p['ffn']['expand'])), p['ffn']['contract'])

    if norm_position == 'pre':
      y = attend(layer_norm(x, p['attention_norm']))
      x = x + y if skip else y
      if ffn:
        x = x + feed_forward(layer_norm(x, p['ffn_norm']))
    else:
      y = attend(x)
      x = layer_norm(alpha * x + y if skip else y, p['attention_norm'])
      if ffn:
        x = layer_norm(alpha * x + feed_forward(x), p['ffn_norm'])
    captured['hidden'].append(x)
  captured = {k: np.stack(v) for k, v in captured.items()}
  return captured, layer_norm(
    x, params['norm']
  ) if norm_position == 'pre' else x


def check(model, x, mask=None, ablation=None, **options):
  params = init(model, x)
  kwargs = {} if ablation is None else {'ablation': ablation}
  result, sown = apply(
    model, params, x, mask=mask, mutable=[attention.CAPTURE], **kwargs
  )
  blocks = sown[attention.CAPTURE]['blocks']
  captured, expected = oracle(params, x, mask, **options)
  valid = np.ones(x.shape[:2], bool) if mask is None else mask
  compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-5)
  compare(result[valid], expected[valid])
  compare(blocks['attention']['attention'], captured['attention'])
  pairs = valid[:, None, :, None] & valid[:, None, None, :]
  pairs = np.broadcast_to(pairs, captured['logits'].shape)
  compare(
    np.asarray(blocks['attention']['logits'])[pairs], captured['logits'][pairs]
  )
  compare(
    blocks['attention_output'][:, valid], captured['attention_output'][:, valid]
  )
  compare(sown[attention.CAPTURE]['embedding'], captured['hidden'][0])
  compare(blocks['hidden'][:, valid], captured['hidden'][1:, valid])
  shape = (LAYERS, len(x), HEADS, x.shape[1], x.shape[1])
  assert blocks['attention']['attention'].shape == shape


@pytest.mark.parametrize('skip', [True, False])
@pytest.mark.parametrize('ffn', [True, False])
@pytest.mark.parametrize('norm_position', ['pre', 'post'])
def test_ablations(norm_position, skip, ffn):
  check(
    make(norm_position=norm_position),
    inputs(),
    ablation=encoder.Ablation(skip=skip, ffn=ffn),
    num_iters=NUM_ITERS,
    norm_position=norm_position,
    skip=skip,
    ffn=ffn,
  )


@pytest.mark.parametrize('skip', [True, False])
@pytest.mark.parametrize('ffn', [True, False])
def test_switches_of_training(skip, ffn):
  model = make(skip=skip, ffn=ffn)
  check(model, inputs(), num_iters=NUM_ITERS, skip=skip, ffn=ffn)
  params = init(model, inputs())
  assert ('ffn' in params['blocks']) == ffn


def test_softmax():
  check(make('softmax'), inputs(), num_iters=0)


def test_talking_heads():
  model = make(talking_heads=True)
  check(model, inputs(), num_iters=NUM_ITERS, talking_heads=True)
  params = jax.jit(model.init)(jax.random.key(0), inputs())['params']
  for name in ('logits_mix', 'weights_mix'):
    mix = params['blocks']['attention'][name]
    np.testing.assert_array_equal(mix, np.stack([np.eye(HEADS)] * LAYERS))
  plain = make()
  without = jax.tree.map(lambda x: x, params)
  for name in ('logits_mix', 'weights_mix'):
    del without['blocks']['attention'][name]
  np.testing.assert_allclose(
    apply(model, params, inputs()),
    apply(plain, without, inputs()),
    atol=1e-6,
  )


def test_talking_heads_row_sums():
  model = make(talking_heads=True)
  params = init(model, inputs())
  _, sown = apply(model, params, inputs(), mutable=[attention.CAPTURE])
  weights = sown[attention.CAPTURE]['blocks']['attention']['attention']
  # Head g's rows sum to the sum of column g of the second mix.
  sums = params['blocks']['attention']['weights_mix'].sum(1)
  np.testing.assert_allclose(
    weights.sum(-1),
    np.broadcast_to(sums[:, None, :, None], (LAYERS, BATCH, HEADS, LENGTH)),
    atol=1e-5,
  )


def test_deepnorm():
  # Wang et al. 2022: N = 24 gives 2.632 and 0.2686.
  for layers, alpha, beta in ((6, 1.861, 0.3799), (24, 2.632, 0.2686)):
    assert encoder.deepnorm_constants(layers) == pytest.approx(
      (alpha, beta), abs=6e-4
    )
  model = make(norm_position='post', deepnorm=True)
  alpha, beta = encoder.deepnorm_constants(LAYERS)
  check(model, inputs(), num_iters=NUM_ITERS, norm_position='post', alpha=alpha)
  wide = encoder.Encoder(
    num_layers=4,
    num_heads=4,
    ffn_dim=256,
    normalizer=sinkhorn.softmax,
    norm_position='post',
    deepnorm=True,
  )
  params = jax.jit(wide.init)(jax.random.key(0), np.zeros((1, 2, 128)))[
    'params'
  ]
  _, beta = encoder.deepnorm_constants(4)
  block = params['blocks']
  for kernel, gain in (
    (block['attention']['query']['kernel'], 1),
    (block['attention']['key']['kernel'], 1),
    (block['attention']['value']['kernel'], beta),
    (block['attention']['out']['kernel'], beta),
    (block['ffn']['expand']['kernel'], beta),
    (block['ffn']['contract']['kernel'], beta),
  ):
    fan_in, fan_out = kernel.shape[1:]
    xavier = gain * np.sqrt(2 / (fan_in + fan_out))
    assert np.std(kernel) == pytest.approx(xavier, rel=0.02)


def test_wrong_options_are_refused():
  x = inputs()
  for options, message in (
    (dict(deepnorm=True), 'post'),
    (dict(norm_position='middle'), 'norm_position'),
    (dict(num_heads=3), 'does not divide'),
  ):
    with pytest.raises(ValueError, match=message):
      make(**options).init(jax.random.key(0), x)


def test_scan_equals_loop_over_layers():
  model = make()
  x = inputs()
  params = init(model, x)
  y = jnp.asarray(x)
  for layer in range(LAYERS):
    block = encoder.Block(
      num_layers=LAYERS,
      num_heads=HEADS,
      ffn_dim=12,
      normalizer=model.normalizer,
    )
    p = jax.tree.map(lambda a, layer=layer: a[layer], params['blocks'])
    y, _ = block.apply({'params': p}, y, None)
  y = encoder.LayerNorm().apply({'params': params['norm']}, y)
  np.testing.assert_allclose(apply(model, params, x), y, atol=1e-6)


def test_masks():
  mask = np.array([[True] * 4 + [False] * 2, [True] * LENGTH])
  check(make(), inputs(), mask=mask, num_iters=NUM_ITERS)
  check(make('softmax'), inputs(), mask=mask, num_iters=0)


# S03, S04
@pytest.mark.parametrize('normalizer', ['softmax', 'sinkhorn'])
@pytest.mark.parametrize('filler', [1e4, np.nan])
def test_padding_changes_nothing(normalizer, filler):
  model = make(normalizer)
  x = inputs()
  params = init(model, x)
  padded = np.full((BATCH + 1, LENGTH + 5, WIDTH), filler, np.float32)
  padded[:BATCH, :LENGTH] = x
  mask = np.zeros(padded.shape[:2], bool)  # The last example has no tokens.
  mask[:BATCH, :LENGTH] = True

  def loss(params, x, mask):
    y = model.apply({'params': params}, x, mask=mask)
    if mask is not None:
      y = jnp.where(mask[..., None], y, 0)
    return (y**3).sum(), y

  gradient, expected = jax.jit(jax.grad(loss, has_aux=True))(params, x, None)
  # Jitted and not: NaNs can hide in either.
  transforms = (lambda f: f, jax.jit) if np.isnan(filler) else (jax.jit,)
  for transform in transforms:
    padded_gradient, y = transform(jax.grad(loss, has_aux=True))(
      params, padded, mask
    )
    np.testing.assert_allclose(y[:BATCH, :LENGTH], expected, atol=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
        a, b, atol=1e-5 * (1 + np.abs(b).max())
      ),
      padded_gradient,
      gradient,
    )


def test_remat_changes_nothing():
  x = inputs()
  params = init(make(), x)

  def gradient(remat):
    model = make(remat=remat)
    loss = lambda p: (model.apply({'params': p}, x) ** 2).sum()
    return jax.jit(jax.grad(loss))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
    gradient(True),
    gradient(False),
  )


def test_dropout_has_its_own_key_in_every_layer():
  # Attention weights are dropped, too; identity-like parameters make every
  # layer's result show its own mask.
  model = make(dropout_rate=0.5)
  x = inputs()
  params = jax.tree.map(jnp.zeros_like, init(model, x))
  params['blocks']['attention']['out']['bias'] += 1.0
  result, sown = apply(
    model,
    params,
    np.zeros_like(x),
    deterministic=False,
    rngs={'dropout': jax.random.key(0)},
    mutable=[attention.CAPTURE],
  )
  hidden = sown[attention.CAPTURE]['blocks']['hidden']
  steps = np.diff(np.concatenate([np.zeros_like(hidden[:1]), hidden]), axis=0)
  assert set(np.unique(steps)) == {0.0, 2.0}
  for first in range(LAYERS):
    for second in range(first):
      assert (steps[first] != steps[second]).any()
  with pytest.raises(Exception, match='dropout'):
    model.apply({'params': params}, x, deterministic=False)


# S13
def test_captured_attention_is_before_dropout():
  model = make(dropout_rate=0.5)
  params = init(model, inputs())
  _, sown = apply(
    model,
    params,
    inputs(),
    deterministic=False,
    rngs={'dropout': jax.random.key(0)},
    mutable=[attention.CAPTURE],
  )
  weights = sown[attention.CAPTURE]['blocks']['attention']['attention']
  np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
  # Reading a model needs no key and gives the same every time.
  first, second = (
    apply(model, params, inputs(), mutable=[attention.CAPTURE])
    for _ in range(2)
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)


# J02
def test_captures_do_not_pile_up_and_keep_layers_apart():
  model = make()
  params = init(model, inputs())
  for layer in range(LAYERS):
    kernel = params['blocks']['attention']['query']['kernel']
    params['blocks']['attention']['query']['kernel'] = kernel.at[layer].set(0)
    bias = params['blocks']['attention']['query']['bias']
    params['blocks']['attention']['query']['bias'] = bias.at[layer].set(layer)
  variables = {'params': params}
  for _ in range(2):
    _, sown = model.apply(variables, inputs(), mutable=[attention.CAPTURE])
    logits = sown[attention.CAPTURE]['blocks']['attention']['logits']
    assert logits.shape == (LAYERS, BATCH, HEADS, LENGTH, LENGTH)
    # A constant query gives rows that are all alike, and 0 in layer 0.
    assert np.ptp(logits, axis=-2).max() < 1e-6
    assert np.abs(logits[0]).max() == 0
    assert np.abs(logits[1]).max() > 0
    # Feeding the capture back in does not make it grow.
    variables = {'params': params, **sown}


def test_captures_cost_nothing_when_not_asked_for():
  model = make()
  x = inputs()
  params = init(model, x)

  def compiled(fn):
    return jax.jit(fn).lower(params).compile()

  plain = compiled(lambda p: model.apply({'params': p}, x))
  unused = compiled(
    lambda p: model.apply({'params': p}, x, mutable=[attention.CAPTURE])[0]
  )
  flops = [c.cost_analysis()['flops'] for c in (plain, unused)]
  assert flops[0] == flops[1]
  memory = [c.memory_analysis().temp_size_in_bytes for c in (plain, unused)]
  assert memory[0] == memory[1]


def test_own_normalizer():
  def uniform(logits, mask=None):
    del mask
    return jnp.ones_like(logits) / logits.shape[-1]

  x = inputs()
  model = encoder.Encoder(LAYERS, HEADS, 12, uniform)
  params = init(model, x)
  _, sown = model.apply({'params': params}, x, mutable=[attention.CAPTURE])
  weights = sown[attention.CAPTURE]['blocks']['attention']['attention']
  np.testing.assert_allclose(weights, 1 / LENGTH, rtol=1e-6)


# S05
@pytest.mark.parametrize('padded', [False, True])
def test_bfloat16_is_near_float32(padded):
  x = inputs()
  params = init(make(), x)
  valid = np.ones(x.shape[:2], bool)
  valid[0, 4:] = not padded
  mask = valid if padded else None
  exact = apply(make(), params, x, mask=mask)
  model = make(dtype=jnp.bfloat16)
  result, sown = apply(
    model, params, x, mask=mask, mutable=[attention.CAPTURE, attention.MONITOR]
  )
  assert result.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(result)[valid], exact[valid], atol=5e-2)
  assert np.isfinite(np.float32(result)).all()
  blocks = sown[attention.CAPTURE]['blocks']['attention']
  assert blocks['attention'].dtype == blocks['logits'].dtype == jnp.float32
  row_error = sown[attention.MONITOR]['blocks']['attention']['row_error']
  np.testing.assert_array_less(row_error, 1e-5)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_layer_norm_and_its_gradient(dtype):
  with jax.enable_x64(dtype == jnp.float64):
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 + 2 * rng.standard_normal((5, 7, 16)), dtype)
    tangent = jnp.asarray(rng.standard_normal(x.shape), dtype)
    params = {
      'scale': jnp.asarray(rng.standard_normal(16), dtype),
      'bias': jnp.asarray(rng.standard_normal(16), dtype),
    }
    ours, theirs = (
      functools.partial(norm(dtype=dtype).apply, {'params': params})
      for norm in (encoder.LayerNorm, nn.LayerNorm)
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-12
    compare = functools.partial(
      np.testing.assert_allclose, rtol=tolerance, atol=tolerance
    )
    actual, vjp = jax.vjp(ours, x)
    expected, expected_vjp = jax.vjp(theirs, x)
    compare(actual, expected)
    compare(vjp(tangent)[0], expected_vjp(tangent)[0])


# S12
@pytest.mark.slow
def test_remat_keeps_iterations_out_of_the_memory_of_a_layer():
  def temp_bytes(num_layers, num_iters):
    model = encoder.Encoder(
      num_layers,
      HEADS,
      12,
      normalizers.NORMALIZERS['sinkhorn'](num_iters),
      remat=True,
    )
    x = jnp.zeros((16, 32, WIDTH))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    gradient = jax.jit(jax.grad(lambda p: (model.apply(p, x) ** 2).sum()))
    analysis = gradient.lower(params).compile().memory_analysis()
    return analysis.temp_size_in_bytes

  def of_a_layer(num_iters):
    return (temp_bytes(24, num_iters) - temp_bytes(1, num_iters)) / 23

  assert of_a_layer(10) < 1.5 * of_a_layer(0)


# J04
def test_compile_time_does_not_grow_with_depth():
  def equations(num_layers):
    model = make(num_layers=num_layers)
    x = jnp.zeros((1, LENGTH, WIDTH))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda p: model.apply(p, x).sum()
    return len(str(jax.make_jaxpr(jax.grad(loss))(params)).splitlines())

  assert equations(24) == equations(12)
