"""Tokenizer and training text: nothing is lost, nothing is unknown, rows are what the training claims."""

import random

import pytest

from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import KINDS, N_CTX, Packer, document, load_tokenizer
from swd_lens.tasks.generators import FAMILIES, generate
from swd_lens.tasks.generators.words import SPLITS


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(WEIGHTS)


@pytest.fixture(scope="module")
def packer(tokenizer):
    return Packer(tokenizer)


def test_pieces_are_gpt2s(tokenizer):
    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("So Mary isn't at 1741 to 17") == ["So", " Mary", " isn", "'t", " at", " 17", "41", " to", " 17"]
    assert pieces("    :param path: old\n") == ["    ", ":", "param", " path", ":", " old", "\n"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_unknown_token_in_any_prompt_answer_or_distractor(packer, family):
    for split in SPLITS:
        for e in generate(family, split, 150, templates="all"):
            packer.encode(e.prompt)  # raises on an unknown piece
            packer.encode(e.corrupt)
            assert [text for text in (*e.answers, *e.distractors) if len(packer.encode(text)) != 1] == []


def test_unknown_words_are_refused_with_the_text(packer):
    with pytest.raises(ValueError, match="1 pieces outside the vocabulary in 'Mary xylophone'"):
        packer.encode("Mary xylophone")


def test_documents_fit_a_row_and_every_kind_occurs(packer):
    rng = random.Random(0)
    for kind in KINDS:
        only = {other: float(other == kind) for other in KINDS}
        lengths = [len(packer.encode(document(rng, only))) + 2 for _ in range(100)]
        assert max(lengths) <= N_CTX
