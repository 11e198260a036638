"""Metrics of a run: `metrics.jsonl`, TensorBoard, and progress for people."""

from collections.abc import Mapping
import json
import logging
import math
import pathlib
import sys
import time
from typing import Any

import tensorboardX
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2
import tqdm

from sinkformer_jax import errors
from sinkformer_jax.training import hosts
from sinkformer_jax.training import workdir as workdir_lib

logger = logging.getLogger(__name__)


class MetricWriter:
  """Writes one JSON object a logged step, and the numbers to TensorBoard.

  A context manager. Lines of steps beyond `last_step`, which an interrupted
  start has left behind and this one will write again, are dropped. Only the
  first of several processes reads and writes.
  """

  def __init__(self, workdir: pathlib.Path, last_step: int):
    self.lines = []
    self._writes = hosts.is_first()
    if not self._writes:
      return
    self._path = workdir / 'metrics.jsonl'
    self.lines = [x for x in read_metrics(workdir) if x['step'] <= last_step]
    workdir_lib.write_text(self._path, ''.join(map(_to_line, self.lines)))
    self._folder = workdir / 'tensorboard'
    with workdir_lib.writing(self._path):
      self._file = self._path.open('a')
    self._events, self._first_step = None, last_step + 1

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    if not self._writes:
      return
    with workdir_lib.writing(self._path):
      self._file.close()
    if self._events:
      with workdir_lib.writing(self._folder):
        self._events.close()

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes numbers, or lists of numbers (one a layer), of a step."""
    if not self._writes:
      return
    line = {'step': step, **metrics}
    self.lines.append(line)
    with workdir_lib.writing(self._path):
      self._file.write(_to_line(line))
      self._file.flush()
    with workdir_lib.writing(self._folder):
      if not self._events:
        self._open_events()
      for name, value in metrics.items():
        if not isinstance(value, list):
          self._write_event(
            step, summary=tensorboardX.summary.scalar(name, value)
          )
      self._events.flush()

  def _open_events(self):
    # As late as this, so that starts that are stopped early leave no file.
    self._folder.mkdir(exist_ok=True)
    # tensorboardX's SummaryWriter would wait for ever for its thread once a
    # write has failed.
    self._events = event_file_writer.EventsWriter(str(self._folder / 'events'))
    purge = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._write_event(self._first_step, session_log=purge)

  def validation(self, step: int) -> dict[str, Any] | None:
    """The validation that has been written for a step."""
    for line in self.lines:
      if line['step'] == step and 'validation/loss' in line:
        return {
          name.removeprefix('validation/'): value
          for name, value in line.items()
          if name != 'step'
        }
    return None

  def _write_event(self, step, **content):
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    self._events.write_event(event)


def _to_line(metrics):
  return json.dumps(metrics, allow_nan=False) + '\n'


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl`; one cut off by a kill is left out.

  Raises:
    errors.RunError: if the file cannot be read.
  """
  path = workdir / 'metrics.jsonl'
  try:
    text = path.read_text('utf-8', errors='replace') if path.exists() else ''
  except OSError as error:
    raise errors.RunError(f'{path} cannot be read: {error.strerror}') from error
  lines = []
  for number, line in enumerate(text.splitlines(), start=1):
    try:
      metrics = json.loads(line)
    except (ValueError, RecursionError):
      metrics = None
    if _is_line(metrics):
      lines.append(metrics)
    else:
      logger.warning('%s: dropped line %d, which is damaged', path, number)
  return lines


def _is_line(metrics):
  """Whether these are numbers, and lists of numbers, of a step."""
  if not isinstance(metrics, dict) or not isinstance(metrics.get('step'), int):
    return False
  for value in metrics.values():
    for x in value if isinstance(value, list) else [value]:
      if not isinstance(x, int) and not (
        isinstance(x, float) and math.isfinite(x)
      ):
        return False
  return True


class Progress:
  """A bar with rate and time left on a terminal, plain lines elsewhere."""

  def __init__(self, first_step: int, total_steps: int, label: str = ''):
    self._first, self._total, self._label = first_step, total_steps, label
    self._start = None
    self._bar = tqdm.tqdm(
      total=total_steps,
      initial=first_step,
      unit='step',
      desc=label,
      disable=not sys.stderr.isatty() or not hosts.is_first(),
      dynamic_ncols=True,
    )

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._bar.close()

  def update(self, step: int, metrics: Mapping[str, float]) -> None:
    """Says that `step` steps are done; `metrics` are shown if there are any."""
    if self._start is None:
      # The first step includes compilation: rates are counted from here.
      self._start, self._first = time.monotonic(), step
    self._bar.update(step - self._bar.n)
    if not metrics:
      return
    shown = {name: f'{value:.4g}' for name, value in metrics.items()}
    if self._bar.disable:
      words = ' '.join(f'{name} {value}' for name, value in shown.items())
      left = self._left(step)
      logger.info(
        '%sstep %d/%d  %s%s', self._label, step, self._total, words, left
      )
    else:
      # There is no room on a line for more.
      self._bar.set_postfix({k: shown[k] for k in ('loss', 'accuracy')})

  def _left(self, step):
    done = step - self._first
    if not done:
      return ''
    seconds = (time.monotonic() - self._start) / done
    left = tqdm.tqdm.format_interval((self._total - step) * seconds)
    return f'  {seconds:.3g} s/step, {left} left'
