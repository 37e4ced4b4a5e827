"""What a report shows beside numbers, as plain data that run.json can keep: attention views, and sections of a study's own.

1. An `AttentionView` is positions, names and values: patterns of heads, or whatever has the same shape (contributions of a QK
   pair, with signs).
2. A `ReportSection` is a title, paragraphs, pictures and tables. All its text is plain; the report escapes it.
3. A `SectionGraph` is a unit graph as data, and what its page shows beside it; the report makes the page of it, so that no script
   of a run.json is ever run.
4. A picture is an SVG of our own figures with a title and a description for those who do not see it. The text of a run.json
   may come from anywhere: what is more than a drawing (scripts, event handlers, anything loaded) is refused when a picture is
   made, loaded ones too, and what remains is written anew, so that a browser sees what was checked.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.graph import AttentionPaths, Replays, UnitGraph
from swd_lens.base.errors import legible, quoted, visible_lines
from swd_lens.base.figures import STANDALONE, svg
from swd_lens.base.files import plain
from swd_lens.base.record import PlainRecord

Cell = str | int | float | None
DIGITS = 4  # of a view's values: finer than any screen shows

_NAMESPACE = "{http://www.w3.org/2000/svg}"
# What matplotlib and hand-made graphs draw with; links and scripts are not here.
_DRAWING = (
    "svg g defs title desc path rect circle ellipse line polyline polygon text tspan use clipPath marker pattern symbol image "
    "linearGradient radialGradient stop"
)
_ELEMENTS = frozenset(_DRAWING.split())
_LEFT_OUT, _WORDS = ("style", "metadata"), ("title", "desc")
_LOADING = ("href", "src")
# Pixels may lie in the file itself (imshow), and one part of a drawing may use another; nothing else is referred to.
_OWN_PIXELS, _OWN_PART = "data:image/png;base64,", "#"
# What style sheets load things with, but for one's own parts; they know no upper and lower case.
_FETCHES = re.compile(r"url\(\s*[\"']?(?!#)|image-set\(|image\(|src\(|cross-fade\(|@import|\\", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionView(PlainRecord):
    """Values of several heads (or pairs of units) over the positions of one prompt.

    Attributes:
        kind: what the values are: "dense patterns", "replaced patterns", or a name of one's own.
        title: heading of the panel.
        task: whose prompt it is; "" for none. Views of a task stand together.
        tokens: strings of the positions.
        names: of the heads.
        values: (head, dest, src), rounded to DIGITS.
        signed: values below zero mean something (contributions, differences); else they are probabilities.
        caption: what to look at, in a sentence or two.
        measures: what was measured -> head -> number; also of heads that are not drawn.

    Raises:
        ValueError: tokens or names do not fit the values, or a value is not finite.
    """

    kind: str
    title: str
    task: str
    tokens: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[tuple[tuple[float, ...], ...], ...]
    signed: bool = False
    caption: str = ""
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
        """A view of a tensor; raises ValueError as the class does."""
        rounded = tuple(tuple(tuple(round(v, DIGITS) for v in row) for row in head) for head in values.tolist())
        return cls(values=rounded, tokens=tuple(tokens), names=tuple(names), **others)

    def tensor(self) -> Float[Tensor, "head dest src"]:
        """The values as a tensor."""
        return torch.tensor(self.values, dtype=torch.float32).reshape(len(self.names), len(self.tokens), -1)


@dataclass(frozen=True)
class Picture(PlainRecord):
    """One drawing.

    Attributes:
        svg: an <svg> element with a viewBox from 0 0; kept as `drawing` cleans it.
        title, description: what it shows, for those who do not see it.
        caption: printed below it.
    """

    svg: str
    title: str
    description: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "svg", drawing(self.svg))

    @classmethod
    def of(cls, figure: Figure, title: str, description: str = "", caption: str = "") -> "Picture":
        """A matplotlib figure as a picture."""
        return cls(svg(figure), title, description, caption)

    def as_file(self) -> str:
        """The drawing as a file of its own: with SVG's namespace, its title, and both grounds."""
        head, _, rest = self.svg.partition(">")
        named = head.replace("<svg", f'<svg xmlns="{_NAMESPACE[1:-1]}"', 1)
        return f"{named}><title>{escape(self.title)}</title>{STANDALONE}{rest}"


