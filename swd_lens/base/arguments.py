"""Arguments in the wrong place: said once, for every public call, before it begins.

1. `check_arguments` looks at what a call was given. A model, factors, a task or scores that stand where another of them belongs
   are named, with the order in which the call takes them.
2. More arguments by position than a call takes are named, with the next names of its signature.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from swd_lens.base.errors import legible, quoted
from swd_lens.base.interrupts import unparted

# Class -> what it is; by name, since these classes are above this room.
_KINDS = {
    "HookedTransformer": "a model",
    "TransformerBridge": "a model",
    "FactorSet": "factors",
    "Factors": "factors",
    "LearnedUnits": "factors",
    "Task": "a task",
    "TaskSplit": "a task",
    "UnitScores": "scores",
}
# Name of a parameter -> what it takes, of these.
_TAKES = {
    "model": ("a model",),
    "name": (),
    "sites": ("factors",),
    "pattern": ("factors",),
    "factors": ("factors",),
    "prompts": ("a task",),
    "task": ("a task",),
    "tasks": ("a task",),
    "scores": ("scores",),
    "tokens": (),
    "text": (),
}


@unparted  # it comes before the first line of a call, which may be one that takes units out
def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Require that each argument may stand where it does. Raises TypeError: one that belongs elsewhere, or too many by
    position."""
    positional, named = _signature(function)
    shown = positional[1:] if positional[:1] in (("self",), ("cls",)) else positional
    if positional and len(args) > len(positional):
        taken = ", ".join([*shown, *(f"{name}=" for name in named[:4])]) + (", ..." if len(named) > 4 else "")
        value = args[len(positional)]
        surplus = quoted(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
        call = function.__qualname__
        raise TypeError(f"{call} takes {len(shown)} arguments by position; pass {surplus} by keyword: {call}({legible(taken)})")
    for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
        kind = next((_KINDS[cls.__name__] for cls in type(value).__mro__ if cls.__name__ in _KINDS), None)
        if kind is not None and name in _TAKES and kind not in _TAKES[name]:
            raise TypeError(f"{function.__name__}({', '.join(shown)}) takes its arguments in this order; {name} was given {kind}")


@cache
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names by position, and names by keyword alone; no positions where any number of them is taken."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return (), ()
    by_keyword = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)), by_keyword
