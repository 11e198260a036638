"""Parts of `analysis.cost` about the normalizer, alone and in the step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from analysis.common import machine
from analysis.common import timing
from analysis.cost import model as cost_model
from analysis.cost import setup as cost_setup
from analysis.cost import step as cost_step
from sinkformer_jax import sinkhorn

Alternative = timing.Alternative
Row = timing.Row


def normalizer_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """The normalizer alone, against other implementations on the same logits.

  Logits are random with unit spread. Errors are the largest differences to
  the log-space reference in float64, relative to its largest entry.
  """
  rows = []
  for tokens, batch in options.shapes:
    matrices = batch * options.preset.model.num_heads
    keys = jax.random.split(jax.random.key(0))
    shape = (matrices, tokens, tokens)
    arrays = [jax.random.normal(key, shape) for key in keys]
    exact = _exact(*arrays, options.num_iters)
    for what in ('value', 'value and gradient'):
      gradient = what != 'value'
      title = f'{tokens} tokens, {matrices} matrices, {what}'
      report(f'{title}: compiling')
      normalizers = _normalizers(options.num_iters)
      alternatives = _operators(normalizers, arrays, gradient, exact)
      for name, implicit in (('unrolled', False), ('implicit', True)):
        alternatives[f'ott-jax, {name}'] = _ott_operator(
          implicit, arrays, gradient, exact, options
        )
      alternatives['PyTorch autograd'] = _torch_operator(
        arrays, gradient, exact, options
      )
      rows += timing.compare(title, alternatives, options.repeats, report)
  return rows


def _normalizers(num_iters):
  """Softmax, Sinkhorn, and the reference, differentiated automatically."""

  def reference(logits, mask=None):
    return sinkhorn.sinkhorn_reference(logits, num_iters, mask)

  forms = {x: cost_model.FORMS[x](num_iters) for x in cost_step.FORMS}
  return {**forms, 'log-space reference': reference}


def _value_and_gradient(normalizer):
  def function(logits, cotangent):
    weights, vjp = jax.vjp(normalizer, logits)
    return weights, vjp(cotangent)[0]

  return function


def _operators(normalizers, arrays, gradient, exact):
  """Normalizers as alternatives; softmax is no Sinkhorn and has no errors."""
  return {
    name: _operator(
      normalizer, arrays, gradient, None if name == 'softmax' else exact
    )
    for name, normalizer in normalizers.items()
  }


def _operator(normalizer, arrays, gradient, exact):
  """One normalizer as an alternative; `exact` is from `_exact`, or None."""
  if gradient:
    function, arguments = _value_and_gradient(normalizer), arrays
  else:
    function, arguments = (lambda x: (normalizer(x), None)), arrays[:1]
  compiled = jax.jit(function).lower(*arguments).compile()
  about = {
    'memory_mb': compiled.memory_analysis().temp_size_in_bytes / 1e6,
    'memory_of': cost_setup.XLA_SCRATCH,
    **_errors(compiled(*arguments), exact),
  }
  return Alternative(lambda: compiled(*arguments), about, ratio_to='sinkhorn')


def _ott_operator(implicit, arrays, gradient, exact, options):
  note = cost_setup.why_not('ott')
  if note:
    return Alternative(None, {'note': note})
  from analysis.cost import ott as cost_ott

  normalizer = functools.partial(
    cost_ott.sinkhorn, num_iters=options.num_iters, implicit=implicit
  )
  try:
    return _operator(normalizer, arrays, gradient, exact)
  except jax.errors.JaxRuntimeError:
    # The linear system of implicit differentiation is singular, and its
    # iterative solver gives up on some matrices.
    return Alternative(None, {'note': 'its linear solver gave up'})


def _torch_operator(arrays, gradient, exact, options):
  note = cost_setup.why_not('torch')
  if note:
    return Alternative(None, {'note': note})
  import torch

  from analysis.cost import torch as cost_torch

  torch.set_num_threads(machine.num_threads())
  matrices, tokens, _ = arrays[0].shape
  memory = machine.child(
    'analysis.cost.torch',
    'sinkhorn_memory_mb',
    {
      'matrices': matrices,
      'tokens': tokens,
      'num_iters': options.num_iters,
      'gradient': gradient,
    },
  )
  call = cost_torch.sinkhorn_call(
    *(torch.tensor(np.array(x)) for x in arrays), options.num_iters, gradient
  )
  results = [None if x is None else jnp.asarray(x.numpy()) for x in call()]
  about = {
    'memory_mb': memory,
    'memory_of': cost_setup.RSS_GROWTH,
    **_errors(results, exact),
  }
  return Alternative(call, about, ratio_to='sinkhorn')


# As many matrices as are compared with float64.
_COMPARED = 8


def _exact(logits, cotangent, num_iters):
  """Value and gradient of the reference in float64, of the first matrices."""
  with jax.enable_x64(True):
    arguments = [
      jnp.asarray(np.asarray(x[:_COMPARED], np.float64))
      for x in (logits, cotangent)
    ]
    function = _value_and_gradient(
      lambda x: sinkhorn.sinkhorn_reference(x, num_iters)
    )
    return [np.asarray(x) for x in jax.jit(function)(*arguments)]


def _errors(results, exact):
  """Column error, and errors of value and gradient."""
  columns = sinkhorn.marginal_errors(results[0])[1]
  errors = {'column_error': float(columns.max())}
  for name, result, right in zip(
    ('value_error', 'gradient_error'), results, exact or (), strict=False
  ):
    if result is not None:
      difference = np.abs(np.asarray(result[:_COMPARED]) - right).max()
      errors[name] = float(difference / np.abs(right).max())
  return errors


def growth_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """Time and memory against iterations, tokens, heads and batch.

  Measures value and gradient of the normalizers alone, and the training step.
  Exponents are fitted by least squares of the logarithms, from 1 up.
  """
  rows = []
  for what, sweep in itertools.product(_GROWTH, options.preset.sweeps):
    title = f'{what} against {sweep.against}'
    report(f'{title}: compiling')
    alternatives = {}
    for value in sweep.values:
      sizes = {'iterations': options.num_iters, **sweep.base}
      sizes[sweep.against] = value
      for form, alternative in _GROWTH[what](options, **sizes).items():
        about = {**alternative.about, 'what': what, 'form': form, **sizes}
        about |= {'against': sweep.against, 'at': value}
        name = f'{form}, {value}'
        alternatives[name] = Alternative(alternative.call, about)
    rows += timing.compare(title, alternatives, options.repeats, report)
  return rows + exponent_rows(rows)


def _normalizer_at(options, tokens, batch, heads, iterations):
  del options
  arrays = [
    jax.random.normal(key, (batch * heads, tokens, tokens))
    for key in jax.random.split(jax.random.key(0))
  ]
  return _operators(_normalizers(iterations), arrays, True, exact=None)


def _step_at(options, tokens, batch, heads, iterations):
  base = options.setting(tokens, batch, num_heads=heads, num_iters=iterations)
  alternatives = {}
  for form in cost_step.FORMS:
    setting = base.with_model(normalizer=form)
    about = {
      'memory_mb': cost_model.compile_step(setting).scratch_mb,
      'memory_of': cost_setup.XLA_SCRATCH,
    }
    alternatives[form] = Alternative(cost_model.training(setting), about)
  return alternatives


_GROWTH = {'normalizer': _normalizer_at, 'step': _step_at}


def exponent_rows(rows: list[Row]) -> list[Row]:
  """Fits the rows of `growth_rows`."""

  def curve(row):
    return row['what'], row['against'], row['form']

  fits = []
  for key, group in itertools.groupby(sorted(rows, key=curve), key=curve):
    group = list(group)
    for of, column in (('time', 'ms'), ('memory', 'memory_mb')):
      points = [(x['at'], x[column]) for x in group if x['at'] and x[column]]
      fit = {
        'table': 'exponents',
        'name': f'{key[0]}, {key[2]}',
        **dict(zip(('what', 'against', 'form'), key, strict=True)),
        'of': of,
        'points': len(points),
      }
      if len(points) < 3:
        fit['note'] = 'fewer than 3 sizes above 0'
      else:
        exponent, error = timing.fit_exponent(*zip(*points, strict=True))
        fit |= {'exponent': exponent, 'exponent_error': error}
      fits.append(fit)
  return fits


def accelerator_rows(
  options: cost_setup.Options, report: cost_setup.Report
) -> list[Row]:
  """All forms, alone and in the training step, in float32 and bfloat16."""
  rows = []
  for dtype, (tokens, batch) in itertools.product(
    ('float32', 'bfloat16'), options.shapes
  ):
    base = options.setting(tokens, batch, dtype=dtype)
    shape = (batch * base.model.num_heads, tokens, tokens)
    keys = jax.random.split(jax.random.key(0))
    logits = jax.random.normal(keys[0], shape, dtype)
    # Weights are float32 whatever the logits are.
    arrays = [logits, jax.random.normal(keys[1], shape)]
    title = f'{dtype}, {tokens} tokens, {shape[0]} matrices'
    exact = _exact(*arrays, options.num_iters)
    forms = {
      name: make(options.num_iters) for name, make in cost_model.FORMS.items()
    }
    for what in ('value', 'value and gradient'):
      alternatives = _operators(forms, arrays, what != 'value', exact)
      rows += timing.compare(
        f'{title}, {what}', alternatives, options.repeats, report
      )
    report(f'{dtype}, {base.title}: compiling the training step')
    alternatives = cost_step.fresh_steps(base, cost_model.FORMS)
    title = f'{dtype}, {base.title}, training step'
    rows += timing.compare(title, alternatives, options.repeats, report)
  return rows
