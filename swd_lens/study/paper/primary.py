"""The primary number: how many times the edges of a control SWD needs (evidence.md §3, measure.md §2).

1. A cell is a task on a surface. Targets are the same for every method: a share of what the dense model's margin has beyond the
   empty circuit, recovered when a circuit is kept, and a share of it taken when one is ablated.
2. Controls are the methods of these roles whose CE and KL are not worse than SWD's (`Comparison.out_by`). A method of several
   seeds is one control, of their median cost. Edges are the fewest that reach the target on the test prompts, SWD's and the
   controls' alike.
3. Beside which control? The one that is cheapest on the validation prompts is named in each cell, and its ratios are described by
   their median and by what leaving out one cell does to it; nothing is tested of it, since the best of several wins by chance.
4. Tested is each control by itself: on how many surfaces SWD needs fewer edges than it, by an exact sign test. A cell in which
   only one of the two has a circuit is that one's win, and a surface is won in most of its cells. The unit is the surface, not
   the cell: the tasks of a surface share its factors, and what makes these cheap makes them cheap for all its tasks. P-values of
   the controls are adjusted by Holm's method. Where there are too few surfaces for any difference to be told from chance, the
   sentence says that. tests/study/paper/test_primary.py simulates the test with exchangeable methods.
5. MLPs and attention are told apart. A table of cells, a table of controls, a picture, sentences.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from scipy.stats import binomtest

from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.record import PlainRecord
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.measure import Threshold, part_of
from swd_lens.circuits.measure import holm as adjusted_p

_MARKERS = "osD^vP"
_ALPHA = 0.05


@dataclass(frozen=True)
class Ratio(PlainRecord):
    """One cell at one target, SWD beside one control."""

    task: str
    surface: str
    part: str  # "MLP", "attention" or "both": where the surface is
    target: str
    swd: str  # swd, control: names of the methods; control is "" where no control is matched
    control: str
    cheapest: bool  # whether the control is the cheapest on validation prompts in this cell
    swd_edges: float | int | None  # swd_edges, control_edges: None where the target is not reached; of several seeds the median
    control_edges: float | int | None
    sign: int  # 1 where SWD needs more edges than the control (than most of its seeds), -1 where it needs fewer, else 0
    carried: bool  # whether the surface carries the task, under SWD or under the control

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of SWD's edges over the control's: above 0, SWD needs more. Infinite where only one of the two has a
        circuit, NaN where neither has.
        """
        if self.swd_edges is None and self.control_edges is None:
            return math.nan
        if self.swd_edges is None or self.control_edges is None:
            return math.inf if self.swd_edges is None else -math.inf
        return math.log(max(self.swd_edges, 1) / max(self.control_edges, 1))


@dataclass(frozen=True)
class Test(PlainRecord):
    """SWD beside one control, over surfaces."""

    part: str
    target: str
    swd: str
    control: str
    fewer: int  # fewer, more: surfaces on which SWD needs fewer edges than the control in most cells, and more
    more: int
    # over cells, of SWD's edges over the control's; infinite or zero where only one of the two has a circuit, NaN where neither
    # has
    median: float
    p: float  # two-sided sign test; NaN where no surface is won by either. p_holm: after Holm's adjustment over the controls.
    p_holm: float = math.nan


# ---------------------------------------------------------------------------------------------- cells


