"""interrupted: what a long call says when Ctrl-C ends it.

1. `says_when_interrupted` marks a public function that runs long. The KeyboardInterrupt that leaves it says in one line where the
   call was, what is kept, and how the same call goes on (in its `args`, so that every Python and notebook shows it), and shows
   the caller's lines, without those of this package. SWD_LENS_TRACEBACK in the environment has all shown: where a call hangs.
2. `reached` notes how far the call is. Calls within it (a study factorizes) note nothing and say nothing.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from swd_lens.base.errors import visible

TRACEBACK = "SWD_LENS_TRACEBACK"
Function = TypeVar("Function", bound=Callable[..., Any])


class _Running(threading.local):
    """How many marked calls run in a thread, one within the other, and how far the outermost is."""

    calls: int = 0
    reached: str = ""


_running = _Running()


def says_when_interrupted(function: Function) -> Function:
    """Mark a function; one that is given `out` is taken to go on from there. Outside of `with_torch_defaults`."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        outer = _running.calls
        try:
            _running.calls = outer + 1
            if not outer:
                _running.reached = ""
            return function(*args, **kwargs)
        except KeyboardInterrupt as stop:
            if outer:
                raise
            if not stop.args:  # whoever raises one with words of its own keeps them
                signature = inspect.signature(function)
                given = signature.bind_partial(*args, **kwargs).arguments
                words = f"{function.__name__} was interrupted{_running.reached}"
                if (out := given.get("out")) is not None:
                    same = "the same call without overwrite=True" if given.get("overwrite") else "the same call"
                    words += f"; what is finished is kept in {out}, and {same} goes on from there"
                else:
                    words += "; nothing of it is kept"
                    if "out" in signature.parameters:
                        words += ": with out=FOLDER the same call would go on from what is finished"
                stop.args = (visible(words),)
            if TRACEBACK in os.environ:
                raise
            short = stop.with_traceback(None)
            raise short from None
        finally:
            _running.calls = outer

    return called  # type: ignore[return-value]


def reached(words: str) -> None:
    """Note how far the call that runs is, in words to put behind a verb: ", 3 of 8 matrices finished"."""
    if _running.calls == 1:
        _running.reached = words
