"""Training, checkpoints, evaluation, and opening of runs."""

from sinkformer_jax.training.loop import train_and_evaluate
from sinkformer_jax.training.runs import check_dataset
from sinkformer_jax.training.runs import evaluate_run
from sinkformer_jax.training.runs import load_run
from sinkformer_jax.training.runs import Run

__all__ = [
  'Run',
  'check_dataset',
  'evaluate_run',
  'load_run',
  'train_and_evaluate',
]
