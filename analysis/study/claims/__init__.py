"""The claims, each in one of the files of this folder.

What is tested was fixed when one pair (MNIST, one epoch, seed 0) had been
seen, before all others; `page` says what was corrected later. Residuals are
log10 of the spectral norm, means over the same test examples, and for products
over the same sampled paths, of both runs of a pair.

A further claim is an entry of `CLAIMS` of a file here, old or new.
"""

from collections.abc import Sequence
import importlib
import pkgutil

from analysis.study.claims.claim import Answer
from analysis.study.claims.claim import answer
from analysis.study.claims.claim import Claim
from analysis.study.evidence import Evidence

__all__ = ['CLAIMS', 'Answer', 'Claim', 'answer', 'answers', 'letters']


def _claims():
  modules = (
    importlib.import_module(f'{__name__}.{x.name}')
    for x in pkgutil.iter_modules(__path__)
  )
  found = [x for module in modules for x in getattr(module, 'CLAIMS', ())]
  return {x.letter: x for x in sorted(found, key=lambda x: x.letter)}


CLAIMS: dict[str, Claim] = _claims()


def letters(study: str) -> str:
  """Letters of the claims that a study answers."""
  return ''.join(x.letter for x in CLAIMS.values() if study in x.studies)


def answers(asked: Sequence[str], evidence: Evidence) -> list[Answer]:
  """Tests some claims."""
  return [answer(CLAIMS[x], evidence) for x in asked]
