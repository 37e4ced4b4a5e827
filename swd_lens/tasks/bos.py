"""Whether prompts of a host begin with BOS: its tokenizer's files say so, for every kind of host.

1. The tokenizer in a host cannot be asked: transformer_lens loads every tokenizer again with add_bos_token=True. So the
   files that it came from are (its name_or_path; what the hub's cache holds; never the network).
2. `add_bos_token` in tokenizer_config.json counts first, then what the tokenizer as it was saved puts before a text.
3. Without files (a tokenizer made in memory) the one at hand is asked; without BOS, or files that are gone, the answer is no.
"""

import functools
from typing import Any


def adds_bos(tokenizer: Any) -> bool:
    """Whether the model of this tokenizer was trained on text that begins with BOS."""
    if getattr(tokenizer, "bos_token_id", None) is None:
        return False
    source = getattr(tokenizer, "name_or_path", "")
    return _saved_adds_bos(source) if source else _puts_bos(tokenizer)


@functools.cache
def _saved_adds_bos(source: str) -> bool:
    """What the files of a tokenizer say; read once for each."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        stated = get_tokenizer_config(source, local_files_only=True).get("add_bos_token")
        saved = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception:  # gone, or not in the hub's cache: transformers, hub and tokenizers have their own classes each
        return False
    if saved.bos_token_id is None:
        return False
    return _puts_bos(saved) if stated is None else bool(stated)


def _puts_bos(tokenizer: Any) -> bool:
    return list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]
