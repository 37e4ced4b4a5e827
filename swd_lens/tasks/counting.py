"""Counting: which positions of token rows count in a sum over text; the others are run, and left out of it.

1. `exclude="special"` leaves out the tokenizer's special tokens (BOS, EOS, ...), `exclude=ids` other ones. Attention sinks lie on
   the first position, so that it may weigh more in a second moment than all text behind it.
2. `attention_mask` leaves out padding. What pads a row at its beginning is moved behind it (`padding_last`): there no token of
   a causal host sees it, and the text has the positions it has by itself.
3. `Counting` says of a batch what counts, and by `key` one choice is told from another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from swd_lens.base.errors import TokenError, quoted
from swd_lens.tasks.encoding import special_ids
from swd_lens.tasks.text import as_rows

SPECIAL = "special"


@dataclass(frozen=True, eq=False)
class Counting:
    """Which positions count."""

    asked: str | tuple[int, ...] | None = None  # what was asked for: "special", ids, or None
    ids: tuple[int, ...] = ()  # tokens that are left out, ascending
    # (rows,) tokens of text in each row, padding behind them; None where no row is padded
    lengths: Int[Tensor, " rows"] | None = None

    @property
    def all(self) -> bool:
        """Whether every position counts."""
        return not self.ids and self.lengths is None

    @property
    def key(self) -> tuple[Any, ...]:
        """Values in which two different choices differ."""
        return self.ids, None if self.lengths is None else tuple(self.lengths.tolist())

    def of(self, rows: Int[Tensor, "rows pos"], first_row: int = 0) -> Bool[Tensor, "rows pos"] | None:
        """Positions that count in a batch that begins with row `first_row`; None: all of it."""
        if self.all:
            return None
        counted = torch.ones(rows.shape, dtype=torch.bool)
        if self.ids:
            counted &= ~torch.isin(rows, torch.tensor(self.ids))
        if self.lengths is not None:
            lengths = self.lengths[first_row : first_row + len(rows)]
            counted &= torch.arange(rows.shape[1]) < lengths[:, None]
        return counted


def predicted(counted: Bool[Tensor, "rows pos"] | None) -> Bool[Tensor, "rows predictions"] | None:
    """Which next-token predictions count: those read at a position that counts, of a token that counts."""
    return None if counted is None else counted[:, :-1] & counted[:, 1:]


def excluded(exclude: Any, model: Any) -> Counting:
    """The choice of positions that `exclude` asks for. exclude: None, "special", or ids of this host. Raises TokenError:
    another word, no ids, ids outside the vocabulary, or "special" of a host without a tokenizer."""
    if exclude is None:
        return Counting()
    if isinstance(exclude, str):
        if exclude != SPECIAL:
            raise TokenError(
                f"exclude must be 'special' (the tokenizer's special tokens), token ids, or None, got {quoted(exclude)}"
            )
        if getattr(model, "tokenizer", None) is None:
            raise TokenError("this host has no tokenizer that says which tokens are special; pass exclude=[ids]")
        return Counting(SPECIAL, special_ids(model))
    ids = exclude.tolist() if hasattr(exclude, "tolist") else exclude
    ids = list(ids) if isinstance(ids, Sequence | set | frozenset) else [ids]
    last = int(model.cfg.d_vocab) - 1
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= last:
            raise TokenError(f"exclude names {quoted(token)}, which is no token id of this host (0 to {last})")
    return Counting(tuple(sorted(set(ids))), tuple(sorted(set(ids))))


def padding_last(tokens: Any, attention_mask: Any, model: Any) -> tuple[Int[Tensor, "rows pos"], Int[Tensor, " rows"] | None]:
    """Rows with their padding behind the text, and how many tokens of text each has (None: none is padded). tokens: see
    `as_rows`; attention_mask: (rows, pos), as a tokenizer gives it: 1 of text, 0 of padding. Raises TokenError: bad tokens; a
    mask of another shape or of other values, one with a hole, or a row without text."""
    rows = as_rows(tokens, model, padded=True)
    try:
        mask = torch.as_tensor(attention_mask).to("cpu")
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TokenError(
            f"attention_mask must be (rows, pos) of 0 and 1 like the tokens, {tuple(rows.shape)}, got "
            f"{type(attention_mask).__name__}"
        ) from cause
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != rows.shape:
        raise TokenError(
            f"attention_mask must be (rows, pos) of 0 and 1 like the tokens, {tuple(rows.shape)}, got {tuple(mask.shape)}"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise TokenError("attention_mask holds other values than 0 (padding) and 1 (text)")
    mask = mask.bool()
    lengths, first = mask.sum(1), mask.int().argmax(1)
    places = torch.arange(rows.shape[1])
    whole = (places >= first[:, None]) & (places < (first + lengths)[:, None])
    if len(broken := ((lengths == 0) | (whole != mask).any(1)).nonzero()):
        raise TokenError(
            f"attention_mask of row {int(broken[0])}: the text must be one run of at least one token, with padding before "
            "or behind it"
        )
    if bool((lengths == rows.shape[1]).all()):
        return as_rows(rows, model), None
    return rows.gather(1, (places + first[:, None]) % rows.shape[1]), lengths
