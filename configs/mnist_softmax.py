"""MNIST with softmax attention: `mnist_sinkhorn` with another normalizer.

Nothing else differs, so a pair of runs with one seed starts from identical
weights and sees identical batches.

Source, expected numbers and run times are in `mnist_sinkhorn`.

  python -m launch.train --config=configs/mnist_softmax.py
  python -m launch.train --config=configs/mnist_softmax.py:quick
"""

import ml_collections

from configs import mnist_sinkhorn


def get_config(preset: str = '') -> ml_collections.ConfigDict:
  """The config, or one of the presets of `mnist_sinkhorn`."""
  config = mnist_sinkhorn.get_config(preset)
  config.model.normalizer = 'softmax'
  return config
