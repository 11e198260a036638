"""What is drawn where values are below the resolution of float64."""

from matplotlib import figure

from analysis.study import decay
from analysis.study import evidence as evidence_lib
from analysis.study import plots
from tests.analysis.study import synthetic


def path_products(resolved):
  """Evidence of a pair at steps 0, 100 and 859; `resolved` by depth."""
  rows = []
  for normalizer in ('softmax', 'sinkhorn'):
    for depth, steps in resolved.items():
      for step in (0, 100, 859):
        count = 100 * (step in steps)
        row = synthetic.row(
          'path_products',
          normalizer,
          0,
          -depth,
          depth,
          **{k: v for k, v in decay.PATHS.items() if k != 'analysis'},
          at='last' if step == 859 else step,
        )
        more = {'step': step, 'count': count, 'below_resolution': 100 - count}
        rows.append(row | more)
  return evidence_lib.Evidence(rows, 24)


def test_along_training_panels_span_all_steps_and_say_what_is_not_resolved():
  everywhere = (0, 100, 859)
  titles = {
    path_products(dict.fromkeys((4, 12, 24), everywhere)): 'as it is',
    path_products({4: everywhere, 12: (0,), 24: ()}): 'collapsed',
  }
  (plot,) = plots.along_training(titles)
  fig = figure.Figure(figsize=plot.size)
  plot.draw(fig)
  whole, collapsed = fig.axes
  assert whole.get_xlim() == collapsed.get_xlim()
  assert whole.get_xlim()[1] > 859
  texts = [x.get_text() for x in collapsed.texts]
  assert 'depth 12 after step 0, 24: not resolved' in texts
  assert not any('not resolved' in x.get_text() for x in whole.texts)
