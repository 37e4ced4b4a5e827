"""evaluate: nested top-k prefixes of a ranking, kept and ablated on test prompts; what each costs and what it does.

1. The grid of k: 0, 1, 2, 3, 4, 6, 8, 12, ... (powers of two and three times powers of two, method.md §0.5) and all units.
2. For every k keep the k best units (the rest get their reference activation) and ablate them (they get it), all in one
   list of interventions (bench.py).
3. Sufficiency = Q(keep) / Q(unpruned), necessity drop = Q(unpruned) - Q(ablate) in logits, Q the mean margin over test
   prompts; cost in units (|S|, invalid ones included) and active edges (valid units' read and write nonzeros).
4. Intervals by bootstrap over the prompts.

`judge` does the same for circuits of any other making.
"""

import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from swd_lens.base.errors import callers_level, error, warning
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.circuits.bench import Bench, Outcome
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.curve import MIB_FRACTIONS, CostCurve, interval, resampled
from swd_lens.circuits.kept import DenseRuns
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.shortcuts import Masks
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach


def prefix_grid(n_units: int) -> list[int]:
    """0, then 2^a and 3 * 2^a below n_units, then n_units (method.md §0.5; 0 is the empty circuit)."""
    steps = {0, n_units} | {base << a for base in (1, 3) for a in range(n_units.bit_length()) if base << a < n_units}
    return sorted(steps)


@in_plain_surroundings
def evaluate(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    scores: UnitScores,
    *,
    grid: Iterable[Any] | str | None = None,
    ablation: str = "mean",
    kl: bool = False,
    bootstrap: int = 1000,
    seed: int = 0,
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseRuns | None = None,
    progress: bool = False,
) -> CostCurve:
    """Judge nested prefixes of the scores' ranking on test prompts (paper §2.2, §protocol).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        prompts: the test split (a Task means its test split).
        scores: from `attribute`; they fix the ranking, the positions and the mean activations.
        grid: prefix lengths; None = `prefix_grid`; "mib" adds to it the prefixes that `CostCurve.mib` needs. The whole set of
            units is always added.
        ablation: "mean" (paper), "zero", or "resample": each prompt's units get their activations on its corrupt prompt.
        kl: also measure KL from the unpruned replacement at the scoring position; slower, it needs the whole vocabulary.
        bootstrap: draws of the prompts for the 95 % intervals; 0 for none.
        seed: of these draws.
        batch_size: prompts per bucket.
        tokens_per_forward: prompts x positions x interventions at once; it bounds memory.
        dense: what the dense host gives on prompts, kept for further replacements of it (`compare` hands it on).

    Raises:
        ValueError: scores of other factors, a prefix length outside 0 .. number of units, or an unknown ablation or grid.
        TaskError: ablation="resample" without fitting corrupt prompts.

    Warns:
        UndefinedSufficiencyWarning: the unpruned replacement's mean margin is not positive; sufficiency is NaN.
    """
    split = prompts.test if isinstance(prompts, Task) else prompts
    if bootstrap < 0:
        raise error("negative-bootstrap", bootstrap=bootstrap)
    require_no_dropout(model)
    how: dict[str, Any] = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    with attach(model, factors) as attachment:
        edges, provenance = attachment.factors.active_edges, attachment.factors.provenance
        bench = Bench(host_of(model), attachment, split, scores, ablation, progress=progress, dense=dense, **how)
        lengths = _lengths(grid, scores, edges)
        ranks = scores.ranks()
        # Interventions in one list: keep the k best, for every k, then ablate the k best.
        thresholds = torch.tensor([*lengths, *lengths])[:, None]
        keeps = torch.arange(len(thresholds))[:, None] < len(lengths)

        def masks(chunk: slice) -> Masks:
            k, keep = thresholds[chunk], keeps[chunk]
            return {site: (rank[None] > k) == keep for site, rank in ranks.items()}

        outcome, unpruned = bench.run(len(thresholds), masks, kl=kl)
        of_dense = bench.dense()
    ranking = scores.ranking()
    costs = [0, *torch.tensor([int(edges[site][unit]) for site, unit in ranking]).cumsum(0).tolist()]
    head = pd.DataFrame({"units": lengths, "edges": [costs[k] for k in lengths]})
    rows = pd.concat([head, _rows(outcome, unpruned, bootstrap, seed, split.task)], axis=1)
    settings = {
        **scores.settings,
        "ablation": ablation,
        "test_split": split.name,
        "n_test": len(split),
        "grid": grid if isinstance(grid, str) else "powers" if grid is None else "own",
        "bootstrap": bootstrap,
        "bootstrap_seed": seed,
        "replacement": provenance,
        **standing_hooks(model),
    }
    margins = {"keep": outcome.margins[: len(lengths)], "ablate": outcome.margins[len(lengths) :]}
    margins |= {"unpruned": unpruned.margins[0], "dense": of_dense.margins[0]}
    return CostCurve(
        rows=rows,
        task=split.task,
        q_dense=float(of_dense.q),
        q_unpruned=float(unpruned.q),
        accuracy_dense=float(of_dense.correct.mean()),
        accuracy_unpruned=float(unpruned.correct.mean()),
        settings=settings,
        scores=scores,
        edges=edges,
        margins=margins,
    )


