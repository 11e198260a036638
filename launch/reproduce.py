"""Reproduces a study: trains, analyses, and writes tables, figures and a page.

  python -m launch.reproduce --study=all --preset=quick
  python -m launch.reproduce --study=mnist --preset=cpu

Says first what it will do and how long that takes here, from a few training
steps. Finished runs are taken as they are, stopped ones go on, and nothing is
measured twice. Ctrl-C leaves at once with exit code 75; the same command goes
on. Presets: quick (minutes on 2 cores for a study), cpu (a night for MNIST),
full (the papers' size); tiny is for tests. Of several studies those whose data
is not there are left out; see `python -m launch.prepare_data --check`.

  --dry_run        says what it would do, and ends
  --analyse_only   trains nothing: results of the runs that are finished
  --claims=a,n     prints these claims alone, and writes no page

Exit codes: 0 done, 75 stopped, 1 and 2 errors.
"""

import signal
import sys

from absl import flags

from sinkformer_jax import cli

FLAGS = flags.FlagValues()
_STUDY = flags.DEFINE_enum(
  'study',
  'all',
  [
    'mnist',
    'random_control',
    'theory',
    'ag_news',
    'cats_vs_dogs',
    'variants',
    'sinkformers_cats_vs_dogs',
    'sinkformers_imdb',
    'sinkformers',
    'all',
  ],
  'Which study, or group of studies.',
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
    reproduction = _asked_for()
    reproduction.check()
    failed = reproduction.run(_DRY_RUN.value)
  except KeyboardInterrupt:
    print('Stopped. The same command goes on from here.', file=sys.stderr)
    return cli.EXIT_STOPPED
  for name in failed:
    cli.print_error(f'training of {name} failed; see its messages above')
  return cli.EXIT_ERROR if failed else cli.EXIT_DONE


def _asked_for():
  # Imported late: wrong flags are refused before JAX is loaded.
  from analysis.study import reproduction
  from analysis.study import studies
  from sinkformer_jax import paths

  preset = _PRESET.value
  runs_dir = paths.resolve(_RUNS.value, '--runs')
  default = runs_dir / f'results_{preset}'
  if preset == 'cpu':
    default = 'analysis/results'
  return reproduction.Reproduction(
    studies.of(_STUDY.value, preset),
    runs_dir,
    paths.resolve(_OUTPUT.value or default, '--output'),
    _DATA_DIR.value,
    _CLAIMS.value,
    _ANALYSE_ONLY.value,
    _REMEASURE.value,
  )


if __name__ == '__main__':
  cli.run(main, FLAGS)
