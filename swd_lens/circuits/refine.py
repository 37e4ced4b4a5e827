"""refine: a cheaper circuit than the best prefix that reaches a threshold on prompts it was not searched on.

1. Search on training prompts, at three targets above the one that was asked for: how far above, the validation prompts say, by
   how much a circuit's value can differ between them and as many test prompts as there are.
   a. The best prefix: of all prefixes of the ranking that were tried, the cheapest that reaches the target. Beside the grid,
      those between its last insufficient and its first sufficient length are tried.
   b. Remove: measure what each unit of the circuit adds to Q(keep); remove together as many as possible of those that add
      least per cost while the rest stays sufficient, or else the dearest single one that can go; measure again, until none can.
   c. Exchange: add the few outside units that would add most per cost, and remove again; keep the outcome if it is cheaper.
      Stop after `rounds` exchanges, or when none helps.
2. Stop on the validation prompts: of all circuits that the search has been at, the cheapest whose value there lies so far above
   the threshold that it can be expected on the test prompts, too (a one-sided 95 % prediction bound). The prefix beside it is
   chosen by the same rule.
3. Judge both on the test prompts, which nothing was chosen on.

`robust` holds the threshold under attack (attack.py): an adversary restores outside units of the circuit that 2. has chosen, and
what it finds is added to what every circuit is tried with; 1. and 2. are done again, until the adversary finds nothing that takes
the chosen circuit below the threshold. A circuit's value then is the lowest over all restorations found so far.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import legible
from swd_lens.base.figures import INK, new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.attack import BUDGET, Adversary, attack, partial_masks, valid_in_ranking
from swd_lens.circuits.bits import unit_bits_of
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.evaluate import evaluate_circuits, prefix_grid
from swd_lens.circuits.fast_forward import Masks
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.circuits.measure import COSTS, Margins, Threshold, by_content, contents_of, t_quantile
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

# Group sizes tried at once in one removal, and units added at once in one exchange.
_GROUPS, _ADDED = 24, (1, 4, 16)
# Units whose single effect is measured in one step: of larger circuits those of lowest score, of outside units those of
# highest.
_MOST_TRIED = 256
# A circuit of more units is not measured again for the sake of a last unit: a step must save this part of its cost.
_LARGE, _WORTH = 64, 0.01
# Searches, each at a target nearer to what the validation prompts ask for; enough once a circuit is so near to that.
_SEARCHES, _NEAR = 4, 0.002
_WITHIN = 8  # parts of a step that removes many units
_ROUNDING = 1e-6  # of what a threshold is a share of: margins with every unit reach them
# Searches against an adversary that answers each, then choices among what was tried alone.
_ANSWERED, _CHOSEN_AGAIN = 3, 12
_SURE = 0.9  # two-sided level of the prediction bound, whose lower end is then one-sided 95 %


@dataclass(frozen=True, repr=False, eq=False)
class Refinement(Record):
    """The best prefix and the refined circuit at one threshold.

    Attributes:
        prefix, refined: the two circuits.
        train, validation: what both reach of the threshold's value on the search's prompts and on those that stopped it.
        test: both on the test prompts, see `table`; empty where only a split was given.
        of, target: the threshold: "recovered" or "sufficiency", and how much of it.
        budget: of the attack under which the threshold was held; None: it was not attacked. Then train and validation are under
            the restorations found, and test has "under attack": what is recovered where an adversary of this budget was fitted
            to the circuit on the validation prompts.
    """

    prefix: Circuit
    refined: Circuit
    train: Mapping[str, float]
    validation: Mapping[str, float]
    test: pd.DataFrame
    target: float
    of: str = "recovered"
    budget: float | None = None

    def table(self) -> pd.DataFrame:
        """Two rows, prefix and refined: units, edges, the threshold's value on train and validation, and on test all values."""
        listed = []
        for name, circuit in (("prefix", self.prefix), ("refined", self.refined)):
            row = {"circuit": name, "units": circuit.n_units, "edges": circuit.n_edges}
            listed.append(row | {f"{self.of} (train)": self.train[name], f"{self.of} (validation)": self.validation[name]})
        rows = pd.DataFrame(listed)
        others = ("recovered", "under attack", "sufficiency", "drop", "accuracy keep")
        shown = [self.of, f"{self.of} low", f"{self.of} high", *(name for name in others if name != self.of)]
        for name in shown:
            if name in self.test:
                rows[f"{name} (test)"] = self.test[name].tolist()
        return rows

    @property
    def provenance(self) -> dict[str, Any]:
        """Where both circuits come from: the scores' settings, the threshold, ablation, prompts and budget."""
        return {**self.refined.scores.settings, **self.refined.provenance}

    def plot(self):
        """Both circuits by active edges and by the threshold's value: on validation prompts, on test prompts with its 95 %
        interval, and under attack where it was attacked; a matplotlib Figure."""
        figure, ((ax,),) = new_figure(width=4.6, height=2.8)
        edges = [self.prefix.n_edges, self.refined.n_edges]
        values = {"validation": [self.validation["prefix"], self.validation["refined"]]}
        if len(self.test):
            values["test"] = self.test[self.of].tolist()
            ax.vlines(edges, self.test[f"{self.of} low"], self.test[f"{self.of} high"], color=style(1)["color"], linewidth=1.0)
        if "under attack" in self.test:
            values["under attack (test)"] = self.test["under attack"].tolist()
        for i, (name, of_both) in enumerate(values.items()):
            ax.plot(edges, of_both, marker="o", markersize=4, label=name, **(style(i) | {"linestyle": ""}))
        ax.axhline(self.target, linewidth=1.0, color="#888888")
        lowest = min(min(of_both) for of_both in values.values())
        names = {"prefix and refined": edges[0]} if edges[0] == edges[1] else dict(zip(("prefix", "refined"), edges, strict=True))
        for name, x in names.items():
            ax.annotate(name, (x, lowest), xytext=(0, -12), textcoords="offset points", ha="center", fontsize=8, color=INK)
        ax.margins(x=0.15, y=0.25)
        ax.set_xlabel("active edges")
        ax.set_ylabel(self.of)
        ax.legend(fontsize=8, frameon=False)
        return figure

    def __repr__(self) -> str:
        return f"Refinement({self.of} {self.target:g}: {self.prefix!r} -> {self.refined!r})"

    def title(self) -> str:
        return f"Refinement for {self.of} {self.target:g} of {self.refined.scores.settings.get('task', 'a task')}"

    def parts(self) -> tuple[Any, ...]:
        saved = 1 - self.refined.n_edges / self.prefix.n_edges if self.prefix.n_edges else 0.0
        fewer = f"The refined circuit has {saved:.0%} fewer active edges than the best prefix."
        return self.table(), fewer, self.plot()


