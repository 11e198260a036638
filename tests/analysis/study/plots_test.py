"""What is drawn where values are below the resolution of float64."""

from matplotlib import figure
import pandas as pd

from analysis.study import evidence as evidence_lib
from analysis.study import plots
from analysis.study.claims import decay
from tests.analysis.study import synthetic


def path_products(softmax, sinkhorn=None, seed=0):
  """Evidence of a pair at steps 0, 100 and 859; resolved ones by depth."""
  rows = []
  resolved = {'softmax': softmax, 'sinkhorn': sinkhorn or softmax}
  for normalizer, by_depth in resolved.items():
    for depth, steps in by_depth.items():
      for step in (0, 100, 859):
        count = 100 * (step in steps)
        row = synthetic.row(
          'path_products',
          normalizer,
          seed,
          -depth - seed,
          depth,
          **{k: v for k, v in decay.PATHS.items() if k != 'analysis'},
          at='last' if step == 859 else step,
        )
        more = {'step': step, 'count': count, 'below_resolution': 100 - count}
        rows.append(row | more)
  return evidence_lib.Evidence(pd.DataFrame(rows), 24)


def test_along_training_panels_span_all_steps_and_say_what_is_not_resolved():
  everywhere = (0, 100, 859)
  all_depths = dict.fromkeys((4, 12, 24), everywhere)
  titles = {
    path_products(all_depths): 'as it is',
    path_products({4: everywhere, 12: (0,), 24: ()}): 'collapsed',
    path_products(all_depths, {4: everywhere, 12: (0,), 24: ()}): 'one of them',
  }
  (plot,) = plots.along_training(titles)
  fig = figure.Figure(figsize=plot.size)
  plot.draw(fig)
  whole, collapsed, one = fig.axes
  assert whole.get_xlim() == collapsed.get_xlim()
  assert whole.get_xlim()[1] > 859
  texts = [x.get_text() for x in collapsed.texts]
  assert 'depth 12 after step 0, 24: not resolved' in texts
  assert not any('not resolved' in x.get_text() for x in whole.texts)
  (said,) = (x.get_text() for x in one.texts if 'not resolved' in x.get_text())
  assert ' '.join(said.split()) == (
    'depth 12 of sinkhorn after step 0, 24 of sinkhorn: not resolved'
  )


def test_means_along_training_are_of_all_pairs_or_of_none():
  everywhere = dict.fromkeys((4, 12, 24), (0, 100, 859))
  pairs = [
    path_products(everywhere),
    path_products(everywhere | {24: (0, 859)}, seed=1),
  ]
  rows = pd.concat([pair.table for pair in pairs])
  titles = {evidence_lib.Evidence(rows, 24): 'two', pairs[0]: 'one'}
  (plot,) = plots.along_training(titles)
  fig = figure.Figure(figsize=plot.size)
  plot.draw(fig)
  curves = [
    list(line.get_ydata())
    for line in fig.axes[0].lines
    if len(line.get_xdata())
  ]
  assert [-4.5, -4.5, -4.5] in curves
  assert [-24.5, -24.5] in curves  # Without step 100.
