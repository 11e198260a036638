"""All that a study has found, ready to be written: claims, tables, figures."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import json
import math
import pathlib
from typing import Any

from analysis import sequence_length
from analysis.common import curves
from analysis.common import figures
from analysis.common import runs as runs_lib
from analysis.common import statistics
from analysis.common import tables
from analysis.study import claims as claims_lib
from analysis.study import comparisons
from analysis.study import decay
from analysis.study import measure
from analysis.study import plan
from analysis.study import plots
from analysis.study import robustness
from analysis.study.evidence import Evidence
from sinkformer_jax import errors
from sinkformer_jax.training import workdir as workdir_lib

CONTENT = 'claims.json'
# Of runs by themselves.
_COLUMNS = (
  'tag',
  'normalizer',
  'seed',
  'at',
  'analysis',
  'quantity',
  'ablation',
  'stack',
  'norm',
  'scaling',
  'depth',
  'tokens',
  'mean',
  'std',
  'count',
  'below_resolution',
  'invalid',
  'entropy',
  'dtype',
)
_CURVES = ('path_products', 'layer_outputs', 'attention')
# Of these: what all rows have in common, and the page says once.
_SAME = (
  'data',
  'notice',
  'weights',
  'examples',
  'paths',
  'normalizer',
  'seeds',
  'steps',
)


@dataclasses.dataclass(frozen=True)
class Content:
  """What is written of a study.

  Attributes:
    study: the study.
    answers: its claims.
    figures: to be drawn.
    large_tables: by the name of their file: ``curves`` over runs,
      ``differences`` of pairs, ``depths`` (every run, where verdicts are),
      ``comparisons`` (the main tests of every comparison).
    variations: claims a to c under other choices; empty without runs.
    robustness: what other choices change, in sentences.
    tables: small ones by title, for the page.
    notes: what a reader has to know.
    revisions: what measured.
  """

  study: plan.Study
  answers: list[claims_lib.Answer]
  figures: list[curves.Plot]
  large_tables: dict[str, list[tables.Row]]
  variations: list[robustness.Variation]
  robustness: list[str]
  tables: dict[str, list[dict]]
  notes: list[str]
  revisions: list[str]


def evidence_of(
  study: plan.Study,
  finished: Sequence[plan.PlannedRun],
  measured: Sequence[measure.Measured],
) -> dict[str, Evidence]:
  """What is known of each comparison, by its tag.

  Args:
    study: a study of runs.
    finished: its finished runs.
    measured: what has been measured of them.
  """
  rows = [row for x in measured for row in x.rows]
  rows += [row for run in finished for row in measure.training_rows(run)]
  num_layers = study.runs(pathlib.Path())[0].config().model.num_layers
  return {
    x.tag: Evidence([row for row in rows if row['tag'] == x.tag], num_layers)
    for x in study.comparisons
  }


def of_runs(
  study: plan.Study,
  finished: Sequence[plan.PlannedRun],
  measured: Sequence[measure.Measured],
  diverged: Sequence[plan.PlannedRun] = (),
) -> Content:
  """The content of a study of runs.

  Args:
    study: as in `evidence_of`, and so are the next two.
    finished: see there.
    measured: see there.
    diverged: runs that did.
  """
  evidence = evidence_of(study, finished, measured)
  first = evidence[study.comparisons[0].tag]
  answers, variations, tested = [], [], {}
  if not study.exploratory:
    answers = claims_lib.answers(study.claims, first)
    tested = {'comparisons': comparisons.rows(study, evidence)}
    variations = robustness.variations(first, study.claims)
  summary = robustness.summary(variations)
  if study.looked_at:
    summary += robustness.without(answers, first, study.looked_at)
  problems = [note for x in measured for note in x.notes]
  return Content(
    study=study,
    answers=answers,
    figures=_figures(study, evidence, variations),
    large_tables=_large_tables(list(evidence.values())) | tested,
    variations=variations,
    robustness=summary,
    tables={
      'Trainings side by side': comparisons.exploratory(
        study, evidence, diverged
      )
      if study.exploratory
      else comparisons.table(study, evidence),
      'Learning rate tuned for each normalizer': comparisons.tuned(
        study, evidence, diverged
      ),
      'Runs': [_run_row(x, evidence[x.comparison.tag]) for x in finished],
    },
    notes=list(
      dict.fromkeys([*_notes(study, finished, diverged, first), *problems])
    ),
    revisions=list(dict.fromkeys(x.by for x in measured)),
  )


def _figures(study, evidence, variations):
  first = evidence[study.comparisons[0].tag]
  titles = {evidence[x.tag]: x.title for x in study.comparisons}
  if study.exploratory:
    return plots.of_comparisons(titles) + plots.along_training(titles)
  found = plots.of_runs(first, variations) + plots.along_training(titles)
  if study.texts:
    rows = curves.select(first.rows, analysis='sequence_length')
    found += sequence_length.plots(rows)
  return found


def evidence_alone(study: plan.Study, result: tables.Result) -> Evidence:
  """What is known in a study without runs, from its one analysis."""
  at = {'analysis': study.alone, 'at': measure.LAST, 'tag': '', 'stack': ''}
  return Evidence([x | at for x in result.summary], study.sizes.num_layers)


def alone(study: plan.Study, result: tables.Result) -> Content:
  """The content of a study without runs, see `evidence_alone`."""
  evidence = evidence_alone(study, result)
  module = importlib.import_module(f'analysis.{study.alone}')
  shown = curves.select(evidence.rows, norm='spectral', scaling='absolute')
  names = (*_COLUMNS, 'group', 'scale', 'logit_norm', 'exponent')
  return Content(
    study=study,
    answers=claims_lib.answers(study.claims, evidence),
    figures=module.plots(result.summary),
    large_tables={'curves': [_short(x, names) for x in shown]},
    variations=[],
    robustness=[],
    tables={},
    notes=result.notes,
    revisions=[measure.revision()],
  )


def _large_tables(evidences):
  """Curves and differences of the first comparison, some depths of all."""
  found = {
    'curves': [],
    'differences': [],
    'depths': [
      _short(x, _COLUMNS)
      for evidence in evidences
      for x in evidence.rows
      if _is_shown(x) and x.get('depth') in (None, *evidence.depths)
    ],
  }
  parts = {}
  for row in evidences[0].rows:
    is_curve = _is_shown(row) and row['analysis'] in _CURVES
    if is_curve and row['seed'] in evidences[0].seeds:
      parts.setdefault((row['analysis'], row['at']), []).append(row)
  for (analysis, at), rows in parts.items():
    about = {'analysis': analysis, 'at': at}
    for name, of_rows in (
      ('curves', tables.over_seeds),
      ('differences', tables.differences),
    ):
      found[name] += [
        about | _short(x, [k for k in x if k not in _SAME])
        for x in of_rows(rows)
      ]
  return found


def _short(row, names):
  """Some columns, and no more digits than mean anything."""
  return {
    k: float(f'{v:.6g}') if isinstance(v, float) else v
    for k in names
    for v in [row.get(k)]
  }


def _is_shown(row):
  """The headline of every run, and what claims and figures are made of."""
  size = row.get('norm'), row.get('scaling')
  absolute = size == ('spectral', 'absolute')
  return {
    'path_products': row['quantity'] == 'path, first layers' and absolute,
    'layer_outputs': row['quantity'] == decay.FIXED.output
    and size == ('spectral', 'relative')
    and row['at'] == measure.LAST,
    'attention': row['quantity'] == 'spread of column sums',
    'mechanism': row['quantity'] == 'path, first layers',
    'iterations': row['quantity'] == 'column error'
    or (row.get('ablation') == decay.HEADS and absolute),
    'matched_control': absolute,
    'lipschitz': True,
    'theory': True,
    'step_time': True,
    'sequence_length': True,
    'training': True,
  }.get(row['analysis'], False)


def _notes(study, finished, diverged, first):
  notes = []
  planned = measure.pairs(study.runs(pathlib.Path()))
  there = {x.name for x, _ in measure.pairs(finished)}
  missing = {}
  for run, _ in planned:
    if run.name not in there:
      missing.setdefault(run.comparison.title, []).append(str(run.seed))
  if missing:
    listed = [f'{k} (seed {", ".join(v)})' for k, v in missing.items()]
    count = len(planned) - len(there)
    notes.append(
      f'{count} of {len(planned)} planned pairs {"is" if count == 1 else "are"}'
      f' not finished, and not part of this: {"; ".join(listed)}.'
    )
  if len(study.looked_at) > 1:
    listed = ', '.join(map(str, study.looked_at))
    notes.append(
      f'All pairs but those of seed {listed} were added when these had been'
      ' looked at and told little. Intervals and p-values take no account of'
      ' it; what changes without them is said below.'
    )
  notes += [
    f'Measured of {x.title}: {x.sizes.num_examples} test examples,'
    f' {x.sizes.num_paths} paths of each depth, {x.sizes.few_examples} examples'
    ' for mechanism.'
    for x in study.comparisons
    if x.sizes and any(run.comparison == x for run in finished)
  ]
  notes += [
    f'{x.name} diverged: {x.diverged()}. It is part of no pair.'
    for x in diverged
  ]
  pairs = len(first.seeds)
  if study.exploratory:
    notes.append('Exploratory: no claim is tested, and no verdict given.')
  elif pairs < statistics.LEAST_COUNT:
    notes.append(
      f'{statistics.pairs_text(pairs)} of runs: with fewer than'
      f' {statistics.LEAST_COUNT} nothing can be told, and no verdict is given.'
    )
  for run in finished:
    notice = _provenance(run)['data']['notice']
    if notice:
      notes.append(f'{notice}.')
    if run.config().model.talking_heads:
      notes.append(
        f'{run.comparison.title}: {runs_lib.TALKING_HEADS}; logits that are'
        ' swapped are those before the mix of weights.'
      )
  return list(dict.fromkeys(notes))


def _provenance(run):
  return workdir_lib.read_json(run.workdir / 'provenance.json')


def _run_row(run, evidence):
  result = workdir_lib.read_json(run.workdir / 'result.json')
  provenance = _provenance(run)
  data = provenance['data']
  starts = provenance['starts']
  epoch = evidence.value(
    run.normalizer,
    run.seed,
    analysis='training',
    quantity='seconds an epoch',
  )
  return {
    'run': run.name,
    'steps': result['step'],
    'test accuracy': f'{result["test"]["accuracy"]:.4f}',
    'validation accuracy': f'{result["validation"]["accuracy"]:.4f}',
    'test loss': f'{result["test"]["loss"]:.4f}',
    'largest column error': f'{result["test"]["column_error"]:.2g}',
    'minutes': f'{result["train_s"] / 60:.0f}',
    'minutes an epoch': f'{epoch / 60:.1f}',
    'data': f'{data["name"]}, {data["splits"]["train"]} for training,'
    f' {data["fingerprint"][:8]}',
    'code': ', '.join(dict.fromkeys(map(_commit, starts))),
  }


def _commit(start):
  commit, dirty, _ = start['git_commit'].partition('-dirty')
  return f'{commit[:10]}{dirty}' or 'no checkout'


def lines(answer: claims_lib.Answer) -> list[dict[str, Any]]:
  """A claim's numbers and verdicts, a line for what differs in depth alone."""
  claim = answer.claim
  unit = f' {claim.unit}' if claim.unit else ''
  return [
    {
      'tested': label,
      'measured': f'{statistics.numbers(members, claim.number)}{unit}',
      'n': _range(x.test.sample.count for x in members),
      'verdict': statistics.overall(members),
    }
    for label, members in statistics.by_label(answer.judged).items()
  ]


