"""UnitGraph: nodes, edges and how they were made; shown as a drawing, saved as JSON that circuit-graph viewers read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.analysis.graph import viewer
from swd_lens.analysis.graph.drawing import GraphDrawing, draw
from swd_lens.base.display import card


@dataclass(frozen=True, repr=False, eq=False)
class UnitGraph:
    """A pruned graph of units.

    Attributes:
        nodes: one row per node, inputs first: node (its name), kind (unit, token or logit), layer (-1: tokens; number of
            blocks: logits), site, unit, position, token (id), label, probability (logits), score and rank (of a circuit),
            activation (z; a token's is 1, an answer's its logit less the mean over the vocabulary), rest (what the edges,
            before pruning, leave unexplained of it), influence (share of the answers that goes through it).
        edges: strongest first: source, target, kind (residual, attention, mlp), weight, contribution (z of the source times
            weight; NaN without a prompt), strength (what they were pruned by).
        settings: model, fingerprints of the factors, prompt, conventions, pruning.
    """

    nodes: pd.DataFrame
    edges: pd.DataFrame
    settings: Mapping[str, Any]

    @property
    def has_prompt(self) -> bool:
        return self.settings["token_ids"] is not None

    def table(self, n: int | None = None) -> pd.DataFrame:
        """The n strongest edges (None: all)."""
        edges = self.edges if self.has_prompt else self.edges.drop(columns="contribution")
        return edges.head(len(edges) if n is None else n).reset_index(drop=True)

    def plot(self, labels: Mapping[str, str] | None = None) -> GraphDrawing:
        """The drawing; it shows itself in a notebook and saves as SVG. See `swd_lens.analysis.graph.drawing.draw`."""
        return draw(self, labels)

    def to_json(self, path: str | Path, *, slug: str = "unit-graph") -> None:
        """Write one JSON file, whole or not at all, in the schema of attribution graphs that circuit-tracer and Neuronpedia
        read. What that schema has no place for stands under "swd_lens" in its metadata, so that `load` gives all of it back.
        """
        viewer.write(self.nodes, self.edges, self.settings, Path(path), slug)

    @classmethod
    def load(cls, path: str | Path) -> "UnitGraph":
        """Read what `to_json` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no JSON, a graph of another tool, or of a later format.
        """
        return cls(*viewer.read(Path(path)))

    def __repr__(self) -> str:
        counts = self.nodes["kind"].value_counts()
        prompt = self.settings["prompt"] or ""
        prompt = prompt if len(prompt) <= 60 else "…" + prompt[-59:]
        where = f", on {prompt!r}" if self.has_prompt else ", no prompt"
        return (
            f"UnitGraph({counts.get('unit', 0)} units, {counts.get('token', 0)} tokens, {counts.get('logit', 0)} answers, "
            f"{len(self.edges)} of {self.settings['edges_possible']} edges{where}, attention {self.settings['attention']})"
        )

    def _repr_html_(self) -> str:
        return card(repr(self), self.plot())
