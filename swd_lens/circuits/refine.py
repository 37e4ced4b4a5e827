"""refine: a smaller circuit than the best prefix, for the same sufficiency, found on training prompts and judged on test ones.

1. The best prefix: of all prefixes of the ranking that were tried on training prompts, the cheapest that is sufficient.
   Beside the grid, those between its last insufficient and its first sufficient length are tried.
2. Remove: measure what each unit of the circuit adds to Q(keep); remove together as many as possible of those that add
   least per cost while the rest stays sufficient, or else the dearest single one that can go; measure again, until none can.
3. Exchange: add the few outside units that would add most per cost, and remove again; keep the outcome if it is cheaper.
   Stop after `rounds` exchanges, or when none helps.
4. Judge prefix and refined circuit on the test prompts. The search chose among many sets on the training prompts, so there
   the refined one is flattered; what the test says counts.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.circuits.bench import Bench
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.curve import COSTS, require_share
from swd_lens.circuits.frontier import judge, prefix_grid
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.shortcuts import Masks
from swd_lens.hosts import host_of, require_no_dropout
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


@dataclass(frozen=True, repr=False, eq=False)
class Refinement(Record):
    """The best prefix and the refined circuit for the same sufficiency on training prompts.

    Attributes:
        prefix, refined: the two circuits.
        train, test: sufficiency of both on the search's prompts and on the test prompts, see `table`; test is empty where
            only a split was given.
        target: the sufficiency that was asked for.
    """

    prefix: Circuit
    refined: Circuit
    train: Mapping[str, float]
    test: pd.DataFrame
    target: float

    def table(self) -> pd.DataFrame:
        """Two rows, prefix and refined: units, edges, sufficiency on train, and on test with its 95 % interval."""
        rows = pd.DataFrame(
            {
                "circuit": ["prefix", "refined"],
                "units": [self.prefix.n_units, self.refined.n_units],
                "edges": [self.prefix.n_edges, self.refined.n_edges],
                "sufficiency (train)": [self.train["prefix"], self.train["refined"]],
            }
        )
        for name in ("sufficiency", "sufficiency low", "sufficiency high", "necessity drop", "accuracy keep"):
            if name in self.test:
                rows[f"{name} (test)"] = self.test[name].tolist()
        return rows

    def __repr__(self) -> str:
        return f"Refinement(sufficiency {self.target:g}: {self.prefix!r} -> {self.refined!r})"

    def title(self) -> str:
        return f"Refinement for sufficiency {self.target:g} of {self.refined.scores.settings.get('task', 'a task')}"

    def parts(self) -> tuple[Any, ...]:
        saved = 1 - self.refined.n_edges / self.prefix.n_edges if self.prefix.n_edges else 0.0
        return self.table(), f"The refined circuit has {saved:.0%} fewer active edges than the best prefix."


@in_plain_surroundings
def refine(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    scores: UnitScores,
    *,
    sufficiency: float | int = 0.9,
    cost: str = "edges",
    ablation: str = "mean",
    rounds: int = 2,
    max_prompts: int = 128,
    tokens_per_forward: int = 16_384,
    progress: bool = False,
) -> Refinement:
    """Search for a cheaper circuit than the best prefix, at the same sufficiency on training prompts.

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        task: its train split is searched on, its test split judges; a split alone is searched on only.
        scores: from `attribute`.
        sufficiency: what both circuits reach on the training prompts.
        cost: "edges" or "units".
        ablation: see `evaluate`.
        rounds: exchanges at most.
        max_prompts: training prompts used, the first of the split; what runs share is kept in memory for all of them.

    Raises:
        ValueError: an unknown cost, scores of other factors, or a sufficiency that no prefix reaches (or that is undefined,
            because the unpruned replacement has no positive margin).
    """
    if cost not in COSTS:
        raise error("unknown-cost", choices=COSTS, cost=cost)
    require_share(sufficiency=sufficiency)
    split = _first(task.train if isinstance(task, Task) else task, max_prompts)
    require_no_dropout(model)
    with attach(model, factors) as attachment:
        edges = attachment.factors.active_edges
        bench = Bench(
            host_of(model), attachment, split, scores, ablation, tokens_per_forward=tokens_per_forward, keep=True
        )
        search = _Search(bench, scores, edges, cost, sufficiency)
        prefix = search.best_prefix()
        best = search.removed(prefix)
        for _ in tqdm(range(rounds), desc="refine", unit="exchange", disable=not progress, leave=False):
            other = search.exchanged(best)
            if search.price(other) >= search.price(best):
                break
            best = other
        reached = search.sufficiency(torch.stack([prefix, best]))
    train = {"prefix": float(reached[0]), "refined": float(reached[1])}
    about = {"cost": cost, "sufficiency": sufficiency, "ablation": ablation, "n_train": len(split)}
    about |= standing_hooks(model)
    circuits = {
        kind: Circuit(search.units(kept), scores, edges, {"kind": kind, **about})
        for kind, kept in (("prefix", prefix), ("refined", best))
    }
    test = pd.DataFrame()
    if isinstance(task, Task):
        test = judge(model, factors, task, circuits, ablation=ablation, tokens_per_forward=tokens_per_forward)
    return Refinement(circuits["prefix"], circuits["refined"], train, test, float(sufficiency))


class _Search:
    """Sets of units as boolean vectors over all units, in the order of the ranking."""

    def __init__(
        self, bench: Bench, scores: UnitScores, edges: Mapping[str, Int[Tensor, " _unit"]], cost: str, target: float
    ):
        self.bench, self.target, self.ranking = bench, target, scores.ranking()
        ones = torch.ones(len(self.ranking), dtype=torch.int64)
        self.costs = torch.tensor([int(edges[site][unit]) for site, unit in self.ranking]) if cost == "edges" else ones
        # Units without edges cost nothing and do nothing but their constant; dividing by their cost must still work.
        self.per = self.costs.clamp(min=1).double()
        self.places = {site: ranks - 1 for site, ranks in scores.ranks().items()}  # in the ranking

    def price(self, kept: Bool[Tensor, " unit"]) -> int:
        return int(self.costs[kept].sum())

    def units(self, kept: Bool[Tensor, " unit"]) -> tuple[tuple[str, int], ...]:
        return tuple(self.ranking[rank] for rank in kept.nonzero()[:, 0].tolist())

    def sufficiency(self, kept: Bool[Tensor, "circuit unit"]) -> Float[Tensor, " circuit"]:
        """Q(keep) / Q(unpruned) on the training prompts."""

        def masks(chunk: slice) -> Masks:
            return {site: ~kept[chunk][:, places] for site, places in self.places.items()}

        outcome, unpruned = self.bench.run(len(kept), masks)
        whole = float(unpruned.q)
        if not whole > 0:
            raise error("nothing-to-refine", margin=whole)
        return outcome.q / whole

    def best_prefix(self) -> Bool[Tensor, " unit"]:
        """The cheapest sufficient prefix among those tried."""
        n = len(self.ranking)
        lengths = torch.tensor(prefix_grid(n))
        reached = self.sufficiency(self._prefixes(lengths)) >= self.target
        if not bool(reached.any()):
            raise error("refine-no-prefix", target=self.target)
        first = int(reached.nonzero()[0])
        if first > 0:
            low, high = int(lengths[first - 1]) + 1, int(lengths[first])
            between = torch.linspace(low, high, min(32, high - low + 1), dtype=torch.float32).long().unique()
            also = self.sufficiency(self._prefixes(between)) >= self.target
            lengths, reached = torch.cat([lengths, between]), torch.cat([reached, also])
        prefixes = self._prefixes(lengths[reached])
        return min(prefixes, key=lambda kept: (self.price(kept), int(kept.sum())))

    def removed(self, kept: Bool[Tensor, " unit"]) -> Bool[Tensor, " unit"]:
        """The circuit after removing whatever can go; of large ones, until a step saves little."""
        while True:
            inside = kept.nonzero()[:, 0].flip(0)[:_MOST_TRIED]  # lowest scores first
            if not len(inside):
                return kept
            without = kept.repeat(len(inside), 1)
            without[torch.arange(len(inside)), inside] = False
            alone = self.sufficiency(without)
            lost = (float(self.sufficiency(kept[None])) - alone) / self.per[inside]
            order = inside[torch.sort(lost, stable=True).indices]
            smaller = self._without_most(kept, order)
            if smaller is None:
                # What adds least per cost cannot go, but a unit that costs less in all might.
                can_go = (alone >= self.target).nonzero()[:, 0]
                if not len(can_go):
                    return kept
                smaller = without[int(can_go[self.costs[inside[can_go]].argmax()])]
            saved = self.price(kept) - self.price(smaller)
            kept = smaller
            if int(kept.sum()) > _LARGE and saved < _WORTH * self.price(kept):
                return kept

    def _without_most(
        self, kept: Bool[Tensor, " unit"], order: Int[Tensor, " candidate"]
    ) -> Bool[Tensor, " unit"] | None:
        """Without as many of the first candidates as can go together (to the unit, by two grids); None if not even one."""
        low, high = 0, len(order)
        while high > low:
            sizes = torch.linspace(low + 1, high, min(_GROUPS, high - low), dtype=torch.float32).long().unique()
            smaller = kept.repeat(len(sizes), 1)
            for row, size in enumerate(sizes.tolist()):
                smaller[row, order[:size]] = False
            good = (self.sufficiency(smaller) >= self.target).nonzero()[:, 0]
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
        gained = self.sufficiency(more) / self.per[outside]
        base = float(self.sufficiency(kept[None])) / self.per[outside]
        order = outside[torch.sort(gained - base, descending=True, stable=True).indices]
        best = kept
        for n in _ADDED:
            if n > len(order):
                break
            larger = kept.clone()
            larger[order[:n]] = True
            best = min(best, self.removed(larger), key=self.price)
        return best

    def _prefixes(self, lengths: Int[Tensor, " circuit"]) -> Bool[Tensor, "circuit unit"]:
        return torch.arange(len(self.ranking))[None] < lengths[:, None]


def _first(split: TaskSplit, n: int) -> TaskSplit:
    if n < 1:
        raise error("refine-no-prompts", max_prompts=n)
    per_prompt = ("examples", "tokens", "answer_ids", "distractor_ids", "corrupt")
    return split if len(split) <= n else dataclasses.replace(split, **{k: getattr(split, k)[:n] for k in per_prompt})
