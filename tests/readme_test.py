"""The Python examples of the README run as they are."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLES = re.findall(
  r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL
)


@pytest.mark.parametrize('number', range(len(EXAMPLES)))
def test_example(number, tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', EXAMPLES[number]],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr


def test_there_are_examples():
  assert len(EXAMPLES) == 2
