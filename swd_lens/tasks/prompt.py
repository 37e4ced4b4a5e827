"""Prompt: what a host is to run on, as token ids, given as text or as ids.

1. `Prompt.of` turns a text, or the messages of a chat (`as_text`), into ids with the host's tokenizer, with a BOS where the host
   puts one and a warning that names the words it does not know (encoding.py), as for tasks. A text that brings its BOS gets no
   second one, which is said; ids are checked as token rows are (text.py). `Prompt.several` reads a list.
2. What a prompt may lack (one row, tokens to score, room in the context) are fields: each caller says in its own words what it
   needs. `Prompt.row` gives the ids to a host that can run them.
3. `decoded` and `token_strings` are how ids read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import TokenError
from swd_lens.tasks.cautions import begins_twice, warn_of_second_bos
from swd_lens.tasks.encoding import UnknownWords, begins_with_bos
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
        """Read one prompt: a text, a list of messages with "role" and "content", or (pos,) token ids.

        caller: who asks, for messages of the tokenizer; prepend_bos: of a text, None = as the host does it, as for tasks. Raises
        TokenError: a text for a host without a tokenizer, a chat that cannot be made a text (see `as_text`), or ids that are none
        (see `as_rows`); TaskError: a BOS is asked of a tokenizer that has none.
        """
        return cls._read_all(model, [given], caller, prepend_bos)[0]

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
        unknown, read, twice = UnknownWords(model.tokenizer), [], []
        for given in (as_text(model, prompt, prepend_bos) for prompt in prompts):
            if not isinstance(given, str):
                rows = as_rows(given, model)
                read.append(cls(tuple(rows[0].tolist()), n_rows=len(rows)))
                continue
            if model.tokenizer is None:
                raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
            tokenizer = TaskTokenizer(caller, model, prepend_bos)
            ids, why = tokenizer.prompt_ids(given)
            unknown.see(given, ids)
            twice += [given] if tokenizer.prepend_bos and begins_twice(model.tokenizer, given) else []
            read.append(cls(tuple(ids), given, tokenizer.prepend_bos, unusable=None if why is None else str(why)))
        unknown.warn(caller)
        warn_of_second_bos(model.tokenizer, caller, twice)
        return read

    def row(self, model: Any) -> Int[Tensor, " pos"]:
        """The ids, for a host that can run them. Raises TokenError: there are none, or more than the host's context holds."""
        return as_rows(list(self.ids), model)[0]


def is_chat(given: Any) -> bool:
    """Whether a prompt is a list of messages, `[{"role": "user", "content": "..."}]`."""
    return isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(message, Mapping) for message in given)


def as_text(model: Any, given: Any, prepend_bos: bool | None) -> Any:
    """The text of a chat (mappings with "role" and "content"), by the tokenizer's chat template, up to where the assistant
    writes; anything else as it is.

    Templates print BOS themselves: where prompts begin with BOS anyway (`prepend_bos`; None = as the host does it), it is taken
    off, so that there is one. Raises TokenError: a host without a tokenizer, a tokenizer without a chat template, or messages
    that its template refuses.
    """
    if not is_chat(given):
        return given
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
    if not getattr(model.tokenizer, "chat_template", None):
        raise TokenError("this host's tokenizer has no chat template, so messages cannot be its prompt; pass a text")
    try:
        chat = [dict(message) for message in given]
        text = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as cause:  # templates are programs of their own: they raise what they like
        raise TokenError(
            f"the chat template of this host's tokenizer refuses these messages: {type(cause).__name__}: {cause}"
        ) from cause
    with_bos = begins_with_bos(model) if prepend_bos is None else prepend_bos
    return text.removeprefix(model.tokenizer.bos_token or "") if with_bos else text


def decoded(model: Any, ids: Sequence[int]) -> str:
    """How ids read; the ids themselves where the host has no tokenizer."""
    decode = getattr(model.tokenizer, "decode", None)
    return " ".join(map(str, ids)) if decode is None else str(decode(list(ids)))


def token_strings(model: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """How each token reads by itself."""
    return tuple(decoded(model, [token]) for token in ids)
