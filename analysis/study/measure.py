"""Summary tables of runs, measured once and kept.

An analysis of a run (of a pair, for the mechanism) at a checkpoint is a job.
Its rows are kept in ``<runs>/measured``, under a name made of the run's
identity, step and options: another pair, or another start, measures only what
is new. Of what measures only the `VERSION` of an analysis is part of the name:
whoever changes what it gives raises that, or measures all again
(`--remeasure`). A file says which revision it is by, and so does the page.
"""

from collections.abc import Iterable
import dataclasses
import functools
import gzip
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import statistics
from typing import Any

import pandas as pd

from analysis.common import command
from analysis.common import machine
from analysis.study import plan
from sinkformer_jax import data
from sinkformer_jax.training import metrics
from sinkformer_jax.training import workdir as workdir_lib

# The column `at` of a row: this, or the number of an earlier step.
LAST = 'last'


@dataclasses.dataclass(frozen=True)
class Job:
  """One analysis of one run, or of the two of a pair.

  Attributes:
    analysis: module of `analysis`.
    runs: one run, or softmax and Sinkhorn.
    step: of the checkpoint.
    options: of the module's `measure`.
  """

  analysis: str
  runs: tuple[plan.PlannedRun, ...]
  step: int
  options: dict[str, Any]

  @property
  def title(self) -> str:
    """For the log."""
    names = ' and '.join(x.name for x in self.runs)
    return f'{self.analysis} of {names}, step {self.step}'

  @property
  def seconds(self) -> float:
    """How long it takes, roughly, on 2 cores that do nothing else."""
    fixed, of_an_example = _SECONDS.get(self.analysis, _OTHERS)
    if 'drawn' in self.options.get('layers', ()):
      of_an_example *= 4
    config = self.runs[0].config()
    of_an_example *= config.model.num_layers / 24
    of_an_example *= (_num_tokens(config) / 50) ** _GROWTH
    return fixed + of_an_example * self.options.get('num_examples', 0)


def _num_tokens(config):
  """Of an image; of the longest text that is not cut."""
  size, *rest = data.DATASETS[config.data.name].input_shape(config.data)
  if rest:
    size = size * rest[0] // config.model.patch_size**2
  return size + (config.model.pooling == 'cls')


# With the number of tokens: path products took 11 s of 50 and 96 s of 128.
_GROWTH = 2.3
# Of an analysis, and of each example with 24 layers, 50 tokens and 100 paths.
_SECONDS = {
  'attention': (1, 0.2),
  'iterations': (20, 2.0),
  'layer_outputs': (5, 0.8),
  'lipschitz': (10, 2.0),
  'matched_control': (1, 0.1),
  'mechanism': (5, 2.0),
  'path_products': (1, 0.2),
  'sequence_length': (2, 0.2),
  'step_time': (50, 0.0),
  'theory': (1, 0.5),
}
_OTHERS = (5, 1.0)


def jobs(
  study: plan.Study, runs: Iterable[plan.PlannedRun], analyses: Iterable[str]
) -> list[Job]:
  """What has to be measured of finished runs.

  Args:
    study: says how much.
    runs: finished ones.
    analyses: the names of those that are wanted. One that is not planned here
      is done of each run at its last step.
  """
  runs, analyses = list(runs), set(analyses)
  found = []
  for run in runs:
    found += _jobs_of_run(study, run)
    num_examples = study.sizes_of(run.comparison).num_examples
    options = {'num_examples': num_examples, 'seed': 0}
    found += [
      Job(name, (run,), _last_step(run), options)
      for name in sorted(analyses - set(_SECONDS))
    ]
  for pair in pairs(runs):
    sizes = study.sizes_of(pair[0].comparison)
    options = {
      'num_examples': sizes.few_examples,
      'num_paths': sizes.num_paths,
      'skip': False,
      'seed': 0,
    }
    last = _last_step(pair[0])
    found.append(Job('mechanism', pair, last, options))
    if not study.exploratory and pair[0].comparison == study.comparisons[0]:
      found.append(Job('step_time', pair, last, {}))
  return [x for x in found if x.analysis in analyses]


def _jobs_of_run(study, run):
  sizes = study.sizes_of(run.comparison)
  last = _last_step(run)
  whole = run.comparison.whole
  examples = {'num_examples': sizes.num_examples, 'seed': 0}
  few = {'num_examples': sizes.few_examples, 'seed': 0}
  paths = {'num_paths': sizes.num_paths, 'skip': False}

  def products(step, layers, **changed):
    options = examples | paths | {'layers': layers} | changed
    return Job('path_products', (run,), step, options)

  yield products(last, ['first', 'drawn'] if whole else ['first'])
  for step in run.kept_steps():
    if step != last:
      yield products(step, ['first'])
    if not study.exploratory:
      yield Job('attention', (run,), step, examples)
  yield Job('layer_outputs', (run,), last, examples)
  if study.texts:
    yield Job('sequence_length', (run,), last, examples | paths)
  if whole or study.exploratory:
    yield Job('theory', (run,), last, few | {'random_weights': False})
  if not whole:
    return
  yield products(last, ['first', 'drawn'], skip=True)
  yield products(0, ['first'], skip=True)
  yield Job(
    'matched_control', (run,), last, few | {'num_draws': sizes.num_draws}
  )
  yield Job('lipschitz', (run,), last, few)
  if run.normalizer == plan.SINKHORN:
    yield Job('iterations', (run,), last, examples | paths)


