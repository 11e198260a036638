"""Parts of `analysis.cost` about the training step; see `cost_setup`."""

from collections.abc import Iterable
import dataclasses
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from analysis.common import machine
from analysis.common import timing
from analysis.cost import model as cost_model
from analysis.cost import setup as cost_setup
from sinkformer_jax import models

Alternative = timing.Alternative
Row = timing.Row
Setting = cost_model.Setting

# The forms that are measured on every device.
FORMS = ('softmax', 'sinkhorn')


def step_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """The training step: ours, at several logit spreads, and PyTorch's."""
  rows = []
  for shape in options.shapes:
    base = options.setting(*shape)
    alternatives = fresh_steps(base)
    setting = base.with_model(normalizer='sinkhorn')
    for spread in (1, 3):
      report(f'{base.title}: scaling the logits to a spread of {spread}')
      params = cost_model.set_logit_spread(
        setting, cost_model.create_params(setting), spread
      )
      name = f'sinkhorn, logit spread {spread}'
      alternatives[name] = _step(setting, params)
    for form in FORMS:
      report(f'{base.title}: PyTorch {form}, memory of a step')
      alternatives[f'PyTorch {form}'] = _torch_step(
        base.with_model(normalizer=form), ratio_to=form
      )
    rows += timing.compare(base.title, alternatives, options.repeats, report)
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
  spread, column_error = cost_model.attention_numbers(setting, params)
  return Alternative(
    cost_model.training(setting, params),
    about={
      'memory_mb': cost_model.compile_step(setting).scratch_mb,
      'memory_of': cost_setup.XLA_SCRATCH,
      'logit_spread': float(jnp.sqrt((spread**2).mean())),
      'column_error': float(column_error.max()),
    },
    ratio_to='softmax',
  )


def _torch_step(setting, ratio_to, with_memory=True):
  note = cost_setup.why_not('torch') or _too_much_memory(setting)
  if note:
    return Alternative(None, {'note': note})
  import torch

  from analysis.cost import torch as cost_torch

  about = {}
  model = setting.model.to_dict()
  if with_memory:
    arguments = {
      'model': model,
      'patches': setting.patches,
      'num_classes': cost_model.NUM_CLASSES,
      'batch': setting.batch,
    }
    memory = machine.child('analysis.cost.torch', 'step_memory_mb', arguments)
    about = {'memory_mb': memory, 'memory_of': cost_setup.RSS_GROWTH}
  vit = cost_torch.VisionTransformer(
    model, setting.patches, cost_model.NUM_CLASSES
  )
  params = cost_model.create_params(setting)
  cost_torch.load(vit, jax.tree.map(np.asarray, params))
  batch = cost_model.create_batch(setting)
  patches = models.split_patches(batch['image'], setting.model.patch_size)
  call = cost_torch.training(
    vit,
    torch.tensor(np.array(patches)),
    torch.tensor(np.array(batch['label'])).long(),
    cost_model.LEARNING_RATE,
  )
  return Alternative(call, about, ratio_to)


def _too_much_memory(setting):
  """Autograd keeps one matrix for each update of each head."""
  if setting.model.normalizer == 'softmax':
    return ''
  model = setting.model
  matrices = model.num_layers * setting.batch * model.num_heads
  needed = 1.2 * matrices * 2 * model.num_iters * setting.tokens**2 * 4 / 1e6
  available = machine.available_memory_mb()
  if available is None or needed < available:
    return ''
  return f'needs {needed:.0f} MB of memory; {available:.0f} MB are free'


