"""Parts of `analysis.cost` about the training step."""

from collections.abc import Iterable
import itertools
import logging
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from analysis.common import machine
from analysis.common import timing
from analysis.cost import model as cost_model
from analysis.cost import setup as cost_setup
from sinkformer_jax import models

logger = logging.getLogger('sinkformer_jax.cost')

Alternative = timing.Alternative
Setting = cost_model.Setting

# The forms that are measured on every device.
FORMS = ('softmax', 'sinkhorn')
# What the process that asks leaves of the memory of a GPU; and that all
# programs are kept.
_CHILD = {
  'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.2',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
}


def step_rows(options: cost_setup.Options) -> list[timing.Row]:
  """The training step: ours, at several logit spreads, and PyTorch's."""
  rows = []
  for shape in options.shapes:
    base = options.setting(*shape)
    alternatives = fresh_steps(base)
    setting = base.with_model(normalizer='sinkhorn')
    for spread in (1, 3):
      logger.info('%s: scaling logits to a spread of %d', base.title, spread)
      params = cost_model.set_logit_spread(
        setting, cost_model.create_params(setting), spread
      )
      name = f'sinkhorn, logit spread {spread}'
      alternatives[name] = _step(setting, params)
    for form in FORMS:
      logger.info('%s: PyTorch %s, memory of a step', base.title, form)
      setting = base.with_model(normalizer=form)
      alternatives[f'PyTorch {form}'] = timing.attempt(_torch_step, setting)
    rows += timing.compare(base.title, alternatives, options.repeats)
  return rows


def fresh_steps(
  base: Setting, forms: Iterable[str] = FORMS
) -> dict[str, Alternative]:
  """A training step from fresh parameters for each form, by its name."""
  settings = {x: base.with_model(normalizer=x) for x in forms}
  return {
    form: _step(setting, cost_model.create_params(setting))
    for form, setting in settings.items()
  }


def _step(setting, params):
  about = {
    **machine.planned(cost_model.compile_step(setting)[0]),
    **cost_model.about_attention(setting, params),
  }
  return Alternative(cost_model.training(setting, params), about, 'softmax')


def _torch_step(setting):
  machine.require('torch')
  _require_memory(setting)
  from analysis.cost import torch as cost_torch

  model = setting.model.to_dict()
  few = {'num_layers': 1, 'num_iters': min(model['num_iters'], 1)}
  memory = machine.grown(
    cost_torch.random_training,
    small={'model': {**model, **few}, 'batch': 1},
    full={'model': model, 'batch': setting.batch},
    patches=setting.patches,
    num_classes=cost_model.NUM_CLASSES,
  )
  return Alternative(_torch_training(setting), memory, model['normalizer'])


def _torch_training(setting):
  machine.require('torch')
  import torch

  from analysis.cost import torch as cost_torch

  vit = cost_torch.VisionTransformer(
    setting.model.to_dict(), setting.patches, cost_model.NUM_CLASSES
  )
  params = cost_model.create_params(setting)
  cost_torch.load(vit, jax.tree.map(np.asarray, params))
  batch = cost_model.create_batch(setting)
  patches = models.split_patches(batch['image'], setting.model.patch_size)
  return cost_torch.training(
    vit,
    torch.tensor(np.array(patches)),
    torch.tensor(np.array(batch['label'])).long(),
    cost_model.LEARNING_RATE,
  )


def _require_memory(setting):
  """Autograd keeps one matrix for each update of each head."""
  model = setting.model
  if model.normalizer != 'softmax':
    matrices = model.num_layers * setting.batch * model.num_heads
    machine.require_memory(matrices * setting.tokens**2, model.num_iters)


def rate_rows(options: cost_setup.Options) -> list[timing.Row]:
  """Model FLOPs of a step over its time, against a large matrix product.

  The share is that of the fastest product of the same round.
  """
  size = options.preset.product
  x = jax.random.normal(jax.random.key(2), (size, size))
  product = jax.jit(jnp.matmul)
  products = {
    f'product of {size}': Alternative(lambda: product(x, x)),
    f'PyTorch product of {size}': timing.attempt(_torch_product, x),
  }
  rows = []
  for shape in options.shapes:
    base = options.setting(*shape)
    settings = {x: base.with_model(normalizer=x) for x in FORMS}
    steps = {
      form: Alternative(cost_model.training(setting))
      for form, setting in settings.items()
    }
    steps['PyTorch softmax'] = timing.attempt(
      lambda setting: Alternative(_torch_training(setting)), settings['softmax']
    )
    table = timing.compare(base.title, {**products, **steps}, options.repeats)
    for row in table:
      is_product = row['name'] in products
      flops = 2 * size**3 if is_product else cost_model.model_flops(base)
      row['gflop'] = flops / 1e9
    rows += _with_rates(table, products)
  return rows


def _torch_product(x):
  machine.require('torch')
  import torch

  torch.set_num_threads(machine.num_threads())
  y = torch.tensor(np.array(x))
  return Alternative(lambda: y @ y)


def _with_rates(rows, products):
  """Adds ``gflop_per_s`` and ``share_percent``."""
  timed = {x['name']: x for x in rows if 'times_ms' in x}
  rates = {
    name: 1e3 * row['gflop'] / np.array(row['times_ms'])
    for name, row in timed.items()
  }
  best = np.max([rates[x] for x in products if x in rates], axis=0)
  for name, row in timed.items():
    row |= timing.spread('gflop_per_s', rates[name])
    share = 100 * rates[name] / best[: len(rates[name])]
    row |= timing.spread('share_percent', share)
  return rows


def compile_rows(options: cost_setup.Options) -> list[timing.Row]:
  """From the start of a process to the end of its first training step.

  Each round starts with an empty compilation cache, and then starts another
  process that finds what the first one left.
  """
  tokens, batch = options.shapes[0]
  starts = {}
  for number, form, depth in itertools.product(
    range(options.repeats), FORMS, options.preset.depths
  ):
    setting = options.setting(tokens, batch, normalizer=form, num_layers=depth)
    text = 'round %d of %d: %s, %d layers'
    logger.info(text, number + 1, options.repeats, form, depth)
    with tempfile.TemporaryDirectory() as cache:
      environment = {**_CHILD, 'JAX_COMPILATION_CACHE_DIR': cache}
      for state in ('empty', 'warm'):
        start = time.time()
        result = machine.child(
          first_step,
          environment,
          setting=setting,
          platform=jax.default_backend(),
        )
        times = starts.setdefault((form, depth, state), [])
        times.append((result['end'] - start, result['compile_s']))
  return [
    {
      'table': f'{tokens} tokens, batch {batch}: first step',
      'name': f'{form}, {depth} layers, {state} cache',
      'layers': depth,
      'cache': state,
      'repeats': len(times),
      **timing.spread('first_step_s', [x for x, _ in times]),
      **timing.spread('compile_s', [x for _, x in times]),
    }
    for (form, depth, state), times in starts.items()
  ]


def first_step(setting: Setting, platform: str) -> dict[str, float]:
  """Makes one training step; when it ended, and how long compiling took."""
  machine.select_platform(platform)
  jax.block_until_ready(cost_model.training(setting)())
  _, compile_s = cost_model.compile_step(setting)
  return {'end': time.time(), 'compile_s': compile_s}
