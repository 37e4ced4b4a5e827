"""The primary number: how many times the edges of the best control SWD needs (evidence.md §3). Fixed before anything was run, but
for which controls count: RESULTS.md has the numbers by the first rule, too.

1. Per task and target: log(edges of SWD / edges of the best control), natural logarithm. The controls are all methods of a
   comparison that are not SWD and whose CE is at most the tolerance above its own: matched, or nearer the dense model, as exact
   neurons are. The best is the one with the least edges.
2. Targets: a sufficiency, and a drop of a share of the dense margin, in logits (the same for every method).
3. Its interval and p-value: the test prompts are drawn again, the same draws for both methods, and the least prefixes are found
   anew. A draw in which one of the two reaches the target counts as that one's win; one in which neither does counts for nobody.
4. p-values of several tasks are adjusted by Holm's method.
5. A table, a picture, sentences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.record import PlainRecord
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.curve import resampled

_MARKERS = "osD^vP"
_FAR = 50.0  # of a logarithm: beyond every axis
_DRAWS, _SEED, _LEVEL, _ALPHA = 2000, 0, 0.95, 0.05


@dataclass(frozen=True)
class Ratio(PlainRecord):
    """One task on one surface at one target.

    Attributes:
        swd, control: names of the methods; "" where no control reaches the target.
        swd_edges, control_edges: None where the target is not reached.
        log_ratio: above 0: SWD needs more edges. low, high: its 95 % interval. NaN where one of the two has no circuit.
        p: two-sided, of log_ratio = 0; p_holm: the same after Holm's adjustment over the tasks.
    """

    task: str
    surface: str
    target: str
    swd: str
    control: str
    swd_edges: int | None
    control_edges: int | None
    log_ratio: float | int
    low: float | int
    high: float | int
    p: float | int
    p_holm: float | int = math.nan


def ratios(
    comparison: Comparison, swd: str, surface: str, *, sufficiency: float | int, share_of_drop: float | int
) -> list[Ratio]:
    """The primary number of a method on every task of a comparison, at both targets, before Holm's adjustment.

    Args:
        swd: the method that CE is matched to.
        surface: what its methods replace.
        share_of_drop: of the dense margin.
    """
    controls = [name for name in comparison.methods if not name.startswith("SWD") and _no_worse(comparison, name, swd)]
    of_all = []
    for target in (f"sufficiency {sufficiency:g}", f"drop of {share_of_drop:g} of the margin"):
        of_all += [
            _ratio(
                of_task.curves,
                task,
                surface,
                target,
                swd,
                [n for c in controls for n in comparison.methods[c]],
                sufficiency,
                share_of_drop,
            )
            for task, of_task in comparison.items()
        ]
    return of_all


def _no_worse(comparison: Comparison, control: str, swd: str) -> bool:
    """Whether the control's CE is at most the tolerance above SWD's."""
    theirs, ours = comparison.ce_difference(control), comparison.ce_difference(swd)
    return theirs is not None and ours is not None and theirs - ours <= comparison.tolerance


def adjusted(ratios: Sequence[Ratio]) -> list[Ratio]:
    """The same with each method's p-values at each target adjusted over the tasks (of all surfaces)."""
    tests = dict.fromkeys((each.swd, each.target) for each in ratios)
    return [each for test in tests for each in holm([ratio for ratio in ratios if (ratio.swd, ratio.target) == test])]


def _ratio(
    curves: Mapping[str, CostCurve],
    task: str,
    surface: str,
    target: str,
    swd: str,
    controls: Sequence[str],
    sufficiency: float | int,
    share_of_drop: float | int,
) -> Ratio:
    """At the sufficiency, or, where the target names a drop, at that."""
    by_drop = target.startswith("drop")
    need = share_of_drop * curves[swd].q_dense if by_drop else sufficiency
    least = {name: _least(curves[name], need, by_drop) for name in (swd, *controls)}
    reaching = [name for name in controls if math.isfinite(float(least[name]))]
    control = min(reaching, key=lambda name: float(least[name]), default="")
    edges = {name: int(value) if math.isfinite(float(value)) else None for name, value in least.items()}
    our_edges, their_edges = edges[swd], edges.get(control)
    if not our_edges or not their_edges:
        return Ratio(task, surface, target, swd, control, our_edges, their_edges, *(math.nan,) * 4)
    # The same draws of prompts for both: `resampled` draws by the seed.
    swd_least, control_least = (_least(curves[name], need, by_drop, _DRAWS) for name in (swd, control))
    known = swd_least.isfinite() | control_least.isfinite()
    draws = (swd_least.clamp_min(1).log() - control_least.clamp_min(1).log())[known].sort().values
    if not len(draws):
        return Ratio(task, surface, target, swd, control, our_edges, their_edges, *(math.nan,) * 4)
    cut = int((1 - _LEVEL) / 2 * (len(draws) - 1))
    below, above = ((draws <= 0).sum() + 1) / (len(draws) + 1), ((draws >= 0).sum() + 1) / (len(draws) + 1)
    log_ratio = math.log(our_edges / their_edges)
    p = min(1.0, 2 * float(torch.minimum(below, above)))
    return Ratio(
        task,
        surface,
        target,
        swd,
        control,
        our_edges,
        their_edges,
        log_ratio,
        float(draws[cut]),
        float(draws[-1 - cut]),
        p,
    )


