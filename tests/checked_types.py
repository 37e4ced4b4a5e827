"""Annotations of arrays in swd_lens are checked when tests call, at a fraction of what jaxtyping's own wrapper costs.

jaxtyping's import hook (pyproject.toml) puts `jaxtyping.jaxtyped` on every function. Its wrapper checks arguments twice, so that
messages can say whether they or the result were wrong, and generates code for every function at its import. Here the same checks
are made once per call, and code is generated at a function's first call. What does not fit, or has other axes than plain ones,
is jaxtyping's to judge. Generators keep its wrapper, since beartype alone checks their arguments only when they first run.

Checking everything takes half of the suite's time. So a function is checked if it takes or gives an array (pyright has read all
other annotations), and of its calls within one test the first `CALLS`, 4. With SWD_LENS_TYPES=all, as .ci/run has it, every
function is checked, on its first 100 calls in each test; the later ones, steps of a loop mostly, took a twelfth of the time.
"""

import builtins
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import typing
from types import CodeType, FunctionType
from typing import Any

import jaxtyping
import torch
from beartype import BeartypeConf, beartype

try:  # jaxtyping's own, which another version may have elsewhere: all is as fast as jaxtyping then
    from jaxtyping import _array_types, _storage

    _fits: Any = _array_types._MetaAbstractArray.__instancecheck__
    _parts = _array_types._anonymous_dim, _array_types._FixedDim, _array_types._NamedDim, _storage._shape_storage
    _scoped = _storage.push_shape_memo, _storage.pop_shape_memo
except (ImportError, AttributeError):
    _fits = None

EVERYTHING = os.environ.get("SWD_LENS_TYPES") == "all"
CALLS = 100 if EVERYTHING else 4
_jaxtyped = jaxtyping.jaxtyped
# The tower: an int is a float, as it is for pyright.
_checking = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError, is_pep484_tower=True))
_GLOBALS = {"__name__": __name__, "__builtins__": builtins}
_tests = itertools.count()
_test = next(_tests)  # the number of the test that runs
_generated: dict[CodeType, FunctionType] = {}  # code of a function -> beartype's wrapper of one function with that code
_plain_axes: dict[type, tuple[list[str | int | None], set[torch.dtype]] | None] = {}


def install() -> None:
    """For modules of swd_lens that are imported from now on."""
    jaxtyping.jaxtyped = checked
    if _fits is not None:
        _array_types._MetaAbstractArray.__instancecheck__ = fits
    if sys.version_info < (3, 12):
        _look_at_protocols_as_python_3_12_does()


def _look_at_protocols_as_python_3_12_does() -> None:
    """isinstance of a protocol of ours asks which attributes there are, and never for a property's value.

    Python 3.10 and 3.11 ask for the value, which counts all edges of a site for each check of `Units`. And what hangs on the
    value there goes another way from 3.12 on.
    """
    kind = typing._ProtocolMeta  # pyright: ignore[reportAttributeAccessIssue]
    names, given = functools.cache(typing._get_protocol_attrs), kind.__instancecheck__  # pyright: ignore[reportAttributeAccessIssue]

    def check(cls: Any, instance: Any) -> bool:
        if not (cls._is_protocol and cls.__module__.startswith("swd_lens")):
            return given(cls, instance)
        own = getattr(instance, "__dict__", ())
        return all(hasattr(type(instance), name) or name in own for name in names(cls))

    kind.__instancecheck__ = check


def fits(cls: Any, obj: Any) -> bool:
    """In place of isinstance of one of jaxtyping's annotations."""
    if cls not in _plain_axes:
        _plain_axes[cls] = _plain_axes_of(cls)
    plain, scopes = _plain_axes[cls], getattr(_storage._shape_storage, "memo_stack", None)
    if plain is None or not scopes or not isinstance(obj, torch.Tensor):
        return _fits(cls, obj)
    axes, dtypes = plain
    sizes, seen = scopes[-1][0], {}
    if obj.dtype not in dtypes or len(obj.shape) != len(axes):
        if fit := _fits(cls, obj):
            dtypes.add(obj.dtype)
        return fit
    for axis, size in zip(axes, obj.shape, strict=True):
        if axis is None:
            continue
        known = axis if isinstance(axis, int) else sizes.get(axis, seen.setdefault(axis, size))
        if known != size:
            return _fits(cls, obj)
    sizes.update(seen)
    return True


