"""Rank analysis: capture, residuals, path products, random control, theory.

All but `capture` takes arrays, so that captures of other software can be read.
"""

from sinkformer_jax.rank import collapse
from sinkformer_jax.rank import lipschitz
from sinkformer_jax.rank import mechanism
from sinkformer_jax.rank import random_control
from sinkformer_jax.rank import theory
from sinkformer_jax.rank.blocks import column_spread
from sinkformer_jax.rank.blocks import marginal_errors
from sinkformer_jax.rank.captures import Capture
from sinkformer_jax.rank.captures import described
from sinkformer_jax.rank.captures import load_capture
from sinkformer_jax.rank.exact import exact_rms
from sinkformer_jax.rank.forward import capture
from sinkformer_jax.rank.forward import capture_chunks
from sinkformer_jax.rank.forward import untrained_run
from sinkformer_jax.rank.paths import ABSENT
from sinkformer_jax.rank.paths import path_residuals
from sinkformer_jax.rank.paths import sample_paths
from sinkformer_jax.rank.paths import SKIP
from sinkformer_jax.rank.residuals import attention_entropy
from sinkformer_jax.rank.residuals import concatenate
from sinkformer_jax.rank.residuals import effective_rank
from sinkformer_jax.rank.residuals import MAX_ROW_ERROR
from sinkformer_jax.rank.residuals import mean_cosine_similarity
from sinkformer_jax.rank.residuals import norm
from sinkformer_jax.rank.residuals import NORMS
from sinkformer_jax.rank.residuals import of_examples
from sinkformer_jax.rank.residuals import residual
from sinkformer_jax.rank.residuals import residual_norms
from sinkformer_jax.rank.residuals import Residuals
from sinkformer_jax.rank.residuals import SCALINGS
from sinkformer_jax.rank.residuals import singular_values
from sinkformer_jax.rank.residuals import stable_rank
from sinkformer_jax.rank.residuals import summarize

__all__ = [
  'ABSENT',
  'MAX_ROW_ERROR',
  'NORMS',
  'SCALINGS',
  'SKIP',
  'Capture',
  'Residuals',
  'attention_entropy',
  'capture',
  'capture_chunks',
  'collapse',
  'column_spread',
  'concatenate',
  'described',
  'effective_rank',
  'exact_rms',
  'lipschitz',
  'load_capture',
  'marginal_errors',
  'mean_cosine_similarity',
  'mechanism',
  'norm',
  'of_examples',
  'path_residuals',
  'random_control',
  'residual',
  'residual_norms',
  'sample_paths',
  'singular_values',
  'stable_rank',
  'summarize',
  'theory',
  'untrained_run',
]
