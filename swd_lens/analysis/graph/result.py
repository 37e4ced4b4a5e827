"""UnitGraph: nodes, edges and how they were made; shown as a drawing, saved as the JSON that attribution-graph viewers read.

1. `table` makes a graph's two tables with the same columns and types wherever they come from; `records` gives their rows back as
   plain values.
2. `viewer_json` is a graph in the schema of attribution graphs, with all of the graph under "swd_lens" in its metadata.

Facts of the schema: circuit-tracer's graph_models.py and its frontend (safety-research/circuit-tracer), and Neuronpedia's
graph-schema.json; written down here as they were found in 2026. What they ask for beyond names:

a. node_id is layer_feature_position, with layer "E" for embeddings and n_layers + 1 for answers.
b. feature numbers tell units of one layer apart, so a site's units are moved by a multiple of a power of ten.
c. influence is the cumulative share, strongest node first: viewers hide what lies above a threshold.
d. An answer's text contains (p=...): viewers read the probability from it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.analysis.graph.drawing import GraphDrawing, draw
from swd_lens.base import __version__
from swd_lens.base.errors import error
from swd_lens.base.files import write_json
from swd_lens.base.record import Record, checked
from swd_lens.base.sealed import read_json, readable, seal, unseal
from swd_lens.hosts.sites import KINDS, split_name

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
    **dict.fromkeys(("weight", "contribution", "strength"), "float64"),
}
_FORMAT, _VERSION, _WHAT = "swd_lens unit graph", 2, "a unit graph"  # 2: ranks from 1
# What is shown of a graph reads these.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "prompt", "attention"), str | None),
    **dict.fromkeys(("n_layers", "edges_possible"), int),
    **dict.fromkeys(("tokens", "answers", "token_ids"), list[Any] | None),
}
_NODE: Mapping[str, Any] = {"node": str, "kind": str, "label": str | None}
# Viewers know this type; no other one is drawn as a feature by all of them.
_UNIT_TYPE = "cross layer transcoder"


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
        """The n strongest edges (None: all); answers are called by their tokens."""
        edges = self.edges if self.has_prompt else self.edges.drop(columns="contribution")
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
            raise error("graph-of-unknown-nodes")
        return cls(table(nodes, NODES), table(edges, EDGES), values["settings"])

    def to_json(self, path: str | Path, *, slug: str = "unit-graph") -> None:
        """Write one JSON file, whole or not at all, in the schema of attribution graphs that circuit-tracer and Neuronpedia
        read. What that schema has no place for stands under "swd_lens" in its metadata, sealed, so that `load` gives all of it
        back; the rest of the file is the viewers', who may change it.
        """
        write_json(Path(path), viewer_json(self, slug))

    @classmethod
    def load(cls, path: str | Path) -> "UnitGraph":
        """Read what `to_json` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: no JSON, a graph of another tool, of a later format, or not what was written.
        """
        path = Path(path)
        if not path.is_file():
            raise error("graph-file-missing", path=path)
        whole = read_json(path, _WHAT)
        metadata = whole.get("metadata") if isinstance(whole, dict) else None
        values = metadata.get("swd_lens") if isinstance(metadata, dict) else None
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise error("graph-file-of-another-tool", path=path)
        version = values.get("version")
        if type(version) is int and version > _VERSION:
            raise error("graph-file-of-the-future", path=path, version=version, known=_VERSION)
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
        return (
            f"UnitGraph({counts.get('unit', 0)} units, {counts.get('token', 0)} tokens, {counts.get('logit', 0)} answers, "
            f"{len(self.edges)} of {self.settings['edges_possible']} edges{where}, attention {self.settings['attention']})"
        )


# ---------------------------------------------------------------------------------------------- viewers


def viewer_json(graph: UnitGraph, slug: str) -> dict[str, Any]:
    """A graph as attribution-graph viewers read it."""
    settings, nodes = graph.settings, records(graph.nodes)
    ids = _viewer_ids(nodes, settings["n_layers"])
    weight, measure = ("contribution", "contributions") if graph.has_prompt else ("weight", "weights, without a prompt")
    return {
        "metadata": {
            "slug": slug,
            "scan": settings["model"] or "unknown",
            "transcoder_list": [],
            "prompt_tokens": [str(token) for token in settings["tokens"] or ["(no prompt)"]],
            "prompt": settings["prompt"] or "(no prompt: weights between units)",
            "info": {
                "title": slug,
                "description": f"Units of sparse weight decomposition; links are direct {measure}",
                "generator": {"name": "swd_lens", "version": __version__},
            },
            "swd_lens": seal({"format": _FORMAT, "version": _VERSION, **graph.as_dict()}),
        },
        "qParams": {"linkType": "both", "pinnedIds": [], "clickedId": "", "supernodes": [], "sg_pos": ""},
        "nodes": [
            _viewer_node(row, node_id, cumulative, settings["answers"])
            for row, node_id, cumulative in zip(nodes, ids.values(), _cumulative(graph.nodes["influence"]), strict=True)
        ],
        "links": [
            {"source": ids[row["source"]], "target": ids[row["target"]], "weight": row[weight]}
            for row in records(graph.edges)
        ],
    }


def _viewer_ids(nodes: list[dict[str, Any]], n_layers: int) -> dict[str, str]:
    """Node -> layer_feature_position."""
    largest = max((int(row["unit"]) for row in nodes if row["unit"] is not None), default=0)
    step, ids = 10 ** math.ceil(math.log10(largest + 2)), {}
    for row in nodes:
        if row["kind"] == "token":
            layer, feature = "E", row["token"]
        elif row["kind"] == "logit":
            layer, feature = n_layers + 1, row["token"]
        else:
            layer, feature = row["layer"], int(row["unit"]) + step * KINDS.index(split_name(row["site"])[1])
        ids[row["node"]] = f"{layer}_{feature}_{row['position'] or 0}"
    return ids


def _cumulative(influence: pd.Series) -> list[float | None]:
    influence = influence.fillna(0.0)
    total = float(influence.sum())
    if total == 0:
        return [None] * len(influence)
    order = influence.sort_values(ascending=False, kind="stable")
    return [float(share) for share in (order.cumsum() / total).clip(upper=1.0).reindex(influence.index)]


def _viewer_node(row: Mapping[str, Any], node_id: str, cumulative: float | None, answers: list[int]) -> dict[str, Any]:
    layer, feature, position = node_id.split("_")
    node = {
        "node_id": node_id,
        "feature": int(feature),
        "layer": layer,
        "ctx_idx": int(position),
        "jsNodeId": f"{layer}_{feature}-0",
        "reverse_ctx_idx": 0,
        "run_idx": 0,
        "token_prob": 0.0,
        "is_target_logit": False,
        "influence": cumulative,
        "activation": row["activation"],
        "clerp": "",
    }
    if row["kind"] == "token":
        node |= {"feature_type": "embedding", "feature": int(position), "jsNodeId": f"E_{feature}-{position}"}
        node["clerp"] = f'Emb: "{row["label"]}"'
    elif row["kind"] == "logit":
        p = row["probability"] or 0.0
        node |= {"feature_type": "logit", "jsNodeId": f"L_{feature}-{position}", "token_prob": p}
        node |= {"is_target_logit": row["token"] == answers[0], "clerp": f'Output "{row["label"]}" (p={p:.3f})'}
    else:
        name = f"{row['site']}/{row['unit']}"
        node |= {"feature_type": _UNIT_TYPE, "clerp": f"{row['label']} ({name})" if row["label"] else name}
    return node
