"""The page of a study, the page of all, and the table of claims in Markdown.

Made from what `content.write` has written, so that studies done at other times
stand beside each other.
"""

from collections.abc import Sequence
import functools
import os
import pathlib
from typing import Any

import pandas as pd

from analysis.common import frames
from analysis.common import pages
from analysis.common import statistics
from analysis.study import evidence
from analysis.study.claims import causes
from sinkformer_jax.training import workdir as workdir_lib

PAGE, CLAIMS = 'index.html', 'claims.md'
TITLE = 'Rank decay: softmax and Sinkhorn attention'
QUESTION = (
  'Does doubly stochastic (Sinkhorn) attention keep token representations apart'
  ' better than softmax attention?'
)
_WORDS = (
  'The residual of tokens, or of a product of attention matrices, is what is'
  ' left once the mean of its rows is taken away: 0 is total collapse. A path'
  ' takes one head in each layer; its product is that of their attention'
  ' matrices. Decay is the fall of the residual with depth. Sizes are log10 of'
  ' the spectral norm.',
  'There is no number where more than'
  f' {evidence.MOST_LEFT_OUT:.0%} of the values in a mean are below the'
  ' resolution of float64.',
)
_DESIGN = (
  'The tests were fixed when one exploratory pair (MNIST, one epoch, seed 0)'
  ' had been seen, before all others. The unit is the pair of runs with one'
  ' seed: the same initial weights, batches and learning rate, read on the same'
  ' held-out examples and paths.',
  'Four definitions were corrected when results were known. A gap below 0 is no'
  ' larger gap for being nearer to 0 than another (c). Values below float64 are'
  ' counted as its limit one by one, no longer run by run (d). A residual that'
  ' grows does not collapse (e). Steps are timed in turn, no longer while they'
  ' trained (m).',
  'Numbers are means over pairs with 95% t intervals. A test is two-sided. A'
  f' claim is {statistics.SUPPORTED} or {statistics.CONTRADICTED} where'
  " p < 0.05 after Holm's correction over all tests of the claim; all else is"
  f' {statistics.INCONCLUSIVE}. With fewer than'
  f' {statistics.LEAST_COUNT} pairs every verdict is'
  f' {statistics.INCONCLUSIVE}. Intervals are not corrected, verdicts are: an'
  ' interval of an inconclusive test may leave 0 out.',
  'Verdicts are given at depths 4, 12 and 24, as far as the models are deep,'
  ' and at the last layer.',
)
# Of studies without runs.
_DESIGN_ALONE = (
  'Numbers are means with 95% t intervals over what n counts, which each claim'
  f' says. A test is two-sided. A claim is {statistics.SUPPORTED} or'
  f" {statistics.CONTRADICTED} where p < 0.05 after Holm's correction over all"
  ' tests of the claim.',
)
_DECAY = {
  statistics.SUPPORTED: 'decay more slowly than those of softmax',
  statistics.CONTRADICTED: 'decay faster than those of softmax',
  statistics.INCONCLUSIVE: 'show no conclusive difference',
}
# Claim, label of its tests, what is said of them.
_SENTENCES = (
  ('a', 'path products', 'Path products of the Sinkhorn model', _DECAY),
  (
    'b',
    'layer outputs',
    'Outputs of attention layers of the Sinkhorn model',
    {
      statistics.SUPPORTED: 'keep a larger relative residual',
      statistics.CONTRADICTED: 'keep a smaller relative residual',
      statistics.INCONCLUSIVE: 'show no conclusive difference',
    },
  ),
  (
    'n',
    causes.NORMALIZER,
    'With the logits held fixed, path products under Sinkhorn',
    _DECAY,
  ),
  (
    'n',
    causes.LOGITS,
    'With the normalizer held fixed, path products of the logits of the'
    ' Sinkhorn-trained model',
    _DECAY,
  ),
  (
    'n',
    causes.MATCHED,
    "At matched attention entropy (softmax's), path products of the Sinkhorn"
    ' model',
    _DECAY,
  ),
)
_CHOICES = (
  'Verdicts under each choice. A star marks another verdict than that of the'
  ' fixed choice. "Too few" means that fewer than 3 pairs have a number that'
  ' float64 resolves; an empty cell, that the choice does not apply. Dong norm:'
  ' the root of the product of the largest row sum and the largest column sum'
  ' of absolute values (Dong et al. 2021). Relative to the whole: divided by'
  ' the norm of the product, or of the tokens of a layer, themselves; to layer'
  ' 0: by the residual at the start. Sinkhorn read with other iterations:'
  ' trained with its own; for path products the captured logits are normalized'
  ' anew, for layer outputs the model is run anew.'
)
_PARTS = {
  'comparisons': (
    'Trainings side by side',
    'Sinkhorn minus softmax. Numbers without a verdict are exploratory.',
  ),
  'tuned': (
    'Each normalizer at its own best learning rate',
    'Sinkhorn minus softmax, without verdicts. The learning rate of each is'
    ' the one with the lowest validation loss of seed 0.',
  ),
}
_TABLES = {
  'levels': ('Softmax and Sinkhorn by themselves', 'Means over pairs.'),
  'losses': ('Validation losses of all learning rates', ''),
}


