"""task_circuit: the units of a task across layers, found quickly: what a graph is drawn of.

1. `screened_outputs` screens the dense host on aligned prompts: each attention and MLP output at the mean that every position has
   over the prompts, which takes from it what differs between them (names, numbers) and leaves what they share. `needed_sites`
   takes the outputs that change the margin most, and with an attention output its layer's queries and keys, which decide where
   it looks, and values, which bring what is there: so an attention edge has a unit at either end.
2. `scored_units` scores the units of all these sites on the same prompts, `best_units` takes those with the largest scores.

The prompts are those that the model does well (`well_done`); the one that a reader sees is in the middle of them (`example_of`).
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import legible
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import Circuit, UnitScores, attribute
from swd_lens.circuits.screen import Screen, screen
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import split_name
from swd_lens.tasks.aligned import Aligned, aligned_prompts, groups_of
from swd_lens.tasks.split import TaskSplit
from swd_lens.tasks.task import Task

MOST = {"attn_o": 4, "mlp_out": 2}  # kind of output -> how many are taken
MATTERS = 0.1  # of the margin
_SCREENED_PROMPTS = 12
_GROUPS = 8  # of aligned prompts, that are tried
_LOOKS = ("attn_q", "attn_k")
_LEAST = 2  # units of a site: a graph without any does not show the site


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


def needed_sites(model: Any, screened: Screen) -> tuple[list[str], dict[str, float]]:
    """The sites that a graph of a task should have, in execution order; and the attention and MLP outputs among them, the most
    needed first, with the share of the margin that each costs (below 0: it works against the task). Raises ValueError: the host
    does not do the task on these prompts: its mean margin is not positive."""
    (task,) = screened.tasks.values()
    if task.margin <= 0:
        raise ValueError(
            f"the model does not do {legible(task.task)}: its mean margin on aligned prompts is {task.margin:.2f}; name "
            "sites (--sites) to draw a graph all the same"
        )
    # Also those without which the margin is larger: a circuit has heads that work against it.
    best = sorted(screened.sites, key=lambda site: -abs(task.dropped(site)))
    of_kind = {kind: [site for site in best if split_name(site)[1] == kind][:most] for kind, most in MOST.items()}
    enough = [site for site in best if abs(task.dropped(site)) >= MATTERS * task.margin]
    outputs = [site for site in enough if site in of_kind[split_name(site)[1]]] or best[:1]
    layers = [split_name(site)[0] for site in outputs if split_name(site)[1] == "attn_o"]
    inputs = [f"blocks.{layer}.{part}" for layer in layers for part in (*_LOOKS, "attn_v")]
    sites = [site.name for site in find_sites(model, [*outputs, *inputs])]
    return sites, {site: task.dropped(site) / task.margin for site in outputs}


def scored_units(model: Any, factors: Any, aligned: Aligned, *, progress: bool = False) -> UnitScores:
    """Scores of all units on aligned prompts, at all positions: what it costs, to first order, to set a unit at each position to
    its mean there. What a unit holds on every prompt, as queries and keys often do, counts nothing.
    """
    how: dict[str, Any] = {"score": "attribution_patching", "sign": "signed", "mean_over": "per_position"}
    return attribute(model, factors, aligned.split, positions="all", progress=progress, **how)


def best_units(factors: Any, scores: UnitScores, n: int) -> Circuit:
    """The n units with the largest scores, also below 0: half of them of the outputs (attn_o, mlp_out), of each as many, because
    an output's effect lies in hundreds of units and that of keys in a few; of every other site two at the least.
    """
    units = [(-abs(float(s)), site, unit) for site, of_site in scores.scores.items() for unit, s in enumerate(of_site)]
    ranking = [(site, unit) for _, site, unit in sorted(units, key=lambda each: each[0])]
    outputs = [site for site in scores.scores if split_name(site)[1] in MOST]
    certain = dict.fromkeys(scores.scores, _LEAST) | dict.fromkeys(outputs, max(_LEAST, n // 2 // max(1, len(outputs))))
    place = dict.fromkeys(scores.scores, 0)
    order = []
    for rank, (site, unit) in enumerate(ranking):
        place[site] += 1
        order.append((place[site] > certain[site], rank, (site, unit)))
    members = [(rank, unit) for _, rank, unit in sorted(order)[:n]]
    return Circuit.of(factors, scores, [unit for _, unit in sorted(members)], chosen="largest scores, for a graph")


@with_torch_defaults
def well_done(model: Any, task: Task, n: int) -> Aligned:
    """The aligned prompts, among the largest groups of a task's training prompts, that the model does best in the mean."""
    tried = [aligned_prompts(model, task, n, like=like) for like in groups_of(task.train)[:_GROUPS]]
    most = max(len(aligned.split) for aligned in tried)
    return max(
        (aligned for aligned in tried if len(aligned.split) == most),
        key=lambda aligned: float(dense_margins(model, aligned.split).mean()),
    )


@with_torch_defaults
def dense_margins(model: Any, split: TaskSplit) -> Float[Tensor, " prompt"]:
    """The margin of each of the prompts, all of one length, in the dense host."""
    (bucket,) = split.buckets(len(split))
    with torch.no_grad():
        margins = bucket.margin(host_of(model).last_logits(bucket.tokens, token_ids=bucket.token_ids))
    return margins[bucket.index.argsort()].cpu()


def example_of(model: Any, split: TaskSplit) -> int:
    """Number of the prompt whose margin is in the middle of those of aligned prompts: neither an easy one nor a hard one."""
    order = dense_margins(model, split).argsort(stable=True)
    return int(order[len(order) // 2])
