"""evaluate: nested top-k prefixes of a ranking, kept and ablated on test prompts; what each costs and what it does.

1. The grid of k: 0, 1, 2, 3, 4, 6, 8, 12, ... (powers of two and three times powers of two, method.md §0.5) and all units.
2. For every k keep the k best units (the rest get their means) and ablate them (they get their means); the margin is
   averaged over test prompts.
3. Sufficiency = Q(keep) / Q(unpruned), necessity drop = Q(unpruned) - Q(ablate) in logits; cost in units (|S|, invalid ones
   included) and active edges (valid units' read and write nonzeros).
4. `CostCurve.cost_at` gives the least cost among prefixes that reach a threshold; curves need not be monotone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.circuits.attribution import UnitScores
from swd_lens.circuits.intervene import ablation_values, run_interventions
from swd_lens.figures import new_figure, style
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.inject import Units, attach
from swd_lens.tasks.task import Bucket, Task, TaskSplit

COSTS = ("edges", "units")


def prefix_grid(n_units: int) -> list[int]:
    """0, then 2^a and 3 * 2^a below n_units, then n_units (method.md §0.5; 0 is the empty circuit)."""
    steps = {0, n_units} | {base << a for base in (1, 3) for a in range(n_units.bit_length()) if base << a < n_units}
    return sorted(steps)


@dataclass(frozen=True)
class CostCurve:
    """What nested prefixes of a ranking cost and do, on one task.

    Attributes:
        rows: one row per prefix: units, edges, sufficiency, necessity_drop (logits), q_keep, q_ablate (mean margins, logits),
            accuracy_keep, accuracy_ablate (best answer above every distractor).
        task: the task's name.
        q_dense, q_unpruned: mean test margin of the dense host and of the unpruned replacement, in logits.
        accuracy_dense, accuracy_unpruned: the same for accuracy.
        settings: the scores' settings plus ablation, split and number of prompts.
    """

    rows: pd.DataFrame
    task: str
    q_dense: float
    q_unpruned: float
    accuracy_dense: float
    accuracy_unpruned: float
    settings: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """A copy of the rows."""
        return self.rows.copy()

    def cost_at(
        self, *, sufficiency: float | int | None = None, necessity: float | int | None = None, cost: str = "edges"
    ) -> int | None:
        """The least cost among prefixes that reach a threshold; None if none does.

        Args:
            sufficiency: reach Q(keep) / Q(unpruned) >= this.
            necessity: reach a necessity drop >= this fraction of the drop that ablating every unit causes.
            cost: "edges" or "units".

        Raises:
            ValueError: not exactly one threshold, or an unknown cost.
        """
        if (sufficiency is None) == (necessity is None):
            raise ValueError("give exactly one threshold: sufficiency=0.9 or necessity=0.5")
        if cost not in COSTS:
            raise ValueError(f"cost must be one of {COSTS}, got {cost!r}")
        if sufficiency is not None:
            reached = self.rows["sufficiency"] >= sufficiency
        else:
            whole = self.rows["necessity_drop"].iloc[-1]
            # Ablating everything helps (or does nothing): there is no drop to take a fraction of.
            reached = (self.rows["necessity_drop"] >= (necessity or 0.0) * whole) & (whole > 0)
        return int(self.rows.loc[reached, cost].min()) if reached.any() else None

    def plot(self, cost: str = "edges"):
        """Sufficiency and necessity drop against cost; a matplotlib Figure."""
        return plot_curves({"": self}, cost=cost)

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "q_dense": self.q_dense,
            "q_unpruned": self.q_unpruned,
            "accuracy_dense": self.accuracy_dense,
            "accuracy_unpruned": self.accuracy_unpruned,
            "settings": dict(self.settings),
            "rows": self.rows.to_dict("records"),
        }


def evaluate(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    scores: UnitScores,
    *,
    grid: Sequence[int] | None = None,
    ablation: str = "mean",
    batch_size: int = 256,
    tokens_per_forward: int = 8_192,
    progress: bool = False,
) -> CostCurve:
    """Judge nested prefixes of the scores' ranking on test prompts (paper §2.2, §protocol).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        prompts: the test split (a Task means its test split).
        scores: from `attribute`; they fix the ranking, the positions and the mean activations.
        grid: prefix lengths; None = `prefix_grid`. The whole set of units is always added.
        ablation: "mean" (paper) or "zero".
        batch_size: prompts per bucket.
        tokens_per_forward: prompts x positions x interventions at once;
            it bounds memory (the kept keys and values are copied per intervention).

    Raises:
        ValueError: scores of other sites than the factors', or a prefix length outside 0 .. number of units.
    """
    split = prompts.test if isinstance(prompts, Task) else prompts
    lengths = _check_grid(grid, scores.n_units)
    ranks, values = scores.ranks(), ablation_values(scores, ablation)
    require_no_dropout(model)
    host = host_of(model)
    with torch.no_grad(), attach(model, factors) as attachment:
        _check_scores(scores, attachment.factors)
        # Interventions in one list: keep the k best, for every k, then ablate the k best.
        replaced = {
            site: torch.stack([rank >= k for k in lengths] + [rank < k for k in lengths])
            for site, rank in ranks.items()
        }
        totals = torch.zeros(2 * len(lengths), 2, dtype=torch.float64)
        unpruned = torch.zeros(2, dtype=torch.float64)
        dense = torch.zeros(2, dtype=torch.float64)
        for bucket in tqdm(
            list(split.buckets(batch_size)), desc="circuits", unit="batch", disable=not progress, leave=False
        ):
            with attachment.suspended():
                dense += _totals(bucket, host.last_logits(bucket.tokens))
            prefix = host.freeze_prefix(bucket.tokens) if scores.settings["positions"] == "scoring" else None
            unpruned += _totals(bucket, host.last_logits(bucket.tokens, prefix))
            for chunk in _chunks(len(totals), max(1, tokens_per_forward // bucket.tokens.numel())):
                masks = {site: mask[chunk] for site, mask in replaced.items()}
                logits = run_interventions(host, bucket, prefix, masks, values, scores.settings["positions"])
                totals[chunk] += torch.stack([_totals(bucket, one) for one in logits])
    rows = _rows(lengths, totals / len(split), unpruned / len(split), scores, attachment.factors)
    settings = {**scores.settings, "ablation": ablation, "test_split": split.name, "n_test": len(split)}
    settings |= {"replacement": dict(getattr(factors, "provenance", {}))}
    (q_dense, acc_dense), (q, acc) = (dense / len(split)).tolist(), (unpruned / len(split)).tolist()
    return CostCurve(rows, split.task, q_dense, q, acc_dense, acc, settings)


def _check_grid(grid: Sequence[int] | None, n_units: int) -> list[int]:
    lengths = sorted({*prefix_grid(n_units)} if grid is None else {*grid, n_units})
    if lengths[0] < 0 or lengths[-1] > n_units:
        raise ValueError(f"prefix lengths must lie in 0 .. {n_units}, got {lengths[0]} .. {lengths[-1]}")
    return lengths


def _check_scores(scores: UnitScores, factors: Mapping[str, Units]) -> None:
    scored = {site: len(s) for site, s in scores.scores.items()}
    attached = {site: f.n_units for site, f in factors.items()}
    if scored != attached:
        raise ValueError(
            f"these scores are of {scored}, the factors are {attached} (site: units); attribute these factors first"
        )


def _totals(bucket: Bucket, logits: Tensor) -> Tensor:
    """(sum of margins, number correct) over the bucket."""
    return torch.stack([bucket.margin(logits).double().sum().cpu(), bucket.correct(logits).double().sum()])


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _rows(
    lengths: list[int], means: Tensor, unpruned: Tensor, scores: UnitScores, factors: Mapping[str, Units]
) -> pd.DataFrame:
    edges = {site: torch.where(f.valid_units, f.edges_per_unit, 0).tolist() for site, f in factors.items()}
    cumulative = [0]
    for site, unit in scores.ranking():
        cumulative.append(cumulative[-1] + edges[site][unit])
    q = float(unpruned[0])
    keep, ablate = means[: len(lengths)], means[len(lengths) :]
    return pd.DataFrame(
        {
            "units": lengths,
            "edges": [cumulative[k] for k in lengths],
            # Undefined where the unpruned replacement has no margin to keep (method.md §5.4).
            "sufficiency": (keep[:, 0] / q).tolist() if q > 0 else [math.nan] * len(lengths),
            "necessity_drop": (q - ablate[:, 0]).tolist(),
            "q_keep": keep[:, 0].tolist(),
            "q_ablate": ablate[:, 0].tolist(),
            "accuracy_keep": keep[:, 1].tolist(),
            "accuracy_ablate": ablate[:, 1].tolist(),
        }
    )


def plot_curves(curves: Mapping[str, CostCurve], cost: str = "edges"):
    """Sufficiency (left) and necessity drop (right) against cost, one line per named curve; a matplotlib Figure."""
    figure, axes = new_figure(1, 2)
    for ax, column in zip(axes[0], ("sufficiency", "necessity_drop"), strict=True):
        draw_curves(ax, curves, column, cost)
    if len(curves) > 1:
        axes[0, 0].legend(fontsize=8, frameon=False)
    task = next(iter(curves.values())).task
    figure.suptitle(task.replace("_", " "), fontsize=10)
    return figure


def draw_curves(ax: Any, curves: Mapping[str, CostCurve], column: str, cost: str) -> None:
    """One panel: a cost curve per method on a log axis that still shows the empty circuit (cost 0)."""
    for index, (label, curve) in enumerate(curves.items()):
        ax.plot(
            curve.rows[cost], curve.rows[column], label=label, marker="o", markersize=2.5, linewidth=1.4, **style(index)
        )
    costs = pd.concat([curve.rows[cost] for curve in curves.values()])
    if (costs > 0).any():
        ax.set_xscale("symlog", linthresh=costs[costs > 0].min())
    ax.set_xlim(left=0)
    ax.set_xlabel(f"active {cost}" if cost == "edges" else "units", fontsize=9)
    ax.set_ylabel({"sufficiency": "sufficiency", "necessity_drop": "necessity drop (logits)"}[column], fontsize=9)
    if column == "sufficiency":
        ax.axhline(1.0, color="#888888", linewidth=0.8)
