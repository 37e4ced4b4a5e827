"""Samples: continuations of several prompts by several hosts, as `generate` made them; a table, plain values, side by side."""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swd_lens.base.display import card

DENSE = "dense"
_MARK = "»"  # printed where a continuation leaves the dense one


@dataclass(frozen=True)
class Continuation:
    """What one host wrote behind one prompt.

    Attributes:
        tokens: the new ids; EOS, if it came, is the last.
        text: decoded, EOS left out; None without a tokenizer.
        stop: "eos", "length" (max_new_tokens) or "context" (prompt and new tokens fill n_ctx).
        departs: index in `tokens` of the first one that differs from the dense host's; None if none does.
    """

    tokens: tuple[int, ...]
    text: str | None
    stop: str
    departs: int | None


@dataclass(frozen=True)
class Sample:
    """One prompt, and what each host made of it: label -> Continuation, "dense" first."""

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    by_host: Mapping[str, Continuation]


@dataclass(frozen=True, repr=False)
class Samples:
    """Continuations of several prompts by several hosts; printing it shows them side by side.

    Attributes:
        samples: one per prompt, in their order.
        settings: max_new_tokens, temperature, seed, and whether prompts begin with BOS (None: prompts were token rows).
    """

    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"settings": dict(self.settings), "samples": [asdict(sample) for sample in self.samples]}

    def table(self) -> pd.DataFrame:
        """One row per prompt and host; "departs at" counts new tokens from 0, empty where the dense host's are the same."""
        rows = [
            {
                "prompt": _shown(sample.prompt, sample.prompt_tokens),
                "host": label,
                "new tokens": len(one.tokens),
                "departs at": one.departs,
                "stop": one.stop,
                "text": _shown(one.text, one.tokens),
            }
            for sample in self.samples
            for label, one in sample.by_host.items()
        ]
        return pd.DataFrame(rows).astype({"departs at": "Int64"})

    def side_by_side(self, width: int = 100) -> str:
        """Plain text, one column per host, wrapped to `width` characters."""
        out = io.StringIO()
        console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
        console.print(Text(self._title()))
        for number, sample in enumerate(self.samples):
            console.print(Text(f"\n[{number}] {_visible(_shown(sample.prompt, sample.prompt_tokens))}"))
            console.print(_columns(sample))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _title(self) -> str:
        temperature = self.settings["temperature"]
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}, seed {self.settings['seed']}"
        return f"Samples: {len(self.samples)} prompts, {how}; {_MARK} marks where a continuation leaves the dense one"

    def __repr__(self) -> str:
        return self.side_by_side()

    def _repr_html_(self) -> str:
        rows = [
            {"prompt": _cut(_visible(_shown(sample.prompt, sample.prompt_tokens))), "host": label}
            | {"how": _fate(one, sample.by_host[DENSE]), "text": _cut(_marked(one, sample.by_host[DENSE]))}
            for sample in self.samples
            for label, one in sample.by_host.items()
        ]
        return card(self._title(), pd.DataFrame(rows, columns=["prompt", "host", "how", "text"]))


# ---------------------------------------------------------------------------------------------- words


def _cut(text: str, longest: int = 600) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _columns(sample: Sample) -> Table:
    shown = Table(box=SIMPLE, expand=True, padding=(0, 1))
    dense = sample.by_host[DENSE]
    for label in sample.by_host:
        shown.add_column(Text(label), ratio=1, overflow="fold")
    shown.add_row(*(Text(_fate(one, dense)) for one in sample.by_host.values()))
    shown.add_row(*(Text(_marked(one, dense)) for one in sample.by_host.values()))
    return shown


def _fate(one: Continuation, dense: Continuation) -> str:
    """How it went: "40 tokens", "departs at 7; EOS after 12 tokens"."""
    n = f"{len(one.tokens)} tokens"
    end = {"eos": f"EOS after {n}", "context": f"{n}, context full", "length": n}[one.stop]
    if one is dense:
        return end
    return f"same; {end}" if one.departs is None else f"departs at {one.departs}; {end}"


def _marked(one: Continuation, dense: Continuation) -> str:
    """The text with a mark where it leaves the dense host's."""
    if one.text is None or dense.text is None:
        return " ".join(_MARK * (place == one.departs) + str(token) for place, token in enumerate(one.tokens))
    if one.departs is None:
        return _visible(one.text)
    same = sum(a == b for a, b in _prefix(one.text, dense.text))
    return f"{_visible(one.text[:same])}{_MARK}{_visible(one.text[same:])}"


def _prefix(left: str, right: str) -> list[tuple[str, str]]:
    """The characters that two texts begin with alike, as pairs."""
    pairs = list(zip(left, right, strict=False))
    return pairs[: next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))]


def _shown(text: str | None, tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) if text is None else text


def _visible(text: str) -> str:
    """Line breaks as a sign, and nothing that would move the columns."""
    signs = {"\n": "↵ "}
    return "".join(c if c.isprintable() else signs.get(c, c.encode("unicode_escape").decode()) for c in text)
