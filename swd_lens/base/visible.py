"""Text from outside (names, tokens, labels, paths) as it is shown: nothing in it is invisible, moves a cursor or turns a line.

1. `visible`: line ends, tabs and control characters become their signs (↵ ⇥ ␛), other invisible characters (bidirectional marks,
   zero-width characters, lone surrogates, private use) their number; spaces stay.
2. `visible_lines`: the same of text that has lines of its own, such as a printed table.
3. `visible_token`: a token by itself, where spaces count.
4. `seen` makes a `__repr__` show its text so; of every Record it does by itself.

Everything that is printed, drawn or put into a page goes through one of these; files keep what they were given.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

_SIGNS = {"\n": "↵", "\t": "⇥", "\u00a0": "⍽", "\x7f": "␡"}


def visible(text: str) -> str:
    """The text on one line, everything in it seen. What is shown so stays as it is when shown again."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _sign(c) for c in text)


def visible_lines(text: str) -> str:
    """The text with its own line ends, everything else in it seen."""
    return "\n".join(map(visible, text.split("\n")))


def visible_token(token: str) -> str:
    """A token alone: every space a dot, and a sign where there is nothing."""
    return visible(token).replace(" ", "·") or "∅"


def seen(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """A method that gives text of several lines, everything in it seen."""

    @wraps(method)
    def shown(self: Any) -> str:
        return visible_lines(method(self))

    return shown


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    return chr(0x2400 + ord(character)) if ord(character) < 32 else f"⟨U+{ord(character):04X}⟩"
