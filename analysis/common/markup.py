"""The parts that pages are made of: HTML without any other file.

Text is escaped here, so that names of runs are whatever people call
directories.
"""

import base64
from collections.abc import Iterable
from collections.abc import Mapping
import html
import pathlib
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto;
  padding: 0 1em; color: #111; background: #fff; }
img { width: 100%; max-width: 56em; } figure { margin: 1.5em 0; }
figcaption { font-size: 13px; color: #333; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { border-bottom: 1px solid #ccc; padding: .2em .6em; text-align: left;
  vertical-align: top; }
pre { font-size: 12px; overflow-x: auto; background: #f4f4f4; padding: .6em; }
.notice { border-left: 4px solid #d55e00; padding: .2em .8em; }
details { margin: 1em 0; } summary { cursor: pointer; }
@media print { body { max-width: none; font-size: 11px; }
  table { font-size: 9px; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
  """A whole page.

  Args:
    title: of the window.
    parts: its body, HTML.
  """
  body = '\n'.join(parts)
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n'
    f'<body>\n{body}\n</body></html>\n'
  )


def heading(text: str, level: int = 2) -> str:
  """A heading."""
  return f'<h{level}>{html.escape(text)}</h{level}>'


def paragraph(text: str, kind: str = '') -> str:
  """A paragraph; of kind 'notice' one that must not be missed."""
  kind = f' class="{kind}"' if kind else ''
  return f'<p{kind}>{html.escape(text)}</p>'


def lines(texts: Iterable[str]) -> str:
  """Lines of text whose columns are to stay below each other."""
  return f'<pre>{html.escape(chr(10).join(texts))}</pre>'


def items(texts: Iterable[str]) -> str:
  """A list."""
  body = ''.join(f'<li>{html.escape(x)}</li>' for x in texts)
  return f'<ul>{body}</ul>'


def folded(title: str, body: str) -> str:
  """HTML that is shown on demand."""
  return f'<details><summary>{html.escape(title)}</summary>{body}</details>'


def figure(path: pathlib.Path, caption: str) -> str:
  """A PNG file, with its caption."""
  data = base64.b64encode(path.read_bytes()).decode()
  return (
    f'<figure><img alt="{html.escape(path.stem)}"'
    f' src="data:image/png;base64,{data}">'
    f'<figcaption>{html.escape(caption)}</figcaption></figure>'
  )


def table(rows: Iterable[Mapping[str, Any]]) -> str:
  """A table, a column for each key of the first row; '' without a row.

  Line breaks of a cell are kept.
  """
  rows = list(rows)
  if not rows:
    return ''
  head = ''.join(f'<th>{html.escape(x)}</th>' for x in rows[0])
  body = '\n'.join(
    f'<tr>{"".join(map(_cell, row.values()))}</tr>' for row in rows
  )
  return f'<table><tr>{head}</tr>\n{body}</table>'


def _cell(value):
  text = html.escape(str(value)).replace('\n', '<br>')
  return f'<td>{text}</td>'
