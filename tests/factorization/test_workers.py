"""Workers: the same bits on every backend, lazily, in order, whatever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from swd_lens.base.errors import GramError, RayMissingError, SparsityError, WorkerLostError
from swd_lens.factorization.workers import Solved, SolveTask, open_workers, solve_task
from swd_lens.factorization.workers.order import Failed, Workers, WorkerTracebackError
from swd_lens.factorization.workers.parcel import BOOTSTRAP, pack_solved, pack_task, unpack_solved, unpack_task
from swd_lens.factorization.workers.pool import Pool
from swd_lens.units.factors import Factors
from tests.forks import run_forked

HERE = Path(__file__).parent


def task(i: int = 0, d_in: int = 24, d_out: int = 16, gram: bool = True, **settings) -> SolveTask:
    generator = torch.Generator().manual_seed(i)
    weight = torch.randn(d_in, d_out, generator=generator)
    inputs = torch.randn(2 * d_in, d_in, generator=generator)
    settings = {"preset": "quick", "tokens": 2 * d_in if gram else None, "bytes": 10**6} | settings
    return SolveTask(f"blocks.{i}.mlp_out", weight, inputs.T @ inputs / (2 * d_in) if gram else None, **settings)


def misaligned(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, starting four bytes further on than torch would have them."""
    return torch.cat([torch.zeros(1), matrix.reshape(-1)])[1:].view(matrix.shape)


def tasks_of_many_kinds() -> list[SolveTask]:
    plain = task(0, 96, 40)
    variants = [
        task(1, 96, 40, gram=False),
        task(2, 40, 96, preset="best"),
        task(3, 64, 64, preset="paper"),
        task(4, 96, 40, gram=False, preset="paper", options={"outer_iterations": 4, "rounding": "exact"}),
        task(5, 40, 96, preset="best", units="2x", sparsity=0.75),
    ]
    transposed = SolveTask("transposed", plain.weight.T.contiguous().T, plain.gram, preset="quick", tokens=192)
    shifted = SolveTask("shifted", misaligned(plain.weight), misaligned(plain.gram), preset="quick", tokens=192)
    short = SolveTask("bfloat16", plain.weight.bfloat16(), plain.gram.double(), preset="quick", tokens=192)
    return [plain, *variants, transposed, shifted, short]


def assert_same_bits(one: Solved, other: Solved) -> None:
    assert one.site == other.site
    for side in ("read", "write"):
        a, b = getattr(one, side), getattr(other, side)
        assert a.is_contiguous() and b.is_contiguous()
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), one.site  # int32: -0.0 is not 0.0
    assert (one.relmse, one.relative_frobenius) == (other.relmse, other.relative_frobenius)
    assert (one.settings, one.solver) == (other.settings, other.solver)


@pytest.fixture(scope="module")
def pool():
    """Two processes with one thread each, shared by tests that leave them alive."""
    with open_workers(2, threads=1) as workers:
        yield workers


# ---------------------------------------------------------------------------------------------- one task


def test_bits_depend_on_values_not_on_where_they_lie_in_memory():
    plain, *_, transposed, shifted, _short = tasks_of_many_kinds()
    assert not transposed.weight.is_contiguous() and shifted.weight.data_ptr() % 64
    want = solve_task(plain)
    for other in (transposed, shifted):
        got = solve_task(other)
        assert torch.equal(got.read, want.read) and torch.equal(got.write, want.write)
        assert got.relmse == want.relmse


def test_a_result_is_measured_and_has_no_negative_zeros():
    one = task()
    solved = solve_task(one)
    f = Factors(solved.read, solved.write, weight=one.weight)
    assert solved.relmse == pytest.approx(f.relmse(one.gram), rel=1e-9)
    assert solved.relative_frobenius == pytest.approx(f.relative_frobenius(), rel=1e-9)
    for factor in (solved.read, solved.write):
        assert (factor == 0).any() and not (factor.signbit() & (factor == 0)).any()


def test_parcels_keep_every_bit():
    for one in tasks_of_many_kinds():
        back = unpack_task(pack_task(one))
        assert back.weight.dtype == one.weight.dtype and torch.equal(back.weight, one.weight)
        assert (back.gram is None) if one.gram is None else torch.equal(back.gram, one.gram)
        assert {**vars(back), "weight": 0, "gram": 0} == {**vars(one), "weight": 0, "gram": 0}
    solved = solve_task(task(preset="paper"))
    assert_same_bits(unpack_solved(pack_solved(solved)), solved)


# ---------------------------------------------------------------------------------------------- in one process


def test_one_worker_is_this_process_with_its_threads_restored():
    threads = torch.get_num_threads()
    seen, steps = [], []
    with open_workers(1, threads=threads + 1) as workers:
        results = workers.solve(
            [task(0), task(1)], on_iteration=lambda step: steps.append((torch.get_num_threads(), step.total))
        )
        for solved in results:
            seen.append(solved.site)
            assert torch.get_num_threads() == threads  # the caller's own work keeps its threads
    assert seen == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    assert {n for n, _ in steps} == {threads + 1} and len(steps) == 2 * steps[0][1]


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


