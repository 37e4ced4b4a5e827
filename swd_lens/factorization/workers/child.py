"""A worker process: reads tasks, solves them, writes results, until its parent is gone.

1. `BOOTSTRAP` is what the interpreter is started with. It keeps the two pipes for parcels and gives the process other
   standard streams, so that nothing printed by a library gets between the parcels. Then it imports the solver, but not
   what `import swd_lens` brings along (transformer_lens): 2 s of work and 240 MB instead of 7 s and 510 MB.
2. `main` solves in the main thread, because torch's number of threads belongs to the thread that set it.
3. Another thread reads. It notices when the parent ends, however (SIGKILL too): its end of the pipe closes, and the process
   ends at once.
"""

import os
import pickle
import queue
import threading
import traceback
from typing import IO, Any

import torch

from swd_lens.factorization.workers.parcel import Parcel, pack_solved, receive, send, unpack_task
from swd_lens.factorization.workers.task import solve_task

# argv: sys.path of the parent and the folder of swd_lens, as JSON; CPU threads.
BOOTSTRAP = """
import json, os, sys, types
tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
sys.path[:], folder = json.loads(sys.argv[1])
sys.modules["swd_lens"] = package = types.ModuleType("swd_lens")
package.__path__ = [folder]
from swd_lens.factorization.workers.child import main
main(tasks, results, int(sys.argv[2]))
"""


def main(tasks: IO[bytes], results: IO[bytes], threads: int) -> None:
    """Never returns; the process ends when `tasks` does."""
    torch.set_num_threads(threads)
    inbox: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks, inbox), daemon=True).start()
    while True:
        reply = attempt(inbox.get())
        send(results, reply)
        del reply


def _read(tasks: IO[bytes], inbox: "queue.SimpleQueue[Parcel]") -> None:
    try:
        while True:
            inbox.put(receive(tasks))
    finally:
        os._exit(1)  # in the middle of a solve: nobody waits for it


def attempt(parcel: Parcel, device: str | None = None) -> tuple[str, Any]:
    """("solved", parcel of the result) or ("failed", (error, its traceback as text)).

    `device`: where to solve; None where the weight came from.
    """
    try:
        return "solved", pack_solved(solve_task(unpack_task(parcel, device)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return "failed", (_portable(error), text)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if type(copy) is type(error) else RuntimeError(repr(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