@in_plain_surroundings
def judge(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    circuits: Circuit | Mapping[str, Circuit],
    *,
    ablation: str = "mean",
    kl: bool = False,
    bootstrap: int = 1000,
    seed: int = 0,
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseRuns | None = None,
) -> pd.DataFrame:
    """What circuits cost and do on test prompts: a row per circuit with the columns of `CostCurve.rows`, and "circuit".

    Args:
        circuits: one, or several by name, all found with the same scores.
        otherwise see `evaluate`; bootstrap=0 leaves the intervals out.

    Raises:
        ValueError: no circuit, circuits of several scores (their reference activations differ), and see `evaluate`.
    """
    split = prompts.test if isinstance(prompts, Task) else prompts
    named = {"circuit": circuits} if isinstance(circuits, Circuit) else dict(circuits)
    if not named:
        raise error("nothing-to-judge")
    scores = next(iter(named.values())).scores
    if not all(_same_scores(circuit.scores, scores) for circuit in named.values()):
        raise error("judged-with-different-scores")
    require_no_dropout(model)
    how: dict[str, Any] = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    both = [circuit.masks(mode) for mode in ("keep", "ablate") for circuit in named.values()]
    with attach(model, factors) as attachment:
        bench = Bench(host_of(model), attachment, split, scores, ablation, dense=dense, **how)
        masks = {site: torch.stack([of_run[site] for of_run in both]) for site in both[0]}
        outcome, unpruned = bench.run(
            len(both), lambda chunk: {site: mask[chunk] for site, mask in masks.items()}, kl=kl
        )
    head = pd.DataFrame(
        {
            "circuit": list(named),
            "units": [circuit.n_units for circuit in named.values()],
            "edges": [circuit.n_edges for circuit in named.values()],
        }
    )
    return pd.concat([head, _rows(outcome, unpruned, bootstrap, seed, split.task)], axis=1)


def _same_scores(a: UnitScores, b: UnitScores) -> bool:
    """Whether two circuits' scores are the same, or the same again (read from a file): settings do not say which prompts."""
    return a is b or (a.settings == b.settings and all(torch.equal(a.means[site], b.means[site]) for site in a.means))


def _lengths(grid: Iterable[Any] | str | None, scores: UnitScores, edges: Mapping[str, Tensor]) -> list[int]:
    n_units = scores.n_units
    if isinstance(grid, str):
        if grid != "mib":
            raise error("unknown-grid", grid=grid)
        costs = torch.tensor([int(edges[site][unit]) for site, unit in scores.ranking()]).cumsum(0)
        whole = int(costs[-1])
        by_edges = [int((costs <= fraction * whole).sum()) for fraction in MIB_FRACTIONS]
        wanted = {*prefix_grid(n_units), *(int(fraction * n_units) for fraction in MIB_FRACTIONS), *by_edges}
    else:
        wanted = {*prefix_grid(n_units)} if grid is None else {*map(_length, grid), n_units}
    lengths = sorted(wanted)
    if lengths[0] < 0 or lengths[-1] > n_units:
        raise error("prefix-lengths-outside", n_units=n_units, first=lengths[0], last=lengths[-1])
    return lengths


def _length(k: Any) -> int:
    try:
        return operator.index(k)
    except TypeError:
        raise error("prefix-lengths-not-whole", length=k) from None


def _rows(outcome: Outcome, unpruned: Outcome, bootstrap: int, seed: int, task: str) -> pd.DataFrame:
    """What kept (first half of the runs) and ablated (second half) circuits do."""
    half = len(outcome.margins) // 2
    keep, ablate = outcome.q[:half], outcome.q[half:]
    q = float(unpruned.q)
    if not q > 0:
        warnings.warn(warning("undefined-sufficiency", task=task, margin=q), stacklevel=callers_level())
    columns: dict[str, Tensor] = {
        "sufficiency": keep / q if q > 0 else torch.full_like(keep, math.nan),
        "necessity drop": q - ablate,
    }
    if bootstrap:
        # Kept, ablated and unpruned are resampled together: their errors are those of the same prompts.
        samples = resampled(torch.cat([outcome.margins, unpruned.margins]), bootstrap, seed)
        whole = samples[:, -1:]
        ratio = torch.where((whole > 0) & (q > 0), samples[:, :half] / whole, math.nan)
        for name, values in (("sufficiency", ratio), ("necessity drop", whole - samples[:, half:-1])):
            columns[f"{name} low"], columns[f"{name} high"] = interval(values.double())
    columns |= {"q keep": keep, "q ablate": ablate}
    columns |= {"accuracy keep": outcome.correct.mean(1)[:half], "accuracy ablate": outcome.correct.mean(1)[half:]}
    if not bool(outcome.kl.isnan().all()):
        columns |= {"KL keep": outcome.kl.mean(1)[:half], "KL ablate": outcome.kl.mean(1)[half:]}
    return pd.DataFrame({name: values.tolist() for name, values in columns.items()})
