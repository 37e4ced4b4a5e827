"""headline: what a run found, in a few sentences made from its numbers alone.

1. The subject is the sparsest replacement of the surface with most matrices; the control is SVD, if it was run.
2. Fidelity: how far the subject moves held-out cross-entropy, and how often it agrees with the dense host.
3. Circuits: over all surfaces and tasks, how often a circuit is needed at all, and whose is cheaper in active edges.
4. The smallest circuit that is not empty.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from swd_lens.report.wording import conjunction, count, fixed, percent, plural, readable, signed
from swd_lens.study import Run
from swd_lens.study.run import CONTROL, Replacement


@dataclass(frozen=True)
class Cost:
    """Least active edges and units of one method for one surface and task; None: never reached, or not defined."""

    surface: str
    task: str
    method: str
    edges: int | None
    units: int | None
    all_units: int
    defined: bool


def headline(run: Run, sufficiency: float = 0.9) -> list[str]:
    """One to four sentences, most important first; none where a run has nothing of the kind."""
    subject = main_replacement(run)
    if subject is None:
        return []
    sentences = [_fidelity_sentence(subject)]
    costs = list(_costs(run, sufficiency))
    sentences.extend(_cost_sentences(costs, subject.method, sufficiency))
    return sentences


def main_replacement(run: Run) -> Replacement | None:
    """The sparsest replacement of the surface that replaces most matrices; the control only if there is nothing else."""
    candidates = [r for r in run.replacements if r.method != CONTROL] or list(run.replacements)
    return max(candidates, key=lambda r: (len(r.factors), r.factors.sparsity), default=None)


def _fidelity_sentence(r: Replacement) -> str:
    f = r.fidelity
    what = plural(len(r.factors), "matrix", "matrices")
    kept = f"{percent(1 - r.factors.sparsity, 0)} as many nonzero weights"
    return (
        f"With {what} replaced ({r.surface}, {r.method}: {kept}), cross-entropy on held-out text moves by "
        f"{signed(f.ce_delta, 4)} nats, from {fixed(f.ce_dense, 3)} to {fixed(f.ce, 3)}, and the most likely next token "
        f"stays the same in {percent(f.top1_agreement)} of {count(f.n_predictions)} predictions."
    )


def _costs(run: Run, sufficiency: float) -> Iterator[Cost]:
    for surface, by_task in run.comparisons.items():
        for task, comparison in by_task.items():
            for method, curve in comparison.curves.items():
                edges = curve.cost_at(sufficiency=sufficiency, cost="edges")
                units = curve.cost_at(sufficiency=sufficiency, cost="units")
                yield Cost(
                    surface, task, method, edges, units, int(curve.rows["units"].max()), bool(curve.q_unpruned > 0)
                )


def _cost_sentences(costs: list[Cost], method: str, sufficiency: float) -> Iterator[str]:
    ours = {(c.surface, c.task): c for c in costs if c.method == method}
    control = {(c.surface, c.task): c for c in costs if c.method == CONTROL != method}
    cases = plural(len(ours), "case")
    pairs = [(c, control[key]) for key, c in ours.items() if key in control and c.edges and control[key].edges]
    if pairs:
        yield _contest(pairs, f"{len(pairs)} of {cases} of surface and task", sufficiency)
    empty = [f"{readable(c.task)} ({c.surface})" for c in ours.values() if c.edges == 0]
    if empty:
        whom = f"For {conjunction(empty)}" if len(empty) <= 3 else f"In {len(empty)} of {cases}"
        yield f"{whom} the empty circuit already suffices: these matrices are hardly needed at the scored positions."
    undefined = sum(not c.defined for c in ours.values())
    if undefined:
        yield (
            f"In {undefined} of {cases} sufficiency is not defined: the unpruned replacement has no positive margin, "
            "because the model does not do the task."
        )
    # Nothing and everything are no circuits.
    found = [c for c in ours.values() if c.edges and c.units and c.units < c.all_units]
    if found:
        least = min(found, key=lambda c: (c.edges or 0, c.surface, c.task))
        yield (
            f"The smallest circuit found: {count(least.units)} of the {plural(least.all_units, 'unit')} of {least.surface}, with "
            f"{plural(least.edges or 0, 'active edge')}, keep {percent(sufficiency, 0)} of the margin of {readable(least.task)}."
        )


def _contest(pairs: list[tuple[Cost, Cost]], cases: str, sufficiency: float) -> str:
    """Who needs fewer active edges; (ours, control) pairs in which both need some."""
    method = pairs[0][0].method
    ratios = [(control.edges or 0) / (ours.edges or 1) for ours, control in pairs]
    more = (
        f" in the median, and fewer in {sum(ratio > 1 for ratio in ratios)} of {len(pairs)}" if len(pairs) > 1 else ""
    )
    # Then the ratio is that of the whole factorizations and says nothing about circuits.
    whole = sum(ours.units == ours.all_units for ours, _ in pairs)
    caveat = f" (in {whole} of {len(pairs)}, {method} takes every unit it has)" if whole else ""
    return (
        f"Where both need a circuit to keep {percent(sufficiency, 0)} of the task margin ({cases}), {method} needs "
        f"{_ratio(statistics.median(ratios))} active edges than {CONTROL}{more}{caveat}."
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f} times fewer" if ratio >= 1 else f"{1 / ratio:.1f} times more"
