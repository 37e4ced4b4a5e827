"""A Ray cluster: each task goes to whichever node has the CPUs and the memory for it.

1. Connect: to what this process is connected to already, else to the cluster at RAY_ADDRESS or on this machine, else to a
   local one that ends with the block.
2. A task's parcel is put into Ray's object store once, and let go when the task has ended. Ray is told its threads (as
   CPUs), its memory estimate, and a GPU if the weight is on one.
3. Whatever Ray reports that is not our own answer (worker or node died, out of memory, object lost) counts as a death: the
   task is submitted again. Ray's own max_retries is 0: it would retry without a word.

The function that runs there is `swd_lens.factorization.workers.cluster._solve`, so every node needs swd_lens of this
version installed.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from swd_lens.base.errors import legible, warn
from swd_lens.factorization.solve_task import SolveTask, threads_set_to
from swd_lens.factorization.workers.order import Assignment, Failed, after_death, read_reply
from swd_lens.factorization.workers.parcel import Parcel, attempt, pack_task

_CONNECT_SECONDS = 10.0


@dataclass
class _Stored(Assignment):
    parcel: Any = None  # where it lies in the object store


class Cluster:
    """A `Backend` of as many workers as the cluster has room for, with `threads` CPU threads each."""

    def __init__(self, threads: int, retries: int):
        self._threads, self._retries = threads, retries
        self._owns_connection = _connect()
        self._waiting: dict[Any, _Stored] = {}  # by the answer we wait for
        widest = max((_offered(node, "CPU") for node in _nodes()), default=0)
        if threads > widest:
            self.close()
            raise ValueError(f"threads={threads}: no node of the Ray cluster has more than {widest:g} CPUs; give fewer")

    @property
    def n_workers(self) -> int:
        """Now; a cluster may grow."""
        return max(1, sum(int(_offered(node, "CPU") // self._threads) for node in _nodes()))

    def submit(self, number: int, task: SolveTask) -> None:
        parcel = pack_task(task)
        self._start(_Stored(number, task, parcel=ray.put(parcel)))

    def finished(self) -> tuple[int, Parcel | Failed]:
        while True:
            (answer, *_), _ = ray.wait(list(self._waiting), num_returns=1)
            stored = self._waiting.pop(answer)
            try:
                result = read_reply(ray.get(answer))
                if not isinstance(result, Failed):  # its factors go to the task's own device
                    result["device"] = str(stored.task.weight.device)
                return stored.number, result
            except RayTaskError as error:
                # Outside of `attempt`, and the same at every attempt: swd_lens is missing on the node.
                return stored.number, Failed(error)
            except RayError as error:
                how = f"died ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
            failed = after_death(stored, self._retries, "Ray worker", how)
            if failed is not None:
                return stored.number, failed
            self._start(stored)

    def cancel(self) -> None:
        for answer in self._waiting:
            with suppress(RayError):
                ray.cancel(answer, force=True)
        self._waiting.clear()

    def close(self) -> None:
        self.cancel()
        if self._owns_connection:
            ray.shutdown()

    def _start(self, stored: _Stored) -> None:
        task = stored.task
        # The estimate; or all of the largest node's memory, where the estimate is more: asking for more would wait for ever.
        most = int(max((_offered(node, "memory") for node in _nodes()), default=0))
        if task.bytes > most:
            warn(
                f"{task.site} is estimated to need {task.bytes / 1e9:.3g} GB; the largest node of the Ray cluster "
                f"offers {most / 1e9:.3g} GB and gets it alone",
                RuntimeWarning,
            )
        remote = _remote.options(
            name=f"solve {task.site}",
            num_cpus=self._threads,
            num_gpus=1 if task.weight.device.type == "cuda" else 0,
            memory=min(task.bytes, most),
            max_retries=0,
        )
        self._waiting[remote.remote(stored.parcel, self._threads)] = stored


def _solve(parcel: Parcel, threads: int) -> tuple[str, Any]:
    """Runs on a node. What arrives lies in the node's shared memory and is read there, without a copy."""
    device = torch.device(parcel["weight"].device).type  # this worker's GPU, whatever number it had at home
    with threads_set_to(threads):
        return attempt(parcel, device)


_remote = ray.remote(_solve)


def _connect() -> bool:
    """Whether the connection is ours, to be closed."""
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address := os.environ.get("RAY_ADDRESS"):
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:  # not "auto", "local", ray://...
            # Ray itself tries for more than three minutes before it gives up.
            try:
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            except OSError as cause:
                raise ValueError(
                    f"RAY_ADDRESS={address}: no Ray cluster answers there ({legible(cause)}); start it, or unset it"
                ) from cause
        ray.init(address=address, **quiet)
        return True
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:  # none on this machine
        ray.init(address="local", include_dashboard=False, **quiet)
    return True


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _offered(node: dict[str, Any], resource: str) -> float:
    return float(node["Resources"].get(resource, 0.0))
