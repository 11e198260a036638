"""What the project is made of, and that nothing from others can run code."""

import ast
import contextlib
import importlib.metadata
import json
import pickle
import re
import sys

import numpy as np
import pytest

from sinkformer_jax import errors
from sinkformer_jax import rank
from sinkformer_jax import training
from tests.conftest import ROOT
from tests.training import loop_test

FOLDERS = ('sinkformer_jax', 'launch', 'analysis', 'configs')
SOURCES = [
  x for folder in FOLDERS for x in sorted((ROOT / folder).rglob('*.py'))
]
# Modules that run code which data brings along.
UNSAFE_MODULES = {
  *('pickle', 'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve', 'yaml'),
  *('runpy', 'xmlrpc', 'code', 'codeop'),
}
UNSAFE_CALLS = {'eval', 'exec', '__import__', 'system', 'popen'}
# Unpacking follows the paths that an archive gives; reading members does not.
UNPACKING = {'extract', 'extractall', 'unpack_archive'}


def imported(tree):
  """Names of modules that are imported anywhere in a file."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (x.name for x in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield node.module


def calls(tree):
  """Names of functions that are called, and their arguments by name."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      name = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
      given = {x.arg: getattr(x.value, 'value', None) for x in node.keywords}
      yield name, given


@pytest.mark.parametrize(
  'path', SOURCES, ids=lambda x: x.relative_to(ROOT).as_posix()
)
def test_source_runs_no_code_of_others(path):
  tree = ast.parse(path.read_text())
  assert not UNSAFE_MODULES & {x.partition('.')[0] for x in imported(tree)}
  for name, arguments in calls(tree):
    assert name not in UNSAFE_CALLS | UNPACKING, name
    assert not arguments.get('allow_pickle', False), name
    assert not arguments.get('shell', False), name


class Bomb:
  """Unpickled, it calls what it must not."""

  def __reduce__(self):
    return sys.modules['tests.supply_test'].explode, ()


def explode():
  raise AssertionError('code of others was run')


@pytest.fixture
def run(config, tmp_path, monkeypatch):
  """A run that was stopped before its first step."""
  loop_test.interrupt(monkeypatch, 1)
  training.train_seeds(config, {0: tmp_path / 'run'})
  return tmp_path / 'run'


def damageable(run):
  """Files of a run that are read, each of its own kind."""
  state = run / 'checkpoints' / '0' / 'state'
  largest = max(state.rglob('*'), key=lambda x: x.stat().st_size)
  names = ('config.json', 'provenance.json')
  return [*(run / x for x in names), state / '_METADATA', largest]


def test_runs_of_others_cannot_run_code(run):
  bomb = pickle.dumps(Bomb())
  with pytest.raises(AssertionError, match='was run'):
    pickle.loads(bomb)
  seen = []
  hook = seen.append
  watch(lambda event, args: hook(f'{event} {args}'))
  try:
    assert training.load_run(run).step == 0
    for path in damageable(run):
      good = path.read_bytes()
      path.write_bytes(bomb)
      with contextlib.suppress(errors.UserError):
        training.load_run(run)
      path.write_bytes(good)
    # Names of classes in a checkpoint are looked up, not imported.
    path = run / 'checkpoints' / '0' / '_CHECKPOINT_METADATA'
    metadata = json.loads(path.read_text())
    metadata['item_handlers'] = {'state': 'tests.supply_test.explode'}
    path.write_text(json.dumps(metadata))
    with contextlib.suppress(errors.UserError):
      training.load_run(run)
  finally:
    watch(None)
  assert not seen


_watchers = []


def watch(watcher):
  """Is told of unpickling and of processes; None ends it."""
  if not _watchers:
    _watchers.append(None)
    # A hook cannot be taken away again.
    sys.addaudithook(_hear)
  _watchers[0] = watcher


def _hear(event, args):
  watched = ('pickle.find_class', 'subprocess.Popen', 'os.system', 'os.exec')
  if _watchers[0] and event in watched:
    _watchers[0](event, args)