def write(content: dict[str, Any]) -> None:
  """Writes the page and the table of claims of one study.

  Args:
    content: what `results.read` gives.
  """
  folder = content['folder']
  workdir_lib.write_text(folder / PAGE, render(content))
  workdir_lib.write_text(folder / CLAIMS, claims_table([content]))


def write_all(contents: Sequence[dict[str, Any]], output: pathlib.Path) -> None:
  """Writes the page of all studies, which links to theirs.

  Args:
    contents: what `results.read` gives, of each.
    output: the directory to write to.
  """
  text = pages.render(
    'overview.html',
    title=TITLE,
    question=QUESTION,
    contents=[
      ('claims', 'Claims by study'),
      ('studies', 'Studies'),
      ('methods', 'Methods'),
    ],
    studies=[
      {
        'title': x['title'],
        'answer': answer(x),
        'link': f'{os.path.relpath(x["folder"], output)}/{PAGE}',
      }
      for x in contents
    ],
    by_study=pages.table(pd.DataFrame(by_study(contents))),
    methods=[*_DESIGN, *_WORDS],
  )
  workdir_lib.write_text(output / PAGE, text)
  workdir_lib.write_text(output / CLAIMS, claims_table(contents))


def render(content: dict[str, Any]) -> str:
  """The page of a study, HTML with images in it."""
  found, tables = content['claims'], content['tables']
  figures = [
    x
    | {
      'title': '',
      'image': pages.image(content['folder'] / f'{x["name"]}.png'),
    }
    for x in content['figures']
  ]
  parts = [
    _effects_part(name, tables[name]) for name in _PARTS if name in tables
  ]
  parts += [
    _table_part(name, tables[name]) for name in _TABLES if name in tables
  ]
  choices = _choices(tables.get('robustness', pd.DataFrame()))
  contents = [('claims', 'Claims')] * bool(found)
  contents += [('figures', 'Figures')] * bool(figures)
  if content['robustness'] or choices:
    contents.append(('choices', 'Choices of measure'))
  contents += [(x['id'], x['title']) for x in parts]
  contents += [('methods', 'Methods'), ('provenance', 'Provenance')]
  design = _DESIGN if content['training'] else _DESIGN_ALONE
  return pages.render(
    'study.html',
    title=content['title'],
    question=QUESTION,
    answer=answer(content),
    contents=contents,
    notes=content['notes'],
    claims=[_claim(x) for x in found],
    claim_groups=_claim_groups(found),
    columns=pages.columns(y['depth'] for x in found for y in x['tests']),
    figures=figures,
    robustness=content['robustness'],
    choices=choices,
    parts=parts,
    methods=[*design, *_WORDS],
    provenance=_provenance(content),
    runs='runs' in tables and pages.table(tables['runs']),
  )


