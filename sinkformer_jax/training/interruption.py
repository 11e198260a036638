"""SIGTERM and Ctrl-C: finish the step, save, and leave."""

import logging
import signal
import threading

logger = logging.getLogger(__name__)


class StopSignal:
  """While entered, signals set `requested`; a second Ctrl-C kills.

  Outside of the main thread, where Python allows no handlers, it stays unset.
  """

  def __init__(self):
    self.requested = False
    self._previous = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number, frame):
    del frame
    self.requested = True
    logger.warning(
      '%s: stopping after this step, with a checkpoint',
      signal.Signals(number).name,
    )
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
