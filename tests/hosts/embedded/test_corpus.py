"""Tokenizer and training text: nothing is lost, nothing is unknown, rows are what the training claims."""

import random

import pytest
import torch

from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import (
    KINDS,
    MIX,
    N_CTX,
    Packer,
    build_tokenizer,
    document,
    load_tokenizer,
    loss_weights,
    sample_documents,
)
from swd_lens.tasks.generators import FAMILIES, generate
from swd_lens.tasks.generators.words import SPLITS


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(WEIGHTS)


@pytest.fixture(scope="module")
def packer(tokenizer):
    return Packer(tokenizer)


def test_shipped_tokenizer_is_what_the_corpus_gives(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_decode_gives_back_every_text(tokenizer, packer):
    for text in [*sample_documents(400, seed=1), "  two  spaces\n\n", '18 06, \'tis isn\'t 1741->"""', " Mary Mary"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if packer.unk not in ids:
            assert tokenizer.decode(ids) == text


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


def test_batches_come_from_seed_and_step_alone(packer):
    first, again = packer.batch(3, 7, 4, MIX), Packer(packer.tokenizer).batch(3, 7, 4, MIX)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tokens, packer.batch(3, 8, 4, MIX).tokens)
    assert not torch.equal(first.tokens, packer.batch(4, 7, 4, MIX).tokens)
    assert first.tokens.shape == (4, N_CTX)


def test_targets_documents_and_weights_of_a_batch(packer):
    batch = packer.batch(0, 0, 64, MIX)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    crossing = (batch.documents == 0).all(1)
    assert 0 < int(crossing.sum()) < 24  # one row in eight
    for tokens, documents in zip(batch.tokens[~crossing], batch.documents[~crossing], strict=True):
        new = documents[1:] != documents[:-1]
        assert torch.equal(new, tokens[:-1] == packer.eos)
    words = packer.tokenizer.convert_ids_to_tokens(batch.targets[batch.heavy].tolist())
    assert {" he", " she"} & set(words)
    assert all(w in (" he", " she") or w.isdigit() or w.startswith(" ") for w in words)


def test_heavy_marks_what_the_text_before_decides(packer):
    ids = packer.encode("When Mary and John left, John gave a ball to Mary. He was there from 1741 to 1792, wasn't he?")
    marked = [packer.tokenizer.decode([i]) for i, heavy in zip(ids, packer.heavy(ids), strict=True) if heavy]
    assert marked == [" John", " Mary", "92", " he"]  # not the first names, nor the start year
    weights = loss_weights(torch.tensor([[True, False, False]]), 3)
    torch.testing.assert_close(weights, torch.tensor([[9 / 5, 3 / 5, 3 / 5]]))  # (3, 1, 1) over their mean 5/3
