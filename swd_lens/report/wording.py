"""How the report writes numbers and settings; plain strings in, plain strings out, escaping is the template's.

1. Numbers: digits that a reader can use (`fixed`, `signed`, `tiny`, `percent`, `count`), a dash for what is undefined.
2. Settings: a nested mapping becomes (depth, name, value) rows in its own order.
3. `headline`: what a run found, in a few sentences made from its numbers alone. The subject is the sparsest replacement of the
   surface with most matrices; the controls are the exact ones that were run, and of its sparsity the paper's SWD and pruned ones.
   It says how far the subject moves held-out cross-entropy and how often it agrees with the dense host; over all surfaces and
   tasks, how often a circuit is needed at all, whose is cheaper in active edges, where the control's is, and where the two differ
   in cross-entropy; and the smallest circuit that is not empty.
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from swd_lens.circuits import Comparison
from swd_lens.study import Run
from swd_lens.study.run_file import Replacement

UNDEFINED = "–"
MINUS = "\u2212"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# What a circuit costs, as the axes and the switch between them say it.
COSTS = {"edges": "active edges", "units": "units"}
# Sparsities that are this close were asked for as the same: K is a whole number, and some solvers leave an edge or two out.
_SAME_SPARSITY = 0.01
_FEW = 4  # cases that a sentence names one by one
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
    """A number with so many decimals and a true minus sign."""
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
    """What was done to units, and where: "mean ablation at the scoring position"."""
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
    """Least active edges and units of one method for one surface and task; None: never reached, or not defined."""

    surface: str
    task: str
    method: str
    edges: int | None
    units: int | None
    all_units: int
    defined: bool


def headline(run: Run, sufficiency: float = 0.9) -> list[str]:
    """One to a few sentences, most important first; none where a run has nothing of the kind."""
    subject = main_replacement(run)
    if subject is None:
        return []
    costs = [
        Cost(
            surface,
            task,
            method,
            edges=curve.cost_at(sufficiency=sufficiency, cost="edges"),
            units=curve.cost_at(sufficiency=sufficiency, cost="units"),
            all_units=int(curve.rows["units"].max()),
            defined=bool(curve.q_full > 0),
        )
        for surface, by_task in run.comparisons.items()
        for task, comparison in by_task.items()
        for method, curve in comparison.curves.items()
    ]
    controls = () if subject.control else [*_solved_beside(run, subject), *controls_of(run)]
    apart = {
        (surface, control)
        for surface, comparison in run.comparisons.items()
        for control in controls
        if _ce_apart(comparison, subject.method, control)
    }
    return [_fidelity_sentence(subject), *cost_sentences(costs, subject.method, controls, sufficiency, apart)]


def main_replacement(run: Run) -> Replacement | None:
    """The sparsest replacement of the surface that replaces most matrices; a control only if there is nothing else."""
    candidates = [r for r in run.replacements if not r.control] or list(run.replacements)
    return max(candidates, key=lambda r: (len(r.factors), r.factors.sparsity), default=None)


def controls_of(run: Run) -> list[str]:
    """The methods of the exact replacements."""
    return list(dict.fromkeys(r.method for r in run.replacements if r.exact))


def pruned_of(run: Run) -> list[str]:
    """The methods of the pruned controls."""
    return list(dict.fromkeys(r.method for r in run.replacements if r.pruned))


def paper_of(run: Run) -> list[str]:
    """The methods of the controls that the paper's solver made."""
    return list(dict.fromkeys(r.method for r in run.replacements if r.paper))


def _solved_beside(run: Run, subject: Replacement) -> list[str]:
    """The methods of the controls with as many edges as the subject has."""
    of_sparsity = (r for r in run.replacements if abs(r.factors.sparsity - subject.factors.sparsity) < _SAME_SPARSITY)
    return list(dict.fromkeys(r.method for r in of_sparsity if r.pruned or r.paper))


