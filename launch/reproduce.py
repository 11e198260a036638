"""Reproduces a study: trains, analyses, and writes tables, figures and a page.

  python -m launch.reproduce --study=all --preset=quick
  python -m launch.reproduce --study=mnist --preset=cpu

Says first what it will do and how long that takes here, from a few training
steps. Finished runs are taken as they are, stopped ones go on, and nothing is
measured twice. Ctrl-C leaves at once with exit code 75; the same command goes
on. Presets: quick (20 minutes on 2 cores for all), cpu (a night), full (the
papers' size); tiny is for tests.

  --dry_run        says what it would do, and ends
  --analyse_only   trains nothing: results of the runs that are finished
  --claims=a,n     prints these claims alone, and writes no page

Exit codes: 0 done, 75 stopped, 1 and 2 errors.
"""

import dataclasses
import importlib
import pathlib
import signal
import subprocess
import sys

from absl import flags

from launch import cli

FLAGS = flags.FlagValues()
_STUDY = flags.DEFINE_enum(
  'study',
  'all',
  ['mnist', 'random_control', 'theory', 'all'],
  'Which study.',
  flag_values=FLAGS,
)
_PRESET = flags.DEFINE_enum(
  'preset',
  'quick',
  ['quick', 'cpu', 'full', 'tiny'],
  'How many runs, and how large.',
  flag_values=FLAGS,
)
_RUNS = flags.DEFINE_string(
  'runs', 'runs', 'Directory of all runs.', flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
  'output',
  '',
  'Directory of results; analysis/results for --preset=cpu, and'
  ' <runs>/results_<preset> otherwise, if not given.',
  flag_values=FLAGS,
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir',
  '',
  'Directory of data sets; $SINKFORMER_DATA_DIR, or what the configs say, if'
  ' not given.',
  flag_values=FLAGS,
)
_CLAIMS = flags.DEFINE_list(
  'claims', [], 'Letters of claims; all if not given.', flag_values=FLAGS
)
_ANALYSE_ONLY = flags.DEFINE_boolean(
  'analyse_only', False, 'Train nothing.', flag_values=FLAGS
)
_REMEASURE = flags.DEFINE_boolean(
  'remeasure',
  False,
  'Measure again what has been measured, as after a change of an analysis.',
  flag_values=FLAGS,
)
_DRY_RUN = flags.DEFINE_boolean(
  'dry_run', False, 'Say what would be done, and end.', flag_values=FLAGS
)


def main() -> int:
  """Does the studies, or goes on with them."""
  # A shell may have them ignored, as for what runs in its background.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
  try:
    return _Reproduction().run()
  except KeyboardInterrupt:
    _tell('Stopped. The same command goes on from here.')
    return cli.EXIT_STOPPED


def _tell(text):
  print(text, file=sys.stderr, flush=True)


