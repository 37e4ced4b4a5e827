"""Export: a unit graph as the files that other tools' frontends read.

1. `viewer_json` is a graph in the schema of attribution graphs, with all of it under "swd_lens" in its metadata, sealed;
   `to_json` writes it to one file.
2. `export` writes it as {slug}.json beside graph-metadata.json (which lists the folder's graphs) and features/ (features.py): a
   folder that circuit-tracer's server serves as it is.

Facts of the schema: the frontend in circuit-tracer's wheel (0.5.0), Neuronpedia's graph-schema.json and webapp; written down here
as they were found in 2026. What they ask for beyond names:

a. node_id is layer_feature_position, with layer "E" for embeddings and n_layers + 1 for answers; answers are drawn one row above
   the largest layer there is. Neuronpedia gives gpt2-small no row of its own for embeddings, so its blocks move up by one; and a
   graph whose largest layer is 0 it refuses.
b. A feature that occurs more often than on 2/3 of the tokens is dropped, and one column divides by zero: at least two tokens.
   A graph without a prompt has one for what reads the residual stream and one for what writes it.
c. influence is the cumulative share, strongest node first: viewers hide what lies above a threshold, which they take from
   metadata.node_threshold (circuit-tracer from graph-metadata.json). We show all, so it is 1. circuit-tracer's slider goes dead
   where qParams have a pruningThreshold; Neuronpedia alone gets one.
d. An answer's text contains (p=...), its token between the only two double quotes.
e. Links into a node are shown as shares of their sum. What the drawn ones leave of a node's activation (`rest` and pruned edges)
   comes from error nodes, one per layer and position and one for the answers: shares are of the whole then.
f. Of the groups those nodes are shown that are pinned. circuit-tracer 0.5.0 reads groups from the address alone
   (`ExportedGraph.query`), and puts texts into its page as HTML. Where it shows what is pinned we say (panel.py).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from swd_lens.analysis.audit import Audit
from swd_lens.analysis.graph.data import FORMAT, VERSION, GraphData, require_same_factors
from swd_lens.analysis.graph.features import FeatureNumbers, feature_files, plain_name
from swd_lens.analysis.graph.groups import groups as groups_of
from swd_lens.analysis.graph.nodes import is_measured, placed, shown_text, traced, viewer_graph
from swd_lens.analysis.graph.pinned import pinned_nodes, positions
from swd_lens.base import __version__
from swd_lens.base.checks import one_of, require_names
from swd_lens.base.errors import legible, quoted, warn
from swd_lens.base.files import write_json
from swd_lens.base.record import Record
from swd_lens.base.sealed import readable, seal

TARGETS = ("circuit-tracer", "neuronpedia")
SHOW_ALL = 1.0  # of the influence that is shown when a viewer opens
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_NEURONPEDIA_NAMES = {"gpt2": "gpt2-small"}


@dataclass(frozen=True, repr=False)
class ExportedGraph(Record):
    """The files that `export` wrote.

    Attributes:
        folder: where everything lies.
        slug: the graph's name there.
        target: whose frontend it is for.
        query: what belongs behind the address of circuit-tracer's page: which graph is shown, and its groups, which the page
            reads from nowhere else. Without it their nodes stand singly, and not where their layers are.
        features: how many feature files there are, and how many of them have examples.
    """

    folder: str
    slug: str
    target: str
    query: str
    features: tuple[int, int]

    @property
    def path(self) -> Path:
        """The graph's file."""
        return Path(self.folder) / f"{self.slug}.json"

    def __repr__(self) -> str:
        n, known = self.features
        return f"ExportedGraph({self.path} for {self.target}, {n} features, {known} with examples)"


def export(
    graph: GraphData,
    folder: str | Path,
    *,
    scan: str | None = None,
    target: str = "circuit-tracer",
    slug: str = "unit-graph",
    audit: Audit | None = None,
    attention: Any = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    pinned: Any = None,
    features_url: str | None = None,
) -> ExportedGraph:
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
    written = viewer_json(graph, slug, scan, target, audit, attention, groups, pinned, features_url)
    require_names("slug", [slug], ".json")
    folder = Path(folder)
    listing, others = folder / "graph-metadata.json", []
    if listing.is_file():
        with readable(listing, "a list of graphs"):
            listed = json.loads(listing.read_text(encoding="utf-8"))["graphs"]
            others = [entry for entry in listed if entry["slug"] != slug]
    files = feature_files(graph, audit)
    features = folder / "features" / FeatureNumbers.of(graph).name
    for number, file in files.items():
        # What an earlier export knew of a unit is not lost to one without an audit.
        if file["examples_quantiles"] or not (features / f"{number}.json").is_file():
            write_json(features / f"{number}.json", file)
    metadata = {key: value for key, value in written["metadata"].items() if key != "swd_lens"}
    write_json(folder / f"{slug}.json", written)
    write_json(listing, {"graphs": [*others, {**metadata, "title_prefix": slug}]})
    supernodes = written["qParams"]["supernodes"]
    query = urlencode({"slug": slug, **({"supernodes": json.dumps(supernodes)} if supernodes else {})})
    known = sum(bool(file["examples_quantiles"]) for file in files.values())
    return ExportedGraph(str(folder), slug, target, query, (len(files), known))