@dataclass(frozen=True)
class SectionTable(PlainRecord):
    """One table: a caption, the names of its columns, and rows of text, numbers and None (shown as a dash)."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a table of {len(self.columns)} columns has rows of other lengths")


@dataclass(frozen=True)
class SectionGraph(PlainRecord):
    """A unit graph for readers to look into, as plain values.

    Attributes:
        graph, attention, replays: what `UnitGraph`, `AttentionPaths` and `Replays` gave as_dict; the last two may be missing.

    Raises:
        ValueError: they are something else, or of other graphs.
    """

    graph: Mapping[str, Any]
    attention: Mapping[str, Any] | None = None
    replays: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.page()

    @classmethod
    def of(
        cls, graph: UnitGraph, attention: AttentionPaths | None = None, replays: Replays | None = None
    ) -> "SectionGraph":
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
    """One section of the report.

    Attributes:
        title: its heading; `short` is what the list of contents says (the title, where empty).
        intro: one string per paragraph, plain text.
        pictures, tables: in the order in which they are shown, pictures first.
        graph: to be unfolded below the pictures.
    """

    title: str
    intro: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[SectionTable, ...] = ()
    short: str = ""
    graph: SectionGraph | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` takes them back."""
        values = super().as_dict()
        if self.graph is None:
            del values["graph"]
        return values


def drawing(text: str) -> str:
    """The text of one <svg> element that only draws, without comments, style sheets and metadata.

    Raises:
        ValueError: no SVG; an element, attribute or reference that does more than draw.
    """
    # No entities: a few of them could unfold to gigabytes.
    if not text.startswith("<svg") or "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError(
            f"a picture is one <svg> element, as swd_lens.base.figures.svg writes it; got {quoted(text[:40])}"
        )
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as cause:
        raise ValueError(f"this picture is no well-formed SVG: {legible(cause)}") from cause
    try:
        _clean(root)
        cleaned = ElementTree.tostring(root, encoding="unicode")
    except RecursionError:
        raise ValueError("this picture's elements are nested too deeply for a drawing") from None
    if not re.fullmatch(r"0 0( [0-9]+(\.[0-9]+)?){2}", root.get("viewBox", "")):
        raise ValueError(f"a picture needs a viewBox from 0 0, got {quoted(root.get('viewBox'))}")
    return cleaned


def _clean(element: ElementTree.Element) -> None:
    """Check an element and all below it; names lose their namespaces."""
    name = element.tag.removeprefix(_NAMESPACE)
    if name not in _ELEMENTS:
        raise ValueError(f"a picture may not hold <{legible(name)}>; it may hold {', '.join(sorted(_ELEMENTS))}")
    if name in _WORDS and len(element):
        raise ValueError(f"<{legible(name)}> of a picture holds text only")
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    for key, value in attributes.items():
        _check_attribute(name, key, value)
    element.tag = name
    element.attrib.clear()
    element.attrib.update(attributes)
    # Its text; attributes are shapes, where line ends and tabs only part numbers.
    element.text, element.tail = (text and visible_lines(text) for text in (element.text, element.tail))
    for child in list(element):
        if child.tag.removeprefix(_NAMESPACE) in _LEFT_OUT:
            element.remove(child)
        else:
            _clean(child)


def _check_attribute(element: str, name: str, value: str) -> None:
    # In a page the names are HTML's, where ONLOAD is onload.
    lower = name.lower()
    if lower.startswith("on"):
        raise ValueError(f"a picture may not act: <{legible(element)}> has {legible(name)}")
    loads_own = value.startswith(_OWN_PART) or (element == "image" and value.startswith(_OWN_PIXELS))
    if lower in _LOADING and not loads_own:
        raise ValueError(f"a picture may not load anything: <{legible(element)}> refers to {quoted(value[:60])}")
    if not lower.startswith("aria-") and _FETCHES.search(value):
        raise ValueError(
            f"a picture may not load anything: {legible(name)}={quoted(value[:60])} of <{legible(element)}>"
        )
