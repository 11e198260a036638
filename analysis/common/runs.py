"""The runs of an analysis: opened, compared, grouped by all but their seed."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
from typing import Any

import ml_collections
import numpy as np

from analysis.common import frames
from analysis.common import naming
from sinkformer_jax import configuration
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import normalizers
from sinkformer_jax import rank
from sinkformer_jax import training
from sinkformer_jax.training import workdir as workdir_lib

TALKING_HEADS = (
  'with talking heads the rows of a head sum to another number than 1, which'
  ' path products have as a factor'
)


@dataclasses.dataclass(frozen=True)
class Subject:
  """A run that is looked at, at one checkpoint.

  Attributes:
    run: the opened run.
    setting: a number; runs that may be compared have the same.
    group: name of the runs that differ in their seed alone.
    result: of the finished training, None if it has not finished.
    provenance: content of `provenance.json`.
  """

  run: training.Run
  setting: int
  group: str
  result: dict[str, Any] | None
  provenance: dict[str, Any]

  @property
  def name(self) -> str:
    """The run in tables and on the page: the last two parts of its path."""
    return '/'.join(self.run.workdir.parts[-2:])

  @property
  def normalizer(self) -> str:
    """Name of the normalizer in its config."""
    return self.run.config.model.normalizer

  @property
  def num_layers(self) -> int:
    """Number of layers of its model."""
    return self.run.config.model.num_layers

  @property
  def num_iters(self) -> int:
    """Sinkhorn iterations in its config."""
    return self.run.config.model.num_iters

  def has(self, what: str) -> bool:
    """Whether it has 'logits', 'hidden' or a 'model': a run has all."""
    del what
    return True

  def states(self) -> list['Subject']:
    """The run, and its step 0: what training did not change is no effect."""
    return [self, self.at_step(0)] if self.run.step else [self]

  def ablations(self) -> list[tuple[bool, bool]]:
    """What can be switched off, ``(skip, ffn)``."""
    return list(naming.ABLATIONS)

  def about(self) -> dict[str, Any]:
    """What identifies it in a table."""
    return {
      'run': self.name,
      'data': self.run.info.name,
      'notice': self.run.info.provenance['notice'],
      'normalizer': self.normalizer,
      'group': self.group,
      'setting': self.setting,
      'seed': self.run.config.seed,
      'step': self.run.step,
      'weights': 'trained' if self.run.step else 'step 0',
    }

  def at_step(self, step: int) -> 'Subject':
    """The same run at another checkpoint.

    Raises:
      errors.RunError: if it is not there.
    """
    run = training.load_run(self.run.workdir, step)
    run.config.data.update(self.run.config.data)
    return dataclasses.replace(self, run=run)

  def read_with(self, normalizer: normalizers.Normalizer) -> 'Subject':
    """The same parameters, with another normalizer."""
    run = training.load_run(self.run.workdir, self.run.step, normalizer)
    run.config.data.update(self.run.config.data)
    return dataclasses.replace(self, run=run)

  def dataset(self) -> data.Dataset:
    """The data it was trained on, loaded once for all runs."""
    return _load_data(self.run.config.data.to_json())

  def chunks(
    self, num_examples: int, seed: int, ablation: encoder.Ablation, progress
  ) -> Iterator[rank.Capture]:
    """Captures of a few test examples at a time; see `rank.capture`."""
    return rank.capture_chunks(
      self.run,
      num_examples,
      seed=seed,
      ablation=ablation,
      dataset=self.dataset(),
      progress=progress,
    )

  def captures(
    self,
    options: dict[str, Any],
    progress,
    notes: list[str],
    ablation: encoder.Ablation = encoder.Ablation(),
  ) -> Iterator[rank.Capture]:
    """The `chunks` that the flags ask for; what is wrong goes to the notes."""
    for capture in self.chunks(
      options['num_examples'], options['seed'], ablation, progress
    ):
      notes.extend(self.problems(capture))
      yield capture

  def paths(self, options: dict[str, Any], layers: str = 'first') -> np.ndarray:
    """The paths that the flags ask for; see `rank.sample_paths`."""
    model = self.run.config.model
    return rank.sample_paths(
      options['seed'],
      model.num_layers,
      model.num_heads,
      options['num_paths'],
      layers,
      options['skip'],
    )

  def whole(
    self, options: dict[str, Any], progress, notes: list[str]
  ) -> rank.Capture:
    """All examples that the flags ask for; what is wrong goes to the notes."""
    capture = rank.capture(
      self.run,
      options['num_examples'],
      seed=options['seed'],
      dataset=self.dataset(),
      progress=progress,
    )
    notes.extend(self.problems(capture))
    return capture

  def problems(self, capture: rank.Capture) -> list[str]:
    """What is wrong with a capture, beyond what `notes` says already."""
    known = ('not trained', 'unfinished', self.run.info.provenance['notice'])
    return [
      f'{self.name}, step {self.run.step}: {note}'
      for note in capture.about['notes']
      if not any(x and note.startswith(x) for x in known)
    ]

  def notes(self) -> list[str]:
    """What a reader has to know, in sentences."""
    notes = []
    total = self.run.config.total_steps
    if self.result is None:
      notes.append(
        f'{self.name} has not finished: step {self.run.step} of {total}.'
      )
    elif self.run.step != total:
      notes.append(f'{self.name} is read at step {self.run.step} of {total}.')
    if self.run.info.provenance['notice']:
      notes.append(f'{self.name}: {self.run.info.provenance["notice"]}.')
    if self.run.config.model.talking_heads:
      notes.append(f'{self.name}: {TALKING_HEADS}.')
    _, filled_in = workdir_lib.read_config(self.run.workdir)
    if filled_in:
      notes.append(
        f'{self.name} is older than the fields {filled_in} of its config.'
      )
    return notes


def load(
  workdirs: Sequence[str],
  step: int | None = None,
  data_dir: str = '',
  allow_different: bool = False,
) -> list[Subject]:
  """Opens runs that are to be compared.

  Args:
    workdirs: their directories.
    step: checkpoint of all; None for the newest of each.
    data_dir: where their data is; '' for what their configs say.
    allow_different: also runs on other data, or of other architecture or
      training; those are grouped apart and make no pairs.

  Raises:
    errors.UserError: for a run that cannot be opened, a step that is not
      there, a run given twice, and runs that differ in more than normalizer
      and seed.
  """
  opened = []
  for workdir in workdirs:
    run = training.load_run(workdir, step)
    if data_dir:
      # Wherever it comes from, it has to be the data of the run.
      run.config.data.update(source='auto', dir=data_dir)
    opened.append(run)
  settings, references = [], []
  for run in opened:
    found = [
      number
      for number, reference in enumerate(references)
      if not _differences(reference, run)
    ]
    if not found:
      if references and not allow_different:
        raise errors.UserError(
          f'{run.workdir} cannot be compared with {references[0].workdir}:'
          f' {_describe(references[0], run)}. Give runs that differ in'
          ' normalizer and seed alone, or --allow_different to show them side'
          ' by side.'
        )
      references.append(run)
      found = [len(references) - 1]
    settings.append(found[0])
  subjects = [
    _subject(run, setting, several=len(references) > 1)
    for run, setting in zip(opened, settings, strict=True)
  ]
  _check_twice(subjects)
  return subjects


@functools.cache
def _load_data(section):
  fields = json.loads(section)
  return data.load(ml_collections.ConfigDict(fields))


def _differences(reference, run):
  """``{what: (of the reference, of the run)}``."""
  ours, theirs = (
    workdir_lib.read_config(x.workdir)[0] for x in (reference, run)
  )
  found = {
    f'config.{k}': v
    for k, v in configuration.differences(ours, theirs).items()
    if k not in configuration.MAY_DIFFER
  }
  ours, theirs = (_data(x.info) for x in (reference, run))
  if ours[0] != theirs[0]:
    found['data'] = (ours[1], theirs[1])
  return found


def _data(info: data.DatasetInfo):
  """What identifies examples and vocabulary, and both in words."""
  origin, vocabulary = info.provenance['origin'], {}
  words = f'{info.name} from {origin} {dict(info.splits)}'
  if 'tokenizer' in info.provenance:
    vocabulary = info.provenance['tokenizer']
    words += f', vocabulary of {vocabulary["pieces"]} pieces'
    words += f' ({vocabulary["origin"]})'
  return (info.provenance['fingerprint'], vocabulary.get('sha256')), words


def _describe(reference, run):
  return ', '.join(
    f'{name} is {new} and not {old}'
    for name, (old, new) in _differences(reference, run).items()
  )


def _subject(run, setting, several):
  model = run.config.model
  group = model.normalizer
  if group != 'softmax':
    group += f', {naming.iterations(model.num_iters)}'
  if several:
    group = f'{run.workdir.parent.name}: {group}'
  path = run.workdir / 'result.json'
  result = workdir_lib.read_json(path) if path.exists() else None
  provenance = workdir_lib.read_json(run.workdir / 'provenance.json')
  return Subject(run, setting, group, result, provenance)


def _check_twice(subjects):
  seen = {}
  for subject in subjects:
    key = subject.setting, subject.group, subject.run.config.seed
    if key in seen:
      raise errors.UserError(
        f'{seen[key].run.workdir} and {subject.run.workdir} have the same'
        f' config and seed {subject.run.config.seed}: give one of them.'
      )
    seen[key] = subject


def pairs(subjects: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
  """``(softmax, other)`` for each other run with the same seed."""

  def key(subject):
    about = subject.about()
    return about['setting'], about['seed']

  softmax = {key(x): x for x in subjects if x.normalizer == 'softmax'}
  return [
    (softmax[key(x)], x)
    for x in subjects
    if x.normalizer != 'softmax' and key(x) in softmax
  ]


def num_tokens(capture: rank.Capture) -> np.ndarray:
  """Valid tokens of each example, ``[batch]``."""
  if capture.mask is None:
    return np.full(*capture.attention.shape[1:4:2])
  return capture.mask.sum(1)


def collect(
  captures: Iterable[rank.Capture],
  measure: Callable[[rank.Capture], Mapping[Hashable, Any]],
) -> tuple[dict[Hashable, Any], np.ndarray]:
  """What is measured of captures of a few examples each, put together.

  Args:
    captures: see `Subject.captures`.
    measure: gives residuals, or arrays whose second axis is the examples.

  Returns:
    The same for all examples, and their numbers.
  """
  parts, examples = [], []
  for capture in captures:
    parts.append(measure(capture))
    examples += capture.about['examples']
  whole = {key: _joined([x[key] for x in parts]) for key in parts[0]}
  return whole, np.array(examples)


def _joined(parts):
  if isinstance(parts[0], rank.Residuals):
    return rank.concatenate(parts)
  return np.concatenate(parts, 1)


def marginal_errors(
  attention: np.ndarray, mask: np.ndarray | None
) -> dict[str, np.ndarray]:
  """``row_error`` and ``column_error``, ``[layers, batch, heads]``."""
  errors_of = rank.marginal_errors(attention, mask)
  return dict(zip(('row_error', 'column_error'), errors_of, strict=True))


def largest_errors(values: Mapping[Hashable, np.ndarray]) -> dict[str, float]:
  """The largest of `marginal_errors`, as columns; NaN stays."""
  return {k: float(np.max(values[k])) for k in ('row_error', 'column_error')}


def residual_table(
  about: dict[str, Any], residuals: rank.Residuals
) -> frames.Table:
  """Summary rows of residuals: each norm and scaling they have, each depth.

  Args:
    about: what every row says besides.
    residuals: arrays of shape ``[depths, ...]``.
  """
  return frames.concat(
    [
      frames.by_depth(
        {**about, 'norm': norm, 'scaling': scaling, 'dtype': residuals.dtype},
        rank.summarize(residuals, norm, scaling),
      )
      for norm in residuals.log10
      for scaling in rank.SCALINGS
      if scaling != 'relative' or residuals.log10_whole
    ]
  )


def raw_residuals(
  about: dict[str, Any], residuals: rank.Residuals, **axes: np.ndarray
) -> frames.Table:
  """Raw rows of residuals.

  Args:
    about: what every row says besides.
    residuals: arrays of shape ``[depths, ...]``.
    **axes: columns that number the axes, such as ``depth``; each broadcasts to
      the shape of the residuals.
  """
  return frames.raw(
    about | {'dtype': residuals.dtype},
    **axes,
    **{f'log10_{k}': v for k, v in residuals.log10.items()},
    **{f'log10_whole_{k}': v for k, v in residuals.log10_whole.items()},
    below_resolution=residuals.below_resolution,
    invalid=residuals.invalid,
  )