def test_the_watcher_hears(tmp_path):
  seen = []
  watch(lambda event, args: seen.append(event))
  try:
    with pytest.raises(AssertionError):
      pickle.loads(pickle.dumps(Bomb()))
  finally:
    watch(None)
  assert seen == ['pickle.find_class']


def test_captures_of_others_cannot_run_code(tmp_path):
  path = tmp_path / 'capture.npz'
  np.savez(path, about=np.array('{}'), attention=np.array([Bomb()]))
  with pytest.raises((errors.UserError, ValueError), match='pickle|object'):
    rank.load_capture(path)


def requirements(name):
  """``{package: version}`` of a requirements file."""
  text = (ROOT / name).read_text()
  pins = re.findall(r'^([\w.-]+)(?:\[\w+\])?==([^\s;\\]+)', text, re.MULTILINE)
  return {canonical(package): version for package, version in pins}


def canonical(package):
  return re.sub(r'[-_.]+', '-', package).lower()


# J07
def test_lock_holds_all_requirements():
  locked = requirements('requirements.lock')
  wanted = requirements('requirements.txt')
  assert wanted
  assert {k: locked.get(k) for k in wanted} == wanted


def test_lock_is_complete():
  # What is locked needs nothing that is not.
  locked = requirements('requirements.lock')
  for package, version in locked.items():
    try:
      about = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
      continue
    if about.version == version:
      for requirement in about.requires or ():
        name, _, marker = requirement.partition(';')
        if not marker.strip():
          name = re.match(r'[\w.-]+', name).group()
          assert canonical(name) in locked, f'{package} needs {name}'


def test_lock_pins_by_hash_and_names_no_host():
  text = (ROOT / 'requirements.lock').read_text()
  assert '://' not in text
  entries = re.split(r'^(?=[a-zA-Z0-9])', text, flags=re.MULTILINE)[1:]
  assert len(entries) == len(requirements('requirements.lock'))
  for entry in entries:
    assert re.search(r'--hash=sha256:[0-9a-f]{64}', entry), entry[:80]


# J07: nothing is imported that is not declared.
def test_imports_are_declared():
  owners = {
    # Those that need not be installed for the tests.
    'ott': ['ott-jax'],
    'tensorflow': ['tensorflow-cpu'],
    **importlib.metadata.packages_distributions(),
  }
  declared = {
    package
    for path in ROOT.glob('requirements*.txt')
    for package in requirements(path.name)
  }
  own = {x.name for x in ROOT.iterdir() if x.is_dir()}
  for path in [*SOURCES, *sorted((ROOT / 'tests').rglob('*.py'))]:
    for name in imported(ast.parse(path.read_text())):
      module = name.partition('.')[0]
      if module in sys.stdlib_module_names or module in own:
        continue
      packages = {canonical(x) for x in owners.get(module, [module])}
      assert packages & declared, f'{path.relative_to(ROOT)} imports {name}'


def licence(package):
  """What an installed package says of itself."""
  about = importlib.metadata.metadata(package)
  classified = [
    x.rpartition('::')[2].strip()
    for x in about.get_all('Classifier') or ()
    if x.startswith('License ::') and not x.endswith('OSI Approved')
  ]
  stated = about.get('License-Expression') or ' and '.join(classified)
  return stated or about['License'].splitlines()[0]


def test_licences_of_all_locked_packages_are_listed():
  table = (ROOT / 'LICENSES.md').read_text()
  rows = re.findall(r'^\| ([\w.-]+) \| ([^|]+) \| ([^|]+) \|$', table, re.M)
  (_, *rows) = rows
  listed = {name: version for name, version, _ in rows}
  assert listed == requirements('requirements.lock')
  checked = 0
  for name, version, text in rows:
    # Nothing asks for the source of what uses it.
    assert not re.search(r'\bA?GPL', text), name
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      if importlib.metadata.version(name) == version:
        assert text == licence(name), (
          f'| {name} | {version} | {licence(name)} |'
        )
        checked += 1
  assert checked > len(rows) / 2
