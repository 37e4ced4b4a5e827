"""with_torch_defaults: shields functions of swd_lens from a caller's torch settings that would change numbers, and other threads.

1. `with_torch_defaults` marks a function, or every public method, operator and property of a class. While the outermost
   marked call of a thread runs, the default dtype is float32, the default device the CPU, autocast and inference mode are off,
   and float32 products have their full precision (no TF32, no bfloat16). Afterwards everything is as it was, whatever ended
   the call. Calls inside of it cost a look at one attribute, and our own code may train under autocast there.
2. Default dtype and precision of products belong to the process: while marked calls run, other threads see them, too. They are
   given back when the last of these calls has ended; a thread that sets them meanwhile changes the numbers of the others.
3. Gradients stay as the caller has them (under inference mode: on); who needs them switches them on. Deterministic
   algorithms stay, too: torch names that setting itself where it has none. Generators cannot be marked: between two values
   the caller's code runs, and so do forwards of a host with units: there the caller's settings hold.
4. A host belongs to one thread at a time (holding.py): `claim` takes it for the marked call that runs.
5. While the outermost marked call of the main thread runs, Ctrl-C does not part what it changes from the steps that give it
   back (interrupts.py).
"""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any, TypeVar

import torch

from swd_lens.base import interrupts
from swd_lens.base.arguments import check_arguments
from swd_lens.base.holding import take
from swd_lens.base.interrupts import Push, Undo, hold_back_interrupts, unparted

Marked = TypeVar("Marked")

_OPERATORS = ("__getitem__", "__or__", "__call__")  # of a class, marked like its public methods
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_lock = threading.RLock()
# Ctrl-C within these would leave the mode behind; while units are attached they are not parted in the caller's code, either.
for _mode in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast):
    unparted(_mode.__enter__)
    unparted(_mode.__exit__)
_MKLDNN: Any = torch.backends.mkldnn
_CONVOLUTIONS: Any = getattr(_MKLDNN, "conv", None)
_BACKENDS: list[Any] = [
    each
    for each in (torch.backends.cuda.matmul, getattr(_MKLDNN, "matmul", None), _CONVOLUTIONS)
    if hasattr(each, "fp32_precision")
]


class _Thread(threading.local):
    """The outermost marked call that runs in a thread."""

    call: "_Call | None" = None


_thread = _Thread()


def with_torch_defaults(marked: Marked) -> Marked:
    """Mark a function, or in place a class (see the module's docstring); generators of a class are left as they are."""
    if isinstance(marked, type):
        for name, member in list(vars(marked).items()):
            if not name.startswith("_") or name in _OPERATORS:
                if isinstance(member, FunctionType) and not is_marked(member):
                    if not inspect.isgeneratorfunction(inspect.unwrap(member)):  # nor a context manager that is written as one
                        setattr(marked, name, with_torch_defaults(member))
                elif isinstance(member, classmethod | staticmethod) and not is_marked(member.__func__):
                    setattr(marked, name, type(member)(with_torch_defaults(member.__func__)))
                elif isinstance(member, property) and member.fget is not None and not is_marked(member.fget):
                    setattr(marked, name, property(with_torch_defaults(member.fget), member.fset, member.fdel, member.__doc__))
                elif isinstance(member, functools.cached_property) and not is_marked(member.func):
                    member.func = with_torch_defaults(member.func)
        return marked
    assert callable(marked) and not inspect.isgeneratorfunction(inspect.unwrap(marked))
    function: Callable[..., Any] = marked

    @functools.wraps(function)
    @interrupts.call
    def plain(*args: Any, **kwargs: Any) -> Any:
        if _thread.call is not None:
            return function(*args, **kwargs)
        check_arguments(function, args, kwargs)
        call = _Call(function.__qualname__)
        # Twice: where nothing holds it back, Ctrl-C on the way into the inner end is inside of the outer.
        with call, call:
            call.make_plain()
            return function(*args, **kwargs)

    plain.with_torch_defaults = True  # type: ignore[attr-defined]
    return plain  # type: ignore[return-value]


def is_marked(function: Any) -> bool:
    """Whether a function is marked; a generator, or what is no function, is not."""
    return getattr(function, "with_torch_defaults", False) is True


class _Call(Undo):
    """The outermost marked call of a thread; what it changed and the hosts that it claimed are given back when it ends."""

    @unparted
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    @unparted
    def make_plain(self) -> None:
        """Plain settings until the call ends."""
        hold_back_interrupts(self.push)
        self.push(functools.partial(setattr, _thread, "call", None))
        _thread.call = self
        self.push(self._give_back_settings)
        with _lock:  # the whole process has these: default dtype, precision of products
            _calls.add(self)
            if (dtype := torch.get_default_dtype()) is not torch.float32:
                _settings.push(functools.partial(torch.set_default_dtype, dtype))
                torch.set_default_dtype(torch.float32)
            _highest_precision(_settings.push)
        # Each thread has these for itself: inference mode, autocast, the default device.
        autocast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        self.push(functools.partial(_give_back_modes, torch.is_grad_enabled(), autocast))
        contexts: list[AbstractContextManager[Any]] = []
        if torch.is_inference_mode_enabled():
            contexts.append(torch.inference_mode(False))
        contexts += [torch.autocast(device, enabled=False) for device in autocast]
        # A look at the stack first: to ask for the device takes longer than all the rest.
        if torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu":
            contexts.append(torch.device("cpu"))
        if contexts:
            own = ExitStack()
            self.push(own.close)
            for context in contexts:
                own.enter_context(context)

    def _give_back_settings(self) -> None:
        with _lock:
            _calls.discard(self)
            if not _calls:
                _settings.run()


def _give_back_modes(grad: bool, autocast: list[str]) -> None:
    """Set this thread's modes as the caller had them: an interrupt may have kept a context of ours from being left."""
    torch._C._set_grad_enabled(grad)
    for device in _DEVICES:
        if torch.is_autocast_enabled(device) != (device in autocast):
            torch.set_autocast_enabled(device, device in autocast)


_calls: set[_Call] = set()  # that run now, in whatever thread
_settings = Undo()  # gives back those of the process


def _highest_precision(push: Push) -> None:
    """Float32 products in full precision, also those of convolutions on the CPU.

    torch has two settings for this, of the process and (since 2.9) of each backend, and refuses to read the first once the caller
    has written the second.
    """
    try:
        of_process = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_process = None
    # The highest of the process is that of its backends' matrix products, or it could not be read.
    if of_process == "highest" and getattr(_CONVOLUTIONS, "fp32_precision", "none") in ("none", "ieee"):
        return
    before = {backend: backend.fp32_precision for backend in _BACKENDS}
    push(functools.partial(_set_precision, of_process, before))
    _set_precision(of_process and "highest", dict.fromkeys(before, "ieee"))


def _set_precision(of_process: str | None, of_backends: dict[Any, str]) -> None:
    if of_process is not None:
        torch.set_float32_matmul_precision(of_process)
    for backend, value in of_backends.items():
        backend.fp32_precision = value


@interrupts.joint
def claim(model: Any) -> None:
    """Give this host to the marked call that runs, until it ends; outside of one nothing is done. Raises HostInUseError:
    another thread uses it."""
    if (call := _thread.call) is not None:
        take(model, call.name, call.push, call)
