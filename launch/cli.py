"""What all launchers share: flags, one-line errors, log lines, exit codes."""

from collections.abc import Callable, Sequence
import logging
import sys

from absl import app
from absl import flags
from absl import logging as absl_logging

from sinkformer_jax import errors

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # Stopped by a signal; the same command goes on.


def run(main: Callable[[], int | None]) -> None:
  """Runs `main` after parsing flags, and exits with what it returns.

  Exit codes: 0 done, 75 stopped by a signal and to be resumed, 1 an error that
  the user can mend, 2 wrong flags; anything else is a fault of the program and
  shows a traceback.
  """

  def wrapped(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      _exit(EXIT_USAGE, f'unexpected arguments: {" ".join(argv[1:])}')
    _show_log()
    try:
      sys.exit(main() or 0)
    except errors.UserError as error:
      _exit(EXIT_ERROR, error)
    except KeyboardInterrupt:
      _exit(130, 'interrupted')

  app.run(wrapped, flags_parser=_parse)


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  # What flags and config files raise for values that cannot be used.
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    _exit(EXIT_USAGE, e)
  except OSError as e:
    _exit(EXIT_USAGE, f'{e.filename}: {e.strerror}')


def _show_log():
  """Our own log lines from INFO up, those of the libraries from WARNING up."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.getLogger().setLevel(logging.WARNING)
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  logger = logging.getLogger('sinkformer_jax')
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  logger.propagate = False


def _exit(code, message):
  print(f'error: {" ".join(str(message).split())}', file=sys.stderr)
  sys.exit(code)
