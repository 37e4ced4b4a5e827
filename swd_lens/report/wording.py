"""The report's way of writing numbers and settings; plain strings in, plain strings out, escaping is the template's.

1. Numbers: digits that a reader can use (`fixed`, `signed`, `tiny`, `percent`, `count`), a dash for what is undefined.
2. Settings: a nested mapping becomes (depth, name, value) rows in its own order.
3. `headline`: what a run found, in a few sentences made from its numbers alone. The subject is the sparsest replacement of the
   surface with most matrices; the controls are the exact ones that were run, and of its sparsity the paper's SWD and pruned ones.
   It opens with the surface that carries the largest share of a task: how much, how small a circuit recovers most of it, and
   what the cheapest control needs. Then: how far the subject moves held-out cross-entropy; which tasks are not carried; over
   all surfaces and tasks, MLPs and attention apart, whose circuits have fewer active edges, and where the two are no fair match.
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from swd_lens.circuits.comparison import priced
from swd_lens.circuits.measure import RECOVERED, Threshold, part_of
from swd_lens.study import Run
from swd_lens.study.run import Replacement

UNDEFINED = "–"
MINUS = "\u2212"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# What a circuit costs, as the axes and the switch between them say it.
COSTS = {"edges": "active edges", "units": "units"}
# Sparsities that are this close were asked for as the same: K is a whole number, and some solvers leave an edge or two out.
_SAME_SPARSITY = 0.01
FEW = 4  # cases that a sentence names one by one
# What a family of tasks asks; tasks that are not listed speak for themselves by name.
TASK_QUESTIONS = {
    "ioi": "Indirect object identification: “When Mary and John went out, John gave a book to” – is it Mary?",
    "docstring": "Docstring completion: which argument name does the documentation describe next?",
    "greater_than": "Greater-than: “The war lasted from 1741 to 17” – is the year later than 41?",
    "gendered_pronoun": "Gendered pronoun: “So Mary is a doctor, isn't” – he or she?",
    "agreement": "Subject-verb agreement across a noun of the other number: “The keys to the cabinet” – are or is?",
    "capital": "Capital of a country: “The capital of France is” – Paris, or another capital?",
    "succession": "Succession: “Monday, Tuesday,” – does the next day, month or number follow?",
    "greater_digit": "Greater-than for digits: “from the year 1743 to the year 174” – is the last digit above 3?",
}


def missing(value: Any) -> bool:
    """None, NaN, NA or an infinity: nothing that can be shown as a number."""
    return value is None or value is pd.NA or not math.isfinite(value)


def count(value: Any) -> str:
    """1234 -> 1,234."""
    return UNDEFINED if missing(value) else f"{int(value):,}".replace("-", MINUS)


def fixed(value: Any, digits: int = 3) -> str:
    """Write a number with so many decimals and a true minus sign."""
    if missing(value):
        return UNDEFINED
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def tiny(value: Any, digits: int = 5) -> str:
    """`fixed`, but a number that this would round to almost nothing keeps its first digit: 3×10⁻⁹."""
    if missing(value) or value == 0 or abs(value) >= 10.0 ** (1 - digits):
        return fixed(value, digits)
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}×10".replace("-", MINUS) + str(int(exponent)).translate(_SUPERSCRIPT)


def signed(value: Any, digits: int = 5) -> str:
    """`tiny` with a plus sign for what is above zero."""
    text = tiny(value, digits)
    return f"+{text}" if not missing(value) and value > 0 else text


def percent(value: Any, digits: int = 1) -> str:
    """0.4213 -> 42.1%."""
    return UNDEFINED if missing(value) else f"{fixed(100 * value, digits)}%"


def duration(seconds: Any) -> str:
    """Seconds as a person says them."""
    if missing(seconds):
        return UNDEFINED
    if seconds < 100:
        return f"{seconds:.{1 if seconds >= 1 else 2}f} s"
    return f"{seconds / 60:.1f} min"


def readable(name: str) -> str:
    """greater_than -> greater than."""
    return name.replace("_", " ")


def intervention_words(positions: str, ablation: str) -> str:
    """Say what was done to units, and where: "mean ablation at the scoring position"."""
    return f"{ablation} ablation at {'the scoring position' if positions == 'scoring' else f'{positions} positions'}"


def conjunction(items: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), *items[-1:]])


def plural(n: int, noun: str, nouns: str = "") -> str:
    """1 site, 4 sites."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def settings_rows(settings: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """(depth, name, value) of every setting; a mapping's own row has an empty value and its entries follow, deeper."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield depth, str(name), ""
            yield from settings_rows(value, depth + 1)
        else:
            yield depth, str(name), _value(value)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_value(item) for item in value) or "none"
    return "none" if value is None or value == {} else str(value)