def pairs(
  runs: Iterable[plan.PlannedRun],
) -> list[tuple[plan.PlannedRun, plan.PlannedRun]]:
  """Softmax and Sinkhorn runs of one comparison and seed, where both are."""
  found = {(x.comparison.tag, x.seed, x.normalizer): x for x in runs}
  return [
    (run, found[tag, seed, plan.SINKHORN])
    for (tag, seed, normalizer), run in found.items()
    if normalizer == plan.SOFTMAX and (tag, seed, plan.SINKHORN) in found
  ]


def _last_step(run):
  return run.config().total_steps


@dataclasses.dataclass(frozen=True)
class Measured:
  """What a job gave.

  Attributes:
    table: the summary table.
    notes: what a reader has to know.
    by: revision and versions of what measured.
  """

  table: pd.DataFrame
  notes: list[str]
  by: str


class Store:
  """Keeps what has been measured.

  Args:
    directory: where the files are; made if it is not there.
    data_dir: of the runs' data; '' for what their configs say.
    again: whether to measure what is there already.
  """

  def __init__(
    self, directory: pathlib.Path, data_dir: str = '', again: bool = False
  ):
    self._directory = directory
    self._data_dir = data_dir
    self._again = again

  def has(self, job: Job) -> bool:
    """Whether a job need not be done."""
    return not self._again and self.path(job).exists()

  def measure(self, job: Job, progress: command.Progress) -> None:
    """Does a job, and keeps its rows."""
    module = importlib.import_module(f'analysis.{job.analysis}')
    workdirs = tuple(x.workdir for x in job.runs)
    subjects = _load(workdirs, job.step, self._data_dir)
    self._write(job, module.measure(subjects, job.options, progress))

  def read(self, job: Job) -> Measured:
    """The rows of a job that has been done."""
    with gzip.open(self.path(job), 'rt', encoding='utf-8') as file:
      content = json.load(file)
    table = _located(job, pd.DataFrame(content['rows']))
    return Measured(table, content['notes'], content['by'])

  def _write(self, job, result):
    self._directory.mkdir(parents=True, exist_ok=True)
    content = {
      'analysis': job.analysis,
      'runs': [x.name for x in job.runs],
      'step': job.step,
      'options': job.options,
      'by': revision(),
      'notes': result.notes,
      'rows': result.table().to_dict('records'),
    }
    path = self.path(job)
    temporary = path.with_suffix(f'.{os.getpid()}.tmp')
    with workdir_lib.writing(path):
      with gzip.open(temporary, 'wt', encoding='utf-8') as file:
        json.dump(content, file)  # NaN and infinities as Python writes them.
      temporary.replace(path)

  def path(self, job: Job) -> pathlib.Path:
    """Where the rows of a job are kept."""
    names = '_'.join(x.name.replace('/', '-') for x in job.runs)
    identity = [
      job.analysis,
      job.step,
      job.options,
      *(_identity(x.workdir) for x in job.runs),
    ]
    module = importlib.import_module(f'analysis.{job.analysis}')
    if hasattr(module, 'VERSION'):
      identity.append(module.VERSION)
    text = json.dumps(identity, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return self._directory / f'{job.analysis}_{names}_{job.step}_{key}.json.gz'


def _located(job, table):
  """The table with what tells it from those of other jobs."""
  if table.empty:
    return table
  tag = job.runs[0].comparison.tag
  steps = table['step'].astype(object)
  return table.assign(
    analysis=job.analysis,
    # Some analyses read a run with the other normalizer too.
    trained=job.runs[0].normalizer if len(job.runs) == 1 else '',
    tag=tag,
    at=steps.where(steps != _last_step(job.runs[0]), LAST),
    # Stacks of matrices that no run has by itself.
    stack=table['group'] if job.analysis in ('iterations', 'mechanism') else '',
    setting=tag,
  )


def _identity(workdir):
  """What tells a training from all others."""
  provenance = workdir_lib.read_json(workdir / 'provenance.json')
  return [
    workdir_lib.read_json(workdir / 'config.json'),
    provenance['data']['fingerprint'],
    # A training that was begun anew in its directory is another.
    [x['time'] for x in provenance['starts'] if x['step'] == 0][-1],
  ]


@functools.lru_cache(maxsize=2)
def _load(workdirs, step, data_dir):
  """Opened once for analyses that follow each other."""
  from analysis.common import runs

  return runs.load(workdirs, step, data_dir)


@functools.cache
def revision() -> str:
  """The revision of this code, and versions of what its numbers rest on."""
  packages = ('jax', 'numpy', 'scipy')
  versions = [f'{x} {importlib.metadata.version(x)}' for x in packages]
  commit = machine.git_commit() or 'no git checkout'
  return ', '.join([f'revision {commit}', *versions])


def training_table(run: plan.PlannedRun) -> pd.DataFrame:
  """What the training itself recorded: accuracies, seconds of an epoch."""
  result = workdir_lib.read_json(run.workdir / 'result.json')
  provenance = workdir_lib.read_json(run.workdir / 'provenance.json')
  rates = [
    x['examples_per_second']
    for x in metrics.read_metrics(run.workdir)
    if 'examples_per_second' in x
  ]
  # The median: other work on the machine makes some steps slow.
  rate = statistics.median(rates)
  values = {
    'test accuracy': result['test']['accuracy'],
    'validation accuracy': result['validation']['accuracy'],
    'validation loss': result['validation']['loss'],
    'test loss': result['test']['loss'],
    'seconds an epoch': provenance['data']['splits']['train'] / rate,
  }
  table = pd.DataFrame(values.items(), columns=['quantity', 'mean'])
  return table.assign(
    run=run.name,
    analysis='training',
    tag=run.comparison.tag,
    setting=run.comparison.tag,
    normalizer=run.normalizer,
    seed=run.seed,
    step=result['step'],
    at=LAST,
    stack='',
    count=1,
  )
