"""The page of one study or of several, and the table of claims in Markdown.

Made from what `content.write` has written, so that studies done at other times
stand beside each other.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from analysis.common import markup
from analysis.common import statistics
from analysis.study import decay
from analysis.study import evidence
from sinkformer_jax.training import workdir as workdir_lib

PAGE, CLAIMS = 'index.html', 'claims.md'
_WORDS = (
  'The residual of tokens, or of a product of attention matrices, is what is'
  ' left of it once what all tokens share (the mean of its rows) is taken away:'
  ' 0 is total collapse. A path takes one head in each layer; its product is'
  ' that of their attention matrices. Decay is the fall of the residual with'
  ' depth. Sizes are log10 of the spectral norm.'
)
_RESOLUTION = (
  'There is no number where more than'
  f' {evidence.MOST_LEFT_OUT:.0%} of what it is a mean of is below the'
  ' resolution of float64.'
)
_DESIGN = (
  'What is tested was fixed when one pair (MNIST, one epoch, seed 0) had been'
  ' looked at, before all others. The unit is the pair of runs with one seed:'
  ' the same initial weights, batches and learning rate, read on the same'
  ' held-out examples and paths.',
  'Corrected later, when results were there: a gap that is below 0 is no larger'
  ' gap for being nearer to 0 than another (c); values below float64 are'
  ' counted as its limit one by one, no longer run by run (d); a residual that'
  ' grows does not collapse (e); steps are timed in turn, no longer while they'
  ' trained (m).',
  'Numbers are means over pairs with 95% t intervals. A test is two-sided;'
  f' "{statistics.HOLDS}" and "{statistics.FAILS}" need p < 0.05 after'
  " Holm's correction over all tests of the claim; otherwise it"
  f' {statistics.UNKNOWN} from this. With fewer than'
  f' {statistics.LEAST_COUNT} pairs nothing can be told. Intervals are not'
  ' corrected, verdicts are: where nothing can be told an interval may leave 0'
  ' out.',
  'Verdicts are given at depths 4, 12 and 24, as far as the models are deep,'
  ' and at the last layer.',
)
# Of studies without runs.
_DESIGN_ALONE = (
  'Numbers are means with 95% t intervals over what n counts, which each claim'
  f' says. A test is two-sided; "{statistics.HOLDS}" and "{statistics.FAILS}"'
  " need p < 0.05 after Holm's correction over all tests of the claim.",
)
_DECAY = {
  statistics.HOLDS: 'decay more slowly',
  statistics.FAILS: 'decay faster',
  statistics.UNKNOWN: 'cannot be told apart from those of softmax',
}
# Claim, label of its tests, what is said of them.
_SENTENCES = (
  (
    'a',
    'path products',
    'With Sinkhorn, products of trained attention matrices',
    _DECAY,
  ),
  (
    'b',
    'layer outputs',
    'With Sinkhorn, the outputs of attention layers',
    {
      statistics.HOLDS: 'keep more of their residual',
      statistics.FAILS: 'keep less of their residual',
      statistics.UNKNOWN: 'cannot be told apart from those of softmax',
    },
  ),
  (
    'n',
    decay.NORMALIZER,
    'On the same logits, products normalized by Sinkhorn',
    _DECAY,
  ),
  (
    'n',
    decay.LOGITS,
    'Under the same normalizer, products of logits trained with Sinkhorn',
    _DECAY,
  ),
  (
    'n',
    decay.MATCHED,
    'At temperatures that give both models the attention entropy of softmax,'
    ' products of the Sinkhorn model',
    _DECAY,
  ),
)
_CHOICES = (
  'Verdicts under each choice; a star: another than the one fixed. ?: cannot be'
  ' told. Too few: fewer than 3 pairs have a number that float64 resolves.'
  ' Empty: the choice does not apply. Dong norm: the root of the product of the'
  ' largest row sum and the largest column sum of absolute values (Dong et al.'
  ' 2021). Relative to the whole: divided by the norm of the product, or of the'
  ' tokens of a layer, themselves; to layer 0: by the residual at the start.'
  ' Sinkhorn read with other iterations: trained with its own; for path'
  ' products the captured logits are normalized anew, for layer outputs the'
  ' model is run anew.'
)


def write(
  contents: Sequence[dict[str, Any]],
  folders: Sequence[pathlib.Path],
  output: pathlib.Path,
) -> None:
  """Writes the page and the table of claims.

  Args:
    contents: of the studies, see `content.as_json`.
    folders: where their figures are.
    output: the directory to write to.
  """
  workdir_lib.write_text(output / PAGE, render(contents, folders))
  workdir_lib.write_text(output / CLAIMS, claims_table(contents))


def render(
  contents: Sequence[dict[str, Any]], folders: Sequence[pathlib.Path]
) -> str:
  """The page, HTML with images in it; see `write`."""
  several = len(contents) > 1
  title = 'Rank decay: softmax and Sinkhorn attention'
  parts = [markup.heading(title if several else contents[0]['title'], 1)]
  for content in contents:
    notes = [f'{content["study"]}: {x}' for x in content['notes']]
    parts += [markup.paragraph(x, 'notice') for x in notes]
  for content in contents:
    about, *sentences = answer(content) or ['']
    if sentences:
      parts += [markup.paragraph(about), markup.items(sentences)]
  rows = _claim_rows(contents)
  if rows:
    parts.append(markup.heading('Claims'))
    parts.append(markup.table(by_study(contents) if several else []))
    trained = any(x['training'] for x in contents)
    parts += [
      markup.table(rows),
      markup.items(_DESIGN if trained else _DESIGN_ALONE),
    ]
  parts.append(markup.paragraph(f'{_WORDS} {_RESOLUTION}'))
  for content, folder in zip(contents, folders, strict=True):
    parts += _study(content, folder, several)
  return markup.document(title, parts)


def answer(content: dict[str, Any]) -> list[str]:
  """What a study of runs says about its main question, in sentences."""
  lines, count = [], 0
  of_letter = {x['letter']: x for x in content['claims']}
  for letter, label, begin, words in _SENTENCES:
    tests = [
      x
      for x in of_letter.get(letter, {'tests': []})['tests']
      if x['label'] == label and x['mean'] is not None
    ]
    if tests:
      phrases = _untested(tests) if _are_few(tests) else _phrases(tests, words)
      lines.append(f'{begin} {phrases}.')
      count = max(count, *(x['count'] for x in tests))
  if not lines:
    return []
  intervals = count >= statistics.LEAST_COUNT
  return [
    f'{content["study"]}, {content["training"]},'
    f' {statistics.pairs_text(count)} of runs; differences of log10 of the'
    ' residual,'
    f' {"95% intervals over pairs" if intervals else "not tested"}:',
    *lines,
  ]


def _are_few(tests):
  """Whether nothing could be told, whatever the numbers."""
  return all(x['count'] < statistics.LEAST_COUNT for x in tests)


def _untested(tests):
  numbers = ', '.join(f'{_interval(x)} at {x["depth"]}' for x in tests)
  return f'differ from those of softmax by {numbers}'


def _phrases(tests, words):
  phrases = []
  for verdict in statistics.VERDICTS:
    where = [x for x in tests if x['verdict'] == verdict]
    if where:
      numbers = ', '.join(f'{x["depth"]} ({_interval(x)})' for x in where)
      phrases.append(f'{words[verdict]} at depth {numbers}')
  return '; '.join(phrases)


def _interval(test, form='.2f'):
  if test['mean'] is None:
    return 'no number'
  half = test['half_width']
  interval = '' if half is None else f' ± {half:{form}}'
  return f'{test["mean"]:+{form}}{interval}'


def _claim_rows(contents):
  """One table of all claims; those of several studies below each other."""
  found = [
    (claim['letter'], content['study'], claim)
    for content in contents
    for claim in content['claims']
  ]
  several = len(contents) > 1
  rows = []
  for letter, study, claim in sorted(found, key=lambda x: x[:2]):
    statement = f'{letter}. {claim["statement"]} ({claim["source"]})'
    nothing = {'tested': '', 'measured': '', 'n': 0, 'verdict': 'not measured'}
    for line in claim['lines'] or [nothing]:
      about = {'claim': statement} | ({'study': study} if several else {})
      rows.append(about | line)
      # Once for all its lines.
      statement = study = ''
  return rows


def by_study(contents: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
  """A line for each claim: its verdict in each study, and whether they agree.

  Two studies agree in a test (of one label and depth) if both give it the same
  verdict, and differ if it holds in one and does not hold in the other.
  """
  studies = [x['study'] for x in contents if x['claims']]
  lines, tests = {}, {}
  for content in contents:
    for claim in content['claims']:
      about = f'{claim["letter"]}. {claim["statement"]}'
      line = lines.setdefault(
        about, {'claim': about} | dict.fromkeys(studies, '')
      )
      line[content['study']] = _short_verdict(claim)
      tests.setdefault(about, []).extend(claim['tests'])
  for about, line in lines.items():
    line['studies'] = _agreement(tests[about])
  return [lines[x] for x in sorted(lines)]


def _agreement(tests):
  verdicts = {}
  for test in tests:
    if test['verdict'] != statistics.UNKNOWN:
      where = test['label'], test['depth']
      verdicts.setdefault(where, []).append(test['verdict'])
  found = [
    'agree' if len(set(x)) == 1 else 'differ'
    for x in verdicts.values()
    if len(x) > 1
  ]
  return _tally(found, ('agree', 'differ')) if found else ''


def _short_verdict(claim):
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


def _study(content, folder, several):
  parts = []
  if several:
    parts.append(markup.heading(content['title']))
  level = 3 if several else 2
  parts += [
    markup.figure(folder / f'{x["name"]}.png', x['caption'])
    for x in content['figures']
  ]
  if content['robustness']:
    parts.append(markup.heading('What the choice of measure changes', level))
    parts.append(markup.items(content['robustness']))
  if content['choices']:
    parts.append(markup.table(content['choices']))
    parts.append(markup.paragraph(_CHOICES))
  for title, rows in content['tables'].items():
    if rows:
      parts += [markup.heading(title, level), markup.table(rows)]
  if content['claims']:
    title = 'Each claim: what is tested, and how'
    parts.append(markup.heading(title, level))
  parts += [_claim(x) for x in content['claims']]
  parts.append(
    markup.paragraph(
      f'Preset {content["preset"]}{_sizes(content)}. Measured by'
      f' {"; ".join(content["revisions"])}.'
    )
  )
  return parts


def _sizes(content):
  """How much was measured of runs; those of the others are in their claims."""
  sizes = content['sizes']
  if not content['training']:
    return ''
  return (
    f'; {sizes["num_examples"]} test examples and {sizes["num_paths"]} paths of'
    f' each depth, {sizes["few_examples"]} examples for mechanism, Lipschitz'
    f' constants and exact collapse, {sizes["num_draws"]} random matrices'
  )


def _claim(claim):
  title = f'{claim["letter"]}. {claim["statement"]} {_short_verdict(claim)}'
  body = markup.paragraph(f'Source: {claim["source"]}.')
  body += markup.paragraph(f'Tested: {claim["definition"]}')
  body += markup.items(claim['details'])
  body += markup.table(map(_p_row, claim['tests']))
  body += markup.lines([claim['command']])
  return markup.folded(title, body)


def _p_row(test):
  return {
    'tested': test['label'],
    'depth': '' if test['depth'] is None else test['depth'],
    'mean': _interval(test, '.3g'),
    'margin': '' if test['margin'] is None else f'{test["margin"]:.3g}',
    'n': test['count'],
    'p': f'{test["p"]:.2g}',
    'corrected': f'{test["corrected_p"]:.2g}',
    'verdict': test['verdict'],
  }


def claims_table(contents: Sequence[dict[str, Any]]) -> str:
  """All claims as a Markdown table, for a README."""
  rows = _claim_rows(contents)
  if not rows:
    return ''
  lines = [list(rows[0]), ['---'] * len(rows[0])]
  lines += [[str(x).replace('|', '\\|') for x in row.values()] for row in rows]
  return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)