def answer(content: dict[str, Any]) -> list[str]:
  """What a study of runs says about its main question, in sentences."""
  found = {x['letter']: x['tests'] for x in content['claims']}
  sentences = []
  for letter, label, begin, words in _SENTENCES:
    tests = [
      x
      for x in found.get(letter, ())
      if x['label'] == label and x['mean'] is not None
    ]
    if not tests:
      continue
    if _are_few(tests):
      few = statistics.pairs_text(max(x['count'] for x in tests))
      sentences.append(f'{begin}: {few} of runs, too few for a verdict.')
      continue
    phrases = []
    for verdict in statistics.VERDICTS:
      where = [str(x['depth']) for x in tests if x['verdict'] == verdict]
      if where:
        depths = f'depth{"s" * (len(where) > 1)} {_listed(where)}'
        phrases.append(f'{words[verdict]} at {depths}')
    sentences.append(f'{begin} {"; they ".join(phrases)}.')
  return sentences


def _listed(words):
  *most, last = words
  return f'{", ".join(most)} and {last}' if most else last


def _are_few(tests):
  """Whether no test has enough pairs for a verdict."""
  return all(x['count'] < statistics.LEAST_COUNT for x in tests)


def _claim(claim):
  tests = pd.DataFrame(claim['tests'])
  return claim | {'short': short_verdict(claim), 'tests': pages.table(tests)}


def _claim_groups(found):
  """Lines of all claims; plots have one scale for each unit."""
  sizes = {}
  for claim in found:
    unit = claim['unit'], claim.get('ratio')
    means = [x['mean'] for x in claim['tests'] if x['mean'] is not None]
    sizes.setdefault(unit, []).extend(means)
  return [
    {
      'id': f'claim-{claim["letter"]}',
      'title': f'{claim["letter"]}. {claim["statement"]}',
      'note': f'{claim["source"]}{_unit(claim)}',
      'lines': _claim_lines(claim, sizes[claim['unit'], claim.get('ratio')]),
    }
    for claim in found
  ]


def _unit(claim):
  if claim.get('ratio'):
    return '; ratio'
  return f'; {claim["unit"]}' if claim['unit'] else ''


def _claim_lines(claim, sizes):
  if not claim['tests']:
    return []
  number = statistics.number
  if claim.get('ratio'):
    number = functools.partial(statistics.ratio, claim['ratio'])
  return pages.lines(pd.DataFrame(claim['tests']), pages.limit(sizes), number)


def _effects_part(name, table):
  title, text = _PARTS[name]
  tests = table.rename(columns={'tested': 'label', 'pairs': 'count'})
  # Accuracies have a scale of their own.
  is_accuracy = tests['label'].str.contains('accuracy')
  parts = [
    (part, pages.limit(part['mean']))
    for part in (tests[~is_accuracy], tests[is_accuracy])
  ]
  groups = [
    {
      'id': f'{name}-{i}',
      'title': training,
      'note': '',
      'lines': [
        line
        for part, end in parts
        for line in pages.lines(frames.select(part, training=training), end)
      ],
    }
    for i, training in enumerate(tests['training'].unique())
  ]
  return {
    'id': name,
    'title': title,
    'text': text,
    'groups': groups,
    'columns': pages.columns(tests['depth']),
    'heading': 'Sinkhorn minus softmax',
    'table': None,
  }


def _table_part(name, table):
  title, text = _TABLES[name]
  if name == 'levels':
    keys = ['training', 'quantity', 'normalizer']
    table = table.assign(
      depth=table['depth'].map(lambda x: '' if x != x else f'depth {x:.0f}')
    )
    order = table['depth'].unique()
    table = table.pivot(index=keys, columns='depth', values='mean')
    table = table[list(order)].reset_index()
  return {
    'id': name,
    'title': title,
    'text': text,
    'groups': None,
    'table': pages.table(table),
  }


