"""UnitLabels: what people or models call units, kept apart from the factors and checked against them.

1. One line of JSON per label, {"unit", "label", "note", "author", "factors"}, where "factors" is the identity of the site's
   factors: unit 5 of other factors is another unit. The lines of `Audit.export` with "label" filled in are read as well.
2. Labels may be typed by hand: "unit" and "label" are enough. What we write is sealed all the same: every line of `save` and of
   an export has a "sha256" over the others of its values, and "label", "note" and "author" may be filled in where they were
   empty; "line" and "lines" say whether all are there. Lines added by hand are free.
3. A hash that no longer fits is refused; who changed the line on purpose takes the hash out. Lines that carry an identity, so
   that we wrote them, but no hash, are read with one warning.

Labels never take part in a ranking (paper app. E.1).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from swd_lens.base.display import card
from swd_lens.base.errors import encodable, legible, quoted, seen
from swd_lens.base.files import plain, write_text
from swd_lens.base.sealed import SEAL, damaged, marked, readable, seal, warn_of_missing_seal
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.sites import parse_unit
from swd_lens.units.keys import read_unit


@dataclass(frozen=True)
class UnitLabel:
    """A unit's name in words, a remark, and who gave it."""

    label: str
    note: str = ""
    author: str = ""

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, encodable(text))


# Plain at run time: checkers of types would look into every value.
_Base = Mapping[str, UnitLabel] if TYPE_CHECKING else Mapping


@with_torch_defaults
@dataclass(frozen=True, repr=False, eq=False)
class UnitLabels(_Base):
    """Unit name -> UnitLabel.

    Attributes:
        labels: what this mapping holds.
        factors: site -> identity of the factors that the labels are for; a site may be missing where it is not known.
    """

    labels: Mapping[str, UnitLabel]
    factors: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels: Any = self.labels
        if not isinstance(labels, Mapping):
            raise TypeError(
                f"labels are a mapping from unit names to labels, got a {type(labels).__name__}; "
                "UnitLabels.of(audit.identities, {'blocks.2.mlp_out/8': 'pronouns'}) makes them of texts"
            )
        for unit, label in labels.items():
            if not isinstance(label, UnitLabel):
                raise TypeError(
                    f"the label of {legible(unit)} is a {type(label).__name__}, not a UnitLabel; "
                    f"UnitLabels.of(audit.identities, {{{quoted(unit)}: 'its label'}}) makes labels of texts"
                )

    @classmethod
    def of(cls, factors: Mapping[str, str], labels: Mapping[Any, Any], *, author: str = "") -> "UnitLabels":
        """Labels from plain values.

        Args:
            factors: site -> identity (`Audit.identities`).
            labels: unit (its name, or a pair) -> text, UnitLabel, or a mapping with "label" and perhaps "note" and "author".
                Empty texts are left out.
            author: where a label does not say.

        Raises:
            ValueError: a name that is no unit's, or a label that is no text.
        """
        named = {"{}/{}".format(*read_unit(unit, factors)): value for unit, value in labels.items()}
        by_unit = {unit: _label(unit, value, author) for unit, value in named.items()}
        sites = {parse_unit(unit)[0] for unit in by_unit}
        return cls(
            {unit: label for unit, label in by_unit.items() if label.label},
            {site: identity for site, identity in factors.items() if site in sites},
        )

    @classmethod
    def load(cls, path: str | Path) -> "UnitLabels":
        """Read labels, or an export with labels filled in.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: a line that is no label, lines whose hash is another or that are missing, a unit labelled twice, labels
                of two sets of factors in one file, or an empty file.
        """
        labels: dict[str, UnitLabel] = {}
        factors: dict[str, str] = {}
        for number, entry in _entries(Path(path)):
            try:
                if not isinstance(entry.get("unit"), str):
                    raise ValueError('expected an object with "unit" and "label"')
                unit, label = entry["unit"], _label(entry["unit"], entry, "")
                site, identity = parse_unit(unit)[0], entry.get("factors") or ""
                if not isinstance(identity, str):
                    raise ValueError(f"the factors of {legible(unit)} must be text, got {quoted(identity)}")
            except (ValueError, TypeError) as cause:
                raise ValueError(f"line {number} of {legible(path)} is no label: {legible(cause)}") from None
            if not label.label:
                continue
            if unit in labels:
                raise ValueError(f"line {number} of {legible(path)} labels {legible(unit)} a second time; keep one of the lines")
            if identity and factors.setdefault(site, identity) != identity:
                raise ValueError(
                    f"line {number} of {legible(path)}: {legible(unit)} is of other factors than the lines before; keep one "
                    "file each"
                )
            labels[unit] = label
        return cls(labels, factors)

    def save(self, path: str | Path) -> Path:
        """Write the labels, sealed and atomically; returns the path."""
        lines = [
            {"unit": unit, **asdict(label), "factors": self.factors.get(parse_unit(unit)[0], "")}
            | {"line": number, "lines": len(self.labels)}
            for number, (unit, label) in enumerate(self.labels.items(), 1)
        ]
        lines = lines or [{"lines": 0}]  # an empty file would be a damaged one
        path = Path(path)
        write_text(path, "".join(map(sealed_line, lines)))
        return path

    def require(self, identities: Mapping[str, str], n_units: Mapping[str, int]) -> None:
        """Check that the labels are of these factors; labels of other sites pass.

        Raises:
            ValueError: labels of other factors, of units that the factors do not have, or of none of the sites.
        """
        sites = {parse_unit(unit)[0] for unit in self.labels}
        if sites and not sites & set(identities):
            raise ValueError(
                f"the labels are of {', '.join(sorted(sites))}, the audit is of {', '.join(identities)}; no site is in both"
            )
        others = [site for site in sorted(sites & set(identities)) if self._differs(site, identities[site])]
        if others:
            raise ValueError(
                f"the labels of {', '.join(others)} were made for other factors (same names, other weights), where unit i "
                "is another unit; audit the factors that were labelled, or label these anew"
            )
        for unit in self.labels:
            site, index = parse_unit(unit)
            if index >= n_units.get(site, index + 1):
                raise ValueError(f"a label names {legible(unit)}, but {site} has {n_units[site]} units, counted from 0")

    def __or__(self, other: "UnitLabels") -> "UnitLabels":
        """Both; where both name a unit, the right one's label. Raises ValueError where they are of different factors."""
        differ = [site for site, identity in other.factors.items() if self._differs(site, identity)]
        if differ:
            raise ValueError(f"these labels are of two different sets of factors at {', '.join(differ)}; keep them apart")
        return UnitLabels({**self.labels, **other.labels}, {**self.factors, **other.factors})

    def text(self, unit: str) -> str:
        """The label of a unit; empty where it has none."""
        return self.labels[unit].label if unit in self.labels else ""

    def table(self) -> pd.DataFrame:
        rows = [{"unit": unit, "label": x.label, "note": x.note, "author": x.author} for unit, x in self.labels.items()]
        return pd.DataFrame(rows, columns=["unit", "label", "note", "author"])

    def __getitem__(self, unit: str) -> UnitLabel:
        return self.labels[unit]

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    @seen
    def __repr__(self) -> str:
        first = ", ".join(f"{unit}: {label.label!r}" for unit, label in list(self.labels.items())[:3])
        return f"UnitLabels({len(self)} labels{'; ' + first if first else ''}{', ...' if len(self) > 3 else ''})"

    def _repr_html_(self) -> str:
        return card(f"{len(self)} labels", self.table())

    def _differs(self, site: str, identity: str) -> bool:
        own = self.factors.get(site, "")
        return bool(own and identity and own != identity)


