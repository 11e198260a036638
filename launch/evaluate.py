"""Evaluates a run: `python -m launch.evaluate --workdir=runs/NAME/seed0`.

Prints loss, accuracy, and for each layer how far attention was from doubly
stochastic. Works on unfinished runs and on any number of devices; with
`--distributed` on those of several hosts.
"""

import json

from absl import flags

from launch import distributed
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Run directory.', flag_values=FLAGS
)
_STEP = flags.DEFINE_integer(
  'step',
  None,
  'Checkpoint; the newest if not given.',
  lower_bound=0,
  flag_values=FLAGS,
)
_SPLIT = flags.DEFINE_enum(
  'split',
  'test',
  ['train', 'validation', 'test'],
  'Which split.',
  flag_values=FLAGS,
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 256, 'Examples in a batch.', lower_bound=1, flag_values=FLAGS
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir',
  '',
  "Directory of data sets; the run's own if not given.",
  flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
  'output',
  '',
  'JSON file to write the result to; must not exist.',
  flag_values=FLAGS,
)
flags.mark_flag_as_required('workdir', FLAGS)
distributed.define_flags(FLAGS)


def main() -> None:
  """Evaluates and prints."""
  from sinkformer_jax import data
  from sinkformer_jax import training
  from sinkformer_jax.training import hosts

  output = cli.output_path(_OUTPUT.value)
  distributed.connect(FLAGS)
  run = training.load_run(_WORKDIR.value, _STEP.value)
  data_config = run.config.data
  if _DATA_DIR.value:
    # Wherever it comes from, it has to be the data of the run.
    data_config.update(source='auto', dir=_DATA_DIR.value)
  with hosts.first_then_others():
    dataset = data.load(data_config)
  result = training.evaluate_run(run, dataset, _SPLIT.value, _BATCH_SIZE.value)
  if hosts.is_first():
    _print_result(run, result, output)


def _print_result(run, result, output):
  print(
    f'{run.workdir} step {run.step}, {_SPLIT.value}: loss'
    f' {result["loss"]:.4f}, accuracy {result["accuracy"]:.4f},'
    f' {result["count"]} examples'
  )
  print('layer  max |row sum - 1|  max |column sum - 1|')
  by_layer = zip(
    result['row_error_by_layer'], result['column_error_by_layer'], strict=True
  )
  for layer, (row, column) in enumerate(by_layer, start=1):
    print(f'{layer:5d}  {row:17.1e}  {column:20.1e}')
  if run.info.provenance['notice']:
    print(f'NOTE: {run.info.provenance["notice"]}.')
  if output:
    about = {'workdir': str(run.workdir), 'step': run.step}
    about['split'] = _SPLIT.value
    output.write_text(json.dumps({**about, **result}, indent=2) + '\n')


if __name__ == '__main__':
  cli.run(main, FLAGS)
