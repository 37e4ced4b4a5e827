"""unit_cards: a task's best units, each with what a reader wants to know of it.

1. Per task, pick the surface on which the task depends most on single units: the one whose empty circuit keeps the least of
   the margin, under the sparsest SWD replacement.
2. Take its best units by score; their contexts on held-out text come from one pass per surface.
3. Where the site writes to the residual stream, add the direct logit effect of the write vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swd_lens.analysis.audit import WRITES_RESIDUAL, Context, LogitEffect, logit_effect, top_contexts
from swd_lens.circuits import Comparison
from swd_lens.hosts.sites import split_name
from swd_lens.units.factors import FactorSet


@dataclass(frozen=True)
class UnitCard:
    """One of a task's best units; rank 0 is the best, score in logits of margin."""

    task: str
    surface: str
    method: str
    unit: str
    rank: int
    score: float
    read_edges: int
    write_edges: int
    contexts: tuple[Context, ...]
    logits: LogitEffect | None


def unit_cards(
    model: Any,
    factors: Mapping[str, tuple[str, FactorSet]],
    comparisons: Mapping[str, Comparison],
    tokens: Any,
    *,
    per_task: int = 3,
    n_contexts: int = 6,
) -> list[UnitCard]:
    """Cards in the order of tasks, then rank.

    Args:
        factors: surface -> (method, its factors): the replacement whose units are shown.
        comparisons: surface -> comparison that holds the method's scores and curves, by task.
        tokens: (rows, pos) held-out text for the contexts.
    """
    chosen: dict[str, str] = {
        task: _surface_of(task, factors, comparisons) for task in next(iter(comparisons.values()))
    }
    cards: dict[str, list[UnitCard]] = {}
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
) -> UnitCard:
    site, index = unit
    writes_residual = split_name(site)[1] in WRITES_RESIDUAL
    return UnitCard(
        task=task,
        surface=surface,
        method=method,
        unit=f"{site}/{index}",
        rank=rank,
        score=float(score),
        read_edges=int((factors[site].read[:, index] != 0).sum()),
        write_edges=int((factors[site].write[index] != 0).sum()),
        contexts=tuple(contexts[unit]),
        logits=logit_effect(model, factors, unit) if writes_residual else None,
    )
