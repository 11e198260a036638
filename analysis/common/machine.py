"""The machine and the processes that things are measured on."""

from collections.abc import Callable
from collections.abc import Mapping
import concurrent.futures
import datetime
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import resource
import sys
from typing import Any
from unittest import mock

import jax

from sinkformer_jax import errors
from sinkformer_jax.paths import git_commit as git_commit

ROOT = pathlib.Path(__file__).parents[2]
# Variables that change how fast the same program runs.
_VARIABLES = (
  'GLIBC_TUNABLES',
  'JAX_DEFAULT_MATMUL_PRECISION',
  'JAX_ENABLE_X64',
  'LD_PRELOAD',
  'MKL_NUM_THREADS',
  'OMP_NUM_THREADS',
  'XLA_FLAGS',
)
_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy', 'torch', 'ott-jax')


class NotHereError(Exception):
  """Why something cannot be measured here; the note of its row."""


def num_threads() -> int:
  """Cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def available_memory_mb() -> float | None:
  """Memory that can be had without swapping (1e6 bytes); None if unknown."""
  kib = _proc('meminfo').get('MemAvailable')
  return int(kib.split()[0]) * 1024 / 1e6 if kib else None


def require(module: str) -> None:
  """Raises `NotHereError` if a package cannot be compared with here."""
  if jax.default_backend() != 'cpu':
    raise NotHereError('compared on the CPU only')
  if not importlib.util.find_spec(module):
    raise NotHereError('not installed: pip install -r requirements-dev.txt')


def require_memory(entries: int, num_iters: int) -> None:
  """Raises `NotHereError` if an automatic gradient of Sinkhorn does not fit.

  It keeps one float32 matrix for each of the ``2 num_iters`` updates.

  Args:
    entries: of all matrices.
    num_iters: Sinkhorn iterations.
  """
  needed_mb = 1.2 * entries * 2 * num_iters * 4 / 1e6
  available = available_memory_mb()
  if available is not None and needed_mb >= available:
    raise NotHereError(
      f'needs {needed_mb:.0f} MB of memory; {available:.0f} MB are free'
    )


def _proc(name):
  """A file in /proc as names and texts, empty where there is none."""
  try:
    lines = pathlib.Path('/proc', name).read_text().splitlines()
  except OSError:
    return {}
  pairs = (x.partition(':') for x in lines)
  return {name.strip(): text.strip() for name, _, text in pairs}


def child(
  function: Callable[..., Any],
  environment: Mapping[str, str] | None = None,
  **arguments: Any,
) -> Any:
  """Calls a function in a new process, which starts Python anew.

  Args:
    function: a function of a module.
    environment: variables to change.
    **arguments: by keyword.

  Returns:
    What the function returns. Its exceptions are raised here.
  """
  spawn = multiprocessing.get_context('spawn')
  with (
    mock.patch.dict(os.environ, environment or {}),
    concurrent.futures.ProcessPoolExecutor(1, spawn) as pool,
  ):
    return pool.submit(function, **arguments).result()


def grown(
  create: Callable[..., Callable[[], Any]],
  small: Mapping[str, Any],
  full: Mapping[str, Any],
  **both: Any,
) -> dict[str, Any]:
  """Columns of how much the peak resident memory of a process grows.

  Args:
    create: makes a call from arguments, in a process of its own.
    small: arguments of a first call, which loads what libraries load.
    full: those of the call that is measured.
    **both: arguments of both.
  """
  create = functools.partial(create, **both)
  memory_mb = child(_growth_mb, create=create, small=small, full=full)
  return {'memory_mb': memory_mb, 'memory_of': 'peak growth'}


def _growth_mb(create, small, full):
  warm_up, call = create(**small), create(**full)
  warm_up()
  before = _peak_mb()
  call()
  # Linux counts pages for each core, and adds up now and then: what has not
  # grown may read as some pages less.
  return max(0.0, _peak_mb() - before)


def planned(program: jax.stages.Compiled) -> dict[str, Any]:
  """Columns of the memory that XLA plans beside arguments and results."""
  memory_mb = program.memory_analysis().temp_size_in_bytes / 1e6
  return {'memory_mb': memory_mb, 'memory_of': 'planned by XLA'}


def _peak_mb():
  # Of this program alone. What getrusage tells on Linux starts at the peak of
  # the process that started this one.
  kib = _proc('self/status').get('VmHWM')
  if kib:
    return int(kib.split()[0]) * 1024 / 1e6
  # macOS, in bytes.
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def select_platform(name: str) -> None:
  """Makes JAX use a kind of device; before anything else of JAX is used.

  Args:
    name: 'cpu', 'gpu' or 'tpu'.

  Raises:
    errors.UserError: if there is no such device.
  """
  if name == 'cpu':
    # Only this one can be forced: 'gpu' asks for those of all makers at once.
    jax.config.update('jax_platforms', 'cpu')
  found = jax.default_backend()
  if found != name:
    raise errors.UserError(
      f'--platform={name}: the best device that JAX finds here is a {found}.'
      ' GPUs need requirements-gpu.txt, TPUs requirements-tpu.txt, and'
      f' JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")!r} must allow them.'
    )


def provenance() -> dict[str, Any]:
  """Where and with what things are measured.

  ``load`` is the mean number of busy threads of the last minute.
  """
  devices = jax.devices()
  return {
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'command': sys.argv,
    'git_commit': git_commit(),
    'device': devices[0].device_kind,
    'device_count': len(devices),
    'processor': _proc('cpuinfo').get('model name') or platform.processor(),
    'threads': num_threads(),
    'load': os.getloadavg()[0],
    'environment': {x: os.environ.get(x) for x in _VARIABLES},
    'python': platform.python_version(),
    'versions': {x: _version(x) for x in _PACKAGES},
  }


def _version(package):
  """Version of a package, None if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
