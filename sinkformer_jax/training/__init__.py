"""Training, checkpoints, evaluation, and opening of runs."""

from sinkformer_jax.training.loop import train_and_evaluate
from sinkformer_jax.training.runs import check_dataset
from sinkformer_jax.training.runs import evaluate_run
from sinkformer_jax.training.runs import load_run
from sinkformer_jax.training.runs import Run
from sinkformer_jax.training.seeds import train_seeds

__all__ = [
  'Run',
  'check_dataset',
  'evaluate_run',
  'load_run',
  'train_and_evaluate',
  'train_seeds',
]
