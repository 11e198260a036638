"""Groups of texts by length; see also `text_test`."""

import numpy as np

from analysis import sequence_length


def test_groups():
  lengths = np.random.default_rng(0).integers(5, 200, 100)
  found = sequence_length.groups(lengths)
  assert len(found) == 5
  assert max(map(len, found)) < 25
  assert sorted(np.concatenate(found)) == list(range(100))
  for shorter, longer in zip(found, found[1:], strict=False):
    assert lengths[shorter].max() < lengths[longer].min()


def test_examples_of_one_length_are_one_group():
  (members,) = sequence_length.groups(np.full(7, 50))
  assert list(members) == list(range(7))
  found = sequence_length.groups(np.array([3, 3, 3, 3, 3, 9]))
  assert [len(x) for x in found] == [5, 1]