@with_torch_defaults
def refine(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    scores: UnitScores,
    *,
    recovered: float | int | None = None,
    sufficiency: float | int | None = None,
    cost: str = "edges",
    ablation: str = "mean",
    rounds: int = 1,
    max_prompts: int = 128,
    tokens_per_forward: int = 16_384,
    seconds: float = math.inf,
    robust: bool | float = False,
    progress: bool = False,
) -> Refinement:
    """Search for a cheaper circuit than the best prefix, which reaches the same threshold on prompts it was not
    searched on (ours).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        task: its train split is searched on, its validation split says where to stop, its test split judges; a split alone is
            searched on and says where to stop.
        scores: from `attribute`.
        recovered, sufficiency: the threshold, one of them; recovered=0.9 without.
        cost: "edges" or "units".
        ablation: see `evaluate`.
        rounds: exchanges at most, at each target of the search.
        max_prompts: training prompts used, the first of the split; what runs share is kept in memory for all of them.
        seconds: no step begins later; of what was passed until then the cheapest that holds is the result.
        robust: hold the threshold where outside units are restored at the worst, see `swd_lens.attack`: True, or the budget of
            that (0.1). The adversary is fitted on the validation prompts.
        progress: show a bar.

    Raises:
        ValueError: a budget outside 0 .. 1, an unknown cost, scores of other factors, or a threshold that no prefix can be
            expected to reach (or that is undefined: these units carry nothing on the search's prompts, or the margin is not
            positive).
    """
    one_of("cost", cost, COSTS)
    threshold, end = Threshold.given(recovered=recovered, sufficiency=sufficiency), time.monotonic() + seconds
    bounded("max_prompts", max_prompts, 1)
    budget = (BUDGET if robust else None) if isinstance(robust, bool) else float(robust)
    if budget is not None:
        bounded("robust, the budget of the attack,", budget, 0, 1, whole=False)
    split = (task.train if isinstance(task, Task) else task).first(max_prompts)
    require_no_dropout(model)
    with attach(model, factors) as attachment:
        edges, bits, host = attachment.factors.active_edges, unit_bits_of(attachment.factors), host_of(model)
        how: dict[str, Any] = {"tokens_per_forward": tokens_per_forward, "keep": True}
        runner = InterventionRunner(host, attachment, split, scores, ablation, **how)
        search = stop = _Search(runner, scores, edges, cost, threshold)
        search.end = end
        if isinstance(task, Task):
            runner = InterventionRunner(host, attachment, task.validation, scores, ablation, **how)
            stop = _Search(runner, scores, edges, cost, threshold, search, len(set(contents_of(task.test))))
        adversary = None
        if budget is not None:
            require_gradients(model)
            valid = valid_in_ranking(scores, edges)
            search.limit = stop.limit = (valid, budget)
            adversary = Adversary(stop.runner, scores, valid)
        prefix, best = _chosen(search, stop, adversary, rounds, progress)
        both = torch.stack([prefix, best])
        values = {"train": search.values(both), "validation": stop.values(both)}
    named = {name: {"prefix": float(of[0]), "refined": float(of[1])} for name, of in values.items()}
    about = {"cost": cost, threshold.of: threshold.value, "ablation": ablation, "n_train": len(split)}
    about |= {"n_validation": len(stop.runner.split), **standing_hooks(model)} | ({} if budget is None else {"budget": budget})
    circuits = {
        kind: Circuit(search.units(kept), scores, edges, {"kind": kind, **about}, bits)
        for kind, kept in (("prefix", prefix), ("refined", best))
    }
    how = {"ablation": ablation, "tokens_per_forward": tokens_per_forward}
    test = _tested(model, factors, task, circuits, budget, how) if isinstance(task, Task) else pd.DataFrame()
    how = {"test": test, "target": float(threshold.value), "of": threshold.of, "budget": budget}
    return Refinement(circuits["prefix"], circuits["refined"], named["train"], named["validation"], **how)


