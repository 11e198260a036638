"""Captures against the model itself and a forward pass written out in NumPy."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from configs import mnist_sinkhorn
from sinkformer_jax import attention
from sinkformer_jax import data
from sinkformer_jax import encoder
from sinkformer_jax import errors
from sinkformer_jax import models
from sinkformer_jax import normalizers
from sinkformer_jax import rank
from sinkformer_jax import sinkhorn
from sinkformer_jax import training
from sinkformer_jax.rank.captures import non_finite
from sinkformer_jax.rank.captures import validate
from tests import encoder_test

# They train and load runs: a minute of one core.
pytestmark = pytest.mark.slow

ARRAYS = ('logits', 'attention', 'attention_output', 'hidden')
NUM = 4


def get_config():
  """Of the size that the oracle of the encoder's tests is made for."""
  config = mnist_sinkhorn.get_config('tiny')
  config.total_steps, config.checkpoint.every_steps = 4, 2
  config.optimizer.warmup_steps = 2
  config.model.num_layers = encoder_test.LAYERS
  config.model.width = encoder_test.WIDTH
  config.model.num_heads = encoder_test.HEADS
  config.model.dropout_rate = 0.5
  return config


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('capture') / 'run'
  training.train_and_evaluate(get_config(), workdir)
  return workdir


@pytest.fixture(scope='module')
def run(workdir):
  return training.load_run(workdir)


@pytest.fixture(scope='module')
def dataset():
  return data.load(get_config().data)


@pytest.fixture(scope='module')
def capture(run):
  return rank.capture(run, NUM)


def untrained(dataset, normalizer='softmax', **options):
  config = get_config()
  config.model.update(normalizer=normalizer, **options)
  return rank.untrained_run(config, dataset.info)


def changed(run, change):
  """The run with `change` made to a copy of its parameters in NumPy."""
  params = jax.tree.map(np.array, jax.device_get(run.params))
  change(params)
  return dataclasses.replace(run, params=params)


def images(dataset, capture):
  arrays = dataset.splits['test']
  taken = {k: x[capture.about['examples']] for k, x in arrays.items()}
  return dataset.preprocess(taken)['image']


def applied(run, inputs, **options):
  """What the float32 model captures, by name."""
  _, sown = run.model.apply(
    {'params': run.params}, inputs, mutable=[attention.CAPTURE], **options
  )
  sown = sown[attention.CAPTURE]['encoder']
  blocks = sown['blocks']
  return {
    **blocks['attention'],
    'attention_output': blocks['attention_output'],
    'hidden': np.concatenate([sown['embedding'][None], blocks['hidden']]),
  }


def assert_close(capture, expected, tolerance):
  for name in ARRAYS:
    np.testing.assert_allclose(
      getattr(capture, name), expected[name], rtol=0, atol=tolerance
    )


def test_equals_the_float32_model(run, dataset, capture):
  n, width, heads = 17, encoder_test.WIDTH, encoder_test.HEADS
  layers = encoder_test.LAYERS
  assert capture.logits.shape == (layers, NUM, heads, n, n)
  assert capture.attention.shape == (layers, NUM, heads, n, n)
  assert capture.attention_output.shape == (layers, NUM, n, width)
  assert capture.hidden.shape == (layers + 1, NUM, n, width)
  assert capture.mask is None
  assert_close(capture, applied(run, images(dataset, capture)), 1e-5)


def test_is_float64_throughout(run, dataset, capture):
  # An independent forward pass in float64, layer by layer from the embedding:
  # one step in float32 anywhere would leave 1e-8.
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), run.params)
  patches = models.split_patches(
    images(dataset, capture), run.config.model.patch_size
  )
  tokens = encoder_test.dense(np.float64(patches), params['patch_embedding'])
  cls = np.broadcast_to(params['cls'], (NUM, 1, encoder_test.WIDTH))
  tokens = np.concatenate([cls, tokens], 1) + params['positions']
  expected, _ = encoder_test.oracle(params['encoder'], tokens, num_iters=5)
  assert_close(capture, expected, 1e-13)
  for name in ARRAYS:
    assert getattr(capture, name).dtype == np.float64
  assert np.abs(capture.attention.sum(-1) - 1).max() < 1e-14


def test_float32_on_request(run, capture):
  single = rank.capture(run, NUM, dtype='float32')
  assert single.attention.dtype == np.float32
  assert single.about['dtype'] == 'float32'
  assert_close(single, {k: getattr(capture, k) for k in ARRAYS}, 1e-5)
  assert (single.attention != capture.attention).any()


