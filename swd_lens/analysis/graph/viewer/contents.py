"""contents: what the viewer shows of one or two graphs, as plain values for its scripts.

1. Every graph brings its nodes and edges column by column (`graph_values`; drawing.py makes a picture of the same), and what was
   given for it: replays, attention paths.
2. Units are described once, whatever graph they stand in: label, and from the audit contexts, histogram and promoted tokens.
3. Numbers keep nine digits, so that edges and rest add up in the page as they do here; tables of effects go as float32 in
   base64. Text is made visible here; the page puts it in as text and never as HTML.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from swd_lens.analysis.audit.drawing import running_token
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.audit.result import Audit
from swd_lens.analysis.audit.unit import UnitCard, UnitProfile
from swd_lens.analysis.graph.data import GraphData
from swd_lens.base import __version__
from swd_lens.base.errors import legible, visible, visible_token
from swd_lens.hosts.sites import execution_key, parse_unit
from swd_lens.units.keys import read_unit

_CONTEXTS, _AROUND, _PROMOTED = 5, 12, 8  # per unit; tokens on either side of a peak; tokens on either side of zero
_DIGITS, _FEW_DIGITS = 9, 3  # of what is added up, and of what is only looked at
_NODE_COLUMNS = ("node", "kind", "layer", "site", "unit", "position", "head", "probability", "score", "rank")
_NODE_SUMS = ("activation", "rest", "influence")
_EDGE_COLUMNS = ("weight", "contribution", "strength", "varies")
_SCORES = ("layer", "head", "dest", "src", "part", "q unit", "k unit", "contribution")


def contents(
    graph: GraphData,
    audit: Any,
    replays: Any,
    attention: Any,
    groups: Mapping[str, Sequence[str]],
    labels: Mapping[Any, Any],
    beside: GraphData | None,
) -> dict[str, Any]:
    """Plain values for the page; see `show` (page.py) for the arguments. Raises ValueError: groups, replays or attention paths
    of nodes that the graph does not have, or a label of no unit's name; TypeError: an audit or a label of another type."""
    graphs = [graph] if beside is None else [graph, beside]
    units: dict[str, str] = {}
    for each in graphs:
        nodes = each.nodes[each.nodes["kind"] == "unit"]
        of_graph = zip(nodes["site"], nodes["unit"], nodes["label"], strict=True)
        units |= {f"{site}/{unit}": text for site, unit, text in of_graph}
    values = [graph_values(each) for each in graphs]
    if replays is not None:
        number = _numbers(graph, [*replays.nodes, *replays.targets], "these replays")
        values[0]["replays"] = {
            "nodes": [number[name] for name in replays.nodes],
            "targets": [number[name] for name in replays.targets],
            "strengths": list(replays.strengths),
            "effects": _packed(replays.effects),
            "changes": _packed(replays.changes),
        }
    if attention is not None:
        heads, scores = attention.heads, attention.scores
        number = _numbers(graph, {*heads["source"], *heads["target"]}, "these attention paths")
        values[0]["attention"] = {
            "heads": {
                "source": [number[name] for name in heads["source"]],
                "target": [number[name] for name in heads["target"]],
                **{name: _plain(heads[name]) for name in ("layer", "head", "dest", "src")},
                **{name: _plain(heads[name], _DIGITS) for name in ("pattern", "contribution")},
            },
            "scores": {name: _plain(scores[name], 5) for name in _SCORES},
        }
    number = _numbers(graph, [name for members in groups.values() for name in members], "these groups")
    # Unit -> what is known of it; the labels given here win over the audit's, and these over the graph's.
    cards = _cards(audit, units)
    sites = {parse_unit(unit)[0] for unit in units}
    given = {"{}/{}".format(*read_unit(unit, sites)): label for unit, label in labels.items()}
    described: dict[str, Any] = {}
    for unit, text in units.items():
        card, label = cards.get(unit), given.get(unit)
        if not isinstance(label, UnitLabel | str | None):
            raise TypeError(f"the label of {legible(unit)} is a {type(label).__name__}; give text, or UnitLabels")
        label = UnitLabel(label) if isinstance(label, str) else label or getattr(card, "label", None) or UnitLabel(text or "")
        about = {name: getattr(label, name) for name in ("label", "note", "author") if getattr(label, name)}
        described[unit] = {**about, **({} if card is None else _card(card))}
    return {
        "version": __version__,
        "graphs": values,
        "units": described,
        "groups": [
            {"name": visible(name), "members": [number[node] for node in members]} for name, members in groups.items() if members
        ],
        "factors": {site: identity for g in graphs for site, identity in (g.settings.get("factors") or {}).items()},
    }


