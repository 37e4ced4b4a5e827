"""UnitGraph: nodes, edges and how they were made; shown as a drawing, saved as the JSON that attribution-graph viewers read.

1. `table` makes a graph's two tables with the same columns and types wherever they come from; `records` gives their rows back as
   plain values.
2. `to_json` and `export` write it for viewers (export.py), with all of the graph under "swd_lens" in the file's metadata; `load`
   reads that and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from swd_lens.analysis.graph.drawing import GraphDrawing, draw
from swd_lens.base.errors import legible
from swd_lens.base.files import write_json
from swd_lens.base.record import Record, checked
from swd_lens.base.sealed import read_json, readable, unseal

if TYPE_CHECKING:
    from swd_lens.analysis.audit import Audit
    from swd_lens.analysis.graph.export import ExportedGraph

if TYPE_CHECKING:
    from swd_lens.analysis.graph.viewer.page import GraphPage

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
_FORMAT, _VERSION, _WHAT = "swd_lens unit graph", 3, "a unit graph"  # 2: ranks from 1; 3: means over prompts
# What is shown of a graph reads these.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "prompt", "attention"), str | None),
    **dict.fromkeys(("n_layers", "edges_possible"), int),
    **dict.fromkeys(("tokens", "answers", "token_ids"), list[Any] | None),
}
_NODE: Mapping[str, Any] = {"node": str, "kind": str, "label": str | None}


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
class UnitGraph(Record):
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
        """Node -> what it is called where people read it: tokens and answers by their text, as far as that tells them apart."""
        kinds = {"unit": "{node}", "token": "{node} {label}", "logit": "logit {label}"}
        rows = [row for row in records(self.nodes) if row["label"]]
        texts = {str(row["node"]): kinds[row["kind"]].format(**row) for row in rows}
        several = {text for text, count in Counter(texts.values()).items() if count > 1}
        return {
            name: texts[name] if name in texts and texts[name] not in several else name for name in self.nodes["node"]
        }

    def plot(self, labels: Mapping[str, str] | None = None) -> GraphDrawing:
        """The drawing; it shows itself in a notebook and saves as SVG. See `swd_lens.analysis.graph.drawing.draw`."""
        return draw(self, labels)

    def show(
        self,
        *,
        audit: Any = None,
        replays: Any = None,
        attention: Any = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        labels: Mapping[Any, Any] | None = None,
        beside: "UnitGraph | None" = None,
    ) -> "GraphPage":
        """The graph as a page to look into: a notebook shows it, `.save("graph.html")` writes one file that needs no network.

        Args:
            audit: what the units do, shown on hover: an Audit, or cards of units (`Audit.profiles`, a study's cards).
            replays: of this graph (`swd_lens.graph.replays`); the live clamp then runs through all frozen paths, with true runs
                beside it. None: through the drawn edges.
            attention: of this graph (`swd_lens.graph.attention_paths`): heads and query-key pairs of its attention edges.
            groups: name -> nodes that begin as one box (`swd_lens.graph.groups`).
            labels: unit -> text, or UnitLabels; they win over those of the audit and of the graph.
            beside: a graph of the same units on another prompt, shown beside this one.

        Raises:
            ValueError: replays, attention paths or groups of another graph, or a name that is no unit's.
            TypeError: an audit, a label or a graph of another type.
        """
        from swd_lens.analysis.graph.viewer.contents import contents  # which reads audits, and these graphs
        from swd_lens.analysis.graph.viewer.page import GraphPage

        if not isinstance(beside, UnitGraph | None):
            raise TypeError(f"beside must be a UnitGraph, got a {type(beside).__name__}")
        values = contents(
            self, audit=audit, replays=replays, attention=attention, groups=groups, labels=labels, beside=beside
        )
        prompt = self.settings.get("prompt")
        return GraphPage.of("Unit graph" if prompt is None else f"Unit graph of “{prompt}”", values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` takes them back."""
        return {"settings": dict(self.settings), "nodes": records(self.nodes), "edges": records(self.edges)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "UnitGraph":
        """What `as_dict` gave, also after JSON.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        checked("UnitGraph", values["settings"], _SETTINGS)
        nodes, edges = (
            checked("UnitGraph", values, {part: list[Mapping[str, Any]]})[part] for part in ("nodes", "edges")
        )
        for row in nodes:
            checked("node", row, _NODE)
        names = [row["node"] for row in nodes]
        if len(set(names)) < len(names) or not {row[end] for row in edges for end in ("source", "target")} <= set(
            names
        ):
            raise ValueError("nodes of one name, or edges between nodes that are not there")
        return cls(table(nodes, NODES), table(edges, EDGES), values["settings"])

    def export(
        self,
        folder: str | Path,
        *,
        scan: str | None = None,
        target: str = "circuit-tracer",
        slug: str = "unit-graph",
        audit: "Audit | None" = None,
        attention: Any = None,
        groups: Mapping[str, Iterable[str]] | None = None,
        pinned: Any = None,
        features_url: str | None = None,
    ) -> "ExportedGraph":
        """Write the graph for circuit-tracer's or Neuronpedia's frontend: {slug}.json, its line in graph-metadata.json, and a
        file for each unit in features/. Graphs of one folder stand beside each other.

            graph.export("graphs", audit=audit)          # then: circuit_tracer.frontend.local_server.serve("graphs")

        What the edges leave of a node's activation is the weight of a link from an error node, so that links into a node
        add up to it. A unit that is hovered shows the audit's contexts and tokens.

        Args:
            folder: made where it is not there; what it holds of another slug stays.
            scan: where features are looked up. circuit-tracer: None means the folder's own; Neuronpedia: the model's name
                there ("gpt2-small", "gemma-2-2b"), None means the host's.
            target: "circuit-tracer" or "neuronpedia".
            slug: the graph's name in addresses and files: letters, digits, "_", "-" and ".".
            audit: of the same factors: contexts, promoted tokens, labels of units without one.
            attention: of `attention_paths`: query-key pairs behind each unit that attention writes.
            groups: name -> nodes that are shown as one, as `swd_lens.graph.groups` gives; None: for Neuronpedia by label.
                circuit-tracer's page shows them where its address ends with the `query` of what this returns.
            pinned: what is open at the start, see `swd_lens.analysis.graph.pinned.pinned_nodes`.
            features_url: where features/ will be served, for Neuronpedia.

        Raises:
            ValueError: an unknown target, a slug or scan of other characters, a slug that names a file of ours, an audit of
                other factors, a group or a pinned unit that the graph does not have, a damaged graph-metadata.json.
            OSError: the folder cannot be written.

        Warns:
            UserWarning: Neuronpedia, and all units stand in the first block.
        """
        from swd_lens.analysis.graph.export import export  # which reads a graph's tables as this module does

        return export(
            self,
            folder,
            scan=scan,
            target=target,
            slug=slug,
            audit=audit,
            attention=attention,
            groups=groups,
            pinned=pinned,
            features_url=features_url,
        )

    def to_json(self, path: str | Path, *, slug: str = "unit-graph", **how: Any) -> None:
        """Write one JSON file, whole or not at all, in the schema of attribution graphs that circuit-tracer and Neuronpedia
        read; `export` writes it with the files that their frontends load beside it. What that schema has no place for stands
        under "swd_lens" in its metadata, sealed, so that `load` gives all of it back; the rest of the file is the viewers', who
        may change it.

        Args:
            slug: the graph's name there.
            **how: scan, target, audit, attention, groups, pinned and features_url, see `export`.

        Raises:
            ValueError, OSError: see `export`.
        """
        from swd_lens.analysis.graph.export import viewer_json  # which reads a graph's tables as this module does

        write_json(Path(path), viewer_json(self, slug=slug, **how))

    def sealable(self) -> dict[str, Any]:
        """What a file holds under "swd_lens": the format and all of the graph."""
        return {"format": _FORMAT, "version": _VERSION, **self.as_dict()}

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
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise ValueError(
                f"{legible(path)} is not a graph that swd_lens wrote (it has no metadata.swd_lens); give a file of "
                "UnitGraph.to_json"
            )
        version = values.get("version")
        if type(version) is int and version > _VERSION:
            raise ValueError(
                f"{legible(path)} has graph format {version}, this swd_lens reads up to {_VERSION}; update swd_lens"
            )
        values = unseal(values, path, _WHAT)
        with readable(path, _WHAT):
            graph = cls.from_dict(values)
        if version == 1:
            graph.nodes["rank"] += 1
        return graph

    def parts(self) -> tuple[Any, ...]:
        return (self.plot(),)

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
