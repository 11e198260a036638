"""Models, one file each, and `create_model` from a config."""

import flax.linen as nn
import jax.numpy as jnp
import ml_collections

from sinkformer_jax import encoder
from sinkformer_jax import normalizers
from sinkformer_jax.models import text
from sinkformer_jax.models import vit
from sinkformer_jax.models.pooling import pool
from sinkformer_jax.models.pooling import POOLINGS
from sinkformer_jax.models.text import sinusoids
from sinkformer_jax.models.text import TextClassifier
from sinkformer_jax.models.vit import split_patches
from sinkformer_jax.models.vit import VisionTransformer

__all__ = [
  'MODELS',
  'POOLINGS',
  'TextClassifier',
  'VisionTransformer',
  'create_model',
  'pool',
  'sinusoids',
  'split_patches',
]

# What the names in a config mean: modules with `create`, `KIND` (of the data
# sets that the model reads) and `RULES` (of its own config fields).
MODELS = {'vit': vit, 'text': text}


def create_model(
  config: ml_collections.ConfigDict,
  info,
  normalizer: normalizers.Normalizer | None = None,
) -> nn.Module:
  """Builds the model of `config.model` for a data set.

  Args:
    config: the section `config.model`.
    info: a `data.DatasetInfo`, for the number of classes and, of texts, the
      vocabulary and the largest length.
    normalizer: a function ``(logits, mask) -> weights`` that takes the place
      of the one named in the config.

  Returns:
    A module to be called as ``model.apply(variables, inputs, mask=...,
    deterministic=..., ablation=...)``.

  Raises:
    ValueError: for an unknown model or normalizer.
  """
  if config.name not in MODELS:
    raise ValueError(
      f'model.name must be one of {sorted(MODELS)}, got {config.name!r}.'
    )
  if normalizer is None:
    normalizer = normalizers.create(config.normalizer, config.num_iters)
  dtype = jnp.dtype(config.dtype)
  return MODELS[config.name].create(
    config,
    info,
    encoder=encoder.Encoder(
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      ffn_dim=config.ffn_dim,
      normalizer=normalizer,
      norm_position=config.norm_position,
      skip=config.skip,
      ffn=config.ffn,
      talking_heads=config.talking_heads,
      deepnorm=config.deepnorm,
      dropout_rate=config.dropout_rate,
      dtype=dtype,
      remat=config.remat,
    ),
    width=config.width,
    pooling=config.pooling,
    dropout_rate=config.dropout_rate,
    dtype=dtype,
  )
