"""Token rows."""

import pytest
import torch

from swd_lens.tasks.text import TokenError, as_rows, pack_text
from tests.micro import random_tokens, toy_model
from tests.tasks.test_task import FakeHost


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_one_row_and_many(model):
    assert as_rows([1, 2, 3], model).tolist() == [[1, 2, 3]]
    tokens = random_tokens(4, 6).int()
    rows = as_rows(tokens, model)
    assert rows.dtype == torch.int64 and torch.equal(rows, tokens.long())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 20, 3]], r"token id 20 at row 0, position 1 is outside the vocabulary \(0 to 19\); 1 such ids"),
        ([[1, 2], [3, -1]], r"token id -1 at row 1, position 1"),
        ([[0.5, 1.0]], r"tokens must be integers, got torch.float32"),
        ([], r"must be (integers|\(rows, pos\) and not empty)"),
        ([[[1]]], r"got shape \(1, 1, 1\)"),
        ([[1] * 33], r"rows of 33 tokens do not fit the host's context of 32"),
    ],
)
def test_bad_tokens(model, tokens, message):
    with pytest.raises(TokenError, match=message):
        as_rows(tokens, model)


def test_packing():
    host = FakeHost()
    rows = pack_text(host, "the cat sat\nthe dog ran\nhe sat", context=3)
    assert rows.tolist() == [[2, 3, 5], [2, 4, 6]]  # the rest is dropped
    assert pack_text(host, "the cat sat\n" * 10, context=3, n_tokens=6).shape == (2, 3)
    with pytest.raises(TokenError, match="holds 3 tokens, too few for one row of 8"):
        pack_text(host, "the cat sat")
    host.tokenizer = None
    with pytest.raises(TokenError, match="no tokenizer"):
        pack_text(host, "the cat")
