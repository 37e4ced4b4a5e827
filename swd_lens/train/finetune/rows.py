"""Rows: which ones make the batch of a step, decided by the seed and the pass only.

A run that was interrupted, or one over several processes, gets the same batches as one that was not.

1. `Shuffled`, of token rows: every pass is a permutation drawn anew; batches are cut from the passes laid end to end, so
   that no row is left out where the batch size does not divide them.
2. `Streamed`, of a TokenStream: its own order, whole batches; what is left over at the end of a pass is dropped.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.factorization.checkpoint import tokens_fingerprint
from swd_lens.tasks.streams import TokenStream
from swd_lens.tasks.text import as_rows
from swd_lens.train.finetune.spec import FinetuneError


class Shuffled:
    """See the module's docstring, point 1."""

    def __init__(self, rows: Int[Tensor, "rows pos"]):
        self.rows = rows
        self.n_rows, self.row_length = rows.shape

    def batches(self, batch_size: int, seed: int, done: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        """Without end: the batches of step done + 1, done + 2, ..."""
        at = done * batch_size
        while True:
            places = [divmod(at + i, self.n_rows) for i in range(batch_size)]
            yield self.rows[[int(_order(seed, number, self.n_rows)[place]) for number, place in places]]
            at += batch_size

    def all(self, batch_size: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        """Every row once, in the order given; the last batch may be smaller."""
        yield from self.rows.split(batch_size)

    def first(self) -> Int[Tensor, "1 pos"]:
        return self.rows[:1]

    def fingerprint(self) -> str:
        return tokens_fingerprint(self.rows)


@lru_cache(maxsize=2)  # a batch reaches into two passes at most, as no batch is larger than a pass
def _order(seed: int, number: int, n_rows: int) -> Int[Tensor, " rows"]:
    digest = hashlib.sha256(f"order of pass {number}, seed {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(n_rows, generator=generator)


class Streamed:
    """See the module's docstring, point 2."""

    def __init__(self, stream: TokenStream):
        self.stream = stream
        self.n_rows, self.row_length = stream.n_rows, stream.row_length

    def batches(self, batch_size: int, seed: int, done: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        skip = done % (self.n_rows // batch_size)  # batches of the present pass
        while True:
            for number, batch in enumerate(self.stream.batches(batch_size)):
                if len(batch) == batch_size and number >= skip:
                    yield batch
            skip = 0

    def all(self, batch_size: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        yield from self.stream.batches(batch_size)

    def first(self) -> Int[Tensor, "1 pos"]:
        return self.stream.first_row()[None]

    def fingerprint(self) -> str:
        return self.stream.fingerprint()


Rows = Shuffled | Streamed


def rows_of(tokens: Any, model: Any, batch_size: int, what: str = "tokens") -> Rows:
    """Training or held-out text from whatever a user gave.

    Raises:
        TokenError: see `swd_lens.tasks.text.as_rows`.
        FinetuneError: rows of a single token, or fewer rows than one batch.
    """
    rows = Streamed(tokens.bound_to(model)) if isinstance(tokens, TokenStream) else Shuffled(as_rows(tokens, model))
    if rows.row_length < 2:
        raise FinetuneError(
            f"{what} has rows of one token: each position predicts the next, so rows of two or more are needed"
        )
    if rows.n_rows < batch_size:
        raise FinetuneError(
            f"{what} has {rows.n_rows} rows of {rows.row_length} tokens, too few for one batch of batch_size={batch_size}; "
            "give more text, shorter rows or a smaller batch_size"
        )
    return rows
