"""Part `rank` of `analysis.cost`: path products and their residuals."""

from collections.abc import Callable
import functools
import logging
from typing import Any

import numpy as np

from analysis.common import machine
from analysis.common import timing
from analysis.cost import setup as cost_setup
from sinkformer_jax import rank

logger = logging.getLogger('sinkformer_jax.cost')

NUM_PATHS = 100
LOOP = 'NumPy loop, products alone'
FROBENIUS = 'sampled paths, Frobenius'


def rank_rows(options: cost_setup.Options) -> list[timing.Row]:
  """Path products at all depths against a plain loop over the same paths.

  Attention is softmax of random logits of unit spread, as many examples as a
  training step of the same table has.
  """
  model = options.preset.model
  rows = []
  for tokens, examples in options.shapes:
    shape = (model.num_layers, examples, model.num_heads, tokens)
    title = f'{tokens} tokens, {examples} examples, {NUM_PATHS} paths, float64'
    logger.info('%s: memory', title)
    alternatives = {}
    for name, call in _calls(shape).items():
      about = {}
      if name != LOOP:
        small = (model.num_layers, 1, model.num_heads, 4)
        about = machine.grown(
          call_from_scratch,
          small={'shape': small},
          full={'shape': shape},
          name=name,
        )
      base = FROBENIUS if name.startswith('exact') else LOOP
      alternatives[name] = timing.Alternative(call, about, base)
    rows += timing.compare(title, alternatives, options.repeats)
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


def call_from_scratch(name: str, shape: tuple[int, ...]) -> Callable[[], Any]:
  """A call that makes its attention itself: memory holds that as well."""
  return lambda: _calls(shape)[name]()
