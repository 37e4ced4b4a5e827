"""pruning: nodes as rows, the influence of each, and which edges are kept."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.graph.edges import KINDS, LOGIT, TOKEN, Group, Parts
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.analysis.graph.tables import EDGES, NODES, table
from swd_lens.base.panels import visible
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, Site, split_name


def require_edges(kinds: Tensor, chosen: Mapping[Site, list[int]], with_prompt: bool) -> None:
    """Raises ValueError where no two nodes can be joined, with what to add."""
    if bool(kinds.any()):
        return
    names = ", ".join(site.name for site in chosen)
    more = "" if with_prompt else ", name answers=[...] so that their logits can be reached, or give a prompt"
    raise ValueError(
        f"no unit of {names} can speak to another one directly: an edge needs a site that writes the residual stream (attn_o, "
        f"mlp_out) before one that reads it (attn_q, attn_k, attn_v, attn_qkv, mlp_in, mlp_gate). Add units of such sites{more}"
    )


def node_rows(
    model: Any, parts: Parts, ids: list[int] | None, score: Any, labels: Mapping[str, str]
) -> tuple[list[dict[str, Any]], Float[Tensor, " _node"]]:
    """One row per node, and every node's activation (tokens: 1)."""
    n_layers = len(model.blocks)
    decode = (lambda i: visible(model.tokenizer.decode([i]))) if model.tokenizer else str
    rows: list[dict[str, Any]] = []
    values: list[Tensor] = []
    probabilities = parts.run.logits.softmax(-1)
    first = 0 if ids is None else len(ids) - max(g.positions for g in parts.groups)
    ranks = score.ranks() if score is not None else {}
    for group in parts.groups:
        for p in range(group.positions):
            position = None if ids is None else len(ids) - 1 if group.name == LOGIT else first + p
            for item in group.items:
                row: dict[str, Any] = {"position": position}
                if group.name == TOKEN:
                    assert ids is not None and position is not None
                    row |= {"node": f"token@{position}", "kind": TOKEN, "layer": -1, "token": ids[position]}
                    row |= {"label": decode(ids[position])}
                elif group.site is None:
                    row |= {
                        "node": f"logit {item}",
                        "kind": LOGIT,
                        "layer": n_layers,
                        "token": item,
                        "label": decode(item),
                    }
                    row |= {"probability": None if ids is None else float(probabilities[item])}
                else:
                    name = f"{group.name}/{item}"
                    row |= {"node": name if position is None else f"{name}@{position}", "kind": "unit"}
                    row |= {"layer": group.site.layer, "site": group.name, "unit": item, "label": labels.get(name, "")}
                    if score is not None:
                        row |= {"score": float(score.scores[group.name][item]), "rank": int(ranks[group.name][item])}
                rows.append(row)
        values.append(_activations(parts, group, ids))
    return rows, torch.cat(values)


def _activations(parts: Parts, group: Group, ids: list[int] | None) -> Tensor:
    if ids is None:
        return torch.full((group.size,), float("nan"))
    if group.name == TOKEN:
        return torch.ones(group.size)
    if group.site is None:
        return parts.run.logits[list(group.items)] - parts.run.logits.mean()
    return parts.run.z[group.name][:, list(group.items)].flatten()


def pruned(
    rows: list[dict[str, Any]], z: Tensor, weight: Tensor, kinds: Tensor, parts: Parts, settings: dict[str, Any]
) -> UnitGraph:
    possible = kinds > 0
    nodes = table([{**row, "activation": value} for row, value in zip(rows, z.tolist(), strict=True)], NODES)
    if settings["token_ids"] is None:
        given, strength = torch.full_like(weight, float("nan")), weight.abs()
    else:
        given = z[:, None] * weight
        rest = z - given.sum(0)
        rest[: parts.groups[0].size] = 0.0  # tokens are where it begins
        influence, share = _influence(given, rest, nodes)
        strength = share * influence
        nodes = nodes.assign(rest=rest.double().numpy(), influence=influence.double().numpy())
    # -1: never kept. An edge of no strength (nothing it leads to reaches an answer) is kept only where all are asked for.
    eligible = possible & (weight.abs() >= settings["min_weight"]) & (weight != 0)
    if settings["keep"] is not None or settings["per_node"] is not None:
        eligible &= strength > 0
    strength = torch.where(eligible, strength, -1.0)
    if settings["per_node"] is not None:
        # By place and not by size: of equal ones the first are kept, and no more than asked for.
        weaker = torch.sort(strength, dim=0, descending=True, stable=True).indices[settings["per_node"] :]
        strength = strength.scatter(0, weaker, -1.0)
    wanted = int((strength >= 0).sum())
    n_kept = wanted if settings["keep"] is None else min(settings["keep"], wanted)
    order = torch.sort(strength.flatten(), descending=True, stable=True).indices[:n_kept]
    names = nodes["node"].tolist()
    kept = [
        {
            "source": names[i],
            "target": names[j],
            "kind": KINDS[int(kinds[i, j])],
            "weight": float(weight[i, j]),
            "contribution": float(given[i, j]),
            "strength": float(strength[i, j]),
        }
        for i, j in zip((order // len(names)).tolist(), (order % len(names)).tolist(), strict=True)
    ]
    used = {edge[end] for edge in kept for end in ("source", "target")}
    shown = nodes["node"].isin(used) | (nodes["kind"] == LOGIT)
    if settings["isolated"]:
        shown |= nodes["kind"] == "unit"
    counts = {"edges_possible": int(possible.sum()), "edges_to_choose_from": wanted, "nodes_possible": len(names)}
    return UnitGraph(pd.DataFrame(nodes[shown]).reset_index(drop=True), table(kept, EDGES), {**settings, **counts})


def _influence(given: Tensor, rest: Tensor, nodes: pd.DataFrame) -> tuple[Tensor, Tensor]:
    """How much of the ends each node holds, and each edge's share of what enters its target.

    influence = seed + share @ influence: nodes are in execution order, so the system is triangular. Seeds: the answers by
    probability, and the units of attention's inputs that no drawn path leaves (they act through the pattern, which is held),
    half each; all of one where there is no other. Without answers every unit that no drawn path leaves is a seed.
    """
    size = given.abs()
    share = size / (size.sum(0) + rest.abs()).clamp(min=1e-30)
    logit = torch.tensor((nodes["kind"] == LOGIT).to_numpy())
    pattern = [site is not None and split_name(site)[1] in READS_ATTENTION_INPUT for site in nodes["site"]]
    able = pattern if bool(logit.any()) else (nodes["kind"] == "unit").tolist()
    end = (size.sum(1) == 0) & (size.sum(0) > 0) & torch.tensor(able)
    seed = torch.zeros(len(size))
    if bool(logit.any()):
        likely = torch.tensor(nodes["probability"].fillna(0.0).to_numpy(dtype=float)[logit.numpy()]).float()
        seed[logit] = likely / likely.sum().clamp(min=1e-30)
    if bool(end.any()):
        seed = seed / 2 if bool(logit.any()) else seed
        seed[end] = (0.5 if bool(logit.any()) else 1.0) / int(end.sum())
    eye = torch.eye(len(size))
    influence = torch.linalg.solve_triangular(eye - share, seed[:, None], upper=True, unitriangular=True)[:, 0]
    return influence, share


def text_of(model: Any, ids: list[int]) -> str:
    return str(model.tokenizer.decode(ids)) if model.tokenizer else " ".join(map(str, ids))
