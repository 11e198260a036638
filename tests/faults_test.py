"""The table of known faults: complete, and its tests are there."""

import ast
import functools
import re

import pytest

from tests.conftest import ROOT

ROWS = re.findall(
  r'^\| ([A-Z]\d\d) \| ([^|]+) \| ([^|]+) \|$',
  (ROOT / 'tests' / 'README.md').read_text(),
  re.MULTILINE,
)
# By the letters of their kinds: Sinkhorn, JAX, rank, checkpoints, data,
# launchers, several machines.
FAULTS = {
  *('S01', 'S03', 'S04', 'S05', 'S06', 'S08', 'S09', 'S11', 'S12', 'S13'),
  *(
    'J02',
    'J04',
    'J05',
    'J06',
    'J07',
    'J08',
    'R01',
    'R02',
    'R04',
    'C01',
    'C02',
  ),
  *(
    'C03',
    'C04',
    'C06',
    'C07',
    'C09',
    'C10',
    'C11',
    'D01',
    'D03',
    'D04',
    'D06',
  ),
  *('D07', 'L01', 'L02', 'L03', 'M01'),
}


@functools.cache
def find_tests(path):
  """``{name: the comment above it}`` of the tests in a file."""
  text = (ROOT / 'tests' / path).read_text()
  lines = text.splitlines()
  found = {}
  for node in ast.parse(text).body:
    if isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
      first = min(node.lineno, *(x.lineno for x in node.decorator_list), 10**9)
      above = []
      while lines[first - 2].startswith('#'):
        first -= 1
        above.append(lines[first - 1])
      found[node.name] = '\n'.join(above)
  return found


def test_every_fault_has_one_row():
  assert len(FAULTS) == 37
  assert len(ROWS) == len(FAULTS)
  assert {fault for fault, _, _ in ROWS} == FAULTS


@pytest.mark.parametrize(
  ('fault', 'held'), [(fault, held) for fault, _, held in ROWS]
)
def test_tests_of_a_fault_are_there_and_name_it(fault, held):
  named = re.findall(r'`([\w/]+_test\.py)::(\w+)`', held)
  assert named or held.startswith('does not apply: ')
  for path, name in named:
    found = find_tests(path)
    assert name in found, f'{path} has no {name}'
    assert fault in found[name], f'{path}::{name} does not name {fault}'
