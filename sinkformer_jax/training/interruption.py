"""SIGTERM and Ctrl-C: finish the step, save, and leave, all processes alike."""

import logging
import signal
import threading

from sinkformer_jax.training import hosts

logger = logging.getLogger(__name__)


class StopSignal:
  """While entered, signals ask for a stop; a second Ctrl-C kills.

  Outside of the main thread, where Python allows no handlers, none are seen.

  Attributes:
    requested: what `check` said last.
  """

  def __init__(self):
    self.requested = False
    self._received = False
    self._on_any = False
    self._previous = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception):
    for number, handler in self._previous.items():
      # None if it was not Python that had put it there.
      signal.signal(number, signal.SIG_DFL if handler is None else handler)

  def check(self) -> bool:
    """Whether to stop. To be asked before each step and evaluated batch.

    Several processes all ask, and get the same answer: whether one of them had
    a signal when they asked before. So old an answer is there already, and no
    device waits. (`multihost_utils.reached_preemption_sync_point` would not do:
    it misses what comes before the first step of a resumed run.)
    """
    if not hosts.are_several():
      self.requested = self._received
    elif not self.requested:
      self.requested = bool(self._on_any)
      self._on_any = hosts.on_any(self._received)
    return self.requested

  def _handle(self, number, frame):
    del frame
    self._received = True
    logger.warning(
      '%s: stopping after this step, with a checkpoint',
      signal.Signals(number).name,
    )
    if number == signal.SIGINT:
      signal.signal(signal.SIGINT, signal.default_int_handler)
