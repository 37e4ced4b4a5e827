"""Token rows that may be too many to hold: gone through as often as wanted, one batch in memory at a time.

1. A `TokenStream` is a function that starts the rows anew, and how many of them to take. `as_stream` makes one of whatever a
   user passes as tokens: a tensor, array or list; a memory-mapped file; or a stream.
2. A pass takes the rows batch by batch and checks each batch as `as_rows` does. Its ids go into a running CRC.
3. Which positions count in sums over the text (counting.py) goes with the stream; those that are left out are counted in the
   first whole pass, and so are the rows that begin with BOS (`about`: what results say of their text).
4. Calibration needs the same rows in every pass. The first row is compared at the start of a pass and the CRC at its end;
   too few rows, rows of another length and other rows than before are errors.
"""

import copy
import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.display import card
from swd_lens.base.errors import TokenError, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.counting import Counting, excluded, padding_last
from swd_lens.tasks.text import as_rows

# A host that has every token: for streams that were given to none yet.
_ANY_HOST = SimpleNamespace(cfg=SimpleNamespace(d_vocab=float("inf"), n_ctx=float("inf")))
_ROWS_AT_ONCE = 256  # where no model decides it


@dataclass
class _Known:
    """Facts that passes have found out about a stream, shared by its bindings to hosts."""

    row_length: int | None = None
    first_row: Tensor | None = None
    checksum: int | None = None
    fingerprint: str | None = None
    firsts: Counter[int] | None = None  # first tokens of all rows
    left_out: dict[Any, int] = field(default_factory=dict)  # Counting.key -> positions


