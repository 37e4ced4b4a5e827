"""unit_cards: a task's best units, each with what a reader wants to know of it.

1. Per task, pick the surface on which the task depends most on single units: the one whose empty circuit keeps the least of
   the margin, under the sparsest SWD replacement.
2. Take its best units by score; their contexts on held-out text come from one pass per surface.
3. Where the site writes to the residual stream, add the direct logit effect of the write vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swd_lens.analysis.audit import WRITES_RESIDUAL, Context, Edges, TaskRank, UnitCard, logit_effect, top_contexts
from swd_lens.circuits import Comparison
from swd_lens.hosts.sites import split_name
from swd_lens.units.factors import FactorSet


@dataclass(frozen=True, repr=False, kw_only=True)
class TaskUnit(UnitCard):
    """One of a task's best units.

    Attributes:
        unit, contexts, reads, writes, logits, tasks: see `UnitCard`; edges are counted only, and the only task is its own.
        task, surface, method: for which it is one of the best, and whose unit it is.
    """

    task: str
    surface: str
    method: str

    @property
    def rank(self) -> int:
        """Among all units of the surface, 0 the best."""
        return self.tasks[self.task].rank - 1

    @property
    def score(self) -> float:
        """In logits of margin."""
        return self.tasks[self.task].score

    @property
    def read_edges(self) -> int:
        return self.reads.n if self.reads else 0

    @property
    def write_edges(self) -> int:
        return self.writes.n if self.writes else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, as run.json holds them."""
        names = ("task", "surface", "method", "unit", "rank", "score", "read_edges", "write_edges")
        return {
            **{name: getattr(self, name) for name in names},
            "contexts": [asdict(context) for context in self.contexts],
            "logits": self.logits and asdict(self.logits),
        }


def unit_cards(
    model: Any,
    factors: Mapping[str, tuple[str, FactorSet]],
    comparisons: Mapping[str, Comparison],
    tokens: Any,
    *,
    per_task: int = 3,
    n_contexts: int = 6,
) -> list[TaskUnit]:
    """Cards in the order of tasks, then rank.

    Args:
        factors: surface -> (method, its factors): the replacement whose units are shown.
        comparisons: surface -> comparison that holds the method's scores and curves, by task.
        tokens: (rows, pos) held-out text for the contexts.
    """
    chosen: dict[str, str] = {
        task: _surface_of(task, factors, comparisons) for task in next(iter(comparisons.values()))
    }
    cards: dict[str, list[TaskUnit]] = {}
    for surface in dict.fromkeys(chosen.values()):
        method, found = factors[surface]
        tasks = [task for task, its in chosen.items() if its == surface]
        best = {task: comparisons[surface][task].scores[method].ranking()[:per_task] for task in tasks}
        units = list(dict.fromkeys(unit for ranking in best.values() for unit in ranking))
        contexts = top_contexts(model, found, units, tokens, n=n_contexts) if units else {}
        for task in tasks:
            scores = comparisons[surface][task].scores[method].scores
            cards[task] = [
                _card(model, found, contexts, task, surface, method, rank, unit, float(scores[unit[0]][unit[1]]))
                for rank, unit in enumerate(best[task])
            ]
    return [card for task in chosen for card in cards[task]]


def _surface_of(task: str, factors: Mapping[str, tuple[str, FactorSet]], comparisons: Mapping[str, Comparison]) -> str:
    def kept_by_nothing(surface: str) -> float:
        rows = comparisons[surface][task].curves[factors[surface][0]].rows
        kept = float(rows["sufficiency"].iloc[0])
        return kept if kept == kept else float("inf")  # undefined sufficiency comes last

    return min(factors, key=kept_by_nothing)


def _card(
    model: Any,
    factors: FactorSet,
    contexts: Mapping[tuple[str, int], Sequence[Context]],
    task: str,
    surface: str,
    method: str,
    rank: int,
    unit: tuple[str, int],
    score: float | int,
) -> TaskUnit:
    site, index = unit
    writes_residual = split_name(site)[1] in WRITES_RESIDUAL
    return TaskUnit(
        unit=f"{site}/{index}",
        contexts=tuple(contexts[unit]),
        reads=Edges(int((factors[site].read[:, index] != 0).sum())),
        writes=Edges(int((factors[site].write[index] != 0).sum())),
        logits=logit_effect(model, factors, unit) if writes_residual else None,
        tasks={task: TaskRank(float(score), rank + 1)},
        task=task,
        surface=surface,
        method=method,
    )
