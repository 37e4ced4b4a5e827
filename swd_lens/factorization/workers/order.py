"""The order of things: tasks are drawn only as workers come free, results come out in the order of the tasks.

1. Draw tasks until one more than there are workers is with the backend: one waits, so that no worker waits for the caller.
2. Wait until the backend has finished one, whichever it is.
3. Give out what is next in order; what finished early waits, packed. Then draw again.

So memory holds as many tasks as workers + 1, however many there are. An error waits for its turn like a result: what was
finished before it in order is given out first, as in one process; but nothing is drawn any more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from swd_lens.base.errors import WorkerLostError, legible, warn
from swd_lens.factorization.solve_task import Solved, SolveTask, solve_task, threads_set_to
from swd_lens.factorization.workers.parcel import Parcel, unpack_solved
from swd_lens.solver import OnIteration


class WorkerTracebackError(Exception):
    """Stands as the cause of an error that came from another process, and quotes its traceback."""

    def __str__(self) -> str:
        return f"in the worker:\n\n{self.args[0]}"


@dataclass(frozen=True)
class Failed:
    """A task that ended in an error."""

    error: BaseException


@dataclass
class Assignment:
    """A task with a backend: its number in the order, and how many workers died over it."""

    number: int
    task: SolveTask
    attempts: int = 0


@runtime_checkable
class Backend(Protocol):
    """Where tasks are solved, other than in this process."""

    @property
    def n_workers(self) -> int: ...

    def submit(self, number: int, task: SolveTask) -> None:
        """Solve it when a worker is free."""
        ...

    def finished(self) -> tuple[int, Parcel | Failed]:
        """Wait for a task to end, whichever is first; its number and its result."""
        ...

    def cancel(self) -> None:
        """Stop and forget all tasks."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Workers:
    """Workers that solve tasks; made by `open_workers`. backend: other processes, None: this one; threads: of a solve in this
    process, None: those that torch is set to; alone_here: whether a task without company is solved in this process, with all of
    its threads: a worker has a share."""

    def __init__(self, backend: Backend | None, threads: int | None, *, alone_here: bool = False):
        self._backend, self._threads, self._alone_here = backend, threads, alone_here

    def in_this_process(self, *, alone: bool) -> bool:
        """Whether tasks are solved in this process, those without company (`alone`) or others."""
        return self._backend is None or (alone and self._alone_here)

    def solve(
        self,
        tasks: Iterable[SolveTask],
        *,
        alone: bool = False,
        on_iteration: OnIteration | None = None,
        on_finished: Callable[[str], None] | None = None,
    ) -> Iterator[Solved]:
        """Solve the tasks; results in their order. One call at a time: read its results, or close it, before the next.

        Args:
            tasks: drawn one at a time, never more than one per worker and one beyond that are not yet solved.
            alone: there is one task, and there was one whatever an earlier call has finished: its threads, and so its last bits,
                depend on it.
            on_iteration: in this process called with a `Step` after each of the solver's outer iterations.
            on_finished: called with a task's site as soon as it is solved; its result may still wait for its turn.

        Raises:
            ValueError: a task is impossible (bad sparsity, a Gram that is none, ...); its site's name stands in front.
            WorkerLostError: a task's worker died, and so did those of all its retries.
            Exception: whatever else a solve raises. From another process, the cause quotes the worker's traceback.

        Warns:
            RuntimeWarning: a worker died; its task is tried again.
        """
        if self._backend is None or self.in_this_process(alone=alone):
            return self._in_this_process(tasks, on_iteration, on_finished)
        return _in_order(tasks, self._backend, on_finished)

    def _in_this_process(
        self, tasks: Iterable[SolveTask], on_iteration: OnIteration | None, on_finished: Callable[[str], None] | None
    ) -> Iterator[Solved]:
        for task in tasks:
            with threads_set_to(self._threads):
                solved = solve_task(task, on_iteration)
            if on_finished is not None:
                on_finished(task.site)
            del task  # its Gram need not outlive it while the caller works on the result
            yield solved


def _in_order(tasks: Iterable[SolveTask], backend: Backend, on_finished: Callable[[str], None] | None) -> Iterator[Solved]:
    source = iter(tasks)
    ended: dict[int, Parcel | Failed] = {}
    given = drawn = under_way = 0
    more = True
    try:
        while True:
            while more and under_way <= backend.n_workers:
                task = next(source, None)
                if task is None:
                    more = False
                    break
                backend.submit(drawn, task)
                del task  # the backend holds it as long as need be
                drawn, under_way = drawn + 1, under_way + 1
            if given == drawn and not more:
                return
            number, result = backend.finished()
            under_way -= 1
            ended[number] = result
            if isinstance(result, Failed):
                more = False
            elif on_finished is not None:
                on_finished(result["site"])
            del result
            while given in ended:
                first = ended.pop(given)
                if isinstance(first, Failed):
                    raise first.error
                given += 1
                yield unpack_solved(first)
                del first
    finally:
        backend.cancel()


def read_reply(reply: tuple[str, Any]) -> Parcel | Failed:
    """The parcel, or the error, in the answer of `swd_lens.factorization.workers.parcel.attempt`."""
    kind, content = reply
    if kind == "solved":
        return content
    error, text = content
    error.__cause__ = WorkerTracebackError(text)
    return Failed(error)


def after_death(assignment: Assignment, retries: int, worker: str, how: str) -> Failed | None:
    """Count the death of a worker over a task; the error, if it was the last attempt, else None, with a warning: try again."""
    assignment.attempts += 1
    task, n = assignment.task, assignment.attempts
    if n <= retries:
        warn(f"the {worker} that solved {task.site} {legible(how)}; trying again ({n} of {retries} retries)", RuntimeWarning)
        return None
    memory = f"it is estimated to need {task.bytes / 1e9:.3g} GB" if task.bytes else "its memory was not estimated"
    return Failed(
        WorkerLostError(
            f"{task.site} {tuple(task.weight.shape)}: its worker died {n} times out of {n} attempts, last: it {how}. If memory "
            f"ran out ({memory}), use fewer workers or a machine with more; else look into the worker's messages"
        )
    )