def _least(curve: CostCurve, need: float | int, by_drop: bool, draws: int = 0) -> Float[Tensor, "*draw"]:
    """The least edges of a prefix that reaches a sufficiency or a drop in logits, on all prompts or in each draw of them;
    infinity where none does."""
    margins = {name: torch.atleast_2d(values).double() for name, values in curve.margins.items()}
    q = {name: resampled(of, draws, _SEED) if draws else of.mean(1)[None] for name, of in margins.items()}
    kept = (q["keep"] >= need * q["unpruned"]) & (q["unpruned"] > 0)
    reached = q["unpruned"] - q["ablate"] >= need if by_drop else kept
    edges = torch.tensor(curve.rows["edges"].tolist(), dtype=torch.float64)
    least = torch.where(reached, edges, torch.inf).amin(1)
    return least if draws else least[0]


def holm(of_tasks: Sequence[Ratio]) -> list[Ratio]:
    """The same with p-values adjusted over them; those without one are left out of the count."""
    tested = sorted((r for r in of_tasks if r.p == r.p), key=lambda r: r.p)
    of_task, largest = {}, 0.0
    for rank, each in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * each.p))
        of_task[each.task, each.surface] = largest
    return [replace(each, p_holm=of_task.get((each.task, each.surface), math.nan)) for each in of_tasks]


def table_of_ratios(ratios: Sequence[Ratio]) -> pd.DataFrame:
    """One row per task and target."""
    return pd.DataFrame(
        {
            "task": each.task,
            "surface": each.surface,
            "target": each.target,
            "method": each.swd,
            "its edges": each.swd_edges,
            "best control": each.control or None,
            "control's edges": each.control_edges,
            "log ratio": each.log_ratio,
            "low": each.low,
            "high": each.high,
            "p (Holm)": each.p_holm,
        }
        for each in ratios
    ).astype({"its edges": "Int64", "control's edges": "Int64"})


def plot(ratios: Sequence[Ratio]):
    """Times the best control's edges, with its interval: a panel per target, a row per task; a matplotlib Figure."""
    cells = list(dict.fromkeys((each.task, each.surface) for each in ratios))
    methods = list(dict.fromkeys(each.swd for each in ratios))
    targets = list(dict.fromkeys(each.target for each in ratios))
    height = 1.1 + len(cells) * (0.25 + 0.13 * len(methods))
    figure, axes = new_figure(1, len(targets), width=3.4, height=height)
    for ax, target in zip(axes[0], targets, strict=True):
        for i, method in enumerate(methods):
            known = [r for r in ratios if r.target == target and r.swd == method and not math.isnan(r.log_ratio)]
            rows = [
                cells.index((r.task, r.surface)) + (i - (len(methods) - 1) / 2) * 0.75 / len(methods) for r in known
            ]
            times = [math.exp(r.log_ratio) for r in known]
            look = {"color": style(i)["color"], "marker": _MARKERS[i % len(_MARKERS)]}
            for r, row in zip(known, rows, strict=True):
                # An end without bound (no circuit in some draws) leaves the panel.
                ends = [math.exp(min(max(end, -_FAR), _FAR)) for end in (r.low, r.high)]
                ax.plot(ends, [row, row], color=look["color"], linewidth=1.2, scalex=False)
            ax.scatter(times, rows, s=22, label=literal(method), zorder=3, **look)
        ax.axvline(1, color=INK, linewidth=0.9)
        finite = [end for r in ratios for end in (r.low, r.log_ratio, r.high) if math.isfinite(end)]
        ax.set_xscale("log")
        ax.set_xlim(math.exp(min([*finite, -0.7]) - 0.2), math.exp(max([*finite, 0.7]) + 0.2))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(len(cells) - 0.5, -0.5)
        ax.set_yticks(range(len(cells)), [literal(f"{task}\n{surface}") for task, surface in cells], fontsize=8)
        ax.set_xlabel("times the edges of the best control", fontsize=9, color=INK)
        ax.set_title(literal(target), fontsize=9, color=INK)
    for ax in axes[0, 1:]:
        ax.set_yticklabels([])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def in_words(ratios: Sequence[Ratio]) -> list[str]:
    """A sentence per target: how many times the best control's edges each method has, and in how many tasks significantly."""
    sentences = []
    for target in dict.fromkeys(each.target for each in ratios):
        at_target = [each for each in ratios if each.target == target]
        if all(math.isnan(each.log_ratio) for each in at_target):
            sentences.append(f"At {target} no task has both a circuit of SWD and a control of no worse CE with one.")
            continue
        n_tasks = len({(each.task, each.surface) for each in at_target})
        words = [_of_method(name, at_target) for name in dict.fromkeys(each.swd for each in at_target)]
        sentences.append(
            f"At {target}, edges over those of the best control of no worse CE (geometric mean over tasks with both, of "
            f"{n_tasks}; tasks with significantly fewer / more): {'; '.join(filter(None, words))}."
        )
    return sentences


def _of_method(name: str, at_target: Sequence[Ratio]) -> str:
    """ "SWD s=0.5 3.1 (0 / 2)"; nothing where no task has both circuits."""
    known = [each for each in at_target if each.swd == name and not math.isnan(each.log_ratio)]
    if not known:
        return ""
    significant = [each for each in known if each.p_holm < _ALPHA]
    fewer = sum(each.log_ratio < 0 for each in significant)
    mean = math.exp(sum(each.log_ratio for each in known) / len(known))
    return f"{name} {mean:.3g} ({fewer} / {len(significant) - fewer})"
