"""Figures need no display."""

import os
import subprocess
import sys

from tests.conftest import ROOT


# L03
def test_no_display_is_needed(tmp_path):
  script = (
    'import pathlib, sys\n'
    'from analysis.common import figures\n'
    'draw = lambda figure: figure.subplots().plot([1, 2])\n'
    'figures.save(pathlib.Path(sys.argv[1]) / "plot", draw, (3, 2))\n'
    "assert 'matplotlib.pyplot' not in sys.modules\n"
  )
  environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'MPLBACKEND': 'TkAgg'}
  environment.pop('DISPLAY', None)
  done = subprocess.run(
    [sys.executable, '-c', script, str(tmp_path)],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  names = {x.name: x.stat().st_size for x in tmp_path.iterdir()}
  assert names.keys() == {'plot.png', 'plot.svg'}
  assert min(names.values()) > 1_000
