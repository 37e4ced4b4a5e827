"""attribute: how much each unit contributes to the task margin.

1. Attach the factors (the unpruned replacement) and run the training prompts. mu_i, the mean of z_i, is what ablation will
   put in a unit's place.
2. Per example and unit, a contribution to the margin (contributions.py): to first order, z * dg/dz, which is the paper's;
   or by integrated gradients, by ablating the unit, or along the direct path to the logits.
3. Sum it over positions (positions="all"), clamp each example's at zero (sign="positive"), then average over examples:
   a_i = E[max(0, z_i dg/dz_i)] (paper app. A.3).
4. Rank all units of all sites together, by descending score; ties by (site in execution order, unit).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.base._version import __version__
from swd_lens.circuits.contributions import CONTRIBUTIONS, Pass
from swd_lens.circuits.means import MEAN_OVER, Means
from swd_lens.circuits.roads import find_road
from swd_lens.circuits.scores import UnitScores, identities
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

POSITIONS = ("scoring", "all")
# What becomes of one example's contribution before the mean over examples.
SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda contribution: contribution.clamp(min=0),
    "signed": lambda contribution: contribution,
    "absolute": lambda contribution: contribution.abs(),
}
SCORES = tuple(CONTRIBUTIONS)


def attribute(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    *,
    score: str = "first_order",
    sign: str = "positive",
    positions: str = "scoring",
    mean_over: str | None = None,
    steps: int = 16,
    batch_size: int = 128,
    progress: bool = False,
) -> UnitScores:
    """Task-margin attribution of every unit under the unpruned replacement. The defaults are the paper's (app. A.3).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`: one site, a surface, or all sites; they share one ranking.
        prompts: the training split (a Task means its train split).
        score: "first_order" (paper): z * dg/dz. "integrated_gradients": (z - mu) times the mean gradient on the way from mu
            to z, site by site. "ablation": the margin that is lost when the unit alone is set to mu, exactly. "direct_logit":
            z times what its write vector does to the margin past all later layers (through the final norm); our reading
            of NaNA's score (method.md §4.2), only for sites that write to the residual stream.
        sign: "positive" (paper) clamps every example's contribution at zero, "absolute" takes its magnitude, "signed" leaves
            it; then the mean over examples. In every case the highest score ranks first.
        positions: "scoring" (paper): score, mean and later intervene at the last position only; "all": contributions summed
            over positions, interventions everywhere.
        mean_over: what mu averages: "scoring" (the last position of every prompt), "all_tokens", or "per_position" (one mean
            per position, counted from the end). None = "scoring" with positions="scoring", else "all_tokens".
        steps: points on the way of integrated gradients (midpoint rule).
        batch_size: prompts per forward.

    Raises:
        ValueError: unknown score, sign, positions or mean_over, steps below 1, or direct_logit at a site that does not write
            to the residual stream.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    if mean_over is None:
        mean_over = "scoring" if positions == "scoring" else "all_tokens"
    _check("score", score, SCORES)
    _check("sign", sign, tuple(SIGNS))
    _check("positions", positions, POSITIONS)
    _check("mean_over", mean_over, MEAN_OVER)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    split = prompts.train if isinstance(prompts, Task) else prompts
    if not isinstance(split, TaskSplit):
        raise TypeError(
            f"prompts must be a Task or a TaskSplit, got {type(split).__name__}; load_task(name, model) makes one"
        )
    split.require_vocabulary(model.cfg.d_vocab)
    require_no_dropout(model)
    host = host_of(model)
    with attach(model, factors) as attachment:
        units, sites = attachment.factors, attachment.sites
        road = find_road(host, sites, units, split, positions, known=score == "ablation")
        means = Means(host, sites, split, positions, mean_over, batch_size)
        turn = Pass(host, sites, units, road, means, steps)
        contributions = CONTRIBUTIONS[score](turn)
        totals = {site.name: torch.zeros(units[site.name].n_units, dtype=torch.float64) for site in sites}
        for bucket in tqdm(
            list(split.buckets(batch_size)), desc="attribution", unit="batch", disable=not progress, leave=False
        ):
            for name, contribution in contributions(bucket).items():
                totals[name] += SIGNS[sign](contribution).sum(0).cpu()
        found = means.finished()
    settings = {
        "score": score,
        "sign": sign,
        "ranking": "descending score over all sites; ties by (site, unit)",
        "positions": positions,
        "mean_over": mean_over,
        "split": split.name,
        "n_examples": len(split),
        "task": split.task,
        "task_source": split.source,
        "prepend_bos": split.prepend_bos,
        "units": {site.name: units[site.name].n_units for site in sites},
        "factors": identities(units),
        "swd_lens": __version__,
    }
    if score == "direct_logit":
        settings["note"] = "swd_lens' reading of NaNA's score, which the paper describes in words only"
    if score == "integrated_gradients":
        settings["steps"] = steps
    return UnitScores({name: (total / len(split)).float() for name, total in totals.items()}, found, settings)


def _check(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{what} must be one of {valid}, got {value!r}")
