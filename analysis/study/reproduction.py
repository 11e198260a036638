"""One start of the study's command: says, trains, measures, writes."""

from collections.abc import Sequence
import dataclasses
import importlib
import pathlib
import sys

from analysis.common import command
from analysis.common import frames
from analysis.study import claims
from analysis.study import content as content_lib
from analysis.study import estimate
from analysis.study import measure
from analysis.study import page
from analysis.study import plan
from analysis.study import results
from analysis.study import studies
from analysis.study import trainings
from sinkformer_jax import errors

# Tests, figures and pages of a study, in seconds.
_WRITING = 60


@dataclasses.dataclass(frozen=True)
class Reproduction:
  """What is asked for; `run` does it.

  Attributes:
    studies: those of one preset.
    runs_dir: directory of all runs.
    output: directory of results.
    data_dir: of the data sets; '' for what the configs say.
    letters: of the claims that are asked for; all if empty.
    analyse_only: whether nothing is trained.
    remeasure: whether what has been measured is measured again.
  """

  studies: Sequence[plan.Study]
  runs_dir: pathlib.Path
  output: pathlib.Path
  data_dir: str = ''
  letters: Sequence[str] = ()
  analyse_only: bool = False
  remeasure: bool = False

  def check(self) -> None:
    """Refuses what cannot be done, before anything is.

    Raises:
      errors.UserError: for claims that no study has, directories with other
        runs than those planned, and results of another preset.
    """
    known = ''.join(claims.letters(x.name) for x in self.studies)
    for letter in self.letters:
      if letter not in list(known):
        raise errors.UserError(
          f'--claims={",".join(self.letters)}: {letter!r} is none of the claims'
          f' of {_names(self.studies)}: {", ".join(known)}.'
        )
    for study in self.studies:
      plan.check(self._runs_of(study))
      if not self.letters:
        results.check_preset(self._folder(study), study.preset)

  def run(self, dry_run: bool = False) -> list[str]:
    """Trains and analyses.

    Args:
      dry_run: whether to say what would be done, and no more.

    Returns:
      Names of runs whose training failed.

    Raises:
      errors.RunError: if no study has a pair of runs.
      KeyboardInterrupt: if it is told to stop.
    """
    print(f'Studies: {_names(self.studies)}; preset {self.studies[0].preset}.')
    seconds = {} if self.analyse_only else self._time_trainings()
    unfinished = [x for x in self._runs() if x.name in seconds]
    self._announce(unfinished, seconds)
    if dry_run:
      return []
    failed = trainings.train(
      unfinished, seconds, plan.data_flags(self.data_dir)
    )
    reasons = {x.name: self._why_not(x) for x in self.studies}
    ready = [x for x in self.studies if not reasons[x.name]]
    if not ready:
      raise errors.RunError(' '.join(reasons.values()))
    for reason in filter(None, reasons.values()):
      print(f'Not analysed. {reason}')
    if self.letters:
      for study in ready:
        self._print_claims(study)
    else:
      self._write([self._content(study) for study in ready])
    return failed

  def _why_not(self, study):
    """Why a study cannot be analysed; '' if it can."""
    if study.alone:
      return ''
    finished = [x for x in self._runs_of(study) if x.is_finished()]
    if not measure.pairs(plan.main_runs(study, finished)):
      remedy = '; without --analyse_only it is trained' * self.analyse_only
      return (
        f'No pair of runs of the main comparison of {study.name} is finished'
        f' in {self.runs_dir}{remedy}.'
      )
    lost = self._runs_of_results(study) - {x.name for x in finished}
    if lost and not self.letters:
      return (
        f'{self._folder(study)} has results of runs that are not finished'
        f' in {self.runs_dir}: {", ".join(sorted(lost))}. They are kept; choose'
        ' another --output for results of those that are.'
      )
    return ''

  def _folder(self, study):
    """Where its results are written."""
    return self.output / study.name

  def _runs_of_results(self, study):
    """Names of the runs that results of an earlier start are of."""
    there = results.read(self._folder(study))
    known = bool(there) and 'runs' in there['tables']
    return set(there['tables']['runs']['run']) if known else set()

  def _runs_of(self, study):
    """Its runs; of single claims only those that they are about."""
    runs = study.runs(self.runs_dir)
    return plan.main_runs(study, runs) if self.letters else runs

  def _runs(self):
    """All runs, those that several studies have once."""
    runs = [x for study in self.studies for x in self._runs_of(study)]
    return list({x.name: x for x in runs}.values())

  def _time_trainings(self):
    """How long each training will take, by name of the run.

    Of several studies those that cannot be trained, as their data is not there,
    are left out.
    """
    estimator, seconds = estimate.Estimator(self.data_dir), {}
    for study in self.studies:
      runs = [
        x
        for x in self._runs_of(study)
        if not x.is_finished() and not x.diverged()
      ]
      try:
        seconds |= estimator.seconds(runs)
      except (errors.DataError, errors.RunError) as error:
        if len(self.studies) == 1:
          raise
        print(f'{study.name}: not trained. {error}')
    return seconds

  def _announce(self, unfinished, seconds):
    """Says what will be done."""
    runs = self._runs()
    print(
      f'Runs in {self.runs_dir}: {len(runs)} planned,'
      f' {len([x for x in runs if x.is_finished()])} finished,'
      f' {len(unfinished)} to be trained.'
    )
    for run in runs:
      if run.diverged():
        print(
          f'  {run.name} diverged ({run.diverged()}), and is not tried again:'
          f' remove {run.workdir} to do so'
        )
    for run in unfinished:
      done = run.steps_done()
      where = f', from step {done}' if done else ''
      print(
        f'  {run.name}: {run.config().total_steps} steps{where}, about'
        f' {estimate.clock(seconds[run.name])}'
      )
    jobs = [x for study in self.studies for x in self._jobs(study, unfinished)]
    analysis = sum(x.seconds for x in jobs) + _WRITING * len(self.studies)
    total = sum(seconds.values()) + analysis
    print(
      f'Measurements: {len(jobs)}, about {estimate.clock(analysis)}. In all'
      f' about {estimate.clock(total)} on this machine.'
    )
    if not self.letters:
      print(f'Results: {self.output}')
    sys.stdout.flush()

  def _store(self):
    return measure.Store(
      self.runs_dir / 'measured', self.data_dir, self.remeasure
    )

  def _asked(self, study):
    """Letters of the study's claims that are asked for."""
    known = claims.letters(study.name)
    return [x for x in known if not self.letters or x in self.letters]

  def _analyses(self, study):
    """Modules that measure what is asked for."""
    found = {y for x in self._asked(study) for y in claims.CLAIMS[x].analyses}
    # Of a figure and a table, which are not asked for with single claims.
    return found if self.letters else found | {'sequence_length', 'theory'}

  def _jobs(self, study, unfinished):
    """What is still to be measured, once the trainings are done."""
    runs = self._runs_of(study)
    names = {x.name for x in unfinished}
    runs = [x for x in runs if x.is_finished() or x.name in names]
    store = self._store()
    return [
      job
      for job in measure.jobs(study, runs, self._analyses(study))
      if any(x.name in names for x in job.runs) or not store.has(job)
    ]

  def _print_claims(self, study):
    letters = self._asked(study)
    if not letters:
      return
    if study.alone:
      evidence = content_lib.evidence_alone(study, _measure_alone(study))
    else:
      finished, measured, _ = self._measure_runs(study)
      found = content_lib.evidence_of(study, finished, measured)
      evidence = found[study.comparisons[0].tag]
    for answer in claims.answers(letters, evidence):
      print('\n'.join(content_lib.text(answer)))

  def _content(self, study):
    if study.alone:
      return content_lib.alone(study, _measure_alone(study))
    return content_lib.of_runs(study, *self._measure_runs(study))

  def _measure_runs(self, study):
    """Finished runs, what has been measured of them, and diverged runs."""
    # Looked up once: a training elsewhere may end meanwhile.
    finished, diverged = [], []
    for run in self._runs_of(study):
      if run.is_finished():
        finished.append(run)
      elif run.diverged():
        diverged.append(run)
    jobs = measure.jobs(study, finished, self._analyses(study))
    store, progress = self._store(), command.Progress()
    new = [x for x in jobs if not store.has(x)]
    left = estimate.Countdown([x.seconds for x in new])
    for number, job in enumerate(new, start=1):
      print(
        f'Measuring {number} of {len(new)}: {job.title}; about {left.next()}'
        f' left for {study.name}',
        file=sys.stderr,
        flush=True,
      )
      store.measure(job, progress)
    return finished, [store.read(x) for x in jobs], diverged

  def _write(self, contents):
    for content in contents:
      folder = self._folder(content.study)
      content_lib.write(content, folder)
      found = results.read(folder)
      page.write(found)
      for line in page.answer(found):
        print(f'{content.study.name}: {line}')
    there = self._results()
    own = [x for x in map(self._folder, self.studies) if x in there]
    if len(own) == 1:
      print(f'Page: {own[0] / page.PAGE}')
    if len(there) > 1:
      page.write_all(list(there.values()), self.output)
      print(f'Page of all studies: {self.output / page.PAGE}')

  def _results(self):
    """All that is in the directory of results, of other starts too."""
    preset = self.studies[0].preset
    there = {}
    for name in studies.STUDIES:
      folder = self.output / name
      found = results.read(folder)
      if found and found['preset'] == preset:
        there[folder] = found
    return there


def _names(these):
  return ', '.join(x.name for x in these)


def _measure_alone(study: plan.Study) -> frames.Result:
  """The one analysis of a study without runs."""
  module = importlib.import_module(f'analysis.{study.alone}')
  options = dataclasses.asdict(study.sizes) | {'seed': 0, 'num_iters': 50}
  return module.measure([], options, command.Progress())