# ---------------------------------------------------------------------------------------------- lines


def jsonl_line(values: Mapping[str, Any]) -> str:
    """A line of JSON that UTF-8 can write: a lone surrogate (half of an emoji, cut by a tokenizer) becomes "?"."""
    text = json.dumps(plain(values), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace").decode("utf-8") + "\n"


def sealed_line(values: Mapping[str, Any]) -> str:
    """A line of an export, with its hash."""
    written = json.loads(jsonl_line(values))  # what a reader will see
    return jsonl_line({**written, SEAL: _digest(written)})


def _digest(values: Any) -> str:
    return str(seal({"values": _as_any_tool_writes(values)})[SEAL])


def _as_any_tool_writes(values: Any) -> Any:
    """1.0 as 1: labels are filled in by tools of other languages, which know one kind of number."""
    if isinstance(values, dict):
        return {name: _as_any_tool_writes(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_as_any_tool_writes(value) for value in values]
    return int(values) if isinstance(values, float) and values.is_integer() else values


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, values) of every line of a unit. Hashes are checked; raises ValueError as `UnitLabels.load` does."""
    with readable(path, "labels"):
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark in front
    if not text.strip():
        raise ValueError(damaged(path, "labels", "it is empty"))
    unsealed = False
    sealed: dict[int, Counter[int]] = {}  # lines of a file of ours -> how often each is there: files may be put together
    # By "\n" alone: U+2028 and its like stand unescaped within JSON strings, and splitlines would cut them there.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError('expected an object with "unit" and "label"')
            digest = _digest({name: value for name, value in entry.items() if name != SEAL})  # JSON cannot have all
        except (ValueError, RecursionError) as cause:
            raise ValueError(f"line {number} of {legible(path)} is no label: {legible(cause)}") from None
        if SEAL in entry or marked(entry):
            emptied = entry | dict.fromkeys(("label", "note", "author"), "")
            emptied.pop(SEAL, None)
            if entry.get(SEAL) not in (digest, _digest(emptied)):
                raise ValueError(
                    f"line {number} of {legible(path)} carries a hash of other values in it: something was changed since it "
                    f'was written. Restore the file; if you changed it on purpose, remove its "{SEAL}" and load it again'
                )
            place, n_lines = entry.get("line"), entry.get("lines")
            if n_lines == 0:
                continue
            if type(place) is int and type(n_lines) is int:
                sealed.setdefault(n_lines, Counter())[place] += 1
        else:
            unsealed |= bool(entry.get("factors"))
        yield number, entry
    for n_lines, there in sealed.items():
        if missing := [line for line in range(1, n_lines + 1) if there[line] < max(there.values())]:
            raise ValueError(
                f"{legible(path)} holds {n_lines - len(missing)} of the {n_lines} lines that were written; line {missing[0]} is "
                "the first that is missing. Restore the file; if you took lines out on purpose, remove "
                '"sha256" from the others and load it again'
            )
    if unsealed:
        warn_of_missing_seal(path)


def _label(unit: str, value: Any, author: str) -> UnitLabel:
    parse_unit(unit)
    if isinstance(value, UnitLabel):
        return value
    parts = value if isinstance(value, Mapping) else {"label": value}
    texts = {key: parts.get(key) or "" for key in ("label", "note", "author")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"the {legible(key)} of {legible(unit)} must be text, got {quoted(text)}")
    return UnitLabel(texts["label"].strip(), texts["note"], texts["author"] or author)
