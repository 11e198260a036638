"""Times that can be compared.

Alternatives are timed in turn, one call of each a round, in one process: what
disturbs the machine for a while then disturbs all of them. A ratio is taken
within each round, so its spread says how far it can be trusted.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging
import math
import statistics
import time
from typing import Any

import jax
import numpy as np
from scipy import stats

from analysis.common import machine

# Below that of the project, whose lines a command shows.
logger = logging.getLogger('sinkformer_jax.timing')

# A sample is as many calls as fill this time; the clock and the start of a
# call do not count then.
_SAMPLE_S = 0.02
# Calls longer than this are timed in the first rounds only.
_SLOW_S, _SLOW_REPEATS = 3.0, 2

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Alternative:
  """One of the things to compare.

  Attributes:
    call: does it once, and returns what to wait for; None if it cannot be
      done here, and `about` has a note that says why.
    about: further columns of its row.
    ratio_to: the alternative that its time is divided by; '' for none.
  """

  call: Callable[[], Any] | None
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ratio_to: str = ''


def attempt(create: Callable[..., Alternative], *arguments: Any) -> Alternative:
  """An alternative, or where it raises `machine.NotHereError` its note."""
  try:
    return create(*arguments)
  except machine.NotHereError as error:
    return Alternative(None, {'note': str(error)})


def compare(
  title: str, alternatives: Mapping[str, Alternative], repeats: int
) -> list[Row]:
  """Times alternatives in turn.

  Args:
    title: of the table, the column ``table``.
    alternatives: what to time, by name.
    repeats: rounds. Those that take more than 3 seconds sit out all but 2.

  Returns:
    For each alternative ``table``, ``name``, its `about`, and unless it cannot
    be done ``ms`` with its spread, ``repeats`` and ``times_ms`` (milliseconds),
    and ``ratio_to`` and ``ratio`` with its spread (of the ratios of all rounds
    in which both were timed).
  """
  calls = {name: x.call for name, x in alternatives.items() if x.call}
  times = _round_robin(title, calls, repeats)
  rows = []
  for name, alternative in alternatives.items():
    row = {'table': title, 'name': name, **alternative.about}
    if name in times:
      row |= spread('ms', times[name])
      row |= {'repeats': len(times[name]), 'times_ms': list(times[name])}
    base = times.get(alternative.ratio_to)
    if name in times and base:
      pairs = zip(times[name], base, strict=False)
      row['ratio_to'] = alternative.ratio_to
      row |= spread('ratio', [x / y for x, y in pairs])
    rows.append(row)
  return rows


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
  """Median, smallest and largest: ``name``, ``name_min``, ``name_max``."""
  values = list(values)
  return {
    name: statistics.median(values),
    f'{name}_min': min(values),
    f'{name}_max': max(values),
  }


def _round_robin(title, calls, repeats):
  """``{name: [milliseconds in each round]}``."""
  logger.info('%s: first calls', title)
  # What one round costs is known from the second calls, after the first ones
  # have filled caches and memory.
  seconds = {name: _seconds(call, 1) for name, call in calls.items()}
  for name, call in calls.items():
    if seconds[name] < _SLOW_S:
      seconds[name] = _seconds(call, 1)
  counts = {x: math.ceil(_SAMPLE_S / seconds[x]) for x in calls}
  rounds = {
    x: repeats if seconds[x] < _SLOW_S else min(repeats, _SLOW_REPEATS)
    for x in calls
  }
  times = {name: [] for name in calls}
  for number in range(repeats):
    left = sum(
      seconds[x] * counts[x] * max(rounds[x] - number, 0) for x in calls
    )
    logger.info(
      '%s: round %d of %d, %.0f s left', title, number + 1, repeats, left
    )
    # There and back again, so that nobody always follows the same one.
    for name in list(calls)[:: -1 if number % 2 else 1]:
      if number < rounds[name]:
        one = _seconds(calls[name], counts[name]) / counts[name]
        times[name].append(1e3 * one)
  return times


def _seconds(call, count):
  """Time of `count` calls."""
  # On an accelerator calls follow each other and the host need not wait for
  # each. On a CPU they would run beside each other.
  wait_for_each = jax.default_backend() == 'cpu'
  start = time.perf_counter()
  for _ in range(count):
    result = call()
    if wait_for_each:
      jax.block_until_ready(result)
  jax.block_until_ready(result)
  return time.perf_counter() - start


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
  """Exponent of ``y = c x^exponent``, by least squares of the logarithms.

  Args:
    x: at least 3 positive numbers, not all equal.
    y: positive numbers.

  Returns:
    ``(exponent, standard error)``.

  Raises:
    ValueError: for other numbers.
  """
  if len(x) < 3 or len(set(x)) < 2 or min(*x, *y) <= 0:
    raise ValueError(f'no exponent can be fitted to x={x}, y={y}.')
  fit = stats.linregress(np.log(x), np.log(y))
  # It has no error where y is constant: its correlation is undefined there.
  error = fit.stderr if np.ptp(y) else 0.0
  return float(fit.slope), float(error)
