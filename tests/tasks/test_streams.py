"""Token streams: the same rows in every pass, checked as they come, and never all of them at once."""

import itertools
import random

import numpy as np
import pytest
import torch

from swd_lens.base.errors import TokenError
from swd_lens.factorization.checkpoint import tokens_fingerprint
from swd_lens.tasks.streams import TokenStream, as_stream, split_rows
from tests.micro import random_tokens, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()


ROWS = random_tokens(7, 6)


def gathered(stream, batch_size=3):
    return [batch.tolist() for batch in stream.batches(batch_size)]


def test_every_form_of_tokens_gives_the_same_batches_and_fingerprint(model, tmp_path):
    wanted = [ROWS[:3].tolist(), ROWS[3:6].tolist(), ROWS[6:].tolist()]
    file = np.memmap(tmp_path / "rows", dtype=np.uint16, mode="w+", shape=(7, 6))
    file[:] = ROWS.numpy()
    forms = {
        "tensor": ROWS,
        "int32": ROWS.int(),
        "array": ROWS.numpy(),
        "list": ROWS.tolist(),
        "cut of longer rows": torch.cat([ROWS, ROWS], 1)[:, :6],
        "transposed": ROWS.T.contiguous().T,
        "memmap": file,
        "stream of tensors": TokenStream(lambda: ROWS, 7),
        "stream of lists": TokenStream(lambda: iter(ROWS.tolist()), 7, row_length=6),
        "stream of arrays": TokenStream(lambda: (row.numpy().astype(np.uint8) for row in ROWS), 7),
        "endless": TokenStream(lambda: itertools.chain(ROWS, itertools.repeat(ROWS[0])), 7),
    }
    for form, tokens in forms.items():
        stream = as_stream(tokens, model)
        assert (stream.n_rows, stream.row_length, stream.n_tokens) == (7, 6, 42), form
        assert gathered(stream) == gathered(stream) == wanted, form
        assert gathered(stream, 100) == [ROWS.tolist()], form
        assert stream.first_row().tolist() == ROWS[0].tolist(), form
        assert stream.fingerprint() == tokens_fingerprint(ROWS), form
        assert all(batch.dtype == torch.int64 for batch in stream.batches(4)), form
    assert as_stream(ROWS[0], model).n_rows == 1
    assert next(as_stream(ROWS, model).batches(3)).data_ptr() == ROWS.data_ptr()  # not copied
    # Passes that stop early or have other batches are no other rows.
    stream = as_stream(TokenStream(lambda: ROWS, 7), model)
    next(stream.batches(2))
    assert [len(gathered(stream, size)) for size in (1, 2, 7)] == [7, 4, 1]


def test_rows_are_asked_for_as_they_are_needed_and_the_fingerprint_is_computed_once(model):
    asked = []

    def rows():
        for i, row in enumerate(ROWS):
            asked.append(i)
            yield row

    stream = as_stream(TokenStream(rows, 7, row_length=6), model)
    assert stream.n_tokens == 42 and asked == []
    batches = stream.batches(2)
    next(batches)
    assert asked == [0, 1]
    next(batches)
    assert asked == [0, 1, 2, 3]
    starts = []
    stream = TokenStream(lambda: starts.append(1) or ROWS, 7)
    first = as_stream(stream, model).fingerprint()
    passes = len(starts)
    assert stream.fingerprint() == first and len(starts) == passes


def test_a_generator_is_refused_with_the_way_out(model):
    with pytest.raises(TokenError, match=r"tokens are a generator.* give TokenStream\(lambda: \.\.\., n_rows=\.\.\.\)"):
        as_stream((row for row in ROWS), model)
    with pytest.raises(TokenError, match=r"needs a function that starts the rows anew, got list"):
        TokenStream(ROWS.tolist(), 7)
    for n_rows in (0, -1, 1.5):
        with pytest.raises(TokenError, match=f"n_rows must be a whole number of at least 1, got {n_rows}"):
            TokenStream(lambda: ROWS, n_rows)


