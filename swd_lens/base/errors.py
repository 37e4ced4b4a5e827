"""The classes that swd_lens raises and warns with, and how text from outside is shown.

1. Messages stand where the check stands: `raise UnknownSiteError(f"no site matches {quoted(pattern)}; ...")`, with the value and
   what to do.
2. Text from outside (names, tokens, labels, paths) goes into messages, and into everything that is printed, drawn or put into a
   page, through one of these; files keep what they were given.
   `visible`: line ends, tabs and control characters become their signs (↵ ⇥ ␛), other invisible characters (bidirectional marks,
   zero-width characters, lone surrogates, private use) their number; spaces stay. `visible_lines` keeps line ends, for text
   that has lines of its own, such as a printed table; `visible_token` is for a token by itself, where spaces count.
   `encodable` replaces lone surrogates only: a name is made so as it comes in.
3. The classes below show their whole message so. In a message of one of Python's own classes, text from outside stands in
   `legible(...)`; anywhere, a value that is quoted stands in `quoted(...)`, which keeps the two ends of a long text.
4. `errors_seen` marks a function that hands names on to other libraries: in what these raise, everything is seen, too.
5. `seen` makes a `__repr__` show its text so; of every Record it does by itself. `brief` is its first lines; `print` shows all.
"""

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_END = 60  # characters of each end of a long text
MOST_LINES = 15  # of a repr: what an interpreter shows without being asked to
_SIGNS = {"\n": "↵", "\t": "⇥", "\u00a0": "⍽", "\x7f": "␡"}


def visible(text: str) -> str:
    """The text on one line, everything in it seen. What is shown so stays as it is when shown again."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _sign(c) for c in text)


def encodable(text: str) -> str:
    """The text with every lone surrogate (half of a character) as its number: tables and files of UTF-8 take none."""
    return "".join(_sign(c) if "\ud800" <= c <= "\udfff" else c for c in text)


def visible_lines(text: str) -> str:
    """The text with its own line ends, everything else in it seen."""
    return "\n".join(map(visible, text.split("\n")))


def visible_token(token: str) -> str:
    """A token alone: every space a dot, and a sign where there is nothing."""
    return visible(token).replace(" ", "·") or "∅"


def legible(value: object) -> str:
    """A value's text for a message, everything in it seen."""
    return visible_lines(str(value))


def quoted(value: object) -> str:
    """A value's repr for a message, everything in it seen; of a long text the two ends, as the reason is what should be read."""
    if isinstance(value, str) and len(value) > 3 * _END:
        value = f"{value[:_END]} … {value[-_END:]}"
    return visible_lines(repr(value))


def seen(method: Callable[[Any], str]) -> Callable[[Any], str]:
    """A method that gives text of several lines, everything in it seen."""

    @wraps(method)
    def shown(self: Any) -> str:
        return visible_lines(method(self))

    return shown


def errors_seen(function: Function) -> Function:
    """A function whose errors, and what they were raised from, have everything in their text seen."""

    @wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as raised:
            # Make visible the text of an error and of all that it was raised from; our own text stays as it is.
            seen_already: set[int] = set()
            waiting = [raised]
            while waiting:
                each = waiting.pop()
                if each is not None and id(each) not in seen_already:
                    seen_already.add(id(each))
                    each.args = tuple(visible_lines(arg) if isinstance(arg, str) else arg for arg in each.args)
                    waiting += [each.__cause__, each.__context__]
            raise

    return told  # pyright: ignore[reportReturnType]


def brief(text: str) -> str:
    """At most MOST_LINES lines of a text, the last of which says how many more there are."""
    lines = text.split("\n")
    if len(lines) <= MOST_LINES:
        return text
    more = len(lines) - MOST_LINES + 1
    return "\n".join([*lines[: MOST_LINES - 1], f"… and {more:,} more lines: print() shows them"])


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    return chr(0x2400 + ord(character)) if ord(character) < 32 else f"⟨U+{ord(character):04X}⟩"


class _Shown(Exception):
    """An exception whose message has everything in it seen (point 3)."""

    def __init__(self, message: object = "", *more: object) -> None:
        super().__init__(visible_lines(message) if isinstance(message, str) else message, *more)


class UnknownSiteError(_Shown, ValueError):
    """A pattern matched no site of the host."""


