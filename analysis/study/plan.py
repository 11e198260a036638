"""What each study consists of: runs, sizes, claims.

A study compares pairs of runs. A comparison is a set of pairs that are trained
alike but for their seed; its runs lie in ``<runs>/<config>_<tag>/seed<seed>``.
Presets change how many and how large:

  quick   20 minutes on 2 cores for all: one pair on a small sample
  cpu     a night on 2 cores: 5 pairs of one epoch, and what goes with them
  full    the papers' size: 10 epochs, 5 pairs
  tiny    a minute, for tests: 2 pairs of 2 layers
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import pathlib
from typing import Any

import ml_collections

from analysis import runs as runs_lib
from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax.training import workdir as workdir_lib

PRESETS = ('quick', 'cpu', 'full', 'tiny')
SOFTMAX, SINKHORN = 'softmax', 'sinkhorn'


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Pairs of runs that are trained alike but for their seed.

  Attributes:
    tag: ends the name of their directories; '' for the config's own.
    title: what is particular about it.
    seeds: one for each pair.
    overrides: of the config, such as ``{'total_steps': 859}``.
    whole: everything is measured; otherwise only what claims a and b, decay
      along training and matched entropy need.
  """

  tag: str
  title: str
  seeds: tuple[int, ...]
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  whole: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How much is measured.

  Attributes:
    num_examples: test examples of a run.
    num_paths: sampled paths of each depth and example.
    few_examples: for what holds all examples of a pair at once, or is costly.
    scales: standard deviations of random logits.
    num_draws: random matrices for each factor.
    num_tokens: of random matrices.
    num_layers: the largest number of random factors.
  """

  num_examples: int = 64
  num_paths: int = 100
  few_examples: int = 16
  scales: tuple[str, ...] = ('0.5', '1', '2', '3', '5')
  num_draws: int = 100
  num_tokens: int = 50
  num_layers: int = 24


@dataclasses.dataclass(frozen=True)
class Study:
  """A study.

  Attributes:
    name: of its directory of results.
    title: of its page.
    preset: one of `PRESETS`.
    claims: letters of the claims it answers.
    sizes: how much is measured.
    configs: config file of the softmax and of the Sinkhorn runs, with preset.
    comparisons: the first is the one that verdicts are about. None for studies
      without runs.
    grid: tags of the comparisons from which each normalizer's learning rate is
      chosen on validation data; empty for no such comparison.
    alone: the analysis of a study without runs.
    texts: whether examples differ in length.
    exploratory: whether its comparisons are shown side by side, without
      verdicts.
  """

  name: str
  title: str
  preset: str
  claims: str
  sizes: Sizes
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  comparisons: tuple[Comparison, ...] = ()
  grid: tuple[str, ...] = ()
  alone: str = ''
  texts: bool = False
  exploratory: bool = False

  def runs(self, root: pathlib.Path) -> list['PlannedRun']:
    """All its runs, the two of a pair after each other."""
    return [
      PlannedRun(self.configs[normalizer], comparison, normalizer, seed, root)
      for comparison in self.comparisons
      for seed in comparison.seeds
      for normalizer in self.configs
    ]


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """A run of a study.

  Attributes:
    config_file: such as ``configs/mnist_softmax.py:quick``.
    comparison: to which it belongs.
    normalizer: `SOFTMAX` or `SINKHORN`.
    seed: of the run.
    root: the directory of all runs.
  """

  config_file: str
  comparison: Comparison
  normalizer: str
  seed: int
  root: pathlib.Path

  @property
  def name(self) -> str:
    """``<config>_<tag>/seed<seed>``."""
    config = pathlib.Path(self.config_file.partition(':')[0]).stem
    tag = self.comparison.tag
    return f'{config}{"_" if tag else ""}{tag}/seed{self.seed}'

  @property
  def workdir(self) -> pathlib.Path:
    """Its directory."""
    return self.root / self.name

  def config(self) -> ml_collections.ConfigDict:
    """Its whole config."""
    path, _, preset = self.config_file.partition(':')
    module = importlib.import_module(path.removesuffix('.py').replace('/', '.'))
    config = module.get_config(preset)
    config.update_from_flattened_dict(self._overrides())
    return config

  def command(self) -> list[str]:
    """Arguments of ``python`` that train it, or go on with it."""
    overrides = [f'--config.{k}={v}' for k, v in self._overrides().items()]
    return [
      '-m',
      'launch.train',
      f'--config={self.config_file}',
      *overrides,
      f'--workdir={self.workdir}',
    ]

  def _overrides(self):
    return {**self.comparison.overrides, 'seed': self.seed}

  def is_finished(self) -> bool:
    """Whether its training has come to its end."""
    return (self.workdir / 'result.json').exists()

  def steps_done(self) -> int:
    """The newest checkpoint; 0 if there is none."""
    saved = (self.workdir / 'checkpoints').glob('*')
    return max((int(x.name) for x in saved if x.name.isdigit()), default=0)

  def kept_steps(self) -> list[int]:
    """Steps whose checkpoints a finished run has, from 0 to the last.

    Of one that is not finished: those it will have, at least.
    """
    config = self.config()
    total = config.total_steps
    steps = {0, *config.checkpoint.keep_steps, total}
    steps = sorted(x for x in steps if x <= total)
    if not self.is_finished():
      return steps
    saved = self.workdir / 'checkpoints'
    return [x for x in steps if (saved / str(x)).exists()]

  def check(self) -> None:
    """Refuses a directory with a run of another config.

    Fields that a run does not know, made by older code, are let pass.

    Raises:
      errors.RunError: names the run, the fields and their values.
    """
    path = self.workdir / 'config.json'
    if not path.exists():
      return
    found = workdir_lib.read_json(path)
    known = configuration.flatten(found)
    differences = {
      field: values
      for field, values in configuration.differences(
        self.config().to_dict(), found
      ).items()
      if field not in runs_lib.WITHOUT_EFFECT and field in known
    }
    if self.normalizer == SOFTMAX:
      differences.pop('model.num_iters', None)
    if differences:
      listed = ', '.join(
        f'config.{field} is {there!r}, not {planned!r}'
        for field, (planned, there) in differences.items()
      )
      raise errors.RunError(
        f'{self.workdir} is not the run that the study plans: {listed}. Move it'
        ' away, or choose another --runs.'
      )


_ONE_EPOCH = {'total_steps': 859}  # Of MNIST.
# How much the presets measure of a pair that is there for a look.
_LOOK = {
  'quick': Sizes(num_examples=8, num_paths=20, few_examples=4, num_draws=20),
  'tiny': Sizes(4, 5, 2, num_draws=4),
}


# A warm-up that is over long before the end.
_SIXTY_STEPS = {'total_steps': 60, 'optimizer__warmup_steps': 20}


def _configs(name, preset=''):
  end = f':{preset}' if preset else ''
  return {x: f'configs/{name}_{x}.py{end}' for x in (SOFTMAX, SINKHORN)}


def _main(tag, title, seeds=(0, 1, 2), **overrides):
  """The comparison that verdicts are about."""
  return Comparison(tag, title, seeds, _dotted(overrides), whole=True)


def _dotted(overrides):
  return {k.replace('__', '.'): v for k, v in overrides.items()}


def _pair(tag, title, **overrides):
  """One more pair, beside the main comparison."""
  return Comparison(tag, title, (0,), _dotted(overrides))


def _mnist(preset: str) -> Study:
  comparisons = {
    'quick': (_main('quick', '160 steps', (0,)),),
    'cpu': _mnist_in_a_night(),
    'full': (_main('', '10 epochs', (0, 1, 2, 3, 4)),),
    'tiny': (_main('tiny', '20 steps', (0, 1)),),
  }[preset]
  grid = [x.tag for x in comparisons if x.tag.startswith('1epoch')]
  return Study(
    name='mnist',
    title='MNIST: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    claims='abcdefhiklmno',
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('mnist', preset if preset in _LOOK else ''),
    comparisons=comparisons,
    grid=tuple(grid) if len(grid) > 1 else (),
  )


def _mnist_in_a_night():
  def at(learning_rate):
    return _ONE_EPOCH | {'optimizer__learning_rate': learning_rate}

  return (
    _main(
      '1epoch',
      'one epoch at learning rate 1e-3',
      (0, 1, 2, 3, 4),
      **_ONE_EPOCH,
    ),
    Comparison(
      '1epoch_lr5e-4',
      'one epoch at learning rate 5e-4',
      (0, 1, 2),
      _dotted(at(5e-4)),
    ),
    _pair('3epochs', 'three epochs at learning rate 1e-3', total_steps=2577),
    _pair('1epoch_lr2e-3', 'one epoch at learning rate 2e-3', **at(2e-3)),
    _pair('1epoch_lr2.5e-4', 'one epoch at learning rate 2.5e-4', **at(2.5e-4)),
  )


def _ag_news(preset: str) -> Study:
  comparisons = {
    'quick': (_main('60steps', '60 steps', (0,), **_SIXTY_STEPS),),
    'cpu': (
      _main('1epoch', 'one epoch of 19,000 texts at 1e-3', total_steps=296),
    ),
    'full': (_main('', '5 epochs of 114,000 texts'),),
    'tiny': (_main('tiny', '20 steps', (0, 1)),),
  }[preset]
  return Study(
    name='ag_news',
    title='AG News: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    claims='abcdefiklmn',
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('ag_news', preset if preset in _LOOK else ''),
    comparisons=comparisons,
    texts=True,
  )


def _cats_vs_dogs(preset: str) -> Study:
  comparisons = {
    'quick': (_main('60steps', '60 steps, 64 pixels', (0,), **_SIXTY_STEPS),),
    'cpu': (
      _main(
        '1050steps', '30 epochs of 1,120 photos, 64 pixels', total_steps=1050
      ),
      _pair(
        '224px',
        '3 epochs of 1,120 photos, 224 pixels',
        data__image_size=224,
        batch_size=16,
        total_steps=210,
      ),
    ),
    'full': (_main('', '50 epochs of 20,000 photos, 224 pixels'),),
    'tiny': (_main('tiny', '20 steps', (0, 1)),),
  }[preset]
  return Study(
    name='cats_vs_dogs',
    title='Cats and Dogs: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    claims='abcdefiklmn',
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs(
      'cats_vs_dogs', {'full': '', 'tiny': 'tiny'}.get(preset, 'quick')
    ),
    comparisons=comparisons,
  )


# What none of the papers trained.
_VARIANTS = {
  'noffn': ('without FFN', {'model__ffn': False}),
  'noskip': ('without skips of attention', {'model__skip': False}),
  'pure': (
    'pure attention: without both',
    {'model__ffn': False, 'model__skip': False},
  ),
  'post': ('post-LayerNorm', {'model__norm_position': 'post'}),
  'deepnorm': (
    'DeepNorm',
    {'model__norm_position': 'post', 'model__deepnorm': True},
  ),
  'talking': ('talking heads', {'model__talking_heads': True}),
}


def _variants(preset: str) -> Study:
  base, title, steps = {
    'quick': ('6layers', '6 layers, 60 steps', _SIXTY_STEPS),
    'cpu': ('1epoch', 'one epoch', _ONE_EPOCH),
    'full': ('', '10 epochs', {}),
    'tiny': ('tiny', '20 steps', {}),
  }[preset]
  if preset == 'quick':
    steps = steps | {'model__num_layers': 6}
  others = [
    _pair(f'{base}{"_" if base else ""}{tag}', words, **steps, **changed)
    for tag, (words, changed) in _VARIANTS.items()
  ]
  return Study(
    name='variants',
    title='Variants on MNIST: what the papers never trained',
    preset=preset,
    claims='abln',
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('mnist', preset if preset in _LOOK else ''),
    comparisons=(
      _pair(base, f'as in the study of MNIST, {title}', **steps),
      *others,
    ),
    exploratory=True,
  )


def _sinkformers_cats_vs_dogs(preset: str) -> Study:
  comparisons = {
    'quick': (
      _main(
        'sinkformers_40steps',
        '40 steps, 64 pixels',
        (0,),
        data__image_size=64,
        **_steps(40, 33),
      ),
    ),
    'cpu': (
      _main(
        'sinkformers_350steps',
        '20 epochs of 1,120 photos',
        (0,),
        **_steps(350, 292),
      ),
    ),
    'full': (_main('sinkformers', '300 epochs of 20,000 photos'),),
    'tiny': (
      _main(
        'sinkformers_tiny',
        '20 steps',
        (0,),
        data__image_size=32,
        **_steps(20, 17),
      ),
    ),
  }[preset]
  return _sinkformers('cats_vs_dogs', 'Cats and Dogs', preset, comparisons)


def _sinkformers_imdb(preset: str) -> Study:
  short = {'data__max_length': 128, 'data__bucket_lengths': (), 'batch_size': 8}
  comparisons = {
    'quick': (
      _main(
        'sinkformers_20steps',
        '20 steps of 8, 128 tokens',
        (0,),
        **short,
        **_steps(20, 17),
      ),
    ),
    'cpu': (
      _main(
        'sinkformers_1epoch',
        'one epoch of 9,000 texts',
        (0,),
        **_steps(281, 225),
      ),
    ),
    'full': (_main('sinkformers', '15 epochs of 22,500 texts'),),
    'tiny': (
      _main('sinkformers_tiny', '20 steps', (0,), **short, **_steps(20, 17)),
    ),
  }[preset]
  return _sinkformers('imdb', 'IMDb', preset, comparisons)


def _steps(total, boundary):
  """A shorter training; the learning rate falls as late as in the whole."""
  return {'total_steps': total, 'optimizer__step_boundaries': (boundary,)}


def _sinkformers(name, words, preset, comparisons):
  return Study(
    name=f'sinkformers_{name}',
    title=f'{words} as the Sinkformers had it: 6 layers, 8 heads, n_it 1 and 3',
    preset=preset,
    claims='abklmn',
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs(name, 'sinkformers'),
    comparisons=comparisons,
    texts=name == 'imdb',
  )


def _random_control(preset: str) -> Study:
  sizes = {
    'quick': Sizes(scales=('0.5', '1', '3'), num_draws=20),
    'sinkformers_tiny': Sizes(
      scales=('1',), num_draws=4, num_tokens=8, num_layers=3
    ),
  }
  return Study(
    name='random_control',
    title='Control: products of unrelated random attention matrices',
    preset=preset,
    claims='g',
    sizes=sizes.get(preset, Sizes()),
    alone='random_control',
  )


def _theory(preset: str) -> Study:
  return Study(
    name='theory',
    title='Theory: bounds of one layer, and the law of depth',
    preset=preset,
    claims='j',
    sizes=Sizes(),
    alone='theory',
  )


# In the order in which they are done, and stand on the page of all.
STUDIES: dict[str, Callable[[str], Study]] = {
  'mnist': _mnist,
  'random_control': _random_control,
  'theory': _theory,
  'ag_news': _ag_news,
  'cats_vs_dogs': _cats_vs_dogs,
  'variants': _variants,
  'sinkformers_cats_vs_dogs': _sinkformers_cats_vs_dogs,
  'sinkformers_imdb': _sinkformers_imdb,
}
GROUPS: dict[str, tuple[str, ...]] = {
  'sinkformers': ('sinkformers_cats_vs_dogs', 'sinkformers_imdb'),
  'all': tuple(STUDIES),
}


def studies(name: str, preset: str) -> list[Study]:
  """The studies that a name of one or of a group stands for, of a preset."""
  return [STUDIES[x](preset) for x in GROUPS.get(name, (name,))]


def check(runs: Sequence[PlannedRun]) -> None:
  """Refuses directories with other runs than those planned.

  Raises:
    errors.RunError: for a run of another config, see `PlannedRun.check`, and
      for one on other data than the first; names run and what is different.
  """
  first = None
  for run in runs:
    run.check()
    path = run.workdir / 'provenance.json'
    if not path.exists():
      continue
    data = workdir_lib.read_json(path)['data']
    if first is None:
      first = run, data
    elif data['fingerprint'] != first[1]['fingerprint']:
      raise errors.RunError(
        f'{run.workdir} was trained on {data["origin"]}, and'
        f' {first[0].workdir} on {first[1]["origin"]}: pairs need the same'
        ' data. Move one of them away.'
      )
