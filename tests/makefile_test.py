"""`make quickstart` with a stand-in for Python: what it prints is there."""

import re
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

# Does as `analysis.report` does: pages before the last are of a part of it.
PYTHON = """\
#!/bin/sh
echo "$@" >> calls
for argument; do
  case $argument in
  --output=*) output=${argument#--output=} ;;
  esac
done
[ -z "$output" ] && exit 0
[ -e "$output" ] && exit 1
mkdir -p "$output"
echo part > "$output/report.html"
[ -e interrupted ] && exit 1
echo whole > "$output/report.html"
echo "Report: $PWD/$output/report.html"
"""


@pytest.fixture
def folder(tmp_path):
  for name in ('Makefile', 'requirements.txt', 'requirements.lock'):
    shutil.copy(ROOT / name, tmp_path)
  python = tmp_path / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(PYTHON)
  python.chmod(0o755)
  (tmp_path / '.venv' / '.installed').touch()
  return tmp_path


def quickstart(folder):
  done = subprocess.run(
    ['make', 'quickstart'],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def reports(folder):
  return (folder / 'calls').read_text().count('analysis.report')


def test_the_printed_paths_of_the_report_are_there(folder):
  code, stdout = quickstart(folder)
  assert code == 0
  printed = re.findall(r'(?:Report: |Open )(\S+)', stdout)
  assert len(printed) == 2
  for path in printed:
    assert (folder / path).read_text() == 'whole\n'
  assert reports(folder) == 1
  # Again: nothing is measured twice.
  assert quickstart(folder)[0] == 0
  assert reports(folder) == 1


def test_a_report_that_was_interrupted_is_made_anew(folder):
  (folder / 'interrupted').touch()
  code, stdout = quickstart(folder)
  assert code != 0
  assert 'Open ' not in stdout
  (folder / 'interrupted').unlink()
  code, _ = quickstart(folder)
  assert code == 0
  assert reports(folder) == 2
  page = folder / 'runs' / 'quickstart_report' / 'report.html'
  assert page.read_text() == 'whole\n'