def _tested(
    model: Any, factors: Any, task: Task, circuits: Mapping[str, Circuit], budget: float | None, how: Mapping[str, Any]
) -> pd.DataFrame:
    """Both circuits on the test prompts; with a budget also under attack there."""
    test = evaluate_circuits(model, factors, task, circuits, **how)
    if budget is None:
        return test
    attacked = []
    for own, circuit in zip(test["recovered"], circuits.values(), strict=True):
        # Outside of all units there is nothing to restore.
        whole = circuit.n_edges == sum(int(of_site.sum()) for of_site in circuit.edges.values())
        attacked.append(own if whole else attack(model, factors, task, circuit, budget=budget, n=1, **how).recovered)
    return test.assign(**{"under attack": attacked})


def _chosen(
    search: "_Search", stop: "_Search", adversary: Adversary | None, rounds: int, progress: bool
) -> tuple[Bool[Tensor, " unit"], Bool[Tensor, " unit"]]:
    """The best prefix, and the cheapest circuit that was passed and holds; where there is an adversary, it finds nothing more
    against either."""
    if adversary is None:
        prefix = _best_prefix(stop)
        best = stop.cheapest(torch.stack(_searched(search, stop, prefix, rounds, progress)))
        assert best is not None  # the prefix is among them
        return prefix, best
    valid, budget = stop.limit
    tried: list[Tensor] = [torch.ones(len(valid), dtype=torch.bool)]  # all units, against which nothing can be done

    def answered(kept: Bool[Tensor, " unit"]) -> bool:
        """Whether a circuit falls to a new restoration, which is then known to both searches."""
        (found,) = adversary.worst(kept, [budget])
        search.restored, stop.restored = [*search.restored, found], [*stop.restored, found]
        return not bool(stop.good(kept[None])[0])

    for _ in range(_ANSWERED):
        prefix = _best_prefix(stop)
        tried += _searched(search, stop, prefix, rounds, progress)
        best = stop.cheapest(torch.stack(tried))
        assert best is not None
        if search.late() or not answered(best):
            break
    for _ in range(_CHOSEN_AGAIN):
        prefix = _best_prefix(stop)
        best = stop.cheapest(torch.stack([*tried, prefix]))
        assert best is not None
        if not answered(best) and not answered(prefix):
            return prefix, best
    return tried[0], tried[0]


