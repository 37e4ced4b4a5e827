"""Attention views and sections of a study's own: what a report shows beside numbers, as plain data that run.json can keep.

1. An `AttentionView` is positions, names and values: patterns of heads, or whatever has the same shape (contributions of a QK
   pair, with signs).
2. A `ReportSection` is a title, paragraphs, pictures and tables. All its text is plain; the report escapes it.
3. A `SectionGraph` is a unit graph as data, and what its page shows beside it; the report makes the page of it, so that no script
   of a run.json is ever run.
4. A picture is an SVG. The text of a run.json may come from anywhere: the report shows a picture as an <img>, in which a browser
   runs no script and loads nothing.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import Any
from xml.sax.saxutils import escape

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.graph import AttentionPaths, Replays, UnitGraph
from swd_lens.base.errors import quoted
from swd_lens.base.figures import STANDALONE, svg
from swd_lens.base.files import plain
from swd_lens.base.record import PlainRecord

Cell = str | int | float | None
DIGITS = 4  # of a view's values: finer than any screen shows


@dataclass(frozen=True)
class AttentionView(PlainRecord):
    """Values of several heads (or pairs of units) over the positions of one prompt.

    Raises:
        ValueError: tokens or names do not fit the values, or a value is not finite.
    """

    kind: str  # what the values are: "dense patterns", "replaced patterns", or a name of one's own
    title: str  # heading of the panel
    task: str  # whose prompt it is; "" for none. Views of a task stand together.
    tokens: tuple[str, ...]  # strings of the positions
    names: tuple[str, ...]  # of the heads
    values: tuple[tuple[tuple[float, ...], ...], ...]  # (head, dest, src), rounded to DIGITS
    signed: bool = False  # values below zero mean something (contributions, differences); else they are probabilities
    caption: str = ""  # what to look at, in a sentence or two
    # what was measured -> head -> number; also of heads that are not drawn
    measures: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, names = len(self.tokens), len(self.names)
        if len(self.values) != names or any(len(row) != n for head in self.values for row in (head, *head)):
            shape = (len(self.values), *(len(side) for head in self.values[:1] for side in (head, *head[:1])))
            raise ValueError(f"values are {shape} (head, dest, src), but there are {names} names and {n} tokens")
        if not all(isfinite(value) for head in self.values for row in head for value in row):
            raise ValueError("values must be finite; give zeros where nothing is seen")

    @classmethod
    def of(
        cls, values: Float[Tensor, "head dest src"], tokens: Sequence[str], names: Sequence[str], **others: Any
    ) -> "AttentionView":
        """Make a view of a tensor; raise ValueError as the class does."""
        rounded = tuple(tuple(tuple(round(v, DIGITS) for v in row) for row in head) for head in values.tolist())
        return cls(values=rounded, tokens=tuple(tokens), names=tuple(names), **others)

    def tensor(self) -> Float[Tensor, "head dest src"]:
        """The values as a tensor."""
        return torch.tensor(self.values, dtype=torch.float32).reshape(len(self.names), len(self.tokens), -1)


@dataclass(frozen=True)
class Picture(PlainRecord):
    """One drawing.

    Raises:
        ValueError: another text.
    """

    svg: str  # an <svg> element that could be a file of its own, as `swd_lens.base.figures.svg` writes it
    title: str  # title, description: what it shows, for those who do not see it
    description: str = ""
    caption: str = ""  # printed below it

    def __post_init__(self) -> None:
        if not self.svg.startswith("<svg"):
            raise ValueError(
                f"a picture is one <svg> element, as swd_lens.base.figures.svg writes it; got {quoted(self.svg[:40])}"
            )

    @classmethod
    def of(cls, figure: Figure, title: str, description: str = "", caption: str = "") -> "Picture":
        """Draw a matplotlib figure as a picture."""
        return cls(svg(figure), title, description, caption)

    def as_file(self) -> str:
        """Give the drawing with its title, as the text of a file."""
        head, _, rest = self.svg.partition(">")
        return f"{head}><title>{escape(self.title)}</title>{rest}"

    def address(self) -> str:
        """Give the drawing as the address of an <img>, for the white ground of a page's panel."""
        on_white = self.svg.replace(STANDALONE, "")
        return f"data:image/svg+xml;base64,{base64.b64encode(on_white.encode()).decode('ascii')}"


@dataclass(frozen=True)
class SectionTable(PlainRecord):
    """One table: a caption, the names of its columns, and rows of text, numbers and None (shown as a dash)."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a table of {len(self.columns)} columns has rows of other lengths")

    @classmethod
    def of(cls, caption: str, frame: pd.DataFrame, digits: int | None = None) -> "SectionTable":
        """Make a DataFrame a table; NA and NaN become None. digits: that numbers keep, None = all."""
        rows = tuple(tuple(_cell(value, digits) for value in row) for row in frame.itertuples(index=False))
        return cls(caption, tuple(map(str, frame.columns)), rows)


def _cell(value: Any, digits: int | None) -> Cell:
    value = plain(value.item() if hasattr(value, "item") else value)
    if value is None or value is pd.NA or (isinstance(value, float) and isnan(value)):
        return None
    if isinstance(value, float) and digits is not None:
        return float(f"{value:.{digits}g}") if isfinite(value) else "∞"
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else str(value).lower()


@dataclass(frozen=True)
class SectionGraph(PlainRecord):
    """A unit graph for readers to look into, as plain values. graph, attention, replays: what `UnitGraph`, `AttentionPaths`
    and `Replays` gave as_dict; the last two may be missing. Raises ValueError: they are something else, or of other graphs."""

    graph: Mapping[str, Any]
    attention: Mapping[str, Any] | None = None
    replays: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.page()

    @classmethod
    def of(cls, graph: UnitGraph, attention: AttentionPaths | None = None, replays: Replays | None = None) -> "SectionGraph":
        """The values of a graph and what belongs to it."""
        values = (None if each is None else plain(each.as_dict()) for each in (graph, attention, replays))
        return cls(*values)  # pyright: ignore[reportArgumentType]

    def page(self) -> str:
        """The page, as HTML of its own."""
        graph = UnitGraph.from_dict(self.graph)
        attention = None if self.attention is None else AttentionPaths.from_dict(self.attention)
        replays = None if self.replays is None else Replays.from_dict(self.replays)
        return graph.show(attention=attention, replays=replays).html


@dataclass(frozen=True)
class ReportSection(PlainRecord):
    """One section of the report."""

    title: str  # its heading; `short` is what the list of contents says (the title, where empty)
    intro: tuple[str, ...] = ()  # one string per paragraph, plain text
    pictures: tuple[Picture, ...] = ()  # pictures, tables: in the order in which they are shown, pictures first
    tables: tuple[SectionTable, ...] = ()
    short: str = ""
    graph: SectionGraph | None = None  # to be unfolded below the pictures

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` takes them back."""
        values = super().as_dict()
        if self.graph is None:
            del values["graph"]
        return values
