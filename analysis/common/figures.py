"""How all figures look, and how they are saved.

Figures can be read in black and white: curves differ in marker and line style,
not in colour alone.
"""

from collections.abc import Callable
import pathlib

import matplotlib
from matplotlib import figure
from PIL import Image

_CURVES = (
  {'color': '#000000', 'marker': 'o', 'linestyle': '-'},
  {'color': '#d55e00', 'marker': 's', 'linestyle': '--'},
  {'color': '#0072b2', 'marker': '^', 'linestyle': ':'},
  {'color': '#009e73', 'marker': 'D', 'linestyle': '-.'},
  {'color': '#cc79a7', 'marker': 'v', 'linestyle': (0, (5, 1, 1, 1, 1, 1))},
  {'color': '#56b4e9', 'marker': 'P', 'linestyle': (0, (1, 3))},
  {'color': '#999999', 'marker': 'X', 'linestyle': (0, (8, 3))},
  {'color': '#e69f00', 'marker': '*', 'linestyle': (0, (3, 1, 1, 1))},
)
_STYLE = {
  'axes.grid': True,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'font.size': 9,
  'grid.alpha': 0.3,
  'legend.frameon': False,
  'lines.markersize': 4,
  'savefig.dpi': 160,
  # The same figure is the same file, and its text can be searched.
  'svg.fonttype': 'none',
  'svg.hashsalt': 'sinkformer_jax',
}


def curve(number: int) -> dict:
  """Colour, marker and line style of a curve; after 8 they come again."""
  return _CURVES[number % len(_CURVES)]


def save(
  path: pathlib.Path, draw: Callable[[figure.Figure], None], size: tuple
) -> None:
  """Draws a figure and saves it as PNG and SVG.

  Args:
    path: where to, without the ending.
    draw: is given an empty figure.
    size: width and height in inches.
  """
  # Not pyplot: it keeps every figure, and may look for a display.
  with matplotlib.rc_context(_STYLE):
    fig = figure.Figure(figsize=size, layout='constrained')
    draw(fig)
    png = path.with_name(f'{path.name}.png')
    fig.savefig(png)
    with Image.open(png) as image:
      # A fourth of the size, and nothing that can be seen.
      image.convert('RGB').quantize(128).save(png, optimize=True)
    fig.savefig(path.with_name(f'{path.name}.svg'), metadata={'Date': None})
