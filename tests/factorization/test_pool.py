"""A pool of processes (pool.py): the same bits, lazily, in order, whatever dies."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from swd_lens.base.errors import GramError, SparsityError, WorkerLostError
from swd_lens.factorization.workers import SolveTask, open_workers
from swd_lens.factorization.workers.order import WorkerTracebackError
from swd_lens.factorization.workers.pool import Pool
from tests.factorization.tasks import assert_same_bits, task, tasks_of_many_kinds

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def pool():
    """Two processes with one thread each, shared by tests that leave them alive."""
    with open_workers(2, threads=1) as workers:
        yield workers


def test_a_task_without_company_is_solved_here_with_all_threads_unless_their_number_is_given(monkeypatch):
    """A worker process would have a share of them; and no process is started."""

    def refuse(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(Pool, "submit", refuse)
    steps = []
    with open_workers(2) as workers:
        assert workers.in_this_process(alone=True) and not workers.in_this_process(alone=False)
        how = {"alone": True, "on_iteration": lambda step: steps.append(torch.get_num_threads())}
        assert [solved.site for solved in workers.solve([task(0)], **how)] == ["blocks.0.mlp_out"]
        assert set(steps) == {torch.get_num_threads()}
        with pytest.raises(AssertionError, match="a process was started"):
            list(workers.solve([task(0)]))
    with open_workers(2, threads=1) as workers, pytest.raises(AssertionError, match="a process was started"):
        assert not workers.in_this_process(alone=True)
        list(workers.solve([task(0)], alone=True))


def test_open_workers_refuses_what_is_no_number():
    for name, value in (("workers", 0), ("workers", -2), ("workers", True), ("workers", "2"), ("threads", 0), ("retries", -1)):
        with pytest.raises(ValueError, match=f"{name}={value!r}"), open_workers(**{name: value}):
            pass


def test_a_pool_gives_the_bits_of_this_process(pool):
    tasks = tasks_of_many_kinds()
    with open_workers(1, threads=1) as workers:
        here = list(workers.solve(tasks))
    there = list(pool.solve(tasks))
    for one, other in zip(here, there, strict=True):
        assert_same_bits(one, other)


def test_a_pool_draws_as_workers_come_free_and_lets_go_of_what_is_done(pool):
    grams, alive, waiting, finished = [], [], [], []

    def tasks():
        for i in range(12):
            alive.append(sum(gram() is not None for gram in grams))
            waiting.append(i - len(finished))
            one = task(i)
            grams.append(weakref.ref(one.gram))
            yield one
            del one

    sites = [solved.site for solved in pool.solve(tasks(), on_finished=finished.append)]
    assert sites == [f"blocks.{i}.mlp_out" for i in range(12)]
    assert max(waiting) == 2  # two workers + one, the one being drawn not counted
    assert max(alive) <= 2
    assert not any(gram() is not None for gram in grams)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (task(1, sparsity=1.5), SparsityError, r"^blocks\.1\.mlp_out \(24, 16\): .*1\.5"),
        (SolveTask("skew", torch.eye(3), torch.eye(3).roll(1, 0)), GramError, r"^skew \(3, 3\): "),
    ],
)
def test_an_error_has_its_class_the_site_and_the_workers_traceback(pool, wrong, kind, says):
    with pytest.raises(kind, match=says) as here, open_workers() as workers:
        list(workers.solve([wrong]))
    results = pool.solve([task(0), wrong])
    assert next(results).site == "blocks.0.mlp_out"
    with pytest.raises(kind, match=says) as there:
        next(results)
    assert str(there.value) == str(here.value)
    assert isinstance(there.value.__cause__, WorkerTracebackError)
    assert "Traceback" in str(there.value.__cause__) and "solve_task" in str(there.value.__cause__)


def test_tasks_that_do_not_fit_side_by_side_run_one_after_the_other(pool, monkeypatch):
    backend, at_once = pool._backend, []
    monkeypatch.setattr(backend, "_memory", 15)
    tasks = [task(i, bytes=size) for i, size in enumerate([10, 10, 5, 20])]
    for _ in pool.solve(tasks, on_finished=lambda _site: at_once.append(busy(backend))):
        pass
    # After the first: only the second (10 + 5 fit, 10 + 10 not), with the third. 20 alone fits nowhere, and runs alone.
    assert all(sum(size) <= 15 or len(size) == 1 for size in at_once), at_once
    assert [10, 5] in [sorted(size, reverse=True) for size in at_once] and [20] in at_once


def busy(backend) -> list[int]:
    return [worker.assignment.task.bytes for worker in backend._workers if worker.assignment is not None]


class Poison:
    """Kills the process that unpickles it."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_one_that_always_dies_is_named():
    tasks = [task(0), task(1, 160, 160, preset="best"), task(2)]
    with open_workers(1, threads=1) as workers:
        here = list(workers.solve(tasks))
    with open_workers(2, threads=1, retries=1) as workers:
        list(workers.solve([task(3), task(4)]))  # one each: both processes are past their start
        backend, killed = workers._backend, []

        def kill_the_long_one(_site):
            for worker in backend._workers:
                if not killed and worker.assignment is not None and worker.assignment.task is tasks[1]:
                    killed.append(wait_until_it_works(worker._process.pid))
                    os.kill(killed[0], signal.SIGKILL)

        with pytest.warns(RuntimeWarning, match=r"blocks\.1\.mlp_out was killed by SIGKILL .*1 of 1 retries"):
            there = list(workers.solve(tasks, on_finished=kill_the_long_one))
        assert len(killed) == 1
        for one, other in zip(here, there, strict=True):
            assert_same_bits(one, other)

        with (
            pytest.warns(RuntimeWarning, match="trying again"),
            pytest.raises(WorkerLostError, match=r"^deadly \(2, 2\): .*died 2 times out of 2 .*SIGKILL.* 3 GB.*fewer workers"),
        ):
            list(workers.solve([SolveTask("deadly", torch.eye(2), options={"x": Poison()}, bytes=3 * 10**9)]))


