"""What `analysis.cost` measures: sizes, and what can be compared here."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import ml_collections

from analysis.cost import model as cost_model
from configs import mnist_sinkhorn


@dataclasses.dataclass(frozen=True)
class Preset:
  """Sizes of everything.

  Attributes:
    configs: preset of the configs: of the model, and of the part `loader`.
    shapes: tokens and batch of a training step; a normalizer alone runs on
      ``batch * num_heads`` matrices of ``tokens``.
    accelerator_shapes: the same on a GPU or TPU.
    product: side of the square matrix product.
    depths: numbers of layers to compile.
    sweeps: of the part `growth`: what is varied ('iterations', 'tokens',
      'heads' or 'batch'), its values, and tokens, batch and heads otherwise.
  """

  configs: str
  shapes: tuple[tuple[int, int], ...]
  accelerator_shapes: tuple[tuple[int, int], ...]
  product: int
  depths: tuple[int, ...]
  sweeps: Mapping[str, tuple[Sequence[int], Mapping[str, int]]]

  @property
  def model(self) -> ml_collections.FrozenConfigDict:
    """The section `config.model`."""
    model = mnist_sinkhorn.get_config(self.configs).model
    return ml_collections.FrozenConfigDict(model)


_BASE = {'tokens': 50, 'batch': 16, 'heads': 4}
_TINY_BASE = {'tokens': 5, 'batch': 4, 'heads': 2}
PRESETS = {
  # The architecture of the study: 24 layers, width 128, 4 heads, FFN 512.
  'full': Preset(
    configs='',
    shapes=((50, 64), (128, 16)),
    accelerator_shapes=((50, 256), (128, 256)),
    product=4096,
    depths=(12, 24),
    sweeps={
      'iterations': ((0, 1, 2, 5, 10, 20, 50, 100), _BASE),
      'tokens': ((16, 32, 64, 128, 256, 512), {**_BASE, 'batch': 2}),
      'heads': ((1, 2, 4, 8, 16), _BASE),
      'batch': ((1, 4, 16, 64), _BASE),
    },
  ),
  'tiny': Preset(
    configs='tiny',
    shapes=((5, 4),),
    accelerator_shapes=((5, 4),),
    product=64,
    depths=(1, 2),
    sweeps={
      'iterations': ((0, 1, 2, 4), _TINY_BASE),
      'tokens': ((3, 5, 9), _TINY_BASE),
      'heads': ((1, 2, 4), _TINY_BASE),
      'batch': ((1, 2, 4), _TINY_BASE),
    },
  ),
}


@dataclasses.dataclass(frozen=True)
class Options:
  """What to measure.

  Attributes:
    preset: sizes.
    shapes: tokens and batch of the tables, see `Preset`.
    num_iters: Sinkhorn iterations.
    repeats: rounds.
    subjects: opened runs, see `analysis.common.runs`.
  """

  preset: Preset
  shapes: tuple[tuple[int, int], ...]
  num_iters: int
  repeats: int
  subjects: Sequence[Any] = ()

  def setting(
    self, tokens: int, batch: int, **model_fields
  ) -> cost_model.Setting:
    """A training step of the preset's model."""
    setting = cost_model.Setting(self.preset.model, tokens, batch)
    return setting.with_model(**{'num_iters': self.num_iters, **model_fields})


def options(
  preset: str, shapes: Sequence[tuple[int, int]], *further: Any
) -> Options:
  """Options from the values of flags.

  Args:
    preset: of `PRESETS`.
    shapes: those of the preset for this device if empty.
    *further: as `Options` has them.
  """
  sizes = PRESETS[preset]
  on_cpu = jax.default_backend() == 'cpu'
  default = sizes.shapes if on_cpu else sizes.accelerator_shapes
  return Options(sizes, tuple(shapes) or default, *further)
