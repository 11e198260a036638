"""The studies themselves: which runs of which presets.

  quick   minutes on 2 cores: one pair each, on little data
  cpu     a night or more on 2 cores: shortened trainings, said beside results
  full    the papers' size
  tiny    2 layers, for tests

A further study is one more function, and one more line in `STUDIES`. The claims
that it answers name it.
"""

from collections.abc import Callable

from analysis.study import plan
from analysis.study.plan import Comparison
from analysis.study.plan import Sizes
from analysis.study.plan import Study

PRESETS = ('quick', 'cpu', 'full', 'tiny')
# How much is measured of a pair that is there for a look.
_LOOK = {
  'quick': Sizes(num_examples=8, num_paths=20, few_examples=4, num_draws=20),
  'tiny': Sizes(4, 5, 2, num_draws=4),
}
# Of one pair with 197 tokens and more, which take long.
_FEW = Sizes(num_examples=16, num_paths=50, few_examples=8)
_ONE_EPOCH = {'total_steps': 859}  # Of MNIST.
# With a warm-up that is over long before the end.
_SIXTY_STEPS = {'total_steps': 60, 'optimizer.warmup_steps': 20}


def _configs(name, preset=''):
  """Config files of softmax and Sinkhorn."""
  end = f':{preset}' if preset else ''
  return {
    x: f'configs/{name}_{x}.py{end}' for x in (plan.SOFTMAX, plan.SINKHORN)
  }


def _small(preset):
  """The configs' own preset, where there is one of that name."""
  return preset if preset in _LOOK else ''


def _main(tag, title, seeds, overrides=None):
  """The comparison that verdicts are about."""
  return Comparison(tag, title, seeds, overrides or {}, whole=True)


def _pair(tag, title, overrides, sizes=None):
  """One pair beside the main comparison."""
  return Comparison(tag, title, (0,), overrides, sizes=sizes)


def _mnist(preset):
  comparisons = {
    'quick': (_main('quick', '160 steps', (0,)),),
    'cpu': _mnist_in_a_night(),
    'full': (_main('', '10 epochs', (0, 1, 2, 3, 4)),),
    'tiny': (_main('tiny', '20 steps', (0, 1)),),
  }
  grid = ('1epoch', '1epoch_lr5e-4', '1epoch_lr2e-3', '1epoch_lr2.5e-4')
  return Study(
    name='mnist',
    title='MNIST: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('mnist', _small(preset)),
    comparisons=comparisons[preset],
    grid=grid if preset == 'cpu' else (),
    exploratory_seeds=(0,) if preset == 'cpu' else (),
  )


def _mnist_in_a_night():
  def at(learning_rate):
    return {**_ONE_EPOCH, 'optimizer.learning_rate': learning_rate}

  one_epoch = 'one epoch at learning rate'
  three_epochs = {'total_steps': 2577}
  return (
    _main('1epoch', f'{one_epoch} 1e-3', (0, 1, 2, 3, 4), _ONE_EPOCH),
    Comparison('1epoch_lr5e-4', f'{one_epoch} 5e-4', (0, 1, 2), at(5e-4)),
    _pair('3epochs', 'three epochs at learning rate 1e-3', three_epochs),
    # Two pairs were added when the first had turned the sign.
    Comparison('1epoch_lr2e-3', f'{one_epoch} 2e-3', (0, 1, 2), at(2e-3)),
    _pair('1epoch_lr2.5e-4', f'{one_epoch} 2.5e-4', at(2.5e-4)),
  )


def _random_control(preset):
  sizes = {
    'quick': Sizes(scales=('0.5', '1', '3'), num_draws=20),
    'tiny': Sizes(scales=('1',), num_draws=4, num_tokens=8, num_layers=3),
  }
  return Study(
    name='random_control',
    title='Control: products of unrelated random attention matrices',
    preset=preset,
    sizes=sizes.get(preset, Sizes()),
    alone='random_control',
  )


def _theory(preset):
  return Study(
    name='theory',
    title='Theory: bounds of one layer, and the law of depth',
    preset=preset,
    sizes=Sizes(),
    alone='theory',
  )


def _ag_news(preset):
  seeds = (0, 1, 2)
  one_epoch = {'total_steps': 296}  # Of 19,000 texts.
  # Most of a short training is the test of 7,600 texts.
  short = {**_SIXTY_STEPS, 'data.max_length': 64, 'data.bucket_lengths': ()}
  comparisons = {
    'quick': _main('60steps', '60 steps, 64 tokens', (0,), short),
    'cpu': _main('1epoch', 'one epoch of 19,000 texts', seeds, one_epoch),
    'full': _main('', '5 epochs of 114,000 texts', seeds),
    'tiny': _main('tiny', '20 steps', (0, 1)),
  }
  return Study(
    name='ag_news',
    title='AG News: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('ag_news', _small(preset)),
    comparisons=(comparisons[preset],),
    texts=True,
  )


