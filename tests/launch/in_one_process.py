"""Runs launchers as `python -m` does, many of them in one process.

  python -m tests.launch.in_one_process < cases.json > results.json

A case is ``[module, argument, ...]``, a result ``[exit code, standard output,
standard error, seconds]``; the exit code is 'traceback' if there was one.
Training itself is left out: a command line that is right exits with 75.
"""

from collections.abc import Sequence
import contextlib
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import time
import traceback

from sinkformer_jax import training

Result = tuple[int | str | None, str, str, float]
ROOT = pathlib.Path(__file__).parent.parent.parent


def launch_all(
  cases: Sequence[Sequence[str]], cwd: pathlib.Path
) -> list[Result]:
  """Starts this module for many cases; their results."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.launch.in_one_process'],
    input=json.dumps(cases),
    cwd=cwd,
    capture_output=True,
    text=True,
    check=False,
    timeout=500,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr[-2_000:]
  return json.loads(done.stdout)


def launch(module: str, *arguments: str) -> Result:
  """Runs a launcher."""
  sys.argv = [module, *arguments]
  begin, stdout, stderr = time.monotonic(), io.StringIO(), io.StringIO()
  with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
    try:
      runpy.run_module(module, run_name='__main__', alter_sys=True)
      code = 0
    except SystemExit as error:
      code = error.code
    except BaseException:
      traceback.print_exc()
      code = 'traceback'
  return code, stdout.getvalue(), stderr.getvalue(), time.monotonic() - begin


if __name__ == '__main__':
  training.train_and_evaluate = lambda config, workdir: None
  training.train_seeds = lambda config, workdirs: dict.fromkeys(workdirs)
  json.dump([launch(*case) for case in json.load(sys.stdin)], sys.stdout)
