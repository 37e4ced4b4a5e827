"""generate: what the dense and the replaced host write on, side by side.

1. Prompts become token rows (strings by the host's tokenizer). Rows of one length run together, none of them padded.
2. The dense host first, then each replacement, attached only while it runs: step by step the logits at the last position
   in float32, one more token per row. The whole row runs again at every step, so that no cache is part of the comparison.
3. The next token is the likeliest one (temperature 0), or the largest of logits / temperature + Gumbel noise, which is a
   draw from the softmax. The noise depends on seed, prompt and step alone: every host gets the same, so that what differs
   between two continuations comes from the model. Ties go to the lowest id.
4. A row stops at EOS, after `max_new_tokens`, or when the context is full; which of them is said. Rows that have stopped
   run along until all have: the batch, and with it the rounding of the others, is then the same for every host.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.hosts import Host, UnsupportedHostError, host_of, require_no_dropout
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.sites import UnknownSiteError, select_sites
from swd_lens.study.samples import DENSE, Continuation, Sample, Samples
from swd_lens.tasks.text import TokenError, as_rows
from swd_lens.tasks.tokenize import TaskTokenizer
from swd_lens.units import attach


def generate(
    model: Any,
    factors: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 40,
    temperature: float | int = 0,
    seed: int = 0,
    prepend_bos: bool | None = None,
    batch_size: int = 16,
    progress: bool = False,
) -> Samples:
    """Let the dense host and one or several replacements of it continue the same prompts.

    Args:
        model: the host, with these sites not attached.
        factors: what to attach (see `swd_lens.attach`), or several: {"SWD": before, "SWD-FT": after}.
        prompts: a string, several, or token ids: (rows, pos), or a list of rows of any lengths.
        max_new_tokens: at most so many per prompt; fewer where EOS comes or n_ctx is reached.
        temperature: 0 takes the likeliest token.
        seed: of the sampling noise, which is the same for every host. Prompts that are equal are sampled differently.
        prepend_bos: of prompts that are strings; None = as `swd_lens.load_task`: with BOS where the host was trained so.
        batch_size: prompts per forward.
        progress: show a bar.

    Raises:
        TokenError: no prompts, an empty one, one longer than the context, or strings for a host without a tokenizer.
        ValueError: numbers out of range; a label "dense"; train mode with dropout; logits that are not finite.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: the host attends both ways, so it cannot write on.
    """
    _check_numbers(max_new_tokens, temperature, batch_size)
    _require_causal(model)
    require_no_dropout(model)
    host = host_of(model)
    replacements = _labelled(host, factors)
    rows, with_bos = _rows(model, prompts, prepend_bos)
    written: dict[str, list[tuple[int, ...]]] = {}
    total = (1 + len(replacements)) * len(rows)
    with torch.no_grad(), tqdm(total=total, desc="generate", unit="prompt", disable=not progress, leave=False) as bar:
        for label, units in {DENSE: None, **replacements}.items():
            replaced: AbstractContextManager[Any] = nullcontext() if units is None else attach(model, units)
            written[label] = [()] * len(rows)
            with replaced:
                for batch in _batches(rows, batch_size):
                    new = _continue(host, rows, batch, max_new_tokens, float(temperature), seed)
                    for place, tokens in zip(batch, new, strict=True):
                        written[label][place] = tokens
                    bar.update(len(batch))
    samples = tuple(
        _sample(model, row, {label: tokens[place] for label, tokens in written.items()}, max_new_tokens)
        for place, row in enumerate(rows)
    )
    settings = {"max_new_tokens": max_new_tokens, "temperature": float(temperature), "seed": seed}
    return Samples(samples, {**settings, "prepend_bos": with_bos})


# ---------------------------------------------------------------------------------------------- arguments


def check_prompts(model: Any, prompts: Any) -> None:
    """Raises TokenError for prompts that `generate` would refuse."""
    _rows(model, prompts, None)


def _check_numbers(max_new_tokens: int, temperature: float | int, batch_size: int) -> None:
    for what, n in {"max_new_tokens": max_new_tokens, "batch_size": batch_size}.items():
        if n < 1:
            raise ValueError(f"{what}={n}: give a whole number of at least 1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature}: give 0 for the likeliest token, or a finite number above it")


def _require_causal(model: Any) -> None:
    if not facts_of(model).causal:
        raise UnsupportedHostError(
            "this host attends both ways, so it cannot write on from a prompt; give a causal one"
        )


def _labelled(host: Host, factors: Any) -> dict[str, Any]:
    """label -> what to attach; one replacement is called "replaced"."""
    several = isinstance(factors, Mapping) and bool(factors)
    several = several and (any(isinstance(one, Mapping) for one in factors.values()) or not _names_sites(host, factors))
    labelled = {str(label): one for label, one in factors.items()} if several else {"replaced": factors}
    if DENSE in labelled:
        raise ValueError(
            f"{DENSE!r} is the host without factors, which is always shown; give your factors another label"
        )
    return labelled


def _names_sites(host: Host, factors: Mapping[Any, Any]) -> bool:
    try:
        for name in factors:
            select_sites(host.sites(), str(name), host.alternatives())
    except UnknownSiteError:
        return False
    return True


def _rows(model: Any, prompts: Any, prepend_bos: bool | None) -> tuple[list[tuple[int, ...]], bool | None]:
    """Token ids of each prompt, and whether strings among them got a BOS."""
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if given and all(isinstance(one, int) for one in given):
        given = [given]  # a single row
    if not given:
        raise TokenError("there are no prompts to continue; give at least one")
    tokenizer = _tokenizer(model, prepend_bos) if any(isinstance(one, str) for one in given) else None
    rows = []
    for one in given:
        if isinstance(one, str):
            assert tokenizer is not None
            ids = tokenizer.ids(one)
            ids = [tokenizer.tokenizer.bos_token_id, *ids] if tokenizer.prepend_bos else ids
            if not ids:
                raise TokenError(f"prompt {one!r} has no tokens: there is nothing to continue")
            one = ids
        rows.append(tuple(as_rows(one, model)[0].tolist()))
    return rows, None if tokenizer is None else tokenizer.prepend_bos


def _tokenizer(model: Any, prepend_bos: bool | None) -> TaskTokenizer:
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
    return TaskTokenizer("generate", model, prepend_bos)


def _batches(rows: Sequence[tuple[int, ...]], batch_size: int) -> list[list[int]]:
    """Places of prompts that run together: of one length, at most batch_size of them."""
    of_length: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        of_length.setdefault(len(row), []).append(place)
    return [same[i : i + batch_size] for same in of_length.values() for i in range(0, len(same), batch_size)]


# ---------------------------------------------------------------------------------------------- writing on


def _continue(
    host: Host, rows: Sequence[tuple[int, ...]], batch: Sequence[int], most: int, temperature: float, seed: int
) -> list[tuple[int, ...]]:
    """New tokens of each row of a batch, EOS included."""
    tokens = torch.tensor([rows[place] for place in batch])
    start, n_ctx, eos = tokens.shape[1], int(host.model.cfg.n_ctx), _eos(host.model)
    running = torch.ones(len(tokens), dtype=torch.bool)
    for step in range(min(most, n_ctx - start)):
        logits = host.last_logits(tokens).float().cpu()
        if not torch.isfinite(logits).all():
            raise ValueError(f"the host's logits at position {tokens.shape[1] - 1} are not finite; it cannot write on")
        if temperature > 0:
            noise = torch.stack([_gumbel(seed, place, step, logits.shape[1]) for place in batch])
            tokens = torch.cat([tokens, _largest(logits.double() / temperature + noise)[:, None]], 1)
        else:
            tokens = torch.cat([tokens, _largest(logits)[:, None]], 1)
        if eos is not None:
            running &= tokens[:, -1] != eos
            if not running.any():
                break
    return [_until(row, eos) for row in tokens[:, start:].tolist()]


def _largest(values: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Index of each row's largest entry; of equal ones the lowest, on every device."""
    ids = torch.arange(values.shape[1])
    return ids.where(values == values.amax(1, keepdim=True), values.shape[1]).amin(1)


