"""verdict: what a run found, in at most three sentences made from its numbers; the report opens with them.

1. Of each task the surface that carries the largest share of it is looked at, and of the methods there those whose CE and KL are
   no worse than the subject's (`Comparison.out_by`): which of them has a circuit of the fewest active edges?
2. What the subject does to the model's predictions, and which methods have a cheaper circuit but move the model more.
3. Which tasks no surface carries: there circuits mean nothing.

The subject is that of the headline (wording.py), which goes on with the details.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swd_lens.circuits.comparison import priced
from swd_lens.circuits.measure import RECOVERED, Threshold
from swd_lens.circuits.seeds import over_seeds
from swd_lens.report.wording import FEW, conjunction, fixed, main_replacement, percent, plural, readable, signed, tiny
from swd_lens.study import Run
from swd_lens.study.run import Replacement


@dataclass(frozen=True)
class _Contest:
    """One task on the surface that carries most of it.

    Attributes:
        edges: method -> active edges of its cheapest circuit, of those that behave no worse than the subject.
        worse: the same of those that behave worse.
    """

    task: str
    surface: str
    edges: Mapping[str, float]
    worse: Mapping[str, float]

    @property
    def winner(self) -> str:
        return min(self.edges, key=lambda method: self.edges[method])


def verdict(run: Run, recovered: float = RECOVERED) -> list[str]:
    """At most three sentences, most important first; none where a run has no replacement."""
    subject = main_replacement(run)
    if subject is None:
        return []
    tasks = list(dict.fromkeys(task for comparison in run.comparisons.values() for task in comparison))
    contests = [contest for task in tasks if (contest := _contest(run, task, subject, recovered))]
    carried = {contest.task for contest in contests}
    nothing = [readable(task) for task in tasks if task not in carried]
    sentences = [_cheapest(contests, subject, recovered, len(run.comparisons) > 1), _behaviour(contests, subject)]
    if nothing:
        whom = conjunction(nothing) if len(nothing) <= FEW else f"{len(nothing)} of {len(tasks)} tasks"
        sentences.append(f"No surface that was tried carries {whom}, so that a circuit there means nothing.")
    return [sentence for sentence in sentences if sentence]


def _contest(run: Run, task: str, subject: Replacement, recovered: float) -> _Contest | None:
    """Compare the methods on one surface: the one where some method carries the largest share of the dense model's margin. None
    where no method carries the task on any surface."""
    shares = {
        surface: max((c.carried.logits / c.q_dense for c in comparison[task].curves.values() if c.carries), default=None)
        for surface, comparison in run.comparisons.items()
        if task in comparison
    }
    known = {surface: share for surface, share in shares.items() if share is not None}
    if not known:
        return None
    surface = max(known, key=lambda surface: known[surface])
    comparison, threshold = run.comparisons[surface], Threshold("recovered", recovered)
    curves, beside = comparison[task].curves, replace(comparison, reference=subject.method)
    edges: dict[str, float] = {}
    worse: dict[str, float] = {}
    for method, names in comparison.methods.items():
        costs = over_seeds([priced(curves[name], threshold, "edges") for name in names if name in curves])
        if costs.mean is not None:
            (worse if beside.out_by(method) else edges)[method] = costs.mean
    return _Contest(task, surface, edges, worse)


def _cheapest(contests: list[_Contest], subject: Replacement, recovered: float, surfaces: bool) -> str:
    """Whose circuits have the fewest edges, task by task; of several surfaces also on which."""
    won: dict[str, list[_Contest]] = {}
    for contest in contests:
        if contest.edges:
            won.setdefault(contest.winner, []).append(contest)
    if not won:
        which = "that behaves like it " if any(contest.worse for contest in contests) else ""
        return (
            f"No circuit of {subject.method}, or of another method {which}beside it, recovers {percent(recovered, 0)} of a task."
        )
    parts = []
    for winner, of_winner in sorted(won.items(), key=lambda item: -len(item[1])):
        cases = [_case(contest, surfaces) for contest in of_winner]
        more = f" and {plural(len(cases) - FEW, 'more task')}" if len(cases) > FEW else ""
        parts.append(f"{winner} for {'; '.join(cases[:FEW])}{more}")
    unreached = [readable(contest.task) for contest in contests if not contest.edges]
    none = f" None recovers that of {conjunction(unreached)}." if unreached else ""
    return f"Fewest active edges for a circuit that recovers {percent(recovered, 0)}: {'. '.join(parts)}.{none}"


def _case(contest: _Contest, surfaces: bool) -> str:
    """ioi (96 edges of mlp; next, neurons: 312)."""
    rest = {method: edges for method, edges in contest.edges.items() if method != contest.winner}
    said = plural(round(contest.edges[contest.winner]), "edge") + (f" of {contest.surface}" if surfaces else "")
    if rest:
        second = min(rest, key=lambda method: rest[method])
        said += f"; next, {second}: {round(rest[second]):,}"
    return f"{readable(contest.task)} ({said})"


def _behaviour(contests: list[_Contest], subject: Replacement) -> str:
    """The subject's effect on predictions; and which methods are cheaper than the winner, and move the model more."""
    f = subject.fidelity
    se = "" if f.ce_delta_se is None else f" ± {fixed(f.ce_delta_se, 4)}"
    said = f"{subject.method} at {subject.surface} moves cross-entropy on held-out text by {signed(f.ce_delta, 4)}{se} nats"
    said += f", KL {tiny(f.kl, 4)}"
    cheaper: dict[str, list[str]] = {}
    for contest in contests:
        least = min(contest.edges.values(), default=float("inf"))
        for method, edges in contest.worse.items():
            if edges < least:
                cheaper.setdefault(method, []).append(f"{readable(contest.task)} ({plural(round(edges), 'edge')})")
    if not cheaper:
        return f"{said}."
    parts = [f"{m} for {conjunction(of) if len(of) <= FEW else f'{len(of)} tasks'}" for m, of in cheaper.items()]
    return f"{said}; cheaper, but of worse CE or KL: {'; '.join(parts)}."
