"""The training step that is measured: forward, backward, plain SGD update."""

from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import optax

from analysis.cost import forms
from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import models
from sinkformer_jax import tasks

LEARNING_RATE = 1e-3
NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is trained, and on how much.

  Attributes:
    model: the section `config.model` of a vision transformer.
    tokens: length of a sequence, the class token included.
    batch: examples in a batch.
  """

  model: ml_collections.FrozenConfigDict
  tokens: int
  batch: int

  def with_model(self, **fields) -> 'Setting':
    """The same with other fields of the model."""
    model = ml_collections.FrozenConfigDict({**self.model.to_dict(), **fields})
    return dataclasses.replace(self, model=model)

  @property
  def title(self) -> str:
    """For tables."""
    return f'{self.tokens} tokens, batch {self.batch}'

  @property
  def patches(self) -> int:
    """Number of patches of an image."""
    return self.tokens - (self.model.pooling == 'cls')

  @property
  def image_shape(self) -> tuple[int, int, int]:
    """One row of patches: any number of tokens is possible, primes too."""
    side = self.model.patch_size
    return (side, side * self.patches, 1)


def create_model(setting: Setting) -> nn.Module:
  """The model of a setting."""
  model = setting.model
  info = data.DatasetInfo(
    name='random',
    num_classes=NUM_CLASSES,
    input_shape=setting.image_shape,
    splits={},
    provenance={},
  )
  normalizer = forms.FORMS[model.normalizer](model.num_iters)
  return models.create_model(model, info, normalizer)


def create_params(setting: Setting) -> Any:
  """Fresh parameters; they do not depend on normalizer and batch."""
  setting = setting.with_model(normalizer='softmax')
  images = jnp.zeros((1, *setting.image_shape))
  init = _jitted_init(dataclasses.replace(setting, batch=1))
  return init(jax.random.key(0), images)['params']


@functools.cache
def _jitted_init(setting):
  return jax.jit(create_model(setting).init)


def create_batch(setting: Setting) -> dict[str, jax.Array]:
  """Random standardized images and labels."""
  keys = jax.random.split(jax.random.key(1))
  shape = (setting.batch, *setting.image_shape)
  return {
    'image': jax.random.normal(keys[0], shape),
    'label': jax.random.randint(keys[1], (setting.batch,), 0, NUM_CLASSES),
  }


def loss_and_gradient(setting: Setting) -> Callable[[Any, dict], tuple]:
  """``(params, batch) -> (mean cross entropy, gradient)``, not yet jitted."""
  model = create_model(setting)

  def loss_fn(params, batch):
    outputs = model.apply({'params': params}, batch['image'])
    return tasks.classification(outputs, batch)['loss'].mean()

  return jax.value_and_grad(loss_fn)


@functools.cache
def compile_step(setting: Setting) -> tuple[jax.stages.Compiled, float]:
  """The training step of a setting, compiled once.

  Returns:
    ``(params, batch) -> (params, loss)``, which donates `params`; and how many
    seconds it took to trace and compile.
  """

  def step(params, batch):
    loss, gradient = loss_and_gradient(setting)(params, batch)
    return optax.tree.add_scale(params, -LEARNING_RATE, gradient), loss

  arguments = jax.eval_shape(
    lambda: (create_params(setting), create_batch(setting))
  )
  start = time.perf_counter()
  program = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
  return program, time.perf_counter() - start


def training(setting: Setting, params: Any = None) -> Callable[[], jax.Array]:
  """A training that makes one step a call.

  Args:
    setting: what is trained.
    params: where it starts; fresh ones if None.

  Returns:
    A function that makes a step and returns the loss.
  """
  (step, _), batch = compile_step(setting), create_batch(setting)
  # Its own copy: the step donates it.
  state = jax.tree.map(
    jnp.copy, create_params(setting) if params is None else params
  )

  def call():
    nonlocal state
    state, loss = step(state, batch)
    return loss

  return call


@functools.cache
def _attention(setting):
  """``params -> (spread, column_error)``, each ``[num_layers]``."""
  model = create_model(setting)
  images = create_batch(dataclasses.replace(setting, batch=8))['image']

  @jax.jit
  def numbers(params):
    collections = [attention.CAPTURE, attention.MONITOR]
    _, sown = model.apply({'params': params}, images, mutable=collections)
    captured, monitored = (
      sown[x]['encoder']['blocks']['attention'] for x in collections
    )
    # A shift of a row changes no weight, so it is no spread.
    spread = captured['logits'].std(-1)  # [layers, batch, heads, rows]
    spread = jnp.sqrt((spread**2).mean((1, 2, 3)))
    return spread, monitored['column_error']

  return numbers


def about_attention(setting: Setting, params: Any) -> dict[str, float]:
  """Spread of the logits, and how doubly stochastic the weights are.

  Of 8 examples: the standard deviation of the logits about the mean of their
  row, over all layers, and the largest column error.
  """
  spread, column_error = _attention(setting)(params)
  return {
    'logit_spread': float(jnp.sqrt((spread**2).mean())),
    'column_error': float(column_error.max()),
  }


def set_logit_spread(setting: Setting, params: Any, spread: float) -> Any:
  """Scales the query kernels so that the logits have a given spread.

  Each layer gets its own factor, for its query kernel and bias. What a layer
  attends to changes the logits of the next ones, so it is measured again until
  every layer is within 1 %.

  Args:
    setting: the model.
    params: its parameters; they are not changed.
    spread: wanted of every layer, see `about_attention`.

  Returns:
    New parameters.

  Raises:
    RuntimeError: if it cannot be reached.
  """
  for _ in range(setting.model.num_layers + 10):
    factor = spread / _attention(setting)(params)[0]
    if jnp.abs(factor - 1).max() < 0.01:
      return params
    params = _scale_queries(params, factor)
  raise RuntimeError(f'the logits of {setting} do not reach {spread}.')


def _scale_queries(params, factor):
  def scale(path, x):
    is_query = any(getattr(key, 'key', None) == 'query' for key in path)
    return x * factor.reshape(-1, *[1] * (x.ndim - 1)) if is_query else x

  return jax.tree_util.tree_map_with_path(scale, params)


def model_flops(setting: Setting) -> int:
  """Floating-point operations of the matrix products of a training step.

  The forward pass is that of the layers, see `encoder.layer_flops`, and embeds
  patches and reads classes. The backward pass takes two products for each, so a
  step is three forward passes. The updates of Sinkhorn are not counted: the
  number says what has to be computed, not what a normalizer adds to it.
  """
  model = setting.model
  layers = model.num_layers * encoder.layer_flops(model, setting.tokens)
  embedding = 2 * setting.patches * model.patch_size**2 * model.width
  return (
    3 * setting.batch * (layers + embedding + 2 * model.width * NUM_CLASSES)
  )
