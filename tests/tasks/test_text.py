"""Token rows."""

import itertools
from pathlib import Path

import datasets
import pytest
import torch

from swd_lens.base.errors import TokenError
from swd_lens.tasks.text import as_rows, load_text, pack_text, stream_rows
from tests.micro import random_tokens, toy_model
from tests.tasks.test_task import WORDS, FakeHost


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_one_row_many_and_bad_tokens(model):
    assert as_rows([1, 2, 3], model).tolist() == [[1, 2, 3]]
    rows = as_rows(random_tokens(4, 6).int(), model)
    assert rows.dtype == torch.int64 and torch.equal(rows, random_tokens(4, 6))
    for tokens, message in (
        ([[1, 20, 3]], r"token id 20 at row 0, position 1 is outside the vocabulary \(0 to 19\); 1 such ids"),
        ([[1, 2], [3, -1]], r"token id -1 at row 1, position 1"),
        ([[0.5, 1.0]], r"tokens must be integers, got torch.float32"),
        ([], r"must be (integers|\(rows, pos\) and not empty)"),
        ([[[1]]], r"got shape \(1, 1, 1\)"),
        ([[1] * 33], r"rows of 33 tokens do not fit the host's context of 32"),
    ):
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
    with pytest.raises(TokenError, match="no tokenizer"):
        load_text(DOCUMENTS, host, 8)


@pytest.fixture
def host():
    host = FakeHost()
    host.tokenizer.eos_token = "<bos>"  # id 1
    return host


DOCUMENTS = ["the cat sat", "", "the dog ran", "he sat"]  # ids 2 3 5, nothing, 2 4 6, 7 5


def test_documents_are_joined_by_one_eos_and_packed(host):
    # 2 3 5 EOS 2 4 6 EOS 7 5
    assert load_text(DOCUMENTS, host, 10, context=5).tolist() == [[2, 3, 5, 1, 2], [4, 6, 1, 7, 5]]
    assert load_text(DOCUMENTS, host, 11, context=4).tolist() == [[2, 3, 5, 1], [2, 4, 6, 1]]
    assert load_text(DOCUMENTS, host, 8, separator=None).tolist() == [[2, 3, 5, 2, 4, 6, 7, 5]]
    assert load_text(DOCUMENTS, host, 4, context=4, skip_tokens=4).tolist() == [[2, 4, 6, 1]]
    assert load_text(DOCUMENTS, host, 4, context=2, skip_tokens=5).tolist() == [[4, 6], [1, 7]]
    with pytest.raises(TokenError, match="no EOS token to join documents with; pass separator=None"):
        load_text(DOCUMENTS, FakeHost(), 8)


def test_an_endless_source_is_read_no_further_than_needed(host):
    drawn = []

    def endless():
        for i in itertools.count():
            drawn.append(i)
            yield {"text": "the cat sat", "id": i}

    assert load_text(endless(), host, 16).shape == (2, 8)
    assert len(drawn) == 5  # 3 + 4 + 4 + 4 tokens are one too few
    rows = stream_rows(itertools.repeat("the cat sat"), host, context=4)
    assert [next(rows).tolist() for _ in range(3)] == [[2, 3, 5, 1]] * 3


def test_a_file_is_one_document_whatever_its_length(host, tmp_path, monkeypatch):
    path = tmp_path / "mine.txt"
    path.write_text("the cat sat\n" * 50)
    whole = load_text(path, host, 144)
    assert whole.flatten().tolist() == [2, 3, 5] * 48
    monkeypatch.setattr("swd_lens.tasks.text._BLOCK", 30)  # several blocks: still no EOS between them
    assert torch.equal(load_text(str(path), host, 144), whole)
    path.write_bytes(b"\xef\xbb\xbf" + b"the cat sat\n" * 50)  # as Windows writes it
    assert torch.equal(load_text(path, host, 144), whole)
    path.write_bytes(b"the cat \xff\xfe")
    with pytest.raises(TokenError, match=r"mine.txt is not UTF-8 text"):
        load_text(path, host, 8)


def test_a_file_or_a_string_is_split_at_titles_or_at_blank_lines(host, tmp_path):
    """the 2, cat 3, dog 4, sat 5, ran 6, he 7; EOS 1. `= the =` is a title, `= = dog = =` a section's."""
    path = tmp_path / "mine.txt"
    text = "the cat sat\n \n\nthe dog\nran\n\n"
    path.write_text(text)
    apart = [2, 3, 5, 1, 2, 4, 6]
    assert load_text(path, host, 7, context=7, documents="paragraphs").tolist() == [apart]
    assert pack_text(host, text, 7, documents="paragraphs").tolist() == [apart]
    assert pack_text(host, text, 2, n_tokens=4, documents="paragraphs").tolist() == [[2, 3], [5, 1]]
    assert pack_text(host, text, 6).tolist() == [[2, 3, 5, 2, 4, 6]]
    text = "= the =\n\ncat sat\n = = the = = \n\nhe ran\n= the =\ndog ran"
    path.write_text(text)
    of_file = pack_text(host, text, 1, documents="articles").flatten().tolist()
    assert of_file.count(1) == 1
    first, second = of_file[: of_file.index(1)], of_file[of_file.index(1) + 1 :]
    assert pack_text(host, text[: text.rindex("= the =")], 1).flatten().tolist() == first
    assert pack_text(host, text[text.rindex("= the =") :], 1).flatten().tolist() == second
    assert load_text(path, host, len(of_file), context=1, documents="articles").flatten().tolist() == of_file
    for call in (lambda: pack_text(host, text, documents="pages"), lambda: load_text(path, host, 8, documents="pages")):
        with pytest.raises(TokenError, match=r"must be one of 'one', 'articles', 'paragraphs', got 'pages'"):
            call()
    host.tokenizer.eos_token = None
    with pytest.raises(TokenError, match="no EOS token to join articles with; pass documents='one'"):
        pack_text(host, text, documents="articles")


