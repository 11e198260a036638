"""Tokenizers of texts: a byte-level BPE made here, or one made elsewhere."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import hashlib
import importlib.metadata
import logging
import pathlib

import numpy as np

from sinkformer_jax import errors
from sinkformer_jax import paths

logger = logging.getLogger(__name__)

# Changes when the way a BPE is made does.
_RECIPE = 'byte-level BPE, space before the text, no special tokens'


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """What turns texts into numbers.

  Attributes:
    content: the file that says all about it.
    suffix: of its name, '.json' (of the library `tokenizers`) or '.model' (of
      SentencePiece).
    num_pieces: tokens are below this.
    encode: ``texts -> [tokens of each]``, nothing added, nothing cut.
  """

  content: bytes
  suffix: str
  num_pieces: int
  encode: Callable[[Sequence[str]], list[list[int]]]

  @property
  def sha256(self) -> str:
    """Of its file; equal only if they are."""
    return hashlib.sha256(self.content).hexdigest()


def read(path: pathlib.Path) -> Tokenizer:
  """Reads a tokenizer: ``.json`` of `tokenizers`, ``.model`` of SentencePiece.

  Raises:
    errors.DataError: if it is not there or no such file; names it.
  """
  loaders = {'.json': _of_tokenizers, '.model': _of_sentencepiece}
  if path.suffix not in loaders:
    raise errors.DataError(
      f'the tokenizer {path} must be a .json file of the library tokenizers or'
      ' a .model file of SentencePiece.'
    )
  try:
    return loaders[path.suffix](path.read_bytes())
  except FileNotFoundError as error:
    raise errors.DataError(f'there is no tokenizer {path}.') from error
  except Exception as error:
    # The libraries raise plain Exceptions.
    raise errors.DataError(
      f'the tokenizer {path} cannot be read: {error}.'
    ) from error


def trained(texts: Sequence[str], key: str, vocab_size: int) -> Tokenizer:
  """A byte-level BPE of these texts (Sennrich et al. 2016), from the cache.

  Args:
    texts: what it is trained on, if it has not been yet.
    key: identifies the texts.
    vocab_size: number of pieces; fewer if the texts do not have as many.
  """
  version = importlib.metadata.version('tokenizers')
  inputs = f'{_RECIPE} {version} {vocab_size} {key}'
  name = hashlib.sha256(inputs.encode()).hexdigest()
  path = paths.cache_dir() / 'tokenizers' / f'{name}.json'
  if path.exists():
    return read(path)
  logger.info('Training a tokenizer on %d texts', len(texts))
  content = _train(texts, vocab_size)
  try:
    paths.write_whole(path, content)
  except OSError as error:
    logger.warning('%s could not be kept: %s', path, error)
  return _of_tokenizers(content)


def _train(texts, vocab_size):
  # Slow to import, and images have no need of it.
  import tokenizers
  from tokenizers import decoders
  from tokenizers import models
  from tokenizers import pre_tokenizers
  from tokenizers import trainers

  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    # Every byte has a piece: no text is out of vocabulary.
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator(texts, trainer)
  return bpe.to_str(pretty=True).encode()


def _of_tokenizers(content):
  import tokenizers

  loaded = tokenizers.Tokenizer.from_str(content.decode())
  loaded.no_padding()
  loaded.no_truncation()

  def encode(texts):
    encoded = loaded.encode_batch_fast(list(texts), add_special_tokens=False)
    return [x.ids for x in encoded]

  vocabulary = loaded.get_vocab(with_added_tokens=True)
  return Tokenizer(content, '.json', max(vocabulary.values()) + 1, encode)


def _of_sentencepiece(content):
  import sentencepiece

  loaded = sentencepiece.SentencePieceProcessor(model_proto=content)

  def encode(texts):
    return loaded.encode(list(texts), out_type=int)

  return Tokenizer(content, '.model', loaded.get_piece_size(), encode)


def to_array(
  sequences: Sequence[Sequence[int]], max_length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Packs sequences of tokens into one array, filled up with zeros.

  Args:
    sequences: tokens of each text.
    max_length: longer ones are cut.

  Returns:
    Tokens ``[texts, max_length]`` and how many of each are valid, ``[texts]``.
  """
  tokens = np.zeros((len(sequences), max_length), np.int32)
  lengths = np.array([min(len(x), max_length) for x in sequences], np.int32)
  for row, sequence, length in zip(tokens, sequences, lengths, strict=True):
    row[:length] = sequence[:length]
  return tokens, lengths
