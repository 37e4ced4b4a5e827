"""A program in a fork of the test's process: everything is imported already, where a new process takes seconds for that."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable

import torch


def run_forked(
    program: str, *arguments: object, before: Callable[[], object] = lambda: None, stdout: int | None = None
):
    """Run a program with these arguments, as `python -c` would; its return code, and what it wrote: at most some kilobytes.

    Args:
        before: called in the child at its start.
        stdout: a file descriptor to write to; None: what is written is given back.
    """
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
        sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w")  # noqa: SIM115
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
