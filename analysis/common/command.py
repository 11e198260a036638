"""What the analysis commands share: flags, progress, and what is written.

A command has a module with

  measure(subjects, options, progress) -> frames.Result
  plots(summary) -> [curves.Plot]
  headlines(summary) -> [str]

where `summary` is the table of the result; figures are made from it alone.
Nothing here imports JAX or pandas before the flags have been read: `--help` and
wrong flags need not wait for them.
"""

from collections.abc import Sequence
import dataclasses
import importlib
import json
import pathlib
import sys
import time
from typing import Any

from absl import flags
import tqdm

from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from sinkformer_jax import cli

# Progress is told this often where it is no terminal, in seconds.
_INTERVAL = 5


def create_flags(
  num_examples: int | None = 64,
  *,
  runs: str = 'required',
  paths: bool = False,
  control: bool = False,
) -> flags.FlagValues:
  """The flags of a command.

  Args:
    num_examples: the default; None for a command that chooses no number.
    runs: whether runs are 'required', 'optional' or 'none'.
    paths: whether paths are sampled.
    control: whether random matrices are made.
  """
  flag_values = flags.FlagValues()
  define_output(flag_values)
  if runs != 'none':
    define_runs(flag_values, num_examples, required=runs == 'required')
  if paths:
    define_paths(flag_values)
  if control:
    define_control(flag_values)
  return flag_values


def define_output(flag_values: flags.FlagValues) -> None:
  """Defines the flags of all scripts."""
  flags.DEFINE_string(
    'output',
    None,
    'Directory for tables and figures; new or empty.',
    flag_values=flag_values,
  )
  flags.mark_flag_as_required('output', flag_values)
  flags.DEFINE_integer(
    'seed',
    0,
    'Of the choice of examples, paths and random matrices.',
    lower_bound=0,
    flag_values=flag_values,
  )


def define_runs(
  flag_values: flags.FlagValues,
  num_examples: int | None = 64,
  required: bool = True,
) -> None:
  """Defines the flags of scripts that read runs.

  Args:
    flag_values: where to define them.
    num_examples: the default; None for scripts that choose no number.
    required: whether a run has to be given.
  """
  flags.DEFINE_multi_string(
    'workdir',
    None,
    'Run directory; repeat it for several. Runs of softmax and Sinkhorn with'
    ' one seed are a pair.',
    flag_values=flag_values,
  )
  flags.DEFINE_multi_string(
    'capture',
    None,
    'File with attention matrices of other software (npz); repeat it for'
    ' several. See analysis/common/own.py.',
    flag_values=flag_values,
  )
  if required:

    @flags.multi_flags_validator(
      ['workdir', 'capture'],
      'Flag --workdir or --capture must have a value.',
      flag_values,
    )
    def _check_subjects(values):
      return bool(values['workdir'] or values['capture'])

  flags.DEFINE_integer(
    'step',
    None,
    'Checkpoint; the newest if not given.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_boolean(
    'allow_different',
    False,
    'Show runs on other data or of another architecture side by side.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'data_dir',
    '',
    "Directory of data sets; the runs' own if not given.",
    flag_values=flag_values,
  )
  if num_examples is not None:
    flags.DEFINE_integer(
      'num_examples',
      num_examples,
      'Test examples.',
      lower_bound=1,
      flag_values=flag_values,
    )


def define_paths(flag_values: flags.FlagValues) -> None:
  """Defines the flags of scripts that sample paths."""
  flags.DEFINE_integer(
    'num_paths',
    100,
    'Paths of each depth, for each example.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_boolean(
    'skip',
    False,
    'Make the skip connection one more choice in each layer of a path.',
    flag_values=flag_values,
  )


def define_draws(flag_values: flags.FlagValues) -> None:
  """Defines the number of random matrices."""
  flags.DEFINE_integer(
    'num_draws',
    100,
    'Random matrices for each factor.',
    lower_bound=1,
    flag_values=flag_values,
  )


def define_control(flag_values: flags.FlagValues) -> None:
  """Defines the flags of the control of random matrices."""
  flags.DEFINE_list(
    'scales',
    ['0.5', '1', '2', '3', '5'],
    'Standard deviations of the Gaussian logits.',
    flag_values=flag_values,
  )
  define_draws(flag_values)
  for name, default, least, words in (
    ('num_tokens', 50, 2, 'Rows and columns of a random matrix.'),
    ('num_layers', 24, 1, 'Largest number of random factors.'),
    ('num_iters', 50, 1, 'Sinkhorn iterations of random matrices.'),
  ):
    flags.DEFINE_integer(
      name, default, words, lower_bound=least, flag_values=flag_values
    )

  @flags.validator('scales', flag_values=flag_values)
  def _check_scales(scales):
    wrong = [x for x in scales if not _is_positive(x)]
    if wrong or not scales or len(set(scales)) < len(scales):
      raise flags.ValidationError(
        f'got {",".join(scales)}; must be positive numbers, each once.'
      )
    return True


def _is_positive(text):
  try:
    return 0 < float(text) < float('inf')
  except ValueError:
    return False


