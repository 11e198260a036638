"""IMDb with softmax attention: `imdb_sinkhorn` with another normalizer.

Nothing else differs, so a pair of runs with one seed starts from identical
weights and sees identical batches.

Source, expected numbers and run times are in `imdb_sinkhorn`.

  python -m launch.train --config=configs/imdb_softmax.py --config.data.dir=DIR
  python -m launch.train --config=configs/imdb_softmax.py:sinkformers \
    --config.data.dir=DIR
"""

import ml_collections

from configs import imdb_sinkhorn


def get_config(preset: str = '') -> ml_collections.ConfigDict:
  """The config, or one of the presets of `imdb_sinkhorn`."""
  config = imdb_sinkhorn.get_config(preset)
  config.model.normalizer = 'softmax'
  return config
