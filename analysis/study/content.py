"""All that a study has found, ready to be written: claims, tables, figures."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib
import json
import math
import pathlib
from typing import Any

import pandas as pd

from analysis import sequence_length
from analysis.common import curves
from analysis.common import figures
from analysis.common import frames
from analysis.common import runs as runs_lib
from analysis.common import statistics
from analysis.study import claims as claims_lib
from analysis.study import comparisons
from analysis.study import measure
from analysis.study import plan
from analysis.study import plots
from analysis.study import results
from analysis.study import robustness
from analysis.study.claims import decay
from analysis.study.evidence import Evidence
from sinkformer_jax.training import workdir as workdir_lib

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
  'exponent',
  'largest',
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
    tables: by the name of their file; those that are empty are not written.
      ``tests`` and ``pairs`` (their numbers by seed), ``curves`` over runs,
      ``differences`` of pairs, ``depths`` (every run, where verdicts are),
      ``comparisons``, ``levels``, ``losses`` and ``tuned`` (see the module
      `comparisons`), ``robustness``, ``runs``.
    robustness: what other choices change, in sentences.
    notes: what a reader has to know.
    revisions: what measured.
  """

  study: plan.Study
  answers: list[claims_lib.Answer]
  figures: list[curves.Plot]
  tables: dict[str, pd.DataFrame]
  robustness: list[str]
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
  parts = [x.table for x in measured if len(x.table)]
  table = frames.concat([*parts, *map(measure.training_table, finished)])
  num_layers = study.runs(pathlib.Path())[0].config().model.num_layers
  return {
    x.tag: Evidence(frames.select(table, tag=x.tag), num_layers)
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
  answers, variations = [], pd.DataFrame()
  if not study.exploratory:
    letters = claims_lib.letters(study.name)
    answers = claims_lib.answers(letters, first)
    variations = robustness.variations(first, letters)
  losses = comparisons.losses(study, evidence, diverged)
  summary = robustness.summary(variations)
  if study.exploratory_seeds:
    summary += robustness.without(answers, first, study.exploratory_seeds)
  problems = [note for x in measured for note in x.notes]
  return Content(
    study=study,
    answers=answers,
    figures=_figures(study, evidence, variations),
    tables=_tests_and_pairs(answers)
    | _large_tables(list(evidence.values()))
    | {
      'comparisons': comparisons.tests(study, evidence),
      'levels': comparisons.levels(study, evidence),
      'losses': losses,
      'tuned': comparisons.tuned(study, evidence, losses),
      'robustness': variations,
      'runs': pd.DataFrame([_run_row(x) for x in finished]),
    },
    robustness=summary,
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
    rows = frames.select(first.table, analysis='sequence_length')
    found += sequence_length.plots(rows)
  return found


def evidence_alone(study: plan.Study, result: frames.Result) -> Evidence:
  """What is known in a study without runs, from its one analysis."""
  table = result.table().assign(
    analysis=study.alone, at=measure.LAST, tag='', stack=''
  )
  return Evidence(table, study.sizes.num_layers)


def alone(study: plan.Study, result: frames.Result) -> Content:
  """The content of a study without runs, see `evidence_alone`."""
  evidence = evidence_alone(study, result)
  answers = claims_lib.answers(claims_lib.letters(study.name), evidence)
  module = importlib.import_module(f'analysis.{study.alone}')
  shown = frames.select(evidence.table, norm='spectral', scaling='absolute')
  names = (*_COLUMNS, 'group', 'scale', 'logit_norm')
  return Content(
    study=study,
    answers=answers,
    figures=module.plots(result.table()),
    tables=_tests_and_pairs(answers) | {'curves': _short(shown, names)},
    robustness=[],
    notes=result.notes,
    revisions=[measure.revision()],
  )


def _tests_and_pairs(answers):
  """Every test of every claim, and its numbers pair by pair."""
  judged = [(x.claim.letter, y) for x in answers for y in x.judged]
  tests = [{'claim': x, **_test_row(y)} for x, y in judged]
  pairs = [
    {
      'claim': letter,
      'label': x.test.label,
      'depth': x.test.depth,
      'seed': seed,
      'value': value,
    }
    for letter, x in judged
    for seed, value in x.test.pairs.items()
  ]
  return {'tests': pd.DataFrame(tests), 'pairs': pd.DataFrame(pairs)}


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


def _large_tables(evidences):
  """Curves and differences of the first comparison, some depths of all."""
  depths = [
    _short(
      shown[shown['depth'].isna() | shown['depth'].isin(evidence.depths)],
      _COLUMNS,
    )
    for evidence in evidences
    if len(evidence.table)
    for shown in [evidence.table[_is_shown(evidence.table)]]
  ]
  found = {'curves': [], 'differences': [], 'depths': depths}
  first = evidences[0]
  shown = first.table[_is_shown(first.table)]
  rows = frames.select(shown, analysis=_CURVES, seed=first.seeds)
  for (analysis, at), part in rows.groupby(['analysis', 'at'], sort=False):
    about = {'analysis': analysis, 'at': at}
    for name, of_rows in (
      ('curves', frames.over_seeds),
      ('differences', frames.differences),
    ):
      table = of_rows(part)
      names = [x for x in table if x not in _SAME]
      found[name].append(_short(table, names).assign(**about))
  return {name: frames.concat(parts) for name, parts in found.items()}


def _short(table, names):
  """Some columns, and no more digits than mean anything."""
  table = table.reindex(columns=list(names))
  floats = table.select_dtypes('float').columns
  rounded = {
    x: [float(f'{y:.6g}') for y in table[x]] for x in floats if x != 'depth'
  }
  return table.assign(**rounded)


def _is_shown(table):
  """The headline of every run, and what claims and figures are made of."""
  absolute = (table['norm'] == 'spectral') & (table['scaling'] == 'absolute')
  relative = (table['norm'] == 'spectral') & (table['scaling'] == 'relative')
  quantity = table['quantity']
  paths = quantity == 'path, first layers'
  everything = pd.Series(True, table.index)
  wanted = {
    'path_products': paths & absolute,
    'layer_outputs': relative
    & (table['at'] == measure.LAST)
    & quantity.isin(['hidden', decay.FIXED.output]),
    'attention': quantity == 'spread of column sums',
    'mechanism': paths,
    'iterations': (quantity == 'column error')
    | ((table['ablation'] == decay.HEADS) & absolute),
    'matched_control': absolute | (quantity == 'logit spread'),
    'lipschitz': everything,
    'theory': everything,
    'step_time': everything,
    'sequence_length': everything,
    'training': everything,
  }
  chosen = pd.Series(False, table.index)
  for analysis, where in wanted.items():
    chosen |= (table['analysis'] == analysis) & where
  return chosen


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
  if len(study.exploratory_seeds) > 1:
    listed = ', '.join(map(str, study.exploratory_seeds))
    notes.append(
      f'The pairs of seed {listed} are exploratory: all other pairs were added'
      ' when the results of these were known. Intervals and p-values take no'
      ' account of it; what changes without them is said below.'
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
      f'There {"is" if pairs == 1 else "are"} {statistics.pairs_text(pairs)} of'
      f' runs: with fewer than {statistics.LEAST_COUNT} every verdict is'
      f' {statistics.INCONCLUSIVE}.'
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


def _run_row(run):
  result = workdir_lib.read_json(run.workdir / 'result.json')
  provenance = _provenance(run)
  data = provenance['data']
  (seconds,) = frames.select(
    measure.training_table(run), quantity='seconds an epoch'
  )['mean']
  return {
    'run': run.name,
    'steps': result['step'],
    'test_accuracy': result['test']['accuracy'],
    'validation_accuracy': result['validation']['accuracy'],
    'test_loss': result['test']['loss'],
    'column_error': result['test']['column_error'],
    'minutes': result['train_s'] / 60,
    'minutes_an_epoch': seconds / 60,
    'data': data['name'],
    'training_examples': data['splits']['train'],
    'fingerprint': data['fingerprint'][:8],
    'code': ', '.join(dict.fromkeys(map(_commit, provenance['starts']))),
  }


def _commit(start):
  commit, dirty, _ = start['git_commit'].partition('-dirty')
  return f'{commit[:10]}{dirty}' or 'no checkout'


def text(answer: claims_lib.Answer) -> list[str]:
  """A claim and what came of it, as lines of text."""
  claim = answer.claim
  lines = [
    f'{claim.letter}. {claim.statement} {answer.verdict}',
    f'   {claim.definition}',
  ]
  unit = f' {claim.unit}' if claim.unit else ''
  for x in answer.judged:
    where = '' if x.test.depth is None else f' at {x.test.depth}'
    lines.append(
      f'   {x.test.label}{where}: {claim.number(x.test.sample)}{unit}'
      f' (n = {x.test.sample.count}): {x.verdict}'
    )
  return [*lines, *(f'   {x}' for x in answer.details)]


def as_json(content: Content) -> dict[str, Any]:
  """What the page and other programs read, beside the tables."""
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
    'ratio': claim.ratio,
    'verdict': answer.verdict,
    'details': answer.details,
    'command': f'python -m launch.reproduce --study={study.name}'
    f' --preset={study.preset} --claims={claim.letter}',
    'tests': [_test_row(x) for x in answer.judged],
  }


def write(content: Content, folder: pathlib.Path) -> None:
  """Writes tables, figures and `results.CONTENT`."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, table in content.tables.items():
    if len(table):
      frames.write(folder / name, table)
  for plot in content.figures:
    figures.save(folder / plot.name, plot.draw, plot.size)
  found = _finite(as_json(content))
  text = json.dumps(found, indent=1, ensure_ascii=False)
  workdir_lib.write_text(folder / results.CONTENT, text + '\n')


def _finite(x):
  if isinstance(x, Mapping):
    return {k: _finite(v) for k, v in x.items()}
  if isinstance(x, (list, tuple)):
    return [_finite(v) for v in x]
  return None if isinstance(x, float) and not math.isfinite(x) else x
