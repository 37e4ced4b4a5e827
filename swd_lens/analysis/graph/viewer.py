"""viewer: a unit graph as the JSON that attribution-graph viewers read.

Facts of the schema: circuit-tracer's graph_models.py and its frontend (safety-research/circuit-tracer), and Neuronpedia's
graph-schema.json; written down here as they were found in 2026. What they ask for beyond names:

1. node_id is layer_feature_position, with layer "E" for embeddings and n_layers + 1 for answers.
2. feature numbers tell units of one layer apart, so a site's units are moved by a multiple of a power of ten.
3. influence is the cumulative share, strongest node first: viewers hide what lies above a threshold.
4. An answer's text contains (p=...): viewers read the probability from it.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.analysis.graph.tables import EDGES, NODES, records, table
from swd_lens.base._version import __version__
from swd_lens.base.files import write_json
from swd_lens.hosts.sites import KINDS, split_name

_FORMAT, _VERSION = "swd_lens unit graph", 1
# Viewers know this type; no other one is drawn as a feature by all of them.
_UNIT_TYPE = "cross layer transcoder"


def write(nodes: pd.DataFrame, edges: pd.DataFrame, settings: Mapping[str, Any], path: Path, slug: str) -> None:
    """Write the file, atomically."""
    ids = _ids(nodes, settings)
    tokens = settings["tokens"] or ["(no prompt)"]
    weight = "contribution" if settings["token_ids"] is not None else "weight"
    write_json(
        path,
        {
            "metadata": {
                "slug": slug,
                "scan": settings["model"] or "unknown",
                "transcoder_list": [],
                "prompt_tokens": [str(token) for token in tokens],
                "prompt": settings["prompt"] or "(no prompt: weights between units)",
                "info": {
                    "title": slug,
                    "description": "Units of sparse weight decomposition; links are direct contributions"
                    if weight == "contribution"
                    else "Units of sparse weight decomposition; links are direct weights, without a prompt",
                    "generator": {"name": "swd_lens", "version": __version__},
                },
                "swd_lens": {
                    "format": _FORMAT,
                    "version": _VERSION,
                    "settings": dict(settings),
                    "nodes": records(nodes),
                    "edges": records(edges),
                },
            },
            "qParams": {"linkType": "both", "pinnedIds": [], "clickedId": "", "supernodes": [], "sg_pos": ""},
            "nodes": [
                _node(row, ids[row["node"]], cumulative, settings)
                for row, cumulative in zip(records(nodes), _cumulative(nodes), strict=True)
            ],
            "links": [
                {"source": ids[row["source"]], "target": ids[row["target"]], "weight": row[weight]}
                for row in records(edges)
            ],
        },
    )


def read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Nodes, edges and settings. Raises as `UnitGraph.load` says."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no graph file {path}; UnitGraph.to_json writes one")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))["metadata"]["swd_lens"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not a graph that swd_lens wrote (it has no metadata.swd_lens); give a file of UnitGraph.to_json"
        ) from None
    if about["version"] > _VERSION:
        raise ValueError(
            f"{path} has graph format {about['version']}, this swd_lens reads up to {_VERSION}; update swd_lens"
        )
    return table(about["nodes"], NODES), table(about["edges"], EDGES), about["settings"]


# ---------------------------------------------------------------------------------------------- parts


def _feature(row: Mapping[str, Any], step: int) -> int:
    """A number that no other unit of the layer has."""
    return int(row["unit"]) + step * KINDS.index(split_name(row["site"])[1])


def _ids(nodes: pd.DataFrame, settings: Mapping[str, Any]) -> dict[str, str]:
    step, names = _step(nodes), {}
    for row in records(nodes):
        position = row["position"] or 0
        if row["kind"] == "token":
            names[row["node"]] = f"E_{row['token']}_{position}"
        elif row["kind"] == "logit":
            names[row["node"]] = f"{settings['n_layers'] + 1}_{row['token']}_{position}"
        else:
            names[row["node"]] = f"{row['layer']}_{_feature(row, step)}_{position}"
    return names


def _step(nodes: pd.DataFrame) -> int:
    largest = nodes["unit"].max()
    return 10 ** math.ceil(math.log10(int(largest) + 2)) if pd.notna(largest) else 10


def _cumulative(nodes: pd.DataFrame) -> list[float | None]:
    influence = nodes["influence"].fillna(0.0)
    total = float(influence.sum())
    if total == 0:
        return [None] * len(nodes)
    order = influence.sort_values(ascending=False, kind="stable")
    return [float(x) for x in (order.cumsum() / total).clip(upper=1.0).reindex(nodes.index)]


def _node(
    row: Mapping[str, Any], node_id: str, cumulative: float | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    layer, feature, position = node_id.split("_")
    common = {
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
        return {**common, "feature_type": "embedding", "feature": int(position), "jsNodeId": f"E_{feature}-{position}",
                "clerp": f'Emb: "{row["label"]}"'}  # fmt: skip
    if row["kind"] == "logit":
        p = row["probability"] or 0.0
        target = row["token"] == settings["answers"][0]
        return {**common, "feature_type": "logit", "jsNodeId": f"L_{feature}-{position}", "token_prob": p,
                "is_target_logit": target, "clerp": f'Output "{row["label"]}" (p={p:.3f})'}  # fmt: skip
    name = f"{row['site']}/{row['unit']}"
    return {**common, "feature_type": _UNIT_TYPE, "clerp": f"{row['label']} ({name})" if row["label"] else name}
