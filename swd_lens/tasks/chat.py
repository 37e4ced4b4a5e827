"""Chats: prompts that are messages, as the chat template of the host's tokenizer puts them into one text.

1. `is_chat` tells messages, `[{"role": "user", "content": "..."}]`, from texts and ids.
2. `chat_text` gives their text up to where the assistant writes. Templates print BOS themselves: where prompts begin with BOS
   anyway, it is taken off, so that there is one.
"""

from collections.abc import Mapping
from typing import Any

from swd_lens.base.errors import TokenError
from swd_lens.tasks.encoding import begins_with_bos


def is_chat(given: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(message, Mapping) for message in given)


def chat_text(model: Any, messages: Any, prepend_bos: bool | None = None) -> str:
    """The text of a chat, with the generation prompt.

    Args:
        model: the host.
        messages: each a mapping with "role" and "content".
        prepend_bos: whether BOS is put before prompts; None = as the host does it.

    Raises TokenError: a host without a tokenizer, a tokenizer without a chat template, or messages that its template refuses.
    """
    if model.tokenizer is None:
        raise TokenError("this host has no tokenizer, so strings cannot be its prompts; pass token ids")
    if not getattr(model.tokenizer, "chat_template", None):
        raise TokenError("this host's tokenizer has no chat template, so messages cannot be its prompt; pass a text")
    try:
        chat = [dict(message) for message in messages]
        text = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as cause:  # templates are programs of their own: they raise what they like
        raise TokenError(
            f"the chat template of this host's tokenizer refuses these messages: {type(cause).__name__}: {cause}"
        ) from cause
    with_bos = begins_with_bos(model) if prepend_bos is None else prepend_bos
    return text.removeprefix(model.tokenizer.bos_token or "") if with_bos else text


def as_text(model: Any, given: Any, prepend_bos: bool | None = None) -> Any:
    """A chat's text; anything else as it is. Raises as `chat_text` does."""
    return chat_text(model, given, prepend_bos) if is_chat(given) else given
