"""Ctrl-C at a line of one's choice, for tests that everything is mended wherever it hits."""

import sys

from swd_lens.base import surroundings

INJECTION = (
    *(
        f"swd_lens/units/{name}.py"
        for name in ("attach", "kernels", "match", "probe", "projection", "sources", "watch")
    ),
    "swd_lens/hosts/",
)


def run_to_line(function, stop, parts=INJECTION):
    """Run a function, raising KeyboardInterrupt before its stop-th line in files of these parts of swd_lens; the lines run."""
    lines = 0
    counted: dict[str, bool] = {}  # by file: the question is asked at every call of any function

    def trace(frame, event, arg):
        nonlocal lines
        file = frame.f_code.co_filename
        if file not in counted:
            counted[file] = any(part in file for part in parts)
        if not counted[file]:
            return None
        if event == "line":
            lines += 1
            if lines == stop:
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(former)
        # Between the last line under a lock and its release, where tracing interrupts, Python asks for no signals. Left locked it
        # would keep every other thread of later tests waiting.
        while surroundings._lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
            surroundings._lock.release()
    return lines
