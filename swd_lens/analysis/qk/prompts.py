"""Prompts as token rows with a string for every position."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.analysis.qk.vectors import QKError
from swd_lens.tasks import TokenError
from swd_lens.tasks.text import as_rows
from swd_lens.tasks.tokenize import TaskTokenizer


def prompt_row(model: Any, prompt: Any) -> Int[Tensor, " pos"]:
    """One prompt: a string (with a BOS where the model was trained with one, as tasks do) or a row of token ids.

    Raises:
        QKError: a single token, which can attend to itself only, or several rows.
        TokenError: no tokenizer for a string, an id outside the vocabulary, or more tokens than the context holds.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
        reader = TaskTokenizer("qk", model)
        prompt = [reader.tokenizer.bos_token_id] * reader.prepend_bos + reader.ids(prompt)
        if not prompt:
            raise QKError("the prompt has no tokens; attention needs at least two")
    rows = as_rows(prompt, model)
    if len(rows) != 1:
        raise QKError(f"a prompt is one row of tokens, got {len(rows)}; qk_scan takes a list of prompts")
    if rows.shape[1] < 2:
        raise QKError("a prompt of one token attends to itself whatever its scores; give at least two tokens")
    return rows[0]


def prompt_rows(model: Any, prompts: Any) -> list[Int[Tensor, " _pos"]]:
    """Several prompts: strings, rows of ids, or a (rows, pos) tensor. Raises what `prompt_row` does, and for no prompts."""
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if given and all(isinstance(one, int) or getattr(one, "ndim", None) == 0 for one in given):
        given = [torch.as_tensor(given)]
    if not given:
        raise QKError("there are no prompts; give at least one")
    return [prompt_row(model, one) for one in given]


def strings_of(model: Any, row: Int[Tensor, " pos"]) -> tuple[str, ...]:
    """Each token decoded by itself; its id where the host has no tokenizer."""
    if model.tokenizer is None:
        return tuple(str(token) for token in row.tolist())
    return tuple(model.tokenizer.decode([token]) for token in row.tolist())


def batches(rows: Sequence[Tensor], most: int) -> list[list[int]]:
    """Places of prompts of one length, at most so many positions squared together that `most` numbers hold a map of each."""
    of_length: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        of_length.setdefault(len(row), []).append(place)
    made = []
    for length, places in of_length.items():
        size = max(1, most // length**2)
        made += [places[i : i + size] for i in range(0, len(places), size)]
    return made
