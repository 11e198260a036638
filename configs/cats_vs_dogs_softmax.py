"""Cats and Dogs with softmax: `cats_vs_dogs_sinkhorn`, another normalizer.

Nothing else differs, so a pair of runs with one seed starts from identical
weights and sees identical batches.

Source, expected numbers and run times are in `cats_vs_dogs_sinkhorn`.

  python -m launch.train --config=configs/cats_vs_dogs_softmax.py \
    --config.data.dir=DIR
  python -m launch.train --config=configs/cats_vs_dogs_softmax.py:quick \
    --config.data.dir=DIR
"""

import ml_collections

from configs import cats_vs_dogs_sinkhorn


def get_config(preset: str = '') -> ml_collections.ConfigDict:
  """The config, or one of the presets of `cats_vs_dogs_sinkhorn`."""
  config = cats_vs_dogs_sinkhorn.get_config(preset)
  config.model.normalizer = 'softmax'
  return config
