"""Checkpoints that are damaged, and which of them are kept.

Faults C02, C03 and C04 are held by the tests of the loop and the launchers too.
"""

import gc
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sinkformer_jax import errors
from sinkformer_jax.training import checkpoints
from sinkformer_jax.training import sharding

# Orbax reads all arrays at once. When one cannot be read it leaves the tasks of
# the others behind, with a closed event loop, and Python warns of them. A
# launcher silences them too (`cli._silence_tasks`).
pytestmark = [
  pytest.mark.filterwarnings(f'ignore:{message}:{kind}')
  for message, kind in (
    ('coroutine .* was never awaited', 'RuntimeWarning'),
    (
      '(?s)Exception ignored in.*(_read_array_index|Event loop is closed)',
      'pytest.PytestUnraisableExceptionWarning',
    ),
  )
]


@pytest.fixture(autouse=True, scope='module')
def collect_what_is_left():
  """Here, and not in the middle of a test of another module."""
  yield
  gc.collect()


def make_state(seed):
  rng = np.random.default_rng(seed)
  return {
    'params': {'kernel': jnp.asarray(rng.normal(size=(40, 30)), jnp.float32)},
    'step': jnp.asarray(seed),
  }


def abstract():
  everywhere = sharding.replicated(sharding.create_mesh())
  return checkpoints.abstract(make_state(0), everywhere)


@pytest.fixture
def workdir(tmp_path):
  """A directory with checkpoints 0, 10 and 20."""
  with checkpoints.Checkpoints(tmp_path / 'run', writable=True) as saved:
    for step in (0, 10, 20):
      saved.save(step, make_state(step))
  return tmp_path / 'run'


def files(checkpoint):
  return sorted(x for x in checkpoint.rglob('*') if x.is_file())


def restore(workdir, step=None):
  with checkpoints.Checkpoints(workdir) as saved:
    return saved.restore(abstract(), step)


def assert_equal(state, seed):
  jax.tree.map(np.testing.assert_array_equal, state, make_state(seed))