@dataclass(frozen=True)
class Cost:
    """Least active edges and units of one method for one surface and task; None: never reached, or the task is not carried."""

    surface: str
    task: str
    method: str
    part: str
    edges: int | None
    units: int | None
    all_units: int
    carries: bool


def headline(run: Run, recovered: float = RECOVERED) -> list[str]:
    """Write one to a few sentences, most important first; none where a run has nothing of the kind."""
    subject = main_replacement(run)
    if subject is None:
        return []
    threshold = Threshold("recovered", recovered)
    costs = [
        Cost(
            surface,
            task,
            method,
            part_of(curve.settings.get("units", ())),
            edges=priced(curve, threshold, "edges"),
            units=priced(curve, threshold, "units"),
            all_units=int(curve.rows["units"].max()),
            carries=curve.carries,
        )
        for surface, by_task in run.comparisons.items()
        for task, comparison in by_task.items()
        for method, curve in comparison.curves.items()
    ]
    beside = (r for r in run.replacements if abs(r.factors.sparsity - subject.factors.sparsity) < _SAME_SPARSITY)
    solved = dict.fromkeys(r.method for r in beside if r.control and not r.exact)
    controls = () if subject.control else [*solved, *methods_of(run, "control", exact=True)]
    apart = {
        (surface, control)
        for surface, comparison in run.comparisons.items()
        for control in controls
        if {subject.method, control} <= set(comparison.methods) and replace(comparison, reference=subject.method).out_by(control)
    }
    return [
        *_opening(run, subject.method, controls, threshold, apart),
        _fidelity_sentence(subject),
        *cost_sentences(costs, subject.method, controls, recovered, apart),
    ]


def _opening(
    run: Run, method: str, controls: Sequence[str], threshold: Threshold, apart: Collection[tuple[str, str]]
) -> Iterator[str]:
    """Say what the surface that carries the largest share of a task does for it, with which circuit, and what a control needs."""
    cells = [
        (surface, task, of_task.curves)
        for surface, by_task in run.comparisons.items()
        for task, of_task in by_task.items()
        if method in of_task.curves and of_task.curves[method].carries
    ]
    if not cells:
        return
    surface, task, curves = max(cells, key=lambda cell: cell[2][method].carried.logits / cell[2][method].q_dense)
    curve, row = curves[method], curves[method].row_of(threshold, "edges")
    logits = f"{fixed(curve.carried.logits, 2)} ± {fixed(curve.carried.se, 2)} logits"
    carried = f"{surface} carries {logits} of {readable(task)}, where the model prefers right answers to wrong ones by "
    carried += fixed(curve.q_dense, 2)
    if row is None:
        yield f"{carried}; no circuit of its units recovers {percent(threshold.value, 0)} of that."
        return
    circuit = f"{count(row['units'])} of its {count(curve.rows['units'].max())} units"
    circuit += f", with {plural(int(row['edges']), 'active edge')}"
    test = f"recover {percent(row['recovered'], 0)} of that on prompts that they were not chosen on"
    known = {c: priced(curves[c], threshold, "edges") for c in controls if c in curves and (surface, c) not in apart}
    reaching = {name: cost for name, cost in known.items() if cost is not None}
    best = min(reaching, key=lambda name: reaching[name], default=None)
    beside = "no control that behaves alike has such a circuit" if known else "no control behaves alike enough to stand beside it"
    beside = f"the cheapest control, {best}, needs {plural(reaching[best], 'active edge')}" if best else beside
    yield f"{carried}; {circuit}, {test}{f'; {beside}' if controls else ''}."


def main_replacement(run: Run) -> Replacement | None:
    """The sparsest replacement of the surface that replaces most matrices; a control only if there is nothing else."""
    candidates = [r for r in run.replacements if not r.control] or list(run.replacements)
    return max(candidates, key=lambda r: (len(r.factors), r.factors.sparsity), default=None)


def methods_of(run: Run, role: str, *, exact: bool = False) -> list[str]:
    """List the methods that have this role, exact ones or others."""
    return list(dict.fromkeys(r.method for r in run.replacements if (r.role, r.exact) == (role, exact)))


