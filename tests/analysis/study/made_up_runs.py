"""Run directories without a training, as far as a study looks into them."""

import json
import pathlib

NOWHERE = pathlib.Path('nowhere')


def make(run, change=lambda fields: None, finished=True, step=None, started=''):
  """Makes the directory of a planned run.

  Args:
    run: the run.
    change: changes its config.
    finished: whether it has come to its end.
    step: its newest checkpoint; the last if not given.
    started: when.
  """
  config = run.config()
  fields = config.to_dict()
  change(fields)
  workdir = run.workdir
  last = config.total_steps if step is None else step
  for saved in (0, last):
    (workdir / 'checkpoints' / str(saved)).mkdir(parents=True, exist_ok=True)
  provenance = {
    'data': {
      'name': 'mnist',
      'origin': 'a sample',
      'notice': 'made from a sample',
      'fingerprint': 'abcdefghijkl',
      'splits': {'train': 4000, 'validation': 500, 'test': 500},
    },
    'starts': [{'time': started, 'step': 0, 'git_commit': '0123456789abc'}],
  }
  accuracy = 0.9 + 0.01 * (run.normalizer == 'sinkhorn') + 0.001 * run.seed
  scores = {'accuracy': accuracy, 'loss': 0.1, 'column_error': 0.01}
  result = {'step': last, 'train_s': 60.0, 'test': scores, 'validation': scores}
  line = {'step': 10, 'examples_per_second': 32.0, 'elapsed_s': 3.0}
  files = {'config': fields, 'provenance': provenance}
  if finished:
    files['result'] = result
  for name, content in files.items():
    (workdir / f'{name}.json').write_text(json.dumps(content))
  (workdir / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
