"""Forked children: everything is imported and made already, so that a run takes its own time only.

`run` gives what a function returns in a child of its own, or says how the child ended; `Child` is one that is under way.
"""

import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm


class Hang(Exception):
    """A child did not answer in time; it was killed."""


class Died(Exception):
    """A child ended without an answer: killed, or by its own fault."""


class Child:
    """A function at work in a fork of this process.

    Args:
        function: called in the child; what it returns must be picklable (of what it raises, classes and text are sent).
    """

    def __init__(self, function: Callable[[], Any]):
        sys.stdout.flush()
        sys.stderr.flush()
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            self._data = b""
            return
        try:  # the child
            os.setpgid(0, 0)
            os.close(self._read)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            faulthandler.enable()
            # Their own locks are shared by all forks: a killed one would keep them for ever.
            for bars in (tqdm, auto_tqdm):
                bars.set_lock(threading.RLock())
            try:
                answer = pickle.dumps((True, function()))
            except BaseException as raised:
                shown = f"{type(raised).__name__}: {raised}"
                answer = pickle.dumps((False, (type(raised).__mro__, shown, traceback.format_exc()[-3000:])))
            with os.fdopen(write, "wb") as file:
                file.write(answer)
        finally:
            os._exit(0)

    def kill(self) -> None:
        """SIGKILL of this process alone, as an out-of-memory killer does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> Any:
        """What the function returned.

        Raises:
            Hang: not within the time.
            Died: without an answer.
            Raised: the function raised.
        """
        end = time.monotonic() + seconds
        try:
            while True:
                ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    os.kill(self.pid, signal.SIGABRT)  # its stack goes to standard error
                    raise Hang(f"no answer in {seconds:.0f} s")
                block = os.read(self._read, 1 << 16)
                if not block:
                    break
                self._data += block
        finally:
            os.close(self._read)
            _, status = os.waitpid(self.pid, 0)
        if not self._data:
            raise Died(f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}")
        returned, answer = pickle.loads(self._data)
        if returned:
            return answer
        raise Raised(*answer)


class Raised(Exception):
    """What a child's function raised.

    Attributes:
        classes: of the exception, the most special first.
        text: "Class: message".
        trace: where it was raised.
    """

    def __init__(self, classes: tuple[type, ...], text: str, trace: str):
        super().__init__(text)
        self.classes, self.text, self.trace = classes, text, trace


def run(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The function's value, from a child. Raises what `Child.wait` does."""
    return Child(function).wait(seconds)
