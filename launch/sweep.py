r"""Trains many runs, or writes them down for a cluster.

  python -m launch.sweep --config=configs/mnist_sinkhorn.py --seeds=0,1,2 \
    --config.model.normalizer=softmax,sinkhorn [--dry_run | --slurm=FILE]

Every combination of the configs (repeat --config), the values of the fields and
the seeds is a run: a process of `launch.train`, in the directory it would take
itself, with its output beside it, as in runs/mnist_sinkhorn/seed0.log. Finished
runs are skipped, stopped ones go on, failed ones do not hold up the others.
Commas within brackets or quotes are part of a value.

Exit codes: 0 all finished, 75 stopped by a signal and to be resumed with the
same command, 1 and 2 errors, or runs that failed; these are listed at the end.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from absl import flags

from launch import fields as fields_lib
from launch import train
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
_CONFIG = flags.DEFINE_multi_string(
  'config', None, 'Config file, as of launch.train.', flag_values=FLAGS
)
_SEEDS = flags.DEFINE_list('seeds', ['0'], 'Seeds.', flag_values=FLAGS)
_DRY_RUN = flags.DEFINE_boolean(
  'dry_run', False, 'List the runs and train nothing.', flag_values=FLAGS
)
_SLURM = flags.DEFINE_string(
  'slurm',
  '',
  'Write a Slurm array script to this file, which must not exist, and train'
  ' nothing.',
  flag_values=FLAGS,
)
_VMAP_SEEDS = flags.DEFINE_boolean(
  'vmap_seeds',
  False,
  'Train all seeds of a setting at once, in one process on one device. For'
  ' models that leave most of an accelerator idle; on a CPU it does not pay.',
  flag_values=FLAGS,
)
flags.mark_flag_as_required('config', FLAGS)


@dataclasses.dataclass(frozen=True)
class _Job:
  """A process to be: one run, or those of several seeds.

  Attributes:
    command: its arguments.
    log: where its output goes.
    workdirs: its run directories.
    setting: what its runs share with those they may be compared with.
  """

  command: tuple[str, ...]
  log: pathlib.Path
  workdirs: tuple[pathlib.Path, ...]
  setting: str

  def finished(self) -> list[pathlib.Path]:
    """Run directories with a result."""
    return [x for x in self.workdirs if (x / 'result.json').exists()]

  def unfinished(self) -> list[pathlib.Path]:
    """Run directories without one."""
    return [x for x in self.workdirs if x not in self.finished()]


def split_fields(
  argv: Sequence[str],
) -> tuple[list[str], dict[str, list[str]]]:
  """Takes the config's fields out of a command line.

  Args:
    argv: the command line.

  Returns:
    What is left of it, and ``{field: values}``.
  """
  rest, overrides = fields_lib.split(argv)
  fields = {}
  for override in overrides:
    field, _, values = override.partition('=')
    fields.setdefault(field, []).extend(_split(values))
  return rest, fields


def _split(text):
  """Splits at commas that are not within brackets or quotes."""
  values, depth, quote = [''], 0, ''
  for letter in text:
    if quote:
      quote = '' if letter == quote else quote
    elif letter in '"\'':
      quote = letter
    else:
      depth += (letter in '([{') - (letter in ')]}')
      if letter == ',' and depth == 0:
        values.append('')
        continue
    values[-1] += letter
  return values


def main(fields: dict[str, list[str]]) -> int:
  """Lists, writes or runs the jobs."""
  # Everything that can be wrong is looked at before anything runs.
  jobs = _jobs(fields)
  if _DRY_RUN.value:
    _list(jobs)
    code = 0
  elif _SLURM.value:
    _write_slurm(jobs)
    code = 0
  else:
    code = _run(jobs)
  _print_reports(jobs, finished_only=not (_DRY_RUN.value or _SLURM.value))
  return code


def _jobs(fields):
  from sinkformer_jax import errors

  for field, values in fields.items():
    if '' in values or field == 'seed':
      raise errors.ConfigError(
        f'config.{field}: write --seeds=0,1,2 for seeds and'
        ' --config.FIELD=VALUE,VALUE for other fields.'
      )
  seeds = train.parse_seeds(_SEEDS.value, 'seeds')
  if not seeds:
    raise errors.ConfigError('--seeds is empty.')
  settings = [
    (path, tuple(f'{k}={v}' for k, v in zip(fields, values, strict=True)))
    for path in _CONFIG.value
    for values in itertools.product(*fields.values())
  ]
  if _VMAP_SEEDS.value:
    jobs = [_job(*setting, seeds) for setting in settings]
  else:
    # Seed by seed, so that pairs are complete early.
    jobs = [_job(*setting, [seed]) for seed in seeds for setting in settings]
  seen = set()
  for workdir in itertools.chain(*(x.workdirs for x in jobs)):
    if workdir in seen:
      raise errors.ConfigError(
        f'two runs would be in {workdir}: give each config and value once.'
      )
    seen.add(workdir)
  return jobs


def _job(path, overrides, seeds):
  from sinkformer_jax import configuration
  from sinkformer_jax import paths
  from sinkformer_jax.training import workdir as workdir_lib

  workdirs = []
  for seed in seeds:
    config = fields_lib.load(path, [*overrides, f'seed={seed}'])
    configuration.check(config)
    workdir = train.default_workdir(path, config)
    workdir_lib.check_config(paths.resolve(workdir, 'workdir'), config)
    workdirs.append(workdir)
  command = [sys.executable, '-m', 'launch.train', f'--config={path}']
  command += [f'--config.{x}' for x in overrides]
  parent = workdirs[0].parent
  if _VMAP_SEEDS.value:
    numbers = ','.join(map(str, seeds))
    command += [f'--vmap_seeds={numbers}', f'--workdir={parent}/seed{{seed}}']
    log = parent / f'seeds{numbers}.log'
  else:
    command += [f'--config.seed={seeds[0]}', f'--workdir={workdirs[0]}']
    log = parent / f'{workdirs[0].name}.log'
  return _Job(tuple(command), log, tuple(workdirs), _setting(config))


def _setting(config):
  from sinkformer_jax import configuration

  fields = configuration.flatten(config.to_dict())
  shared = sorted(fields.keys() - configuration.MAY_DIFFER)
  return repr({k: fields[k] for k in shared})


def _list(jobs):
  for job in jobs:
    for workdir in job.workdirs:
      print(f'{workdir}  {_state(workdir)}')
    print(f'  {shlex.join(job.command)}')


def _state(workdir):
  if (workdir / 'result.json').exists():
    return 'finished'
  steps = [
    int(x.name)
    for x in (workdir / 'checkpoints').glob('[0-9]*')
    if x.name.isdigit()
  ]
  return f'at step {max(steps)}' if steps else 'new'


def _run(jobs):
  """Runs the jobs that have something to do, in turn; the exit code."""
  todo = [x for x in jobs if x.unfinished()]
  finished = [x for job in jobs for x in job.finished()]
  print(f'{len(finished)} runs are finished, {len(todo)} processes to run.')
  codes, stop = {}, _Stop()
  for number, job in enumerate(todo, start=1):
    if stop.requested:
      break
    names = ' '.join(map(str, job.unfinished()))
    print(f'[{number}/{len(todo)}] {names}, log in {job.log}', flush=True)
    begin = time.monotonic()
    codes[job] = stop.wait(_start(job))
    print(f'  {_words(codes[job])} after {time.monotonic() - begin:.0f} s')
  failed = [x for x, code in codes.items() if code not in (0, cli.EXIT_STOPPED)]
  for job in failed:
    print(f'FAILED: {shlex.join(job.command)}\n  {job.log}: {_last(job.log)}')
  stopped = stop.requested or cli.EXIT_STOPPED in codes.values()
  if stopped:
    print('Stopped. The same command goes on from there.')
  if failed:
    return cli.EXIT_ERROR
  return cli.EXIT_STOPPED if stopped else 0


class _Stop:
  """Passes SIGTERM and Ctrl-C on to the process that is running."""

  def __init__(self):
    self.requested, self._child = False, None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._handle)

  def _handle(self, number, frame):
    del number, frame
    self.requested = True
    if self._child:
      self._child.terminate()

  def wait(self, child: subprocess.Popen) -> int:
    """Waits for a process; its exit code."""
    self._child = child
    if self.requested:
      child.terminate()
    return child.wait()


def _start(job):
  from sinkformer_jax import errors

  try:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open('a') as log:
      log.write(f'$ {shlex.join(job.command)}\n')
      log.flush()
      # A session of its own: Ctrl-C reaches it through `_Stop` alone.
      return subprocess.Popen(
        job.command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
  except OSError as error:
    raise errors.RunError(
      f'{job.log} could not be written: {error.strerror}.'
    ) from error


def _words(code):
  if code < 0:
    return f'killed by {signal.Signals(-code).name}'
  words = {0: 'finished', cli.EXIT_STOPPED: 'stopped'}
  return words.get(code, f'failed with exit code {code}')


def _last(log):
  lines = log.read_text(errors='replace').splitlines()
  found = [x for x in lines if x.startswith('error: ')]
  return (found or lines)[-1]


def _write_slurm(jobs):
  from sinkformer_jax import errors

  path = cli.output_path(_SLURM.value, '--slurm')
  todo = [x for x in jobs if x.unfinished()]
  if not todo:
    print('All runs are finished; nothing to write.')
    return
  cases = '\n'.join(
    f'  {i}) log={shlex.quote(str(job.log))}\n'
    f'    command=({shlex.join(job.command)}) ;;'
    for i, job in enumerate(todo)
  )
  script = (
    _SCRIPT.replace('LAST', str(len(todo) - 1))
    .replace('FOLDER', shlex.quote(os.getcwd()))
    .replace('CASES', cases)
  )
  try:
    path.write_text(script)
  except OSError as error:
    raise errors.UserError(f'--slurm={path}: {error.strerror}.') from error
  print(f'{len(todo)} tasks: sbatch {_SLURM.value}')


_SCRIPT = """\
#!/bin/bash
# Written by launch.sweep: one task a process. Name partition, devices and time
# to sbatch, as in
#   sbatch --partition=NAME --gpus=1 --time=04:00:00 THIS_FILE
#SBATCH --job-name=sweep
#SBATCH --array=0-LAST
#SBATCH --output=/dev/null
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
cd FOLDER || exit 1
case "$SLURM_ARRAY_TASK_ID" in
CASES
  *) echo "there is no task $SLURM_ARRAY_TASK_ID" >&2; exit 1 ;;