def wait_until_it_works(pid: int) -> int:
    """The process, which was idle, has used CPU: it is in the middle of its task."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < before + 0.05:
        time.sleep(0.01)
    return pid


LONG = """
import faulthandler
import signal
import sys
import torch
from swd_lens.factorization.workers import SolveTask, open_workers

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)

def tasks():
    for i in range(9):
        size, iterations = (8, 20) if i < 2 else (1500, 1000)
        yield SolveTask(f"m{i}", torch.randn(size, size), options=dict(outer_iterations=iterations))

with open_workers(2, threads=1) as workers:
    for n, solved in enumerate(workers.solve(tasks())):
        if n == 1:
            faulthandler.dump_traceback_later(60)  # should it hang, its stack is in the message of the failed test
            print("working", flush=True)
"""


@pytest.mark.slow
def test_no_worker_outlives_an_interrupted_or_killed_parent():
    # Both at once: most of the time goes into imports.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    parents = {how: subprocess.Popen([sys.executable, "-c", LONG], **start) for how in (signal.SIGINT, signal.SIGKILL)}
    for how, parent in parents.items():
        assert parent.stdout.readline() == "working\n", parent.stderr.read()
        # From here on: imports on a loaded machine take as long as they take.
        watchdog = threading.Timer(120, parent.kill)
        watchdog.start()
        workers = psutil.Process(parent.pid).children()
        assert len(workers) == 2
        parent.send_signal(how)
        _, errors = parent.communicate()
        watchdog.cancel()
        assert parent.returncode == -how, errors
        if how == signal.SIGINT:
            assert errors.count("KeyboardInterrupt") == 1, errors  # the parent's, nothing from the workers
        gone, left = psutil.wait_procs(workers, timeout=10)
        assert not left and len(gone) == 2
