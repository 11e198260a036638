"""What Sinkhorn costs here: `python -m analysis.cost [--output=DIR]`.

Times are medians, with the fastest and slowest in brackets. What is compared is
timed in turn in one process, and a ratio is the median of the ratios of each
round: compare within one table, not between runs. Times of a busy machine are
worth little.

Parts, of which the first three (about 4 minutes on 2 cores) are the default:

  step         the training step of the 24-layer encoder (forward, backward,
               SGD update), with softmax and Sinkhorn, ours and PyTorch's;
               that of trained runs: analysis.step_time
  rate         matrix products of that step per second, as a share of what a
               large matrix product reaches
  normalizer   all forms of Sinkhorn alone, and other implementations, on the
               same logits: random ones of spread 1 and 3, and those of the
               runs of --workdir; with errors
  growth       time and memory against iterations, tokens, heads and batch (6
               minutes)
  compile      from process start to the end of the first step (6 minutes)
  rank         path products of the rank analysis and their residuals against a
               plain loop (6 minutes)
  loader       the loader of each data set in $SINKFORMER_DATA_DIR beside the
               training step, which should take at least 10 times as long;
               the first load (photos are decoded, texts tokenized) and the
               next ones, from the cache (3 minutes)
  accelerator  all forms of Sinkhorn, alone and in the step, in float32 and
               bfloat16; the default on a GPU or TPU (8 minutes)

Memory is what XLA plans beside arguments and results, and for PyTorch how much
the peak resident memory of a process of its own grows; both hold activations
and gradients. PyTorch and ott-jax are compared with where they are installed
(requirements-dev.txt), on a CPU, with as many threads as XLA has. The logit
spread is the standard deviation of the logits about the mean of their row; for
spreads of 1 and 3 the query kernels are scaled, layer by layer.

--output=DIR gets cost.json (all, with every time and where it was measured), a
CSV for each part, and figures.
"""

import logging
import pkgutil
import re

from absl import flags

from analysis.common import command
from sinkformer_jax import cli

logger = logging.getLogger('sinkformer_jax.cost')

# Each part: the function that measures it, which is imported late, and about
# how many seconds it takes on 2 cores.
PARTS = {
  'step': ('step:step_rows', 100),
  'rate': ('step:rate_rows', 30),
  'normalizer': ('normalizer:normalizer_rows', 120),
  'growth': ('normalizer:growth_rows', 360),
  'compile': ('step:compile_rows', 360),
  'rank': ('rank:rank_rows', 360),
  'loader': ('loader:loader_rows', 180),
  'accelerator': ('normalizer:accelerator_rows', 480),
}
_DEFAULT = {'cpu': ['step', 'rate', 'normalizer']}
# A load above this disturbs what is measured.
_QUIET = 0.3

FLAGS = flags.FlagValues()
_PLATFORM = flags.DEFINE_enum(
  'platform', 'cpu', ['cpu', 'gpu', 'tpu'], 'Device.', flag_values=FLAGS
)
_PARTS = flags.DEFINE_list(
  'parts',
  [],
  'Parts, see above; by default step,rate,normalizer on a CPU and accelerator'
  ' elsewhere.',
  flag_values=FLAGS,
)
_PRESET = flags.DEFINE_enum(
  'preset',
  'full',
  ['full', 'tiny'],
  'Sizes: those of the study, or tiny ones to see that everything works.',
  flag_values=FLAGS,
)
_SHAPES = flags.DEFINE_list(
  'shapes',
  [],
  'Tokens and batch of each table, such as 50x64,128x16 (the default on a'
  ' CPU; 50x256,128x256 elsewhere).',
  flag_values=FLAGS,
)
_NUM_ITERS = flags.DEFINE_integer(
  'num_iters', 50, 'Sinkhorn iterations.', lower_bound=1, flag_values=FLAGS
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 5, 'Rounds of timing.', lower_bound=1, flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
  'output',
  '',
  'Directory for tables and figures; new or empty.',
  flag_values=FLAGS,
)
command.define_runs(FLAGS, num_examples=None, required=False)


@flags.validator('parts', flag_values=FLAGS)
def _check_parts(parts):
  wrong = [x for x in parts if x not in PARTS]
  if wrong or len(set(parts)) < len(parts):
    raise flags.ValidationError(
      f'got {",".join(parts)}; choose from {", ".join(PARTS)}, each once.'
    )
  return True


@flags.validator('shapes', flag_values=FLAGS)
def _check_shapes(shapes):
  wrong = [x for x in shapes if not re.fullmatch(r'[1-9]\d*x[1-9]\d*', x)]
  if wrong or any(int(x.partition('x')[0]) < 2 for x in shapes):
    raise flags.ValidationError(
      f'got {",".join(shapes)}; must be tokens x batch, such as 50x64, with at'
      ' least 2 tokens.'
    )
  return True


def main() -> None:
  """Measures, prints, and writes."""
  output = command.output_directory(_OUTPUT.value) if _OUTPUT.value else None
  names = _PARTS.value or _DEFAULT.get(_PLATFORM.value, ['accelerator'])
  # Imported late: wrong flags are refused before JAX is loaded.
  from analysis.common import machine
  from analysis.cost import setup as cost_setup

  machine.select_platform(_PLATFORM.value)
  provenance = machine.provenance()
  options = cost_setup.options(
    _PRESET.value,
    [tuple(map(int, x.split('x'))) for x in _SHAPES.value],
    _NUM_ITERS.value,
    _REPEATS.value,
    command.load_subjects(FLAGS.flag_values_dict()),
  )
  print(
    f'{provenance["device_count"]} x {provenance["device"]}'
    f' ({provenance["processor"]}), {provenance["threads"]} threads,'
    f' {_NUM_ITERS.value} iterations, preset {_PRESET.value}'
  )
  if provenance['load'] > _QUIET:
    print(
      f'NOTE: the machine is not quiet: its load is {provenance["load"]:.1f},'
      f' above {_QUIET}. Times are worth little.',
      flush=True,
    )
  _measure(names, options, provenance, output)
  if output:
    print(f'Tables and figures: {output}')


def _measure(names, options, provenance, output):
  from analysis.cost import figures as cost_figures
  from analysis.cost import tables as cost_tables

  parts = {}
  for number, name in enumerate(names):
    text = f'part {number + 1} of {len(names)}, {name}'
    if _PRESET.value == 'full':
      left = sum(PARTS[x][1] for x in names[number:])
      text += f'; about {left} s left in all on 2 cores'
    logger.info(text)
    measure = pkgutil.resolve_name(f'analysis.cost.{PARTS[name][0]}')
    parts[name] = cost_tables.frame(measure(options))
    print(cost_tables.text(parts[name]), flush=True)
    if output:
      # After each part: what has been measured is kept whatever comes.
      cost_tables.write_csv(output / f'{name}.csv', parts[name])
      cost_figures.save(output, name, parts[name])
      cost_tables.write_json(output / 'cost.json', provenance, parts)


if __name__ == '__main__':
  cli.run(main, FLAGS)
