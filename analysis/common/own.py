"""Attention matrices of other software, analysed like those of a run.

A file is what `rank.load_capture` reads: an npz file with ``attention``
``[layers, batch, heads, n, n]``, and ``logits``, ``hidden`` and
``attention_output`` where they are known. From plain NumPy:

  np.savez('softmax_a.npz', attention=attention, mask=mask)

The name of the file says what it is. ``softmax_a.npz`` and ``sinkhorn_a.npz``
are a pair: what is left of the two names without that of the normalizer is the
same. A name without a normalizer makes a curve of its own, and no pair.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np

from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import rank

# Where logits are normalized again and a file does not say how often.
NUM_ITERS = 50
# Files make pairs among themselves, never with runs.
_SETTING = -1
_WHOLE = encoder.Ablation()


@dataclasses.dataclass(frozen=True)
class OwnCapture:
  """A capture file, with the interface of `runs.Subject`.

  Attributes:
    name: of the file, without its ending.
    capture: its content.
    normalizer: name of the normalizer; '' if the file does not say.
    seed: files with one seed make pairs; missing for a file that makes none.
  """

  name: str
  capture: rank.Capture
  normalizer: str
  seed: int | None

  @property
  def num_layers(self) -> int:
    """Number of attention layers."""
    return len(self.capture.attention)

  @property
  def num_iters(self) -> int:
    """Sinkhorn iterations, if the file says; otherwise `NUM_ITERS`."""
    found = self.capture.about.get('num_iters')
    return NUM_ITERS if found is None else int(found)

  def has(self, what: str) -> bool:
    """Whether it has 'logits', 'hidden', 'attention_output' or a 'model'."""
    return getattr(self.capture, what, None) is not None

  def states(self) -> list['OwnCapture']:
    """Itself: there are no other checkpoints."""
    return [self]

  def ablations(self) -> list[tuple[bool, bool]]:
    """The model as it was: parts cannot be switched off."""
    return [(True, True)]

  def about(self) -> dict[str, Any]:
    """What identifies it in a table."""
    return {
      'run': self.name,
      'data': self.capture.about.get('dataset', 'own captures'),
      'notice': '',
      'normalizer': self.normalizer or self.name,
      # Not that of runs: a curve is of runs or of files.
      'group': f'{self.normalizer}, files' if self.normalizer else self.name,
      'setting': None if self.seed is None else _SETTING,
      'seed': self.seed,
      'step': self.capture.about.get('step'),
      'weights': 'trained',
    }

  def paths(self, options: dict[str, Any], layers: str = 'first') -> np.ndarray:
    """The paths that the flags ask for; see `rank.sample_paths`."""
    return rank.sample_paths(
      options['seed'],
      self.num_layers,
      self.capture.attention.shape[2],
      options['num_paths'],
      layers,
      options['skip'],
    )

  def captures(
    self,
    options: dict[str, Any],
    progress,
    notes: list[str],
    ablation: encoder.Ablation = _WHOLE,
  ) -> Iterator[rank.Capture]:
    """The examples that the flags ask for, as one capture."""
    del ablation  # See `ablations`.
    there = self.capture.attention.shape[1]
    count = min(options['num_examples'], there)
    if count < options['num_examples']:
      notes.append(f'{self.name} has {there} examples.')
    capture = _first(self.capture, count)
    notes.extend(f'{self.name}: {x}' for x in capture.about['notes'])
    yield capture
    progress(count, count)

  def whole(
    self, options: dict[str, Any], progress, notes: list[str]
  ) -> rank.Capture:
    """All examples that the flags ask for."""
    (capture,) = self.captures(options, progress, notes)
    return capture

  def notes(self) -> list[str]:
    """What a reader has to know, in sentences."""
    row_error, _ = rank.marginal_errors(
      self.capture.attention, self.capture.mask
    )
    largest = float(np.nanmax(row_error))
    notes = [f'{self.name} is a file of other software, not a run.']
    if not largest <= rank.MAX_ROW_ERROR:
      notes.append(
        f'{self.name}: rows of attention sum to 1 up to {largest:.2g} only. The'
        ' residual of a product is defined for rows that sum to 1; close the'
        ' rows, or read its values as invalid.'
      )
    about = self.capture.about
    if self.normalizer == 'sinkhorn' and about.get('num_iters') is None:
      notes.append(
        f'{self.name}: its about has no num_iters; where its logits are'
        f' normalized again, it is by {NUM_ITERS} Sinkhorn iterations.'
      )
    return notes


def _first(capture, count):
  arrays = {
    name: x if x is None else x[:, :count]
    for name in ('logits', 'attention', 'attention_output', 'hidden')
    for x in [getattr(capture, name)]
  }
  about = {
    'row_sums': None,
    'dtype': str(capture.attention.dtype),
    **capture.about,
    'examples': capture.about.get('examples', list(range(count)))[:count],
  }
  mask = None if capture.mask is None else capture.mask[:count]
  return rank.described(rank.Capture(**arrays, mask=mask, about=about))


def load(paths: Sequence[str]) -> list[OwnCapture]:
  """Opens capture files.

  Args:
    paths: their paths.

  Raises:
    errors.UserError: for a file that cannot be read, names the array, its shape
      and what was expected; for two files of one name; and for a pair whose
      shapes differ.
  """
  stems = [pathlib.Path(x).stem for x in paths]
  for stem in stems:
    if stems.count(stem) > 1:
      raise errors.UserError(
        f'--capture: two files are named {stem}; rename one of them.'
      )
  seeds, found = {}, []
  for path, stem in zip(paths, stems, strict=True):
    capture = rank.load_capture(path)
    named = _normalizer(stem)
    normalizer = capture.about.get('normalizer', named)
    seed = None
    if named:
      seed = seeds.setdefault(stem.replace(named, ''), len(seeds))
    found.append(OwnCapture(stem, capture, normalizer, seed))
  for one, other in itertools.combinations(found, 2):
    if one.seed is not None and one.seed == other.seed:
      _check_pair(one, other)
  return found


def _check_pair(one, other):
  if one.normalizer == other.normalizer:
    raise errors.UserError(
      f'--capture: {one.name} and {other.name} are both of'
      f' {one.normalizer} and would be one half of the same pair.'
    )
  for name in ('attention', 'mask'):
    ours, theirs = (getattr(x.capture, name) for x in (one, other))
    shapes = [None if x is None else x.shape for x in (ours, theirs)]
    if shapes[0] != shapes[1]:
      raise errors.UserError(
        f'--capture: {one.name} and {other.name} are a pair by their names;'
        f' {name} of both must have one shape, got {shapes[0]} and {shapes[1]}.'
        ' Rename one of them, or write the same examples into both.'
      )


def _normalizer(stem):
  """The known normalizer that a name contains, the longest; '' if none."""
  known = [x for x in normalizers.NORMALIZERS if x in stem]
  return max(known, key=len, default='')
