"""What swd_lens raises and warns with: the classes, and `error`, which makes one by its name.

1. Class, message and remedy of every error stand once, in the errors.toml of the room that raises it:

       [naming-sites.no-such-site]
       raises = "UnknownSiteError"
       message = "no site matches {pattern!r}. Nearest: {nearest}."
       remedy = "A typing error, or a layer that the host does not have."

   The outer name is the section of ERRORS.md, which tests/catalogue.py makes of all that have a remedy.
2. Code says `raise error("no-such-site", pattern=pattern, nearest=names)`, or `warnings.warn(warning("few-tokens", ...))`.
3. The files are read when the first message is made. Making one never fails, so that nothing hides what was wrong; that every
   raise site names the fields of its message is tested (tests/test_errors.py).

Text from outside (names, tokens, labels, paths) goes into messages, and into everything that is printed, drawn or put into a
page, through one of these; files keep what they were given.

4. `visible`: line ends, tabs and control characters become their signs (↵ ⇥ ␛), other invisible characters (bidirectional marks,
   zero-width characters, lone surrogates, private use) their number; spaces stay. `visible_lines` is the same of text that has
   lines of its own, such as a printed table; `visible_token` of a token by itself, where spaces count.
   `encodable` is only that of lone surrogates: a name is made so as it comes in.
5. `errors_seen` marks a function that hands names on to other libraries: in what these raise, everything is seen, too.
6. `seen` makes a `__repr__` show its text so; of every Record it does by itself. `brief` is its first lines;
   `print` shows all.
"""

import builtins
import importlib
import string
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
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
            _show_all(raised)
            raise

    return told  # pyright: ignore[reportReturnType]


def _show_all(raised: BaseException | None) -> None:
    """Of an error and of all that it was raised from; one's own text stays as it is when shown again."""
    told: set[int] = set()
    waiting = [raised]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in told:
            told.add(id(each))
            each.args = tuple(visible_lines(arg) if isinstance(arg, str) else arg for arg in each.args)
            waiting += [each.__cause__, each.__context__]


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


# ---------------------------------------------------------------------------------------------- hosts, sites and units


class UnknownSiteError(ValueError):
    """A pattern matched no site of the host."""


class UnsupportedHostError(TypeError):
    """The model is of a kind or shape that swd_lens cannot inject into; the message says what and why."""


class HostDiffersError(UnsupportedHostError):
    """A loaded host gives other logits than transformers' own model of the same checkpoint."""


class GoalError(ValueError):
    """Nothing that was tried keeps a goal (`factorize(kl=)`)."""


class GradientError(ValueError):
    """The loss's gradients in a host are not finite on these tokens; the site is named."""


class AttachError(ValueError):
    """Units cannot be attached, detached or transported as asked; nothing was changed."""


class UnitSourceError(ValueError):
    """A unit source does not fit its site, or would compute something else than it seems to."""


class FactorFileError(ValueError):
    """A folder of factors that cannot be read: damaged, of another format, or not what its index says."""


class SiteDidNotRunWarning(UserWarning):
    """Units are attached at a site, the block ran, and the site's product was computed by something else, or not at all."""


class HostInUseError(RuntimeError):
    """Another thread uses this host; the message says in which call and since when. Nothing was changed."""


# ---------------------------------------------------------------------------------------------- tasks and text


class TaskError(ValueError):
    """A task that cannot be used: a bad file, or prompts that this host's tokenizer cannot score. The message says why."""


class TokenError(ValueError):
    """Text or tokens that this host cannot run."""


class TextWarning(UserWarning):
    """Text or a prompt that is read otherwise than the host was trained to, or than it looks; results are of what was read."""


class UnknownWordsWarning(UserWarning):
    """A text has words that this host's tokenizer does not know; to the host they are all one."""


# ---------------------------------------------------------------------------------------------- solving and factorizing


class SolveInputError(ValueError):
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


class DoesNotFitError(MemoryError, ValueError):
    """A factorization needs more memory than there is; nothing was started."""


class ResumeError(ValueError):
    """A folder's finished matrices are not those that this call would make; nothing was changed."""


