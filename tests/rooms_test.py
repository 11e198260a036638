"""Who imports whom: arrows between the rooms point down, and none in circles.

Imports within functions count too.
"""

import ast
import graphlib

import pytest

from tests.conftest import ROOT

# What the files of a folder may import of other folders.
MAY_IMPORT = {
  'sinkformer_jax': (),
  'configs': (),
  'launch': ('sinkformer_jax', 'configs'),
  'analysis': ('sinkformer_jax', 'configs'),
  'tests': ('sinkformer_jax', 'configs', 'launch', 'analysis'),
}
# A file, and the folder that it alone may import.
EXCEPTIONS = {('launch.reproduce', 'analysis.study')}


def module_name(path, root):
  parts = path.relative_to(root).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def read_modules(root):
  """``{module: its syntax tree}`` of all Python files in the rooms."""
  return {
    module_name(path, root): ast.parse(path.read_text())
    for room in MAY_IMPORT
    for path in sorted((root / room).rglob('*.py'))
  }


def named(tree):
  """Full names of what a file imports."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (x.name for x in node.names)
    elif isinstance(node, ast.ImportFrom):
      # Relative imports are not used here.
      assert node.level == 0
      for alias in node.names:
        yield f'{node.module}.{alias.name}'


def imports(modules):
  """``{module: modules of ours that it imports}``."""
  graph = {}
  for module, tree in modules.items():
    found = set()
    for name in named(tree):
      # The name of a function or class is that of its file and one more.
      for candidate in (name, name.rpartition('.')[0]):
        if candidate in modules:
          found.add(candidate)
          break
    graph[module] = found - {module}
  return graph


def is_within(module, package):
  return f'{module}.'.startswith(f'{package}.')


def wrong_arrows(graph):
  """Pairs of modules of which the first must not import the second."""
  wrong = []
  for module, others in graph.items():
    room = module.partition('.')[0]
    for other in sorted(others):
      target = other.partition('.')[0]
      excepted = any(
        module == file and is_within(other, package)
        for file, package in EXCEPTIONS
      )
      if target not in (room, *MAY_IMPORT[room]) and not excepted:
        wrong.append((module, other))
  return wrong


def circle(graph):
  """Modules that import each other in a circle; none if there is none."""
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return error.args[1]
  return []


@pytest.fixture(scope='module')
def graph():
  return imports(read_modules(ROOT))


def test_all_files_are_read(graph):
  read = {x.partition('.')[0] for x in graph}
  assert read == set(MAY_IMPORT)
  # No folder with Python files stays outside of the rules.
  folders = {x.parent.name for x in ROOT.glob('[!.]*/__init__.py')}
  assert folders <= set(MAY_IMPORT)
  folder = 'sinkformer_jax'
  assert len(list((ROOT / folder).rglob('*.py'))) == sum(
    is_within(x, folder) for x in graph
  )


def test_arrows_point_down(graph):
  assert not wrong_arrows(graph)


def test_no_circles(graph):
  assert not circle(graph)


def test_exceptions_are_needed(graph):
  for file, package in EXCEPTIONS:
    assert any(is_within(x, package) for x in graph[file])


FILES = {
  'sinkformer_jax/__init__.py': '',
  'sinkformer_jax/low.py': 'def f():\n  from launch import high\n',
  'sinkformer_jax/a.py': 'from sinkformer_jax.b import something\n',
  'sinkformer_jax/b.py': 'def f():\n  import sinkformer_jax.a\n',
  'launch/high.py': 'from analysis import study\nimport configs.one\n',
  'launch/reproduce.py': 'from analysis.study import plan\n',
  'analysis/study/__init__.py': '',
  'analysis/study/plan.py': 'from sinkformer_jax import a\n',
  'configs/one.py': 'import ml_collections\n',
}


def test_wrong_imports_are_found(tmp_path):
  for name, content in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
  graph = imports(read_modules(tmp_path))
  assert wrong_arrows(graph) == [
    ('sinkformer_jax.low', 'launch.high'),
    ('launch.high', 'analysis.study'),
  ]
  assert set(circle(graph)) == {'sinkformer_jax.a', 'sinkformer_jax.b'}
  del graph['sinkformer_jax.b']
  assert not circle(graph)