# R04
def test_chunks_change_nothing(run, dataset, capture):
  calls = []
  options = dict(chunk_size=3, dataset=dataset)
  whole = rank.capture(run, NUM, progress=lambda *x: calls.append(x), **options)
  assert calls == [(3, NUM), (4, NUM)]
  assert whole.about == capture.about
  assert_close(whole, {k: getattr(capture, k) for k in ARRAYS}, 1e-13)
  chunks = list(rank.capture_chunks(run, NUM, **options))
  assert [len(x.about['examples']) for x in chunks] == [3, 1]
  for name in ARRAYS:
    together = np.concatenate([getattr(x, name) for x in chunks], 1)
    np.testing.assert_array_equal(together, getattr(whole, name))


@pytest.mark.parametrize('skip', [True, False])
@pytest.mark.parametrize('ffn', [True, False])
def test_ablations(dataset, skip, ffn):
  run = untrained(dataset)
  ablation = encoder.Ablation(skip=skip, ffn=ffn)
  result = rank.capture(run, 2, ablation=ablation, dataset=dataset)
  assert result.about['ablation'] == {'skip': skip, 'ffn': ffn}
  inputs = images(dataset, result)
  assert_close(result, applied(run, inputs, ablation=ablation), 1e-5)
  # Without the FFN a layer is attention, with the skip or without it.
  added = result.attention_output + (result.hidden[:-1] if skip else 0)
  is_attention = np.allclose(result.hidden[1:], added, rtol=0, atol=1e-14)
  assert is_attention != ffn


def test_padded_tokens(dataset):
  # Patches 12 to 15 are padding in the second example.
  run = untrained(dataset, normalizer='sinkhorn')
  mask = np.ones((2, 16), bool)
  mask[1, 12:] = False
  padded = dataclasses.replace(
    dataset, preprocess=lambda x: {**dataset.preprocess(x), 'mask': mask}
  )
  result = rank.capture(run, 2, dataset=padded)
  # The class token is in front.
  expected = np.ones((2, 17), bool)
  expected[1, 13:] = False
  np.testing.assert_array_equal(result.mask, expected)
  weights = result.attention[:, 1]
  assert not weights[..., 13:].any()
  assert not weights[..., 13:, :].any()
  assert np.abs(weights[..., :13, :].sum(-1) - 1).max() < 1e-14
  # Valid tokens get what a shorter input gives.
  tokens = result.hidden[0, 1:, :13]
  captured, _ = encoder_test.oracle(
    run.params['encoder'], tokens, num_iters=run.config.model.num_iters
  )
  np.testing.assert_allclose(
    result.hidden[:, 1:, :13], captured['hidden'], rtol=0, atol=1e-13
  )
  # What padding holds does not count as damage.
  damaged = dataclasses.replace(result, hidden=result.hidden.copy())
  damaged.hidden[1, 1, 14] = np.nan
  assert non_finite(damaged) == {}
  damaged.hidden[2, 1, 12] = np.inf
  assert non_finite(damaged) == {'hidden': [2]}


def test_a_pair_gets_the_same_examples(dataset, capture):
  run = untrained(dataset)
  small, large, other, train = (
    next(rank.capture_chunks(run, num, dataset=dataset, **options))
    for num, options in (
      (2, {}),
      (NUM, {}),
      (NUM, {'seed': 1}),
      (NUM, {'split': 'train'}),
    )
  )
  examples = capture.about['examples']
  assert large.about['examples'] == examples
  assert small.about['examples'] == examples[:2]
  assert other.about['examples'] != examples
  assert train.about['examples'] != examples
  assert len(set(examples)) == NUM
  assert large.about['split'] == 'test'


def test_an_untrained_run_is_step_0(workdir, dataset):
  saved = training.load_run(workdir, step=0)
  fresh = rank.untrained_run(get_config(), dataset.info)
  jax.tree.map(np.testing.assert_array_equal, saved.params, fresh.params)


def test_about(workdir, dataset, capture, tmp_path):
  about = capture.about
  assert json.loads(json.dumps(about, allow_nan=False)) == about
  assert about['run'] == str(workdir)
  assert (about['normalizer'], about['num_iters']) == ('sinkhorn', 5)
  assert (about['seed'], about['step'], about['dtype']) == (0, 4, 'float64')
  assert about['row_sums'] is None
  assert about['non_finite_layers'] == []
  assert about['notes'] == [dataset.info.provenance['notice']]
  copy = shutil.copytree(workdir, tmp_path / 'copy')
  (copy / 'result.json').unlink()

  def notes(**options):
    opened = training.load_run(copy, **options)
    return next(rank.capture_chunks(opened, 1, dataset=dataset)).about

  assert 'unfinished run: step 4 of 4' in notes()['notes']
  assert 'not trained (step 0)' in notes(step=0)['notes']
  about = notes(normalizer=sinkhorn.softmax)
  assert (about['normalizer'], about['num_iters']) == ('softmax', 0)
  assert 'trained with sinkhorn, read with softmax' in about['notes']
  about = notes(normalizer=normalizers.NORMALIZERS['sinkhorn'](6))
  assert (about['normalizer'], about['num_iters']) == ('other', None)


