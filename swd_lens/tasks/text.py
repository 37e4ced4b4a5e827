"""Token rows: the one form in which text reaches calibration and fidelity, (rows, pos) int64.

1. `as_rows` checks what a user passed (ids in the vocabulary, enough positions, no longer than the context).
2. `load_text` reads a file, an iterable of documents or a named dataset: documents joined by EOS and packed into rows of
   equal length, as the paper packs FineWeb-Edu. `stream_rows` is the same, row by row and without end where the source
   has none; nothing is kept beyond the row being filled and the document being read.
3. `pack_text` turns one long string into rows.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.tasks.documents import TokenError, documents_of

__all__ = ["TokenError", "as_rows", "load_text", "pack_text", "stream_rows"]

_BOM = "\ufeff"  # the mark with which Windows begins a file; it is no text


def as_rows(tokens: Any, model: Any) -> Int[Tensor, "rows pos"]:
    """Check tokens against a host and give them as (rows, pos) int64 on the CPU.

    Args:
        tokens: (rows, pos) integers, or (pos,) for a single row; a tensor, array or nested list.
        model: the host (its cfg gives vocabulary and context length).

    Raises:
        TokenError: not integers, wrong number of axes, empty, an id outside the vocabulary, or rows longer than n_ctx.
    """
    try:
        rows = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TokenError(
            f"tokens must be (rows, pos) integers, and this {type(tokens).__name__} cannot be read as that ({error}); strings "
            "are turned into tokens by swd.pack_text(model, text), or by model.to_tokens(...)"
        ) from error
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


def load_text(
    source: Any,
    model: Any,
    n_tokens: int,
    *,
    context: int | None = None,
    separator: str | None = "eos",
    skip_tokens: int = 0,
) -> Int[Tensor, "rows pos"]:
    """Token rows of language-model text: documents joined by one EOS each, packed into rows of equal length, no BOS.

    Args:
        source: the path of a text file (one document); an iterable of documents (strings, or dicts with "text": a list, a
            generator, a `datasets` Dataset or IterableDataset); or a name, which is streamed: "fineweb-edu" (the paper's;
            sample-10BT), "wikitext" (WikiText-2 raw, train), "wikitext:validation", "wikitext:test".
        model: a host with a tokenizer.
        n_tokens: how many; rounded down to whole rows. Reading stops as soon as they are there.
        context: tokens per row; None = min(n_ctx, 1024), the paper's sequence length.
        separator: "eos", or None to let documents simply follow each other.
        skip_tokens: leave out this many of the packed tokens first: how to take held-out text behind calibration text. Not
            for an iterator (a generator, an open file): passed a second time, it goes on where the first call stopped
            reading, without any skipping.

    Raises:
        TokenError: an unknown source, a bad document, no network for a named one, no tokenizer, no EOS token, numbers out of
            range, or too few tokens (how many there are is said).
    """
    length = _row_length(model, context)
    _check_whole(n_tokens=n_tokens)
    if n_tokens < length:
        raise TokenError(
            f"n_tokens={n_tokens} is less than one row of {length}; ask for more, or give a smaller context"
        )
    stream = stream_rows(source, model, context=length, separator=separator, skip_tokens=skip_tokens)
    rows = list(itertools.islice(stream, n_tokens // length))
    if len(rows) < n_tokens // length:
        behind = f" behind the {skip_tokens} skipped ones" if skip_tokens else ""
        raise TokenError(
            f"{documents_of(source)[1]} holds too few tokens{behind}: {len(rows)} whole rows of {length}, that is "
            f"{len(rows) * length} tokens, where n_tokens={n_tokens} were asked for"
        )
    return as_rows(torch.stack(rows), model)


def stream_rows(
    source: Any,
    model: Any,
    *,
    context: int | None = None,
    separator: str | None = "eos",
    skip_tokens: int = 0,
) -> Iterator[Int[Tensor, " pos"]]:
    """The rows of `load_text`, one by one; what is left at the end of the source is dropped.

    Raises:
        TokenError: as `load_text`; what can be checked without reading is checked at the call.
    """
    length = _row_length(model, context)
    _check_whole(skip_tokens=skip_tokens)
    if skip_tokens < 0:
        raise TokenError(f"skip_tokens must not be negative, got {skip_tokens}")
    if skip_tokens and isinstance(source, Iterator):
        # One that was read before goes on where that stopped: other tokens than asked for, and nothing would show it.
        raise TokenError(
            f"skip_tokens={skip_tokens} would count from wherever this {type(source).__name__} stands, which cannot be known; "
            "pass a list, or a dataset that starts anew each time, or skip documents by hand (next, itertools.islice)"
        )
    if separator not in ("eos", None):
        raise TokenError(f"separator must be 'eos' or None, got {separator!r}")
    joint = None if separator is None else model.tokenizer.eos_token_id
    if separator == "eos" and joint is None:
        raise TokenError("this tokenizer has no EOS token to join documents with; pass separator=None")
    documents, _ = documents_of(source)
    return _rows(documents, model, length, joint, skip_tokens)


def _rows(
    documents: Iterator[tuple[bool, str]], model: Any, length: int, joint: int | None, skip: int
) -> Iterator[Int[Tensor, " pos"]]:
    waiting: list[int] = []
    empty = True  # nothing was read yet, so there is nothing to join
    for starts, text in documents:
        # verbose=False: a document may be longer than the context, which is no reason to warn.
        text = text.removeprefix(_BOM) if starts else text
        ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            continue
        ids = [joint, *ids] if starts and joint is not None and not empty else ids
        empty = False
        waiting += ids[skip:]
        skip = max(0, skip - len(ids))
        whole = len(waiting) // length * length
        for start in range(0, whole, length):
            yield torch.tensor(waiting[start : start + length])
        waiting = waiting[whole:]


def _check_whole(**numbers: Any) -> None:
    for what, n in numbers.items():
        if not hasattr(n, "__index__"):
            raise TokenError(f"{what} must be a whole number, got {n!r}")


def _row_length(model: Any, context: int | None) -> int:
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so text cannot be packed; pass tokens")
    n_ctx = int(model.cfg.n_ctx)
    if context is not None:
        _check_whole(context=context)
    if context is not None and not 1 <= context <= n_ctx:
        raise TokenError(f"context={context} must lie between 1 and the host's context of {n_ctx}")
    return min(n_ctx, 1024) if context is None else context


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
    length = _row_length(model, context)
    # Line by line, so that a tokenizer never sees more than a paragraph at once (and does not warn of its own limit).
    ids: list[int] = []
    for line in text.removeprefix(_BOM).splitlines(keepends=True):
        ids.extend(model.tokenizer(line, add_special_tokens=False)["input_ids"])
        if n_tokens is not None and len(ids) >= n_tokens:
            break
    count = min(len(ids), n_tokens or len(ids)) // length
    if count == 0:
        raise TokenError(
            f"the text holds {len(ids)} tokens, too few for one row of {length}; give more text or a smaller context"
        )
    return as_rows(torch.tensor(ids[: count * length]).view(count, length), model)
