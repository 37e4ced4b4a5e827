"""Which positions count."""

import numpy as np
import pytest
import torch

from swd_lens.base.errors import TokenError
from swd_lens.tasks.counting import Counting, excluded, padding_last, predicted
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.text import as_rows
from tests.tasks.test_task import FakeHost

ROWS = torch.tensor([[1, 2, 3, 4], [5, 6, 1, 7]])


@pytest.fixture
def host():
    host = FakeHost()
    host.tokenizer.pad_token = "dog"  # id 4
    return host


def test_ids_and_special_tokens(host):
    assert excluded(None, host).of(ROWS) is None and excluded(None, host).all
    assert excluded("special", host).ids == (0, 1, 4)
    counting = excluded(torch.tensor([7, 1, 1]), host)
    assert counting.ids == (1, 7)
    assert counting.of(ROWS).tolist() == [[False, True, True, True], [True, True, False, False]]
    assert predicted(counting.of(ROWS)).tolist() == [[False, True, True], [True, False, False]]
    assert excluded(3, host).ids == (3,) and excluded(3, host).key != counting.key


def test_what_cannot_be_excluded(host):
    for exclude in ("bos", [11], [-1], [True], [0.5], ["the"]):
        with pytest.raises(TokenError, match="exclude"):
            excluded(exclude, host)
    host.tokenizer = None
    with pytest.raises(TokenError, match="no tokenizer that says which tokens are special"):
        excluded("special", host)


def test_padding_goes_behind_the_text(host):
    left = [[4, 4, 2, 3], [4, 5, 6, 7], [2, 3, 5, 6]]
    rows, lengths = padding_last(left, [[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], host)
    assert rows.tolist() == [[2, 3, 4, 4], [5, 6, 7, 4], [2, 3, 5, 6]] and lengths.tolist() == [2, 3, 4]
    counting = Counting(lengths=lengths)
    assert counting.of(rows[1:], 1).tolist() == [[True, True, True, False], [True] * 4]
    same, none = padding_last(ROWS, torch.ones(2, 4), host)
    assert torch.equal(same, ROWS) and none is None


def test_bad_masks(host):
    for mask, message in (
        ([[1, 1, 1]], r"must be \(rows, pos\) of 0 and 1 like the tokens, \(2, 4\), got \(1, 3\)"),
        ("all", "got str"),
        ([[2, 1, 1, 1], [1, 1, 1, 1]], "other values"),
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "of row 1: the text must be one run"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "of row 0"),
    ):
        with pytest.raises(TokenError, match=message):
            padding_last(ROWS, mask, host)


def test_streams_say_what_they_hold(host, tmp_path):
    started = []

    def source():
        started.append(1)
        return iter(ROWS)

    stream = as_stream(TokenStream(source, 2), host, exclude=[1])
    assert stream.n_counted == 6 and len(started) == 1
    assert stream.about(host) == {"rows_begin_with_bos": False, "exclude": [1], "left_out": 2} and len(started) == 1
    assert as_stream(stream, host).counting is stream.counting  # whoever takes it on leaves out the same
    held = as_stream(ROWS[:1], host)
    assert held.about(host) == {"rows_begin_with_bos": True} and held.n_counted == 4
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    mapped = as_stream(np.load(tmp_path / "rows.npy", mmap_mode="r"), host, exclude="special")
    assert mapped.n_counted == 5
    with pytest.raises(TokenError, match="every one of the 8 tokens"):
        _ = as_stream(ROWS, host, exclude=range(1, 8)).n_counted
    padded = as_stream([[2, 3, 4, 4]], host, attention_mask=[[1, 1, 0, 0]])
    assert padded.fingerprint() != as_stream([[2, 3, 4, 4]], host, attention_mask=[[1, 1, 1, 0]]).fingerprint()
    for tokens in (TokenStream(lambda: iter(ROWS), 2), iter(ROWS)):
        with pytest.raises(TokenError, match="attention_mask= is for token rows in memory"):
            as_stream(tokens, host, attention_mask=ROWS > 0)


def test_padded_rows_are_refused(host):
    for row, end in (([2, 3, 4, 4], "ends"), ([4, 4, 2, 3], "begins")):
        with pytest.raises(TokenError, match=rf"row 1 {end} with several pad tokens \('dog', id 4; 1 such"):
            as_rows([[2, 3, 5, 6], row], host)
    as_rows([[4, 2, 4, 4, 3, 4], [4, 2, 3, 5, 6, 4]], host)  # a single one at an end, and a run inside: text
    as_rows([[4], [4]], host)
    host.tokenizer.pad_token = "<bos>"  # GPT-2: BOS, EOS and padding are one token
    as_rows([[1, 1, 2, 3], [1, 2, 3, 1]], host)  # BOS and then the EOS that ends a document
    for row in ([1, 1, 1, 2], [2, 3, 1, 1]):
        with pytest.raises(TokenError, match="several pad tokens"):
            as_rows(row, host)
    host.tokenizer.pad_token = None
    as_rows([2, 3, 4, 4], host)
