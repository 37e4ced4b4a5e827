"""attribute: how much each unit contributes to the task margin.

1. Attach the factors (the unpruned replacement) and run the training prompts. mu_i, the mean of z_i, is what ablation will
   put in a unit's place.
2. Per example and unit, a contribution to the margin, in logits, by one of the definitions of contributions.py (`SCORES`).
3. Sum it over positions (positions="all"), clamp each example's at zero (sign="positive"), then average over examples:
   a_i = E[max(0, z_i dg/dz_i)] (paper app. A.3).
4. Rank all units of all sites together, by descending score; ties by (site in execution order, unit).
"""

from collections.abc import Callable
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.ablation import MEAN_OVER, Means
from swd_lens.circuits.contributions import SCORES, TrainingPass
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import find_fast_forward
from swd_lens.circuits.scores import UnitScores, require_finite
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

POSITIONS = ("scoring", "all")
# What becomes of one example's contribution before the mean over examples.
SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda contribution: contribution.clamp(min=0),
    "signed": lambda contribution: contribution,
    "absolute": lambda contribution: contribution.abs(),
}


@with_torch_defaults
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
    dense: DenseCache | None = None,
    progress: bool = False,
) -> UnitScores:
    """Task-margin attribution of every unit under the unpruned replacement. The defaults are the paper's (app. A.3).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`: one site, a surface, or all sites; they share one ranking.
        prompts: the training split (a Task means its train split).
        score: how a contribution is defined; the names are listed below.
        sign: "positive" (paper) clamps every example's contribution at zero, "absolute" takes its magnitude, "signed" leaves
            it; then the mean over examples. In every case the highest score ranks first.
        positions: "scoring" (paper): score, mean and later intervene at the last position only; "all": contributions summed
            over positions, interventions everywhere.
        mean_over: what mu averages: "scoring" (the last position of every prompt), "all_tokens", or "per_position" (one mean
            per position, counted from the end). None = "scoring" with positions="scoring", else "all_tokens".
        steps: points on the way of integrated gradients (midpoint rule).
        batch_size: prompts per forward.
        dense: what the dense host gives on prompts, kept for further replacements of it (`compare` hands it on).

    Raises:
        ValueError: unknown score, sign, positions or mean_over, steps below 1, or direct_logit at a site that does not write
            to the residual stream; a score or a mean that is not finite.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    if mean_over is None:
        mean_over = "scoring" if positions == "scoring" else "all_tokens"
    for name, value, choices in (
        *(("score", score, SCORES), ("sign", sign, SIGNS)),
        *(("positions", positions, POSITIONS), ("mean_over", mean_over, MEAN_OVER)),
    ):
        one_of(name, value, choices)
    bounded("steps", steps, 1)
    split = prompts.train if isinstance(prompts, Task) else prompts
    if not isinstance(split, TaskSplit):
        made = "load_task(name, model) makes one"
        raise TypeError(f"prompts must be a Task or a TaskSplit, got {type(split).__name__}; {made}")
    split.require_host(model)
    require_no_dropout(model)
    chosen, host = SCORES[score], host_of(model)
    if chosen.gradients:
        require_gradients(model)
    with attach(model, factors) as attachment:
        units, sites = attachment.factors, attachment.sites
        fast_forward = find_fast_forward(host, sites, units, split, positions, known=chosen.known, dense=dense)
        means = Means(host, sites, split, positions, mean_over, batch_size)
        training = TrainingPass(host, units, fast_forward, means, steps, dense)
        totals = {site: torch.zeros(size, dtype=torch.float64) for site, size in units.sizes.items()}
        buckets = list(split.buckets(batch_size))
        for bucket in tqdm(buckets, desc="attribution", unit="batch", disable=not progress, leave=False):
            of_bucket = chosen.of(training, bucket)
            require_finite(f"the score ({score})", of_bucket)
            for name, contribution in of_bucket.items():
                totals[name] += SIGNS[sign](contribution).sum(0).cpu()
        mean_z = means.finished()
    require_finite("the mean activation", mean_z)
    settings = {"score": score, "sign": sign, "ranking": "descending score over all sites; ties by (site, unit)"}
    settings |= {"positions": positions, "mean_over": mean_over, "split": split.name, "n_examples": len(split)}
    settings |= {"task": split.task, "task_source": split.source, "prepend_bos": split.prepend_bos}
    settings |= {"units": units.sizes, "factors": units.identities, "swd_lens": __version__, **standing_hooks(model)}
    settings |= {"note": chosen.note} if chosen.note else {}
    settings |= {"steps": steps} if chosen.steps else {}
    mean_scores = {name: (total / len(split)).float() for name, total in totals.items()}
    return UnitScores(mean_scores, mean_z, settings, units.heads)


_HELP = [
    fill(f'"{name}": {each.about}', 120, initial_indent=" " * 8, subsequent_indent=" " * 12) for name, each in SCORES.items()
]
attribute.__doc__ = f"{(attribute.__doc__ or '').rstrip()}\n\n    Scores (mu: the unit's mean, g: the margin):\n" + "\n".join(
    _HELP
)
