"""task_circuit: the units of a task across layers, found quickly: what a graph is drawn of.

1. `needed_sites` screens the dense host on aligned prompts: every attention output at all positions (names and numbers are moved
   before the last token), every MLP output at the scoring position (elsewhere MLPs are needed for everything). The outputs that
   cost most are taken, and with an attention output its layer's queries and keys, which decide where it looks, and values,
   which bring what is there: so an attention edge has a unit at either end.
2. `best_units` takes the best of the scored units of all these sites.
3. `example_of` is the aligned prompt that a reader should see: the first that the model gets right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swd_lens.base.errors import error
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.circuits import Circuit, UnitScores
from swd_lens.circuits.screen import Screen, screen
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import split_name
from swd_lens.tasks.aligned import Aligned
from swd_lens.tasks.split import TaskSplit
from swd_lens.tasks.task import Task

# kind of output -> where it is replaced by its mean, and how many are taken at the most.
SCREENED = {"attn_o": ("all", 4), "mlp_out": ("scoring", 2)}
MATTERS = 0.1  # of the margin
_SCREENED_PROMPTS = 8
_LOOKS = ("attn_q", "attn_k")
_LEAST = 2  # units of a site: a graph without any does not show the site


@dataclass(frozen=True)
class NeededSites:
    """What a task needs of a host.

    Attributes:
        sites: to be factorized, in execution order.
        outputs: the attention and MLP outputs among them, the most needed first, and the share of the margin each costs.
        screens: kind of output -> its screen.
    """

    sites: tuple[str, ...]
    outputs: Mapping[str, float]
    screens: Mapping[str, Screen]


def screened_outputs(model: Any, task: Task, aligned: Aligned, kind: str, *, progress: bool = False) -> Screen:
    """The screen of one kind of output on aligned prompts, which are run as one batch."""
    on_aligned = replace(task, train=aligned.split)
    positions, _ = SCREENED[kind]
    return screen(
        model,
        on_aligned,
        sites=kind,
        surfaces={},
        positions=positions,
        n_prompts=_SCREENED_PROMPTS,
        progress=progress,
    )


def needed_sites(model: Any, screens: Mapping[str, Screen]) -> NeededSites:
    """The sites that a graph of a task should have.

    Raises:
        ValueError: the host does not do the task on these prompts: its mean margin is not positive.
    """
    costs: dict[str, float] = {}
    shares: dict[str, float] = {}
    for kind, of_kind in screens.items():
        (task,) = of_kind.tasks.values()
        if task.margin <= 0:
            raise error("circuit-of-an-undone-task", task=task.task, margin=task.margin)
        all_shares = {site: task.dropped(site) / task.margin for site in of_kind.sites}
        best = sorted(all_shares, key=lambda site: -all_shares[site])
        costs |= {site: all_shares[site] for site in best[: SCREENED[kind][1]] if all_shares[site] >= MATTERS}
        shares |= all_shares
    if not costs:
        largest = max(shares, key=lambda site: shares[site])
        costs = {largest: shares[largest]}
    outputs = dict(sorted(costs.items(), key=lambda cost: -cost[1]))
    layers = [split_name(site)[0] for site in outputs if split_name(site)[1] == "attn_o"]
    inputs = [f"blocks.{layer}.{part}" for layer in layers for part in (*_LOOKS, "attn_v")]
    return NeededSites(tuple(site.name for site in find_sites(model, [*outputs, *inputs])), outputs, screens)


def best_units(factors: Any, scores: UnitScores, n: int) -> Circuit:
    """The n best units by score: a quarter of queries and keys where there are any, the rest of all else; of every site its best
    two at the least, as far as that leaves it at n.

    Apart, because the two are not on one scale: much of what queries and keys hold is the same for all sources, so that no
    pattern feels it, and first-order scores count it all the same.
    """
    looks = [unit for unit in scores.ranking() if split_name(unit[0])[1] in _LOOKS]
    others = [unit for unit in scores.ranking() if split_name(unit[0])[1] not in _LOOKS]
    n_looks = min(len(looks), n // 4) if others else n
    members = {*_of_every_site(looks, n_looks), *_of_every_site(others, n - n_looks)}
    return Circuit.of(
        factors, scores, [unit for unit in scores.ranking() if unit in members], chosen="best, for a graph"
    )


def _of_every_site(ranking: Sequence[tuple[str, int]], n: int) -> list[tuple[str, int]]:
    """The n best of a ranking, the first few of every site before the others."""
    place: dict[str, int] = {}
    order = []
    for rank, (site, unit) in enumerate(ranking):
        place[site] = place.get(site, 0) + 1
        order.append((place[site] > _LEAST, rank, (site, unit)))
    return [unit for _, _, unit in sorted(order)[:n]]


@in_plain_surroundings
def example_of(model: Any, split: TaskSplit) -> int:
    """Number of the first prompt of aligned ones that the model gets right; 0 where it gets none."""
    (bucket,) = split.buckets(len(split))
    with torch.no_grad():
        margins = bucket.margin(host_of(model).last_logits(bucket.tokens, token_ids=bucket.token_ids))
    rows: Sequence[int] = (margins > 0).nonzero().flatten().tolist()
    return int(bucket.index[rows[0]]) if rows else 0
