"""The Python examples of the README run as they are."""

import re

import pytest

from tests.conftest import ROOT
from tests.launch import launch_test

EXAMPLES = re.findall(
  r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL
)


@pytest.mark.parametrize('number', range(len(EXAMPLES)))
def test_example(number, tmp_path):
  launch_test.run_code(EXAMPLES[number], cwd=tmp_path)


def test_there_are_examples():
  assert len(EXAMPLES) == 2
