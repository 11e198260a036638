"""What every data set ends in, and the rule that splits it."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
  """What is known about a data set without its arrays.

  Attributes:
    name: name in configs.
    num_classes: number of classes.
    input_shape: shape of one example, without a batch axis; of a text, its
      largest number of tokens.
    splits: number of examples of each split.
    provenance: where it came from, as it is written to `provenance.json`:
      ``source``, ``origin``, ``checksums``, ``fingerprint`` (of the splits'
      content), ``split_rule``, ``tried`` (sources that failed, and why) and
      ``notice`` (to be shown with every result, or ''). Of texts also
      ``tokenizer``, of images ``unreadable``; see `text` and `images`.
    vocab_size: number of different tokens of a text; None for images.
    task: what is predicted, a name in `tasks.TASKS`.
  """

  name: str
  num_classes: int
  input_shape: tuple[int, ...]
  splits: Mapping[str, int]
  provenance: Mapping[str, Any]
  vocab_size: int | None = None
  task: str = 'classification'

  def example(self) -> np.ndarray:
    """A batch of one example, all zeros, to make a model's parameters with."""
    dtype = np.float32 if self.vocab_size is None else np.int32
    return np.zeros((1, *self.input_shape), dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Arrays in memory, or mapped from a file.

  Attributes:
    info: what is known about them.
    splits: 'train', 'validation' and 'test', each ``{'image', 'label'}`` or
      ``{'tokens', 'length', 'label'}`` with examples along the first axis.
    preprocess: turns the arrays of a batch into what the model takes: 'label',
      and 'image' or 'tokens' and 'mask'.
    augment: ``(arrays, keys) -> arrays``, applied to batches of training
      before `preprocess`; keys are ``[batch, 3]``, of seed, epoch and index.
    bucket_lengths: lengths that batches of texts are padded to, rising.
    tokenizer: a `tokenizer.Tokenizer` for texts; a run keeps a copy.
  """

  info: DatasetInfo
  splits: Mapping[str, Arrays]
  preprocess: Callable[[Arrays], Arrays]
  augment: Callable[[Arrays, np.ndarray], Arrays] | None = None
  bucket_lengths: tuple[int, ...] = ()
  tokenizer: Any = None


SPLIT_RULE = (
  'stratified by class, ordered by the SHA-256 of each example: the same'
  ' members whatever the order of the files, the seed or the host'
)


def digests(examples: Sequence[np.ndarray | str]) -> np.ndarray:
  """SHA-256 of each example's bytes, ``[examples]`` of hex strings."""

  def digest(x):
    content = x.encode() if isinstance(x, str) else x.tobytes()
    return hashlib.sha256(content).hexdigest()

  return np.array([digest(x) for x in examples])


def order_by_content(arrays: Arrays, key: str = 'image') -> Arrays:
  """Examples in the order of their digests, so that file order is no matter."""
  order = np.argsort(digests(arrays[key]), kind='stable')
  return {name: array[order] for name, array in arrays.items()}


def split(arrays: Arrays, sizes: Mapping[str, int]) -> dict[str, Arrays]:
  """Cuts ordered examples into disjoint splits, stratified by label.

  Args:
    arrays: examples in the order of their digests, with a 'label'.
    sizes: number of examples of each split; adds up to all of them.

  Returns:
    The splits, each again in the order of the digests. A class has its share
    of each split to within two examples.
  """
  labels = arrays['label']
  if sum(sizes.values()) != len(labels):
    raise ValueError(f'{dict(sizes)} do not add up to {len(labels)} examples.')
  # Where each example stands within its class, from 0 to 1: in this order
  # every stretch of examples has all classes in their proportions.
  place = np.empty(len(labels))
  for label in np.unique(labels):
    members = np.flatnonzero(labels == label)
    place[members] = (np.arange(len(members)) + 0.5) / len(members)
  order = np.argsort(place, kind='stable')
  splits, start = {}, 0
  for name, size in sizes.items():
    chosen = np.sort(order[start : start + size])
    splits[name] = {key: array[chosen] for key, array in arrays.items()}
    start += size
  return splits


def fingerprint(splits: Mapping[str, Arrays]) -> str:
  """SHA-256 over the content of all splits; equal only if all are equal."""
  total = hashlib.sha256()
  for name in sorted(splits):
    for key in sorted(splits[name]):
      array = np.ascontiguousarray(splits[name][key])
      total.update(f'{name}/{key} {array.shape} {array.dtype}'.encode())
      total.update(array)
  return total.hexdigest()