def rate_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """Model FLOPs of a step over its time, against a large matrix product.

  The share is that of the fastest product of the same round.
  """
  size = options.preset.product
  rows = []
  for shape in options.shapes:
    base = options.setting(*shape)
    products = _products(size)
    steps = fresh_steps(base)
    steps['PyTorch softmax'] = _torch_step(
      base.with_model(normalizer='softmax'), '', with_memory=False
    )
    flops = dict.fromkeys(products, 2 * size**3)
    flops |= dict.fromkeys(steps, cost_model.model_flops(base))
    alternatives = {
      # Times are compared as rates here.
      name: dataclasses.replace(x, about={}, ratio_to='') if x.call else x
      for name, x in {**products, **steps}.items()
    }
    table = timing.compare(base.title, alternatives, options.repeats, report)
    rows += _with_rates(table, flops, list(products))
  return rows


def _products(size):
  x = jax.random.normal(jax.random.key(2), (size, size))
  product = jax.jit(jnp.matmul)
  note = cost_setup.why_not('torch')
  alternatives = {
    f'product of {size}': Alternative(lambda: product(x, x)),
    f'PyTorch product of {size}': Alternative(None, {'note': note}),
  }
  if not note:
    import torch

    torch.set_num_threads(machine.num_threads())
    y = torch.tensor(np.array(x))
    alternatives[f'PyTorch product of {size}'] = Alternative(lambda: y @ y)
  return alternatives


def _with_rates(rows, flops, products):
  """Adds ``gflop``, ``gflop_per_s`` and ``share_percent``."""
  rates = {
    row['name']: [flops[row['name']] / 1e6 / ms for ms in row['times_ms']]
    for row in rows
    if 'times_ms' in row
  }
  best = [
    max(x)
    for x in zip(*(rates[p] for p in products if p in rates), strict=False)
  ]
  for row in rows:
    row['gflop'] = flops[row['name']] / 1e9
    if row['name'] in rates:
      own = rates[row['name']]
      shares = [100 * x / y for x, y in zip(own, best, strict=False)]
      row |= timing.spread('gflop_per_s', own)
      row |= timing.spread('share_percent', shares)
  return rows


def compile_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """From the start of a process to the end of its first training step.

  Each round starts with an empty compilation cache, and then starts another
  process that finds what the first one left.
  """
  tokens, batch = options.shapes[0]
  settings = {
    (form, depth): options.setting(
      tokens, batch, normalizer=form, num_layers=depth
    )
    for form in FORMS
    for depth in options.preset.depths
  }
  starts = {}
  for number in range(options.repeats):
    for (form, depth), setting in settings.items():
      report(f'round {number + 1} of {options.repeats}: {form}, {depth} layers')
      with tempfile.TemporaryDirectory() as cache:
        for state in ('empty', 'warm'):
          start = _first_step_in_a_process(setting, cache)
          starts.setdefault((form, depth, state), []).append(start)
  return [
    {
      'table': f'{tokens} tokens, batch {batch}: first step',
      'name': f'{form}, {depth} layers, {state} cache',
      'layers': depth,
      'cache': state,
      'repeats': len(both),
      **timing.spread('first_step_s', [x['first_step_s'] for x in both]),
      **timing.spread('compile_s', [x['compile_s'] for x in both]),
    }
    for (form, depth, state), both in starts.items()
  ]


def _first_step_in_a_process(setting, cache):
  start = time.time()
  result = machine.child(
    'analysis.cost.step',
    'first_step',
    {
      'model': setting.model.to_dict(),
      'tokens': setting.tokens,
      'batch': setting.batch,
      'platform': jax.default_backend(),
    },
    environment={
      # What the process that asks leaves of the memory of a GPU.
      'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.2',
      'JAX_COMPILATION_CACHE_DIR': cache,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    },
  )
  return {**result, 'first_step_s': result['end'] - start}


def first_step(
  model: dict[str, Any], tokens: int, batch: int, platform: str
) -> dict[str, float]:
  """Makes one training step; when it ended, and how long compiling took."""
  machine.select_platform(platform)
  setting = Setting(ml_collections.FrozenConfigDict(model), tokens, batch)
  jax.block_until_ready(cost_model.training(setting)())
  compile_s = cost_model.compile_step(setting).compile_s
  return {'end': time.time(), 'compile_s': compile_s}