def test_this_process_draws_a_task_when_its_result_is_asked_for():
    drawn = []
    with open_workers() as workers:
        results = workers.solve(drawn.append(i) or task(i) for i in range(5))
        assert drawn == []
        next(results)
        assert drawn == [0]


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 0}, {"workers": -2}, {"workers": True}, {"workers": "2"}, {"threads": 0}, {"retries": -1}],
)
def test_open_workers_refuses_what_is_no_number(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"), open_workers(**arguments):
        pass


def test_without_ray_installed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissingError, match=r"pip install 'swd-lens\[ray\]'") as raised, open_workers("ray"):
        pass
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, ImportError)


# ---------------------------------------------------------------------------------------------- order, by hand


class BackwardsBackend:
    """Solves the youngest of the tasks it holds."""

    n_workers = 3

    def __init__(self):
        self.held: list[tuple[int, SolveTask]] = []
        self.most, self.cancelled = 0, False

    def submit(self, place, one):
        self.held.append((place, one))
        self.most = max(self.most, len(self.held))

    def finished(self):
        place, one = self.held.pop()
        if one.sparsity > 1:
            return place, Failed(SparsityError(one.site))
        return place, pack_solved(solve_task(one))

    def cancel(self):
        self.cancelled = True

    def close(self):
        pass


def test_results_come_in_the_order_of_the_tasks_whichever_is_finished_first():
    backend, finished = BackwardsBackend(), []
    results = list(Workers(backend, None).solve((task(i) for i in range(9)), on_finished=finished.append))
    assert [solved.site for solved in results] == [f"blocks.{i}.mlp_out" for i in range(9)]
    assert finished[0] == "blocks.3.mlp_out" and sorted(finished) == [solved.site for solved in results]
    assert backend.most == backend.n_workers + 1


def test_an_error_waits_for_its_turn_and_stops_the_drawing():
    backend, drawn, got = BackwardsBackend(), [], []
    tasks = (drawn.append(i) or task(i, sparsity=2.0 if i == 2 else 0.5) for i in range(12))
    # Held: 0 1 2 3. 3 is solved, 4 drawn and solved, and so on to 11, then 2 fails. With 2 first to fail, nothing is drawn:
    with pytest.raises(SparsityError, match=r"blocks\.2"):
        for solved in Workers(backend, None).solve(tasks):
            got.append(solved.site)
    assert got == ["blocks.0.mlp_out", "blocks.1.mlp_out"] and backend.cancelled

    backend, drawn[:] = BackwardsBackend(), []
    tasks = (drawn.append(i) or task(i, sparsity=2.0 if i == 3 else 0.5) for i in range(12))
    with pytest.raises(SparsityError, match=r"blocks\.3"):
        list(Workers(backend, None).solve(tasks))
    assert drawn == [0, 1, 2, 3]


def test_whoever_stops_reading_cancels_the_rest():
    backend = BackwardsBackend()
    results = Workers(backend, None).solve(task(i) for i in range(9))
    next(results)
    assert not backend.cancelled
    results.close()
    assert backend.cancelled


# ---------------------------------------------------------------------------------------------- a pool of processes


def test_a_pool_gives_the_bits_of_this_process(pool):
    tasks = tasks_of_many_kinds()
    with open_workers(1, threads=1) as workers:
        here = list(workers.solve(tasks))
    there = list(pool.solve(tasks))
    for one, other in zip(here, there, strict=True):
        assert_same_bits(one, other)


@pytest.mark.slow
def test_a_worker_process_does_without_transformer_lens():
    program = BOOTSTRAP.replace(
        "main(tasks, results, int(sys.argv[2]))", "results.write(' '.join(sys.modules).encode())"
    )
    assert program != BOOTSTRAP
    where = json.dumps([sys.path, str(HERE.parents[1] / "swd_lens")])
    done = subprocess.run([sys.executable, "-c", program, where, "1"], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "swd_lens.factorization.solve" in loaded and not {"transformer_lens", "transformers"} & loaded


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
            pytest.raises(
                WorkerLostError, match=r"^deadly \(2, 2\): .*died 2 times out of 2 .*SIGKILL.* 3 GB.*fewer workers"
            ),
        ):
            list(workers.solve([SolveTask("deadly", torch.eye(2), options={"x": Poison()}, bytes=3 * 10**9)]))


def wait_until_it_works(pid: int) -> int:
    """The process, which was idle, has used CPU: it is in the middle of its task."""
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < before + 0.05:
        time.sleep(0.01)
    return pid


# ---------------------------------------------------------------------------------------------- the end of the parent

KILLED = """
import os
import torch
from swd_lens.factorization.workers import SolveTask
from swd_lens.factorization.workers.parcel import main, pack_task, send

(tasks, to_tasks), (answers, results) = os.pipe(), os.pipe()
os.close(answers)
with os.fdopen(to_tasks, "wb") as to_worker, os.fdopen(tasks, "rb", 0) as read, os.fdopen(results, "wb") as write:
    send(to_worker, pack_task(SolveTask("m", torch.randn(8, 8), options={"outer_iterations": 2})))
    main(read, write, 1)
"""


def test_a_worker_whose_answer_nobody_reads_ends_without_a_word():
    ended = run_forked(KILLED)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


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
    parents = {
        how: subprocess.Popen(
            [sys.executable, "-c", LONG],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for how in (signal.SIGINT, signal.SIGKILL)
    }
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


# ---------------------------------------------------------------------------------------------- Ray


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (pip install 'swd-lens[ray]')")
def test_ray_gives_the_same_bits_though_a_worker_is_killed():
    # In a process of its own: Ray speaks TCP, which pytest-socket blocks here.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, HERE / "workers_ray.py"], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "same bits, one worker killed", done.stdout + done.stderr
