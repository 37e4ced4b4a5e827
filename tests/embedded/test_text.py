"""Training text: the tokenizer is that of the corpus and loses nothing, batches are what the training claims."""

import pytest
import torch

from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import MIX, N_CTX, load_tokenizer
from tests.embedded.text import TrainingPacker, build_tokenizer, loss_weights, sample_documents


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(WEIGHTS)


@pytest.fixture(scope="module")
def packer(tokenizer):
    return TrainingPacker(tokenizer)


@pytest.mark.slow
def test_shipped_tokenizer_is_what_the_corpus_gives(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_decode_gives_back_every_text(tokenizer, packer):
    for text in [*sample_documents(400, seed=1), "  two  spaces\n\n", '18 06, \'tis isn\'t 1741->"""', " Mary Mary"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if packer.unk not in ids:
            assert tokenizer.decode(ids) == text


def test_batches_come_from_seed_and_step_alone(packer):
    first, again = packer.batch(3, 7, 4, MIX), TrainingPacker(packer.tokenizer).batch(3, 7, 4, MIX)
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
