"""What processes of a run agree on, with two of them."""

import pathlib
import sys
import time

import jax
import numpy as np
import pytest

from sinkformer_jax import errors
from sinkformer_jax.training import hosts
from sinkformer_jax.training import sharding
from tests.launch import processes


def test_with_one_process_nothing_happens():
  assert hosts.is_first()
  assert hosts.from_first(3) == 3
  hosts.check_same({'a': 1})
  with hosts.first_then_others():
    pass
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='its own'),
    hosts.lost_peers_are_named(),
  ):
    raise jax.errors.JaxRuntimeError('its own')


def test_two_processes(tmp_path):
  with processes.pair(
    tmp_path, processes.python(__name__, f'{tmp_path}'), num_devices=2
  ) as pair:
    for process in pair:
      assert process.end() == 0, process.stderr
    assert all(x.stdout.count('passed') == 5 for x in pair)


# The rest is what the two processes do.


def agree_on_what_the_first_says(index, folder):
  del folder
  assert hosts.is_first() == (index == 0)
  assert hosts.from_first(10 + index) == 10
  assert not hosts.on_any(False)
  assert hosts.on_any(index == 1)


def take_turns(index, folder):
  with hosts.first_then_others():
    if index == 0:
      time.sleep(0.5)
      (folder / 'prepared').touch()
    assert (folder / 'prepared').exists()


def fail_together(index, folder):
  del folder

  def fail(where):
    with hosts.first_then_others():
      if index in where:
        raise errors.RunError('full')

  with pytest.raises(
    errors.UserError, match='full' if index == 0 else 'its log says why'
  ):
    fail([0])
  # What fails on another is known to that one alone.
  if index == 0:
    fail([1])
  else:
    with pytest.raises(errors.UserError, match='full'):
      fail([1])


def name_what_differs(index, folder):
  del folder
  hosts.check_same({'a': 1, 'b': 'x'})
  with pytest.raises(errors.RunError, match=f"here b='x{index}'. Give"):
    hosts.check_same({'a': 1, 'b': f'x{index}', 'c': None})


def share_a_batch(index, folder):
  del folder
  # In the order of devices, and in rings as on TPUs.
  for order in ([0, 1, 2, 3], [0, 2, 3, 1]):
    mesh = jax.sharding.Mesh(np.array(jax.devices())[order], ('data',))
    rows = sharding.own_rows(mesh, 8)
    assert len(rows) == 4
    if order[1] == 1:
      np.testing.assert_array_equal(rows, np.arange(4) + 4 * index)
    batch = sharding.put_batch(mesh, 8, {'x': 10 * rows})
    whole = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))(
      batch['x']
    )
    np.testing.assert_array_equal(whole, 10 * np.arange(8))


def main():
  from absl import flags

  from launch import distributed

  flag_values = flags.FlagValues()
  distributed.define_flags(flag_values)
  folder = pathlib.Path(flag_values(sys.argv)[1])
  distributed.connect(flag_values)
  for check in (
    agree_on_what_the_first_says,
    take_turns,
    fail_together,
    name_what_differs,
    share_a_batch,
  ):
    check(jax.process_index(), folder)
    print(check.__name__, 'passed', flush=True)


if __name__ == '__main__':
  main()
