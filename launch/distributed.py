"""Flags and start of a run on several hosts, by `jax.distributed`."""

import logging
import os
import threading

from absl import flags

from sinkformer_jax import cli

# Among those whose lines are shown.
logger = logging.getLogger('sinkformer_jax.distributed')


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines `--distributed` and what goes with it."""
  flags.DEFINE_boolean(
    'distributed',
    False,
    'One of several processes of a run; start the same command on every host.'
    ' A TPU pod or Slurm says how many there are; elsewhere give'
    ' --coordinator_address, --num_processes and --process_id.',
    flag_values=flag_values,
  )
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'HOST:PORT of process 0; the port has to be free there.',
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'num_processes',
    None,
    'How many processes there are.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'process_id',
    None,
    'Which of them this is, from 0.',
    lower_bound=0,
    flag_values=flag_values,
  )
  flags.DEFINE_integer(
    'peer_timeout',
    120,
    'Seconds after which the run ends if a process does not come, or does not'
    ' answer any more.',
    lower_bound=1,
    flag_values=flag_values,
  )
  flags.register_multi_flags_validator(
    ('distributed', 'coordinator_address', 'num_processes', 'process_id'),
    _go_together,
    '--coordinator_address=HOST:PORT, --num_processes=N and --process_id=K,'
    ' below N, need each other and --distributed.',
    flag_values,
  )


def _go_together(values):
  address, count, index = (
    values[x] for x in ('coordinator_address', 'num_processes', 'process_id')
  )
  if (address, count, index) == (None, None, None):
    return True
  if not values['distributed'] or None in (address, count, index):
    return False
  _, colon, port = address.rpartition(':')
  return colon and port.isdigit() and index < count


def connect(flag_values: flags.FlagValues) -> None:
  """Waits until all processes of the run are there, if it is distributed.

  To be called before JAX is used. If one of them does not come, this one ends
  here with exit code 1: what JAX does then (it aborts) cannot be caught.

  Raises:
    errors.UserError: if it is not known which processes there are.
  """
  if not flag_values.distributed:
    return
  import jax

  from sinkformer_jax import errors

  timeout = flag_values.peer_timeout
  timer = threading.Timer(timeout, _give_up, [timeout])
  timer.daemon = True
  timer.start()
  # JAX would take SIGTERM for itself; a training handles it, and Ctrl-C.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      flag_values.coordinator_address,
      flag_values.num_processes,
      flag_values.process_id,
      initialization_timeout=timeout + 60,  # The timer comes first.
      heartbeat_timeout_seconds=timeout,
    )
  except (ValueError, RuntimeError) as error:
    raise errors.UserError(
      f'--distributed: the processes of this run are not known ({error}). Give'
      ' --coordinator_address=HOST:PORT, --num_processes=N and --process_id=K.'
    ) from error
  # Devices are exchanged now, while everybody is here.
  device_count = jax.device_count()
  timer.cancel()
  logger.info(
    'This is process %d of %s, with %d of %d devices. If one is lost, all end'
    ' within %d s.',
    jax.process_index(),
    _all_processes(),
    jax.local_device_count(),
    device_count,
    timeout,
  )
  if jax.process_index() > 0:
    # What concerns all is said by process 0.
    logging.getLogger('sinkformer_jax').setLevel(logging.WARNING)


def _all_processes():
  # What has been found out about a cluster is shown nowhere else.
  from jax._src import distributed

  state = distributed.global_state
  return f'{state.num_processes} at {state.coordinator_address}'


def _give_up(timeout):
  cli.print_error(
    f'waited {timeout} s (--peer_timeout) for all processes of'
    f' {_all_processes()}. Are all of them started, with the same address and'
    ' number, and can they reach that port?'
  )
  os._exit(cli.EXIT_ERROR)
