"""What all launchers share: flags, one-line errors, log lines, exit codes."""

from collections.abc import Callable
from collections.abc import Sequence
import logging
import pathlib
import sys

from absl import flags
from absl import logging as absl_logging
import tqdm

from sinkformer_jax import errors

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # Stopped by a signal; the same command goes on.


def run(main: Callable[[], int | None], flag_values: flags.FlagValues) -> None:
  """Parses flags, runs `main`, and exits with what it returns.

  Exit codes: 0 done, 75 stopped by a signal and to be resumed, 1 an error that
  the user can mend, 2 wrong flags; anything else is a fault of the program and
  shows a traceback.

  Args:
    main: the program; returns an exit code, None for 0.
    flag_values: its flags. Every launcher has its own set, so that several can
      be imported together.
  """
  _parse(sys.argv, flag_values)
  _show_log()
  try:
    code = main()
  except errors.UserError as error:
    _exit(EXIT_ERROR, error)
  except KeyboardInterrupt:
    _exit(130, 'interrupted')
  sys.exit(code or 0)


def output_path(value: str) -> pathlib.Path | None:
  """The file that a flag names, None if it is not given.

  Raises:
    errors.UserError: if it exists, or its directory does not.
  """
  if not value:
    return None
  path = pathlib.Path(value).expanduser()
  if path.exists():
    raise errors.UserError(f'{path} exists; choose another name for --output.')
  if not path.parent.is_dir():
    raise errors.UserError(
      f'--output={value}: there is no directory {path.parent}.'
    )
  return path


def _parse(argv: Sequence[str], flag_values: flags.FlagValues) -> None:
  if {'--help', '-help', '-h'} & set(argv):
    print(sys.modules['__main__'].__doc__)
    print(flag_values.get_help())
    sys.exit(0)
  _check_config_file(argv)
  try:
    rest = flag_values(argv)[1:]
  # What flags and config files raise for values that cannot be used.
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    # A config file's own error is the last line of a text with its traceback.
    text = str(e).strip()
    _exit(EXIT_USAGE, text.splitlines()[-1] if 'Traceback' in text else text)
  if rest:
    _exit(EXIT_USAGE, f'unexpected arguments: {" ".join(rest)}')
  # Libraries may ask whether the global flags, which are not used here, have
  # been parsed.
  flags.FLAGS.mark_as_parsed()


def _check_config_file(argv):
  for argument in argv:
    name, _, value = argument.partition('=')
    path = value.partition(':')[0]
    if name.lstrip('-') == 'config' and not pathlib.Path(path).is_file():
      _exit(EXIT_USAGE, f'{argument}: there is no file {path!r}')


def _show_log():
  """Our own log lines from INFO up, those of the libraries from WARNING up."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.getLogger().setLevel(logging.WARNING)
  handler = _AboveProgressBar()
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  logger = logging.getLogger('sinkformer_jax')
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  logger.propagate = False


class _AboveProgressBar(logging.Handler):
  """Writes log lines so that they do not break a progress bar."""

  def emit(self, record: logging.LogRecord) -> None:
    tqdm.tqdm.write(self.format(record), file=sys.stderr)


def _exit(code, message):
  print(f'error: {" ".join(str(message).split())}', file=sys.stderr)
  sys.exit(code)
