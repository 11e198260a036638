"""What normalizes: the tables of all forms that are compared, and their errors.

A further form of Sinkhorn is one more entry: of `FORMS` if it is a function of
JAX that an encoder can train with, of `OTHERS` if not.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from analysis.common import machine
from analysis.common import timing
from sinkformer_jax import normalizers
from sinkformer_jax import sinkhorn

# Errors are those of as many matrices, the first.
_COMPARED = 8


def _with_num_iters(function, **options):
  """Normalizers of a function of logits, `num_iters` and mask."""

  def create(num_iters):
    return lambda logits, mask=None: function(
      logits, num_iters, mask, **options
    )

  return create


# Values of `model.normalizer` that can be measured, each made from `num_iters`.
FORMS: dict[str, Callable[[int], normalizers.Normalizer]] = {
  'softmax': normalizers.NORMALIZERS['softmax'],
  # What models use: on a single GPU or TPU this is the fused kernel.
  'sinkhorn': normalizers.NORMALIZERS['sinkhorn'],
  'sinkhorn in XLA': _with_num_iters(sinkhorn.sinkhorn, fused=False),
}


def value_and_gradient(normalizer: Callable[[jax.Array], jax.Array]):
  """``(logits, cotangent) -> (weights, gradient)``."""

  def function(logits, cotangent):
    weights, vjp = jax.vjp(normalizer, logits)
    return weights, vjp(cotangent)[0]

  return function


@functools.cache
def _program(create, num_iters, gradient, *shapes):
  normalizer = create(num_iters)
  function = value_and_gradient(normalizer)
  if not gradient:
    function = lambda logits, _: (normalizer(logits), None)
  return jax.jit(function).lower(*shapes).compile()


def _compiled(create, arrays, num_iters, gradient):
  shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
  program = _program(create, num_iters, gradient, *shapes)
  return functools.partial(program, *arrays), machine.planned(program)


def _automatic(create, arrays, num_iters, gradient):
  """Differentiated automatically: that keeps a matrix for each update."""
  if gradient:
    machine.require_memory(arrays[0].size, num_iters)
  return _compiled(create, arrays, num_iters, gradient)


@functools.cache
def _ott_form(implicit):
  from analysis.cost import ott as cost_ott

  return lambda num_iters: functools.partial(
    cost_ott.sinkhorn, num_iters=num_iters, implicit=implicit
  )


def _ott(implicit, *arguments):
  machine.require('ott')
  compiled = _compiled if implicit else _automatic
  call, memory = compiled(_ott_form(implicit), *arguments)
  try:
    jax.block_until_ready(call())
  except jax.errors.JaxRuntimeError as error:
    # The linear system of implicit differentiation is singular, and its
    # iterative solver gives up on some matrices.
    raise machine.NotHereError('its linear solver gave up') from error
  return call, memory


def _torch(arrays, num_iters, gradient):
  machine.require('torch')
  import torch

  from analysis.cost import torch as cost_torch

  if gradient:
    machine.require_memory(arrays[0].size, num_iters)
  memory = machine.grown(
    cost_torch.random_sinkhorn,
    small={'shape': (1, *arrays[0].shape[1:]), 'num_iters': 1},
    full={'shape': arrays[0].shape, 'num_iters': num_iters},
    gradient=gradient,
  )
  tensors = [torch.tensor(np.array(x)) for x in arrays]
  return cost_torch.sinkhorn_call(*tensors, num_iters, gradient), memory


# What is measured alone: (arrays, num_iters, gradient) -> (call, columns of its
# memory). A call returns weights and gradient, or weights and None.
REFERENCE = 'log-space reference'
OTHERS: dict[str, Callable[..., tuple[Callable, dict[str, Any]]]] = {
  REFERENCE: functools.partial(
    _automatic, _with_num_iters(sinkhorn.sinkhorn_reference)
  ),
  'ott-jax, unrolled': functools.partial(_ott, False),
  'ott-jax, implicit': functools.partial(_ott, True),
  'PyTorch autograd': _torch,
}


def operators(
  names: Iterable[str],
  arrays: Sequence[jax.Array],
  num_iters: int,
  gradient: bool,
  exact: Sequence[np.ndarray] | None = None,
) -> dict[str, timing.Alternative]:
  """Normalizers alone, with memory and errors.

  Args:
    names: of `FORMS` and `OTHERS`.
    arrays: logits and cotangent, ``[matrices, n, n]``.
    num_iters: Sinkhorn iterations.
    gradient: also that of the logits.
    exact: from `exact`; None for the column error alone.
  """
  alone = {x: functools.partial(_compiled, y) for x, y in FORMS.items()}
  alone |= OTHERS

  def create(name):
    call, memory = alone[name](arrays, num_iters, gradient)
    # Softmax is no Sinkhorn, and has no errors.
    right = exact if name != 'softmax' else None
    results = [x if x is None else np.asarray(x) for x in call()]
    return timing.Alternative(
      call, {**memory, **errors(results, right)}, ratio_to='sinkhorn'
    )

  return {name: timing.attempt(create, name) for name in names}


def exact(
  logits: jax.Array, cotangent: jax.Array, num_iters: int
) -> list[np.ndarray]:
  """Value and gradient of the reference in float64, of the first matrices."""
  with jax.enable_x64(True):
    arguments = [
      jnp.asarray(np.asarray(x[:_COMPARED], np.float64))
      for x in (logits, cotangent)
    ]
    function = value_and_gradient(
      lambda x: sinkhorn.sinkhorn_reference(x, num_iters)
    )
    return [np.asarray(x) for x in jax.jit(function)(*arguments)]


def errors(
  results: Sequence[np.ndarray | None], exact: Sequence[np.ndarray] | None
) -> dict[str, float]:
  """Column error, and errors of value and gradient.

  These are the largest differences from `exact`, relative to its largest entry.
  """
  columns = sinkhorn.marginal_errors(jnp.asarray(results[0]))[1]
  found = {'column_error': float(columns.max())}
  for name, result, right in zip(
    ('value_error', 'gradient_error'), results, exact or (), strict=False
  ):
    if result is not None:
      difference = np.abs(np.asarray(result[:_COMPARED]) - right).max()
      found[name] = float(difference / np.abs(right).max())
  return found
