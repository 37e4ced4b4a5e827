"""One thread per host: while a call or an attachment has a host, other threads neither use it nor run it.

1. `take` gives a host to this thread, for a reason, until the step that is pushed has been run. Another thread that asks
   meanwhile is refused. What a thread held that has ended is free.
2. A plain forward asks nobody. While a host is held, and only then, a `Guard` stands in its own __dict__ before each method
   that runs it or hangs hooks into it (`GUARDED`), as before `forward` of the model that a bridge wraps: the thread that holds
   the host passes, another one waits a little and is refused. A free host has none of them, and costs nothing.
3. A forward that another thread had begun before is found on that thread's stack. Whoever takes the host waits until it has
   ended, and what it still calls passes the guards.
4. What else stands in the __dict__ under these names (units cover `run_with_cache`) is kept beneath the guard: `own_method`
   and `set_own_method` read and write it. A copy of a held host has guards, too; they let everybody pass until it is held.
"""

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swd_lens.base.errors import HostInUseError, quoted
from swd_lens.base.interrupts import Push, code_of, joint, unparted

# Methods of a host that run it or change its hooks; what it does not have is left out.
GUARDED = ("forward", "hooks", "add_hook", "add_perma_hook", "run_with_hooks", "run_with_cache")
# Where a forward that runs is known by its frame: nn.Module's own calls, and those of the methods that run.
_RUNNING = ("_wrapped_call_impl", "_call_impl", "forward", "run_with_hooks", "run_with_cache")
WAIT_FOR_CALL = 1.0  # seconds that a forward waits for another thread's call
WAIT_FOR_FORWARD = 30.0  # seconds that a call waits for another thread's forward
_AGAIN = 5e-4  # seconds

_lock = threading.RLock()


@dataclass(eq=False)
class _Holder:
    """The thread that uses a host, and the calls and attachments for which it does. begun: of threads whose forward had begun
    when the host was taken: the frame of that forward, by the thread's number."""

    thread: threading.Thread
    call: str
    since: str
    reasons: set[Any] = field(default_factory=set)
    begun: dict[int, FrameType] = field(default_factory=dict)

    def lets_pass(self) -> bool:
        """Whether the thread that asks may use the host now."""
        if self.thread is threading.current_thread() or not self.thread.is_alive():
            return True
        with _lock:  # whoever takes the host has looked for forwards before it lets go of this
            begun = self.begun.get(threading.get_ident())
        return begun is not None and _has(sys._getframe(), begun)

    def refusal(self, call: str = "", thread: str = "") -> Exception:
        """The error for another thread; the call that uses the host, and its thread, are the holder's unless given."""
        return HostInUseError(
            f"this host is used by {call or self.call} in thread {quoted(thread or self.thread.name)}, since {self.since}. "
            "Wait until that has ended (units that are attached there: detached), or give each thread a host of its own, "
            "copy.deepcopy(model)"
        )


_holders: WeakKeyDictionary[Any, _Holder] = WeakKeyDictionary()


@joint
def take(model: Any, call: str, push: Push, reason: object = None) -> None:
    """Give the host to this thread, for one reason more (None: of its own), until the pushed step has been run. call: the
    function for which it is held, as others are told: "attach". Raises HostInUseError: another thread uses it, or is in a forward
    of it that does not end."""
    reason = object() if reason is None else reason
    holder = _entered(model, call, reason, push)
    until = time.monotonic() + WAIT_FOR_FORWARD
    while holder.begun:
        frames = sys._current_frames()
        for thread, begun in list(holder.begun.items()):
            if not _has(frames.get(thread), begun):
                del holder.begun[thread]
        if holder.begun and time.monotonic() > until:
            _release(model, holder, reason)
            number = next(iter(holder.begun))
            name = next((each.name for each in threading.enumerate() if each.ident == number), str(number))
            raise holder.refusal("a forward", name)
        time.sleep(_AGAIN)


