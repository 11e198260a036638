"""Set-up shared by all tests."""

import os
import pathlib
import socket
import tempfile

# Compiled functions are kept between tests and the processes they start.
_CACHE = tempfile.TemporaryDirectory(prefix='sinkformer_jax_tests_')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['SINKFORMER_CACHE_DIR'] = f'{_CACHE.name}/sinkformer_jax'
for name in ('SINKFORMER_DATA_DIR', 'TFDS_DATA_DIR'):
  os.environ.pop(name, None)

from absl import flags  # noqa: E402
import pytest  # noqa: E402

from configs import mnist_sinkhorn  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent

flags.FLAGS.mark_as_parsed()


@pytest.fixture
def no_network(monkeypatch):
  """Lets every connection fail."""

  def refuse(*args, **kwargs):
    raise AssertionError('the network was used')

  monkeypatch.setattr(socket.socket, 'connect', refuse)


@pytest.fixture
def config():
  """The tiny preset: 2 layers, width 16, 20 steps on the embedded sample."""
  return mnist_sinkhorn.get_config('tiny')
