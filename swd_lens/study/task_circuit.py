"""task_circuit: the units of a task across layers, found quickly: what a graph is drawn of.

1. `screened_outputs` screens the dense host on aligned prompts: each attention and MLP output at the mean that every position has
   over the prompts, which takes from it what differs between them (names, numbers) and leaves what they share. `needed_sites`
   takes the outputs that cost most, and with an attention output its layer's queries and keys, which decide where it looks, and
   values, which bring what is there: so an attention edge has a unit at either end.
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

MOST = {"attn_o": 4, "mlp_out": 2}  # kind of output -> how many are taken
MATTERS = 0.1  # of the margin
_SCREENED_PROMPTS = 12
_LOOKS = ("attn_q", "attn_k")
_LEAST = 2  # units of a site: a graph without any does not show the site


@dataclass(frozen=True)
class NeededSites:
    """What a task needs of a host.

    Attributes:
        sites: to be factorized, in execution order.
        outputs: the attention and MLP outputs among them, the most needed first, and the share of the margin each costs.
    """

    sites: tuple[str, ...]
    outputs: Mapping[str, float]


def screened_outputs(model: Any, task: Task, aligned: Aligned, *, progress: bool = False) -> Screen:
    """The screen of all attention and MLP outputs on aligned prompts, which run as one batch."""
    return screen(
        model,
        replace(task, train=aligned.split),
        sites=list(MOST),
        surfaces={},
        positions="each",
        n_prompts=_SCREENED_PROMPTS,
        progress=progress,
    )


def needed_sites(model: Any, screened: Screen) -> NeededSites:
    """The sites that a graph of a task should have.

    Raises:
        ValueError: the host does not do the task on these prompts: its mean margin is not positive.
    """
    (task,) = screened.tasks.values()
    if task.margin <= 0:
        raise error("circuit-of-an-undone-task", task=task.task, margin=task.margin)
    best = sorted(screened.sites, key=lambda site: -task.dropped(site))
    of_kind = {kind: [site for site in best if split_name(site)[1] == kind][:most] for kind, most in MOST.items()}
    enough = [site for site in best if task.dropped(site) >= MATTERS * task.margin]
    outputs = [site for site in enough if site in of_kind[split_name(site)[1]]] or best[:1]
    layers = [split_name(site)[0] for site in outputs if split_name(site)[1] == "attn_o"]
    inputs = [f"blocks.{layer}.{part}" for layer in layers for part in (*_LOOKS, "attn_v")]
    sites = tuple(site.name for site in find_sites(model, [*outputs, *inputs]))
    return NeededSites(sites, {site: task.dropped(site) / task.margin for site in outputs})


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
