"""Part `rank` of `analysis.cost`: path products and their residuals."""

import functools

import numpy as np

from analysis.common import machine
from analysis.common import timing
from analysis.cost import setup as cost_setup
from sinkformer_jax import rank

Alternative = timing.Alternative

NUM_PATHS = 100
LOOP = 'NumPy loop, products alone'
FROBENIUS = 'sampled paths, Frobenius'


def rank_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[timing.Row]:
  """Path products at all depths against a plain loop over the same paths.

  Attention is softmax of random logits of unit spread, as many examples as a
  training step of the same table has.
  """
  model = options.preset.model
  rows = []
  for tokens, examples in options.shapes:
    shape = (model.num_layers, examples, model.num_heads, tokens)
    title = f'{tokens} tokens, {examples} examples, {NUM_PATHS} paths, float64'
    report(f'{title}: memory')
    alternatives = {}
    for name, call in _calls(shape).items():
      about = {} if name == LOOP else _memory(name, shape)
      base = FROBENIUS if name.startswith('exact') else LOOP
      alternatives[name] = Alternative(call, about, base)
    rows += timing.compare(title, alternatives, options.repeats, report)
  return rows


def _calls(shape):
  attention, heads = inputs(shape)

  def sampled(heads, norms):
    return lambda: rank.path_residuals(attention, heads, norms=norms)

  def exact(layers):
    return lambda: rank.exact_rms(attention, layers=layers)

  return {
    LOOP: functools.partial(plain_loop, attention, heads['first']),
    'sampled paths, products alone': sampled(heads['first'], ()),
    FROBENIUS: sampled(heads['first'], ('frobenius',)),
    'sampled paths, Frobenius and spectral': sampled(
      heads['first'], ('frobenius', 'spectral')
    ),
    'exact RMS, first layers': exact('first'),
    'exact RMS, drawn layers': exact('drawn'),
  }


def inputs(shape):
  """Attention ``[layers, batch, heads, n, n]``, and paths of both kinds."""
  num_layers, _, num_heads, tokens = shape
  weights = np.random.default_rng(0).standard_normal((*shape, tokens))
  np.exp(weights, out=weights)
  weights /= weights.sum(-1, keepdims=True)
  heads = {
    x: rank.sample_paths(0, num_layers, num_heads, NUM_PATHS, x)
    for x in ('first', 'drawn')
  }
  return weights, heads


def plain_loop(attention: np.ndarray, heads: np.ndarray) -> np.ndarray:
  """Products of whole paths through all layers, one matrix after the other.

  Returns:
    The last product of each example and path, ``[batch, num_paths, n, n]``.
  """
  num_layers, batch, _, n, _ = attention.shape
  products = np.empty((batch, heads.shape[1], n, n))
  for example in range(batch):
    for path, taken in enumerate(heads[-1]):
      product = attention[0, example, taken[0]]
      for layer in range(1, num_layers):
        product = attention[layer, example, taken[layer]] @ product
      products[example, path] = product
  return products


def _memory(name, shape):
  arguments = {'name': name, 'shape': shape}
  memory = machine.child('analysis.cost.rank', 'memory_mb', arguments)
  return {'memory_mb': memory, 'memory_of': cost_setup.RSS_GROWTH}


def memory_mb(name: str, shape: tuple[int, int, int, int]) -> float:
  """Growth of the peak memory of a process of its own, attention included."""
  num_layers, _, num_heads, _ = shape

  def call(shape):
    return lambda: _calls(shape)[name]()

  return machine.memory_growth_mb(
    call((num_layers, 1, num_heads, 4)), call(shape)
  )
