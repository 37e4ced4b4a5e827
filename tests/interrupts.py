"""Ctrl-C at a line of one's choice, for tests that everything is mended wherever it hits."""

import sys

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

    def trace(frame, event, arg):
        nonlocal lines
        if not any(part in frame.f_code.co_filename for part in parts):
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
    return lines