class _Reproduction:
  """One start of the command."""

  def __init__(self):
    # Imported late: wrong flags are refused before JAX is loaded.
    from analysis.study import content
    from analysis.study import plan
    from sinkformer_jax import errors
    from sinkformer_jax import paths

    preset = _PRESET.value
    self.runs_dir = paths.resolve(_RUNS.value, '--runs')
    default = (
      'analysis/results'
      if preset == 'cpu'
      else self.runs_dir / f'results_{preset}'
    )
    self.output = paths.resolve(_OUTPUT.value or default, '--output')
    self.studies = plan.studies(_STUDY.value, preset)
    known = ''.join(x.claims for x in self.studies)
    for letter in _CLAIMS.value:
      if letter not in list(known):
        raise errors.UserError(
          f'--claims={",".join(_CLAIMS.value)}: {letter!r} is none of the'
          f' claims of --study={_STUDY.value}: {", ".join(known)}.'
        )
    self.runs = [x for s in self.studies for x in s.runs(self.runs_dir)]
    plan.check(self.runs)
    if not _CLAIMS.value:
      for study in self.studies:
        content.check_preset(self.output / study.name, preset)

  def run(self):
    """Trains and analyses; the exit code."""
    todo = [] if _ANALYSE_ONLY.value else self._unfinished()
    seconds = self._announce(todo)
    if _DRY_RUN.value:
      return 0
    failed = self._train(todo, seconds)
    if _CLAIMS.value:
      self._print_claims()
    else:
      self._write([self._content(study) for study in self.studies])
    for name in failed:
      print(f'FAILED: training of {name}; see its messages above.')
    return cli.EXIT_ERROR if failed else 0

  def _unfinished(self):
    return [x for x in self.runs if not x.is_finished()]

  def _announce(self, todo):
    """Says what will be done; seconds that each training will take."""
    from analysis.study import estimate
    from analysis.study import measure

    names = ', '.join(x.name for x in self.studies)
    print(f'Studies: {names}; preset {_PRESET.value}.')
    finished = len([x for x in self.runs if x.is_finished()])
    print(
      f'Runs in {self.runs_dir}: {len(self.runs)} planned, {finished} finished,'
      f' {len(todo)} to be trained.'
    )
    seconds = {}
    if todo:
      print('Timing a few training steps ...', flush=True)
      step_seconds = estimate.step_seconds(todo, self._train_flags())
      seconds = {
        x.name: estimate.training_seconds(x, step_seconds) for x in todo
      }
      for run in todo:
        done = run.steps_done()
        where = f', from step {done}' if done else ''
        print(
          f'  {run.name}: {run.config().total_steps} steps{where}, about'
          f' {estimate.clock(seconds[run.name])}'
        )
    store = self._store()
    jobs = [
      job
      for study in self.studies
      for job in measure.jobs(
        study,
        self._expected(study, todo),
        self._analyses(study),
      )
      if any(x in todo for x in job.runs) or not store.has(job)
    ]
    analysis = sum(x.seconds for x in jobs) + 60 * len(self.studies)
    total = sum(seconds.values()) + analysis
    print(
      f'Measurements: {len(jobs)}, about {estimate.clock(analysis)}. In all'
      f' about {estimate.clock(total)} on this machine.'
    )
    if not _CLAIMS.value:
      print(f'Results: {self.output}', flush=True)
    return seconds

  def _expected(self, study, todo):
    """Runs that will be there to be measured."""
    return [
      x for x in study.runs(self.runs_dir) if x.is_finished() or x in todo
    ]

  def _store(self):
    from analysis.study import measure

    return measure.Store(
      self.runs_dir / 'measured', _DATA_DIR.value, _REMEASURE.value
    )

  def _train_flags(self):
    return [f'--config.data.dir={_DATA_DIR.value}'] if _DATA_DIR.value else []

  def _train(self, todo, seconds):
    """Trains in turn; names of those that failed."""
    from analysis.study import estimate

    failed = []
    left = estimate.Countdown([seconds[x.name] for x in todo])
    for number, run in enumerate(todo, start=1):
      _tell(
        f'Training {number} of {len(todo)}: {run.name}; about {left.next()}'
        ' left for all'
      )
      code = self._train_one(run)
      if code == cli.EXIT_STOPPED:
        raise KeyboardInterrupt
      if code:
        failed.append(run.name)
    return failed

  def _train_one(self, run):
    from analysis import machine
    from analysis.study import estimate

    process = subprocess.Popen(
      [sys.executable, *run.command(), *self._train_flags()],
      cwd=machine.ROOT,
      env=estimate.environment(),
      # Ctrl-C comes here alone, and is passed on once.
      start_new_session=True,
    )
    try:
      return process.wait()
    except KeyboardInterrupt:
      process.terminate()  # It finishes its step and saves.
      try:
        process.wait()
      except KeyboardInterrupt:
        process.kill()
        process.wait()
      raise

  def _letters(self, study):
    return [x for x in study.claims if not _CLAIMS.value or x in _CLAIMS.value]

  def _analyses(self, study):
    """Modules that measure what is asked for."""
    from analysis.study import claims

    letters = self._letters(study)
    return {y for x in letters for y in claims.CLAIMS[x].analyses}

  def _print_claims(self):
    from analysis.study import claims
    from analysis.study import content as content_lib

    for study in self.studies:
      letters = self._letters(study)
      if not letters:
        continue
      if study.alone:
        evidence = content_lib.evidence_alone(study, self._measure_alone(study))
      else:
        found = content_lib.evidence_of(study, *self._measure_runs(study))
        evidence = found[study.comparisons[0].tag]
      for answer in claims.answers(letters, evidence):
        claim = answer.claim
        print(f'{claim.letter}. {claim.statement} {answer.verdict}')
        print(f'   {claim.definition}')
        for line in content_lib.lines(answer):
          print(
            f'   {line["tested"]}: {line["measured"]} (n = {line["n"]}):'
            f' {line["verdict"]}'
          )
        for line in answer.details:
          print(f'   {line}')

  def _content(self, study):
    from analysis.study import content as content_lib

    if study.alone:
      return content_lib.alone(study, self._measure_alone(study))
    return content_lib.of_runs(study, *self._measure_runs(study))

  def _measure_alone(self, study):
    """The one analysis of a study without runs."""
    from analysis import command

    module = importlib.import_module(f'analysis.{study.alone}')
    options = dataclasses.asdict(study.sizes) | {'seed': 0, 'num_iters': 50}
    return module.measure([], options, command.Progress())

  def _measure_runs(self, study):
    """Finished runs, and what has been measured of them."""
    from analysis import command
    from analysis.study import estimate
    from analysis.study import measure

    finished = [x for x in study.runs(self.runs_dir) if x.is_finished()]
    store, progress = self._store(), command.Progress()
    jobs = measure.jobs(study, finished, self._analyses(study))
    new = [x for x in jobs if not store.has(x)]
    left = estimate.Countdown([x.seconds for x in new])
    for number, job in enumerate(new, start=1):
      _tell(
        f'Measuring {number} of {len(new)}: {job.title}; about {left.next()}'
        f' left for {study.name}'
      )
      store.measure(job, progress)
    return finished, [store.read(x) for x in jobs]

  def _write(self, contents):
    from analysis.study import content as content_lib
    from analysis.study import page

    folders = [self.output / x.study.name for x in contents]
    found = [
      content_lib.write(content, folder)
      for content, folder in zip(contents, folders, strict=True)
    ]
    for content, folder in zip(found, folders, strict=True):
      page.write([content], [folder], folder)
      for line in page.answer(content):
        print(line)
    if len(found) > 1:
      page.write(found, folders, self.output)
    where = self.output if len(found) > 1 else folders[0]
    print(f'Page: {pathlib.Path(where) / page.PAGE}')


if __name__ == '__main__':
  cli.run(main, FLAGS)
