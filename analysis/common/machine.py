"""The machine and the processes that things are measured on."""

from collections.abc import Callable
from collections.abc import Mapping
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
from typing import Any

import jax

from sinkformer_jax import errors

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


def num_threads() -> int:
  """Cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def available_memory_mb() -> float | None:
  """Memory that can be had without swapping (1e6 bytes); None if unknown."""
  try:
    lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
  except OSError:
    return None
  (kib,) = (x.split()[1] for x in lines if x.startswith('MemAvailable:'))
  return int(kib) * 1024 / 1e6


def child(
  module: str,
  function: str,
  arguments: Mapping[str, Any],
  environment: Mapping[str, str] | None = None,
) -> Any:
  """Calls a function in a process of its own.

  Args:
    module: its module, importable from the root of the repository.
    function: its name.
    arguments: by keyword, what JSON can hold.
    environment: variables to change.

  Returns:
    What the function returns, after JSON.

  Raises:
    RuntimeError: if the process fails.
  """
  code = (
    'import importlib, json, sys\n'
    'module, function, arguments = sys.argv[1:]\n'
    'function = getattr(importlib.import_module(module), function)\n'
    'print(json.dumps(function(**json.loads(arguments))))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, module, function, json.dumps(arguments)],
    cwd=ROOT,
    env={**os.environ, **(environment or {})},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(
      f'{module}.{function}({arguments}) ended with code {done.returncode}:'
      f' {done.stderr}'
    )
  return json.loads(done.stdout.splitlines()[-1])


def memory_growth_mb(
  warm_up: Callable[[], Any], call: Callable[[], Any]
) -> float:
  """How much the peak resident memory of this process grows over a call.

  To be called in a process of its own, see `child`.

  Args:
    warm_up: the same on a small scale, which loads what libraries load.
    call: is called once.
  """
  warm_up()
  before = _peak_mb()
  call()
  # Linux counts pages for each core, and adds up now and then: what has not
  # grown may read as some pages less.
  return max(0.0, _peak_mb() - before)


def _peak_mb():
  status = pathlib.Path('/proc/self/status')
  if status.exists():
    # Of this program alone. What getrusage tells on Linux starts at the peak
    # of the process that started this one.
    (line,) = (
      x for x in status.read_text().splitlines() if x.startswith('VmHWM:')
    )
    return int(line.split()[1]) * 1024 / 1e6
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
    'processor': _processor(),
    'threads': num_threads(),
    'load': os.getloadavg()[0],
    'environment': {x: os.environ.get(x) for x in _VARIABLES},
    'python': platform.python_version(),
    'versions': {x: _version(x) for x in _PACKAGES},
  }


def git_commit() -> str:
  """The commit of this code, '' where it is no git checkout."""
  command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
  try:
    done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=False
    )
  except FileNotFoundError:
    return ''
  return done.stdout.strip()


def _processor():
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return platform.processor()
  names = [x.partition(':')[2].strip() for x in lines if 'model name' in x]
  return names[0] if names else platform.processor()


def _version(package):
  """Version of a package, None if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