def damage(path: pathlib.Path, how: str, rng) -> None:
  content = bytearray(path.read_bytes())
  if how == 'missing':
    path.unlink()
    return
  if how == 'half':
    content = content[: len(content) // 2]
  elif how == 'zeros':
    content = bytes(len(content))
  elif how == 'end':
    # What a power cut leaves of a file whose length was written first.
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
  else:
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
  path.write_bytes(content)


# C03: half-written and damaged checkpoints.
def test_damage_is_seen_or_does_no_harm(workdir, tmp_path):
  # Orbax takes most of the flipped bits in its data files for good ones.
  rng = np.random.default_rng(0)
  newest = workdir / 'checkpoints' / '20'
  names = [x.relative_to(newest) for x in files(newest)]
  data = [x for x in names if x.parent.name == 'd']
  assert len(data) >= 2
  cases = [(x, how) for x in names for how in ('missing', 'half', 'zeros')]
  cases += [(x, 'end') for x in data]
  cases += [(x, 'flip') for x in [*names, *data] for _ in range(4)]
  refused = 0
  for number, (name, how) in enumerate(cases):
    copy = tmp_path / str(number)
    shutil.copytree(newest, copy / 'checkpoints' / '20')
    damage(copy / 'checkpoints' / '20' / name, how, rng)
    try:
      state = restore(copy)
    except errors.RunError:
      refused += 1
    else:
      assert_equal(state, 20)
  assert refused > len(cases) / 2


def flip_data(checkpoint):
  """Flips a bit in the middle of the file that holds the arrays."""
  path = max(files(checkpoint), key=lambda x: x.stat().st_size)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def contents(folder):
  return {x.relative_to(folder): x.read_bytes() for x in files(folder)}


@pytest.mark.parametrize('number_damaged', [1, 2])
def test_goes_back_to_the_newest_that_is_whole(workdir, caplog, number_damaged):
  folder = workdir / 'checkpoints'
  damaged = [20, 10][:number_damaged]
  for step in damaged:
    flip_data(folder / str(step))
  before = {step: contents(folder / str(step)) for step in (0, 10, 20)}
  with checkpoints.Checkpoints(workdir, keep=1, writable=True) as saved:
    state = saved.restore_newest_readable(abstract())
    left = [x for x in (0, 10) if x not in damaged]
    assert_equal(state, left[-1])
    assert saved.steps == left
    # The step that was damaged can be saved again.
    saved.save(20, make_state(20))
    assert saved.steps == [0, 20]
  assert_equal(restore(workdir), 20)
  for step in damaged:
    assert f'{folder / str(step)} is damaged (ValueError: ch' in caplog.text
    aside = workdir / 'damaged_checkpoints' / str(step)
    assert contents(aside) == before[step]
  assert f'going back to step {left[-1]}' in caplog.text
  # A second one of the same step does not take the place of the first.
  flip_data(folder / '20')
  with checkpoints.Checkpoints(workdir, writable=True) as saved:
    assert_equal(saved.restore_newest_readable(abstract()), 0)
  assert contents(workdir / 'damaged_checkpoints' / '20') == before[20]
  assert (workdir / 'damaged_checkpoints' / '20.1').is_dir()


def test_none_can_be_read(workdir):
  for step in (0, 10, 20):
    flip_data(workdir / 'checkpoints' / str(step))
  before = contents(workdir)
  with (
    checkpoints.Checkpoints(workdir, writable=True) as saved,
    pytest.raises(errors.RunError, match='no checkpoint in .* can be read'),
  ):
    saved.restore_newest_readable(abstract())
  assert contents(workdir) == before


def test_readers_name_the_damaged_one_and_touch_nothing(workdir):
  flip_data(workdir / 'checkpoints' / '20')
  before = contents(workdir)
  with pytest.raises(errors.RunError, match=r'others are \[0, 10\].*--step'):
    restore(workdir)
  assert_equal(restore(workdir, 10), 10)
  # A part of it can be whole.
  with checkpoints.Checkpoints(workdir) as saved:
    part = saved.restore({'step': abstract()['step']})
  assert part == {'step': 20}
  assert contents(workdir) == before


def test_checkpoints_without_checksums_can_be_read(workdir):
  # Those of earlier versions.
  path = workdir / 'checkpoints' / '20' / '_CHECKPOINT_METADATA'
  text = path.read_text()
  start = text.index('"custom_metadata"')
  path.write_text(text[:start] + '"custom_metadata": {}}')
  assert_equal(restore(workdir), 20)


def other(asked, name, shape, dtype):
  """`abstract` with another kernel or step."""
  sharding = jax.tree.leaves(asked)[0].sharding
  leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  return {**asked, 'params': {name: leaf}}


# C11
@pytest.mark.parametrize('dtype', [jnp.bfloat16, np.float64])
def test_another_type_is_converted_and_said(tmp_path, caplog, dtype):
  # Of a training under JAX_ENABLE_X64, or of half precision.
  kernel = np.asarray(make_state(3)['params']['kernel'], dtype)
  state = {'params': {'kernel': kernel}, 'step': jnp.asarray(3)}
  with checkpoints.Checkpoints(tmp_path, writable=True) as saved:
    saved.save(3, state)
    for restored in (
      saved.restore(abstract()),
      saved.restore_newest_readable(abstract()),
    ):
      actual = restored['params']['kernel']
      assert actual.dtype == jnp.float32
      np.testing.assert_array_equal(actual, kernel.astype(np.float32))
      assert actual.sharding == abstract()['step'].sharding
  assert f'params/kernel from {np.dtype(dtype)} to float32' in caplog.text
  assert 'damage' not in caplog.text
  # What is damaged still is.
  flip_data(tmp_path / 'checkpoints' / '3')
  with pytest.raises(errors.RunError, match='checksums differ'):
    restore(tmp_path)


# C11
@pytest.mark.parametrize(
  ('name', 'shape', 'words'),
  [
    ('kernel', (30, 40), r'shape \(40, 30\), and \(30, 40\) is asked for'),
    ('bias', (30,), 'has no params/bias'),
  ],
)
def test_another_model_is_not_called_damage(workdir, name, shape, words):
  before = contents(workdir)
  asked = other(abstract(), name, shape, jnp.float32)
  with checkpoints.Checkpoints(workdir, writable=True) as saved:
    for fn in (saved.restore, saved.restore_newest_readable):
      with pytest.raises(errors.RunError, match=f'{words}.* not damaged'):
        fn(asked)
  assert contents(workdir) == before


def test_newest_and_best_are_kept(tmp_path):
  with checkpoints.Checkpoints(tmp_path, 1, (3,), writable=True) as saved:
    for step in range(9):
      if step in (2, 6):
        saved.best = step
      saved.save(step, make_state(step))
      expected = {0, 3 if step >= 3 else 0, saved.best or 0, step}
      assert set(saved.steps) == expected
  # As it is named again by a later start.
  with checkpoints.Checkpoints(tmp_path, 1, (3,), writable=True) as saved:
    saved.best = 6
    saved.save(9, make_state(9))
    assert saved.steps == [0, 3, 6, 9]


def test_reading_changes_nothing(workdir):
  stale = workdir / 'checkpoints' / '30.orbax-checkpoint-tmp'
  stale.mkdir()
  before = {x: x.stat().st_mtime_ns for x in workdir.rglob('*')}
  restore(workdir)
  assert {x: x.stat().st_mtime_ns for x in workdir.rglob('*')} == before
