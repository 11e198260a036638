"""Tables and statistics over runs."""

import csv
import gzip
import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis.common import frames


def row(normalizer, seed, mean, **more):
  return {
    'run': f'{normalizer}/seed{seed}',
    'normalizer': normalizer,
    'group': normalizer,
    'setting': 0,
    'seed': seed,
    'step': 10,
    'quantity': 'path',
    'depth': 3,
    'mean': mean,
    'std': 0.5,
    'below_resolution': 0,
    'invalid': 0,
    'count': 4,
    **more,
  }


def table(*rows):
  return pd.DataFrame(rows)


def records(found):
  return found.to_dict('records')


def test_over_seeds_tells_seeds_from_examples():
  rows = [row('softmax', 0, -1.0, std=0.2), row('softmax', 1, -3.0, std=0.4)]
  (point,) = records(frames.over_seeds(table(*rows)))
  assert point['mean'] == -2
  assert point['std_examples'] == pytest.approx(0.3)
  assert point['std_seeds'] == pytest.approx(math.sqrt(2))
  assert (point['num_seeds'], point['seeds'], point['count']) == (2, '0 1', 8)
  (point,) = records(frames.over_seeds(table(rows[0])))
  assert math.isnan(point['std_seeds'])
  # A run without a value is no reason to take the mean of the others.
  rows.append(row('softmax', 2, math.nan, invalid=4))
  assert math.isnan(frames.over_seeds(table(*rows))['mean'][0])


def test_differences_are_of_pairs():
  (point,) = records(
    frames.differences(
      table(
        row('softmax', 0, -1.0),
        row('softmax', 1, -2.0),
        row('sinkhorn', 1, -1.5, below_resolution=2),
        row('sinkhorn', 0, -0.8),
        row('sinkhorn', 7, 100.0),
      )
    )
  )
  assert point['difference'] == pytest.approx(0.35)
  # Student's t with 1 degree of freedom is Cauchy's: the quantile is a tangent.
  half_width = math.tan(math.pi * 0.475) * 0.15
  assert point['half_width'] == pytest.approx(half_width)
  assert (point['num_pairs'], point['left_out']) == (2, 2)
  # Other depths, settings and weights make no pairs.
  softmax = row('softmax', 0, 1.0)
  for other in ({'depth': 4}, {'setting': 1}):
    pair = table(softmax, row('sinkhorn', 0, 1.0, **other))
    assert frames.differences(pair).empty
  pair = table(*(row(x, 0, 1.0, setting=None) for x in ('softmax', 'sinkhorn')))
  assert frames.differences(pair).empty


def test_rows_whose_keys_are_missing_are_not_dropped():
  """Plain numbers have no norm; one part has no such column, one has None."""
  softmax, sinkhorn = (
    row('softmax', 0, -1.0),
    row('sinkhorn', 0, -3.0, norm=None),
  )
  parts = [
    table(softmax),
    table(sinkhorn),
    table(row('softmax', 0, 5.0, norm='spectral')),
  ]
  whole = frames.concat(parts)
  assert sorted(frames.over_seeds(whole)['mean']) == [-3, -1, 5]
  (point,) = records(frames.differences(whole))
  assert point['difference'] == -2
  assert math.isnan(point['half_width'])


def test_equal_differences_have_an_interval_of_no_width():
  pairs = [
    row(x, s, m) for s in (0, 1, 2) for x, m in (('softmax', 1), ('b', 2))
  ]
  (point,) = records(frames.differences(table(*pairs)))
  assert (point['difference'], point['half_width']) == (1, 0)


def test_select_takes_values_and_lists():
  found = table(row('softmax', 0, 1.0), row('sinkhorn', 1, 2.0, norm='dong'))
  assert list(frames.select(found, seed=[0, 1], normalizer='b')['mean']) == []
  assert list(frames.select(found, seed=[0, 2])['mean']) == [1]
  assert list(frames.select(found, norm='dong')['mean']) == [2]
  assert frames.select(found, unknown=3).empty


def test_value_statistics_leave_out_and_count_nan():
  values = np.array([[1.0, 3.0], [np.nan, 5.0], [np.nan, np.nan]])
  found = frames.value_statistics(values)
  np.testing.assert_array_equal(found['mean'], [2, 5, np.nan])
  np.testing.assert_array_equal(found['std'], [1, 0, np.nan])
  np.testing.assert_array_equal(found['largest'], [3, 5, np.nan])
  np.testing.assert_array_equal(found['count'], [2, 1, 0])
  np.testing.assert_array_equal(found['invalid'], [0, 1, 2])


def test_by_depth():
  found = frames.by_depth({'run': 'a', 'seed': None}, {'mean': np.ones(2)}, 1)
  assert list(found) == ['run', 'seed', 'depth', 'mean']
  assert list(found['depth']) == [1, 2]
  assert found['seed'].isna().all()


def test_write(tmp_path):
  rows = table(
    {'run': 'a, "b"', 'mean': math.nan}, {'mean': -math.inf, 'depth': 2}
  )
  frames.write(tmp_path / 't', rows)
  with (tmp_path / 't.csv').open() as file:
    assert list(csv.DictReader(file)) == [
      {'run': 'a, "b"', 'mean': '', 'depth': ''},
      {'run': '', 'mean': '-inf', 'depth': '2'},
    ]
  assert json.loads((tmp_path / 't.json').read_text()) == [
    {'run': 'a, "b"', 'mean': None, 'depth': None},
    {'run': None, 'mean': None, 'depth': 2},
  ]


def test_write_raw(tmp_path):
  parts = [
    frames.raw(
      {'run': name},
      depth=np.arange(2)[:, None],
      example=np.array([7, 9, 4]),
      log10=np.array([[0.1, -np.inf, np.nan], [1e-300, 2, 3]]),
    )
    for name in ('a,"b"', 'c')
  ]
  frames.write_raw(tmp_path / 'raw', frames.concat(parts))
  with gzip.open(tmp_path / 'raw.csv.gz', 'rt') as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 12
  assert rows[4] == {
    'run': 'a,"b"',
    'depth': '1',
    'example': '9',
    'log10': '2',
  }
  assert [x['log10'] for x in rows[:4]] == ['0.1', '-inf', '', '1e-300']
  with gzip.open(tmp_path / 'raw.json.gz', 'rt') as file:
    content = json.load(file)
  assert content['run'][5:7] == ['a,"b"', 'c']
  assert content['log10'][:4] == [0.1, None, None, 1e-300]


def test_pairs_are_of_one_number_of_tokens():
  """Groups of examples by length are not paired with each other."""
  rows = [
    row(x, 0, mean, tokens=tokens)
    for x, shift in (('softmax', 0.0), ('sinkhorn', 0.5))
    for tokens, mean in ((10.0, -1.0 + shift), (20.0, -4.0 + shift))
  ]
  found = frames.differences(table(*rows))
  assert list(found['tokens']) == [10, 20]
  assert list(found['difference']) == [0.5, 0.5]
  assert list(found['num_pairs']) == [1, 1]
