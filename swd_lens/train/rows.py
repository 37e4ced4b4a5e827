"""Rows: which ones make the batch of a step, decided by the seed and the pass only; and the processes that share a batch.

A run that was interrupted, or one over several processes, gets the same batches as one that was not.

1. Of token rows in memory every pass is a permutation drawn anew; batches are cut from the passes laid end to end, so that no
   row is left out where the batch size does not divide them.
2. A TokenStream has its own order, and whole batches; what is left over at the end of a pass is dropped.
3. `Processes`, one, or those of `accelerate launch` or `torchrun`: every one makes the same call on its own copy of the host and
   takes its share of each batch's rows. Losses and gradients are sums over predictions, added over all processes and divided by
   the predictions of the whole batch, so that a batch which does not divide evenly gives the same mean as in one process.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import TrainError
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.text import as_rows


class Rows:
    """Training or held-out text as rows of equal length, in the order given; those of a text in memory (else None) are shuffled
    by `batches`, a stream keeps its own order."""

    def __init__(self, stream: TokenStream, in_memory: Int[Tensor, "rows pos"] | None):
        self.stream, self.in_memory = stream, in_memory
        self.n_rows, self.row_length = stream.n_rows, stream.row_length

    def batches(self, batch_size: int, seed: int, done: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        """Yield the batches of step done + 1, done + 2, ..., without end."""
        if self.in_memory is None:
            skip = done % (self.n_rows // batch_size)  # batches of the present pass
            while True:
                for number, batch in enumerate(self.stream.batches(batch_size)):
                    if len(batch) == batch_size and number >= skip:
                        yield batch
                skip = 0
        start = done * batch_size
        while True:
            positions = [divmod(start + i, self.n_rows) for i in range(batch_size)]  # of the passes laid end to end
            yield self.in_memory[[int(_order(seed, number, self.n_rows)[i]) for number, i in positions]]
            start += batch_size


@lru_cache(maxsize=2)  # a batch reaches into two passes at most, as no batch is larger than a pass
def _order(seed: int, number: int, n_rows: int) -> Int[Tensor, " rows"]:
    digest = hashlib.sha256(f"order of pass {number}, seed {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(n_rows, generator=generator)


def rows_of(tokens: Any, model: Any, streamed: tuple[type, ...] = (TokenStream, np.memmap, Iterator)) -> Rows:
    """Text from whatever a user gave: rows in memory are shuffled by the seed, streams keep their order. streamed: the types that
    are read as streams. Raises TokenError: see `swd_lens.tasks.streams.as_stream`."""
    if isinstance(tokens, streamed):
        return Rows(as_stream(tokens, model), None)
    rows = as_rows(tokens, model)
    return Rows(as_stream(rows, model), rows)


def rows_for(name: str, n_tokens: int, rows: Rows, *, shortest: int = 1) -> int:
    """The number of whole rows that make a step's tokens. name: of the setting that says how many tokens; shortest: the least
    length of a row. Raises TrainError: they do not divide, or the text has too few rows, or too short ones."""
    n_rows, left = divmod(n_tokens, rows.row_length)
    if left or n_rows > rows.n_rows or rows.row_length < shortest:
        raise TrainError(
            f"{name}={n_tokens} cannot be made of these {rows.n_rows} rows of {rows.row_length} tokens; give a multiple of the "
            f"row length ({shortest} or more), and at least as many rows as one step takes"
        )
    return n_rows


def launched() -> bool:
    """Whether this is one of several processes that a launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class Processes:
    """The processes of this run, as accelerate sees them; without a launcher there is one, and accelerate is not imported."""

    def __init__(self) -> None:
        self._state: Any = None
        if launched() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            from accelerate import PartialState

            self._state = PartialState()
        state = self._state
        self.n = 1 if state is None else int(state.num_processes)
        self.index = 0 if state is None else int(state.process_index)
        self.device = None if state is None else torch.device(state.device)

    @property
    def main(self) -> bool:
        """Whether this is the one process that writes files and shows progress."""
        return self.index == 0

    def share(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch; may be none of the last rows of held-out text."""
        return rows[self.index :: self.n]

    def total(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each tensor, added over the processes, in one exchange (of the tensors laid end to end)."""
        if self.n == 1:
            return tensors
        from accelerate.utils import reduce

        flat = torch.cat([t.to(self._state.device).flatten() for t in tensors])
        summed: Any = reduce(flat, reduction="sum")
        parts = summed.split([t.numel() for t in tensors])
        return [part.view_as(t).to(t.device) for part, t in zip(parts, tensors, strict=True)]

    def agreed(self, flag: bool) -> bool:
        """Give the main process's value to every process; waits for all of them."""
        return bool(self.total([torch.tensor(float(flag and self.main))])[0])

    def wait(self) -> None:
        """Wait until every process is here."""
        if self._state is not None:
            self._state.wait_for_everyone()
