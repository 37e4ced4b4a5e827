"""Token rows: the one form in which text reaches calibration and fidelity, (rows, pos) int64.

1. `as_rows` checks what a user passed (ids in the vocabulary, enough positions, no longer than the context).
2. `pack_text` turns a long string into rows of equal length with the host's tokenizer.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


class TokenError(ValueError):
    """Tokens that this host cannot run."""


def as_rows(tokens: Any, model: Any) -> Int[Tensor, "rows pos"]:
    """Check tokens against a host and give them as (rows, pos) int64 on the CPU.

    Args:
        tokens: (rows, pos) integers, or (pos,) for a single row; a tensor, array or nested list.
        model: the host (its cfg gives vocabulary and context length).

    Raises:
        TokenError: not integers, wrong number of axes, empty, an id outside the vocabulary, or rows longer than n_ctx.
    """
    rows = torch.as_tensor(tokens)
    if rows.is_floating_point() or rows.dtype == torch.bool or rows.is_complex():
        raise TokenError(
            f"tokens must be integers, got {rows.dtype}; strings are turned into tokens by model.to_tokens(...)"
        )
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or rows.numel() == 0:
        raise TokenError(f"tokens must be (rows, pos) and not empty, got shape {tuple(rows.shape)}")
    rows = rows.to("cpu", torch.int64)
    outside = ((rows < 0) | (rows >= model.cfg.d_vocab)).nonzero()
    if len(outside):
        row, pos = outside[0].tolist()
        raise TokenError(
            f"token id {int(rows[row, pos])} at row {row}, position {pos} is outside the vocabulary "
            f"(0 to {model.cfg.d_vocab - 1}); {len(outside)} such ids. Were they made with another model's tokenizer?"
        )
    if rows.shape[1] > model.cfg.n_ctx:
        raise TokenError(
            f"rows of {rows.shape[1]} tokens do not fit the host's context of {model.cfg.n_ctx}; cut them into shorter rows"
        )
    return rows


def pack_text(
    model: Any, text: str, context: int | None = None, n_tokens: int | None = None
) -> Int[Tensor, "rows pos"]:
    """Tokenize a long string with the host's tokenizer and cut it into rows of `context` tokens (no BOS, rest dropped).

    Args:
        model: a host with a tokenizer.
        text: the text; its documents simply follow each other.
        context: tokens per row; None = min(n_ctx, 1024), the paper's sequence length.
        n_tokens: keep this many tokens at most (whole rows).

    Raises:
        TokenError: the host has no tokenizer, or the text is shorter than one row.
    """
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so text cannot be packed; pass tokens")
    length = min(int(model.cfg.n_ctx), 1024) if context is None else context
    # Line by line, so that a tokenizer never sees more than a paragraph at once (and does not warn of its own limit).
    ids: list[int] = []
    for line in text.splitlines(keepends=True):
        ids.extend(model.tokenizer(line, add_special_tokens=False)["input_ids"])
        if n_tokens is not None and len(ids) >= n_tokens:
            break
    count = min(len(ids), n_tokens or len(ids)) // length
    if count == 0:
        raise TokenError(
            f"the text holds {len(ids)} tokens, too few for one row of {length}; give more text or a smaller context"
        )
    return as_rows(torch.tensor(ids[: count * length]).view(count, length), model)
