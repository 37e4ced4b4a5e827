"""Documents of language-model text, one after the other, from wherever a user has them.

1. `documents_of` finds out what a source is: a text file, a known name, or something to iterate over. What can be checked
   without reading is checked at once.
2. A text file is one document, read in blocks; an iterable gives strings, or dicts with "text", as datasets' rows are.
3. A name streams a public dataset with `datasets`. WikiText's rows are lines, so they are put together to articles again.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class TokenError(ValueError):
    """Text or tokens that this host cannot run."""


# name -> (repository, configuration, split)
NAMES = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train"),
    "wikitext:validation": ("Salesforce/wikitext", "wikitext-2-raw-v1", "validation"),
    "wikitext:test": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
}
_BLOCK = 1_000_000  # characters of a file that are tokenized at once: nearly every file whole, none in full memory
_TITLE = re.compile(r"\s*= [^=\s].*? =\s*")  # of a WikiText article; sections have more equals signs


def documents_of(source: Any) -> tuple[Iterator[tuple[bool, str]], str]:
    """The texts of a source, lazily, and what to call the source in messages.

    Returns:
        pairs (whether a new document starts here, text), since a long file comes in several blocks; and a name.

    Raises:
        TokenError: neither a file, nor a known name, nor an iterable of documents.
    """
    if isinstance(source, str | Path) and os.path.isfile(source):  # False, too, for text that is too long for a name
        return _blocks(Path(source)), f"file {Path(source).name}"
    if isinstance(source, str) and source in NAMES:
        return ((True, text) for text in _named(source)), f"dataset {source}"
    if isinstance(source, str | Path):
        raise TokenError(_unknown(str(source)))
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, list(source)[:4]))
        raise TokenError(f"text source is a {type(source).__name__} with {keys}; pass one split of it, source[...]")
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise TokenError(
            f"text source must be a file, a name ({', '.join(NAMES)}) or an iterable of documents, got {type(source).__name__}"
        )
    return ((True, text) for text in _texts(source)), f"the {type(source).__name__} that was passed"


def _unknown(source: str) -> str:
    shown = source if len(source) <= 60 else source[:57] + "..."
    near = difflib.get_close_matches(source.lower(), NAMES, n=2, cutoff=0.4)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{shown!r} is neither a file nor a known text ({', '.join(NAMES)}); text itself is passed as [text].{hint}"


def _blocks(path: Path) -> Iterator[tuple[bool, str]]:
    # Whole lines, because a cut inside a word would make tokens that the text does not have.
    with path.open(encoding="utf-8", newline="") as file:
        first = True
        try:
            while lines := file.readlines(_BLOCK):
                yield first, "".join(lines)
                first = False
        except UnicodeDecodeError as error:
            raise TokenError(f"{path} is not UTF-8 text: {error}") from None


def _texts(documents: Iterable[Any]) -> Iterator[str]:
    for i, document in enumerate(documents):
        if isinstance(document, Mapping) and "text" not in document:
            raise TokenError(f"document {i} has no 'text'; it has {', '.join(map(repr, document))}")
        text = document["text"] if isinstance(document, Mapping) else document
        if not isinstance(text, str):
            raise TokenError(
                f"document {i} must be a string, or a dict with one under 'text', got {type(text).__name__}"
            )
        yield text


def _named(name: str) -> Iterator[str]:
    """Nothing is asked of the network before the first document is."""
    repository, configuration, split = NAMES[name]

    def load() -> Iterator[Any]:
        import datasets  # half a second, so only where it is needed

        return iter(datasets.load_dataset(repository, configuration, split=split, streaming=True))

    rows = _or_offline(load, name)
    lines = _texts(_reading(rows, name))
    yield from _articles(lines) if name.startswith("wikitext") else lines


def _reading(rows: Iterator[Any], name: str) -> Iterator[Any]:
    end = object()
    while (row := _or_offline(lambda: next(rows, end), name)) is not end:
        yield row


def _or_offline(read: Callable[[], Any], name: str) -> Any:
    try:
        return read()
    except Exception as error:  # every layer below (datasets, hub, http client, sockets) has its own classes
        offline = [
            key for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(key) not in (None, "", "0")
        ]
        switch = f"{' and '.join(offline)} is set: unset it, or " if offline else "Check the network, or "
        raise TokenError(
            f"text {name!r} is streamed from huggingface.co/datasets/{NAMES[name][0]}, and that failed: "
            f"{type(error).__name__}: {error}. {switch}pass a local text file or a dataset that you have"
        ) from error


def _articles(lines: Iterator[str]) -> Iterator[str]:
    article: list[str] = []
    for line in lines:
        if _TITLE.fullmatch(line) and any(map(str.strip, article)):
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
