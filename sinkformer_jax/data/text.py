"""Texts to classify: cleaned, split, tokenized, in batches of a like length."""

from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import io
import logging
from typing import Any

import numpy as np

from sinkformer_jax import errors
from sinkformer_jax import paths
from sinkformer_jax import rules
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import tokenizer as tokenizer_lib

logger = logging.getLogger(__name__)

# Fields of a config that only some data sets have.
RULES = {
  'data.max_length': rules.integer(1, below=rules.MOST_UNITS),
  'data.bucket_lengths': rules.lengths,
  # Every byte has a piece.
  'data.vocab_size': rules.integer(256, below=rules.MOST_UNITS),
  'data.tokenizer': rules.text,
}


def examples(
  texts: Sequence[str | bytes],
  labels: Sequence[int],
  num_classes: int,
  names: Sequence[str],
) -> dataset_lib.Arrays:
  """Checks what a source has given.

  Args:
    texts: as strings or as UTF-8.
    labels: from 0.
    num_classes: labels are below this.
    names: where each is from, for errors.

  Returns:
    ``{'text', 'label'}``, texts without white space around them.

  Raises:
    errors.DataError: for a text that is empty or not UTF-8 and for a label out
      of range; names it.
  """
  cleaned = np.empty(len(texts), object)
  for i, (text, label, name) in enumerate(
    zip(texts, labels, names, strict=True)
  ):
    try:
      text = text.decode() if isinstance(text, bytes) else text
      text.encode()  # JSON can name half a character.
    except UnicodeError as error:
      raise errors.DataError(f'{name} is not UTF-8: {error}.') from error
    cleaned[i] = text.strip()
    if not cleaned[i]:
      raise errors.DataError(f'{name} has an empty text.')
    if label not in range(num_classes):
      raise errors.DataError(
        f'{name} has label {label!r}, which must be from 0 to'
        f' {num_classes - 1}.'
      )
  return {'text': cleaned, 'label': np.array(labels, np.int32)}


def load(
  name: str,
  num_classes: int,
  splits: Mapping[str, dataset_lib.Arrays],
  provenance: Mapping[str, Any],
  *,
  notice: str,
  validation_share: float,
  max_length: int,
  bucket_lengths: tuple[int, ...],
  vocab_size: int,
  tokenizer: str,
) -> dataset_lib.Dataset:
  """Makes a data set of checked texts, see `examples`.

  The test split stays as it was published. Training texts that occur in it,
  and those that repeat another, are left out.

  Args:
    name: of the set, in configs.
    num_classes: number of classes.
    splits: published 'train', of which a part becomes the validation split,
      and 'test'.
    provenance: with ``source`` and ``origin``.
    notice: see `dataset.DatasetInfo`.
    validation_share: part of the training texts.
    max_length: texts are cut to this number of tokens.
    bucket_lengths: shorter lengths that batches are padded to where all texts
      are short enough.
    vocab_size: pieces of the tokenizer that is trained on the training split.
    tokenizer: file of a tokenizer that takes its place; '' for none.

  Returns:
    The data set; the provenance has ``left_out``, ``cut`` (texts longer than
    `max_length`, of each split) and ``tokenizer``.

  Raises:
    errors.DataError: if too few texts are left, the tokenizer cannot be read or
      makes no tokens of a text, or a file of the cache is damaged.
  """
  train, left_out = _without_repetitions(splits['train'], splits['test'])
  train, test = (
    dataset_lib.order_by_content(x, 'text') for x in (train, splits['test'])
  )
  num_train = len(train['label'])
  num_validation = round(validation_share * num_train)
  if not num_validation or not len(test['label']):
    raise errors.DataError(
      f'{provenance["origin"]}: {num_train} training texts and'
      f' {len(test["label"])} test texts are too few.'
    )
  sizes = {'validation': num_validation, 'train': num_train - num_validation}
  parts = {**dataset_lib.split(train, sizes), 'test': test}
  texts = {x: parts[x] for x in ('train', 'validation', 'test')}
  fingerprint = dataset_lib.fingerprint(
    {
      split: {**x, 'text': dataset_lib.digests(x['text'])}
      for split, x in texts.items()
    }
  )
  if tokenizer:
    path = paths.resolve(tokenizer, 'config.data.tokenizer')
    pieces, made = tokenizer_lib.read(path), str(path)
  else:
    pieces = tokenizer_lib.trained(
      texts['train']['text'], fingerprint, vocab_size
    )
    made = 'trained on the training split'
  tokenized = _tokenized(texts, fingerprint, pieces, made, max_length)
  cut = {split: int(tokenized[f'{split}/cut']) for split in texts}
  splits = {
    split: {
      'tokens': tokenized[f'{split}/tokens'],
      'length': tokenized[f'{split}/length'],
      'label': x['label'],
    }
    for split, x in texts.items()
  }
  info = dataset_lib.DatasetInfo(
    name=name,
    num_classes=num_classes,
    input_shape=(max_length,),
    splits={split: len(x['label']) for split, x in splits.items()},
    provenance={
      **provenance,
      'notice': notice,
      'split_rule': dataset_lib.SPLIT_RULE,
      'fingerprint': fingerprint,
      'left_out': left_out,
      'cut': cut,
      'tokenizer': {
        'origin': made,
        'pieces': pieces.num_pieces,
        'sha256': pieces.sha256,
      },
    },
    vocab_size=pieces.num_pieces,
  )
  logger.info('%s from %s: %s', name, provenance['origin'], dict(info.splits))
  logger.info('texts cut to %d tokens: %s', max_length, cut)
  if left_out:
    logger.warning('training texts left out of %s: %s', name, left_out)
  if notice:
    logger.warning('RESULTS ARE %s', notice.upper())
  lengths = (*bucket_lengths, max_length)
  return dataset_lib.Dataset(
    info,
    splits,
    lambda batch: pad(batch, lengths),
    bucket_lengths=lengths,
    tokenizer=pieces,
  )


