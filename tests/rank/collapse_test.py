"""Deflated propagation against high precision and the encoder itself."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from sinkformer_jax import attention
from sinkformer_jax import encoder
from sinkformer_jax import normalizers
from sinkformer_jax.rank import collapse
from tests.sinkhorn import sinkhorn_test

WIDTH, LENGTH, HEADS = 4, 5, 2


def encoder_params(
  seed, num_layers, width=WIDTH, gain=1.0, biases=True, talking_heads=0
):
  """Random parameters of an encoder, in float64."""
  rng = np.random.default_rng(seed)

  def normal(*shape, mean=0.0, scale=1.0):
    return mean + scale * rng.standard_normal((num_layers, *shape))

  def dense():
    return {
      'kernel': normal(width, width, scale=gain / np.sqrt(width)),
      'bias': normal(width, scale=0.3 * biases),
    }

  blocks = {
    'attention': {k: dense() for k in ('query', 'key', 'value', 'out')},
    'attention_norm': {
      'scale': normal(width, mean=1, scale=0.2),
      'bias': normal(width, scale=0.2),
    },
  }
  if talking_heads:
    for name in ('logits_mix', 'weights_mix'):
      mix = normal(talking_heads, talking_heads, scale=0.3)
      blocks['attention'][name] = mix + np.eye(talking_heads)
  ffn = {
    'expand': (width, 2 * width),
    'contract': (2 * width, width),
  }
  blocks['ffn'] = {
    name: {
      'kernel': normal(*shape, scale=gain / np.sqrt(shape[0])),
      'bias': normal(shape[1], scale=0.3 * biases),
    }
    for name, shape in ffn.items()
  }
  blocks['ffn_norm'] = {
    'scale': normal(width, mean=1, scale=0.2),
    'bias': normal(width, scale=0.2),
  }
  norm = jax.tree.map(lambda p: p[0], blocks['attention_norm'])
  return {'blocks': blocks, 'norm': norm}


def tokens(seed=0, *shape, mean=1.0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape or (LENGTH, WIDTH))
  return x + mean * rng.standard_normal(x.shape[-1])


# The oracle: what the encoder computes, as plain as can be, in as many digits
# as it takes. Object arrays of mpmath numbers.

exact = np.vectorize(mpmath.mpf, otypes=[object])
_exp = np.vectorize(mpmath.exp, otypes=[object])
_sqrt = np.vectorize(mpmath.sqrt, otypes=[object])
_tanh = np.vectorize(mpmath.tanh, otypes=[object])


def center(x):
  return x - x.sum(0) / len(x)


def frobenius(x):
  return mpmath.sqrt((x**2).sum())


def exact_weights(logits, num_iters):
  weights = _exp(logits)
  weights = weights / weights.sum(1, keepdims=True)
  for _ in range(num_iters):
    weights = weights / weights.sum(0)
    weights = weights / weights.sum(1, keepdims=True)
  return weights


def _exact_norm(x, p):
  x = x - x.sum(1, keepdims=True) / x.shape[1]
  variance = (x**2).sum(1, keepdims=True) / x.shape[1]
  return x / _sqrt(variance + mpmath.mpf(1e-6)) * p['scale'] + p['bias']


def _exact_attention(x, p, num_heads, num_iters):
  def dense(x, name):
    return x @ p[name]['kernel'] + p[name]['bias']

  query, key, value = (dense(x, k) for k in ('query', 'key', 'value'))
  size = x.shape[1] // num_heads
  heads = [slice(h * size, (h + 1) * size) for h in range(num_heads)]
  logits = [query[:, s] @ key[:, s].T / mpmath.sqrt(size) for s in heads]
  logits = np.stack(logits)
  if 'logits_mix' in p:
    logits = np.einsum('hij,hg->gij', logits, p['logits_mix'])
  weights = np.stack([exact_weights(c, num_iters) for c in logits])
  if 'weights_mix' in p:
    weights = np.einsum('hij,hg->gij', weights, p['weights_mix'])
  mixed = [w @ value[:, s] for w, s in zip(weights, heads, strict=True)]
  return dense(np.concatenate(mixed, 1), 'out')


def _exact_feed_forward(x, p):
  h = x @ p['expand']['kernel'] + p['expand']['bias']
  inner = mpmath.sqrt(2 / mpmath.pi) * (h + mpmath.mpf('0.044715') * h**3)
  h = h / 2 * (1 + _tanh(inner))
  return h @ p['contract']['kernel'] + p['contract']['bias']


def exact_hidden(params, x, num_heads, num_iters, norm_position, ffn=False):
  params = jax.tree.map(exact, params)
  hidden = [exact(x)]
  for layer in range(len(params['blocks']['attention_norm']['scale'])):
    p = jax.tree.map(lambda a, layer=layer: a[layer], params['blocks'])
    x = hidden[-1]
    if norm_position == 'pre':
      x = _exact_norm(x, p['attention_norm'])
    x = _exact_attention(x, p['attention'], num_heads, num_iters)
    if norm_position == 'post':
      x = _exact_norm(x, p['attention_norm'])
    if ffn:
      y = _exact_norm(x, p['ffn_norm']) if norm_position == 'pre' else x
      x = x + _exact_feed_forward(y, p['ffn'])
      if norm_position == 'post':
        x = _exact_norm(x, p['ffn_norm'])
    hidden.append(x)
  return hidden


def check_exact(states, hidden):
  """Eight digits of all there is: log-residual, residual, mean token."""
  for state, x in zip(states, hidden, strict=True):
    residual = center(x)
    norm = frobenius(residual)
    expected = float(mpmath.log10(norm))
    np.testing.assert_allclose(state.log10_residual('fro'), expected, 1e-10)
    error = abs(mpmath.log(norm) - mpmath.mpf(float(state.log_scale)))
    assert error < 1e-8
    residual = (residual / norm).astype(float)
    np.testing.assert_allclose(state.residual, residual, 0, 1e-9)
    np.testing.assert_allclose(
      state.log10_residual() - state.log10_residual('fro'),
      np.log10(np.linalg.norm(residual, 2)),
      rtol=0,
      atol=1e-9,
    )
    mean = (x.sum(0) / len(x)).astype(float)
    np.testing.assert_allclose(state.mean, mean, 1e-9, 1e-12)


@pytest.mark.parametrize('num_iters', [0, 1, 4])
@pytest.mark.parametrize('norm_position', [None, 'pre', 'post'])
@pytest.mark.parametrize('talking_heads', [False, True])
def test_high_precision(norm_position, num_iters, talking_heads):
  params = encoder_params(3, num_layers=6, talking_heads=HEADS * talking_heads)
  x = 0.3 * tokens()
  with mpmath.workdps(1000):
    hidden = exact_hidden(params, x, HEADS, num_iters, norm_position)
    states = collapse.propagate(params, x, HEADS, num_iters, norm_position)
    check_exact(states, hidden)
  if norm_position is None:
    assert states[-1].log10_residual() < -290


@pytest.mark.parametrize(
  ('norm_position', 'gain'),
  # Without LayerNorm large weights make large numbers, not a small residual.
  [(None, 1.0), ('pre', 1.0), ('post', 1.0), ('pre', 3.0), ('post', 3.0)],
)
def test_high_precision_with_ffn(norm_position, gain):
  params = encoder_params(9, num_layers=5, gain=gain)
  x = 0.3 * tokens()
  with mpmath.workdps(300):
    hidden = exact_hidden(params, x, HEADS, 1, norm_position, ffn=True)
    states = collapse.propagate(params, x, HEADS, 1, norm_position, ffn=True)
    check_exact(states, hidden)
  whole = np.linalg.norm(hidden[-1].astype(float), 2)
  assert states[-1].log10_whole() == pytest.approx(np.log10(whole), abs=1e-12)
  if norm_position == 'post' and gain == 1:
    assert states[-1].log10_residual() < -60


def test_high_precision_large_logits():
  # Tokens and weights as large as in a trained model: logits of some ten, so
  # that nothing is small in the first layers.
  params = encoder_params(5, num_layers=3, gain=3.0)
  for num_iters in (0, 50):
    with mpmath.workdps(100):
      hidden = exact_hidden(params, 3 * tokens(), HEADS, num_iters, 'pre')
      states = collapse.propagate(params, 3 * tokens(), HEADS, num_iters)
      check_exact(states, hidden)


def test_far_below_float64():
  num_iters = 1
  params = encoder_params(1, num_layers=8, width=2)
  x = 0.3 * tokens(0, 3, 2)
  with mpmath.workdps(10_600):
    hidden = exact_hidden(params, x, 1, num_iters, None)
    states = collapse.propagate(params, x, 1, num_iters, None)
    check_exact(states, hidden)
  assert states[-1].log10_residual() < -10_000


# The encoder itself.


@pytest.mark.parametrize(
  ('norm_position', 'num_iters', 'talking_heads', 'ffn', 'deepnorm'),
  [
    ('pre', 0, False, False, False),
    ('pre', 50, True, True, False),
    ('post', 0, True, True, False),
    ('post', 50, False, False, False),
    # Without skip and FFN, DeepNorm's factors multiply nothing.
    ('post', 50, False, False, True),
  ],
)
def test_encoder(norm_position, num_iters, talking_heads, ffn, deepnorm):
  heads, width, layers = 2, 8, 3
  x = tokens(1, 2, 6, width, mean=0.1)
  normalizer = 'sinkhorn' if num_iters else 'softmax'
  params = encoder_params(
    0, layers, width, gain=2.0, talking_heads=heads * talking_heads
  )
  if norm_position == 'post':
    del params['norm']
  with jax.enable_x64(True):
    model = encoder.Encoder(
      num_layers=layers,
      num_heads=heads,
      ffn_dim=2 * width,
      normalizer=normalizers.NORMALIZERS[normalizer](num_iters),
      norm_position=norm_position,
      talking_heads=talking_heads,
      deepnorm=deepnorm,
      dtype=np.float64,
    )
    ablation = encoder.Ablation(skip=False, ffn=ffn)
    result, capture = jax.jit(
      lambda x: model.apply(
        {'params': params},
        x,
        ablation=ablation,
        mutable=[attention.CAPTURE],
      )
    )(x)
    capture = capture[attention.CAPTURE]
    hidden = [capture['embedding'], *capture['blocks']['hidden']]
    hidden = [np.asarray(h) for h in (*hidden, result)]
  assert hidden[0].dtype == np.float64
  states = collapse.propagate(params, x, heads, num_iters, norm_position, ffn)
  last = states[-1]
  if norm_position == 'pre':
    last = collapse.layer_norm(last, params['norm'])
  for state, expected in zip([*states, last], hidden, strict=True):
    np.testing.assert_allclose(state.tokens(), expected, 0, 1e-12)
    size = np.linalg.norm(
      expected - expected.mean(-2, keepdims=True), 2, (1, 2)
    )
    # There is something to compare: far more than rounding.
    assert size.min() > 1e-3
    np.testing.assert_allclose(state.log10_residual(), np.log10(size), 0, 1e-9)


# The law.


@pytest.mark.parametrize('num_iters', [0, 50])
@pytest.mark.parametrize('norm_position', [None, 'pre', 'post'])
@pytest.mark.parametrize('biases', [False, True])
def test_exponent_is_3(norm_position, num_iters, biases):
  params = encoder_params(7, num_layers=24, width=8, biases=biases)
  states = collapse.propagate(
    params, 0.5 * tokens(0, 6, 8), 2, num_iters, norm_position
  )
  curve = np.array([state.log10_residual() for state in states])
  assert np.isfinite(curve).all()
  assert curve[-1] < -1e10
  collapsed = curve[curve < -20]
  assert len(collapsed) > 15
  ratios = collapsed[1:] / collapsed[:-1]
  np.testing.assert_allclose(ratios[-5:], 3, 0, 1e-6)
  # Three times the logarithm and a number that does not grow.
  assert np.abs(collapsed[1:10] - 3 * collapsed[:9]).max() < 8


@pytest.mark.parametrize(('mean', 'order'), [(0.0, 4), (1.0, 1)])
def test_normalizers_agree_once_collapsed(mean, order):
  """But for sigma with a mean token, and for sigma ** 4 without."""
  params = encoder_params(2, num_layers=1, biases=False)
  block = jax.tree.map(lambda p: p[0], params['blocks'])
  start = collapse.deflate(tokens(3))
  differences = []
  for sigma in (1e-1, 1e-2):
    x = collapse.Deflated(
      mean * start.mean, start.residual, np.log(np.float64(sigma))
    )
    softmax, sinkhorn = (
      collapse.attend(x, block['attention'], HEADS, num_iters)
      for num_iters in (0, 50)
    )
    differences.append(np.linalg.norm(softmax.residual - sinkhorn.residual))
  assert differences[0] > 0
  measured = np.log10(differences[0] / differences[1])
  np.testing.assert_allclose(measured, order, 0, 0.05)


# The weights alone.


@pytest.mark.parametrize('num_iters', [0, 1, 50])
@pytest.mark.parametrize('scale', [1e-3, 1.0, 100.0])
def test_attention_deviation(num_iters, scale):
  rng = np.random.default_rng(0)
  shape = (3, 2, 12)
  bias = np.sqrt(scale) * rng.standard_normal(shape)
  interaction = rng.standard_normal((*shape, 12))
  # Without the part that a residual of zero mean does not have.
  interaction -= interaction.mean(-2, keepdims=True)
  base, deviation = collapse.attention_deviation(
    bias, interaction, np.full(shape[:2], scale), num_iters
  )
  weights = base[..., None, :] + scale * deviation
  logits = bias[..., None, :] + scale * interaction
  expected = sinkhorn_test.oracle(logits, num_iters)
  np.testing.assert_allclose(weights, expected, 0, 1e-13)
  np.testing.assert_allclose(base.sum(-1), 1, 1e-14)
  size = np.abs(deviation).max()
  np.testing.assert_allclose(deviation.sum(-1), 0, 0, 1e-12 * size)


def test_one_key_takes_all():
  # The others have weights of 1e-20, and all differences rest on them.
  bias = np.array([50.0, 3.0, 1.0, 0.0])
  rng = np.random.default_rng(0)
  interaction = rng.standard_normal((4, 4))
  base, deviation = collapse.attention_deviation(
    bias, interaction, np.float64(0.5), 0
  )
  with mpmath.workdps(80):
    weights = exact_weights(exact(bias) + exact(interaction) / 2, 0)
    no_interaction = exact_weights(exact(bias)[None], 0)
    expected = ((weights - no_interaction) * 2).astype(float)
    expected_base = no_interaction[0].astype(float)
  assert np.abs(expected).max() < 1e-19
  np.testing.assert_allclose(base, expected_base, 1e-12)
  np.testing.assert_allclose(deviation, expected, 1e-12)


def test_batch():
  params = encoder_params(4, num_layers=8, width=8)
  x = tokens(5, 3, 2, 6, 8)
  states = collapse.propagate(params, x, HEADS, 50)
  for index in np.ndindex(3, 2):
    alone = collapse.propagate(params, x[index], HEADS, 50)
    for state, single in zip(states, alone, strict=True):
      np.testing.assert_allclose(
        state.log_scale[index], single.log_scale, 1e-11
      )
      np.testing.assert_allclose(state.mean[index], single.mean, 0, 1e-11)


def test_float64_from_any_arrays():
  """Whatever the dtype of JAX, which is float32 here."""
  params = encoder_params(0, num_layers=5)
  # Numbers that float32 holds exactly.
  params, x = jax.tree.map(np.float32, (params, tokens()))
  expected = collapse.propagate(params, x, HEADS, 3)
  states = collapse.propagate(*jax.tree.map(jnp.asarray, (params, x)), HEADS, 3)
  for state, other in zip(states, expected, strict=True):
    for name in ('mean', 'residual', 'log_scale'):
      array = getattr(state, name)
      assert isinstance(array, np.ndarray | np.float64)
      assert array.dtype == np.float64
      np.testing.assert_array_equal(array, getattr(other, name))
  base, deviation = collapse.attention_deviation(
    jnp.zeros(3), jnp.ones((3, 3)), 0.5, 2
  )
  assert base.dtype == deviation.dtype == np.float64


# What cannot be followed.


def test_no_residual():
  params = encoder_params(0, num_layers=2)
  same = np.broadcast_to(tokens()[:1], (LENGTH, WIDTH))
  with pytest.raises(ValueError, match='equal'):
    collapse.propagate(params, same, HEADS, 0)
  params['blocks']['attention']['value']['kernel'][1] = 0
  with pytest.raises(ValueError, match='equal'):
    collapse.propagate(params, tokens(), HEADS, 0)


def test_invalid():
  params = encoder_params(0, num_layers=2)
  run = collapse.propagate
  with pytest.raises(ValueError, match='not finite'):
    run(params, np.where(tokens() > 1, np.nan, tokens()), HEADS, 0)
  with pytest.raises(ValueError, match='num_heads=3'):
    run(params, tokens(), 3, 0)
  with pytest.raises(ValueError, match='num_iters'):
    run(params, tokens(), HEADS, -1)
  with pytest.raises(ValueError, match="'middle'"):
    run(params, tokens(), HEADS, 0, 'middle')
  params['blocks']['attention']['out']['bias'][1, 0] = np.inf
  with pytest.raises(ValueError, match='not finite'):
    run(params, tokens(), HEADS, 0)
