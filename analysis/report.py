"""All analyses of some runs on one page.

  python -m analysis.report --workdir=RUN --workdir=RUN --output=DIR

Runs every analysis, writes their tables and figures, and DIR/report.html, which
needs no other file and no network. Give pairs of runs (softmax and Sinkhorn,
same seed); with several pairs, differences have confidence intervals.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from absl import flags

from analysis.common import command
from sinkformer_jax import cli

FLAGS = flags.FlagValues()
command.define_output(FLAGS)
command.define_runs(FLAGS)
command.define_paths(FLAGS)
command.define_control(FLAGS)

# Module and title, in the order of the page.
ANALYSES = {
  'path_products': 'Path products (quantity A)',
  'layer_outputs': 'Tokens layer by layer (quantity B)',
  'attention': 'Attention and its marginal errors',
  'sequence_length': 'Path products by the number of tokens',
  'iterations': 'Iterations of trained Sinkhorn models',
  'mechanism': 'Mechanism: experiments on pairs',
  'lipschitz': 'Local Lipschitz constants',
  'random_control': 'Control: unrelated random matrices',
  'matched_control': 'Control: random matrices as sharp as those of the runs',
  'theory': 'Theory beside measurement',
  'learning_curves': 'Training',
  'step_time': 'Time of a training step',
}


def main() -> None:
  """Runs all analyses and writes the page."""
  options = FLAGS.flag_values_dict()
  output = command.output_directory(options['output'])
  subjects = command.load_subjects(options)
  progress = command.Progress()
  finished = []
  for number, (name, title) in enumerate(ANALYSES.items(), start=1):
    progress.part(f'part {number} of {len(ANALYSES)}: {title}')
    finished.append(command.analyse(name, subjects, options, output, progress))
    # After each part: what has been measured is kept whatever comes.
    page = render(subjects, finished, output, options)
    (output / 'report.html').write_text(page, 'utf-8')
  for line in finished[0].headlines:
    print(line)
  for note in command.notes(subjects, finished):
    print(f'NOTE: {note}')
  print(f'Report: {output / "report.html"}')


def render(
  subjects: Sequence,
  finished: Sequence[command.Finished],
  output: pathlib.Path,
  options: dict[str, Any],
) -> str:
  """The page, HTML with images in it.

  Args:
    subjects: the runs.
    finished: analyses, as far as they are done.
    output: where their figures are.
    options: the flags.
  """
  # Imported late: see `command`.
  import pandas as pd

  from analysis.common import pages

  notes = command.notes(subjects, finished)
  missing = [ANALYSES[x] for x in list(ANALYSES)[len(finished) :]]
  if missing:
    notes.append(f'Not finished; missing: {", ".join(missing)}.')
  parts = [_part(x, output) for x in finished]
  chosen = {
    k: v
    for k, v in sorted(options.items())
    if k in FLAGS and not k.startswith(('help', '?')) and v is not None
  }
  starts = [row for x in subjects if x.has('model') for row in _start_rows(x)]
  return pages.render(
    'report.html',
    title='Rank decay: softmax and Sinkhorn attention',
    contents=[
      ('runs', 'Runs'),
      *((x['id'], x['title']) for x in parts),
      ('provenance', 'Provenance'),
    ],
    notes=notes,
    runs=pages.table(pd.DataFrame([_run_row(x) for x in subjects])),
    parts=parts,
    starts=pages.table(pd.DataFrame(starts)),
    options=[f'--{k}={v}' for k, v in chosen.items()],
  )


def _part(part, output):
  from analysis.common import pages

  errors = _marginal_rows(part.summary)
  return {
    'id': part.name,
    'title': ANALYSES[part.name],
    'figures': [
      {
        'name': x.name,
        'title': '',
        'caption': x.caption,
        'image': pages.image(output / f'{x.name}.png'),
      }
      for x in part.plots
    ],
    'errors': pages.table(errors) if len(errors) else None,
    'headlines': part.headlines,
    'files': sorted(x.name for x in output.glob(f'{part.name}*.csv*')),
  }


def _run_row(subject):
  if not subject.has('model'):
    return {'run': subject.name, 'normalizer': subject.normalizer}
  config, result = subject.run.config, subject.result
  data = subject.provenance['data']
  model = config.model
  row = {
    'run': subject.name,
    'normalizer': subject.group,
    'seed': config.seed,
    'step': f'{subject.run.step} of {config.total_steps}',
    'model': f'{model.num_layers} layers, width {model.width},'
    f' {model.num_heads} heads, {model.norm_position}-norm',
    'data': f'{data["name"]} ({data["source"]}), {data["splits"]["train"]}'
    ' training examples',
  }
  test = result['test'] if result else {}
  for name in ('accuracy', 'row_error', 'column_error'):
    value = test.get(name)
    row[f'test {name.replace("_", " ")}'] = (
      'not finished' if value is None else f'{value:.4g}'
    )
  return row


def _start_rows(subject):
  data = subject.provenance['data']
  for start in subject.provenance['starts']:
    versions = ', '.join(f'{k} {v}' for k, v in start['versions'].items())
    yield {
      'run': subject.name,
      'started': start['time'],
      'at step': start['step'],
      'code': start['git_commit'] or 'no git checkout',
      'device': f'{len(start["devices"])} x {start["devices"][0]}',
      'versions': f'Python {start["python"]}, {versions}',
      'data': f'{data["origin"]}, fingerprint {data["fingerprint"][:16]}',
      'command': ' '.join(start['command']),
    }


def _marginal_rows(summary):
  """Errors of each curve that has them, each once."""
  if 'row_error' not in summary:
    return summary[:0]
  found = summary[summary['row_error'].notna()]
  # Curves of one capture share its attention; random ones do not.
  quantity = found['quantity'].where(found['run'] == 'random', '')
  keys = ['run', 'group', 'step', 'quantity', 'ablation']
  found = found.assign(quantity=quantity).drop_duplicates(keys)
  errors = {
    'row_error': 'largest |row sum - 1|',
    'column_error': 'largest |column sum - 1|',
  }
  table = found[[*keys, *errors]].rename(columns=errors)
  return table.assign(
    **{x: [f'{y:.1e}' for y in table[x]] for x in errors.values()}
  )


if __name__ == '__main__':
  cli.run(main, FLAGS)
