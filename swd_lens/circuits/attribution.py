"""attribute: how much each unit contributes, to first order, to the task margin.

1. Attach the factors (the unpruned replacement). For each bucket of training prompts, read z at every attached site.
2. Differentiate the sum of margins by z. Per example and unit the contribution is z * dg/dz; with positions="all" it is
   summed over positions first.
3. Clamp each example's contribution at zero, then average over examples: a_i = E[max(0, z_i dg/dz_i)] (paper app. A.3).
   Beside it, mu_i = E[z_i], the value that ablation puts in a unit's place.
4. Rank all units of all sites together, by descending score; ties by (site in execution order, unit).

With positions="scoring" (the paper's) only the scoring position counts, so everything before it is run once without
gradient and its keys and values are kept; that is exact, because attention is causal. A host that cannot keep them runs
whole prompts, of which the last position is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.hosts import Host, host_of, require_no_dropout
from swd_lens.hosts.seen import require_seen
from swd_lens.inject import attach
from swd_lens.sites import Site
from swd_lens.tasks.task import Bucket, Task, TaskSplit

POSITIONS = ("scoring", "all")


@dataclass(frozen=True)
class UnitScores:
    """Scores and mean activations of every unit of every attached site.

    Attributes:
        scores: site -> (unit,) in logits of margin, non-negative.
        means: site -> (unit,) mean activation, what ablation puts in.
        settings: every choice that the scores depend on.
    """

    scores: Mapping[str, Float[Tensor, " _unit"]]
    means: Mapping[str, Float[Tensor, " _unit"]]
    settings: Mapping[str, Any]

    @property
    def n_units(self) -> int:
        return sum(len(s) for s in self.scores.values())

    def ranking(self) -> list[tuple[str, int]]:
        """All units, best first; equal scores in the order of sites, then units."""
        flat = torch.cat([s.cpu() for s in self.scores.values()])
        names = [(site, unit) for site, s in self.scores.items() for unit in range(len(s))]
        return [names[i] for i in torch.sort(flat, descending=True, stable=True).indices.tolist()]

    def ranks(self) -> dict[str, Tensor]:
        """site -> (unit,) global rank of each unit, 0 the best."""
        ranks = {site: torch.zeros(len(s), dtype=torch.int64) for site, s in self.scores.items()}
        for rank, (site, unit) in enumerate(self.ranking()):
            ranks[site][unit] = rank
        return ranks

    def top(self, n: int = 10) -> pd.DataFrame:
        """The n best units: name, score, mean activation."""
        rows = [
            {"unit": f"{site}/{unit}", "score": float(self.scores[site][unit]), "mean z": float(self.means[site][unit])}
            for site, unit in self.ranking()[:n]
        ]
        return pd.DataFrame(rows)


def attribute(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    *,
    positions: str = "scoring",
    batch_size: int = 128,
    progress: bool = False,
) -> UnitScores:
    """Positive first-order task-margin attribution under the unpruned replacement (paper app. A.3).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`.
        prompts: the training split (a Task means its train split).
        positions: "scoring" (paper): score, mean and later intervene at the last position only, mean over examples;
            "all": contributions summed over positions, mean over all tokens.
        batch_size: prompts per forward.

    Raises:
        ValueError: unknown positions.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    if positions not in POSITIONS:
        raise ValueError(f"positions must be one of {POSITIONS}, got {positions!r}")
    split = prompts.train if isinstance(prompts, Task) else prompts
    require_no_dropout(model)
    host = host_of(model)
    with attach(model, factors) as attachment:
        scores = {
            site.name: torch.zeros(attachment.factors[site.name].n_units, dtype=torch.float64)
            for site in attachment.sites
        }
        sums = {name: torch.zeros_like(total) for name, total in scores.items()}
        n_vectors = 0
        for bucket in tqdm(
            list(split.buckets(batch_size)), desc="attribution", unit="batch", disable=not progress, leave=False
        ):
            z, gradients = margin_gradients(host, attachment.sites, bucket, positions)
            n_vectors += len(bucket.index) * (1 if positions == "scoring" else bucket.tokens.shape[1])
            for name in scores:
                contribution = (z[name] * gradients[name]).double().sum(1)
                scores[name] += contribution.clamp(min=0).sum(0).cpu()
                sums[name] += z[name].double().sum((0, 1)).cpu()
    settings = {
        "score": "positive_first_order",
        "positions": positions,
        "mean_over": "scoring" if positions == "scoring" else "all_tokens",
        "split": split.name,
        "n_examples": len(split),
    }
    return UnitScores(
        {name: (total / len(split)).float() for name, total in scores.items()},
        {name: (total / n_vectors).float() for name, total in sums.items()},
        settings,
    )


def margin_gradients(
    host: Host, sites: list[Site], bucket: Bucket, positions: str
) -> tuple[dict[str, Float[Tensor, "batch pos _unit"]], dict[str, Float[Tensor, "batch pos _unit"]]]:
    """z and d margin / d z at every attached site, (batch, pos, unit); pos is 1 for positions="scoring"."""
    captured: dict[str, Tensor] = {}
    prefix = host.freeze_prefix(bucket.tokens) if positions == "scoring" else None

    def capture(name: str) -> Any:
        def keep(z: Tensor, hook: Any) -> Tensor:
            # With every parameter frozen z has no gradient path: then it is made a leaf.
            captured[name] = z if z.requires_grad else z.detach().requires_grad_(True)
            return captured[name]

        return keep

    with torch.enable_grad(), host.model.hooks(fwd_hooks=[(site.hook_name, capture(site.name)) for site in sites]):
        margins = bucket.margin(host.last_logits(bucket.tokens, prefix))
        require_seen(sites, captured, "units")
        gradients = torch.autograd.grad(margins.sum(), list(captured.values()))
    # Without a kept prefix all positions are there; the scoring position is the last one.
    chosen = slice(-1, None) if positions == "scoring" else slice(None)
    z = {name: value.detach()[:, chosen].float() for name, value in captured.items()}
    return z, {name: g[:, chosen].float() for name, g in zip(captured, gradients, strict=True)}