def subset_notice(
  title: str,
  splits: Mapping[str, dataset_lib.Arrays],
  official: Mapping[str, int],
) -> str:
  """What is to be said with every result of a part of a set; '' if whole."""
  sizes = {split: len(x['label']) for split, x in splits.items()}
  parts = [
    f'{size:,} of {official[split]:,} {split} examples'
    for split, size in sizes.items()
    if size != official[split]
  ]
  return f'made from {" and ".join(parts)} of {title}' if parts else ''


def _without_repetitions(train, test):
  """Training texts that are in no test and occur once, and counts of others."""
  tested = set(test['text'])
  labels: dict[str, set[int]] = {}
  for text, label in zip(train['text'], train['label'], strict=True):
    labels.setdefault(text, set()).add(int(label))
  seen, keep, left_out = set(), [], {}
  for i, text in enumerate(train['text']):
    if text in tested:
      reason = 'in the test split'
    elif len(labels[text]) > 1:
      reason = 'with two labels'
    elif text in seen:
      reason = 'repeated'
    else:
      seen.add(text)
      keep.append(i)
      continue
    left_out[reason] = left_out.get(reason, 0) + 1
  return {key: array[keep] for key, array in train.items()}, left_out


def _tokenized(texts, fingerprint, pieces, made, max_length):
  """``{split/tokens, split/length, split/cut}`` of all splits, kept."""
  inputs = f'{fingerprint} {pieces.sha256} {max_length}'
  key = hashlib.sha256(inputs.encode()).hexdigest()
  path = paths.cache_dir() / 'tokens' / f'{key}.npz'
  if path.exists():
    try:
      with np.load(path) as kept:
        return dict(kept)
    except Exception as error:
      # NumPy and zipfile raise many kinds.
      raise errors.DataError(
        f'the cached tokens {path} are damaged ({error}); delete the file.'
      ) from error
  arrays = {}
  for split, x in texts.items():
    sequences = pieces.encode(x['text'])
    if [] in sequences:
      empty = x['text'][sequences.index([])]
      raise errors.DataError(
        f'the tokenizer ({made}) makes no tokens of the text {empty[:60]!r}.'
      )
    tokens, length = tokenizer_lib.to_array(sequences, max_length)
    arrays[f'{split}/tokens'], arrays[f'{split}/length'] = tokens, length
    arrays[f'{split}/cut'] = sum(len(y) > max_length for y in sequences)
  content = io.BytesIO()
  np.savez(content, **arrays)
  try:
    paths.write_whole(path, content.getbuffer())
  except OSError as error:
    logger.warning('%s could not be kept: %s', path, error)
  return arrays


def pad(
  batch: dataset_lib.Arrays, lengths: Sequence[int]
) -> dataset_lib.Arrays:
  """Cuts the padding of a batch to the least of `lengths` that holds it.

  Args:
    batch: ``tokens`` ``[batch, max_length]``, ``length`` and ``label``.
    lengths: rising.

  Returns:
    ``tokens`` and ``mask`` (True for valid ones) ``[batch, length]``, and
    ``label``.
  """
  length = lengths[np.searchsorted(lengths, batch['length'].max())]
  return {
    'tokens': batch['tokens'][:, :length],
    'mask': np.arange(length) < batch['length'][:, None],
    'label': batch['label'],
  }