def _range(counts):
  counts = sorted(set(counts))
  return counts[0] if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'


def text(answer: claims_lib.Answer) -> list[str]:
  """A claim and what came of it, as lines of text."""
  claim = answer.claim
  return [
    f'{claim.letter}. {claim.statement} {answer.verdict}',
    f'   {claim.definition}',
    *(
      f'   {x["tested"]}: {x["measured"]} (n = {x["n"]}): {x["verdict"]}'
      for x in lines(answer)
    ),
    *(f'   {x}' for x in answer.details),
  ]


def as_json(content: Content) -> dict[str, Any]:
  """What the page and other programs read."""
  study = content.study
  return {
    'study': study.name,
    'title': study.title,
    'preset': study.preset,
    'training': study.comparisons[0].title if study.comparisons else '',
    'sizes': dataclasses.asdict(study.sizes),
    'claims': [_claim_json(study, x) for x in content.answers],
    'figures': [
      {'name': x.name, 'caption': x.caption} for x in content.figures
    ],
    'robustness': content.robustness,
    'choices': robustness.matrix(content.variations),
    'tables': content.tables,
    'notes': content.notes,
    'revisions': content.revisions,
  }


def _claim_json(study, answer):
  claim = answer.claim
  return {
    'letter': claim.letter,
    'statement': claim.statement,
    'source': claim.source,
    'definition': claim.definition,
    'unit': claim.unit,
    'verdict': answer.verdict,
    'lines': lines(answer),
    'details': answer.details,
    'command': f'python -m launch.reproduce --study={study.name}'
    f' --preset={study.preset} --claims={claim.letter}',
    'tests': [_test_row(x) for x in answer.judged],
  }


