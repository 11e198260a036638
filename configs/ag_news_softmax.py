"""AG News with softmax attention: `ag_news_sinkhorn`, another normalizer.

Nothing else differs, so a pair of runs with one seed starts from identical
weights and sees identical batches.

Source, expected numbers and run times are in `ag_news_sinkhorn`.

  python -m launch.train --config=configs/ag_news_softmax.py \
    --config.data.dir=DIR
  python -m launch.train --config=configs/ag_news_softmax.py:quick \
    --config.data.dir=DIR
"""

import ml_collections

from configs import ag_news_sinkhorn


def get_config(preset: str = '') -> ml_collections.ConfigDict:
  """The config, or one of the presets of `ag_news_sinkhorn`."""
  config = ag_news_sinkhorn.get_config(preset)
  config.model.normalizer = 'softmax'
  return config