class Progress:
  """What is done and the time left of the part: a bar, or lines in a log."""

  def __init__(self):
    self.part('')

  def part(self, text: str) -> None:
    """Begins a part."""
    self._text, self._start = text, time.monotonic()
    self._told, self._bar = self._start, None
    if text:
      print(text, file=sys.stderr, flush=True)

  def __call__(self, done: int, total: int, unit: str = 'examples') -> None:
    """Says that `done` of `total` are done."""
    if sys.stderr.isatty():
      if self._bar is None:
        self._bar = tqdm.tqdm(total=total, unit=f' {unit}', leave=False)
      self._bar.update(done - self._bar.n)
      return
    now = time.monotonic()
    if done and now - self._told >= _INTERVAL:
      self._told = now
      left = (now - self._start) / done * (total - done)
      left = tqdm.tqdm.format_interval(left)
      line = f'{self._text}: {done} of {total} {unit}, {left} left'
      print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Finished:
  """An analysis that has been written.

  Attributes:
    name: of its module.
    summary: its summary table.
    plots: its figures, saved as ``name.png`` and ``name.svg``.
    headlines: lines of text.
    notes: what a reader has to know.
  """

  name: str
  summary: frames.Table
  plots: list[curves.Plot]
  headlines: list[str]
  notes: list[str]


def run(name: str, flag_values: flags.FlagValues) -> None:
  """Runs one analysis as its flags say, writes and prints, and exits."""
  cli.run(lambda: _main(name, flag_values), flag_values)


def _main(name, flag_values):
  options = flag_values.flag_values_dict()
  output = output_directory(options['output'])
  subjects = load_subjects(options)
  finished = analyse(name, subjects, options, output, Progress())
  for line in finished.headlines:
    print(line)
  for note in notes(subjects, [finished]):
    print(f'NOTE: {note}')
  print(f'Tables and figures: {output}')


def load_subjects(options: dict[str, Any]) -> list:
  """The runs and capture files that the flags name."""
  found = []
  if options.get('workdir'):
    from analysis.common import runs

    found += runs.load(
      options['workdir'],
      options['step'],
      options.get('data_dir', ''),
      options['allow_different'],
    )
  if options.get('capture'):
    from analysis.common import own

    found += own.load(options['capture'])
  return found


def analyse(
  name: str,
  subjects: Sequence,
  options: dict[str, Any],
  output: pathlib.Path,
  progress: Progress,
) -> Finished:
  """Measures, and writes tables and figures of one analysis."""
  module = importlib.import_module(f'analysis.{name}')
  needs = getattr(module, 'NEEDS', ())
  usable = [x for x in subjects if all(map(x.has, needs))]
  result = module.measure(usable, options, progress)
  result.notes.extend(
    f'{x.name} is left out of {name}: it has no {" and no ".join(needs)}.'
    for x in subjects
    if x not in usable
  )
  summary = result.table()
  frames.write(output / name, summary)
  for part, rows in result.raw.items():
    frames.write_raw(output / part, frames.concat(rows))
  pairs = frames.differences(summary)
  if len(pairs):
    frames.write(output / f'{name}_differences', pairs)
  # Where nothing could be measured the notes say why.
  plots = module.plots(summary) if len(summary) else []
  for plot in plots:
    figures.save(output / plot.name, plot.draw, plot.size)
  captions = {x.name: x.caption for x in plots}
  text = json.dumps(captions, indent=1, ensure_ascii=False) + '\n'
  (output / f'{name}_captions.json').write_text(text, 'utf-8')
  headlines = module.headlines(summary) if len(summary) else []
  return Finished(name, summary, plots, headlines, result.notes)


def notes(subjects: Sequence, finished: Sequence[Finished]) -> list[str]:
  """What a reader has to know, each once."""
  lines = [x for subject in subjects for x in subject.notes()]
  steps = {x.about()['step'] for x in subjects if x.has('model')}
  if len(steps) > 1:
    lines.append(
      'The runs are read at different steps'
      f' ({", ".join(map(str, sorted(steps)))}); --step takes the same of all.'
    )
  lines += _column_notes(subjects, finished)
  lines += [x for part in finished for x in part.notes]
  return list(dict.fromkeys(lines))


def _column_notes(subjects, finished):
  """Sinkhorn attention that should not be called doubly stochastic."""
  from sinkformer_jax.training import evaluation

  threshold = evaluation.COLUMN_ERROR_THRESHOLD
  lines = []
  for subject in subjects:
    found = [
      frames.select(part.summary, run=subject.name)['column_error'].max()
      for part in finished
      if 'column_error' in part.summary
    ]
    largest = max((x for x in found if x == x), default=0.0)
    if subject.normalizer == 'sinkhorn' and largest > threshold:
      lines.append(
        f'{subject.name}: columns of attention sum to 1 up to {largest:.2g}'
        f' only (threshold {threshold:g}): it is not doubly'
        ' stochastic. More config.model.num_iters would bring it nearer.'
      )
  return lines


def output_directory(value: str) -> pathlib.Path:
  """Makes the directory of --output.

  Raises:
    errors.UserError: if it holds anything or cannot be made.
  """
  from sinkformer_jax import errors
  from sinkformer_jax import paths

  path = paths.resolve(value, '--output')
  try:
    path.mkdir(parents=True, exist_ok=True)
    used = any(path.iterdir())
  except OSError as error:
    raise errors.UserError(
      f'--output={value} cannot be used: {error.strerror}.'
    ) from error
  if used:
    raise errors.UserError(
      f'--output={value} is not empty; choose another directory.'
    )
  return path