def _best_prefix(stop: "_Search") -> Bool[Tensor, " unit"]:
    """The cheapest prefix that is good enough on the stopping prompts: of the grid, and of 32 lengths between the grid's last
    that is not and first that is."""
    lengths = torch.tensor(prefix_grid(len(stop.ranking)))
    good = stop.good(stop.prefixes_of(lengths)).nonzero()[:, 0]
    if not len(good):
        raise ValueError(
            f"no prefix can be expected to reach {legible(stop.threshold)} on further prompts: {len(stop.runner.split)} "
            "prompts are too few, or what they show is too different; ask for less, or take more prompts"
        )
    best = stop.cheapest(stop.prefixes_of(stop.filled(lengths, int(good[0]))))
    assert best is not None
    return best


def _searched(
    search: "_Search", stop: "_Search", prefix: Bool[Tensor, " unit"], rounds: int, progress: bool
) -> list[Bool[Tensor, " unit"]]:
    """The prefix and the circuits of several searches, each at the target that the outcome of the last one asks for."""
    grid = torch.tensor(prefix_grid(len(search.ranking)))
    tried, highest = [prefix], float(search.values(search.prefixes_of(grid)).max())
    # On one split alone there is nothing to allow for.
    target = search.threshold.value if search is stop else float(search.values(prefix[None])[0])
    n_searches = 1 if search is stop else _SEARCHES
    with tqdm(total=n_searches, desc="refine", unit="search", disable=not progress, leave=False) as bar:
        search.tell = bar.set_postfix_str
        for _ in range(n_searches):
            if search.late():
                break
            found = search.at(target, start=prefix, rounds=rounds)
            tried += found
            short = stop.short(found[-1]) if found else 0.0
            if abs(short) < _NEAR:
                break
            target = min(target + short, highest)
            bar.update()
    return tried