def ratios(comparison: Comparison, swd: str, surface: str, *, recovered: float | int, share_of_drop: float | int) -> list[Ratio]:
    """SWD beside every matched control, in every task of a comparison, at both targets.

    Args:
        swd: the method that CE and KL are matched to.
        surface: what its methods replace.
        recovered, share_of_drop: of what the dense model's margin has beyond the empty circuit.
    """
    matched_to_swd = replace(comparison, reference=swd)
    controls = [name for name in comparison.in_role("control", "trained") if matched_to_swd.matched(name)]
    of_all = []
    for task, of_task in comparison.items():
        curve = of_task.curves[swd]
        whole = curve.q_dense - curve.q_empty
        for target, threshold in (
            (f"recovered {recovered:g}", Threshold("recovered of dense", recovered)),
            (f"a drop of {share_of_drop:g}", Threshold("drop", share_of_drop * whole)),
        ):
            head = (task, surface, part_of(curve.settings.get("units", ())), target, swd)
            own = _costs([curve], threshold)
            of_control = {name: [of_task.curves[seed] for seed in comparison.methods[name]] for name in controls}
            chosen = {name: _median(_costs(curves, threshold, on_validation=True)) for name, curves in of_control.items()}
            cheapest = min((name for name in controls if chosen[name] < math.inf), key=chosen.__getitem__, default=None)
            for name, curves in of_control.items():
                costs = _costs(curves, threshold)
                edges = (_known(own[0]), _known(_median(costs)))
                carried = curve.carries or 2 * sum(seed.carries for seed in curves) > len(curves)
                of_all.append(Ratio(*head, name, name == cheapest, *edges, _majority(own[0], costs), carried))
            if not controls:
                of_all.append(Ratio(*head, "", False, _known(own[0]), None, 0, curve.carries))
    return of_all


def _costs(curves: Sequence[CostCurve], threshold: Threshold, *, on_validation: bool = False) -> list[float]:
    """The least edges that reach the threshold; infinite where none do, or the surface does not carry the task.

    Not `CostCurve.cost_at`: it takes the costs of validation prompts, on which the control was chosen for being cheap.

    Args:
        on_validation: on the validation prompts, by which a control is chosen; else on the test prompts.
    """
    least = []
    for curve in curves:
        rows = curve.validation if on_validation and len(curve.validation) else curve.rows
        reached = rows.loc[threshold.reached(rows), "edges"]
        least.append(float(reached.min()) if curve.carries and len(reached) else math.inf)
    return least


def _majority(own: float, of_seeds: Sequence[float]) -> int:
    """1 where SWD needs more edges than most seeds, -1 where it needs fewer, else 0.

    Not by their median: of two seeds that is above the middle where costs are skewed, and infinite where one has no circuit, so
    that SWD would win by being one. Where most of all have no circuit, who has none is nobody's loss.
    """
    if 2 * sum(cost == math.inf for cost in (own, *of_seeds)) > 1 + len(of_seeds):
        return 0
    more = sum((own > each) - (own < each) for each in of_seeds)
    return (more > 0) - (more < 0)


def _median(values: Sequence[float]) -> float:
    """Take the median, also of infinite values; halfway between one of each sign, of logarithms, counts as alike."""
    middle = statistics.median(values)
    return 0.0 if math.isnan(middle) else middle


def _known(cost: float) -> float | None:
    return cost if cost < math.inf else None


# ---------------------------------------------------------------------------------------------- controls


def tests(ratios: Sequence[Ratio]) -> list[Test]:
    """Test each control by its signs over its surfaces, with Holm's adjustment over the controls of a part, target and method."""
    of_groups: dict[tuple[str, str, str], dict[str, list[Ratio]]] = {}
    for each in ratios:
        # Also where SWD does not carry the task, or has no circuit: to leave those out would be to leave out what it loses.
        if each.control:
            of_groups.setdefault((each.part, each.target, each.swd), {}).setdefault(each.control, []).append(each)
    return [
        test
        for group, of_controls in of_groups.items()
        for test in holm([_test(*group, control, cells) for control, cells in of_controls.items()])
    ]


def _test(part: str, target: str, swd: str, control: str, cells: Sequence[Ratio]) -> Test:
    wins = dict.fromkeys((each.surface for each in cells), 0)
    for each in cells:
        wins[each.surface] -= each.sign
    fewer, more = sum(won > 0 for won in wins.values()), sum(won < 0 for won in wins.values())
    p = float(binomtest(fewer, fewer + more).pvalue) if fewer + more else math.nan
    known = [each.log_ratio for each in cells if not math.isnan(each.log_ratio)]
    log_median = _median(known) if known else math.nan
    median = math.inf if log_median == math.inf else math.exp(log_median)
    return Test(part, target, swd, control, fewer, more, median, p)


