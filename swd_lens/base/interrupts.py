"""Ctrl-C while something is changed: it never parts a change from the step that gives it back.

1. A KeyboardInterrupt may come between any two lines of the main thread. A second one may then hit the very lines that mend
   what the first has left, a third the lines that mend that. No order of try and finally is safe from all of them.
2. So while something is changed a handler of ours stands before the caller's own. `hold_back_interrupts` puts it there; it
   goes with the last who asked for it. It looks where the main thread is: within functions that are marked `unparted`, on the
   own lines of those marked `joint`, and within `__enter__` and `__exit__` of whatever a call of swd_lens has opened (torch's
   modes among them), the interrupt is sent again a millisecond later. Everywhere else the caller's handler gets it at once.
3. Nothing waits longer than `PATIENCE`: a context that takes long to close can be interrupted after that.
4. Python hands signals to the main thread only, and only there handlers can be set: elsewhere nothing is done, nor where the
   caller has no handler in Python.
5. `Undo` is a stack of steps that give back what was changed. Before something is changed, the step that gives it back is pushed,
   so that no interruption finds a change without one. `run` takes the last step first; a step leaves the stack only when it is
   done: an interrupted run can be called again, and every step must bear being run twice. As a context manager it runs at the
   end of the block, whatever ended it; `if_broken` is a block that runs it only where an exception ends the block.
"""

import _signal  # pyright: ignore[reportMissingImports]  # what signal wraps: its enumerations take longer than all else
import _thread
import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

Step = Callable[[], None]
Push = Callable[[Step], None]
Function = TypeVar("Function", bound=Callable[..., Any])

PATIENCE = 5.0  # seconds
_AGAIN = 1e-3  # seconds
_SIGINT = int(signal.SIGINT)
_CONTEXT = ("__enter__", "__exit__")

_UNPARTED: set[CodeType] = set()
_JOINTS: set[CodeType] = set()
_CALLS: set[CodeType] = set()


def unparted(function: Function) -> Function:
    """Marks a function that Ctrl-C does not part, whatever it calls: a few steps that belong together, and never a long wait."""
    _UNPARTED.add(code_of(function))
    return function


def joint(function: Function) -> Function:
    """Marks a function whose own lines Ctrl-C does not part; what it calls can be interrupted."""
    _JOINTS.add(code_of(function))
    return function


def call(function: Function) -> Function:
    """Marks a joint within which the contexts that are entered and left are not parted, either."""
    _CALLS.add(code_of(function))
    return joint(function)


def code_of(function: Callable[..., Any]) -> CodeType:
    """The code of a function itself, whatever wraps it."""
    while hasattr(function, "__wrapped__"):  # of a context manager that is written as a generator
        function = function.__wrapped__
    return function.__code__


# Between a context that is entered and what remembers to leave it.
for _kind in (contextlib._GeneratorContextManager, *contextlib.ExitStack.__mro__[:-1]):
    for _method in vars(_kind).values():
        if isinstance(_method, FunctionType):
            joint(_method)


def is_unparted(frame: FrameType | None) -> bool:
    """Whether an interrupt that finds the main thread at this frame has to wait."""
    if frame is not None and frame.f_code in _JOINTS:
        return True
    in_context = False
    while frame is not None:
        if frame.f_code in _UNPARTED or (in_context and frame.f_code in _CALLS):
            return True
        in_context = in_context or frame.f_code.co_name in _CONTEXT
        frame = frame.f_back
    return False


class _Reason:
    """Somebody who wants a handler to stay."""


class _Handler:
    """Stands before the caller's handler while anybody wants it to."""

    def __init__(self, former: Callable[[int, FrameType | None], Any]):
        self.former = former
        self.wanted_by: WeakSet[_Reason] = WeakSet()  # whoever is gone with its host wants nothing any more
        # One item while an interrupt waits; whoever takes it out sends it on. Not a lock: Ctrl-C might leave it locked.
        self._waiting: list[int] = []
        self._since: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wanted_by and is_unparted(frame):
            now = time.monotonic()
            self._since = now if self._since is None else self._since
            if now - self._since <= PATIENCE:
                if not self._waiting:
                    self._waiting.append(number)
                    _thread.start_new_thread(self._send_again, ())  # threading's own locks may be held where this comes
                return
        self._since = None
        self.former(number, frame)

    def _send_again(self) -> None:
        time.sleep(_AGAIN)
        if not self._take():
            return
        if hasattr(signal, "pthread_kill"):  # as Ctrl-C does: what the main thread waits for (a lock, a pipe) ends
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)

    def _take(self) -> bool:
        try:
            self._waiting.pop()
        except IndexError:
            return False
        return True

    def leave(self, reason: _Reason) -> None:
        """Drop one reason; with the last the handler goes, and an interrupt that waits comes now."""
        self.wanted_by.discard(reason)
        if self.wanted_by or threading.current_thread() is not threading.main_thread():
            return
        if _signal.getsignal(_SIGINT) is self:
            _signal.signal(_SIGINT, self.former)
        self._since = None
        if self._take():
            self.former(_SIGINT, sys._getframe())


@unparted
def hold_back_interrupts(push: Push) -> None:
    """Make Ctrl-C wait where it would part what belongs together, until the pushed step has been run.

    Call this before all other pushes: then its step is run last.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler: Any = _signal.getsignal(_SIGINT)
    if not isinstance(handler, _Handler):
        if not callable(handler):
            return
        handler = _Handler(handler)
    reason = _Reason()
    push(functools.partial(handler.leave, reason))
    handler.wanted_by.add(reason)
    _signal.signal(_SIGINT, handler)


unparted(_Handler.leave)


class Undo:
    """A stack of steps that undo changes, the last first; true while some are left."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def push(self, step: Step) -> None:
        """Add the step that gives back what is changed next."""
        self._steps.append(step)

    @unparted
    def run(self) -> None:
        """Run all steps, the last first, until none is left."""
        while self._steps:
            self._steps[-1]()
            self._steps.pop()

    def if_broken(self) -> "IfBroken":
        """A block: an exception that ends it runs the steps, otherwise they stay."""
        return IfBroken(self)

    @unparted
    def __len__(self) -> int:
        return len(self._steps)

    def __enter__(self) -> "Undo":
        return self

    @unparted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.run()
        finally:  # where nothing holds an interrupt back it may hit the first run; what is done is not done again
            self.run()


class IfBroken:
    """See `Undo.if_broken`."""

    def __init__(self, undo: Undo):
        self.undo = undo

    def __enter__(self) -> None:
        return None

    @unparted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.undo.__exit__(kind, error, trace)
