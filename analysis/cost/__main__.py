"""What Sinkhorn costs here: `python -m analysis.cost [--output=DIR]`.

Times are medians, with the fastest and slowest in brackets. What is compared is
timed in turn in one process, and a ratio is the median of the ratios of each
round: compare within one table, not between runs. Times of a busy machine are
worth little.

Parts, of which the first three (about 3 minutes on 2 cores) are the default:

  step         the training step of the 24-layer encoder (forward, backward,
               SGD update), with softmax and Sinkhorn, ours and PyTorch's;
               that of trained runs: analysis.step_time
  rate         matrix products of that step per second, as a share of what a
               large matrix product reaches
  normalizer   the normalizer alone against other implementations, with errors
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

import dataclasses
import importlib
import json
import re

from absl import flags

from sinkformer_jax import cli

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
  'num_iters',
  50,
  'Sinkhorn iterations.',
  lower_bound=1,
  flag_values=FLAGS,
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


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of the measurements.

  Attributes:
    module: where it is: `--help` and wrong flags need not wait for JAX.
    function: ``(options, report) -> rows``, see `cost_setup`.
    seconds: about how long it takes on 2 cores.
  """

  module: str
  function: str
  seconds: int


PARTS = {
  'step': Part('cost_step', 'step_rows', 100),
  'rate': Part('cost_step', 'rate_rows', 30),
  'normalizer': Part('cost_normalizer', 'normalizer_rows', 60),
  'growth': Part('cost_normalizer', 'growth_rows', 360),
  'compile': Part('cost_step', 'compile_rows', 360),
  'rank': Part('cost_rank', 'rank_rows', 360),
  'loader': Part('cost_loader', 'loader_rows', 180),
  'accelerator': Part('cost_normalizer', 'accelerator_rows', 480),
}
_DEFAULT = {'cpu': ['step', 'rate', 'normalizer']}


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
  from analysis.common import command

  output = command.output_directory(_OUTPUT.value) if _OUTPUT.value else None
  names = _PARTS.value or _DEFAULT.get(_PLATFORM.value, ['accelerator'])
  # Imported late: wrong flags are refused before JAX is loaded.
  from analysis.common import machine
  from analysis.common import timing
  from analysis.cost import setup as cost_setup
  from analysis.cost import tables as cost_tables

  machine.select_platform(_PLATFORM.value)
  provenance = machine.provenance()
  options = cost_setup.options(
    preset=_PRESET.value,
    shapes=[tuple(map(int, x.split('x'))) for x in _SHAPES.value],
    num_iters=_NUM_ITERS.value,
    repeats=_REPEATS.value,
  )
  report = timing.Progress()
  print(
    f'{provenance["device_count"]} x {provenance["device"]}'
    f' ({provenance["processor"]}), {provenance["threads"]} threads,'
    f' {_NUM_ITERS.value} iterations, preset {_PRESET.value}'
  )
  if provenance['load'] > 0.5 * provenance['threads']:
    report(f'NOTE: the machine is busy (load {provenance["load"]:.1f})')
  results = {}
  for number, name in enumerate(names):
    text = f'part {number + 1} of {len(names)}, {name}'
    if _PRESET.value == 'full':
      left = sum(PARTS[x].seconds for x in names[number:])
      text += f'; about {left} s left in all on 2 cores'
    report(text)
    module = importlib.import_module(f'analysis.{PARTS[name].module}')
    rows = getattr(module, PARTS[name].function)(options, report)
    print(cost_tables.text(rows), flush=True)
    results[name] = rows
    if output:
      # After each part: what has been measured is kept whatever comes.
      _write(output, name, rows)
      content = {'provenance': provenance, 'parts': results}
      text = json.dumps(content, indent=1, allow_nan=False) + '\n'
      (output / 'cost.json').write_text(text)
  if output:
    print(f'Tables and figures: {output}')


def _write(output, name, rows):
  from analysis.cost import figures as cost_figures
  from analysis.cost import tables as cost_tables

  cost_tables.write_csv(output / f'{name}.csv', rows)
  cost_figures.save(output, name, rows)


if __name__ == '__main__':
  cli.run(main, FLAGS)