def holm(of_controls: Sequence[Test]) -> list[Test]:
    """These tests with p-values adjusted over them; those without one are left out of the count."""
    adjusted = adjusted_p([test.p for test in of_controls])
    return [replace(test, p_holm=p) for test, p in zip(of_controls, adjusted, strict=True)]


# ---------------------------------------------------------------------------------------------- shown


def table_of_ratios(ratios: Sequence[Ratio]) -> pd.DataFrame:
    """Tabulate, per cell, target and method, its edges beside those of the control that is cheapest on validation prompts."""
    cells: dict[tuple[str, ...], list[Ratio]] = {}
    for each in ratios:
        cells.setdefault((each.task, each.surface, each.target, each.swd), []).append(each)
    firsts = [next((each for each in cell if each.cheapest), cell[0]) for cell in cells.values()]
    return pd.DataFrame(
        {
            "task": each.task,
            "surface": each.surface,
            "target": each.target,
            "method": each.swd,
            "carried": "yes" if each.carried else "no",
            "its edges": each.swd_edges,
            "cheapest control": each.control if each.cheapest else None,
            "control's edges": each.control_edges if each.cheapest else None,
            "ratio": _finite(each.log_ratio) if each.cheapest else None,
        }
        for each in firsts
    ).astype({"its edges": "Float64", "control's edges": "Float64", "ratio": "Float64"})


def _finite(log_ratio: float) -> float | None:
    return math.exp(log_ratio) if math.isfinite(log_ratio) else None


def table_of_tests(tests: Sequence[Test]) -> pd.DataFrame:
    """One row per part, target, method and control."""
    return pd.DataFrame(
        {
            "part": each.part,
            "target": each.target,
            "method": each.swd,
            "control": each.control,
            "fewer edges on": each.fewer,
            "more edges on": each.more,
            "median ratio": each.median if math.isfinite(each.median) else None,
            "p": each.p,
            "p (Holm)": each.p_holm,
        }
        for each in tests
    )


def plot(ratios: Sequence[Ratio]):
    """Draw SWD's edges over every control's: a panel per target, a row per cell, the cheapest filled; a matplotlib Figure."""
    cells = list(dict.fromkeys((each.task, each.surface) for each in ratios))
    methods = list(dict.fromkeys(each.swd for each in ratios))
    targets = list(dict.fromkeys(each.target for each in ratios))
    height = 1.1 + len(cells) * (0.25 + 0.13 * len(methods))
    figure, axes = new_figure(1, len(targets), width=3.4, height=height)
    for ax, target in zip(axes[0], targets, strict=True):
        for i, method in enumerate(methods):
            known = [r for r in ratios if (r.target, r.swd) == (target, method) and math.isfinite(r.log_ratio)]
            shift = (i - (len(methods) - 1) / 2) * 0.75 / len(methods)
            look = {"marker": _MARKERS[i % len(_MARKERS)], "edgecolors": style(i)["color"]}
            for cheapest, face in ((False, "none"), (True, style(i)["color"])):
                shown = [r for r in known if r.cheapest == cheapest]
                rows = [cells.index((r.task, r.surface)) + shift for r in shown]
                label = literal(method) if cheapest else None
                ax.scatter([math.exp(r.log_ratio) for r in shown], rows, s=22, label=label, facecolors=face, **look)
        ax.axvline(1, color=INK, linewidth=0.9)
        finite = [r.log_ratio for r in ratios if math.isfinite(r.log_ratio)]
        ax.set_xscale("log")
        ax.set_xlim(math.exp(min([*finite, -0.7]) - 0.2), math.exp(max([*finite, 0.7]) + 0.2))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(len(cells) - 0.5, -0.5)
        ax.set_yticks(range(len(cells)), [literal(f"{task}\n{surface}") for task, surface in cells], fontsize=8)
        ax.set_xlabel("times a control's edges (filled: the cheapest)")
        ax.set_title(literal(target), fontsize=9, color=INK)
    for ax in axes[0, 1:]:
        ax.set_yticklabels([])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def in_words(ratios: Sequence[Ratio], tested: Sequence[Test]) -> list[str]:
    """Say, per part and target, a sentence on the ratios to the cheapest control and on what is missing, and one on chance."""
    sentences = []
    for part, target in dict.fromkeys((each.part, each.target) for each in ratios):
        of_target = [each for each in ratios if (each.part, each.target) == (part, target)]
        methods = dict.fromkeys(each.swd for each in of_target)
        words = [_of_method([r for r in of_target if r.swd == name], name) for name in methods]
        chance = _beyond_chance([test for test in tested if (test.part, test.target) == (part, target)])
        sentences.append(f"{part}, {target}: edges over those of the cheapest control: {'; '.join(words)}.{chance}")
    return sentences


