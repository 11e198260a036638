"""Captures: what a model computed on some examples, as plain arrays.

A capture is saved as an npz file; one that other software writes in the same
form (see `Capture`) can be analysed as well. `forward` makes captures of runs.
"""

import dataclasses
import json
import os
from typing import Any
import zipfile

import numpy as np

from sinkformer_jax import errors
from sinkformer_jax import paths

_AXES = {
  'logits': ('layers', 'batch', 'heads', 'n', 'n'),
  'attention': ('layers', 'batch', 'heads', 'n', 'n'),
  'attention_output': ('layers', 'batch', 'n', 'width'),
  'hidden': ('layers + 1', 'batch', 'n', 'width'),
}


@dataclasses.dataclass(frozen=True)
class Capture:
  """What a model computed on some examples.

  What padded tokens hold is not defined. A capture of a run has all arrays; one
  of other software has ``attention``, and may lack the others.

  Attributes:
    logits: what the normalizer was given, ``[layers, batch, heads, n, n]``;
      None if not known, as the next but one and the one after it.
    attention: what multiplies the values, ``[layers, batch, heads, n, n]``.
    attention_output: of the attention sublayer, before the skip connection,
      ``[layers, batch, n, width]``.
    hidden: ``[layers + 1, batch, n, width]``: the embedding, then the result of
      each layer.
    mask: booleans ``[batch, n]``, True for valid tokens; None if all are.
    about: where it is from, ready for JSON. `capture` writes ``run``,
      ``dataset``, ``normalizer``, ``num_iters``, ``seed`` (of the run),
      ``step``, ``split``, ``examples`` (indices into the split),
      ``example_seed``, ``ablation`` (``skip`` and ``ffn``, False if off),
      ``dtype``, ``row_sums`` (with talking heads: ``[layers][heads]``, the sums
      of the columns of the second mix, to which all rows of a head sum;
      otherwise None, for 1), ``non_finite_layers`` (counted from 1; 0 is the
      embedding) and ``notes``, to be shown with every result.
  """

  logits: np.ndarray | None
  attention: np.ndarray
  attention_output: np.ndarray | None
  hidden: np.ndarray | None
  mask: np.ndarray | None
  about: dict[str, Any]

  def save(self, path: str | os.PathLike) -> None:
    """Writes an npz file: the arrays by name, and `about` as JSON text.

    Raises:
      errors.UserError: if the file exists or cannot be written.
    """
    path = paths.resolve(path, 'capture')
    arrays = arrays_of(self)
    if self.mask is not None:
      arrays['mask'] = self.mask
    about = np.array(json.dumps(self.about, allow_nan=False))
    try:
      with path.open('xb') as f:
        try:
          np.savez(f, **arrays, about=about)
        except OSError:
          path.unlink()
          raise
    except FileExistsError as error:
      raise errors.UserError(
        f'{path} exists already: choose another name, or delete it.'
      ) from error
    except OSError as error:
      raise errors.UserError(
        f'{path} could not be written: {error.strerror or error}.'
      ) from error


def load_capture(path: str | os.PathLike) -> Capture:
  """Reads what `Capture.save` wrote, or other software in the same form.

  All but ``attention`` may be missing.

  Raises:
    errors.UserError: if the file cannot be read or `validate` refuses it.
  """
  path = paths.resolve(path, 'capture')
  try:
    with np.load(path, allow_pickle=False) as file:
      stored = dict(file)
    about = json.loads(str(stored.pop('about', '{}')))
  except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
    raise errors.UserError(
      f'{path} cannot be read as a capture: {error}'
    ) from error
  if 'attention' not in stored:
    found = ', '.join(sorted(stored)) or 'nothing'
    raise errors.UserError(
      f'{path} is no capture: it has no array "attention" of shape'
      f' [{", ".join(_AXES["attention"])}]; it has {found}.'
    )
  result = Capture(
    **{name: stored.get(name) for name in _AXES},
    mask=stored.get('mask'),
    about=about,
  )
  try:
    validate(result)
  except errors.UserError as error:
    raise errors.UserError(f'{path}: {error}') from error
  return result


def arrays_of(capture):
  """The arrays that a capture has, by name."""
  found = {name: getattr(capture, name) for name in _AXES}
  return {name: x for name, x in found.items() if x is not None}


def validate(capture: Capture) -> None:
  """Refuses a capture that is empty or whose shapes do not fit each other.

  Values that are not finite are no reason to refuse one: see `non_finite`.

  Raises:
    errors.UserError: names the array and its shape.
  """
  sizes = {}
  for name, axes in _AXES.items():
    array = getattr(capture, name)
    if array is None and name != 'attention':
      continue
    wanted = f'{name} must be floats [{", ".join(axes)}]'
    if not isinstance(array, np.ndarray) or array.dtype.kind != 'f':
      kind = getattr(array, 'dtype', type(array).__name__)
      raise errors.UserError(f'{wanted}, got {kind}.')
    if array.ndim != len(axes) or array.size == 0:
      empty = ', which is empty' if array.size == 0 else ''
      raise errors.UserError(f'{wanted}, got {array.shape}{empty}.')
    for axis, size in zip(axes, array.shape, strict=True):
      if axis == 'layers + 1':
        axis, size = 'layers', size - 1
      if sizes.setdefault(axis, size) != size:
        raise errors.UserError(
          f'{wanted}, got {array.shape}: {axis} is {sizes[axis]} elsewhere.'
        )
  mask, shape = capture.mask, (sizes['batch'], sizes['n'])
  if mask is not None and (mask.shape != shape or mask.dtype != bool):
    raise errors.UserError(
      f'mask must be booleans [batch, n] = {shape}, got {mask.dtype}'
      f' {mask.shape}.'
    )


def non_finite(capture: Capture) -> dict[str, list[int]]:
  """Layers with values that are not finite, valid tokens only.

  Returns:
    For each array that has any, its layers: from 1, 0 is the embedding.
  """
  valid = capture.mask
  found = {}
  for name, array in arrays_of(capture).items():
    finite = np.isfinite(array)
    if valid is not None and array.ndim == 5:
      finite |= ~(valid[:, None, :, None] & valid[:, None, None, :])
    elif valid is not None:
      finite |= ~valid[..., None]
    first = 0 if name == 'hidden' else 1
    bad = ~finite.reshape(len(array), -1).all(1)
    if bad.any():
      found[name] = [first + int(i) for i in np.flatnonzero(bad)]
  return found


def described(capture: Capture) -> Capture:
  """The same, checked; `about` names what is not finite.

  Raises:
    errors.UserError: if `validate` refuses it.
  """
  validate(capture)
  bad = non_finite(capture)
  notes = [
    f'{name} of layer {", ".join(map(str, layers))} not finite'
    for name, layers in bad.items()
  ]
  about = {
    **capture.about,
    'non_finite_layers': sorted({i for x in bad.values() for i in x}),
    'notes': [*capture.about.get('notes', []), *notes],
  }
  return dataclasses.replace(capture, about=about)