class UnsupportedHostError(_Shown, TypeError):
    """The model is of a kind or shape that swd_lens cannot inject into; the message says what and why."""


class HostDiffersError(UnsupportedHostError):
    """A loaded host gives other logits than transformers' own model of the same checkpoint."""


class GoalError(_Shown, ValueError):
    """Nothing that was tried keeps a goal (`factorize(kl=)`)."""


class GradientError(_Shown, ValueError):
    """The loss's gradients in a host are not finite on these tokens; the site is named."""


class AttachError(_Shown, ValueError):
    """Units cannot be attached, detached or transported as asked; nothing was changed."""


class UnitSourceError(_Shown, ValueError):
    """A unit source does not fit its site, or would compute something else than it seems to."""


class FactorFileError(_Shown, ValueError):
    """A folder of factors that cannot be read: damaged, of another format, or not what its index says."""


class SiteDidNotRunWarning(_Shown, UserWarning):
    """Units are attached at a site, the block ran, and the site's product was computed by something else, or not at all."""


class HostInUseError(_Shown, RuntimeError):
    """Another thread uses this host; the message says in which call and since when. Nothing was changed."""


class TaskError(_Shown, ValueError):
    """A task that cannot be used: a bad file, or prompts that this host's tokenizer cannot score. The message says why."""


class TokenError(_Shown, ValueError):
    """Text or tokens that this host cannot run."""


class TextWarning(_Shown, UserWarning):
    """Text or a prompt that is read otherwise than the host was trained to, or than it looks; results are of what was read."""


class UnknownWordsWarning(_Shown, UserWarning):
    """A text has words that this host's tokenizer does not know; to the host they are all one."""


class SolveInputError(_Shown, ValueError):
    """Any argument that `solve` refuses; the subclasses say which."""


class WeightError(SolveInputError):
    """The weight is not a finite, non-zero, floating-point matrix."""


class GramError(SolveInputError):
    """The Gram does not fit the weight or is not a Gram matrix."""


class SparsityError(SolveInputError):
    """The sparsity is not a number inside (0, 1)."""


class BudgetError(SolveInputError):
    """The sparsity leaves too few edges for the factors."""


class UnitsError(SolveInputError):
    """The asked number of units is not one the preset can make."""


class SpecError(SolveInputError):
    """An unknown preset or setting, or a setting outside its range."""


class DoesNotFitError(_Shown, MemoryError, ValueError):
    """A factorization needs more memory than there is; nothing was started."""


class ResumeError(_Shown, ValueError):
    """A folder's finished matrices are not those that this call would make; nothing was changed."""


class ShardError(_Shown, ValueError):
    """Not a shard, or a factorization that cannot be cut into any."""


class WorkerLostError(_Shown, RuntimeError):
    """The worker of a task died at every attempt."""


class RayMissingError(_Shown, ImportError, ValueError):
    """workers="ray" was asked for where Ray is not installed."""


class FinetuneError(_Shown, ValueError):
    """Fine-tuning cannot start or go on as asked; the host is what it was."""


class TrainError(_Shown, ValueError):
    """A baseline cannot be trained like this, or its training failed; the message says why and what to do."""


class UndefinedSufficiencyWarning(_Shown, UserWarning):
    """The unpruned replacement has no positive margin, so there is nothing that a circuit could keep a part of."""


class NotCarriedWarning(_Shown, UserWarning):
    """The units of a surface do not carry a task, so that no circuit of them has a cost."""


class QKError(_Shown, ValueError):
    """A pair, prompt or set of factors that cannot be studied; the message says what was wrong and what to do."""


class EditError(_Shown, ValueError):
    """An edit that cannot be made, applied or undone as asked; the host was not changed."""


class FolderInUseError(_Shown, OSError):
    """Another call writes this folder; the message says which and since when. Nothing was changed."""


class UnsealedFileWarning(_Shown, UserWarning):
    """A file of an earlier version, which carries no hash: changes on the disk are not noticed."""


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn, at the first line outside of swd_lens that led here."""
    warnings.warn(kind(text), stacklevel=callers_level())


def callers_level() -> int:
    """For `warnings.warn(..., stacklevel=)`: the first line outside of swd_lens, however many calls away."""
    package = str(Path(__file__).parents[1])
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