def test_no_such_run_or_step(workdir, tmp_path):
  with pytest.raises(errors.RunError, match='not a run directory'):
    training.load_run(tmp_path)
  with pytest.raises(errors.RunError, match=r'no checkpoint of step 3; it has'):
    training.load_run(workdir, step=3)


def test_refusals(run, dataset):
  def refused(match, *args, error=errors.UserError, **options):
    with pytest.raises(error, match=match):
      rank.capture(run, *args, **{'dataset': dataset, **options})

  refused('num_examples=501 must be from 1 to 500, the size of the test', 501)
  refused('num_examples=0 must be', 0)
  refused("split='tset' must be one of train, validation, test", split='tset')
  refused('chunk_size=0', chunk_size=0)
  refused("got 'float16'", dtype='float16', error=ValueError)
  provenance = {**dataset.info.provenance, 'fingerprint': 'other'}
  info = dataclasses.replace(dataset.info, provenance=provenance)
  other = dataclasses.replace(dataset, info=info)
  refused('was trained on', dataset=other)


def test_nan_in_a_checkpoint_names_the_layer(dataset):
  run = untrained(dataset)

  def damage(params):
    kernel = params['encoder']['blocks']['attention']['query']['kernel']
    kernel[1, 0, 0] = np.nan

  result = rank.capture(changed(run, damage), 2, dataset=dataset)
  assert result.about['non_finite_layers'] == [2, 3]
  assert result.about['notes'][-5:] == [
    'parameter encoder/blocks/attention/query/kernel is not finite in layer 2',
    'logits of layer 2, 3 not finite',
    'attention of layer 2, 3 not finite',
    'attention_output of layer 2, 3 not finite',
    'hidden of layer 2, 3 not finite',
  ]
  paths = rank.sample_paths(0, 3, 2, 5)
  found = rank.path_residuals(result.attention, paths)
  assert found.invalid[2:].all()
  assert not found.invalid[:2].any()


def test_save_and_load(capture, tmp_path):
  mask = np.ones((NUM, 17), bool)
  mask[0, 9:] = False
  for name, saved in (
    ('a.npz', capture),
    ('b.npz', dataclasses.replace(capture, mask=mask)),
  ):
    saved.save(tmp_path / name)
    loaded = rank.load_capture(tmp_path / name)
    for array in ARRAYS:
      np.testing.assert_array_equal(
        getattr(loaded, array), getattr(saved, array)
      )
      assert getattr(loaded, array).dtype == np.float64
    np.testing.assert_array_equal(loaded.mask, saved.mask)
    assert loaded.about == saved.about
  before = (tmp_path / 'a.npz').read_bytes()
  with pytest.raises(errors.UserError, match='exists already'):
    capture.save(tmp_path / 'a.npz')
  assert (tmp_path / 'a.npz').read_bytes() == before
  with pytest.raises(errors.UserError, match='could not be written'):
    capture.save(tmp_path / 'nowhere' / 'a.npz')


