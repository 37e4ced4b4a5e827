"""Pruning: the influence of each node, and which edges are kept.

1. With a prompt an edge's contribution is its source's activation times its weight; its strength is its share of what enters its
   target, times the target's influence. Without one its strength is its |weight|.
2. The strongest edges are kept, in all and into each node; nodes without a kept edge are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from swd_lens.analysis.graph.data import EDGES, table
from swd_lens.analysis.graph.edges import KINDS, LOGIT, TOKEN, UNIT
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, split_name


def pruned(
    nodes: pd.DataFrame,
    weight: Float[Tensor, "node node"],
    kinds: UInt8[Tensor, "node node"],
    settings: Mapping[str, Any],
    contribution: Float[Tensor, "node node"] | None = None,
    varies: Float[Tensor, "node node"] | None = None,
) -> UnitGraph:
    """The graph of the strongest edges.

    Args:
        nodes: all that could be drawn, with their activations.
        weight, kinds: of every pair (source, target), see `swd_lens.analysis.graph.edges.weights`.
        settings: of `unit_graph`; keep, min_weight, per_node and isolated say what is kept.
        contribution: of every pair, where it is not activation times weight: a mean over prompts.
        varies: of every pair, for such a mean.
    """
    possible = kinds > 0
    if settings["token_ids"] is None:
        contribution, strength = torch.full_like(weight, float("nan")), weight.abs()
    else:
        z = torch.tensor(nodes["activation"].to_numpy()).float()
        contribution = z[:, None] * weight if contribution is None else contribution
        rest = z - contribution.sum(0)
        rest[torch.tensor((nodes["kind"] == TOKEN).to_numpy())] = 0.0  # tokens are where it begins
        influence, share = _influence(contribution, rest, nodes, settings.get("targets"))
        strength = share * influence
        nodes = nodes.assign(rest=rest.double().numpy(), influence=influence.double().numpy())
    # -1: never kept. An edge of no strength (nothing it leads to reaches an answer) is kept only where all are asked for.
    eligible = possible & (weight.abs() >= settings["min_weight"]) & (weight != 0)
    if settings.get("targets"):
        # By their target: a path leads from there to a target of the graph, or it is one.
        reached = _target_nodes(nodes, settings["targets"])
        while bool(((further := (possible.float() @ reached.float() > 0) | reached) != reached).any()):
            reached = further
        eligible &= reached
    if settings["keep"] is not None or settings["per_node"] is not None:
        eligible &= strength > 0
    strength = torch.where(eligible, strength, -1.0)
    if settings["per_node"] is not None:
        # By order and not by size: of equal ones the first are kept, and no more than asked for.
        weaker = torch.sort(strength, dim=0, descending=True, stable=True).indices[settings["per_node"] :]
        strength = strength.scatter(0, weaker, -1.0)
    n_eligible = int((strength >= 0).sum())
    n_kept = n_eligible if settings["keep"] is None else min(settings["keep"], n_eligible)
    order = torch.sort(strength.flatten(), descending=True, stable=True).indices[:n_kept]
    names = nodes["node"].tolist()
    edges = [
        {
            "source": names[i],
            "target": names[j],
            "kind": KINDS[int(kinds[i, j])],
            "weight": float(weight[i, j]),
            "contribution": float(contribution[i, j]),
            "strength": float(strength[i, j]),
            "varies": None if varies is None else float(varies[i, j]),
        }
        for i, j in zip((order // len(names)).tolist(), (order % len(names)).tolist(), strict=True)
    ]
    ends = {edge[end] for edge in edges for end in ("source", "target")}
    shown = nodes["node"].isin(ends) | (nodes["kind"] == LOGIT)
    if settings["isolated"]:
        shown |= nodes["kind"] == UNIT
    counts = {"edges_possible": int(possible.sum()), "edges_to_choose_from": n_eligible, "nodes_possible": len(names)}
    return UnitGraph(pd.DataFrame(nodes[shown]).reset_index(drop=True), table(edges, EDGES), {**settings, **counts})


def _target_nodes(nodes: pd.DataFrame, targets: Sequence[str]) -> Bool[Tensor, " node"]:
    """The nodes of these units, at the last position."""
    units = zip(nodes["site"], nodes["unit"], strict=True)
    named = [site is not None and f"{site}/{unit}" in targets for site, unit in units]
    last = nodes["position"].isna() | (nodes["position"] == nodes["position"].max())
    return torch.tensor(named) & torch.tensor(last.fillna(True).to_numpy(dtype=bool))


def _influence(
    contribution: Tensor, rest: Tensor, nodes: pd.DataFrame, targets: Sequence[str] | None = None
) -> tuple[Tensor, Tensor]:
    """How much of the ends each node holds, and each edge's share of what enters its target.

    influence = seed + share @ influence: nodes are in execution order, so the system is triangular. Seeds: the answers by
    probability, and the units of attention's inputs that no drawn path leaves (they act through the pattern, which is held),
    half each; all of one where there is no other. Without answers every unit that no drawn path leaves is a seed. With targets
    these are the seeds, all of equal weight.
    """
    size = contribution.abs()
    share = size / (size.sum(0) + rest.abs()).clamp(min=1e-30)
    logit = torch.tensor((nodes["kind"] == LOGIT).to_numpy())
    with_answers = bool(logit.any())
    pattern = [site is not None and split_name(site)[1] in READS_ATTENTION_INPUT for site in nodes["site"]]
    able = pattern if with_answers else (nodes["kind"] == UNIT).tolist()
    end = (size.sum(1) == 0) & (size.sum(0) > 0) & torch.tensor(able)
    seed = torch.zeros(len(size), dtype=torch.float32)
    if with_answers:
        likely = torch.tensor(nodes["probability"].fillna(0.0).to_numpy(dtype=float)[logit.numpy()]).float()
        seed[logit] = likely / likely.sum().clamp(min=1e-30)
    if bool(end.any()):
        seed = seed / 2 if with_answers else seed
        seed[end] = (0.5 if with_answers else 1.0) / int(end.sum())
    if targets:
        chosen = _target_nodes(nodes, targets)
        seed = chosen.float() / int(chosen.sum())
    eye = torch.eye(len(size), dtype=torch.float32)
    influence = torch.linalg.solve_triangular(eye - share, seed[:, None], upper=True, unitriangular=True)[:, 0]
    return influence, share
