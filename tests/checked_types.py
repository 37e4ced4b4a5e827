"""Annotations of swd_lens are checked on every call that the tests make, at a fraction of what jaxtyping's own wrapper costs.

jaxtyping's import hook (pyproject.toml) puts `jaxtyping.jaxtyped` on every function. That wrapper binds the arguments to the
signature and has beartype check them twice, before the call and beside the result, so that its messages can say which of the two
was wrong; it generates code for every function when its module is imported, and for a function within a function each time that
one is made. Here the same checks are made once per call, and code is generated once per function, at its first call.
"""

import dataclasses
import functools
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_jaxtyped = jaxtyping.jaxtyped
_checking = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_generated: dict[CodeType, FunctionType] = {}  # code of a function -> beartype's wrapper of one function with that code


def install() -> None:
    """For modules of swd_lens that are imported from now on."""
    jaxtyping.jaxtyped = checked


def checked(thing: Any = None, *, typechecker: Any) -> Any:
    """In place of `jaxtyping.jaxtyped(typechecker=...)`."""
    if thing is None:
        return functools.partial(checked, typechecker=typechecker)
    if isinstance(thing, FunctionType) and not _has_strings(thing):
        return _in_a_scope(thing)
    if isinstance(thing, classmethod | staticmethod):
        return type(thing)(checked(thing.__func__, typechecker=typechecker))
    if isinstance(thing, property):
        steps = (step and checked(step, typechecker=typechecker) for step in (thing.fget, thing.fset, thing.fdel))
        return property(*steps)
    if isinstance(thing, type) and dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
        if isinstance(thing.__init__, FunctionType) and not _has_strings(thing.__init__):
            thing.__init__ = _in_a_scope(thing.__init__)
            return thing
    return _jaxtyped(thing, typechecker=typechecker)


def _has_strings(function: FunctionType) -> bool:
    """Whether an annotation is a string, which jaxtyping reads where it can."""
    return any(isinstance(hint, str) for hint in function.__annotations__.values())


def _in_a_scope(function: FunctionType) -> Any:
    """The function, its annotations checked, in a scope of its own for the names of axes."""
    scope = _jaxtyped("context")
    call: Any = None

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal call
        if call is None:
            call = _checked_by_beartype(function)
        with scope:
            return call(*args, **kwargs)

    return wrapper


def _checked_by_beartype(function: FunctionType) -> Any:
    """beartype's wrapper; that of another function with the same code and annotations (a closure made anew) is taken over."""
    known = _generated.get(function.__code__)
    if known is not None and known.__wrapped__.__annotations__ == function.__annotations__:
        call = FunctionType(known.__code__, known.__globals__, known.__name__, known.__defaults__, known.__closure__)
        call.__kwdefaults__ = {**known.__kwdefaults__, "__beartype_func": function}
        return call
    call = _checking(function)
    if "__beartype_func" in (getattr(call, "__kwdefaults__", None) or {}):
        _generated[function.__code__] = call
    return call
