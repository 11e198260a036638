"""The figures of a study, from its evidence alone; see `common.curves`.

Each can be read in grey: curves differ in marker and line style.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import math
import textwrap
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import iterations
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import naming
from analysis.common import statistics
from analysis.study import evidence as evidence_lib
from analysis.study import measure
from analysis.study import plan
from analysis.study.claims import causes
from analysis.study.claims import decay
from analysis.study.evidence import Evidence
from analysis.study.evidence import NAMES

Plot = curves.Plot
_INTERVAL = 'Bars and bands: 95% t interval over pairs.'
_ASIDE = (
  f'{_INTERVAL} Curves are shifted aside, so that bars can be told apart.'
)


class _Interval(NamedTuple):
  """What a forest plot needs of a sample."""

  mean: float
  half_width: float
  count: int


def of_runs(evidence: Evidence, variations: pd.DataFrame) -> list[Plot]:
  """Figures of a comparison of runs.

  Args:
    evidence: of the comparison that verdicts are about.
    variations: claims under other choices, see `robustness.variations`.
  """
  drawn = [make(evidence) for make in (_paths, _outputs, _training, _causes)]
  return [*drawn, _robustness(variations), *_iterations(evidence)]


def along_training(titles: Mapping[Evidence, str]) -> list[Plot]:
  """Decay along training of several comparisons; none for a single one.

  Args:
    titles: the evidence of each, and what it is called.
  """
  points = {}
  for evidence, title in titles.items():
    if evidence.seeds:
      rows = _rows(evidence, **decay.PATHS)
      pairs = statistics.pairs_text(len(evidence.seeds))
      points[f'{textwrap.fill(title, 34)}\n({pairs})'] = rows, evidence.depths
  if len(points) < 2:
    return []
  rows = frames.concat([found for found, _ in points.values()])
  columns = min(len(points), 4)
  lines = math.ceil(len(points) / columns)
  return [
    Plot(
      'trainings',
      curves.caption(
        rows,
        'Path products (first k layers) along each training, at the steps that'
        ' are kept: spectral norm of the residual, absolute. The numbers at the'
        ' curves are depths. Means over pairs.',
        _ASIDE,
      ),
      (3.2 * columns, 3.4 * lines),
      lambda fig: _draw_trainings(fig, points, rows, (lines, columns)),
    )
  ]


def _draw_trainings(fig, points, rows, shape):
  panels = fig.subplots(*shape, sharey=True, squeeze=False)
  for ax in panels.flat[len(points) :]:
    ax.remove()
  used = panels.flat[: len(points)]
  for ax, (title, (own, depths)) in zip(used, points.items(), strict=True):
    _draw_along(ax, own, depths)
    ax.set_title(title, fontsize=9)
  for ax in panels[:, 0]:
    ax.set_ylabel('log10 of the residual')
  panels[0, 0].legend(fontsize=7)
  curves.finish(fig, rows)


def _draw_along(ax, rows, depths):
  """A curve over steps for each normalizer and depth."""
  ends = {depth: {} for depth in depths}
  for number, group in enumerate(curves.groups(rows)):
    for depth in depths:
      own = frames.select(rows, group=group, depth=depth)
      label = group if depth == depths[0] else None
      style = figures.curve(number)
      end = _draw_steps(ax, own, float, style, label, number)
      ends[depth][group] = end
  drawn = {k: [x for x in v.values() if x] for k, v in ends.items()}
  # Where the longer one ends.
  longest = {k: max(v, key=lambda x: x[0]) for k, v in drawn.items() if v}
  _name_ends(ax, longest)
  last = int(rows['step'].max()) if len(rows) else 1
  missing = [x for k, v in ends.items() for x in _unresolved(k, v, last)]
  if missing:
    words = textwrap.fill(f'depth {", ".join(missing)}: not resolved', 48)
    ax.text(0.02, 0.02, words, transform=ax.transAxes, fontsize=7)
  ax.set_xlabel('training step')
  # Of all steps, also those where nothing is resolved.
  ax.set_xlim(-0.08 * last, 1.1 * last)


def _unresolved(depth, ends, last):
  """From where on there is no curve; of each group, where they differ."""
  steps = {f' of {group}': end and end[0] for group, end in ends.items()}
  if len(set(steps.values())) == 1:
    steps = {'': next(iter(steps.values()))}
  return [
    f'{depth}{group}' + ('' if step is None else f' after step {step}')
    for group, step in steps.items()
    if step != last
  ]


def of_comparisons(titles: Mapping[Evidence, str]) -> list[Plot]:
  """Figures of comparisons side by side.

  Args:
    titles: the evidence of each, and what it is called.
  """
  points = {
    title: _rows(evidence, **decay.PATHS, at=measure.LAST)
    for evidence, title in titles.items()
    if evidence.seeds
  }
  rows = frames.concat(list(points.values()))
  return [
    Plot(
      'comparisons',
      curves.caption(
        rows,
        'Spectral norm of the residual of path products (first k layers),'
        ' absolute: mean of log10, of models that were trained in different'
        ' ways.',
        curves.SELECTION,
      ),
      (8, 4.6),
      lambda fig: _draw_comparisons(fig, points, rows),
    )
  ]


def _draw_comparisons(fig, points, rows):
  panels = fig.subplots(1, 2, sharey=True)
  for ax, (normalizer, name) in zip(panels, NAMES.items(), strict=True):
    for number, (title, found) in enumerate(points.items()):
      own = frames.select(found, normalizer=normalizer)
      curves.draw(ax, own, figures.curve(number), title, band=False)
    ax.set_title(name)
    ax.set_xlabel('path depth k')
  panels[0].set_ylabel(curves.RESIDUAL)
  curves.legend_above(fig, ncols=3, fontsize=8)
  curves.finish(fig, rows)


def _iterations(evidence):
  rows = _rows(evidence, analysis='iterations', at=measure.LAST)
  # Stacks of the same logits, not runs, are compared.
  return iterations.plots(rows.assign(group=rows['stack'])) if len(rows) else []


def _rows(evidence, **values):
  """Rows of pairs alone: a run without its partner would shift a mean."""
  return frames.select(evidence.table, **values, seed=evidence.seeds)


def _paths(evidence):
  rows = _rows(evidence, **decay.PATHS, at=measure.LAST)
  return Plot(
    'paths',
    curves.caption(
      rows,
      'Spectral norm of the residual of path products (first k layers),'
      ' absolute. Left: mean of log10; shaded: standard deviation over examples'
      ' and paths; bars: between seeds. Right: Sinkhorn minus softmax, each'
      ' pair (thin), the mean over pairs, and its 95% t interval. Dotted: the'
      ' depths of the verdicts.',
      curves.describe_pairs(frames.differences(rows)),
    ),
    (8, 3.6),
    lambda fig: _draw_paths(fig, rows, evidence),
  )


def _draw_paths(fig, rows, evidence):
  left, right = fig.subplots(1, 2)
  curves.draw_groups(left, rows)
  left.set_ylabel('log10 of the residual')
  left.legend()
  for seed in evidence.seeds:
    points = frames.differences(frames.select(rows, seed=seed))
    points = points.sort_values('depth')
    right.plot('depth', 'difference', data=points, color='#aaaaaa', lw=0.7)
  # Black: the pairs are grey, and stay so without colour.
  curves.draw_difference(right, frames.differences(rows), figures.curve(0))
  right.set_ylabel('Sinkhorn minus softmax, log10')
  for ax in (left, right):
    ax.set_xlabel('path depth k')
    ax.set_xticks([0, *evidence.depths])
    for depth in evidence.depths:
      ax.axvline(depth, color='#888888', linestyle=':', linewidth=0.8)
  curves.finish(fig, rows)


def _outputs(evidence):
  rows = _rows(
    evidence,
    analysis='layer_outputs',
    quantity=decay.FIXED.output,
    norm='spectral',
    scaling='relative',
    at=measure.LAST,
  )
  return Plot(
    'outputs',
    curves.caption(
      rows,
      'Spectral norm of the residual of the results of the attention sublayers,'
      ' divided by their own norm, layer by layer; trained models read with'
      ' attention skip and FFN on and off.',
      curves.LEGEND,
    ),
    (8, 5.4),
    lambda fig: _draw_outputs(fig, rows),
  )


def _draw_outputs(fig, rows):
  ablations = {x: {'ablation': x} for x in naming.ABLATIONS.values()}
  curves.small_multiples(fig, rows, ablations, wrap=2, sharey=False)


def _training(evidence):
  rows = _rows(evidence, **decay.PATHS)
  spread = _rows(
    evidence,
    analysis='attention',
    quantity='spread of column sums',
    normalizer=plan.SOFTMAX,
  )
  where = ', '.join(map(str, evidence.depths))
  return Plot(
    'training',
    curves.caption(
      rows,
      'Along training, at the steps that are kept. Left: path products (first'
      f' k layers), spectral norm of the residual, absolute, at depths {where}.'
      ' Right: how far column sums of softmax attention are from 1 (root mean'
      ' square, log10), by layer. Means over pairs.',
      _ASIDE,
    ),
    (8, 3.8),
    lambda fig: _draw_training(fig, rows, spread, evidence.depths),
  )


def _draw_training(fig, rows, spread, depths):
  left, right = fig.subplots(1, 2)
  _draw_along(left, rows, depths)
  left.set_ylabel('log10 of the residual')
  left.legend()
  for number, depth in enumerate(depths):
    # Styles of their own: the first two are the normalizers'.
    style = figures.curve(number + 2)
    own = frames.select(spread, depth=depth)
    name = f'softmax, layer {depth}'
    _draw_steps(right, own, np.log10, style, name, number)
  right.set_xlabel('training step')
  right.set_ylabel('log10 of the spread of column sums')
  right.legend()
  curves.finish(fig, rows)


def _name_ends(ax, ends):
  """Names curves where they end; those that end together, together."""
  low, high = ax.get_ylim()
  groups = []
  for depth, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
    if groups and y - groups[-1][0] < 0.05 * (high - low):
      groups[-1][2].append(depth)
    else:
      groups.append((y, x, [depth]))
  for y, x, names in groups:
    ax.annotate(
      ', '.join(map(str, sorted(names))),
      (x, y),
      xytext=(6, 0),
      textcoords='offset points',
      fontsize=8,
      va='center',
    )


def _draw_steps(ax, rows, transform, style, label, number=0):
  """One curve over steps, the number-th at these; where it ends, if it is."""
  # Means of a selection are no points; nor are those of some of the runs.
  chosen = [evidence_lib.is_selection(x) for x in rows.to_dict('records')]
  rows = rows[~rows['step'].isin(rows['step'][chosen])]
  if rows.empty:
    return None
  means = {int(k): map(transform, v) for k, v in rows.groupby('step')['mean']}
  steps = list(means)
  samples = [statistics.sample(x) for x in means.values()]
  half = [x.half_width for x in samples]
  # Aside, so that bars can be told apart.
  shift = 0.012 * number * steps[-1]
  ax.errorbar(
    [x + shift for x in steps],
    [x.mean for x in samples],
    half if np.isfinite(half).any() else None,
    **style,
    capsize=2,
    label=label,
  )
  return steps[-1], samples[-1].mean


def _causes(evidence):
  rows = _rows(evidence, analysis='mechanism', quantity='path, first layers')
  whole = [
    statistics.of_pairs(
      'whole difference, as trained',
      depth,
      causes.whole_difference(evidence, depth),
    )
    for depth in evidence.depths
  ]
  points, added = {}, causes.added_causes(evidence)
  for test in [*whole, *causes.causes(evidence), *added]:
    points.setdefault(test.label, {})[test.depth] = _Interval(
      test.sample.mean, test.sample.half_width, test.sample.count
    )
  hollow = {(x.label, x.depth) for x in added}
  return Plot(
    'causes',
    curves.caption(
      rows,
      'What slows decay of path products (first k layers; log10 of the spectral'
      ' norm of the residual; to the right of 0: slower; the panels have scales'
      ' of their own). First block: the whole difference of trained models is'
      ' the sum of the two below it. Second: both models at temperatures that'
      ' give the same entropy in each layer; softmax without the column bias of'
      ' its logits. Third, open, exploratory: all on the'
      ' logits of softmax, at temperatures that give its entropy in each layer;'
      ' the first is the sum of the two below it.',
      _INTERVAL,
    ),
    (8, 4.2),
    lambda fig: _draw_causes(fig, points, evidence.depths, hollow, rows),
  )


def _draw_causes(fig, points, depths, hollow, rows):
  panels = fig.subplots(1, len(depths), sharey=True, squeeze=False)[0]
  _draw_forest(panels, points, depths, hollow)
  for ax in panels:
    for block in (3, 6):
      ax.axhline(block - 0.5, color='#888888', linewidth=0.6, linestyle=':')
  curves.finish(fig, rows)


def _robustness(variations):
  points, changed = {'a': {}, 'b': {}}, set()
  mine = frames.select(variations, claim=['a', 'b'])
  for x in mine.itertuples():
    points[x.claim].setdefault(x.choice, {})[x.depth] = _Interval(
      x.mean, x.half_width, x.pairs
    )
    if x.changes:
      changed.add((x.claim, x.choice, x.depth))
  depths = sorted(frames.select(variations, claim='a')['depth'].unique())
  heights = [len(x) for x in points.values()]
  return Plot(
    'robustness',
    'Claims a (path products, above) and b (layer outputs, below) under other'
    ' choices: Sinkhorn minus softmax, log10 of the residual (to the right of'
    f' 0: as claimed). Open: another verdict than as fixed. {_INTERVAL}',
    (9, 0.24 * sum(heights) + 1.8),
    lambda fig: _draw_robustness(fig, points, depths, heights, changed),
  )


def _draw_robustness(fig, points, depths, heights, changed):
  panels = fig.subplots(
    2, len(depths), sharey='row', squeeze=False, height_ratios=heights
  )
  for line, (claim, own) in zip(panels, points.items(), strict=True):
    mine = {tuple(rest) for letter, *rest in changed if letter == claim}
    _draw_forest(line, own, depths, mine)
    line[0].set_ylabel(f'claim {claim}')


def _draw_forest(
  panels,
  points: Mapping[str, Mapping[int, _Interval]],
  depths: Sequence[int],
  hollow: Collection[tuple[str, int]] = (),
):
  """A line for each label, a panel for each depth.

  Args:
    panels: where to.
    points: by label and depth.
    depths: of the panels.
    hollow: labels and depths whose markers are open.
  """
  labels = list(points)
  for ax, depth in zip(panels, depths, strict=True):
    ax.axvline(0, color='#888888', linewidth=0.8)
    samples = [points[x].get(depth) for x in labels]
    places = [y for y, x in enumerate(samples) if x and not np.isnan(x.mean)]
    half = np.array(
      [
        samples[y].half_width
        if samples[y].count >= statistics.LEAST_COUNT
        else np.nan
        for y in places
      ]
    )
    ax.errorbar(
      [samples[y].mean for y in places],
      places,
      # Too few pairs have no interval.
      xerr=None if np.isnan(half).all() else half,
      color='#000000',
      marker='o',
      markersize=3.5,
      linestyle='none',
      elinewidth=1,
      capsize=2,
    )
    for y in places:
      if (labels[y], depth) in hollow:
        ax.plot(
          samples[y].mean,
          y,
          color='#000000',
          marker='o',
          markersize=3.5,
          markerfacecolor='white',
          zorder=3,
        )
    for y in set(range(len(labels))).difference(places):
      # Not nothing: no number.
      ax.text(
        0.5,
        y,
        'not resolved',
        fontsize=6,
        color='#666666',
        ha='center',
        va='center',
        transform=ax.get_yaxis_transform(),
      )
    ax.set_title(f'depth {depth:.0f}')
    ax.set_xlabel('difference of log10')
    ax.locator_params(axis='x', nbins=5)
  panels[0].set_yticks(
    range(len(labels)),
    [textwrap.fill(x, 48) for x in labels],
    fontsize=7,
  )
  panels[0].set_ylim(len(labels) - 0.5, -0.5)
