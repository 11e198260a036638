"""Two processes of one run, on this machine."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

from tests.conftest import ROOT


def python(module: str, *arguments: str) -> list[str]:
  return [sys.executable, '-m', module, *arguments]


def free_port() -> int:
  with socket.socket() as found:
    found.bind(('localhost', 0))
    return found.getsockname()[1]


class Process:
  """A process of a run; its output goes to files."""

  def __init__(self, folder: pathlib.Path, command, env=None):
    folder.mkdir(parents=True, exist_ok=True)
    self._stdout, self._stderr = folder / 'stdout', folder / 'stderr'
    with self._stdout.open('w') as stdout, self._stderr.open('w') as stderr:
      self.popen = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT), **(env or {})},
        stdout=stdout,
        stderr=stderr,
      )

  @property
  def stdout(self) -> str:
    return self._stdout.read_text()

  @property
  def stderr(self) -> str:
    return self._stderr.read_text()

  @property
  def error(self) -> str:
    """The one line of error."""
    (line,) = (x for x in self.stderr.splitlines() if x.startswith('error: '))
    return line

  def end(self, timeout: float = 300) -> int:
    """Its exit code, once it has ended by itself."""
    return self.popen.wait(timeout)


@contextlib.contextmanager
def pair(folder, command, num_devices=1, env=None):
  """Two processes with `num_devices` virtual devices each; none survives."""
  flags = f'--xla_force_host_platform_device_count={num_devices}'
  port = free_port()
  processes = []
  try:
    for i in range(2):
      connection = (
        '--distributed',
        f'--coordinator_address=localhost:{port}',
        '--num_processes=2',
        f'--process_id={i}',
      )
      processes.append(
        Process(
          folder / f'{time.monotonic_ns()}',
          [*command, *connection],
          {'XLA_FLAGS': flags, **(env or {})},
        )
      )
    yield processes
  finally:
    for process in processes:
      process.popen.kill()
      process.popen.wait()


def wait_for(condition, processes, timeout=120):
  begin = time.monotonic()
  while not condition():
    ended = [x for x in processes if x.popen.poll() is not None]
    assert not ended, [x.stderr for x in processes]
    assert time.monotonic() - begin < timeout, [x.stderr for x in processes]
    time.sleep(0.02)
