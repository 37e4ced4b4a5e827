"""evaluate: nested top-k prefixes of a ranking, kept and ablated on prompts; what each costs and what it does.

1. The grid of k: 0, 1, 2, 3, 4, 6, 8, 12, ... (powers of two and three times powers of two, 640; method.md §0.5) and all units.
2. For every k keep the k best units (the rest get their reference activation) and ablate them (they get it), all in one
   list of interventions (interventions.py).
3. Of a task both the validation and the test prompts: prefixes are chosen on the first and measured on the second. On the
   validation prompts random sets of as many edges are ablated beside the prefixes, from the shortest on, until one prefix's
   drop is above the 95th percentile of theirs: the smallest admissible prefix.
4. What the surface carries, what each prefix recovers, its sufficiency and drop, with intervals (measure.py); cost in units
   (|S|, invalid ones included), active edges (valid units' read and write nonzeros) and bits (bits.py).

`evaluate_circuits` does the same for circuits of any other making.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.errors import quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.ablation import replaced_masks
from swd_lens.circuits.bits import selection_bits, unit_bits_of
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.curve import MIB_FRACTIONS, CostCurve
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import Masks
from swd_lens.circuits.interventions import InterventionRunner, Outcome
from swd_lens.circuits.measure import Carried, Margins, measured
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

RANDOM_SETS = 50  # beside each prefix, until one is admissible; the paper's code draws as many
_CHOICE = ["recovered", "recovered of dense", "sufficiency", "drop", "q keep", "q ablate"]  # what a prefix is chosen by
_BEST_RANDOM = 0.95  # the percentile of their drops that an admissible prefix is above
_PAPER_LENGTHS = (640,)  # of the paper's code, beside the powers


def prefix_grid(n_units: int) -> list[int]:
    """0, then 2^a, 3 * 2^a and 640 below n_units, then n_units (method.md §0.5; 0 is the empty circuit)."""
    powers = {base << a for base in (1, 3) for a in range(n_units.bit_length())}
    return sorted({0, n_units} | {k for k in powers.union(_PAPER_LENGTHS) if k < n_units})


@with_torch_defaults
def evaluate(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    scores: UnitScores,
    *,
    grid: Iterable[Any] | str | None = None,
    ablation: str = "mean",
    kl: bool = False,
    random_sets: int = RANDOM_SETS,
    seed: int = 0,
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseCache | None = None,
    progress: bool = False,
) -> CostCurve:
    """Measure nested prefixes of the scores' ranking (paper §2.2, §protocol).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        prompts: a task: its validation prompts choose prefixes, its test prompts measure them. A single split does both.
        scores: from `attribute`; they fix the ranking, the positions and the mean activations.
        grid: prefix lengths; None = `prefix_grid`; "mib" adds to it the prefixes that `CostCurve.mib` needs. The empty circuit
            and the whole set of units are always added.
        ablation: "mean" (paper), "zero", or "resample": each prompt's units get their activations on its corrupt prompt.
        kl: also measure KL from the replacement with all units at the scoring position; slower, it needs the whole vocabulary.
        random_sets: how many random sets stand beside a prefix on the validation prompts, see `CostCurve.smallest_admissible`; 0
            draws none.
        seed: of their draw.
        batch_size: prompts per bucket.
        tokens_per_forward: prompts x positions x interventions at once; it bounds memory.
        dense: what the dense host gives on prompts, kept for further replacements of it (`compare` hands it on).

    Raises:
        ValueError: scores of other factors, a prefix length outside 0 .. number of units, an unknown ablation or grid, or a
            negative number of random sets.
        TaskError: ablation="resample" without fitting corrupt prompts.

    Warns:
        UndefinedSufficiencyWarning: the mean margin with all units is not positive; sufficiency is NaN.
    """
    split = prompts.test if isinstance(prompts, Task) else prompts
    if random_sets < 0:
        raise ValueError(f"random_sets must be 0 or more sets beside each prefix, got {random_sets}")
    require_no_dropout(model)
    how: dict[str, Any] = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    with attach(model, factors) as attachment:
        attachment.factors.require_made_for(scores.settings, "this ranking")
        edges, provenance = attachment.factors.active_edges, attachment.factors.provenance
        bench = InterventionRunner(
            host_of(model), attachment, split, scores, ablation, progress=progress, dense=dense, **how
        )
        lengths = _lengths(grid, scores, edges)
        ranked = torch.tensor([int(edges[site][unit]) for site, unit in scores.ranking()])
        costs = [0, *ranked.cumsum(0).tolist()]
        bits = unit_bits_of(attachment.factors)
        head = pd.DataFrame({"units": lengths, "edges": [costs[k] for k in lengths]})
        head["bits"] = _bits_of_prefixes(bits, scores, lengths)

        outcome, full = _keep_and_ablate(bench, scores, lengths, kl)
        of_dense = bench.dense()
        validation = pd.DataFrame()
        if isinstance(prompts, Task):
            bench = InterventionRunner(
                host_of(model), attachment, prompts.validation, scores, ablation, dense=dense, **how
            )
            validation = _on_validation(bench, scores, head, ranked, random_sets, seed)
    margins = _margins(outcome, full, of_dense)
    carried = Carried.of(margins.full, margins.empty, float(of_dense.q))
    rows = pd.concat([head, measured(margins, carried, split.task), _further(outcome)], axis=1)
    settings = {
        **scores.settings,
        "ablation": ablation,
        "test_split": split.name,
        "n_test": len(split),
        "n_validation": len(prompts.validation) if isinstance(prompts, Task) else 0,
        "grid": grid if isinstance(grid, str) else "powers" if grid is None else "own",
        "random_sets": random_sets,
        "random_sets_seed": seed,
        "replacement": provenance,
        **standing_hooks(model),
    }
    return CostCurve(
        rows=rows,
        task=split.task,
        q_dense=carried.q_dense,
        q_full=float(full.q),
        q_empty=float(margins.empty.mean()),
        carried_se=carried.se,
        accuracy_dense=float(of_dense.correct.mean()),
        accuracy_full=float(full.correct.mean()),
        settings=settings,
        validation=validation,
        scores=scores,
        edges=edges,
        bits=bits,
        margins={"keep": margins.keep, "ablate": margins.ablate, "full": margins.full, "dense": margins.dense},
    )


def _bits_of_prefixes(
    bits: Mapping[str, Float[Tensor, " _unit"]], scores: UnitScores, lengths: list[int]
) -> list[float]:
    """What it takes to write down each prefix (bits.py)."""
    ranked = torch.tensor([float(bits[site][unit]) for site, unit in scores.ranking()], dtype=torch.float64)
    total = torch.cat([torch.zeros(1, dtype=torch.float64), ranked.cumsum(0)])
    return [float(total[k]) + selection_bits(len(ranked), k) for k in lengths]


def _keep_and_ablate(
    bench: InterventionRunner, scores: UnitScores, lengths: list[int], kl: bool
) -> tuple[Outcome, Outcome]:
    """All prefixes kept, then all ablated; and the replacement with all units."""
    ranks = scores.ranks()
    thresholds = torch.tensor([*lengths, *lengths])[:, None]
    keeps = torch.arange(len(thresholds))[:, None] < len(lengths)

    def masks(chunk: slice) -> Masks:
        k, keep = thresholds[chunk], keeps[chunk]
        return {site: (rank[None] > k) == keep for site, rank in ranks.items()}

    return bench.run(len(thresholds), masks, kl=kl)


def _margins(outcome: Outcome, full: Outcome, dense: Outcome) -> Margins:
    """Margins of circuits whose first is the empty one: the first half of the runs keep them, the second half ablate them."""
    half = len(outcome.margins) // 2
    keep, ablate = outcome.margins[:half], outcome.margins[half:]
    return Margins(keep, ablate, full.margins[0], keep[0], dense.margins[0])


def _further(outcome: Outcome) -> pd.DataFrame:
    """Columns that are no margins: accuracy, and KL where it was measured."""
    half = len(outcome.margins) // 2
    columns = {"accuracy keep": outcome.correct.mean(1)[:half], "accuracy ablate": outcome.correct.mean(1)[half:]}
    if not bool(outcome.kl.isnan().all()):
        columns |= {"KL keep": outcome.kl.mean(1)[:half], "KL ablate": outcome.kl.mean(1)[half:]}
    return pd.DataFrame({name: values.tolist() for name, values in columns.items()})


def _on_validation(
    bench: InterventionRunner,
    scores: UnitScores,
    head: pd.DataFrame,
    ranked: Int[Tensor, " unit"],
    random_sets: int,
    seed: int,
) -> pd.DataFrame:
    """`CostCurve.validation`: the prefixes on the validation prompts, and the drops of random sets beside them.

    Args:
        ranked: active edges of each unit, in the order of the ranking.
    """
    outcome, full = _keep_and_ablate(bench, scores, head["units"].tolist(), False)
    margins = _margins(outcome, full, bench.dense())
    # Whether they carry the task is said of the test prompts; here any positive difference can be a denominator.
    carried = Carried(float((margins.full - margins.empty).mean()), 0.0, 0.0)
    rows = measured(margins, carried, bench.split.task, warn=False)
    rows = pd.concat([head, rows[_CHOICE]], axis=1)
    if not random_sets:
        return rows
    generator = torch.Generator().manual_seed(seed)
    places = {site: ranks - 1 for site, ranks in scores.ranks().items()}
    best = [float("nan")] * len(rows)
    for i, (n_edges, drop) in enumerate(zip(rows["edges"], rows["drop"], strict=True)):
        if n_edges and carried.enough:
            drawn = torch.stack([random_set(ranked, n_edges, generator) for _ in range(random_sets)])
            ablated, _ = bench.run(random_sets, lambda rows, d=drawn: {s: d[rows][:, at] for s, at in places.items()})
            best[i] = float(torch.quantile(float(full.q) - ablated.q, _BEST_RANDOM))
            if drop > best[i]:
                break
    return rows.assign(**{"random drop": best})


def random_set(edges: Int[Tensor, " unit"], most: int, generator: torch.Generator) -> Bool[Tensor, " unit"]:
    """Units in random order, each taken where its edges still fit; units without edges are not drawn.

    Args:
        edges: of each unit.
        most: edges that the set may have.
    """
    order = torch.randperm(len(edges), generator=generator)
    in_order, drawn = edges[order], torch.zeros(len(edges), dtype=torch.bool)
    at, room = 0, most
    while True:
        fits = ((in_order[at:] > 0) & (in_order[at:] <= room)).nonzero()[:, 0]
        if not len(fits):
            return drawn
        at += int(fits[0])
        drawn[order[at]] = True
        room -= int(in_order[at])
        at += 1


@with_torch_defaults
def evaluate_circuits(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    circuits: Circuit | Mapping[str, Circuit],
    *,
    ablation: str = "mean",
    kl: bool = False,
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseCache | None = None,
) -> pd.DataFrame:
    """Measure circuits on test prompts: a row per circuit with the columns of `CostCurve.rows`, and "circuit".

    Args:
        circuits: one, or several by name, all found with the same scores.
        otherwise see `evaluate`.

    Raises:
        ValueError: no circuit, circuits of several scores (their reference activations differ), and see `evaluate`.
    """
    split = prompts.test if isinstance(prompts, Task) else prompts
    named = {"circuit": circuits} if isinstance(circuits, Circuit) else dict(circuits)
    if not named:
        raise ValueError('nothing to judge: pass a circuit, or {"name": circuit, ...}')
    scores = next(iter(named.values())).scores
    if not all(_same_scores(circuit.scores, scores) for circuit in named.values()):
        raise ValueError("these circuits were found with different scores; judge them in separate calls")
    require_no_dropout(model)
    how: dict[str, Any] = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    # The empty circuit first: what the others recover is measured from it.
    sets = [replaced_masks(scores, [], "keep"), *(circuit.masks("keep") for circuit in named.values())]
    keep = {site: torch.stack([of_set[site] for of_set in sets]) for site in sets[0]}
    masks = {site: torch.cat([replaced, ~replaced]) for site, replaced in keep.items()}
    with attach(model, factors) as attachment:
        bench = InterventionRunner(host_of(model), attachment, split, scores, ablation, dense=dense, **how)
        outcome, full = bench.run(
            2 * len(sets), lambda chunk: {site: mask[chunk] for site, mask in masks.items()}, kl=kl
        )
        of_dense = bench.dense()
    margins = _margins(outcome, full, of_dense)
    carried = Carried.of(margins.full, margins.empty, float(of_dense.q))
    head = pd.DataFrame(
        {
            "circuit": list(named),
            "units": [circuit.n_units for circuit in named.values()],
            "edges": [circuit.n_edges for circuit in named.values()],
            "bits": [circuit.n_bits for circuit in named.values()],
        }
    )
    rows = pd.concat([measured(margins, carried, split.task), _further(outcome)], axis=1)
    return pd.concat([head, rows.iloc[1:].reset_index(drop=True)], axis=1)


def _same_scores(a: UnitScores, b: UnitScores) -> bool:
    """Whether two circuits' scores are the same, or the same again (read from a file): settings do not say which prompts."""
    return a is b or (a.settings == b.settings and all(torch.equal(a.means[site], b.means[site]) for site in a.means))


def _lengths(grid: Iterable[Any] | str | None, scores: UnitScores, edges: Mapping[str, Tensor]) -> list[int]:
    n_units = scores.n_units
    if isinstance(grid, str):
        if grid != "mib":
            raise ValueError(f'grid must be prefix lengths, None or "mib", got {quoted(grid)}')
        costs = torch.tensor([int(edges[site][unit]) for site, unit in scores.ranking()]).cumsum(0)
        whole = int(costs[-1])
        by_edges = [int((costs <= fraction * whole).sum()) for fraction in MIB_FRACTIONS]
        wanted = {*prefix_grid(n_units), *(int(fraction * n_units) for fraction in MIB_FRACTIONS), *by_edges}
    else:
        wanted = {*prefix_grid(n_units)} if grid is None else {0, *map(_length, grid), n_units}
    lengths = sorted(wanted)
    if lengths[0] < 0 or lengths[-1] > n_units:
        raise ValueError(f"prefix lengths must lie in 0 .. {n_units}, got {lengths[0]} .. {lengths[-1]}")
    return lengths


def _length(k: Any) -> int:
    try:
        return operator.index(k)
    except TypeError:
        raise ValueError(f"prefix lengths must be whole numbers, got {quoted(k)}") from None