@with_torch_defaults
class TokenStream:
    """Rows of equal length that can be gone through any number of times and are never held as a whole.

        swd.TokenStream(lambda: swd.stream_rows("fineweb-edu", model), n_rows=4096)

    Args:
        source: called at the start of every pass; gives the rows, (pos,) integers each, the same ones every time. It may have
            more of them than n_rows, or no end.
        n_rows: how many rows to take.
        row_length: tokens per row; None = that of the first row.

    Raises:
        TokenError: `source` is no function, or numbers are out of range. Of the rows nothing is read yet.
    """

    def __init__(self, source: Any, n_rows: Any, *, row_length: Any = None):
        if not callable(source):
            raise TokenError(
                f"TokenStream needs a function that starts the rows anew, got {type(source).__name__}; give "
                "TokenStream(lambda: ..., n_rows=...)"
            )
        bounded("n_rows", n_rows, 1, error=TokenError)
        bounded("row_length", 1 if row_length is None else row_length, 1, error=TokenError)
        self._source = cast(Callable[[], Iterable[Any]], source)
        self._n_rows, self._host = int(n_rows), _ANY_HOST
        self._known = _Known(row_length)
        self.counting = Counting()

    @property
    def n_rows(self) -> int:
        """Rows of the stream; they decide its hash."""
        return self._n_rows

    def __repr__(self) -> str:
        return f"TokenStream({self.n_rows} rows of {self._known.row_length or 'equally many'} tokens)"

    def _repr_html_(self) -> str:
        return card(repr(self))

    @property
    def row_length(self) -> int:
        """Tokens per row; reads the first row where it was not given."""
        if self._known.row_length is None:
            self.first_row()
        assert self._known.row_length is not None
        return self._known.row_length

    @property
    def n_tokens(self) -> int:
        return self.n_rows * self.row_length

    def bound_to(self, model: Any) -> "TokenStream":
        """Bind the stream to a host, whose vocabulary and context are checked in every pass."""
        bound = copy.copy(self)
        bound._host = model
        return bound

    def leaving_out(self, counting: Counting) -> "TokenStream":
        """Copy the stream with another choice of the positions that count."""
        other = copy.copy(self)
        other.counting = counting
        return other

    def counted(self, batch: Int[Tensor, "rows pos"], first_row: int) -> Bool[Tensor, "rows pos"] | None:
        """Which positions of a batch count, which begins with row `first_row`; None: all."""
        return self.counting.of(batch, first_row)

    @property
    def n_counted(self) -> int:
        """Positions that count; a pass finds it out, unless one has. Raises TokenError: none does."""
        if self.counting.all:
            return self.n_tokens
        self._look_through()
        n = self.n_tokens - self._known.left_out[self.counting.key]
        if n == 0:
            raise TokenError(
                f"every one of the {self.n_tokens} tokens is left out (exclude={quoted(self.counting.asked)}): nothing is "
                "left to measure"
            )
        return n

    def about(self, model: Any) -> dict[str, Any]:
        """Describe the text for results: whether every row begins with this host's BOS (nothing where it has none), and what
        was left out, if anything."""
        bos = getattr(getattr(model, "tokenizer", None), "bos_token_id", None)
        said: dict[str, Any] = {}
        if bos is not None:
            self._look_through()
            assert self._known.firsts is not None
            said["rows_begin_with_bos"] = self._known.firsts[bos] == self.n_rows
        if not self.counting.all:
            asked = self.counting.asked
            said["exclude"] = list(asked) if isinstance(asked, tuple) else asked
            said["left_out"] = self.n_tokens - self.n_counted
        return said

    def _look_through(self) -> None:
        """A pass, unless one has counted first tokens and what is left out."""
        if self._known.firsts is None or self.counting.key not in self._known.left_out:
            for _ in self.batches(_ROWS_AT_ONCE):
                pass

    def batches(self, batch_size: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        """A fresh pass: all rows in order, int64 on the CPU, `batch_size` rows at a time, fewer in the last batch.

        Raises:
            TokenError: too few rows, rows of another length, no tokens of this host, or other rows than in the pass before.
        """
        rows, checksum = iter(self._source()), 0
        firsts, left_out = Counter[int](), 0
        for start in range(0, self.n_rows, batch_size):
            size = min(batch_size, self.n_rows - start)
            taken = list(itertools.islice(rows, size))
            if len(taken) < size:
                raise self._too_few(start + len(taken))
            batch = self._checked(taken, start)
            checksum = zlib.crc32(batch.numpy().data, checksum)
            firsts.update(batch[:, 0].tolist())
            counted = self.counting.of(batch, start)
            left_out += 0 if counted is None else int((~counted).sum())
            yield batch
        if self._known.checksum not in (None, checksum):
            raise _other_rows("of the same first row, but not of the same rows")
        self._known.checksum, self._known.firsts = checksum, firsts
        self._known.left_out[self.counting.key] = left_out

    def first_row(self) -> Int[Tensor, " pos"]:
        """The first row; the source is asked for it once."""
        if self._known.first_row is None:
            taken = list(itertools.islice(iter(self._source()), 1))
            if not taken:
                raise self._too_few(0)
            self._checked(taken, 0)
        assert self._known.first_row is not None
        return self._known.first_row

    def fingerprint(self) -> str:
        """SHA-256 over shape and ids, in one pass; computed once. For a tensor it is that of its rows in checkpoints."""
        if self._known.fingerprint is None:
            digest = hashlib.sha256(str((self.n_rows, self.row_length)).encode())
            for batch in self.batches(_ROWS_AT_ONCE):
                digest.update(batch.numpy().data)
            if self.counting.lengths is not None:
                digest.update(self.counting.lengths.numpy().data)
            self._known.fingerprint = digest.hexdigest()
        return self._known.fingerprint

    def _checked(self, taken: list[Any], start: int) -> Int[Tensor, "rows pos"]:
        """One batch, as rows `start` and following."""
        rows = [_row(row, start + i) for i, row in enumerate(taken)]
        length = self._known.row_length or len(rows[0])
        for i, row in enumerate(rows):
            if len(row) != length:
                raise TokenError(
                    f"row {start + i} of the stream has {len(row)} tokens, the others {length}; rows of equal length are "
                    "needed (swd_lens.stream_rows gives such rows)"
                )
        try:
            batch = as_rows(torch.stack(rows), self._host, padded=self.counting.lengths is not None)
        except TokenError as cause:
            counted = ", counted from 0 here" if start else ""  # as_rows saw this batch alone
            raise TokenError(f"rows {start} to {start + len(rows) - 1} of the stream{counted}: {cause}") from None
        if start == 0 and self._known.first_row is None:
            self._known.first_row = batch[0].clone()
        elif start == 0 and not torch.equal(self._known.first_row, batch[0]):  # pyright: ignore[reportArgumentType]
            raise _other_rows("of another first row")
        self._known.row_length = length
        return batch

    def _too_few(self, n: int) -> Exception:
        if self._known.first_row is not None and n == 0:
            return TokenError(
                "the stream gave rows once and none now: its function must start the rows anew each time it is called (a "
                "generator that was made before is used up after one pass)"
            )
        return TokenError(
            f"the stream holds {n} rows, where n_rows={self.n_rows} were asked for; give more text or a smaller n_rows"
        )


class _Held(TokenStream):
    """Rows that are in memory anyway: checked once, sliced."""

    def __init__(self, rows: Tensor):
        super().__init__(lambda: rows, len(rows), row_length=rows.shape[1])
        self._rows = rows

    def batches(self, batch_size: int) -> Iterator[Int[Tensor, "_rows pos"]]:
        yield from self._rows.split(batch_size)

    def _look_through(self) -> None:
        counted = self.counting.of(self._rows)
        self._known.firsts = Counter(self._rows[:, 0].tolist())
        self._known.left_out[self.counting.key] = 0 if counted is None else int((~counted).sum())


def as_stream(tokens: Any, model: Any, *, exclude: Any = None, attention_mask: Any = None) -> TokenStream:
    """Tokens of any form as a stream for a host.

    tokens: (rows, pos) integers in a tensor, array or nested list, (pos,) for a single row: checked at once; a 2-D
    `numpy.memmap`: its rows are read as they are needed; a `TokenStream`: checked in every pass. exclude: "special", or ids:
    their positions do not count (counting.py); None: as the stream has it. attention_mask: (rows, pos) of tokens in memory, 0
    where they are padding, which does not count either. Raises TokenError: see `swd_lens.tasks.text.as_rows` and
    `swd_lens.tasks.counting`; or an iterator, which can be gone through only once.
    """
    if attention_mask is not None and isinstance(tokens, TokenStream | Iterator | np.memmap):
        raise TokenError(
            f"attention_mask= is for token rows in memory, not for a {type(tokens).__name__}: give a stream rows without padding"
        )
    if isinstance(tokens, TokenStream):
        stream = tokens.bound_to(model)
        return stream if exclude is None else stream.leaving_out(excluded(exclude, model))
    if isinstance(tokens, Iterator):
        raise TokenError(
            f"tokens are a {type(tokens).__name__}, which can be gone through only once and does not say how many rows to "
            "take; give TokenStream(lambda: ..., n_rows=...) with the call that makes it"
        )
    counting = excluded(exclude, model)
    if isinstance(tokens, np.memmap) and tokens.ndim == 2 and len(tokens):
        rows = _integers(tokens)
        stream = TokenStream(lambda: iter(rows), len(rows), row_length=rows.shape[1])
    elif attention_mask is None:
        stream = _Held(as_rows(tokens, model))
    else:
        rows, lengths = padding_last(tokens, attention_mask, model)
        stream, counting = _Held(rows), replace(counting, lengths=lengths)
    return stream.leaving_out(counting).bound_to(model)


def split_rows(stream: TokenStream, n: int) -> tuple[TokenStream, TokenStream]:
    """The first n rows and those behind them, as streams of their own; what counts in them stays what it was."""

    def part(start: int, stop: int) -> TokenStream:
        def rows() -> Iterator[Tensor]:
            every = (row for batch in stream.batches(_ROWS_AT_ONCE) for row in batch)
            return itertools.islice(every, start, stop)

        lengths = stream.counting.lengths
        counting = replace(stream.counting, lengths=None if lengths is None else lengths[start:stop])
        part = TokenStream(rows, stop - start, row_length=stream.row_length).leaving_out(counting)
        return part.bound_to(stream._host)

    return part(0, n), part(n, stream.n_rows)


def _row(row: Any, number: int) -> Tensor:
    if isinstance(row, np.ndarray):  # torch cannot do much with unsigned integers
        row = torch.from_numpy(_integers(row).astype(np.int64))
    try:
        row = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TokenError(f"row {number} of the stream is no row of integers: {cause}") from None
    if row.ndim != 1 or len(row) == 0:
        raise TokenError(f"row {number} of the stream has shape {tuple(row.shape)}; a row is (pos,) token ids, and not empty")
    return row


def _integers(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise TokenError(f"tokens must be integers, got {array.dtype}")
    return array


def _other_rows(how: str) -> Exception:
    return TokenError(
        f"the stream gave other rows than in the pass before: {how}. Its function must start the same rows anew each time "
        "it is called (no shuffling without a fixed seed, no generator that goes on where it stopped)"
    )
