"""Cats and Dogs from archives, folders and TFDS; odd and damaged images."""

import io
import json
import os

import numpy as np
from PIL import Image
import pytest

from configs import cats_vs_dogs_sinkhorn
from sinkformer_jax import data
from sinkformer_jax import errors
from sinkformer_jax.data import cats_vs_dogs
from sinkformer_jax.data import dataset as dataset_lib
from sinkformer_jax.data import images
from tests.data import official


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  folder = tmp_path / 'cache'
  monkeypatch.setenv('SINKFORMER_CACHE_DIR', str(folder))
  return folder / 'images'


def load(data_dir, **changes):
  section = cats_vs_dogs_sinkhorn.get_config('tiny').data
  section.update(dir=str(data_dir), **changes)
  return data.load(section)


def members_of(cache):
  (about,) = cache.glob('*.json')
  return json.loads(about.read_text())['names']


@pytest.mark.usefixtures('no_network')
def test_archive(tmp_path, cache):
  folder = official.write_pets(tmp_path)
  dataset = load(tmp_path)
  info = dataset.info
  assert info.splits == {'train': 64, 'validation': 8, 'test': 8}
  assert info.input_shape == (32, 32, 3)
  assert 'made from 80 of 25,000' in info.provenance['notice']
  assert str(folder / 'kagglecatsanddogs_5340.zip') in info.provenance['origin']
  names, photos = members_of(cache), official.pet_members()
  assert len(set(sum(names.values(), []))) == 80
  for split, arrays in dataset.splits.items():
    counts = np.bincount(arrays['label'])
    np.testing.assert_allclose(counts, info.splits[split] / 2, atol=1)
    for name, label, image in zip(
      names[split], arrays['label'], arrays['image'], strict=True
    ):
      assert ('/Dog/' in name) == label
      # What is kept is what Pillow gives, whatever became of the order.
      content = photos[name.partition('/')[2]]
      expected = Image.open(io.BytesIO(content)).resize(
        (32, 32), Image.Resampling.BILINEAR
      )
      np.testing.assert_array_equal(image, np.asarray(expected))
      # Cats are dark above.
      halves = image[:16].mean(), image[16:].mean()
      assert np.argmin(halves) == label


def test_layouts_and_order_are_no_matter(tmp_path, cache):
  members = official.pet_members()
  kaggle = official.pet_members(layout='kaggle')
  shuffled = [*members]
  np.random.default_rng(0).shuffle(shuffled)
  fingerprints = set()
  for kind, chosen in (
    ('microsoft', members),
    ('kaggle', kaggle),
    ('shuffled', {x: members[x] for x in shuffled}),
    ('folder', {}),
  ):
    (tmp_path / kind).mkdir()
    folder = official.write_pets(tmp_path / kind, chosen)
    if kind == 'folder':
      (folder / 'kagglecatsanddogs_5340.zip').unlink()
      for name, content in kaggle.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    provenance = load(tmp_path / kind).info.provenance
    fingerprints.add(provenance['fingerprint'])
  assert len(fingerprints) == 1


def test_images_are_decoded_once(tmp_path, cache, monkeypatch):
  folder = official.write_pets(tmp_path)
  first = load(tmp_path)
  assert isinstance(first.splits['train']['image'], np.memmap)

  def refuse(*args):
    raise AssertionError('decoded again')

  with monkeypatch.context() as m:
    m.setattr(images, 'decode', refuse)
    again = load(tmp_path, augment=False)
  assert again.info == first.info
  np.testing.assert_array_equal(
    again.splits['test']['image'], first.splits['test']['image']
  )
  # Other files or another size are other inputs.
  load(tmp_path, image_size=16)
  assert len(list(cache.glob('*.uint8'))) == 2
  members = official.pet_members(41)
  official.write_zip(folder / 'kagglecatsanddogs_5340.zip', members)
  assert sum(load(tmp_path).info.splits.values()) == 82
  assert len(list(cache.glob('*.uint8'))) == 3
  assert not list(cache.glob('*.tmp'))


def test_damaged_cache_is_named(tmp_path, cache):
  official.write_pets(tmp_path)
  load(tmp_path)
  (pixels,) = cache.glob('*.uint8')
  os.truncate(pixels, 100)
  with pytest.raises(errors.DataError, match='delete .*json'):
    load(tmp_path)


def test_cache_that_cannot_be_written_is_named(tmp_path, cache, monkeypatch):
  official.write_pets(tmp_path)
  cache.parent.write_text('a file')
  with pytest.raises(errors.DataError, match='SINKFORMER_CACHE_DIR'):
    load(tmp_path)


