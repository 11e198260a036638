"""Learning-rate schedules and the optimizer."""

import ml_collections
import optax


def create_schedule(
  config: ml_collections.ConfigDict, total_steps: int
) -> optax.Schedule:
  """Learning rate of the update at a step, counted from 0.

  It rises linearly over the first `warmup_steps` updates, the first of which
  has ``learning_rate / warmup_steps`` (never 0) and the last the full rate.
  Then it stays ('constant'), falls to 0 by half a cosine ('cosine'; the last
  update still has a little), or is multiplied by `step_factor` from each of
  `step_boundaries` on ('step').

  Args:
    config: the section `config.optimizer`.
    total_steps: updates in the whole run.

  Returns:
    A function from step to learning rate.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  if config.schedule == 'constant':
    after = optax.constant_schedule(peak)
  elif config.schedule == 'cosine':
    after = optax.cosine_decay_schedule(peak, max(total_steps - warmup, 1))
  elif config.schedule == 'step':
    after = optax.piecewise_constant_schedule(
      peak,
      {
        # join_schedules counts from the end of the warm-up.
        boundary - warmup: config.step_factor
        for boundary in config.step_boundaries
      },
    )
  else:
    raise ValueError(f'Unknown schedule {config.schedule!r}.')
  if warmup == 0:
    return after
  rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([rise, after], [warmup])


def create_optimizer(
  config: ml_collections.ConfigDict, total_steps: int
) -> optax.GradientTransformation:
  """Adam with a clipped gradient norm; AdamW if `weight_decay` is set.

  Args:
    config: the section `config.optimizer`; `clip_norm=0` does not clip.
    total_steps: updates in the whole run.

  Returns:
    The optax transformation.
  """
  transformations = []
  if config.clip_norm:
    transformations.append(optax.clip_by_global_norm(config.clip_norm))
  transformations.append(
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon)
  )
  if config.weight_decay:
    transformations.append(optax.add_decayed_weights(config.weight_decay))
  transformations.append(
    optax.scale_by_learning_rate(create_schedule(config, total_steps))
  )
  return optax.chain(*transformations)
