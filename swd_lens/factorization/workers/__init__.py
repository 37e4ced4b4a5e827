"""Workers: many matrices, solved in this process, by a pool of processes, or on a Ray cluster.

1. A `SolveTask` is one matrix with everything its solve needs; `solve_task` makes `Solved` of it (solve.py). Every backend
   runs this one function with the same number of CPU threads, so every backend gives the same bits.
2. `open_workers` opens a backend: in-process, processes (pool.py), or Ray (cluster.py).
3. `Workers.solve` draws tasks only as workers come free and gives results in the order of the tasks (order.py).
4. Between processes a task or a result travels as a parcel of plain bytes, each matrix copied once (parcel.py).

A worker that is killed loses its own task only, which is tried again. An error in a task is raised where the results are
read, in the task's turn, with the worker's traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swd_lens.base.errors import RayMissingError, WorkerLostError, quoted
from swd_lens.factorization.solve_task import Solved, SolveTask, solve_task
from swd_lens.factorization.workers.order import Backend, Workers
from swd_lens.factorization.workers.pool import Pool

__all__ = ["RayMissingError", "SolveTask", "Solved", "WorkerLostError", "Workers", "open_workers", "solve_task"]


@contextmanager
def open_workers(workers: int | str = 1, *, threads: int | None = None, retries: int = 3) -> Iterator[Workers]:
    """Workers to solve tasks with; on leaving the block, whatever way, none of them runs on.

    Args:
        workers: 1 solves in this process; n > 1 in that many processes of their own; "ray" on the Ray cluster: the one
            this process is connected to, else the one at RAY_ADDRESS or on this machine, else a local one for the time of
            the block. Ray's workers must be able to import swd_lens of this version.
        threads: CPU threads of each solve; another number gives other last bits. None: in-process what torch is set to;
            processes share that number evenly (at least 1 each), and a task that is said to be alone is solved in this process
            with all of them; Ray: 1, so that a node takes as many tasks as it has CPUs.
        retries: how often a task is tried again after its worker died (killed, out of memory, node lost).

    Yields: `Workers`; see `Workers.solve`, also for what it raises. A pool starts a process when there is a task for it; that
    takes some 3 s, and 0.25 GB before its first matrix.

    Raises ValueError: `workers`, `threads` or `retries` is not such a number or word; (RayMissingError) Ray is not installed;
    RAY_ADDRESS answers not; no node has as many CPUs as `threads`.
    """
    if workers != "ray" and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise ValueError(f"workers={quoted(workers)}: give 1 (this process), a number of processes, or 'ray'")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: a solve takes at least 1 CPU thread; None leaves the choice to swd_lens")
    if retries < 0:
        raise ValueError(f"retries={retries}: give how often a task whose worker died is tried again, 0 for never")
    if workers == 1:
        yield Workers(None, threads)
        return
    if isinstance(workers, int):
        share = max(1, torch.get_num_threads() // workers)
        backend: Backend = Pool(workers, share if threads is None else threads, retries)
    else:
        try:
            import ray  # noqa: F401
        except ImportError as cause:
            raise RayMissingError("workers='ray' needs Ray, which is not installed: pip install 'swd-lens[ray]'") from cause
        from swd_lens.factorization.workers.cluster import Cluster

        backend = Cluster(1 if threads is None else threads, retries)
    try:
        yield Workers(backend, None, alone_here=isinstance(workers, int) and threads is None)
    finally:
        backend.close()