def to_json(graph: GraphData, path: str | Path, *, slug: str = "unit-graph", **how: Any) -> None:
    """Write one JSON file, whole or not at all, in the schema of attribution graphs that circuit-tracer and Neuronpedia
    read; `export` writes it with the files that their frontends load beside it. What that schema has no place for stands
    under "swd_lens" in its metadata, sealed, so that `load` gives all of it back; the rest of the file is the viewers', who
    may change it.

    Args:
        slug: the graph's name there.
        **how: scan, target, audit, attention, groups, pinned and features_url, see `export`.

    Raises ValueError, OSError: see `export`.
    """
    write_json(Path(path), viewer_json(graph, slug, **how))


# ---------------------------------------------------------------------------------------------- one file


def viewer_json(
    graph: GraphData,
    slug: str,
    scan: str | None = None,
    target: str = "circuit-tracer",
    audit: Audit | None = None,
    attention: Any = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    pinned: Any = None,
    features_url: str | None = None,
) -> dict[str, Any]:
    """A graph as attribution-graph viewers read it; see `export`."""
    one_of("target", target, TARGETS)
    _require_plain("slug", slug)
    if audit is not None:
        require_same_factors(graph, audit.identities, "the audit")
    html = target == "circuit-tracer"  # whose page takes texts as HTML, and features from the folder it is served with
    if html:
        scan, rows_up, of_target = scan or f"./data/features/{FeatureNumbers.of(graph).name}", 0, {}
    else:
        model = str(graph.settings["model"] or "unknown")
        scan = _NEURONPEDIA_NAMES.get(model, plain_name(model)) if scan is None else scan
        _require_plain("scan", scan)
        rows_up, of_target = _rows_up(graph, scan), {"pruningThreshold": SHOW_ALL}
    places = placed(graph, rows_up)
    nodes, links = viewer_graph(graph, places, audit, html)
    traces, only_traced = ({}, {}) if attention is None else traced(graph, places, attention)
    for node in nodes:
        node |= {"qk_tracing_results": traces[node["node_id"]]} if node["node_id"] in traces else {}
    if groups is None:
        groups = {} if html else groups_of(graph, audit=audit)
    supernodes = []
    for name, members in groups.items():
        names = list(members)
        if unknown := [member for member in names if member not in places]:
            raise ValueError(f"group {quoted(name)} names {quoted(unknown[0])}, which is no node of this graph; see graph.nodes")
        supernodes.append([shown_text(name, html), *(places[member].node_id for member in names)])
    opened = [places[name].node_id for name in pinned_nodes(graph, pinned)]
    opened = list(dict.fromkeys([*opened, *(member for _, *members in supernodes for member in members)]))
    measure = "contributions" if is_measured(graph) else "weights, without a prompt"
    return {
        "metadata": {
            "slug": slug,
            "scan": scan,
            "transcoder_list": [],
            "prompt_tokens": places.tokens,
            "prompt": graph.settings["prompt"] or "(no prompt: weights between units)",
            "node_threshold": SHOW_ALL,
            "schema_version": 1,
            **({} if features_url is None else {"feature_details": {"feature_json_base_url": features_url}}),
            "info": {
                "title": slug,
                "description": f"Units of sparse weight decomposition; links are direct {measure}; errors are what is left out",
                "generator": {"name": "swd_lens", "version": __version__},
            },
            "swd_lens": seal({"format": FORMAT, "version": VERSION, **graph.as_dict()}),
        },
        "qParams": {
            "linkType": "both",
            "pinnedIds": opened,
            "clickedId": "",
            "supernodes": supernodes,
            "sg_pos": positions(nodes, opened, supernodes) if html else "",
            **of_target,
        },
        "nodes": nodes,
        "links": links,
        **({"qk_only_nodes": only_traced} if only_traced else {}),
    }


def _require_plain(name: str, value: str) -> None:
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        raise ValueError(
            f'{legible(name)}={quoted(value)}: letters, digits, "_", "-" and "." only; it stands in addresses and in '
            "files' names"
        )


def _rows_up(graph: GraphData, scan: str) -> int:
    """By how many rows Neuronpedia's blocks are moved, see (a)."""
    if scan == "gpt2-small":
        return 1
    # With a prompt the answers' error node stands in the last block.
    layers = graph.nodes["layer"][graph.nodes["kind"] == "unit"]
    with_errors = is_measured(graph) and bool((graph.nodes["kind"] == "logit").any())
    largest = max(int(layers.max() or 0), graph.settings["n_layers"] - 1 if with_errors else 0)
    if largest == 0:
        warn("all units stand in block 0, which Neuronpedia does not draw; they are shown one row higher, block 0 as L1")
    return int(largest == 0)