def _choices(table):
  """A row for each choice: its verdict in claims a and b at each depth."""
  if table.empty or table['pairs'].max() < statistics.LEAST_COUNT:
    return None
  main = frames.select(table, claim=['a', 'b'])
  words = main['verdict'].where(
    main['pairs'] >= statistics.LEAST_COUNT, 'too few'
  )
  star = main['changes'].map(lambda x: ' *' if x else '')
  where = main['claim'] + ' at ' + main['depth'].map('{:.0f}'.format)
  grid = pd.DataFrame(
    {'choice': main['choice'], 'where': where, 'cell': words + star}
  )
  order = list(dict.fromkeys(where))
  grid = grid.pivot(index='choice', columns='where', values='cell')
  grid = grid.loc[main['choice'].unique(), order].fillna('')
  changed = frames.select(table, claim='c', changes=True)
  listed = {
    choice: str(len(rows)) for choice, rows in changed.groupby('choice')
  }
  return {
    'heads': [*order, 'tests of c that change'],
    'rows': [
      {'choice': choice, 'cells': [*cells, listed.get(choice, '')]}
      for choice, cells in zip(grid.index, grid.to_numpy(), strict=True)
    ],
    'note': _CHOICES,
  }


def _provenance(content):
  """How much was measured of runs, and by which code."""
  sizes, lines = content['sizes'], [f'Preset {content["preset"]}.']
  if content['training']:
    lines.append(
      f'{sizes["num_examples"]} test examples and {sizes["num_paths"]} paths of'
      f' each depth; {sizes["few_examples"]} examples for mechanism, Lipschitz'
      f' constants and exact collapse; {sizes["num_draws"]} random matrices.'
    )
  return [*lines, f'Measured by {"; ".join(content["revisions"])}.']


def by_study(contents: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
  """A line for each claim: its verdict in each study, and whether they agree.

  Two studies agree in a test (of one label and depth) if both give it the same
  verdict, and differ if one supports and the other contradicts it.
  """
  studies = [x['study'] for x in contents if x['claims']]
  lines, tests = {}, {}
  for content in contents:
    for claim in content['claims']:
      about = f'{claim["letter"]}. {claim["statement"]}'
      line = lines.setdefault(
        about, {'claim': about} | dict.fromkeys(studies, '')
      )
      line[content['study']] = short_verdict(claim)
      tests.setdefault(about, []).extend(claim['tests'])
  for about, line in lines.items():
    line['studies'] = _agreement(tests[about])
  return [lines[x] for x in sorted(lines)]


def _agreement(tests):
  verdicts = {}
  for test in tests:
    if test['verdict'] != statistics.INCONCLUSIVE:
      where = test['label'], test['depth']
      verdicts.setdefault(where, []).append(test['verdict'])
  found = [
    'agree' if len(set(x)) == 1 else 'differ'
    for x in verdicts.values()
    if len(x) > 1
  ]
  return _tally(found, ('agree', 'differ')) if found else ''


def short_verdict(claim: dict[str, Any]) -> str:
  """The verdict; of one that differs between labels, how many tests say so."""
  if claim['tests'] and _are_few(claim['tests']):
    return 'too few pairs'
  verdicts = [x['verdict'] for x in claim['tests']]
  if len(set(verdicts)) < 2 or len({x['label'] for x in claim['tests']}) < 2:
    return claim['verdict']
  return _tally(verdicts, statistics.VERDICTS)


def _tally(found, words):
  """In how many tests each of some words is found."""
  parts = [f'{x} in {found.count(x)}' for x in words if x in found]
  return f'{", ".join(parts)} of {len(found)} tests'


def claims_table(contents: Sequence[dict[str, Any]]) -> str:
  """All claims as a Markdown table, for a README; one number a cell."""
  rows = [
    (claim['letter'], content['study'], claim, line)
    for content in contents
    for claim in content['claims']
    for line in _claim_lines(claim, ())
  ]
  if not rows:
    return ''
  depths = pages.columns(y['depth'] for *_, x, _ in rows for y in x['tests'])
  heads = [f'depth {x}' if x else 'all' for x in depths]
  table = [['claim', 'study', 'tested', *heads, 'n', 'verdict']]
  table.append(['---'] * len(table[0]))
  for letter, study, claim, line in sorted(rows, key=lambda x: x[:2]):
    effects = [
      line.effects[x].text if x in line.effects else '' for x in depths
    ]
    about = f'{letter}. {claim["statement"]}'
    table.append([about, study, line.label, *effects, line.pairs, line.verdict])
  return ''.join(
    f'| {" | ".join(x.replace("|", chr(92) + "|") for x in cells)} |\n'
    for cells in table
  )
