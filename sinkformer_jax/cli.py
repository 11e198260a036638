"""What all launchers share: flags, one-line errors, log lines, exit codes."""

from collections.abc import Callable
from collections.abc import Sequence
import hashlib
import logging
import os
import pathlib
import platform
import sys
import time
import traceback
import warnings

from absl import flags
from absl import logging as absl_logging
import tqdm

from sinkformer_jax import errors
from sinkformer_jax import paths

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # Stopped by a signal; the same command goes on.
EXIT_INTERRUPTED = 130
# Longer messages are cut: values may be of any length.
_MOST_LETTERS = 2_000


def run(
  main: Callable[[], int | None],
  flag_values: flags.FlagValues,
  argv: Sequence[str] | None = None,
) -> None:
  """Parses flags, runs `main`, and exits with what it returns.

  Exit codes: 0 done, 75 stopped by a signal and to be resumed, 1 an error (one
  line if the user can mend it, a traceback if it is a fault of the program), 2
  wrong flags, 130 killed by Ctrl-C.

  Args:
    main: the program; returns an exit code, None for 0.
    flag_values: its flags. Every launcher has its own set, so that several can
      be imported together.
    argv: the command line, if it is not `sys.argv`.
  """
  try:
    _parse(sys.argv if argv is None else argv, flag_values)
    _show_log()
    _keep_compiled_programs()
    code = main() or EXIT_DONE
  except errors.UserError as error:
    print_error(error)
    code = EXIT_ERROR
  except OSError as error:
    # Of files that nothing more specific is known of: a full disk, a directory
    # that may not be read, a reader of the output that is gone.
    print_error(error)
    code = EXIT_ERROR
  except KeyboardInterrupt:
    print_error('interrupted')
    code = EXIT_INTERRUPTED
  except Exception as error:
    if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
      print_error(
        f'out of memory: {error}. Smaller batches need less, and so do fewer'
        ' layers and iterations.'
      )
    else:
      traceback.print_exc()
    code = EXIT_ERROR
  if code not in (EXIT_DONE, EXIT_STOPPED):
    _leave_other_processes(code)
  sys.exit(code)


def print_error(message: object) -> None:
  """Prints an error as one line."""
  text = ' '.join(str(message).split())
  if len(text) > _MOST_LETTERS:
    half = _MOST_LETTERS // 2
    text = f'{text[:half]} [...] {text[-half:]}'
  print(f'error: {text}', file=sys.stderr)


def _leave_other_processes(code):
  """Exits at once if this is one of several processes of a run.

  JAX would wait for the others to end as well; but they wait for this one, and
  end when it is gone.
  """
  jax = sys.modules.get('jax')
  if jax is None or not jax.distributed.is_initialized():
    return
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.process_index() == 0:
    # JAX aborts the others when it misses process 0. Those that know of an
    # error have a moment to print it.
    time.sleep(1)
  os._exit(code)


def _keep_compiled_programs():
  """Lets JAX, which is imported later, find what an earlier start compiled.

  Programs for a CPU are kept by its features: a home directory may be shared by
  machines of several kinds.
  """
  features = platform.processor()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.is_file():
    lines = cpuinfo.read_text(errors='replace').splitlines()
    features = next((x for x in lines if x.startswith('flags')), features)
  kind = hashlib.sha256(features.encode()).hexdigest()[:12]
  directory = paths.cache_dir() / f'compiled-{platform.machine()}-{kind}'
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(directory))


def output_path(value: str, name: str = '--output') -> pathlib.Path | None:
  """The file that a flag names, None if it is not given.

  Args:
    value: of the flag.
    name: of the flag.

  Raises:
    errors.UserError: if it exists, or its directory does not.
  """
  if not value:
    return None
  path = paths.resolve(value, name)
  if path.exists():
    raise errors.UserError(f'{path} exists; choose another name for {name}.')
  if not path.parent.is_dir():
    raise errors.UserError(
      f'{name}={value}: there is no directory {path.parent}.'
    )
  return path


def _parse(argv: Sequence[str], flag_values: flags.FlagValues) -> None:
  if {'--help', '-help', '-h'} & set(argv):
    print(sys.modules['__main__'].__doc__)
    print(flag_values.get_help())
    sys.exit(0)
  try:
    rest = flag_values(argv)[1:]
  except (Exception, SystemExit) as error:
    # Flags raise many kinds.
    _exit(EXIT_USAGE, error)
  if rest:
    _exit(EXIT_USAGE, f'unexpected arguments: {" ".join(rest)}')
  # Libraries may ask whether the global flags, which are not used here, have
  # been parsed.
  flags.FLAGS.mark_as_parsed()


def _show_log():
  """Our own log lines from INFO up, those of the libraries from WARNING up."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  _silence_tasks()
  logging.getLogger().setLevel(logging.WARNING)
  handler = _AboveProgressBar()
  handler.setFormatter(logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  logger = logging.getLogger('sinkformer_jax')
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  logger.propagate = False


def _silence_tasks():
  """Drops what Orbax's tasks leave when a save or a restore has failed.

  The failure itself is told in one line.
  """
  warnings.filterwarnings(
    'ignore', 'coroutine .* was never awaited', RuntimeWarning
  )
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  absl_logging.get_absl_logger().addFilter(_without_traceback)
  show, show_unraisable = sys.excepthook, sys.unraisablehook

  def is_left_over(error):
    return str(error) == 'Event loop is closed'

  sys.excepthook = lambda kind, error, trace: (
    is_left_over(error) or show(kind, error, trace)
  )
  sys.unraisablehook = lambda about: (
    is_left_over(about.exc_value) or show_unraisable(about)
  )


def _without_traceback(record):
  record.exc_info = record.exc_text = None
  return True


class _AboveProgressBar(logging.Handler):
  """Writes log lines so that they do not break a progress bar."""

  def emit(self, record: logging.LogRecord) -> None:
    try:
      tqdm.tqdm.write(self.format(record), file=sys.stderr)
    except Exception:
      # A reader of the log that is gone must not end a training.
      self.handleError(record)


def _exit(code, message):
  print_error(message)
  sys.exit(code)
