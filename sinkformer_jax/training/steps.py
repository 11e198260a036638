"""State, training step and evaluation step."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import numerics
from sinkformer_jax import tasks
from sinkformer_jax.training import sharding

Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
  """What a checkpoint holds.

  Attributes:
    step: number of updates made.
    params: parameters, float32.
    opt_state: of the optax transformation.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def create_state(
  model: nn.Module,
  tx: optax.GradientTransformation,
  info: data.DatasetInfo,
  seed: int | jax.Array,
) -> TrainState:
  """Fresh state. Parameters depend on the seed, not on the normalizer."""
  params = model.init(numerics.key(seed), info.example())['params']
  return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def make_train_step(
  model: nn.Module,
  tx: optax.GradientTransformation,
  schedule: optax.Schedule,
  mesh: jax.sharding.Mesh,
  task: tasks.Task = tasks.classification,
) -> Callable[[TrainState, dict, jax.Array], tuple[TrainState, Metrics]]:
  """Builds the jitted training step, which donates the state it is given.

  Args:
    model: the model.
    tx: the optimizer.
    schedule: learning rate, for the metrics.
    mesh: devices.
    task: gives the loss and other scores.

  Returns:
    ``(state, batch, seed) -> (state, metrics)``. The seed is that of dropout;
    every step has its own key. It is an argument, so that runs of any seed have
    one compiled program. Metrics are numbers, and for each layer ``row_error``,
    ``column_error`` and ``hidden_rms``.
  """
  model = sharding.on_each_device(model, mesh)

  def train_step(state, batch, seed):
    rngs = {'dropout': jax.random.fold_in(numerics.key(seed), state.step)}

    inputs, mask = data.model_inputs(batch)

    def loss_fn(params):
      outputs, sown = model.apply(
        {'params': params},
        inputs,
        mask=mask,
        deterministic=False,
        rngs=rngs,
        mutable=[attention.MONITOR],
      )
      scores = {k: v.mean() for k, v in task(outputs, batch).items()}
      return scores['loss'], {**scores, **monitored(sown)}

    (_, scores), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
      state.params
    )
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      **scores,
      'learning_rate': schedule(state.step),
      'gradient_norm': optax.tree.norm(gradient),
      'parameter_norm': optax.tree.norm(params),
    }
    return TrainState(state.step + 1, params, opt_state), metrics

  return jax.jit(
    train_step, donate_argnums=0, out_shardings=sharding.replicated(mesh)
  )


def make_eval_step(
  model: nn.Module,
  mesh: jax.sharding.Mesh,
  task: tasks.Task = tasks.classification,
) -> Callable[[Any, dict], Metrics]:
  """Builds the jitted evaluation step.

  Returns:
    ``(params, batch) -> metrics``: for each example the scores of the task and
    the batch's ``_mask``, for each layer ``row_error``, ``column_error`` and
    ``hidden_rms``.
  """
  model = sharding.on_each_device(model, mesh)

  def eval_step(params, batch):
    inputs, mask = data.model_inputs(batch)
    outputs, sown = model.apply(
      {'params': params}, inputs, mask=mask, mutable=[attention.MONITOR]
    )
    # The mask goes along: each process has that of its own rows alone.
    scores = {**task(outputs, batch), '_mask': batch['_mask']}
    return {**scores, **monitored(sown)}

  return jax.jit(eval_step, out_shardings=sharding.replicated(mesh))


def monitored(sown) -> Metrics:
  """What the blocks monitor, ``{name: [num_layers]}``."""
  blocks = sown[attention.MONITOR]['encoder']['blocks']
  return {**blocks['attention'], 'hidden_rms': blocks['hidden_rms']}
