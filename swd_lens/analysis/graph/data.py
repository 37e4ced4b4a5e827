"""GraphData: the nodes and edges of a unit graph as tables, and how they were made.

`table` makes both tables with the same columns and types wherever they come from; `records` gives rows back as plain values.
What draws, shows or exports a graph reads these; `UnitGraph` (result.py) has all of it as methods.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from swd_lens.base.record import Record

NODES = {
    **dict.fromkeys(("node", "kind"), "object"),
    "layer": "Int64",
    "site": "object",
    **dict.fromkeys(("unit", "position", "token"), "Int64"),
    "label": "object",
    "head": "object",
    **dict.fromkeys(("probability", "score"), "float64"),
    "rank": "Int64",
    **dict.fromkeys(("activation", "rest", "influence"), "float64"),
}
EDGES = {
    **dict.fromkeys(("source", "target", "kind"), "object"),
    **dict.fromkeys(("weight", "contribution", "strength", "varies"), "float64"),
}
FORMAT, VERSION = "swd_lens unit graph", 1  # of what a file holds under "swd_lens"


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows as a table; what a row lacks is None, NaN or NA, as the column's type has it."""
    rows = list(rows)
    series = {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in columns.items()}  # pyright: ignore[reportArgumentType,reportCallIssue]
    return pd.DataFrame(series)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain values; what is missing is None."""
    plain = frame.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, repr=False, eq=False)
class GraphData(Record):
    """The tables and settings of a unit graph; see `UnitGraph` for the columns."""

    nodes: pd.DataFrame
    edges: pd.DataFrame
    settings: Mapping[str, Any]

    @property
    def has_prompt(self) -> bool:
        return self.settings["token_ids"] is not None

    def table(self, n: int | None = None) -> pd.DataFrame:
        """The n strongest edges (None: all); answers are called by their tokens."""
        left_out = ["contribution"] * (not self.has_prompt) + ["varies"] * bool(self.edges["varies"].isna().all())
        edges = self.edges.drop(columns=left_out)
        shown = self.shown_names()
        ends = {end: edges[end].map(shown) for end in ("source", "target")}
        return edges.assign(**ends).head(len(edges) if n is None else n).reset_index(drop=True)

    def shown_names(self) -> dict[str, str]:
        """Node -> its name where people read it: tokens and answers by their text, as far as that tells them apart."""
        kinds = {"unit": "{node}", "token": "{node} {label}", "logit": "logit {label}"}
        rows = [row for row in records(self.nodes) if row["label"]]
        texts = {str(row["node"]): kinds[row["kind"]].format(**row) for row in rows}
        once = {text for text, count in Counter(texts.values()).items() if count == 1}
        return {name: texts[name] if texts.get(name) in once else name for name in self.nodes["node"]}

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `UnitGraph.from_dict` takes them back."""
        return {"settings": dict(self.settings), "nodes": records(self.nodes), "edges": records(self.edges)}

    def __repr__(self) -> str:
        counts = self.nodes["kind"].value_counts()
        prompt = self.settings["prompt"] or ""
        prompt = prompt if len(prompt) <= 60 else "…" + prompt[-59:]
        where = f", on {prompt!r}" if self.has_prompt else ", no prompt"
        if n_prompts := self.settings.get("task_prompts"):
            where = f", mean of {n_prompts} prompts like {prompt!r}"
        return (
            f"UnitGraph({counts.get('unit', 0)} units, {counts.get('token', 0)} tokens, {counts.get('logit', 0)} answers, "
            f"{len(self.edges)} of {self.settings['edges_possible']} edges{where}, attention {self.settings['attention']})"
        )


def require_same_factors(graph: GraphData, identities: Mapping[str, str], what: str) -> None:
    """Check that `what`, with these identities by site, is of the factors that the graph was made of. Raises ValueError: a
    site of both has other factors."""
    own = dict(graph.settings.get("factors") or {})
    others = [site for site, identity in identities.items() if own.get(site, identity) != identity]
    if others:
        raise ValueError(
            f"{what}: the graph was made of other factors of {', '.join(others)}, where unit i is another unit; give "
            "those that it was made of"
        )
