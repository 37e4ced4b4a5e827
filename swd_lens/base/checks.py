"""Checks of single arguments that many calls share; each raises with the value and what would be right.

1. `one_of`: a name that must be among some.
2. `bounded`: a number within bounds, whole or not.
3. `require_names`: names of files and folders beside ours, none of which would take the place of one in `OURS`.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from swd_lens.base.errors import quoted


def one_of(name: str, value: Any, choices: Iterable[Any], error: type[Exception] = ValueError) -> None:
    """Require that a value is among the choices. Raises error: it is not; the message lists them."""
    choices = list(choices)
    if value not in choices:
        raise error(f"{name} must be one of {', '.join(map(repr, choices))}, got {quoted(value)}")


def bounded(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    whole: bool = True,
    error: type[Exception] = ValueError,
) -> None:
    """Require a number from `least` to `most`, both allowed; NaN and True are no numbers. whole: only whole numbers (NumPy's,
    too). Raises error: it is none; the message says the bounds."""
    kind: Any = Integral if whole else Real
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most:  # NaN fails this, too
        return
    number = "a whole number" if whole else "a number"
    low = f" of at least {least:g}" if least > -math.inf else ""
    high = f" of at most {most:g}" if most < math.inf else ""
    between = f" from {least:g} to {most:g}" if low and high else low + high
    raise error(f"{name} must be {number}{between}, got {quoted(value)}")


OURS = frozenset(
    {
        *("factors", "parts", "finetune", "trials", "shards", "weights", "model", "features", "screen", "candidates"),  # folders
        *("run.json", "factors.json", "units.json", "best.json", "call.json", "result.json"),
        *("replacement.json", "graph-metadata.json", "source.json", "config.json"),
        *("log.jsonl", "checkpoint.safetensors", "circuit.safetensors", "refined.safetensors"),
        *("samples.txt", "report.html", "paper.html"),
        "index.html",
    }
)


def require_names(what: str, names: Iterable[str], ending: str = "") -> None:
    """Require names that files or folders may have beside ours and beside each other; capitals count as small letters, as on
    some disks. what: they name, for the message: "slug"; ending: of the files: ".json". Raises ValueError: one is that of a file
    of ours, or none that a file can have; or two are alike."""
    taken: dict[str, str] = {}
    for name in names:
        file = f"{name}{ending}"
        if not file or file.startswith(".") or any(sign in file for sign in "/\\\0"):
            raise ValueError(f"{what} {quoted(name)} is to name a file or folder: no separators, no leading dot, not empty")
        if file.casefold() in OURS:
            raise ValueError(
                f"{what} {quoted(name)}: a file or folder {quoted(file.casefold())} has a meaning of its own beside it, "
                "and would be lost; give another name"
            )
        if file.casefold() in taken:
            raise ValueError(
                f"{what} {quoted(name)} and {quoted(taken[file.casefold()])} would be the same file or folder; give one "
                "of them another name"
            )
        taken[file.casefold()] = name
