"""The order of tasks and results (order.py), by hand."""

import pytest
import torch

from swd_lens.base.errors import SparsityError
from swd_lens.factorization.workers import SolveTask, open_workers, solve_task
from swd_lens.factorization.workers.order import Failed, Workers
from swd_lens.factorization.workers.parcel import pack_solved
from tests.factorization.tasks import task


def test_one_worker_is_this_process_that_draws_when_it_is_asked():
    drawn = []
    with open_workers() as workers:
        results = workers.solve(drawn.append(i) or task(i) for i in range(5))
        assert drawn == []
        next(results)
        assert drawn == [0]
    threads = torch.get_num_threads()
    seen, steps = [], []
    with open_workers(1, threads=threads + 1) as workers:
        results = workers.solve([task(0), task(1)], on_iteration=lambda step: steps.append((torch.get_num_threads(), step.total)))
        for solved in results:
            seen.append(solved.site)
            assert torch.get_num_threads() == threads  # the caller's own work keeps its threads
    assert seen == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    assert {n for n, _ in steps} == {threads + 1} and len(steps) == 2 * steps[0][1]


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