def _test_row(judged):
  test = judged.test
  return {
    'label': test.label,
    'depth': test.depth,
    'mean': test.sample.mean,
    'half_width': test.sample.half_width,
    'count': test.sample.count,
    'margin': test.margin,
    'p': test.p_value,
    'corrected_p': judged.corrected,
    'verdict': judged.verdict,
  }


def write(content: Content, folder: pathlib.Path) -> dict[str, Any]:
  """Writes tables and figures; returns what is in `CONTENT`."""
  folder.mkdir(parents=True, exist_ok=True)
  found = _finite(as_json(content))
  tests = [
    {'claim': x['letter'], **test}
    for x in found['claims']
    for test in x['tests']
  ]
  tables.write(folder / 'tests', tests)
  for name, rows in content.large_tables.items():
    tables.write(folder / name, rows)
  if content.variations:
    tables.write(folder / 'robustness', robustness.rows(content.variations))
  for plot in content.figures:
    figures.save(folder / plot.name, plot.draw, plot.size)
  text = json.dumps(found, indent=1, ensure_ascii=False)
  workdir_lib.write_text(folder / CONTENT, text + '\n')
  return found


def _finite(x):
  if isinstance(x, Mapping):
    return {k: _finite(v) for k, v in x.items()}
  if isinstance(x, (list, tuple)):
    return [_finite(v) for v in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x


def read(folder: pathlib.Path) -> dict[str, Any] | None:
  """What `write` has written; None if nothing is there."""
  path = folder / CONTENT
  return workdir_lib.read_json(path) if path.exists() else None


def check_preset(folder: pathlib.Path, preset: str) -> None:
  """Refuses a directory with results of another preset.

  Raises:
    errors.UserError: names both.
  """
  there = read(folder)
  if there and there['preset'] != preset:
    raise errors.UserError(
      f'{folder} holds results of --preset={there["preset"]}, not of'
      f' --preset={preset}. Choose another --output.'
    )
