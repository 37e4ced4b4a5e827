"""On a local Ray cluster of two workers: one is killed in the middle of its task; the bits stay those of one process.
A set of factors goes to a worker, too.

Run by tests/factorization/test_cluster.py in a process of its own. Prints its verdict last.
"""

import os
import signal
import sys
import tempfile
import threading
import time
import warnings

import psutil
import ray
import torch

from swd_lens.base.errors import SparsityError
from swd_lens.factorization.workers import Solved, SolveTask, open_workers
from swd_lens.units.factors import Factors, FactorSet
from tests.factorization.tasks import assert_same_bits, task

LONG = "blocks.1.mlp_out"


def tasks() -> list[SolveTask]:
    kinds = [(24, {}), (256, {}), (24, {"gram": False}), (24, {"preset": "paper"})]
    return [task(i, size, size, **{"preset": "best", "bytes": 10**7, **how}) for i, (size, how) in enumerate(kinds)]


def kill_the_long_one(killed: list[int], over: threading.Event) -> None:
    """Ray names a worker's process after its task while it is at it."""
    while not over.wait(0.02):
        for process in psutil.Process().children(recursive=True):
            try:
                if f"solve {LONG}" not in " ".join(process.cmdline()):
                    continue
                before = sum(process.cpu_times()[:2])
                time.sleep(0.1)
                if sum(process.cpu_times()[:2]) > before:
                    process.send_signal(signal.SIGKILL)
                    killed.append(process.pid)
                    return
            except psutil.NoSuchProcess:
                continue


def factor_set(solved: list[Solved]) -> FactorSet:
    return FactorSet({each.site: Factors(each.read, each.write, each.settings) for each in solved})


def bits_of(factors: FactorSet) -> dict[str, tuple[bytes, bytes]]:
    return {name: (f.read.numpy().tobytes(), f.write.numpy().tobytes()) for name, f in factors.items()}


def bits_on_ray(solved: list[Solved]) -> dict[str, tuple[bytes, bytes]]:
    """What a worker has of a set that was loaded from files."""
    with tempfile.TemporaryDirectory() as folder:
        factor_set(solved).save(folder)
        return ray.get(ray.remote(bits_of).remote(FactorSet.load(folder)))


def main() -> None:
    with open_workers(1, threads=1) as workers:
        here = list(workers.solve(tasks()))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    killed: list[int] = []
    over = threading.Event()
    killer = threading.Thread(target=kill_the_long_one, args=(killed, over))
    killer.start()
    with warnings.catch_warnings(record=True) as caught, open_workers("ray") as workers:
        warnings.simplefilter("always")
        there = list(workers.solve(tasks()))
        over.set()
        killer.join()
        try:
            list(workers.solve([SolveTask("bad", torch.eye(4), sparsity=1.5)]))
            sys.exit("a sparsity of 1.5 went through")
        except SparsityError as error:
            assert str(error).startswith("bad (4, 4): ") and "Traceback" in str(error.__cause__), error
    assert bits_on_ray(there) == bits_of(factor_set(there)), "a loaded set is another one in a worker"
    assert ray.is_initialized(), "a cluster that was there before must stay"
    ray.shutdown()
    retried = [str(w.message) for w in caught if f"{LONG} died" in str(w.message)]
    assert len(killed) == len(retried) == 1, (killed, [str(w.message) for w in caught])
    for one, other in zip(here, there, strict=True):
        assert_same_bits(one, other)
    print(retried[0])
    print("same bits, one worker killed")


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main()
