"""Captures of runs: a forward pass on held-out examples.

It runs in float64 unless told otherwise: the residual of a nearly uniform
attention matrix is what remains after cancellation, and float32 leaves little
of it. Dropout is off.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import pathlib

import flax.linen as nn
import jax
import ml_collections
import numpy as np
import optax

from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import normalizers
from sinkformer_jax import numerics
from sinkformer_jax import training
from sinkformer_jax.rank import captures
from sinkformer_jax.rank import residuals
from sinkformer_jax.training import steps

DTYPES = ('float64', 'float32')


@numerics.fixed()
def untrained_run(
  config: ml_collections.ConfigDict,
  info: data.DatasetInfo,
  normalizer: normalizers.Normalizer | None = None,
) -> training.Run:
  """A model as it is initialised: what step 0 of its training would hold.

  Args:
    config: a whole config.
    info: of the data set.
    normalizer: takes the place of the config's.
  """
  model = models.create_model(config.model, info, normalizer)
  state = jax.jit(
    lambda: steps.create_state(model, optax.identity(), info, config.seed)
  )()
  return training.Run(
    pathlib.Path('untrained'), config, info, model, state.params, step=0
  )


def capture(
  run: training.Run,
  num_examples: int = 64,
  *,
  split: str = 'test',
  seed: int = 0,
  ablation: encoder.Ablation = encoder.Ablation(),
  dtype: str = 'float64',
  chunk_size: int = 8,
  dataset: data.Dataset | None = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> captures.Capture:
  """Captures a run on a fixed set of held-out examples.

  Args:
    run: see `training.load_run` and `untrained_run`.
    num_examples: how many. Examples are the first of a permutation that depends
      on `seed` and `split` alone: the same for both runs of a pair, and fewer
      examples are a part of more.
    split: 'train', 'validation' or 'test'.
    seed: of the choice of examples.
    ablation: parts to switch off.
    dtype: of the forward pass, one of `DTYPES`.
    chunk_size: examples worked on at a time; no result depends on it.
    dataset: the data of the run, if it is loaded already; otherwise it is
      loaded as the run's config says.
    progress: called with the number of examples done and that of all.

  Returns:
    The capture. It holds ``layers * num_examples * 2 heads n^2`` numbers and
    more; `capture_chunks` holds one chunk of them at a time.

  Raises:
    errors.UserError: for examples that are not there, or other data than the
      run was trained on.
  """
  chunks = _chunks(
    run,
    num_examples,
    split,
    seed,
    ablation,
    dtype,
    chunk_size,
    dataset,
    progress,
  )
  first = next(chunks)
  # Filled chunk by chunk: putting chunks together would hold all twice.
  whole = {
    name: np.empty((x.shape[0], num_examples, *x.shape[2:]), x.dtype)
    for name, x in captures.arrays_of(first).items()
  }
  masks, examples = [], []
  for chunk in itertools.chain([first], chunks):
    done = len(examples)
    examples += chunk.about['examples']
    for name, x in captures.arrays_of(chunk).items():
      whole[name][:, done : len(examples)] = x
    masks.append(chunk.mask)
  mask = None if first.mask is None else np.concatenate(masks)
  about = {**first.about, 'examples': examples}
  return captures.described(captures.Capture(**whole, mask=mask, about=about))


def capture_chunks(
  run: training.Run,
  num_examples: int = 64,
  *,
  split: str = 'test',
  seed: int = 0,
  ablation: encoder.Ablation = encoder.Ablation(),
  dtype: str = 'float64',
  chunk_size: int = 8,
  dataset: data.Dataset | None = None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[captures.Capture]:
  """`capture`, but one chunk after the other, for what need not be held whole.

  ``about['examples']`` and what is not finite are the chunk's.
  """
  chunks = _chunks(
    run,
    num_examples,
    split,
    seed,
    ablation,
    dtype,
    chunk_size,
    dataset,
    progress,
  )
  return map(captures.described, chunks)


def _chunks(
  run,
  num_examples,
  split,
  seed,
  ablation,
  dtype,
  chunk_size,
  dataset,
  progress,
):
  residuals.check_name(dtype, DTYPES, 'dtype')
  dataset = data.load(run.config.data) if dataset is None else dataset
  training.check_dataset(run, dataset)
  examples = _choose(run.info, split, num_examples, seed)
  if chunk_size < 1:
    raise errors.UserError(f'chunk_size={chunk_size} must be at least 1.')
  # All at once: texts are padded to the longest among them.
  arrays = dataset.splits[split]
  batch = dataset.preprocess({name: x[examples] for name, x in arrays.items()})
  inputs, mask = data.model_inputs(batch)
  model = _with_dtype(run.model, dtype)
  about = _about(run, split, seed, ablation, dtype)

  def forward(params, inputs, mask):
    _, sown = model.apply(
      {'params': params},
      inputs,
      mask=mask,
      ablation=ablation,
      mutable=[attention.CAPTURE],
    )
    return sown[attention.CAPTURE]['encoder']

  with _computing():
    forward = jax.jit(forward)
    params = jax.tree.map(
      lambda x: np.asarray(x, dtype), jax.device_get(run.params)
    )
  for start in range(0, num_examples, chunk_size):
    places = np.arange(start, min(start + chunk_size, num_examples))
    # The last chunk is filled up, so that nothing is compiled for it.
    padded = np.resize(places, min(chunk_size, num_examples))
    with _computing():
      sown = jax.device_get(
        forward(
          params,
          np.asarray(inputs[padded]),
          None if mask is None else mask[padded],
        )
      )
    blocks, size = sown['blocks'], len(places)
    chunk = captures.Capture(
      logits=blocks['attention']['logits'][:, :size],
      attention=blocks['attention']['attention'][:, :size],
      attention_output=blocks['attention_output'][:, :size],
      hidden=np.concatenate([sown['embedding'][None], blocks['hidden']])[
        :, :size
      ],
      mask=_token_mask(mask, places, sown['embedding'].shape[1]),
      about={**about, 'examples': [int(i) for i in examples[places]]},
    )
    progress(int(places[-1]) + 1, num_examples)
    yield chunk


@contextlib.contextmanager
def _computing():
  """Float64, full precision of matrix products, and a device that has both."""
  # A TPU has no float64 of its own.
  backend = 'cpu' if jax.default_backend() == 'tpu' else None
  with (
    numerics.fixed(x64=True),
    jax.default_matmul_precision('highest'),
    jax.default_device(jax.local_devices(backend=backend)[0]),
  ):
    yield


def _with_dtype(model: nn.Module, dtype: str) -> nn.Module:
  return model.clone(
    dtype=np.dtype(dtype), encoder=model.encoder.clone(dtype=np.dtype(dtype))
  )


def _choose(info, split, num_examples, seed):
  if split not in info.splits:
    raise errors.UserError(
      f'split={split!r} must be one of {", ".join(info.splits)}.'
    )
  there = info.splits[split]
  if not 1 <= num_examples <= there:
    raise errors.UserError(
      f'num_examples={num_examples} must be from 1 to {there}, the size of'
      f' the {split} split of {info.name}.'
    )
  return np.random.default_rng(seed).permutation(there)[:num_examples]


def _token_mask(mask, places, num_tokens):
  """The mask of a chunk; tokens that the model puts in front are valid."""
  if mask is None:
    return None
  mask = np.asarray(mask, bool)[places]
  front = num_tokens - mask.shape[1]
  return np.pad(mask, ((0, 0), (front, 0)), constant_values=True)


def _about(run, split, seed, ablation, dtype):
  config = run.config
  normalizer = _normalizer_name(run)
  iterations = {'softmax': 0, 'sinkhorn': config.model.num_iters}
  notes = []
  if normalizer != config.model.normalizer:
    notes.append(
      f'trained with {config.model.normalizer}, read with {normalizer}'
    )
  if run.step == 0:
    notes.append('not trained (step 0)')
  elif not (run.workdir / 'result.json').exists():
    notes.append(f'unfinished run: step {run.step} of {config.total_steps}')
  if run.info.provenance['notice']:
    notes.append(run.info.provenance['notice'])
  notes += _damaged(run.params)
  return {
    'run': str(run.workdir),
    'dataset': run.info.name,
    'normalizer': normalizer,
    'num_iters': iterations.get(normalizer),
    'seed': config.seed,
    'step': run.step,
    'split': split,
    'example_seed': seed,
    'ablation': dataclasses.asdict(ablation),
    'dtype': dtype,
    'row_sums': _row_sums(run),
    'notes': notes,
  }


def _normalizer_name(run):
  """The name of what the model uses, which a config need not know."""
  logits = 5 * np.random.default_rng(0).standard_normal((1, 1, 8, 8))
  config = run.config.model
  with _computing():
    used = np.asarray(run.model.encoder.normalizer(logits, None))
    for name in (config.normalizer, *normalizers.NORMALIZERS):
      make = normalizers.NORMALIZERS.get(name)
      if name == 'sinkhorn_half_updates' and not config.num_iters:
        continue  # It needs at least one.
      if make and np.array_equal(used, make(config.num_iters)(logits, None)):
        return name
  return 'other'


def _row_sums(run):
  """What the rows of each head sum to, if its heads talk."""
  attention = run.params['encoder']['blocks']['attention']
  if 'weights_mix' not in attention:
    return None
  sums = np.asarray(attention['weights_mix'], np.float64).sum(1)
  return [[x if np.isfinite(x) else None for x in row] for row in sums.tolist()]


def _damaged(params):
  """Parameters that are not finite, with their layer."""
  notes = []
  for path, x in jax.tree.flatten_with_path(jax.device_get(params))[0]:
    name = '/'.join(key.key for key in path)
    finite = np.isfinite(x)
    if finite.all():
      continue
    layers = ''
    if '/blocks/' in name:
      bad = 1 + np.flatnonzero(~finite.reshape(len(x), -1).all(1))
      layers = f' in layer {", ".join(map(str, bad))}'
    notes.append(f'parameter {name} is not finite{layers}')
  return notes