def graph_values(graph: GraphData) -> dict[str, Any]:
    """One graph: nodes and edges column by column, an edge's ends as numbers of nodes. `row` of a unit counts its site among
    `rows`, the `execution_key` of each."""
    nodes, edges = graph.nodes, graph.edges
    number = {name: i for i, name in enumerate(nodes["node"])}
    settings = graph.settings
    rows = sorted({execution_key(site) for site in nodes["site"].dropna()})
    return {
        "model": visible(str(settings.get("model") or "")),
        "prompt": None if settings.get("prompt") is None else visible(settings["prompt"]),
        "prompts": settings.get("task_prompts"),
        "task": settings.get("task"),
        "attention_kind": settings.get("attention"),
        "tokens": [visible_token(str(token)) for token in settings.get("tokens") or []],
        "has_prompt": graph.has_prompt,
        "edges_possible": settings.get("edges_possible"),
        "rows": [list(row) for row in rows],
        "nodes": {
            **{name: _plain(nodes[name]) for name in _NODE_COLUMNS},
            **{name: _plain(nodes[name], _DIGITS) for name in _NODE_SUMS},
            "text": [visible(text or "") for text in nodes["label"]],
            "row": [rows.index(execution_key(site)) if isinstance(site, str) else None for site in nodes["site"]],
        },
        "edges": {
            "source": [number[name] for name in edges["source"]],
            "target": [number[name] for name in edges["target"]],
            "kind": list(edges["kind"]),
            **{name: _plain(edges[name], _DIGITS) for name in _EDGE_COLUMNS if name in edges},
        },
    }


def _numbers(graph: GraphData, names: Iterable[str], what: str) -> dict[str, int]:
    """Node -> its row. Raises ValueError where the graph does not have one of these."""
    number = {name: i for i, name in enumerate(graph.nodes["node"])}
    if missing := sorted({name for name in names if name not in number}):
        raise ValueError(f"{what} are of another graph: {len(missing)} of their nodes are not in this one, such as {missing[0]}")
    return number


def _cards(audit: Any, units: Iterable[str]) -> dict[str, UnitCard]:
    """The cards or profiles of the units that an audit, or an iterable of cards, has."""
    if audit is None:
        return {}
    if isinstance(audit, Audit):
        heard = set(audit.units)
        return {profile.unit: profile for profile in audit.profiles([unit for unit in units if unit in heard])}
    cards = list(audit) if isinstance(audit, Iterable) else [audit]
    for card in cards:
        if not isinstance(card, UnitCard):
            raise TypeError(
                f"audit must be an Audit, or cards of units (a study's, or Audit.profiles), got a {type(card).__name__}"
            )
    return {card.unit: card for card in cards}


def _card(card: UnitCard) -> dict[str, Any]:
    """The facts of a unit that hovering and clicking show; a context is [peak, pieces, z of each piece]."""
    contexts = []
    for context in (c.around_peak(_AROUND) for c in card.contexts[:_CONTEXTS]):
        pieces = ["".join(running_token(token)) for token in context.tokens]  # as it runs in text, leading spaces kept
        contexts.append([context.peak, pieces, [_rounded(z, _FEW_DIGITS) for z in context.z]])
    shown: dict[str, Any] = {"contexts": contexts}
    if card.logits is not None:
        for side in ("promoted", "suppressed"):
            tokens = getattr(card.logits, side)[:_PROMOTED]
            shown[side] = [[visible_token(token), _rounded(value, _FEW_DIGITS)] for token, value in tokens]
    ranks = [f"{task.replace('_', ' ')} rank {rank.rank:,}" for task, rank in card.tasks.items()]
    edges = [f"{of.n:,} {verb} edges" for verb, of in (("read", card.reads), ("write", card.writes)) if of]
    shown["facts"] = [*ranks, *edges]
    if isinstance(card, UnitProfile):
        counts = card.histogram.counts.tolist()
        used = [i for i, count in enumerate(counts) if count]
        if used:
            low, high = used[0], used[-1] + 1
            start = (low - len(counts) // 2) * card.histogram.width
            shown["histogram"] = {"start": start, "width": card.histogram.width, "counts": counts[low:high]}
        shown["tokens_heard"], shown["density"] = card.n_tokens, _rounded(card.density, _FEW_DIGITS)
    return shown


def _plain(column: pd.Series, digits: int | None = None) -> list[Any]:
    """A column as JSON has it: missing values are None, numbers keep this many digits, text is visible."""
    return [_value(value, digits) for value in column.astype(object)]


def _value(value: Any, digits: int | None) -> Any:
    if value is None or value is pd.NA:
        return None
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _rounded(float(value), digits or _DIGITS)


def _rounded(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _packed(values: Tensor) -> str:
    return base64.b64encode(values.detach().float().contiguous().cpu().numpy().astype("<f4").tobytes()).decode()
