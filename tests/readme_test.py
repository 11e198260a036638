"""The Python examples of the README run as they are."""

import re

import pytest

from tests.conftest import ROOT
from tests.launch import launch_test

README = (ROOT / 'README.md').read_text()
# By the heading they stand under.
EXAMPLES = {
  section.partition('\n')[0]: code
  for section in re.split('^#+ ', README, flags=re.MULTILINE)
  for code in re.findall(r'```python\n(.*?)```', section, re.DOTALL)
}


def test_there_are_examples():
  assert set(EXAMPLES) == {
    'Your own normalizer',
    'Your own data set',
    'Your own measure',
    'What a model computes inside',
  }
  assert len(EXAMPLES) == README.count('```python')


@pytest.mark.parametrize(
  'heading',
  [
    # It trains twice.
    pytest.param(x, marks=pytest.mark.slow) if x == 'Your own measure' else x
    for x in EXAMPLES
  ],
)
def test_example(heading, tmp_path):
  launch_test.run_code(EXAMPLES[heading], cwd=tmp_path)
