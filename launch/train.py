"""Trains a model: `python -m launch.train --config=configs/NAME.py`.

Any field of the config can be overridden, as in `--config.model.num_layers=12`
and `--config.checkpoint.keep_steps=5,9`. Start the same command again to go on
after a stop. Exit codes: 0 finished, 75 stopped by a signal and to be resumed;
all others are errors. With `--distributed` it is one of several processes, as
in launch/run_tpu.sh and launch/slurm.sh.

Several seeds of a small model can be trained at once, as runs of their own:
`--vmap_seeds=0,1,2`. For many runs see `launch.sweep`.
"""

from collections.abc import Sequence
import functools
import pathlib
import re
import sys

from absl import flags
import ml_collections

from launch import distributed
from launch import fields
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
_CONFIG = flags.DEFINE_string(
  'config',
  None,
  'Config file, as configs/mnist_sinkhorn.py or with a preset,'
  ' configs/mnist_sinkhorn.py:quick. --config.FIELD=VALUE overrides a field.',
  flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  '',
  'Run directory. If not given, runs/<config>/seed<seed>. The config name has'
  ' its preset and the fields that were changed, as in'
  ' runs/mnist_sinkhorn_quick_num_iters=5/seed0. With --vmap_seeds it has to'
  ' hold "{seed}".',
  flag_values=FLAGS,
)
_VMAP_SEEDS = flags.DEFINE_list(
  'vmap_seeds',
  [],
  'Seeds to train at once on one device, in place of config.seed.',
  flag_values=FLAGS,
)
flags.mark_flag_as_required('config', FLAGS)
distributed.define_flags(FLAGS)


def default_workdir(
  config_path: str, config: ml_collections.ConfigDict
) -> pathlib.Path:
  """``runs/<config>[_<preset>][_<field>=<value>...]/seed<seed>``.

  Args:
    config_path: the file that the config came from.
    config: the config; fields that are not as in the file are in the name.
  """
  from sinkformer_jax import configuration
  from sinkformer_jax.training import workdir as workdir_lib

  original = fields.load(config_path).to_dict()
  changed = configuration.differences(original, config.to_dict())
  leaves = [x.rpartition('.')[2] for x in configuration.flatten(original)]
  path, _, preset = config_path.partition(':')
  parts = [pathlib.Path(path).stem, *([preset] if preset else [])]
  for field, (_, value) in changed.items():
    if field != 'seed' and field not in workdir_lib.MAY_DIFFER:
      leaf = field.rpartition('.')[2]
      name = leaf if leaves.count(leaf) == 1 else field
      value = '-'.join(map(str, value)) if isinstance(value, list) else value
      # What is left is safe in any shell and file system.
      text = re.sub(r'[^\w.+-]+', '-', str(value)) or '-'
      parts.append(f'{name}={text}')
  return pathlib.Path('runs') / '_'.join(parts) / f'seed{config.seed}'


def parse_seeds(values: Sequence[str], name: str) -> list[int]:
  """Seeds of a flag, as numbers.

  Raises:
    errors.ConfigError: unless they are integers from 0 on, each once.
  """
  from sinkformer_jax import errors

  # 2 ** 32 has ten digits; the config's own rule says what is too large.
  seeds = [
    int(x) for x in values if x.isascii() and x.isdigit() and len(x) <= 10
  ]
  if len(seeds) < len(values) or len(set(seeds)) < len(seeds):
    raise errors.ConfigError(
      f'--{name}={",".join(values)} must be integers, each once, like 0,1,2.'
    )
  return seeds


def main(overrides: Sequence[str]) -> int:
  """Trains, and says where the results lie.

  Args:
    overrides: fields of the config, as ``'model.num_layers=12'``.
  """
  # Imported late: wrong flags are refused before JAX is loaded.
  from sinkformer_jax import configuration
  from sinkformer_jax import paths
  from sinkformer_jax import training
  from sinkformer_jax.training import hosts

  config = fields.load(_CONFIG.value, overrides)
  configuration.check(config)
  data_dir = paths.data_dir(config.data.dir)
  if data_dir:
    # Recorded in full, so that the run can be evaluated from elsewhere.
    config.data.dir = str(paths.resolve(data_dir, 'config.data.dir'))
  distributed.connect(FLAGS)
  seeds = parse_seeds(_VMAP_SEEDS.value, 'vmap_seeds')
  workdirs = _workdirs(config, seeds or [config.seed])
  if seeds:
    results = training.train_seeds(config, workdirs)
  else:
    workdir = workdirs[config.seed]
    results = {config.seed: training.train_and_evaluate(config, workdir)}
  for seed, result in results.items():
    if result is not None and hosts.is_first():
      _print(config, workdirs[seed], result)
  return cli.EXIT_STOPPED if None in results.values() else cli.EXIT_DONE


def _workdirs(config, seeds):
  """``{seed: run directory}``."""
  from sinkformer_jax import errors

  given = _WORKDIR.value
  if _VMAP_SEEDS.value and given and '{seed}' not in given:
    raise errors.UserError(
      f'--workdir={given} is one directory for {len(seeds)} seeds; write'
      ' {seed} where it is to have the seed.'
    )
  workdirs = {}
  for seed in seeds:
    own = config.copy_and_resolve_references()
    own.seed = seed
    workdirs[seed] = (
      given.replace('{seed}', str(seed))
      if given
      else default_workdir(_CONFIG.value, own)
    )
  return workdirs


def _print(config, workdir, result):
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
  _rest, _overrides = fields.split(sys.argv)
  cli.run(functools.partial(main, _overrides), FLAGS, _rest)
