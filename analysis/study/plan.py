"""What a study consists of: pairs of runs, how much is measured, claims.

A comparison is a set of pairs that are trained alike but for their seed; its
runs lie in ``<runs>/<config>_<tag>/seed<seed>``. The studies themselves are in
`studies`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import pathlib
from typing import Any

import ml_collections

from sinkformer_jax import configuration
from sinkformer_jax import errors
from sinkformer_jax.training import workdir as workdir_lib

SOFTMAX, SINKHORN = 'softmax', 'sinkhorn'


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
class Comparison:
  """Pairs of runs that are trained alike but for their seed.

  Attributes:
    tag: ends the name of their directories; '' for the config's own.
    title: what is particular about it.
    seeds: one for each pair.
    overrides: of the config, such as ``{'total_steps': 859}``.
    whole: everything is measured; otherwise only what claims a and b, decay
      along training and matched entropy need.
    sizes: how much is measured; as much as the study says if not given.
  """

  tag: str
  title: str
  seeds: tuple[int, ...]
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  whole: bool = False
  sizes: Sizes | None = None


@dataclasses.dataclass(frozen=True)
class Study:
  """A study.

  Attributes:
    name: of its directory of results.
    title: of its page.
    preset: one of `studies.PRESETS`.
    sizes: how much is measured of comparisons that do not say it themselves.
    configs: config file of the softmax and of the Sinkhorn runs, with preset.
    comparisons: the first is the one that verdicts are about. None for studies
      without runs.
    grid: tags of the comparisons from which each normalizer's learning rate is
      chosen on validation data; empty for no such comparison.
    exploratory_seeds: seeds of the pairs that had been seen when the tests were
      fixed, or when it was decided how many pairs there are.
    alone: the analysis of a study without runs.
    texts: whether examples differ in length.
    exploratory: whether its comparisons are shown side by side, without
      verdicts.
  """

  name: str
  title: str
  preset: str
  sizes: Sizes
  configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  comparisons: tuple[Comparison, ...] = ()
  grid: tuple[str, ...] = ()
  exploratory_seeds: tuple[int, ...] = ()
  alone: str = ''
  texts: bool = False
  exploratory: bool = False

  def sizes_of(self, comparison: Comparison) -> Sizes:
    """How much is measured of a comparison."""
    return comparison.sizes or self.sizes

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

  def diverged(self) -> str:
    """Where its values ceased to be finite; '' if they did not."""
    path = self.workdir / workdir_lib.DIVERGED
    if self.is_finished() or not path.exists():
      return ''
    said = workdir_lib.read_json(path)
    return f'not finite at step {said["step"]}'

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

    Fields that a run does not know, made by older code, and that have no value
    in `configuration.ADDED`, are let pass.

    Raises:
      errors.RunError: names the run, the fields and their values.
    """
    if not (self.workdir / 'config.json').exists():
      return
    found, _ = workdir_lib.read_config(self.workdir)
    known = configuration.flatten(found)
    differences = {
      field: values
      for field, values in configuration.differences(
        self.config().to_dict(), found
      ).items()
      if field not in configuration.WITHOUT_EFFECT and field in known
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


def main_runs(study: Study, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
  """Those of the comparison that verdicts are about."""
  return [x for x in runs if x.comparison == study.comparisons[0]]


def data_flags(data_dir: str) -> list[str]:
  """Arguments of `launch.train` that say where the data is; '' for none."""
  return [f'--config.data.dir={data_dir}'] if data_dir else []


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
