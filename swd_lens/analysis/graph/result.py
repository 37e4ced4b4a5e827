"""UnitGraph: a unit graph that shows, draws, exports and saves itself.

What each of these does stands in a module of its own, which reads the tables (data.py) and knows nothing of this class.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swd_lens.analysis.graph.data import EDGES, FORMAT, NODES, VERSION, GraphData, table
from swd_lens.analysis.graph.drawing import GraphDrawing, draw
from swd_lens.analysis.graph.export import export, to_json
from swd_lens.analysis.graph.viewer.page import show
from swd_lens.base.errors import legible
from swd_lens.base.record import checked, require_format
from swd_lens.base.sealed import read_json, readable, unseal

_WHAT = "a unit graph"
# What is shown of a graph reads these.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "prompt", "attention"), str | None),
    **dict.fromkeys(("n_layers", "edges_possible"), int),
    **dict.fromkeys(("tokens", "answers", "token_ids"), list[Any] | None),
}
_NODE: Mapping[str, Any] = {"node": str, "kind": str, "label": str | None}


@dataclass(frozen=True, repr=False, eq=False)
class UnitGraph(GraphData):
    """A pruned graph of units.

    Attributes:
        nodes: one row per node, inputs first: node (its name), kind (unit, token or logit), layer (-1: tokens; number of
            blocks: logits), site, unit, position, token (id), label, head (of units that read or write one), probability
            (logits), score and rank (of a circuit), activation (z; a token's is 1, an answer's its logit less the mean over the
            vocabulary), rest (what the edges, before pruning, leave unexplained of it), influence (share of the answers that
            goes through it).
        edges: strongest first: source, target, kind (residual, attention, mlp), weight, contribution (z of the source times
            weight; NaN without a prompt), strength (what they were pruned by), varies (of a mean over prompts: the share of
            the contribution's second moment that is variance; else NaN).
        settings: model, fingerprints of the factors, prompt, conventions, pruning.
    """

    show = show
    export = export
    to_json = to_json

    def plot(self, labels: Mapping[str, str] | None = None) -> GraphDrawing:
        """The drawing; it shows itself in a notebook and saves as SVG. See `swd_lens.analysis.graph.drawing.draw`."""
        return draw(self, labels)

    def parts(self) -> tuple[Any, ...]:
        return (self.plot(),)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "UnitGraph":
        """Make a graph of what `as_dict` gave, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        checked("UnitGraph", values["settings"], _SETTINGS)
        parts = checked("UnitGraph", values, dict.fromkeys(("nodes", "edges"), list[Mapping[str, Any]]))
        nodes, edges = parts["nodes"], parts["edges"]
        for row in nodes:
            checked("node", row, _NODE)
        names = {row["node"] for row in nodes}
        if len(names) < len(nodes) or not {row[end] for row in edges for end in ("source", "target")} <= names:
            raise ValueError("nodes of one name, or edges between nodes that are not there")
        return cls(table(nodes, NODES), table(edges, EDGES), values["settings"])

    @classmethod
    def load(cls, path: str | Path) -> "UnitGraph":
        """Read what `to_json` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no JSON, a graph of another tool, of a later format, or not what was written.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no graph file {legible(path)}; UnitGraph.to_json writes one")
        whole = read_json(path, _WHAT)
        metadata = whole.get("metadata") if isinstance(whole, dict) else None
        values = metadata.get("swd_lens") if isinstance(metadata, dict) else None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(
                f"{legible(path)} is not a graph that swd_lens wrote (it has no metadata.swd_lens); give a file of "
                "UnitGraph.to_json"
            )
        require_format(path, values.get("version"), VERSION, _WHAT)
        values = unseal(values, path, _WHAT)
        with readable(path, _WHAT):
            return cls.from_dict(values)
