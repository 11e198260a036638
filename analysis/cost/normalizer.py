"""Parts of `analysis.cost` about the normalizer, alone and in the step."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from analysis.common import machine
from analysis.common import runs
from analysis.common import timing
from analysis.cost import forms
from analysis.cost import model as cost_model
from analysis.cost import setup as cost_setup
from analysis.cost import step as cost_step
from sinkformer_jax import rank

logger = logging.getLogger('sinkformer_jax.cost')

SPREADS = (1, 3)
# Examples whose trained logits are taken.
_EXAMPLES = 8


def normalizer_rows(options: cost_setup.Options) -> list[timing.Row]:
  """All forms alone, on the same logits.

  Logits are random ones of each of `SPREADS`, and those of the runs. Errors
  are those of `forms.errors`.
  """
  rows = []
  names = [*forms.FORMS, *forms.OTHERS]
  for tokens, batch in options.shapes:
    shape = (batch * options.preset.model.num_heads, tokens, tokens)
    for spread in SPREADS:
      arrays = _random(shape)
      arrays[0] *= spread
      title = f'{_title(shape)}, logit spread {spread}'
      rows += _tables(title, names, arrays, options)
  entries = shape[0] * tokens**2
  for subject in options.subjects:
    logger.info('%s: logits', subject.name)
    logits = _trained_logits(subject, entries)
    spread = np.sqrt((logits.std(-1) ** 2).mean())
    title = f'{subject.name}, {_title(logits.shape)}, logit spread {spread:.1f}'
    arrays = [jnp.asarray(logits), _random(logits.shape)[1]]
    rows += _tables(title, names, arrays, options)
  return rows


def _title(shape):
  return f'{shape[1]} tokens, {shape[0]} matrices'


def _random(shape):
  """Logits and cotangent."""
  keys = jax.random.split(jax.random.key(0))
  return [jax.random.normal(key, shape) for key in keys]


def _tables(title, names, arrays, options):
  """One of values, one of values and gradients."""
  rows = []
  exact = forms.exact(*arrays, options.num_iters)
  for what in ('value', 'value and gradient'):
    logger.info('%s, %s: compiling', title, what)
    alternatives = forms.operators(
      names, arrays, options.num_iters, what != 'value', exact
    )
    rows += timing.compare(f'{title}, {what}', alternatives, options.repeats)
  return rows


def _trained_logits(subject, entries):
  """Some matrices of all layers, ``[matrices, n, n]`` in random order.

  There are 8, or as many as hold about `entries` numbers. Of texts the longest
  are taken, without their padding.
  """
  capture = rank.capture(
    subject.run, _EXAMPLES, dtype='float32', dataset=subject.dataset()
  )
  lengths = runs.num_tokens(capture)
  n = lengths.max()
  logits = capture.logits[:, lengths == n, :, :n, :n].reshape(-1, n, n)
  count = min(len(logits), max(8, entries // n**2))
  chosen = np.random.default_rng(0).permutation(len(logits))[:count]
  return logits[chosen].astype(np.float32)


def growth_rows(options: cost_setup.Options) -> list[timing.Row]:
  """Time and memory against iterations, tokens, heads and batch.

  Measures value and gradient of the normalizers alone, and the training step.
  Exponents are fitted by least squares of the logarithms, from 1 up.
  """
  rows = []
  for what, (against, (values, base)) in itertools.product(
    _GROWTH, options.preset.sweeps.items()
  ):
    title = f'{what} against {against}'
    logger.info('%s: compiling', title)
    alternatives = {}
    for value in values:
      sizes = {'iterations': options.num_iters, **base, against: value}
      for form, alternative in _GROWTH[what](options, **sizes).items():
        about = {**alternative.about, 'what': what, 'form': form, **sizes}
        about |= {'against': against, 'at': value}
        name = f'{form}, {value}'
        alternatives[name] = timing.Alternative(alternative.call, about)
    rows += timing.compare(title, alternatives, options.repeats)
  return rows + exponent_rows(rows)


def _normalizer_at(options, tokens, batch, heads, iterations):
  del options
  return forms.operators(
    [*cost_step.FORMS, forms.REFERENCE],
    _random((batch * heads, tokens, tokens)),
    iterations,
    gradient=True,
  )


def _step_at(options, tokens, batch, heads, iterations):
  base = options.setting(tokens, batch, num_heads=heads, num_iters=iterations)
  settings = {x: base.with_model(normalizer=x) for x in cost_step.FORMS}
  return {
    form: timing.Alternative(
      cost_model.training(setting),
      machine.planned(cost_model.compile_step(setting)[0]),
    )
    for form, setting in settings.items()
  }


_GROWTH = {'normalizer': _normalizer_at, 'step': _step_at}


def exponent_rows(rows: list[timing.Row]) -> list[timing.Row]:
  """Fits the rows of `growth_rows`."""
  fits = []
  keys = ['what', 'against', 'form']
  for key, group in pd.DataFrame(rows).groupby(keys):
    for of, column in (('time', 'ms'), ('memory', 'memory_mb')):
      points = group[(group['at'] > 0) & (group[column] > 0)]
      fit = {
        'table': 'exponents',
        'name': f'{key[0]}, {key[2]}',
        **dict(zip(keys, key, strict=True)),
        'of': of,
        'points': len(points),
      }
      if len(points) < 3:
        fit['note'] = 'fewer than 3 sizes above 0'
      else:
        exponent, error = timing.fit_exponent(points['at'], points[column])
        fit |= {'exponent': exponent, 'exponent_error': error}
      fits.append(fit)
  return fits


def accelerator_rows(options: cost_setup.Options) -> list[timing.Row]:
  """All forms, alone and in the training step, in float32 and bfloat16."""
  rows = []
  for dtype, (tokens, batch) in itertools.product(
    ('float32', 'bfloat16'), options.shapes
  ):
    base = options.setting(tokens, batch, dtype=dtype)
    # Weights are float32 whatever the logits are.
    logits, cotangent = _random((batch * base.model.num_heads, tokens, tokens))
    arrays = [logits.astype(dtype), cotangent]
    title = f'{dtype}, {_title(logits.shape)}'
    rows += _tables(title, list(forms.FORMS), arrays, options)
    title = f'{dtype}, {base.title}, training step'
    logger.info('%s: compiling', title)
    alternatives = cost_step.fresh_steps(base, forms.FORMS)
    rows += timing.compare(title, alternatives, options.repeats)
  return rows