def _gumbel(seed: int, prompt: int, step: int, vocab: int) -> Float[Tensor, " vocab"]:
    """Standard Gumbel noise, float64. A digest, because sums of seed, prompt and step would repeat each other's noise."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    uniform = torch.rand(vocab, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform))


def _until(tokens: list[int], eos: int | None) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)


def _eos(model: Any) -> int | None:
    return None if model.tokenizer is None else getattr(model.tokenizer, "eos_token_id", None)


def _sample(model: Any, row: tuple[int, ...], written: Mapping[str, tuple[int, ...]], most: int) -> Sample:
    eos, dense = _eos(model), written[DENSE]
    by_host = {}
    for label, tokens in written.items():
        ended = eos is not None and tokens[-1:] == (eos,)
        stop = "eos" if ended else "length" if len(tokens) == most else "context"
        departs = next((i for i, pair in enumerate(zip(tokens, dense, strict=False)) if pair[0] != pair[1]), None)
        by_host[label] = Continuation(tokens, _text(model, row, tokens[:-1] if ended else tokens), stop, departs)
    return Sample(None if model.tokenizer is None else model.tokenizer.decode(list(row)), row, by_host)


def _text(model: Any, row: tuple[int, ...], tokens: tuple[int, ...]) -> str | None:
    """What follows the prompt's text. Decoded with it: some tokenizers drop the space before a text's first word."""
    if model.tokenizer is None:
        return None
    prompt, whole = (model.tokenizer.decode(list(ids)) for ids in (row, row + tokens))
    return whole[len(prompt) :] if whole.startswith(prompt) else model.tokenizer.decode(list(tokens))