class ShardError(ValueError):
    """Not a shard, or a factorization that cannot be cut into any."""


class WorkerLostError(RuntimeError):
    """The worker of a task died at every attempt."""


class RayMissingError(ImportError, ValueError):
    """workers="ray" was asked for where Ray is not installed."""


# ---------------------------------------------------------------------------------------------- training, circuits, analysis


class FinetuneError(ValueError):
    """Fine-tuning cannot start or go on as asked; the host is what it was."""


class TrainError(ValueError):
    """A baseline cannot be trained like this, or its training failed; the message says why and what to do."""


class UndefinedSufficiencyWarning(UserWarning):
    """The unpruned replacement has no positive margin, so there is nothing that a circuit could keep a part of."""


class NotCarriedWarning(UserWarning):
    """The units of a surface do not carry a task, so that no circuit of them has a cost."""


class QKError(ValueError):
    """A pair, prompt or set of factors that cannot be studied; the message says what was wrong and what to do."""


class EditError(ValueError):
    """An edit that cannot be made, applied or undone as asked; the host was not changed."""


# ---------------------------------------------------------------------------------------------- files


class FolderInUseError(OSError):
    """Another call writes this folder; the message says which and since when. Nothing was changed."""


class UnsealedFileWarning(UserWarning):
    """A file of an earlier version, which carries no hash: changes on the disk are not noticed."""


# ---------------------------------------------------------------------------------------------- declarations


def error(name: str, /, *, raised_as: type[Exception] | None = None, **values: Any) -> Exception:
    """The error declared under this name, its message filled with values; to be raised by the caller.

    Args:
        raised_as: the class, where the declaration leaves a choice (settings raise their own class's error).
    """
    declaration = declarations().get(name, {})
    message = _Template().vformat(declaration.get("message", f"{name}: {values}"), (), values)
    return (raised_as or class_named(declaration.get("raises", "RuntimeError")))(message)


def warning(name: str, /, **values: Any) -> Warning:
    """The warning declared under this name, to be given to `warnings.warn`."""
    message = error(name, **values)
    return message if isinstance(message, Warning) else UserWarning(str(message))


def callers_level() -> int:
    """For `warnings.warn(..., stacklevel=)`: the first line outside of swd_lens, however many calls away."""
    package = str(Path(__file__).parents[1])
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


@cache
def declarations() -> dict[str, Mapping[str, Any]]:
    """All rooms' declarations: name -> "raises", "message", "remedy" (if it has one), "section" and "room"."""
    return {
        name: {**entry, "section": section, "room": room}
        for room, sections in _files().items()
        for section, entries in sections.items()
        for name, entry in entries.items()
        if isinstance(entry, Mapping)
    }


@cache
def section_texts() -> dict[str, dict[str, str]]:
    """Section -> its "title" and, if it has one, "about"."""
    return {
        section: {key: text for key, text in entries.items() if isinstance(text, str)}
        for sections in _files().values()
        for section, entries in sections.items()
        if "title" in entries
    }


def class_named(name: str) -> type[Exception]:
    """An exception or warning class: of this module, of Python, or "package.module.Name"."""
    module, _, last = name.rpartition(".")
    if module:
        return getattr(importlib.import_module(module), last)
    return globals().get(name) or getattr(builtins, name)


@cache
def _files() -> dict[str, dict[str, Any]]:
    """Room -> what its errors.toml says."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    package = Path(__file__).parents[1]
    return {
        file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))
        for file in sorted(package.glob("*/errors.toml"))
    }


_END = 60  # characters of each end of a long text


class _Template(string.Formatter):
    """str.format that shows a field without a value as its name, and a value that its format does not suit as it is. Of long
    texts that are quoted (!r) the two ends are shown: the reason is what should be read.

    Values come from files and users: what is invisible in them is shown.
    """

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key, f"{{{key}}}") if isinstance(key, str) else f"{{{key}}}"

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "r" and isinstance(value, str) and len(value) > 3 * _END:
            value = f"{value[:_END]} … {value[-_END:]}"
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return visible_lines(super().format_field(value, format_spec))
        except (TypeError, ValueError):
            return visible_lines(str(value))