def test_too_few_rows(model):
    with pytest.raises(TokenError, match=r"holds 7 rows, where n_rows=8 were asked for"):
        gathered(as_stream(TokenStream(lambda: ROWS, 8), model))
    with pytest.raises(TokenError, match=r"holds 0 rows, where n_rows=8"):
        _ = TokenStream(list, 8).n_tokens
    once = iter(ROWS)
    stream = as_stream(TokenStream(lambda: once, 7), model)
    gathered(stream)
    with pytest.raises(TokenError, match=r"gave rows once and none now: its function must start the rows anew"):
        gathered(stream)


def test_other_rows_in_a_second_pass(model):
    endless = itertools.cycle(ROWS)  # goes on where it stopped
    stream = as_stream(TokenStream(lambda: endless, 5), model)
    gathered(stream)
    with pytest.raises(TokenError, match=r"gave other rows than in the pass before: of another first row"):
        gathered(stream)

    shuffled, rows = random.Random(0), ROWS[1:].tolist()

    def shuffle():
        shuffled.shuffle(rows)
        return [ROWS[0].tolist(), *rows]

    stream = as_stream(TokenStream(shuffle, 7), model)
    gathered(stream)
    with pytest.raises(TokenError, match=r"gave other rows than in the pass before: of the same first row, but not"):
        gathered(stream, 2)


def test_bad_rows(model):
    for rows, message in (
        ([[1, 2], [3, 4, 5]], r"row 1 of the stream has 3 tokens, the others 2"),
        ([[1, 2], [3, 20]], r"rows 0 to 1 of the stream: token id 20 at row 1, position 1 is outside the vocabulary"),
        ([[0.5, 1.0], [0.5, 1.0]], r"rows 0 to 1 of the stream: tokens must be integers, got torch.float32"),
        ([np.ones(2), np.ones(2)], r"tokens must be integers, got float64"),
        (["ab", "cd"], r"row 0 of the stream is no row of integers"),
        ([[[1, 2]], [[1, 2]]], r"row 0 of the stream has shape \(1, 2\)"),
        ([[], []], r"row 0 of the stream has shape \(0,\)"),
        (ROWS, r"row 0 of the stream has 6 tokens, the others 5"),
        ([*ROWS[:3], *ROWS[3:, :5]], r"row 3 of the stream has 5 tokens, the others 6"),
        ([[1] * 33] * 2, r"rows of 33 tokens do not fit the host's context of 32"),
    ):
        with pytest.raises(TokenError, match=message):
            length = 5 if "others 5" in message else None
            gathered(as_stream(TokenStream(lambda rows=rows: rows, len(rows), row_length=length), model))


def test_the_vocabulary_is_that_of_the_host_at_use(model):
    stream = TokenStream(lambda: [[1, 30]], 1)
    assert gathered(stream) == [[[1, 30]]]  # bound to no host yet
    with pytest.raises(TokenError, match=r"outside the vocabulary \(0 to 19\)"):
        gathered(as_stream(stream, model))
    assert gathered(as_stream(stream, toy_model(d_vocab=31))) == [[[1, 30]]]


def test_both_parts_of_a_text_count_what_it_counted(model):
    rows = torch.arange(40).reshape(5, 8) % 11
    mask = torch.ones(5, 8, dtype=torch.int64)
    mask[4, 6:] = 0
    stream = as_stream(rows, model, exclude=[3], attention_mask=mask)
    first, second = split_rows(stream, 3)
    assert torch.equal(torch.cat(list(first.batches(2))), rows[:3]) and (first.n_rows, second.n_rows) == (3, 2)
    behind = torch.cat(list(second.batches(8)))
    counted = stream.counted(torch.cat(list(stream.batches(8))), 0)
    assert torch.equal(second.counted(behind, 0), counted[3:]) and torch.equal(first.counted(rows[:3], 0), counted[:3])
    assert first.n_counted + second.n_counted == stream.n_counted == int(counted.sum())