class _Search:
    """Sets of units as boolean vectors over all units, in the order of the ranking, on the prompts of one split."""

    def __init__(
        self,
        runner: InterventionRunner,
        scores: UnitScores,
        edges: Mapping[str, Int[Tensor, " _unit"]],
        cost: str,
        threshold: Threshold,
        others: "_Search | None" = None,
        n_further: int = 0,
    ):
        """. others: further prompts that say how much contents differ; n_further: contents of the prompts that its circuits
        will be judged on; 0: these very prompts."""
        self.runner, self.threshold, self.target, self.ranking = runner, threshold, threshold.value, scores.ranking()
        # No step begins later than `end`; `tell` hears of each one.
        self.end, self.tell = math.inf, lambda text: None
        # Restorations that every circuit is tried with, and what they are held to: which units may be restored, and the budget.
        self.restored: list[Float[Tensor, " unit"]] = []
        self.limit: tuple[Tensor, float] = (torch.zeros(len(self.ranking), dtype=torch.bool), 0.0)
        self.scores = scores
        self.others, self.n_further, self.contents = others, n_further, contents_of(runner.split)
        ones = torch.ones(len(self.ranking), dtype=torch.int64)
        self.costs = torch.tensor([int(edges[site][unit]) for site, unit in self.ranking]) if cost == "edges" else ones
        # Units without edges cost nothing and do nothing but their constant; dividing by their cost must still work.
        self.per = self.costs.clamp(min=1).double()
        self.places = {site: ranks - 1 for site, ranks in scores.ranks().items()}  # in the ranking
        self.empty, self.full = self._margins(torch.tensor([[False], [True]]).expand(2, len(self.ranking)))
        self.zero = float(self.empty.mean()) if threshold.of == "recovered" else 0.0
        self.whole = float(self.full.mean()) - self.zero  # what the threshold's value is a share of, in logits
        if not self.whole > 0:
            raise ValueError(
                f"what the units carry on these prompts, of which {threshold.of} is a share, is {self.whole:.3f} logits, "
                "not above zero: there is nothing to refine"
            )

    def price(self, kept: Bool[Tensor, " unit"]) -> int:
        return int(self.costs[kept].sum())

    def units(self, kept: Bool[Tensor, " unit"]) -> tuple[tuple[str, int], ...]:
        return tuple(self.ranking[rank] for rank in kept.nonzero()[:, 0].tolist())

    def values(self, kept: Bool[Tensor, "circuit unit"]) -> Float[Tensor, " circuit"]:
        """How much circuits recover, or their sufficiency."""
        return (self._margins(kept).mean(1) - self.zero) / self.whole

    def over(self, kept: Bool[Tensor, "circuit unit"]) -> Float[Tensor, " circuit"]:
        """How far circuits are surely above the threshold on other prompts, in logits: a one-sided 95 % prediction bound of the
        mean over `n_further` contents. What contents differ by is pooled over these prompts and the others: a validation split
        may have four names."""
        contrast = self._contrast(kept)
        if not self.n_further:
            return contrast.mean(1)
        of_contents = [by_content(contrast, self.contents)]
        if self.others is not None:
            of_contents.append(by_content(self.others._contrast(kept), self.others.contents))
        degrees = [values.shape[1] - 1 for values in of_contents]
        spread = sum((d * values.var(1) for d, values in zip(degrees, of_contents, strict=True)), start=torch.zeros(len(kept)))
        spread = spread / max(1, sum(degrees))
        # A content of theirs may have fewer prompts than one of these; never less than prompts of their own give.
        there = torch.maximum(spread / self.n_further, contrast.var(1) / contrast.shape[1])
        error_of_both = (spread / of_contents[0].shape[1] + there).sqrt()
        return contrast.mean(1) - t_quantile(1 + sum(degrees), _SURE) * error_of_both

    def _contrast(self, kept: Bool[Tensor, "circuit unit"]) -> Float[Tensor, "circuit prompt"]:
        """`Threshold.contrast`; recovered and sufficiency ask for no ablation."""
        margins = self._margins(kept)
        return self.threshold.contrast(Margins(margins, margins, self.full, self.empty, self.full))

    def good(self, kept: Bool[Tensor, "circuit unit"]) -> Bool[Tensor, " circuit"]:
        return self.over(kept) >= -_ROUNDING * self.whole

    def cheapest(self, kept: Bool[Tensor, "circuit unit"]) -> Bool[Tensor, " unit"] | None:
        """The cheapest of those that are good enough; None where none is."""
        good = kept[self.good(kept)]
        return min(good, key=lambda each: (self.price(each), int(each.sum())), default=None)

    def short(self, kept: Bool[Tensor, " unit"]) -> float:
        """How far a circuit falls short, in units of the threshold's value; negative where it reaches enough."""
        return -float(self.over(kept[None])[0]) / self.whole

    def _margins(self, kept: Bool[Tensor, "circuit unit"]) -> Float[Tensor, "circuit prompt"]:
        """Margins of circuits; under restorations those of the one that leaves each the lowest mean."""
        if self.restored:
            valid, budget = self.limit
            may = valid & ~kept
            most = budget * may.sum(1).double()
            shares = (
                torch.stack([torch.zeros(len(valid), dtype=torch.float64), *self.restored])[:, None] * may
            )  # (found, circuit, unit)
            shares = shares * (most / shares.sum(2).clamp(min=1e-12)).clamp(max=1)[:, :, None]
            sets, given = kept.expand(len(shares), -1, -1).flatten(0, 1), shares.flatten(0, 1)
            outcome, _ = self.runner.run(len(sets), lambda rows: partial_masks(self.scores, sets[rows], given[rows]))
            margins = outcome.margins.view(*shares.shape[:2], -1)
            return margins[margins.mean(2).argmin(0), torch.arange(len(kept))]

        def masks(chunk: slice) -> Masks:
            return {site: ~kept[chunk][:, places] for site, places in self.places.items()}

        return self.runner.run(len(kept), masks)[0].margins

    @staticmethod
    def filled(lengths: Int[Tensor, " circuit"], first: int) -> Int[Tensor, " _circuit"]:
        """With at most 32 lengths between the `first` of them and the one before."""
        if not first:
            return lengths
        low, high = int(lengths[first - 1]) + 1, int(lengths[first])
        between = torch.linspace(low, high, min(32, high - low + 1), dtype=torch.float32).long()
        return torch.cat([lengths, between]).unique()

    def at(self, target: float, start: Bool[Tensor, " unit"], rounds: int) -> list[Bool[Tensor, " unit"]]:
        """The circuits that a search at this target passes on these prompts, from `start` or the best prefix on; empty where
        neither reaches it."""
        self.target = target
        # All prefixes of the grid, and some between the last that does not reach the target and the first that does.
        lengths = torch.tensor(prefix_grid(len(self.ranking)))
        reached = (self.values(self.prefixes_of(lengths)) >= target).nonzero()[:, 0]
        prefixes = self.prefixes_of(self.filled(lengths, int(reached[0])) if len(reached) else lengths)
        begin = torch.cat([start[None], prefixes])
        begin = begin[self.values(begin) >= target]
        if not len(begin):
            return []
        passed = [min(begin, key=lambda kept: (self.price(kept), int(kept.sum())))]
        passed.append(self.removed(passed[0], passed))
        for _ in range(rounds):
            if self.late():
                break
            other = self.exchanged(passed[-1])
            if self.price(other) >= self.price(passed[-1]):
                break
            passed.append(other)
        return passed

    def removed(self, kept: Bool[Tensor, " unit"], passed: list[Bool[Tensor, " unit"]] | None = None) -> Bool[Tensor, " unit"]:
        """The circuit after removing whatever can go; of large ones, until a step saves little. passed: gets what is passed on
        the way: circuits after each step, and some within steps that remove many."""
        while not self.late():
            self.tell(f"{int(kept.sum()):,} units")
            inside = kept.nonzero()[:, 0].flip(0)[:_MOST_TRIED]  # lowest scores first
            if not len(inside):
                return kept
            without = kept.repeat(len(inside), 1)
            without[torch.arange(len(inside)), inside] = False
            alone = self.values(without)
            lost = (float(self.values(kept[None])) - alone) / self.per[inside]
            order = inside[torch.sort(lost, stable=True).indices]
            smaller = self._without_most(kept, order)
            if smaller is None:
                # What adds least per cost cannot go, but a unit that costs less in all might.
                can_go = (alone >= self.target).nonzero()[:, 0]
                if not len(can_go):
                    return kept
                smaller = without[int(can_go[self.costs[inside[can_go]].argmax()])]
            saved = self.price(kept) - self.price(smaller)
            if passed is not None:
                # Circuits that lack a part of what the smaller one lacks, the first in the order.
                gone = order[~smaller[order]]
                sizes = torch.linspace(0, len(gone), min(_WITHIN, len(gone)) + 1, dtype=torch.float32).long().unique()[1:-1]
                between = kept.repeat(len(sizes), 1)
                for row, size in enumerate(sizes.tolist()):
                    between[row, gone[:size]] = False
                passed += [*between, smaller]
            kept = smaller
            if int(kept.sum()) > _LARGE and saved < _WORTH * self.price(kept):
                return kept
        return kept

    def late(self) -> bool:
        """Whether no further step may begin."""
        return time.monotonic() > self.end

    def _without_most(self, kept: Bool[Tensor, " unit"], order: Int[Tensor, " candidate"]) -> Bool[Tensor, " unit"] | None:
        """Without as many of the first candidates as can go together (to the unit, by two grids); None if not even one."""
        low, high = 0, len(order)
        while high > low:
            sizes = torch.linspace(low + 1, high, min(_GROUPS, high - low), dtype=torch.float32).long().unique()
            smaller = kept.repeat(len(sizes), 1)
            for row, size in enumerate(sizes.tolist()):
                smaller[row, order[:size]] = False
            good = (self.values(smaller) >= self.target).nonzero()[:, 0]
            if len(good):
                best = int(good[-1])
                # Between this size and the next, which was too many.
                low, high = int(sizes[best]), int(sizes[best + 1]) - 1 if best + 1 < len(sizes) else int(sizes[best])
            else:
                high = int(sizes[0]) - 1
        if low == 0:
            return None
        smaller = kept.clone()
        smaller[order[:low]] = False
        return smaller

    def exchanged(self, kept: Bool[Tensor, " unit"]) -> Bool[Tensor, " unit"]:
        """The cheapest circuit after adding a few units and removing again."""
        outside = (~kept).nonzero()[:, 0][:_MOST_TRIED]  # highest scores first
        if not len(outside):
            return kept
        more = kept.repeat(len(outside), 1)
        more[torch.arange(len(outside)), outside] = True
        gained = self.values(more) / self.per[outside]
        base = float(self.values(kept[None])) / self.per[outside]
        order = outside[torch.sort(gained - base, descending=True, stable=True).indices]
        best = kept
        for n in _ADDED:
            if n > len(order) or self.late():
                break
            larger = kept.clone()
            larger[order[:n]] = True
            best = min(best, self.removed(larger), key=self.price)
        return best

    def prefixes_of(self, lengths: Int[Tensor, " circuit"]) -> Bool[Tensor, "circuit unit"]:
        return torch.arange(len(self.ranking))[None] < lengths[:, None]
