"""Rules of config fields: what a value must be, in words."""

from collections.abc import Callable
from collections.abc import Collection
import itertools
from typing import Any

# A rule says in words what a value must be, or None if it is right.
Rule = Callable[[Any], str | None]


# Steps are counted in 32 bits, and sizes beyond this fit no machine.
MOST_STEPS = 2**31
MOST_UNITS = 2**20


def integer(least: int, below: int = MOST_STEPS, note: str = '') -> Rule:
  words = f'an integer of at least {least} and below {below}{note}'

  def rule(value):
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return None if is_integer and least <= value < below else words

  return rule


def number(least: float, below: float = float('inf'), note: str = '') -> Rule:
  words = f'a number from {least:g}'
  words += f' to below {below:g}' if below < float('inf') else ' up'
  words += note

  def rule(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and least <= value < below else words

  return rule


def one_of(choices: Collection[str]) -> Rule:
  # Looked at when a config is checked: users may add to the choices.
  words = lambda: f'one of {", ".join(choices)}'
  return lambda x: None if isinstance(x, str) and x in choices else words()


def boolean(value):
  return None if isinstance(value, bool) else 'True or False'


def text(value):
  if isinstance(value, str) and value != 'None':
    return None
  return "a text; '' (nothing after the equals sign) if unset"


def steps(value):
  if isinstance(value, tuple) and all(integer(0)(x) is None for x in value):
    return None
  return 'a tuple of steps, like (0, 100), or () for none'


def lengths(value):
  if (
    isinstance(value, tuple)
    and all(integer(1)(x) is None for x in value)
    and all(a < b for a, b in itertools.pairwise(value))
  ):
    return None
  return 'a tuple of rising lengths, like (48, 72), or () for none'
