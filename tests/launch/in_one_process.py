"""Runs launchers as `python -m` does, many of them in one process.

  python -m tests.launch.in_one_process < cases.json > results.json

A case is ``[module, argument, ...]``, a result ``[exit code, standard error,
seconds]``; the exit code is 'traceback' if there was one. Training itself is
left out: a command line that is right exits with 75.
"""

import contextlib
import io
import json
import runpy
import sys
import time
import traceback

from sinkformer_jax import training


def launch(module: str, *arguments: str) -> tuple[int | str | None, str, float]:
  """Runs a launcher; its exit code, standard error and seconds."""
  sys.argv = [module, *arguments]
  stderr, begin = io.StringIO(), time.monotonic()
  with (
    contextlib.redirect_stderr(stderr),
    contextlib.redirect_stdout(io.StringIO()),
  ):
    try:
      runpy.run_module(module, run_name='__main__', alter_sys=True)
      code = 0
    except SystemExit as error:
      code = error.code
    except BaseException:
      traceback.print_exc()
      code = 'traceback'
  return code, stderr.getvalue(), time.monotonic() - begin


if __name__ == '__main__':
  training.train_and_evaluate = lambda config, workdir: None
  training.train_seeds = lambda config, workdirs: dict.fromkeys(workdirs)
  json.dump([launch(*case) for case in json.load(sys.stdin)], sys.stdout)