def odd_members():
  """Images that are strange, and files that are none."""
  good = official.photo(0, 1000)
  rng = np.random.default_rng(0)
  grey = rng.integers(0, 256, (20, 20), np.uint8)
  colour = Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8))
  readable = {
    'PetImages/Cat/900.jpg': official.encoded(grey),
    'PetImages/Cat/901.jpg': official.encoded(colour.convert('CMYK')),
    'PetImages/Cat/902.jpg': official.encoded(colour, 'PNG'),
    'PetImages/Dog/903.jpg': official.encoded(grey[:1, :1]),
    'PetImages/Dog/904.jpg': official.encoded(colour.convert('P'), 'GIF'),
  }
  unreadable = {
    'PetImages/Cat/910.jpg': good[: len(good) // 2],
    'PetImages/Cat/911.jpg': b'',
    'PetImages/Dog/912.jpg': b'<html>404</html>',
    'PetImages/Dog/913.jpg': rng.bytes(500),
  }
  ignored = {
    'PetImages/Cat/Thumbs.db': b'thumbs',
    'PetImages/Bird/1.jpg': official.photo(0, 1001),
    'readme.txt': b'about',
  }
  return readable, unreadable, ignored


# D03
def test_odd_images(tmp_path, cache, recwarn):
  readable, unreadable, ignored = odd_members()
  members = official.pet_members()
  official.write_pets(
    tmp_path, {**members, **readable, **unreadable, **ignored}
  )
  dataset = load(tmp_path)
  provenance = dataset.info.provenance
  archive = 'kagglecatsanddogs_5340.zip'
  assert set(provenance['unreadable']) == {f'{archive}/{x}' for x in unreadable}
  assert all(provenance['unreadable'].values())
  assert provenance['ignored']['count'] == 3
  assert f'{archive}/PetImages/Bird/1.jpg' in provenance['ignored']['first']
  assert sum(dataset.info.splits.values()) == 85
  names = sum(members_of(cache).values(), [])
  assert {f'{archive}/{x}' for x in readable} <= set(names)
  # An epoch goes through.
  for step in range(data.steps_per_epoch(dataset, 8)):
    batch = data.train_batch(dataset, step, 8, seed=0)
    assert batch['image'].shape == (8, 32, 32, 3)
    assert batch['image'].dtype == np.float32
  assert not [x for x in recwarn if 'sinkformer' in str(x.filename)]
  # Whatever else is in the archive, the others stay in their splits.
  assert json.dumps(provenance)


def test_grey_and_cmyk_become_rgb():
  colour = np.zeros((8, 8, 3), np.uint8)
  colour[..., 0] = 200
  image = Image.fromarray(colour)
  for mode, expected in (('CMYK', [200, 0, 0]), ('L', [60, 60, 60])):
    decoded = images.decode(official.encoded(image.convert(mode)), 4)
    np.testing.assert_allclose(decoded[2, 2], expected, atol=6)


# D03
def test_mostly_unreadable_is_an_error(tmp_path, cache):
  members = official.pet_members()
  broken = {
    f'PetImages/Cat/{x}.jpg': f'no image {x}'.encode() for x in range(100, 120)
  }
  official.write_pets(tmp_path, {**members, **broken})
  with pytest.raises(errors.DataError, match='20 of 100 images cannot be read'):
    load(tmp_path)
  assert not list(cache.iterdir())


# D04
def test_repeated_images_reach_one_split(tmp_path):
  members = official.pet_members()
  members['PetImages/Cat/500.jpg'] = members['PetImages/Cat/7.jpg']
  members['PetImages/Dog/501.jpg'] = members['PetImages/Cat/8.jpg']
  official.write_pets(tmp_path, members)
  dataset = load(tmp_path)
  zipped = 'kagglecatsanddogs_5340.zip/PetImages'
  assert dataset.info.provenance['left_out'] == {
    f'{zipped}/Cat/7.jpg': f'equals {zipped}/Cat/500.jpg',
    f'{zipped}/Cat/8.jpg': 'has two labels',
    f'{zipped}/Dog/501.jpg': 'has two labels',
  }
  digests = [
    set(dataset_lib.digests(x['image'])) for x in dataset.splits.values()
  ]
  assert sum(map(len, digests)) == len(set.union(*digests)) == 79


@pytest.mark.parametrize('damage', ['cut', 'html', 'empty'])
def test_damaged_archive_is_named(tmp_path, damage):
  path = official.write_pets(tmp_path) / 'kagglecatsanddogs_5340.zip'
  content = path.read_bytes()
  changed = {'cut': content[:-300], 'html': b'<html>404', 'empty': b''}
  path.write_bytes(changed[damage])
  with pytest.raises(errors.DataError, match='is damaged') as error:
    load(tmp_path)
  assert str(path) in str(error.value)
  assert f'({path.stat().st_size} bytes)' in str(error.value)
  assert ('HTML page' in str(error.value)) == (damage == 'html')


@pytest.mark.parametrize(
  'name', ['../Cat/1.jpg', '/etc/Cat/1.jpg', 'C:/Cat/1.jpg', '..\\Cat\\1.jpg']
)
def test_members_that_lead_out_are_refused(tmp_path, name):
  members = {**official.pet_members(), name: b''}
  official.write_pets(tmp_path, members)
  with pytest.raises(errors.DataError, match='outside of the archive'):
    load(tmp_path)


def test_too_few_images(tmp_path):
  official.write_pets(tmp_path, official.pet_members(3))
  with pytest.raises(errors.DataError, match=r'too few images: \[3, 3\]'):
    load(tmp_path)


def test_archive_in_an_archive(tmp_path):
  # As Kaggle's has it.
  official.write_pets(tmp_path, {'train.zip': b'PK', 'test1.zip': b'PK'})
  with pytest.raises(errors.DataError, match='have to be unpacked'):
    load(tmp_path)


def test_augmentation_is_a_function_of_seed_epoch_and_index(tmp_path):
  official.write_pets(tmp_path)
  dataset = load(tmp_path)
  plain = load(tmp_path, augment=False)
  steps = data.steps_per_epoch(dataset, 16)
  first = data.train_batch(dataset, 1, 16, seed=0)
  again = data.train_batch(dataset, 1, 16, seed=0)
  np.testing.assert_array_equal(first['image'], again['image'])
  unchanged = data.train_batch(plain, 1, 16, seed=0)
  np.testing.assert_array_equal(first['label'], unchanged['label'])
  different = (first['image'] != unchanged['image']).any((1, 2, 3))
  assert different.all()
  # An image gets the same crop in a batch of another size, another one in
  # the next epoch.
  arrays = {'image': dataset.splits['train']['image'][:4]}
  keys = np.array([[0, 0, i] for i in range(4)])
  whole = images.crop_and_flip(arrays, keys)['image']
  alone = images.crop_and_flip({'image': arrays['image'][2:3]}, keys[2:3])
  np.testing.assert_array_equal(whole[2], alone['image'][0])
  later = images.crop_and_flip(arrays, keys + [0, 1, 0])['image']
  assert (later != whole).any((1, 2, 3)).all()
  other = data.train_batch(dataset, steps + 1, 16, seed=0)
  assert (other['label'] != first['label']).any()
  # Evaluation has none of it.
  for batch in data.eval_batches(dataset, 'train', 64):
    expected = dataset.splits['train']['image'] / 127.5 - 1
    np.testing.assert_allclose(batch['image'], expected, atol=1e-6)


def test_crops_are_parts_of_the_image():
  # Pixels say where they are: 8 a step across in red, down in green.
  grid = np.arange(32, dtype=np.uint8) * 8
  image = np.zeros((1, 32, 32, 3), np.uint8)
  image[0, ..., 0], image[0, ..., 1] = grid[None, :], grid[:, None]
  areas, ratios, flips = [], [], []
  for seed in range(300):
    crop = images.crop_and_flip({'image': image}, np.array([[seed]]))['image'][
      0
    ]
    across = crop[16, 24, 0] / 8 - crop[16, 8, 0] / 8
    down = crop[24, 16, 1] / 8 - crop[8, 16, 1] / 8
    flips.append(across < 0)
    # 16 of 32 pixels of the crop are half of its side.
    width, height = 2 * abs(across) / 32, 2 * down / 32
    areas.append(width * height)
    ratios.append(width / height)
  assert 0.06 < min(areas) < 0.15
  assert 0.8 < max(areas) < 1.05
  # Uniform from 0.08 to 1, but for what is cut.
  assert 0.48 < np.mean(areas) < 0.6
  assert 0.6 < min(ratios) < 0.8
  assert 1.25 < max(ratios) < 1.6
  assert 0.42 < np.mean(flips) < 0.58


@pytest.mark.usefixtures('no_network')
def test_prepared_tfds_set(tmp_path):
  rows = [
    {
      'image': content,
      'image/filename': name.encode(),
      'label': int('/Dog/' in name),
    }
    for name, content in official.pet_members().items()
  ]
  splits = {'train': rows}
  with official.prepared(tmp_path / 'cats_vs_dogs' / '4.0.1', splits) as asked:
    dataset = load(tmp_path, source='tfds')
  # As they are in their files: no one else decodes them.
  assert [*asked[0]['decoders']] == ['image']
  assert dataset.info.provenance['source'] == 'tfds'
  (tmp_path / 'files').mkdir()
  official.write_pets(tmp_path / 'files')
  files = load(tmp_path / 'files')
  assert (
    files.info.provenance['fingerprint']
    == dataset.info.provenance['fingerprint']
  )


def test_labels_of_names():
  for name, label in (
    ('x.zip/PetImages/Cat/0.jpg', 'cat'),
    ('x.zip/train/dog.12.jpg', 'dog'),
    ('Dog/a b.JPEG', 'dog'),
    ('x.zip/test1/3.jpg', None),
    ('x.zip/train/dogs.zip', None),
    ('x.zip/PetImages/Cat/Thumbs.db', None),
    ('x.zip/hotdog.1.jpg', None),
  ):
    match = cats_vs_dogs._NAME.search(name)
    assert (match and match['label'].lower()) == label