esac
mkdir -p "$(dirname "$log")"
"${command[@]}" >>"$log" 2>&1 &
child=$!
# Two minutes before the time is up (USR1) the run saves a checkpoint and is put
# into the queue again. After scancel (TERM) it saves a checkpoint and ends.
trap 'again=1; kill -TERM $child' USR1
trap 'kill -TERM $child' TERM
wait $child
code=$?
while kill -0 $child 2>/dev/null; do
  wait $child
  code=$?
done
if [ "$again" ] && [ $code = 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit $code
"""


def _print_reports(jobs, finished_only):
  """Prints the analysis of each set of runs that may be compared."""
  sets = {}
  for job in jobs:
    workdirs = job.finished() if finished_only else job.workdirs
    if workdirs:
      sets.setdefault(job.setting, []).extend(workdirs)
  if sets:
    print('Analysis:' if finished_only else 'Analysis, when they are finished:')
  for workdirs in sets.values():
    arguments = [f'--workdir={x}' for x in workdirs]
    arguments.append(f'--output=reports/{workdirs[0].parent.name}')
    print(f'  python -m analysis.report {shlex.join(arguments)}')


if __name__ == '__main__':
  _rest, _fields = split_fields(sys.argv)
  cli.run(functools.partial(main, _fields), FLAGS, _rest)
