"""A pool of processes on this machine.

1. A task is handed to a free process if its estimated memory fits beside that of the tasks under way (or nothing is under
   way). Processes are started when there is something for them.
2. Each process has a thread here that sends it one task, waits for the answer and reports it. All decisions are made by the
   caller's thread, in `submit` and `finished`.
3. A process that dies takes nobody with it. Its task is first in line again; from the second retry on it runs alone,
   because memory is what most often kills.

Not concurrent.futures: there one killed process ends all others and their tasks, and every process runs the caller's script
again, which must be written for it. These processes start from `BOOTSTRAP` (parcel.py) and need nothing of the script, so that a
notebook or an unguarded script may use them.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from swd_lens.base.machine import available_bytes
from swd_lens.factorization.solve_task import SolveTask
from swd_lens.factorization.workers.order import Assignment, Failed, after_death, read_reply
from swd_lens.factorization.workers.parcel import BOOTSTRAP, Parcel, pack_task, receive, send

_PACKAGE = Path(__file__).absolute().parents[2]


@dataclass(frozen=True)
class _Report:
    """Message of a worker's thread; `result` is None if the process died. Once `over`, the process takes no further task."""

    worker: "_Worker"
    result: Parcel | Failed | None
    over: bool


class Pool:
    """A `Backend` of `n_workers` processes with `threads` CPU threads each."""

    def __init__(self, n_workers: int, threads: int, retries: int):
        self.n_workers, self._threads, self._retries = n_workers, threads, retries
        self._workers: list[_Worker] = []
        self._waiting: deque[Assignment] = deque()
        self._reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
        self._memory = available_bytes(torch.device("cpu"))

    def submit(self, number: int, task: SolveTask) -> None:
        self._waiting.append(Assignment(number, task))
        self._start_what_fits()

    def finished(self) -> tuple[int, Parcel | Failed]:
        while True:
            report = self._reports.get()
            if report.worker not in self._workers:  # of a worker that `cancel` ended
                continue
            assignment, report.worker.assignment = report.worker.assignment, None
            assert assignment is not None
            result = report.result
            if report.over:
                self._workers.remove(report.worker)
                how = report.worker.ending()
                if result is None and (result := after_death(assignment, self._retries, "worker process", how)) is None:
                    self._waiting.appendleft(assignment)
            self._start_what_fits()
            if result is not None:
                return assignment.number, result

    def cancel(self) -> None:
        self._waiting.clear()
        for worker in [worker for worker in self._workers if worker.assignment is not None]:
            self._workers.remove(worker)
            worker.end()

    def close(self) -> None:
        self._waiting.clear()
        while self._workers:
            self._workers.pop().end()

    def _start_what_fits(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            free = next((worker for worker in self._workers if worker.assignment is None), None)
            if free is None:
                if len(self._workers) == self.n_workers:
                    return
                free = _Worker(self._threads, self._reports)
                self._workers.append(free)
            free.take(self._waiting.popleft())

    def _fits(self, assignment: Assignment) -> bool:
        beside = [worker.assignment.task.bytes for worker in self._workers if worker.assignment is not None]
        if not beside:
            return True
        return assignment.attempts < 2 and (self._memory is None or sum(beside) + assignment.task.bytes <= self._memory)


class _Worker:
    """One process and the thread that speaks with it. `assignment` is what it works on, None if it is free."""

    def __init__(self, threads: int, reports: "queue.SimpleQueue[_Report]"):
        self.assignment: Assignment | None = None
        self._inbox: queue.SimpleQueue[SolveTask | None] = queue.SimpleQueue()
        where = json.dumps([[str(path) for path in sys.path], str(_PACKAGE)])
        # The number of threads for every library that asks; waiting threads spin a little, then sleep (__init__.py).
        given = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, where, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"GOMP_SPINCOUNT": "1000", **os.environ, **given},
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends its workers
        )
        self._thread = threading.Thread(target=self._speak, args=(reports,), daemon=True)
        self._thread.start()

    def take(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._inbox.put(assignment.task)

    def end(self) -> None:
        """Kill the process; it holds nothing that anybody wants."""
        self._process.kill()
        self._inbox.put(None)
        self._thread.join()
        self._clean_up()

    def ending(self) -> str:
        """How the dead process ended, in words."""
        self._inbox.put(None)
        self._thread.join()
        self._clean_up()
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (the system does that when memory runs out)"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _clean_up(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not yet written goes nowhere
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def _speak(self, reports: "queue.SimpleQueue[_Report]") -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        while (task := self._inbox.get()) is not None:
            try:
                send(stdin, pack_task(task))
                report = _Report(self, read_reply(receive(stdout)), over=False)
            except (OSError, EOFError):  # the pipe broke
                report = _Report(self, None, over=True)
            except Exception as error:  # options that cannot be sent, no memory for the answer
                self._process.kill()  # who knows what is left in the pipe
                report = _Report(self, Failed(error), over=True)
            del task  # the assignment holds it, and only as long as need be
            reports.put(report)
            del report
