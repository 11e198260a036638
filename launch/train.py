"""Trains a model: `python -m launch.train --config=configs/NAME.py`.

Any field of the config can be overridden, as in
`--config.model.num_layers=12`. Start the same command again to go on after a
stop. Exit codes: 0 finished, 75 stopped by a signal and to be resumed; all
others are errors. With `--distributed` it is one of several processes, as in
launch/run_tpu.sh and launch/slurm.sh.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from launch import cli
from launch import distributed

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'Config file, as configs/mnist_sinkhorn.py or with a preset,'
  ' configs/mnist_sinkhorn.py:quick.',
  flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  '',
  'Run directory; runs/<config>/seed<seed> if not given. The'
  ' config name has its preset, as in runs/mnist_sinkhorn_quick/seed0.',
  flag_values=FLAGS,
)
flags.mark_flag_as_required('config', FLAGS)
distributed.define_flags(FLAGS)


def default_workdir(config_path: str, seed: int) -> pathlib.Path:
  """``runs/<config>[_<preset>]/seed<seed>``."""
  path, _, preset = config_path.partition(':')
  name = pathlib.Path(path).stem + (f'_{preset}' if preset else '')
  return pathlib.Path('runs') / name / f'seed{seed}'


def main() -> int:
  """Trains, and says where the result lies."""
  # Imported late: wrong flags are refused before JAX is loaded.
  from sinkformer_jax import configuration
  from sinkformer_jax import paths
  from sinkformer_jax import training
  from sinkformer_jax.training import hosts

  config = _CONFIG.value
  configuration.check(config)
  data_dir = paths.data_dir(config.data.dir)
  if data_dir:
    # Recorded in full, so that the run can be evaluated from elsewhere.
    config.data.dir = str(paths.resolve(data_dir, 'config.data.dir'))
  distributed.connect(FLAGS)
  path = config_flags.get_config_filename(FLAGS['config'])
  workdir = _WORKDIR.value or default_workdir(path, config.seed)
  result = training.train_and_evaluate(config, workdir)
  if result is None:
    return cli.EXIT_STOPPED
  if hosts.is_first():
    _print_result(config, workdir, result)
  return cli.EXIT_DONE


def _print_result(config, workdir, result):
  test = result['test']
  print(
    f'{config.model.normalizer}: test accuracy {test["accuracy"]:.4f} on'
    f' {test["count"]} examples after {result["step"]} steps'
    f' ({result["epochs"]:.2f} epochs, {result["train_s"]:.0f} s);'
    f' largest column error {test["column_error"]:.2g}'
  )
  if result['notice']:
    print(f'NOTE: {result["notice"]}.')
  print(f'Results are in {workdir}')


if __name__ == '__main__':
  cli.run(main, FLAGS)