@unparted
def _entered(model: Any, call: str, reason: object, push: Push) -> _Holder:
    thread = threading.current_thread()
    with _lock:
        holder = _holders.get(model)
        if holder is not None and holder.thread is not thread and holder.thread.is_alive():
            raise holder.refusal()
        if holder is None or holder.thread is not thread:
            holder = _Holder(thread, call, datetime.now().strftime("%H:%M:%S"))
        if reason not in holder.reasons:
            push(functools.partial(_release, model, holder, reason))
            holder.reasons.add(reason)
        if _holders.get(model) is not holder:
            _holders[model] = holder
            for module, name in _guarded(model):
                if not isinstance(module.__dict__.get(name), Guard):
                    module.__dict__[name] = Guard(model, module, name, module.__dict__.get(name))
            holder.begun = _forwards(model)
    return holder


@unparted
def _release(model: Any, holder: _Holder, reason: object) -> None:
    with _lock:
        holder.reasons.discard(reason)
        if not holder.reasons and _holders.get(model) is holder:
            for module, name in _guarded(model):
                standing = module.__dict__.get(name)
                if isinstance(standing, Guard) and standing.former is None:
                    del module.__dict__[name]
                elif isinstance(standing, Guard):
                    module.__dict__[name] = standing.former
            del _holders[model]


class Guard:
    """Stands before a method of a host: another thread than the one that holds the host waits, and is refused.

    A class, not a closure, so that a deep copy of the host copies it too.

    Args:
        module: whose method it is: the host, or the model that a bridge wraps.
        former: what stood in the module's own __dict__ under this name, or None.
    """

    def __init__(self, host: Any, module: Any, name: str, former: Callable[..., Any] | None):
        self.host, self.module, self.name, self.former = host, module, name, former

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            holder = _holders.get(self.host)
            if holder is not None and not holder.lets_pass():
                self._wait()
        if self.former is not None:
            return self.former(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def _wait(self) -> None:
        until = time.monotonic() + WAIT_FOR_CALL
        while (holder := _holders.get(self.host)) is not None and not holder.lets_pass():
            if time.monotonic() > until:
                raise holder.refusal()
            time.sleep(_AGAIN)

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's signature, for those who look which arguments a forward takes."""
        return inspect.signature(self.former or getattr(type(self.module), self.name).__get__(self.module))


def own_method(model: Any, name: str) -> Any:
    """The entry of the model's own __dict__ under this name, guards aside; None where there is none."""
    standing = model.__dict__.get(name)
    return standing.former if isinstance(standing, Guard) else standing


def set_own_method(model: Any, name: str, method: Callable[..., Any] | None) -> None:
    """Put a method into the model's own __dict__, beneath a guard if one stands there; None takes it out."""
    standing = model.__dict__.get(name)
    if isinstance(standing, Guard):
        standing.former = method
    elif method is not None:
        model.__dict__[name] = method
    else:
        model.__dict__.pop(name, None)


def _guarded(model: Any) -> Iterator[tuple[Any, str]]:
    """The modules and methods of a host before which guards stand."""
    wrapped = model.__dict__.get("original_model")
    yield from ((model, name) for name in GUARDED if hasattr(type(model), name))
    if wrapped is not None:
        yield wrapped, "forward"


def _forwards(model: Any) -> dict[int, FrameType]:
    """The outermost frame of every other thread's forward of this host that runs now, by the thread's number."""
    wrapped = model.__dict__.get("original_model")
    begun: dict[int, FrameType] = {}
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost if thread != threading.get_ident() else None
        while frame is not None:
            if frame.f_code is _GUARD:
                runs = frame.f_locals["self"].host is model
            else:
                owner = frame.f_locals.get("self") if frame.f_code.co_name in _RUNNING else None
                runs = owner is model or (owner is not None and owner is wrapped)
            if runs:
                begun[thread] = frame
            frame = frame.f_back
    return begun


_GUARD = code_of(Guard.__call__)


def _has(frame: FrameType | None, sought: FrameType) -> bool:
    """Whether a frame stands on the stack that ends with this one."""
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None
