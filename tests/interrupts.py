"""Ctrl-C at a line of one's choice, for tests that everything is mended wherever it hits."""

import signal
import sys
import time

from swd_lens.base import holding, surroundings

INJECTION = (
    *(f"swd_lens/units/{name}.py" for name in ("attach", "kernels", "match", "probe", "projection", "sources", "watch")),
    "swd_lens/hosts/",
)


def ctrl_c(frame):
    """What Python does when Ctrl-C finds the main thread at this frame: the handler of that moment raises, or waits."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, frame)


def _until_it_came():
    """An interrupt that was held back comes a moment later, which may be behind the function's end."""
    while getattr(signal.getsignal(signal.SIGINT), "_waiting", None):
        time.sleep(1e-3)
        if not getattr(signal.getsignal(signal.SIGINT), "_waiting", None):  # taken, and sent in a moment
            time.sleep(0.05)


def run_to_line(function, stop, parts=INJECTION, events=("line",)):
    """Run a function, with Ctrl-C before its stop-th line in files of these parts of swd_lens; the lines run.

    Args:
        events: with "call" also on the way into each function, before its first line, where Python asks for signals, too.
    """
    lines = 0
    counted: dict[str, bool] = {}  # by file: the question is asked at every call of any function

    def trace(frame, event, arg):
        nonlocal lines
        file = frame.f_code.co_filename
        if file not in counted:
            counted[file] = any(part in file for part in parts)
        if not counted[file]:
            return None
        if event in events:
            lines += 1
            if lines == stop:
                ctrl_c(frame)
        return trace

    dropped = 0

    def unraisable(told):
        nonlocal dropped
        of_weak_reference = getattr(told.object, "__module__", None) in ("weakref", "_weakrefset")
        if of_weak_reference and issubclass(told.exc_type, KeyboardInterrupt):
            dropped += 1  # not `told` itself, which would keep every frame
        else:
            hook(told)

    former, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = unraisable
    sys.settrace(trace)
    try:
        function()
        _until_it_came()
        if dropped:  # in a callback of a weak reference Python drops what is raised: who pressed Ctrl-C presses it again
            raise KeyboardInterrupt
    finally:
        sys.settrace(former)
        sys.unraisablehook = hook
        # Between the last line under a lock and its release, where tracing interrupts, Python asks for no signals. Left locked it
        # would keep every other thread of later tests waiting.
        for lock in (surroundings._lock, holding._lock):
            while lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
                lock.release()
    return lines