def test_datasets_of_the_datasets_library(host):
    dataset = datasets.Dataset.from_dict({"text": DOCUMENTS})
    expected = load_text(DOCUMENTS, host, 10, context=5)
    assert torch.equal(load_text(dataset, host, 10, context=5), expected)
    assert torch.equal(load_text(dataset.to_iterable_dataset(), host, 10, context=5), expected)
    with pytest.raises(TokenError, match=r"DatasetDict with 'train'; pass one split of it, source\[...\]"):
        load_text(datasets.DatasetDict(train=dataset), host, 8)
    with pytest.raises(TokenError, match="document 0 has no 'text'; it has 'content'"):
        load_text(dataset.rename_column("text", "content"), host, 8)


def test_bad_text(host):
    for source, how, message in (
        ("fineweb", {}, r"'fineweb' is neither a file nor a known text .* Did you mean 'fineweb-edu'\?"),
        ("the cat sat " * 1000, {}, r"neither a file nor a known text .*; pass text itself as \[text\]"),
        (Path("nowhere.txt"), {}, r"'nowhere.txt' is neither a file"),
        (3, {}, r"must be a file, a name .* or an iterable of documents, got int"),
        (b"the cat", {}, r"or an iterable of documents, got bytes"),
        ([5], {}, r"document 0 must be a string, or a dict with one under 'text', got int"),
        (DOCUMENTS, {"n_tokens": 16}, r"the list that was passed holds too few tokens: 1 whole rows of 8, that is 8 tokens"),
        (DOCUMENTS, {"skip_tokens": 99}, r"too few tokens behind the 99 skipped ones: 0 whole rows of 8"),
        (DOCUMENTS, {"n_tokens": 7}, r"n_tokens \(whole rows\) must be a whole number of at least 8, got 7"),
        (DOCUMENTS, {"context": 9}, r"context \(up to the host's\) must be a whole number from 1 to 8, got 9"),
        (DOCUMENTS, {"skip_tokens": -1}, r"skip_tokens must be a whole number of at least 0, got -1"),
        (DOCUMENTS, {"separator": "bos"}, r"separator must be one of 'eos', None, got 'bos'"),
        (iter(DOCUMENTS), {"skip_tokens": 3}, r"skip_tokens=3 would count from wherever this list_iterator stands"),
    ):
        with pytest.raises(TokenError, match=message):
            load_text(source, host, **{"n_tokens": 8, **how})


def test_every_row_begins_with_bos_where_the_host_does(host):
    host.cfg.default_prepend_bos = True
    # 2 3 5 EOS 2 4 6 EOS 7 5, where BOS and EOS are both 1
    assert load_text(DOCUMENTS, host, 10, context=5).tolist() == [[1, 2, 3, 5, 1], [1, 2, 4, 6, 1]]
    assert load_text(DOCUMENTS, host, 10, context=5, bos=False).tolist() == [[2, 3, 5, 1, 2], [4, 6, 1, 7, 5]]
    assert next(stream_rows(DOCUMENTS, host, context=3)).tolist() == [1, 2, 3]
    assert pack_text(host, "the cat sat", context=3).tolist() == [[1, 2, 3]]
    assert pack_text(host, "the cat sat\n" * 10, context=3, n_tokens=8).shape == (2, 3)
    with pytest.raises(TokenError, match=r"must be a whole number from 2 to 8, got 1"):
        load_text(DOCUMENTS, host, 10, context=1)
    with pytest.raises(TokenError, match="holds 3 tokens, too few for one row of 7"):
        pack_text(host, "the cat sat")
    host.cfg.default_prepend_bos = False
    assert load_text(DOCUMENTS, host, 4, context=4, bos=True).tolist() == [[1, 2, 3, 5]]
    host.tokenizer.bos_token = None
    with pytest.raises(TokenError, match="bos=True, but this tokenizer has no BOS token"):
        load_text(DOCUMENTS, host, 4, context=4, bos=True)


@pytest.mark.parametrize("later", [2, 3, 5, 8])
def test_skipped_tokens_are_tokens_of_the_text(host, later):
    """Held-out rows of any length share no token of the text with what was read before them."""
    text = [" ".join(WORDS[2 + i % 7] for i in range(200))]  # no word twice within seven
    first = load_text(text, host, 48, context=4, bos=True)
    behind = load_text(text, host, 3 * later, context=later, bos=True, skip_tokens=first.numel())
    ids = host.tokenizer(text[0], add_special_tokens=False)["input_ids"]
    assert behind[:, 1:].flatten().tolist() == ids[48 : 48 + 3 * (later - 1)]
    assert first[:, 1:].flatten().tolist() == ids[:36]
