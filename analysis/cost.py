"""What Sinkhorn costs: `python -m analysis.cost [--output=FILE.json]`.

Times value and gradient of the normalizers on random logits of unit spread,
and reads the scratch memory that XLA plans for them. Times are the median of
several calls, with the fastest and slowest; compare them within one run only.
"""

import json
import statistics
import time

from absl import flags

from launch import cli

FLAGS = flags.FlagValues()
_LENGTHS = flags.DEFINE_list(
  'lengths', ['50', '128'], 'Tokens in a sequence.', flag_values=FLAGS
)
_MATRICES = flags.DEFINE_integer(
  'matrices',
  0,
  'Matrices in a batch; 256 of 50 tokens, 62 of 128 if 0.',
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
  'repeats', 9, 'Timed calls.', lower_bound=1, flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
  'output', '', 'JSON file for the table.', flag_values=FLAGS
)


def measure(fn, *arguments, repeats: int) -> dict[str, float]:
  """Time and planned scratch memory of a jitted function.

  Returns:
    ``median_ms``, ``min_ms``, ``max_ms``, ``scratch_mb`` (1e6 bytes) and
    ``compile_s``.
  """
  import jax

  start = time.perf_counter()
  compiled = jax.jit(fn).lower(*arguments).compile()
  compile_s = time.perf_counter() - start
  jax.block_until_ready(compiled(*arguments))
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    times.append(1e3 * (time.perf_counter() - start))
  return {
    'median_ms': statistics.median(times),
    'min_ms': min(times),
    'max_ms': max(times),
    'scratch_mb': compiled.memory_analysis().temp_size_in_bytes / 1e6,
    'compile_s': compile_s,
  }


def normalizer_rows(
  length: int, matrices: int, num_iters: int, repeats: int
) -> list[dict]:
  """Value, and value with gradient, of each normalizer."""
  import jax
  import jax.numpy as jnp

  from sinkformer_jax import sinkhorn

  keys = jax.random.split(jax.random.key(0))
  shape = (matrices, length, length)
  logits, cotangent = (jax.random.normal(key, shape) for key in keys)
  normalizers = {
    'softmax': sinkhorn.softmax,
    'sinkhorn': lambda x: sinkhorn.sinkhorn(x, num_iters),
    'reference': lambda x: sinkhorn.sinkhorn_reference(x, num_iters),
  }
  rows = []
  for name, normalizer in normalizers.items():

    def with_gradient(x, cotangent, normalizer=normalizer):
      weights, vjp = jax.vjp(normalizer, x)
      return weights, vjp(cotangent)

    value = measure(normalizer, logits, repeats=repeats)
    both = measure(with_gradient, logits, cotangent, repeats=repeats)
    weights = jnp.asarray(normalizer(logits))
    about = {
      'normalizer': name,
      'length': length,
      'matrices': matrices,
      'num_iters': 0 if name == 'softmax' else num_iters,
      'column_error': float(sinkhorn.marginal_errors(weights)[1].max()),
    }
    rows.append({**about, 'what': 'value', **value})
    rows.append({**about, 'what': 'value and gradient', **both})
  return rows


def main() -> None:
  """Measures and prints."""
  import jax

  from sinkformer_jax import errors

  output = cli.output_path(_OUTPUT.value)
  if not all(x.isdigit() and int(x) > 0 for x in _LENGTHS.value):
    raise errors.UserError(f'--lengths={_LENGTHS.value} must be lengths.')
  print(f'{jax.devices()[0].device_kind}, {_NUM_ITERS.value} iterations')
  print(
    'tokens matrices  normalizer  what                 median ms (min to max)'
    '   scratch MB  column error'
  )
  rows = []
  for length in map(int, _LENGTHS.value):
    # Fewer of longer ones, so that a table takes seconds.
    matrices = _MATRICES.value or max(1, round(256 * (50 / length) ** 1.5))
    block = normalizer_rows(length, matrices, _NUM_ITERS.value, _REPEATS.value)
    for x in block:
      print(
        f'{x["length"]:6d} {x["matrices"]:8d}  {x["normalizer"]:10s} '
        f' {x["what"]:18s} {x["median_ms"]:11.1f} ({x["min_ms"]:.1f} to'
        f' {x["max_ms"]:.1f}) {x["scratch_mb"]:10.1f}  {x["column_error"]:.1e}'
      )
    reference, ours = (
      next(x for x in block if x['normalizer'] == name and x['what'] != 'value')
      for name in ('reference', 'sinkhorn')
    )
    print(
      f'  value and gradient: sinkhorn is'
      f' {reference["median_ms"] / ours["median_ms"]:.1f} times faster than'
      ' automatic differentiation of the reference, with'
      f' 1/{reference["scratch_mb"] / ours["scratch_mb"]:.1f} of its memory'
    )
    rows += block
  if output:
    output.write_text(json.dumps(rows, indent=2) + '\n')


if __name__ == '__main__':
  cli.run(main, FLAGS)