def _plain_axes_of(cls: Any) -> tuple[list[str | int | None], set[torch.dtype]] | None:
    """Name, size or None (any) of each axis, and dtypes that were seen to fit (none yet); None where an axis is not plain."""
    axes: list[str | int | None] = []
    if cls.array_type is not torch.Tensor:
        return None
    for axis in cls.dims:
        if axis is _array_types._anonymous_dim:
            axes.append(None)
        elif isinstance(axis, _array_types._FixedDim) and not axis.broadcastable:
            axes.append(axis.size)
        elif isinstance(axis, _array_types._NamedDim) and not (axis.broadcastable or axis.treepath):
            axes.append(axis.name)
        else:
            return None
    return axes, set()


def next_test() -> None:
    """From now on calls are another test's."""
    global _test
    _test = next(_tests)


def checked(thing: Any = None, *, typechecker: Any) -> Any:
    """In place of `jaxtyping.jaxtyped(typechecker=...)`."""
    if thing is None:
        return functools.partial(checked, typechecker=typechecker)
    if isinstance(thing, FunctionType) and not (EVERYTHING or _has_arrays(thing)):
        return thing
    if isinstance(thing, FunctionType) and not (_has_strings(thing) or inspect.isgeneratorfunction(thing)):
        return _in_a_scope(thing)
    if isinstance(thing, classmethod | staticmethod):
        return type(thing)(checked(thing.__func__, typechecker=typechecker))
    if isinstance(thing, property):
        steps = (step and checked(step, typechecker=typechecker) for step in (thing.fget, thing.fset, thing.fdel))
        return property(*steps)
    if isinstance(thing, type) and dataclasses.is_dataclass(thing):
        made = vars(thing).get("__init__")
        if isinstance(made, FunctionType) and not _has_strings(made):
            thing.__init__ = _in_a_scope(made) if EVERYTHING or _has_arrays(made) else made
            return thing
    return _jaxtyped(thing, typechecker=typechecker)


def _has_strings(function: FunctionType) -> bool:
    """Whether an annotation is a string, which jaxtyping reads where it can."""
    return any(isinstance(hint, str) for hint in function.__annotations__.values())


def _has_arrays(function: FunctionType) -> bool:
    """Whether an annotation names an array's axes, or is a string, which may."""
    return _has_strings(function) or any("jaxtyping." in repr(hint) for hint in function.__annotations__.values())


def _in_a_scope(function: FunctionType) -> Any:
    """The function, its annotations checked, in a scope of its own for the names of axes, if it has any."""
    call: Any = None
    has_arrays, scope = _has_arrays(function), _jaxtyped("context")
    test, left = -1, CALLS

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal call, test, left
        if test != _test:
            test, left = _test, CALLS
        # Where a graph is traced, its tensors were checked in eager runs.
        if left == 0 or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        left -= 1
        if call is None:
            call = _checked_by_beartype(function)
        if not has_arrays:
            return call(*args, **kwargs)
        if _fits is None:
            with scope:
                return call(*args, **kwargs)
        _storage.push_shape_memo({})
        try:
            return call(*args, **kwargs)
        finally:
            _storage.pop_shape_memo()

    return wrapper


def _checked_by_beartype(function: FunctionType) -> Any:
    """beartype's wrapper; that of another function with the same code and annotations (a closure made anew) is taken over.

    Warnings of the function belong to this module then, where pyproject.toml makes them errors.
    """
    known = _generated.get(function.__code__)
    if known is None or known.__wrapped__.__annotations__ != function.__annotations__:
        known = _checking(function)
        if "__beartype_func" not in (getattr(known, "__kwdefaults__", None) or {}):
            return known  # the function itself, where there is nothing to check
        _generated[function.__code__] = known
    call = FunctionType(known.__code__, _GLOBALS, known.__name__, known.__defaults__, known.__closure__)
    call.__kwdefaults__ = {**known.__kwdefaults__, "__beartype_func": function}
    return call