def _cats_vs_dogs(preset):
  seeds = (0, 1, 2)
  large = {
    'data.image_size': 224,
    'batch_size': 16,
    'total_steps': 210,
    'checkpoint.keep_steps': (70, 140),
  }
  comparisons = {
    'quick': (_main('60steps', '60 steps, 64 pixels', (0,), _SIXTY_STEPS),),
    'cpu': (
      _main(
        '1050steps',
        '30 epochs of 1,119 photos, 64 pixels',
        # Five pairs were added when the first three could tell little.
        (*seeds, 3, 4, 5, 6, 7),
        # After 1, 3 and 10 epochs.
        {'total_steps': 1050, 'checkpoint.keep_steps': (35, 105, 350)},
      ),
      _pair('224px', '3 epochs of 1,119 photos, 224 pixels', large, _FEW),
    ),
    'full': (_main('', '50 epochs of 20,000 photos, 224 pixels', seeds),),
    'tiny': (_main('tiny', '20 steps', (0, 1)),),
  }
  # The preset quick of the configs has 64 pixels.
  config_preset = {'full': '', 'tiny': 'tiny'}.get(preset, 'quick')
  return Study(
    name='cats_vs_dogs',
    title='Cats and Dogs: softmax and Sinkhorn attention, 24 layers',
    preset=preset,
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('cats_vs_dogs', config_preset),
    comparisons=comparisons[preset],
    exploratory_seeds=seeds if preset == 'cpu' else (),
  )


# What none of the papers trained: the papers only switched parts off.
_VARIANTS = {
  'noffn': ('without FFN', {'model.ffn': False}),
  'noskip': ('without skips of attention', {'model.skip': False}),
  'pure': (
    'pure attention: without both',
    {'model.ffn': False, 'model.skip': False},
  ),
  'post': ('post-LayerNorm', {'model.norm_position': 'post'}),
  'deepnorm': (
    'DeepNorm',
    {'model.norm_position': 'post', 'model.deepnorm': True},
  ),
  'talking': ('talking heads', {'model.talking_heads': True}),
}


def _variants(preset):
  tag, words, overrides = {
    'quick': (
      '4layers',
      '4 layers, 30 steps',
      {
        'total_steps': 30,
        'optimizer.warmup_steps': 10,
        'model.num_layers': 4,
      },
    ),
    'cpu': ('half', 'half an epoch', {'total_steps': 430}),
    'full': ('', '10 epochs', {}),
    'tiny': ('tiny', '20 steps', {}),
  }[preset]
  others = [
    _pair(f'{tag}_{name}'.strip('_'), title, {**overrides, **changed})
    for name, (title, changed) in _VARIANTS.items()
  ]
  return Study(
    name='variants',
    title=f'Variants on MNIST, {words}: what the papers never trained',
    preset=preset,
    sizes=_LOOK.get(preset, Sizes()),
    configs=_configs('mnist', _small(preset)),
    comparisons=(_pair(tag, 'as in the study of MNIST', overrides), *others),
    exploratory=True,
  )


def _steps(total, share):
  """A shorter training; the learning rate falls after this share of it."""
  return {
    'total_steps': total,
    'optimizer.step_boundaries': (round(total * share),),
  }


def _sinkformers_cats_vs_dogs(preset):
  share = 5 / 6  # 250 of 300 epochs.
  small = {'data.image_size': 64, **_steps(40, share)}
  tiny = {'data.image_size': 32, **_steps(20, share)}
  comparisons = {
    'quick': _main('sinkformers_40steps', '40 steps, 64 pixels', (0,), small),
    'cpu': _pair(
      'sinkformers_350steps', '20 epochs of 1,119 photos', _steps(350, share)
    ),
    'full': _main('sinkformers', '300 epochs of 20,000 photos', (0, 1, 2)),
    'tiny': _main('sinkformers_tiny', '20 steps', (0,), tiny),
  }
  return _sinkformers(
    'cats_vs_dogs', 'Cats and Dogs', preset, comparisons[preset]
  )


def _sinkformers_imdb(preset):
  share = 4 / 5  # 12 of 15 epochs.
  short = {
    'data.max_length': 64,
    'data.bucket_lengths': (),
    'batch_size': 8,
    **_steps(20, share),
  }
  comparisons = {
    'quick': _main(
      'sinkformers_20steps', '20 steps of 8, 64 tokens', (0,), short
    ),
    # Cut to half the length: 512 tokens take hours.
    'cpu': _pair(
      'sinkformers_1epoch_256',
      'one epoch of 9,000 texts, 256 tokens',
      {
        'data.max_length': 256,
        'data.bucket_lengths': (192,),
        **_steps(281, share),
      },
    ),
    'full': _main('sinkformers', '15 epochs of 22,500 texts', (0, 1, 2)),
    'tiny': _main('sinkformers_tiny', '20 steps', (0,), short),
  }
  return _sinkformers('imdb', 'IMDb', preset, comparisons[preset])


def _sinkformers(name, words, preset, comparison):
  return Study(
    name=f'sinkformers_{name}',
    title=f'{words} as the Sinkformers had it: 6 layers, 8 heads, n_it 1 and 3',
    preset=preset,
    sizes=(_LOOK | {'cpu': _FEW}).get(preset, Sizes()),
    configs=_configs(name, 'sinkformers'),
    comparisons=(comparison,),
    texts=name == 'imdb',
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


def of(name: str, preset: str) -> list[Study]:
  """The studies that the name of one, or of a group, stands for."""
  return [STUDIES[x](preset) for x in GROUPS.get(name, (name,))]
