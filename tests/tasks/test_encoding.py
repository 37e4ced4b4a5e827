"""Encoding: who puts BOS, which tokens are no text, which words a tokenizer does not know."""

import pytest

from swd_lens.base.errors import UnknownWordsWarning
from swd_lens.tasks.encoding import UnknownWords, adds_bos, begins_with_bos, special_ids, stop_tokens, vocabulary_hash
from tests.tasks.test_task import WORDS, FakeHost


def test_bos_goes_by_the_host_and_else_by_the_tokenizer(default_model):
    host = FakeHost()
    assert not begins_with_bos(host)  # made in memory: the tokenizer at hand puts none
    host.cfg.default_prepend_bos = True
    assert begins_with_bos(host)
    host.tokenizer.bos_token = None
    assert not begins_with_bos(host) and not adds_bos(host.tokenizer)
    assert adds_bos(default_model.tokenizer)


def test_special_and_stop_tokens_and_the_hash_of_a_vocabulary():
    host = FakeHost()
    assert special_ids(host) == (0, 1) and stop_tokens(host) == ()
    host.tokenizer.eos_token = "sat"
    assert stop_tokens(host) == (5,) and special_ids(host) == (0, 1, 5)
    host.tokenizer = None
    assert stop_tokens(host) == ()
    same, other = FakeHost(), FakeHost([*WORDS[:-1], "fox"])
    assert vocabulary_hash(FakeHost().tokenizer) == vocabulary_hash(same.tokenizer) != vocabulary_hash(other.tokenizer)
    assert vocabulary_hash(None) == ""


def test_words_that_are_not_known_are_named_once():
    tokenizer = FakeHost().tokenizer
    unknown = UnknownWords(tokenizer)
    for text in ("the zebra sat", "a zebra", "the cat"):
        unknown.see(text, tokenizer(text)["input_ids"])
    assert list(unknown.words) == ["zebra", "a"]
    with pytest.warns(UnknownWordsWarning, match=r"text: this host's tokenizer does not know 'zebra', 'a'; it reads '<unk>'"):
        unknown.warn("text")
