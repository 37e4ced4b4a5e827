"""evaluate: nested top-k prefixes of a ranking, kept and ablated on prompts; what each costs and what it does.

1. The grid of k: 0, 1, 2, 3, 4, 6, 8, 12, ... (powers of two and three times powers of two, 640; method.md §0.5) and all units
   (`_Prefixes`).
2. For every k keep the k best units (the rest get their reference activation) and ablate them (they get it), all in one
   list of interventions (interventions.py).
3. Of a task both the validation and the test prompts: prefixes are chosen on the first and measured on the second. On the
   validation prompts random sets of as many edges are ablated beside the prefixes, from the shortest on, until one prefix's
   drop is above the 95th percentile of theirs: the smallest admissible prefix.
4. What the surface carries, what each prefix recovers, its sufficiency and drop, with intervals (measure.py); cost in units
   (|S|, invalid ones included), active edges (valid units' read and write nonzeros) and bits (bits.py).

`evaluate_circuits` does the same for circuits of any other making.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.checks import bounded
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
from swd_lens.units import UnitSet, attach

RANDOM_SETS = 50  # beside each prefix, until one is admissible, at most; the paper's code draws as many
_CHOICE = ["recovered", "recovered of dense", "sufficiency", "drop", "q keep", "q ablate"]  # what a prefix is chosen by
_BEST_RANDOM = 0.95  # the percentile of their drops that an admissible prefix is above
_FIRST_ROUND = 10  # random sets that are run before the others
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
    bounded("random_sets", random_sets, 0)
    require_no_dropout(model)
    how = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward, "dense": dense}
    with attach(model, factors) as attachment:
        units, validation = attachment.factors, pd.DataFrame()
        units.require_made_for(scores.settings, "this ranking")
        prefixes = _Prefixes.of(units, scores, grid)
        runner_of = partial(InterventionRunner, host_of(model), attachment, scores=scores, ablation=ablation, **how)
        if isinstance(prompts, Task):
            judged, chosen_by = _judged_on_both(runner_of, prompts, prefixes, kl, progress, dense)
            of_validation, carried = partial(runner_of, prompts.validation), judged.carried.enough
            validation = _on_validation(of_validation, chosen_by, prompts, prefixes, random_sets, seed, carried)
        else:
            judged = _judged(runner_of(split, progress=progress), prefixes.lengths, prefixes.left_out, kl=kl)
    settings = {**scores.settings, "ablation": ablation, "test_split": split.name, "n_test": len(split)}
    settings |= {"n_validation": len(prompts.validation) if isinstance(prompts, Task) else 0}
    settings |= {"grid": grid if isinstance(grid, str) else "powers" if grid is None else "own"}
    settings |= {"random_sets": random_sets, "random_sets_seed": seed, "replacement": units.provenance}
    carried, margins = judged.carried, judged.margins
    return CostCurve(
        rows=pd.concat([prefixes.costs, judged.rows(split.task)], axis=1),
        task=split.task,
        q_dense=carried.q_dense,
        q_full=float(judged.full.q),
        q_empty=float(margins.empty.mean()),
        carried_se=carried.se,
        accuracy_dense=float(judged.dense.correct.mean()),
        accuracy_full=float(judged.full.correct.mean()),
        settings=settings | standing_hooks(model),
        validation=validation,
        scores=scores,
        edges=prefixes.edges,
        bits=prefixes.bits,
        margins={name: getattr(margins, name) for name in ("keep", "ablate", "full", "dense")},
    )


@dataclass(frozen=True)
class _Prefixes:
    """The prefixes of a grid, and what they cost."""

    ranks: Mapping[str, Int[Tensor, " _unit"]]  # of all units among each other, 1 the best
    lengths: list[int]  # of each prefix
    edges: Mapping[str, Int[Tensor, " _unit"]]  # edges, bits: of all units
    bits: Mapping[str, Float[Tensor, " _unit"]]
    ranked: Int[Tensor, " unit"]  # active edges of each unit, in the order of the ranking
    costs: pd.DataFrame  # a row per prefix: "units", "edges", "bits"

    @classmethod
    def of(cls, units: UnitSet, scores: UnitScores, grid: Iterable[Any] | str | None) -> "_Prefixes":
        """Prefixes of a grid, ascending. Raises ValueError: another name than "mib", or a length that is no whole number in
        0 .. number of units."""
        edges, bits, ranking = units.active_edges, unit_bits_of(units), scores.ranking()
        ranked, n_units = torch.tensor([int(edges[site][unit]) for site, unit in ranking]), len(ranking)
        if grid is None:
            lengths = prefix_grid(n_units)
        elif isinstance(grid, str):
            if grid != "mib":
                raise ValueError(f'grid must be prefix lengths, None or "mib", got {quoted(grid)}')
            costs = ranked.cumsum(0)
            by_edges = [int((costs <= fraction * int(costs[-1])).sum()) for fraction in MIB_FRACTIONS]
            lengths = sorted({*prefix_grid(n_units), *(int(fraction * n_units) for fraction in MIB_FRACTIONS), *by_edges})
        else:
            given = grid.tolist() if isinstance(grid, Tensor) else list(grid)
            for length in given:
                bounded("prefix length", length, 0, n_units)
            lengths = sorted({0, n_units, *map(int, given)})
        ranked_bits = torch.tensor([float(bits[site][unit]) for site, unit in ranking], dtype=torch.float64)
        of_edges, of_bits = ([0, *of_units.cumsum(0).tolist()] for of_units in (ranked, ranked_bits))
        table = pd.DataFrame({"units": lengths, "edges": [of_edges[k] for k in lengths]})
        table["bits"] = [of_bits[k] + selection_bits(n_units, k) for k in lengths]
        return cls(scores.ranks(), lengths, edges, bits, ranked, table)

    def left_out(self, rows: Int[Tensor, " circuit"]) -> Masks:
        """Site -> (circuit, unit), True where a unit is not in these prefixes."""
        lengths = torch.tensor(self.lengths)[rows, None]
        return {site: ranks[None] > lengths for site, ranks in self.ranks.items()}


@dataclass(frozen=True)
class _Judged:
    """Outcomes of circuits, the empty one first, each kept and ablated on the prompts of one split."""

    outcome: Outcome  # of all circuits kept, then of all ablated
    full: Outcome  # full, dense: of all units, and of the dense host
    dense: Outcome
    kl: bool  # whether KL was measured

    def of_prompts(self, prompts: slice) -> "_Judged":
        """Take some of the prompts, with all circuits."""
        return _Judged(self.outcome.of_prompts(prompts), self.full.of_prompts(prompts), self.dense.of_prompts(prompts), self.kl)

    @property
    def margins(self) -> Margins:
        keep, ablate = self.outcome.margins.chunk(2)
        return Margins(keep, ablate, self.full.margins[0], keep[0], self.dense.margins[0])

    @property
    def carried(self) -> Carried:
        return Carried.of(self.margins.full, self.margins.empty, float(self.dense.q))

    def rows(self, task: str) -> pd.DataFrame:
        """One row per circuit: `CostCurve.rows` without costs."""
        further = pd.DataFrame()
        for name, of_runs in {"accuracy": self.outcome.correct, **({"KL": self.outcome.kl} if self.kl else {})}.items():
            further[f"{name} keep"], further[f"{name} ablate"] = of_runs.mean(1).view(2, -1).tolist()
        return pd.concat([measured(self.margins, self.carried, task), further], axis=1)


def _judged(runner: InterventionRunner, circuits: Sized, left_out: Callable[[Tensor], Masks], kl: bool = False) -> _Judged:
    """Run all circuits kept, then all ablated; of `circuits` (the empty one first) only the number is looked at. left_out: rows
    of it -> masks of the units that are replaced when these are kept."""
    n = len(circuits)

    def masks(chunk: slice) -> Masks:
        runs = torch.arange(2 * n)[chunk]
        return {site: mask ^ (runs >= n)[:, None] for site, mask in left_out(runs % n).items()}

    outcome, full = runner.run(2 * n, masks, kl=kl)
    return _Judged(outcome, full, runner.dense(), kl)


def _judged_on_both(
    runner_of: Callable[..., InterventionRunner],
    task: Task,
    prefixes: _Prefixes,
    kl: bool,
    progress: bool,
    dense: DenseCache | None,
) -> tuple[_Judged, _Judged]:
    """The prefixes on the test prompts and on the validation prompts. Prompts of one length run together, whichever split they
    are of: half as many forwards. Where KL is asked for, of the test prompts, or the splits have metrics of their own, each split
    has its own runs."""
    run = partial(_judged, circuits=prefixes.lengths, left_out=prefixes.left_out)
    if kl or task.test.metric is not task.validation.metric:
        return run(runner_of(task.test, progress=progress), kl=kl), run(runner_of(task.validation))
    if dense is None:
        prompts = task.test.and_then(task.validation)
    else:  # always the same object, by which results are kept
        key = ("and then", id(task.validation))
        prompts = dense.of_split(task.test, key, lambda: (task.test.and_then(task.validation), task.validation))[0]
    of_both = run(runner_of(prompts, progress=progress))
    n = len(task.test)
    return of_both.of_prompts(slice(n)), of_both.of_prompts(slice(n, None))


def _on_validation(
    runner_of: Callable[..., InterventionRunner],
    judged: _Judged,
    task: Task,
    prefixes: _Prefixes,
    random_sets: int,
    seed: int,
    carried: bool,
) -> pd.DataFrame:
    """`CostCurve.validation`: the prefixes on the validation prompts, and, of a task that is carried, the drops of random sets
    beside them."""
    margins = judged.margins
    # Whether they carry the task is said of the test prompts; here any positive difference can be a denominator.
    on_validation = Carried(float((margins.full - margins.empty).mean()), 0.0, 0.0)
    rows = measured(margins, on_validation, task.validation.task, warn=False)
    rows = pd.concat([prefixes.costs, rows[_CHOICE]], axis=1)
    if not random_sets:
        return rows
    runner = runner_of(keep=True)
    generator = torch.Generator().manual_seed(seed)
    places = {site: ranks - 1 for site, ranks in prefixes.ranks.items()}
    percentiles, n_run = [float("nan")] * len(rows), [0] * len(rows)
    for i, (n_edges, drop) in enumerate(zip(rows["edges"], rows["drop"], strict=True)):
        # Of units that do not carry the task no prefix is admissible, whatever random sets do.
        if n_edges and carried and on_validation.enough:
            sets = torch.stack([random_set(prefixes.ranked, n_edges, generator) for _ in range(random_sets)])
            masks = {site: sets[:, at] for site, at in places.items()}
            percentiles[i], n_run[i] = _random_drop(runner, masks, float(judged.full.q), float(drop))
            if drop > percentiles[i]:
                break
    return rows.assign(**{"random drop": percentiles, "random sets": n_run})


def _random_drop(runner: InterventionRunner, sets: Masks, full: float, drop: float) -> tuple[float, int]:
    """The percentile `_BEST_RANDOM` of the drops of random sets, and how many were run. Where it is sure after the first ones
    that the percentile is not below `drop`, the others are not run, and it is the least that it can be."""
    n = len(next(iter(sets.values())))
    drops, done, percentile = torch.full((n,), -math.inf, dtype=torch.float64), 0, -math.inf
    place = _BEST_RANDOM * (n - 1)
    while done < n and percentile < drop:
        end = n if done else min(_FIRST_ROUND, n)
        of_round = {site: of_site[done:end] for site, of_site in sets.items()}
        ablated, _ = runner.run(end - done, lambda rows, of=of_round: {site: mask[rows] for site, mask in of.items()})
        drops[done:end] = full - ablated.q
        done = end
        # As `torch.quantile` has it; sets that were not run count as the lowest.
        below, above = drops.sort().values[[math.floor(place), math.ceil(place)]]
        percentile = float(below if math.isinf(below) else torch.lerp(below, above, place % 1))
    return percentile, done


def random_set(edges: Int[Tensor, " unit"], most: int, generator: torch.Generator) -> Bool[Tensor, " unit"]:
    """Units in random order, each taken where its edges (`edges` of each) still fit into `most`; units without edges are not
    drawn."""
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
    """Measure circuits on test prompts: one row per circuit, with the columns of `CostCurve.rows` and "circuit", its
    name (paper §protocol).

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
    for own in (circuit.scores for circuit in named.values()):
        # Settings do not say which prompts the scores are of; scores that were read from a file again are the same.
        same = own.settings == scores.settings and all(torch.equal(own.means[s], scores.means[s]) for s in scores.means)
        if own is not scores and not same:
            raise ValueError("these circuits were found with different scores; judge them in separate calls")
    require_no_dropout(model)
    how = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward, "dense": dense}
    # The empty circuit first: what the others recover is measured from it.
    sets = [replaced_masks(scores, [], "keep"), *(circuit.masks("keep") for circuit in named.values())]
    left_out = {site: torch.stack([of_set[site] for of_set in sets]) for site in sets[0]}
    with attach(model, factors) as attachment:
        runner = InterventionRunner(host_of(model), attachment, split, scores, ablation, **how)
        judged = _judged(runner, sets, lambda rows: {site: mask[rows] for site, mask in left_out.items()}, kl=kl)
    head = pd.DataFrame({"circuit": list(named)})
    for column, of in (("units", "n_units"), ("edges", "n_edges"), ("bits", "n_bits")):
        head[column] = [getattr(circuit, of) for circuit in named.values()]
    return pd.concat([head, judged.rows(split.task).iloc[1:].reset_index(drop=True)], axis=1)