def _fidelity_sentence(r: Replacement) -> str:
    f = r.fidelity
    matrices = plural(len(r.factors), "matrix", "matrices")
    kept = f"{percent(1 - r.factors.sparsity, 0)} as many nonzero weights"
    se = "" if f.ce_delta_se is None else f" ± {fixed(f.ce_delta_se, 4)} (standard error)"
    return (
        f"With {matrices} replaced ({r.surface}, {r.method}: {kept}), cross-entropy on held-out text moves by "
        f"{signed(f.ce_delta, 4)}{se} nats, from {fixed(f.ce_dense, 3)} to {fixed(f.ce, 3)}, and the most likely next token "
        f"stays the same in {percent(f.top1_agreement)} of {count(f.n_predictions)} predictions."
    )


def cost_sentences(
    costs: Sequence[Cost], method: str, controls: Sequence[str], recovered: float, apart: Collection[tuple[str, str]] = ()
) -> Iterator[str]:
    """Say what circuits of the method cost, beside those of each control.

    Args:
        apart: (surface, control) where the control behaves worse than the method, so that their circuits are no fair match.
    """
    own = {(c.surface, c.task): c for c in costs if c.method == method}
    cases = plural(len(own), "case")
    nothing = [f"{readable(c.task)} ({c.surface})" for c in own.values() if not c.carries]
    if nothing:
        whom = conjunction(nothing) if len(nothing) <= FEW else f"{len(nothing)} of {cases}"
        yield (
            f"Not carried: {whom}. There the margin with every unit at its reference activation is that with all of them, to "
            "within the error or a twentieth of the model's, and no circuit has a cost."
        )
    parts = list(dict.fromkeys(c.part for c in own.values()))
    for part in parts:
        beside = []
        of_part = {key: c for key, c in own.items() if c.part == part}
        for control in controls:
            theirs = {(c.surface, c.task): c for c in costs if c.method == control}
            # Where both need some edges: those of the control over the method's.
            both = [(c, theirs[key].edges or 0) for key, c in of_part.items() if key in theirs]
            contested = [(c, control_edges / c.edges) for c, control_edges in both if c.edges and control_edges]
            if contested:
                beside.append(_contest(contested, method, control, apart))
        if beside:
            where = f" in {part}" if len(parts) > 1 else ""
            cases = f"{plural(len(of_part), 'case')} of surface and task{where}"
            median = "in the median " if len(of_part) > 1 else ""
            of_both = f"To recover {percent(recovered, 0)}, where both have a circuit that does ({cases}), "
            yield f"{of_both}{method} needs {median}{'; '.join(beside)}."
    # Nothing and everything are no circuits.
    circuits = [c for c in own.values() if c.edges and c.units and c.units < c.all_units]
    if circuits:
        least = min(circuits, key=lambda c: (c.edges or 0, c.surface, c.task))
        yield (
            f"The smallest circuit found: {count(least.units)} of the {plural(least.all_units, 'unit')} of {least.surface}, with "
            f"{plural(least.edges or 0, 'active edge')}, recover {percent(recovered, 0)} of what it carries of "
            f"{readable(least.task)}."
        )


def _contest(contested: Sequence[tuple[Cost, float]], method: str, control: str, apart: Collection[tuple[str, str]]) -> str:
    """Say the method's costs beside a control's, whose edges over the method's stand beside each."""
    ratios = [ratio for _, ratio in contested]
    caveats = [f"fewer in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"]
    dearer = [f"{readable(c.task)} ({c.surface})" for c, ratio in contested if ratio < 1]
    if len(ratios) > 1 and 0 < len(dearer) <= FEW:
        caveats.append(f"more for {conjunction(dearer)}")
    # Then the ratio is that of the whole factorizations and says nothing about circuits.
    if whole := sum(c.units == c.all_units for c, _ in contested):
        caveats.append(f"in {whole}, {method} takes every unit it has")
    if unlike := sum((c.surface, control) in apart for c, _ in contested):
        caveats.append(f"in {unlike}, the control's cross-entropy or KL is worse: no fair match")
    median = statistics.median(ratios)
    times = f"{max(median, 1 / median):.1f}"
    more = f"{times} times {'fewer' if median > 1 else 'more'} active edges than"
    return f"{'about as many active edges as' if times == '1.0' else more} {control} ({'; '.join(caveats)})"
