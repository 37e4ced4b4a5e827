"""Parcels: tasks and results as plain bytes, and the worker process that turns the one into the other.

1. A matrix is packed as a view of its bytes (`pack_task`); packed factors are one bit per entry (zero or not) and the
   nonzeros (`pack_solved`). Unpacked they have the bits they had. `attempt` makes a result's parcel of a task's.
2. `send` writes a parcel to a pipe, `receive` reads it into memory that torch allocated. Bytes go from the one's memory to
   the other's without a copy in between.
3. `BOOTSTRAP` is what a worker's interpreter is started with. It keeps the two pipes for parcels and gives the process other
   standard streams, so that nothing printed by a library gets between the parcels. Then it imports the solver, but not
   what `import swd_lens` brings along (transformer_lens): 2 s of work and 240 MB instead of 7 s and 510 MB.
4. `main` solves in the main thread, because torch's number of threads belongs to the thread that set it. Another thread reads;
   when the parent ends, however (SIGKILL too), its end of the pipe closes, and the process ends at once.

Pipes, because shared memory is often limited to 64 MB in containers and files need room on a disk. On a busy machine a
3072 x 768 float32 matrix took 0.04 s to the other process, one of 17408 x 5120 (356 MB) 1.8 s, 2.9 s with its Gram (1.6 GB).
"""

import os
import pickle
import queue
import struct
import threading
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import legible
from swd_lens.factorization.solve_task import Solved, SolveTask, solve_task

Parcel = dict[str, Any]

_COUNT = struct.Struct("!Q")

# argv: sys.path of the parent and the folder of swd_lens, as JSON; CPU threads. Packages whose __init__ brings transformer_lens
# along stand there without it.
BOOTSTRAP = """
import json, os, sys, types
tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
sys.path[:], folder = json.loads(sys.argv[1])
for name in ("swd_lens", "swd_lens.hosts", "swd_lens.units"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [os.path.join(folder, *name.split(".")[1:])]
from swd_lens.factorization.workers.parcel import main
main(tasks, results, int(sys.argv[2]))
"""


@dataclass(frozen=True)
class Packed:
    """A dense matrix: its bytes in row order."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str


@dataclass(frozen=True)
class PackedFactor:
    """A sparse matrix: one bit per entry that says whether it is a nonzero, and the nonzeros, in row order."""

    nonzero: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]


def pack_task(task: SolveTask) -> Parcel:
    """A view of the task where it lies in row order on the CPU; keep the task as long as the parcel."""
    grams = {name: None if gram is None else _pack(gram) for name, gram in _grams_of(vars(task)).items()}
    return {**vars(task), "weight": _pack(task.weight), **grams, "options": dict(task.options)}


def unpack_task(parcel: Parcel, device: str | None = None) -> SolveTask:
    """The task, its matrices on `device`; None: on those that they came from."""
    grams = {name: None if packed is None else _unpack(packed, device) for name, packed in _grams_of(parcel).items()}
    return SolveTask(**{**parcel, "weight": _unpack(parcel["weight"], device), **grams})


def _grams_of(task: Mapping[str, Any]) -> dict[str, Any]:
    return {name: task[name] for name in ("gram", "output_gram", "first")}


def pack_solved(solved: Solved) -> Parcel:
    """The result, with the name of its device."""
    factors = {"read": _pack_factor(solved.read), "write": _pack_factor(solved.write)}
    return {**vars(solved), **factors, "device": str(solved.read.device)}


def unpack_solved(parcel: Parcel) -> Solved:
    """The result, on the parcel's device."""
    device = parcel["device"]
    values = {name: value for name, value in parcel.items() if name != "device"}
    for side in ("read", "write"):
        packed = parcel[side]
        rows, columns = packed.shape
        dense = torch.zeros(rows * columns, dtype=torch.float32)
        dense.numpy()[np.unpackbits(packed.nonzero, count=rows * columns).astype(bool)] = packed.values
        values[side] = dense.view(rows, columns).to(device)
    return Solved(**values)


def send(pipe: IO[bytes], value: Any) -> None:
    """Write a value of plain objects and arrays. Raises OSError when nobody reads."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    pipe.write(_COUNT.pack(len(parts)) + b"".join(_COUNT.pack(part.nbytes) for part in parts))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """Read what `send` wrote. Raises EOFError when the other side is gone."""
    (n,) = _COUNT.unpack(_exactly(pipe, _COUNT.size))
    sizes = [_COUNT.unpack(_exactly(pipe, _COUNT.size))[0] for _ in range(n)]
    head, *buffers = (_exactly(pipe, size) for size in sizes)
    return pickle.loads(head, buffers=buffers)


def _exactly(pipe: IO[bytes], n: int) -> memoryview:
    # torch aligns what it allocates; a bytearray need not be.
    into = torch.empty(n, dtype=torch.uint8).numpy().data
    at = 0
    while at < n:
        got = pipe.readinto(into[at:])  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f"the other process is gone, {legible(n - at)} bytes before the end")
        at += got
    return into


def _pack(matrix: Float[Tensor, "_rows _columns"]) -> Packed:
    flat = matrix.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Packed(flat.numpy(), matrix.dtype, tuple(matrix.shape), str(matrix.device))


def _unpack(packed: Packed, device: str | None) -> Float[Tensor, "_rows _columns"]:
    with warnings.catch_warnings():
        # Ray's object store is read-only; so are we (the solver never writes into its inputs).
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(packed.data)
    return flat.view(packed.dtype).view(packed.shape).to(device or packed.device)


def _pack_factor(factor: Float[Tensor, "_rows _columns"]) -> PackedFactor:
    dense = factor.detach().cpu()
    nonzero = dense != 0
    return PackedFactor(np.packbits(nonzero.view(-1).numpy()), dense[nonzero].numpy(), tuple(dense.shape))


def main(tasks: IO[bytes], results: IO[bytes], threads: int) -> None:
    """Never returns; the process ends when `tasks` does."""
    torch.set_num_threads(threads)
    inbox: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks, inbox), daemon=True).start()
    while True:
        reply = attempt(inbox.get())
        try:
            send(results, reply)
        except BrokenPipeError:
            os._exit(1)  # nobody waits for it any more
        del reply


def _read(tasks: IO[bytes], inbox: "queue.SimpleQueue[Parcel]") -> None:
    try:
        while True:
            inbox.put(receive(tasks))
    finally:
        os._exit(1)  # in the middle of a solve: nobody waits for it


def attempt(parcel: Parcel, device: str | None = None) -> tuple[str, Any]:
    """("solved", parcel of the result) or ("failed", (error, its traceback as text)). device: where to solve; None: where the
    weight came from."""
    try:
        return "solved", pack_solved(solve_task(unpack_task(parcel, device)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:  # the error itself if it survives pickling, else one that says the same
            copy = pickle.loads(pickle.dumps(error))
            portable = copy if type(copy) is type(error) else RuntimeError(repr(error))
        except Exception:
            portable = RuntimeError(f"{type(error).__name__}: {error}")
        return "failed", (portable, text)