def test_captures_of_other_software(capture, tmp_path):
  arrays = {name: np.float32(getattr(capture, name)) for name in ARRAYS}
  np.savez(tmp_path / 'whole.npz', **arrays)
  loaded = rank.load_capture(tmp_path / 'whole.npz')
  assert loaded.mask is None
  assert loaded.about == {}
  assert loaded.attention.dtype == np.float32

  np.savez(tmp_path / 'none.npz', logits=capture.logits)
  np.savez(tmp_path / 'part.npz', attention=capture.attention)
  assert rank.load_capture(tmp_path / 'part.npz').hidden is None
  (tmp_path / 'text.npz').write_text('no zip')
  whole = (tmp_path / 'whole.npz').read_bytes()
  (tmp_path / 'cut.npz').write_bytes(whole[: len(whole) // 2])
  np.savez(tmp_path / 'odd.npz', **{**arrays, 'hidden': arrays['hidden'][1:]})
  for name, match in (
    ('missing', 'cannot be read'),
    ('text', 'cannot be read'),
    ('cut', 'cannot be read'),
    ('none', 'no array "attention"'),
    ('odd', 'layers is 3 elsewhere'),
  ):
    with pytest.raises(errors.UserError, match=match) as caught:
      rank.load_capture(tmp_path / f'{name}.npz')
    assert f'{name}.npz' in str(caught.value)


# J02
def test_validate(capture):
  def refused(match, **arrays):
    with pytest.raises(errors.UserError, match=match):
      validate(dataclasses.replace(capture, **arrays))

  validate(capture)
  refused('logits must be floats .* empty', logits=capture.logits[:0])
  refused('empty', attention=capture.attention[..., :0])
  refused('attention must be .*got int', attention=np.ones((3, 4), int))
  refused('heads is 2 elsewhere', attention=capture.attention[:, :, :1])
  refused('n is 17 elsewhere', logits=capture.logits[..., 1:])
  refused('attention_output must be', attention_output=capture.hidden[0])
  refused('batch is 4 elsewhere', hidden=capture.hidden[:, :2])
  refused('mask must be booleans', mask=np.ones((NUM, 17)))
  refused('mask must be booleans', mask=np.ones((NUM, 16), bool))


# Talking heads.


@pytest.fixture(scope='module')
def talking(dataset):
  """A capture with mixes that are not the identity, and its run."""

  def mix(params):
    layer = params['encoder']['blocks']['attention']
    rng = np.random.default_rng(0)
    for name in ('logits_mix', 'weights_mix'):
      noise = rng.standard_normal(layer[name].shape)
      layer[name] += 0.3 * noise.astype(np.float32)

  run = changed(untrained(dataset, 'sinkhorn', talking_heads=True), mix)
  return run, rank.capture(run, 2, dataset=dataset)


def test_row_sums_of_talking_heads(dataset, talking):
  run, result = talking
  sums = np.array(result.about['row_sums'])
  rows = result.attention.sum(-1)
  np.testing.assert_allclose(
    rows, np.broadcast_to(sums[:, None, :, None], rows.shape), rtol=1e-13
  )
  assert np.abs(sums - 1).max() > 0.1
  assert_close(result, applied(run, images(dataset, result)), 1e-5)


def test_row_sums_are_a_factor_of_path_products(talking):
  _, result = talking
  sums = np.array(result.about['row_sums'])
  paths = rank.sample_paths(0, 3, 2, 8)
  for refused in (None, sums + 1e-9):
    with pytest.raises(errors.DataError, match='are off'):
      rank.path_residuals(result.attention, paths, row_sums=refused)
    with pytest.raises(errors.DataError, match='are off'):
      rank.exact_rms(result.attention, row_sums=refused)
  with pytest.raises(ValueError, match='row_sums must be'):
    rank.path_residuals(result.attention, paths, row_sums=sums[:2])
  found = rank.path_residuals(result.attention, paths, row_sums=sums)
  # Both of closed heads times their sums, and of the plain products.
  closed = result.attention / sums[:, None, :, None, None]
  closed = rank.path_residuals(closed, paths)
  factor = np.log10(np.abs(sums[np.arange(3), paths[-1]])).sum(-1)
  plain = rank.path_residuals(result.attention, paths, plain=True)
  for name in ('log10', 'log10_whole'):
    ours, theirs, slow = (
      getattr(x, name)['spectral'][-1] for x in (found, closed, plain)
    )
    np.testing.assert_allclose(ours, theirs + factor, atol=1e-9)
    np.testing.assert_allclose(ours, slow, atol=1e-8)


def test_exact_rms_of_talking_heads(talking):
  _, result = talking
  sums = np.array(result.about['row_sums'])
  every = np.array(list(np.ndindex(2, 2, 2)))
  heads = np.stack(
    [np.where(np.arange(3) < k, every, rank.ABSENT) for k in (1, 2, 3)]
  )
  each = rank.path_residuals(result.attention, heads, row_sums=sums)
  squares = 10 ** (2 * each.log10['frobenius'])
  np.testing.assert_allclose(
    rank.exact_rms(result.attention, row_sums=sums).log10['frobenius'],
    np.log10(squares.mean(-1)) / 2,
    atol=1e-12,
  )


def test_a_head_of_row_sum_zero(talking):
  # The difference of two heads: nothing is shared that it could take away.
  _, result = talking
  attention = result.attention.copy()
  attention[1, :, 0] -= attention[1, :, 1]
  sums = np.array(result.about['row_sums'])
  sums[1, 0] -= sums[1, 1]
  attention[1, :, 0] -= sums[1, 0] / attention.shape[-1]
  sums[1, 0] = 0
  paths = np.array([[[1, 0, 1]]])
  found = rank.path_residuals(attention, paths, row_sums=sums)
  product = attention[2, :, 1] @ attention[1, :, 0] @ attention[0, :, 1]
  for name, matrix in (
    ('log10', product - product.mean(1, keepdims=True)),
    ('log10_whole', product),
  ):
    np.testing.assert_allclose(
      getattr(found, name)['frobenius'][1, :, 0],
      np.log10(np.linalg.norm(matrix, axis=(1, 2))),
      atol=1e-9,
    )
