"""Forked children: everything is imported and made already, so that a run takes its own time only.

`run` gives what a function returns in a child of its own, or says how the child ended; `Child` is one that is under way.
`run_forked` runs a program there, as `python -c` would, where a new process takes seconds for its imports.
"""

import faulthandler
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm

_LENGTH = 8  # bytes before an answer, which say how long it is


class Hang(Exception):
    """A child did not answer in time; it was killed."""


class Died(Exception):
    """A child ended without an answer: killed, or by its own fault."""


class Child:
    """A function at work in a fork of this process; what it returns must be picklable (of what it raises, classes and text are
    sent)."""

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
                file.write(len(answer).to_bytes(_LENGTH, "big") + answer)
        finally:
            os._exit(0)

    def kill(self) -> None:
        """SIGKILL of this process alone, as an out-of-memory killer does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> Any:
        """What the function returned. Raises Hang: not within the time; Died: without an answer; Raised: the function raised."""
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
        # One that was killed while it answered has sent a part of it.
        n_bytes, sent = int.from_bytes(self._data[:_LENGTH], "big"), self._data[_LENGTH:]
        if not sent or len(sent) < n_bytes:
            raise Died(f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}")
        returned, answer = pickle.loads(sent)
        if returned:
            return answer
        raise Raised(*answer)


class Raised(Exception):
    """What a child's function raised: its classes, the most special first, "Class: message", and where."""

    def __init__(self, classes: tuple[type, ...], text: str, trace: str):
        super().__init__(text)
        self.classes, self.text, self.trace = classes, text, trace


def run(function: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The function's value, from a child. Raises what `Child.wait` does."""
    return Child(function).wait(seconds)


# ---------------------------------------------------------------------------------------------- programs


def run_forked(program: str, *arguments: object, before: Callable[[], object] = lambda: None, stdout: int | None = None):
    """Run a program with these arguments, as `python -c` would; its return code, and what it wrote (at most some kilobytes),
    if not to a file descriptor `stdout`. `before` is called in the child at its start."""
    sys.stdout.flush()
    sys.stderr.flush()
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        _in_the_child(program, list(map(str, arguments)), before, to_out if stdout is None else stdout, to_err)
    os.close(to_out)
    os.close(to_err)
    with os.fdopen(out) as written, os.fdopen(err) as told:
        texts = written.read(), told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return subprocess.CompletedProcess(program, code, *texts)


def _in_the_child(program: str, arguments: list[str], before: Callable[[], object], out: int, err: int) -> None:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 256)
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w")  # noqa: SIM115 - closed as the child ends
        sys.argv[:] = ["-c", *arguments]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # a pool of threads does not outlive a fork
        before()
        exec(compile(program, "<forked>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 120  # as Python ends where its output cannot be written
    finally:
        os._exit(code)