def _of_method(of_method: Sequence[Ratio], name: str) -> str:
    """ "SWD s=0.5 3.1 in the median of 4 (2.0 to 3.6 leaving out one), 1 not carried"."""
    cells: dict[tuple[str, str], Ratio] = {}
    carried = {(each.task, each.surface) for each in of_method if each.carried}
    for each in sorted(of_method, key=lambda ratio: ratio.cheapest):  # the cheapest last, so that it is what stays
        cells[each.task, each.surface] = each
    logs = [each.log_ratio for each in cells.values() if each.cheapest and math.isfinite(each.log_ratio)]
    beside = [each for key, each in cells.items() if key in carried and not (each.cheapest and _finite(each.log_ratio))]
    only_swd, only_control = (
        sum(each.swd_edges is not None for each in beside),
        sum(each.cheapest and each.swd_edges is None and each.control_edges is not None for each in beside),
    )
    counts = (
        (only_swd, f"{only_swd} where only it has a circuit"),
        (only_control, f"{only_control} where only the control has one"),
        (n := len(beside) - only_swd - only_control, f"{n} where neither has one"),
        (n := len(cells) - len(carried), f"{n} of {len(cells)} cells not carried"),
    )
    missing = "".join(f", {said}" for count, said in counts if count)
    if not logs:
        return f"{name} none{missing}"
    left_out = [statistics.median(logs[:i] + logs[i + 1 :]) for i in range(len(logs))] if len(logs) > 1 else []
    spread = f" ({math.exp(min(left_out)):.3g} to {math.exp(max(left_out)):.3g} leaving out one)" if left_out else ""
    return f"{name} {math.exp(statistics.median(logs)):.3g} in the median of {len(logs)}{spread}{missing}"


def _beyond_chance(tested: Sequence[Test]) -> str:
    """Say, after a space, which controls differ, that none does, or that there are too few surfaces to tell."""
    tested = [test for test in tested if test.p == test.p]
    if not tested:
        return ""
    differ = []
    for test in (test for test in tested if test.p_holm < _ALPHA):
        surfaces = f"{max(test.fewer, test.more)} of {test.fewer + test.more} surfaces (p = {test.p_holm:.2g})"
        fewer = "fewer" if test.fewer > test.more else "more"
        differ.append(f"{test.swd} needs {fewer} edges than {test.control} on {surfaces}")
    if differ:
        return f" Over surfaces (sign test, Holm): {'; '.join(differ)}."
    n_controls = max(Counter(test.swd for test in tested).values())
    n = max(test.fewer + test.more for test in tested)
    # So many that one of these controls can be significant: where all surfaces agree, p is 2 ** (1 - n).
    needed = next(n for n in itertools.count(1) if n_controls * 2.0 ** (1 - n) < _ALPHA)
    among = f"{n} {'surface' if n == 1 else 'surfaces'} and {n_controls} {'control' if n_controls == 1 else 'controls'}"
    if n < needed:
        return f" With {among} no difference can be told from chance: that takes {needed} surfaces (sign test, Holm)."
    return f" With {among} none differs beyond chance (sign test over surfaces, Holm)."