def _ce_apart(comparison: Comparison, method: str, control: str) -> bool:
    """Whether the two are known to differ in cross-entropy by more than the comparison's tolerance."""
    measured = comparison.fidelities
    known = method in measured and control in measured
    return known and abs(measured[method].ce - measured[control].ce) > comparison.tolerance


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
    costs: Sequence[Cost],
    method: str,
    controls: Sequence[str],
    sufficiency: float,
    apart: Collection[tuple[str, str]] = (),
) -> Iterator[str]:
    """What circuits of the method cost, beside those of each control.

    Args:
        apart: (surface, control) where the two differ in cross-entropy, so that their circuits are no fair match.
    """
    own = {(c.surface, c.task): c for c in costs if c.method == method}
    cases = plural(len(own), "case")
    told = False
    for control in controls:
        exact = {(c.surface, c.task): c for c in costs if c.method == control}
        # Where both need some edges: those of the control over the method's.
        both = [(c, exact[key].edges or 0) for key, c in own.items() if key in exact]
        contested = [(c, control_edges / c.edges) for c, control_edges in both if c.edges and control_edges]
        if contested:
            of_cases = f"{len(contested)} of {cases}"
            opening = f"Where both need a circuit to keep {percent(sufficiency, 0)} of the task margin ({of_cases} of surface "
            opening = "" if told else f"{opening}and task), "
            told = True
            yield f"{opening}{_contest(contested, method, control, of_cases if not opening else '', apart)}"
    empty = [f"{readable(c.task)} ({c.surface})" for c in own.values() if c.edges == 0]
    if empty:
        whom = f"For {conjunction(empty)}" if len(empty) <= 3 else f"In {len(empty)} of {cases}"
        yield f"{whom} the empty circuit already suffices: these matrices are hardly needed at the scored positions."
    undefined = sum(not c.defined for c in own.values())
    if undefined:
        yield (
            f"In {undefined} of {cases} sufficiency is not defined: the unpruned replacement has no positive margin, "
            "because the model does not do the task."
        )
    # Nothing and everything are no circuits.
    circuits = [c for c in own.values() if c.edges and c.units and c.units < c.all_units]
    if circuits:
        least = min(circuits, key=lambda c: (c.edges or 0, c.surface, c.task))
        yield (
            f"The smallest circuit found: {count(least.units)} of the {plural(least.all_units, 'unit')} of {least.surface}, with "
            f"{plural(least.edges or 0, 'active edge')}, keep {percent(sufficiency, 0)} of the margin of {readable(least.task)}."
        )


def _contest(
    contested: Sequence[tuple[Cost, float]],
    method: str,
    control: str,
    cases: str,
    apart: Collection[tuple[str, str]],
) -> str:
    """The method's costs beside a control's, whose edges over the method's stand beside each.

    Args:
        cases: how many these are of all, where nothing before has said it.
    """
    ratios = [ratio for _, ratio in contested]
    n, fewer = len(ratios), sum(ratio > 1 for ratio in ratios)
    among = f" ({cases})" if cases else ""
    more = f" in the median{among}, and fewer in {fewer} of {n}" if n > 1 else among
    # Then the ratio is that of the whole factorizations and says nothing about circuits.
    whole = sum(c.units == c.all_units for c, _ in contested)
    caveats = [f"in {whole} of {n}, {method} takes every unit it has"] if whole else []
    if unlike := sum((c.surface, control) in apart for c, _ in contested):
        caveats.append(f"in {unlike} of {n}, cross-entropy differs: no fair match")
    caveat = f" ({'; '.join(caveats)})" if caveats else ""
    dearer = [f"{readable(c.task)} ({c.surface})" for c, ratio in contested if ratio < 1]
    lost = f"; more for {conjunction(dearer)}" if n > 1 and 0 < len(dearer) <= _FEW else ""
    return f"{method} needs {_ratio(statistics.median(ratios))} active edges than {control}{more}{lost}{caveat}."


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f} times fewer" if ratio >= 1 else f"{1 / ratio:.1f} times more"
