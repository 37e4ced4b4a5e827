"""Prompt: what a host is to run on, as token ids, given as text or as ids.

1. `Prompt.of` turns a text, or the messages of a chat (chat.py), into ids with the host's tokenizer, with a BOS where the host
   puts one and a warning that names the words it does not know (encoding.py), as for tasks. A text that brings its BOS gets no
   second one, which is said; ids are checked as token rows are (text.py). `Prompt.several` reads a list.
2. What a prompt may lack (one row, tokens to score, room in the context) are fields: each caller says in its own words what it
   needs. `Prompt.row` gives the ids to a host that can run them.
3. `decoded` and `token_strings` are how ids read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import TokenError
from swd_lens.tasks.cautions import begins_twice, warn_of_second_bos
from swd_lens.tasks.chat import as_text, is_chat
from swd_lens.tasks.encoding import UnknownWords
from swd_lens.tasks.text import as_rows
from swd_lens.tasks.tokenize import TaskTokenizer


@dataclass(frozen=True)
class Prompt:
    """One prompt of a host."""

    ids: tuple[int, ...]  # token ids, BOS included; where several rows were given, those of the first
    text: str | None = None  # as it was given, or of the chat; None: it came as ids
    prepend_bos: bool | None = None  # whether the text got a BOS; None: it came as ids
    n_rows: int = 1  # how many rows of ids were given
    # why nothing can be scored on the text ("empty prompt: ..." or "prompt longer than the context: ..."); None where something
    # can
    unusable: str | None = None

    @classmethod
    def of(cls, model: Any, given: Any, caller: str, *, prepend_bos: bool | None = None) -> "Prompt":
        """Read one prompt.

        Args:
            given: a text, a list of messages with "role" and "content", or (pos,) token ids.
            caller: who asks, for messages of the tokenizer.
            prepend_bos: of a text; None = as the host does it, as for tasks.

        Raises:
            TokenError: a text for a host without a tokenizer, a chat that cannot be made a text (see `chat_text`), or ids that
                are none (see `as_rows`).
            TaskError: a BOS is asked of a tokenizer that has none.
        """
        return cls._read_all(model, [given], caller, prepend_bos)[0]

    @classmethod
    def _read(cls, model: Any, given: Any, caller: str, prepend_bos: bool | None, unknown: UnknownWords) -> "Prompt":
        given = as_text(model, given, prepend_bos)
        if not isinstance(given, str):
            rows = as_rows(given, model)
            return cls(tuple(rows[0].tolist()), n_rows=len(rows))
        if model.tokenizer is None:
            raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
        tokenizer = TaskTokenizer(caller, model, prepend_bos)
        ids, unusable = tokenizer.prompt_ids(given)
        unknown.see(given, ids)
        return cls(tuple(ids), given, tokenizer.prepend_bos, unusable=None if unusable is None else str(unusable))

    @classmethod
    def several(cls, model: Any, given: Any, caller: str, *, prepend_bos: bool | None = None) -> "list[Prompt]":
        """Read prompts: one text, chat or row of ids, or a list of them (a (rows, pos) tensor is one). Raises as `of`."""
        prompts = [given] if isinstance(given, str) or is_chat(given) else list(given)
        if prompts and all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in prompts):
            prompts = [torch.as_tensor(prompts)]
        return cls._read_all(model, prompts, caller, prepend_bos)

    @classmethod
    def _read_all(cls, model: Any, prompts: list[Any], caller: str, prepend_bos: bool | None) -> "list[Prompt]":
        """Prompts, and one warning of each kind for all of them."""
        unknown = UnknownWords(model.tokenizer)
        read = [cls._read(model, prompt, caller, prepend_bos, unknown) for prompt in prompts]
        unknown.warn(caller)
        given = [prompt.text for prompt in read if prompt.text is not None and prompt.prepend_bos]
        warn_of_second_bos(model.tokenizer, caller, [text for text in given if begins_twice(model.tokenizer, text)])
        return read

    def row(self, model: Any) -> Int[Tensor, " pos"]:
        """The ids, for a host that can run them. Raises TokenError: there are none, or more than the host's context holds."""
        return as_rows(list(self.ids), model)[0]


def decoded(model: Any, ids: Sequence[int]) -> str:
    """How ids read; the ids themselves where the host has no tokenizer."""
    decode = getattr(model.tokenizer, "decode", None)
    return " ".join(map(str, ids)) if decode is None else str(decode(list(ids)))


def token_strings(model: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """How each token reads by itself."""
    return tuple(decoded(model, [token]) for token in ids)
