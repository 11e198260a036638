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
from analysis.common import markup
from analysis.common import tables
from launch import cli

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
  parts = [
    markup.heading('Rank decay: softmax and Sinkhorn attention', level=1)
  ]
  notes = command.notes(subjects, finished)
  parts += [markup.paragraph(x, 'notice') for x in notes]
  missing = [ANALYSES[x] for x in list(ANALYSES)[len(finished) :]]
  if missing:
    text = f'Not finished; missing: {", ".join(missing)}.'
    parts.append(markup.paragraph(text, 'notice'))
  parts += [markup.heading('Runs'), markup.table(map(_run_row, subjects))]
  for part in finished:
    parts.append(markup.heading(ANALYSES[part.name]))
    errors = _marginal_rows(part.summary)
    for i, plot in enumerate(part.plots):
      parts.append(markup.figure(output / f'{plot.name}.png', plot.caption))
      if errors and i == 0:
        text = 'Marginal errors of the attention behind these curves:'
        parts += [markup.paragraph(text), markup.table(errors)]
    parts.append(markup.lines(part.headlines))
    files = sorted(x.name for x in output.glob(f'{part.name}*.csv*'))
    parts.append(markup.paragraph(f'Tables: {", ".join(files)} (and .json).'))
  parts.append(markup.heading('Provenance'))
  parts.append(markup.table(row for x in subjects for row in _start_rows(x)))
  chosen = {
    k: v
    for k, v in sorted(options.items())
    if k in FLAGS and not k.startswith(('help', '?'))
  }
  flag_lines = [f'--{k}={v}' for k, v in chosen.items() if v is not None]
  parts += [markup.paragraph('Options:'), markup.lines(flag_lines)]
  return markup.document('Rank decay', parts)


def _run_row(subject):
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


def _marginal_rows(summary: Sequence[tables.Row]):
  """Errors of each curve that has them, each once."""
  names = ('run', 'group', 'step', 'quantity', 'ablation')
  seen = {}
  for row in summary:
    if row.get('row_error') is None:
      continue
    # Curves of one capture share its attention.
    key = tuple(row.get(x) for x in names if x != 'quantity')
    if row['run'] == 'random':
      key += (row['quantity'],)
    seen.setdefault(
      key,
      {
        **{
          k: row[k] for k in names if k != 'quantity' or row['run'] == 'random'
        },
        'largest |row sum - 1|': f'{row["row_error"]:.1e}',
        'largest |column sum - 1|': f'{row["column_error"]:.1e}',
      },
    )
  return list(seen.values())


if __name__ == '__main__':
  cli.run(main, FLAGS)
