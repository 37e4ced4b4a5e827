"""Strings become ids: with a BOS where the host puts one, and with a warning that names the words it does not know.

1. `begins_with_bos` follows the host: `cfg.default_prepend_bos`, by which `model("...")` goes, too. `load_host` sets it by
   `adds_bos`, which asks the tokenizer's files.
2. The tokenizer in a host cannot be asked: transformer_lens loads every tokenizer again with add_bos_token=True. So the
   files that it came from are (its name_or_path; what the hub's cache holds; never the network). `add_bos_token` in
   tokenizer_config.json counts first, then what the tokenizer as it was saved puts before a text. Without files (a tokenizer made
   in memory) the one at hand is asked; without BOS, or files that are gone, the answer is no.
3. `UnknownWords` collects the words of texts that the tokenizer has no token of their own for (it reads "<|unk|>" there, the same
   for all of them), and warns once with all of them.
4. `special_ids` are the tokens that are no text; `stop_tokens` those behind which a host writes nothing.
5. `vocabulary_hash` tells tokenizers of one size apart: by it a task knows the one that it was made with.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from swd_lens.base.errors import UnknownWordsWarning, quoted, warn
from swd_lens.base.machine import is_out_of_memory

_NAMED = 8  # words in a warning
_HASHES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of vocabularies, by tokenizer


def begins_with_bos(model: Any) -> bool:
    """Whether a text given to this host begins with BOS."""
    default = getattr(model.cfg, "default_prepend_bos", None)
    if getattr(model.tokenizer, "bos_token_id", None) is None:
        return False
    return adds_bos(model.tokenizer) if default is None else bool(default)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the model of this tokenizer was trained on text that begins with BOS."""
    if getattr(tokenizer, "bos_token_id", None) is None:
        return False
    source = getattr(tokenizer, "name_or_path", "")
    return _saved_adds_bos(source) if source else _puts_bos(tokenizer)


@functools.cache
def _saved_adds_bos(source: str) -> bool:
    """Whether the files of a tokenizer say so; read once for each."""
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        stated = get_tokenizer_config(source, local_files_only=True).get("add_bos_token")
        saved = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as cause:  # gone, or not in the hub's cache: each library has its own classes
        if is_out_of_memory(cause):
            raise
        return False
    if saved.bos_token_id is None:
        return False
    return _puts_bos(saved) if stated is None else bool(stated)


def special_ids(model: Any) -> tuple[int, ...]:
    """The ids of a host's special tokens, ascending: BOS, EOS, padding, unknown words, and what a chat template adds."""
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    added = getattr(model.tokenizer, "added_tokens_decoder", None) or {}
    special |= {token for token, of_token in added.items() if getattr(of_token, "special", False)}
    return tuple(sorted(token for token in special if 0 <= token < int(model.cfg.d_vocab)))


def stop_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a host's text, ascending: its tokenizer's EOS, and all that its generation_config names.

    That of transformers' own model, where the host holds one; else what lies beside the tokenizer's files (never the network).
    """
    if model.tokenizer is None:
        return ()
    inner = getattr(getattr(model, "original_model", None), "generation_config", None)
    named = getattr(inner, "eos_token_id", None)
    if named is None:
        named = _saved_stop_tokens(getattr(model.tokenizer, "name_or_path", "") or "")
    stop = {getattr(model.tokenizer, "eos_token_id", None), *(named if isinstance(named, list | tuple) else [named])}
    return tuple(sorted(int(token) for token in stop if token is not None))


@functools.cache
def _saved_stop_tokens(source: str) -> tuple[int, ...]:
    """Stop tokens of the generation_config.json beside a tokenizer; read once for each."""
    from transformers import GenerationConfig

    try:
        named = GenerationConfig.from_pretrained(source, local_files_only=True).eos_token_id if source else None
    except Exception as cause:  # there is none, or it is not in the hub's cache
        if is_out_of_memory(cause):
            raise
        named = None
    return tuple(named) if isinstance(named, list | tuple) else () if named is None else (named,)


def _puts_bos(tokenizer: Any) -> bool:
    return list(tokenizer("a")["input_ids"])[:1] == [tokenizer.bos_token_id]


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 over the words and ids of a tokenizer; "" where it has no list of them. Computed once for each tokenizer."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    if tokenizer not in _HASHES:
        words = sorted(tokenizer.get_vocab().items())
        _HASHES[tokenizer] = hashlib.sha256(repr(words).encode(errors="surrogatepass")).hexdigest()
    return _HASHES[tokenizer]


class UnknownWords:
    """Words that a tokenizer does not know, in the order in which they were met."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.words = tokenizer, dict[str, None]()

    def see(self, text: str, ids: Sequence[int]) -> None:
        """Note the unknown words of a text, given its ids."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        # Where a tokenizer has no token for unknown words it often calls another one so (GPT-2: "<|endoftext|>").
        if unknown is None or unknown not in ids or self.tokenizer.unk_token in text:
            return
        if getattr(self.tokenizer, "is_fast", False):
            read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            spans = zip(read["input_ids"], read["offset_mapping"], strict=True)
            words = [text[start:end].strip() or text[start:end] for token, (start, end) in spans if token == unknown]
        else:
            every = text.split()
            words = [word for word in every if unknown in self.tokenizer(" " + word, add_special_tokens=False)["input_ids"]]
        self.words |= dict.fromkeys(words)

    def warn(self, what: str) -> None:
        """Warn once, naming the words, if there are any. what: whose text it is, for the message."""
        if self.words:
            named = ", ".join(map(repr, list(self.words)[:_NAMED]))
            more = f" and {len(self.words) - _NAMED} more" if len(self.words) > _NAMED else ""
            unk = self.tokenizer.unk_token
            warn(
                f"{what}: this host's tokenizer does not know {named + more}; it reads {quoted(unk)} there, the same for "
                "every such word. Numbers on such a text are not about these words. Use other words, or a host that "
                "knows them",
                UnknownWordsWarning,
            )
