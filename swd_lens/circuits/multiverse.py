"""multiverse: whether a method needs fewer edges than its controls whichever way circuits are scored, ablated and placed.

One specification (first-order scores, mean ablation, the scoring position) may favour a method. So all of them are run.

1. Every method is run on every task under every specification: score x positions x ablation (protocol.py).
2. In each specification a method's cost is the edges at which its curve crosses the threshold on the test prompts, read linearly
   in log(1 + edges) between its prefixes. Specifications where either of two methods does not carry the task are not counted, and
   said.
3. The statistic, per control: the share of the counted specifications in which the method needs fewer edges; equal costs count
   half.
4. Null: on each prompt the two methods change labels, the same in all specifications of a task, prompts about one thing together;
   every curve, every cost and the share are computed anew. p = (1 + how many of n relabellings have as large a share) / (n + 1),
   exact where the methods are exchangeable, however alike the specifications are (tests/circuits/test_multiverse.py). Curves are
   compared at equal edges: prefixes of both are read off on one grid.
5. Several controls: p is adjusted by Holm's method; "every control" has the largest unadjusted p, which is a test of being
   cheaper than each.

Scores and curves are parts of the call (base/step_cache.py): with `out`, the same call after an interruption goes on behind the
last finished one, and one with further tasks, scores, positions, ablations or methods adds to them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import legible
from swd_lens.base.figures import literal, new_figure, style
from swd_lens.base.fingerprints import host_fingerprint, splits_fingerprint
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.record import SavedRecord
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.compare import check_options, check_tasks, role_of, several, sources_of
from swd_lens.circuits.contributions import SCORES
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.measure import LEAST_ERRORS, LEAST_SHARE, RECOVERED, Margins, Threshold, content_members, contents_of, holm
from swd_lens.circuits.protocol import Protocol, run_protocol
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task
from swd_lens.units.unit_set import UnitSet

EVERY, FILE = "every control", "multiverse.json"
_CHOICES = ["task", "score", "positions", "ablation"]
_EQUAL = 1e-9  # of log(1 + edges)


@dataclass(frozen=True, repr=False)
class Multiverse(SavedRecord):
    """Edges of a method and its controls under many specifications.

    Attributes:
        rows: one row per specification and method: "task", "score", "positions", "ablation", "method", "edges" (at which its
            curve crosses the threshold; NaN where the method does not carry the task), "carried" (logits).
        tests: one row per control, and one of "every control" where there are several: "control", "specifications" (counted),
            "fewer" (in how many the method needs fewer edges), "share", "p", "p Holm" (NaN of "every control").
        method: whose edges are in question.
        settings: threshold, n, seed, roles, what was varied.
    """

    WHAT: ClassVar[str] = "a multiverse"

    rows: pd.DataFrame
    tests: pd.DataFrame
    method: str
    settings: Mapping[str, Any]

    @property
    def controls(self) -> list[str]:
        return [name for name in dict.fromkeys(self.rows["method"]) if name != self.method]

    @property
    def share(self) -> float:
        """Share of the counted specifications in which the method needs fewer edges than every control; NaN where none counts."""
        return float(self.tests["share"].iloc[-1])

    @property
    def p(self) -> float:
        """Its p."""
        return float(self.tests["p"].iloc[-1])

    def table(self) -> pd.DataFrame:
        """One row per control: counted specifications, in how many the method needs fewer edges, the share, p."""
        return self.tests.copy()

    def specifications(self) -> pd.DataFrame:
        """One row per specification: edges of every method; NaN where a method does not carry the task."""
        wide = self.rows.pivot_table(index=_CHOICES, columns="method", values="edges", dropna=False, sort=False, observed=True)
        kept = self.rows[_CHOICES].drop_duplicates()
        return kept.merge(wide.reset_index(), on=_CHOICES)[[*_CHOICES, self.method, *self.controls]]

    def plot(self):
        """Edges of each control over the method's, specification by specification in rising order; a matplotlib Figure."""
        figure, ((ax,),) = new_figure(width=5.2, height=3.0)
        wide = self.specifications()
        for index, control in enumerate(self.controls):
            ratio = ((1 + wide[control]) / (1 + wide[self.method])).dropna().sort_values().tolist()
            ax.plot(ratio, label=literal(control), marker="o", markersize=3, linewidth=1.2, **style(index))
        ax.axhline(1.0, color="#888888", linewidth=0.8)
        ax.set(xlabel="specification, by rank", ylabel=literal(f"edges over those of {self.method}"), yscale="log")
        ax.legend(fontsize=8, frameon=False)
        return figure

    def in_words(self) -> str:
        """One sentence per control."""
        total, said = len(self.rows[_CHOICES].drop_duplicates()), []
        for row in self.tests.to_dict("records"):
            left_out = f" ({total - row['specifications']} of {total} not counted: a method does not carry the task there)"
            left_out = left_out if row["specifications"] < total else ""
            if not row["specifications"]:
                said.append(f"no specification compares {self.method} with {row['control']}: in none both carry the task")
            else:
                said.append(
                    f"{self.method} needs fewer edges than {row['control']} in {row['share']:.0%} of {row['specifications']} "
                    f"specifications (p = {row['p']:.3g}){left_out}"
                )
        return "; ".join(said)

    def __repr__(self) -> str:
        return f"Multiverse({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), self.specifications()


@says_when_interrupted
@with_torch_defaults
def multiverse(
    methods: Mapping[str, Any],
    model: Any,
    tasks: Task | Sequence[Task],
    *,
    scores: str | Sequence[str] = ("first_order", "attribution_patching"),
    ablations: str | Sequence[str] = ("mean", "zero"),
    positions: str | Sequence[str] = ("scoring", "all"),
    of: str | None = None,
    recovered: float | int = RECOVERED,
    n: int = 999,
    seed: int = 0,
    attribution: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Multiverse:
    """Compare edges of a method and its controls under every combination of choices (ours; multiverse analysis).

    Args:
        methods: as for `swd_lens.compare`: name -> factors, a callable that makes them (called once, and kept), or a list of
            either: seeds of one method, of which the mean margin of each prompt is taken.
        model: the host, with these sites not attached.
        tasks: one or several.
        scores: names of scores, see `swd_lens.attribute`.
        ablations, positions: see `swd_lens.evaluate` and `swd_lens.attribute`.
        of: the method in question; None: the first that is SWD.
        recovered: the threshold.
        n: relabellings; they need no runs.
        seed: of them.
        attribution, evaluation: further options for `attribute` and `evaluate`.
        out: a folder for finished scores and curves and multiverse.json; the same call goes on there after an interruption.
        overwrite: start again, in place of what `out` holds.
        progress: show a bar over replacements.

    Returns:
        Multiverse: per control the share of specifications with fewer edges and its p.

    Raises:
        ValueError: a single method, an unknown score, ablation or position, a method in question that is not there, or a
            threshold outside (0, 1).
        TypeError, AttachError: see `swd_lens.compare`.
        ResumeError: `out` holds another host's, or other methods or options; every difference is named.
        OSError: `out` cannot be written (a FolderInUseError: another call writes it).

    Source: Steegen et al. 2016, Perspectives on Psychological Science 11, 702-712, for the multiverse; Simonsohn et al. 2020,
    Nature Human Behaviour 4, 1208-1214, for inference over specifications; the null is ours.
    """
    bounded("n, the number of relabellings,", n, 1)
    if not 0 < recovered < 1:
        raise ValueError(f"recovered must be in (0, 1), such as 0.9, got {recovered}")
    tasks = check_tasks(tasks)
    check_options(attribution, evaluation)
    sources_of(methods)  # refuses what is no method before any is made
    by_score = several(scores, "scores")
    for score in by_score:
        one_of("scores", score, SCORES)
    made = {name: _made(given) for name, given in methods.items()}
    roles = {name: role_of(given) for name, given in made.items()}
    of = next((name for name, role in roles.items() if role == "swd"), next(iter(made))) if of is None else of
    one_of("of", of, made)
    if len(made) < 2:
        raise ValueError(f"nothing to compare {legible(of)} with: pass a control, such as swd.baselines.neurons(model, sites)")
    # 1. Run every specification; what the dense host gives is shared by all of them.
    at, kinds = several(positions, "positions"), several(ablations, "ablations")
    protocol = Protocol(model, tasks, None, at, kinds, evaluation=evaluation or {}, progress=progress)
    folder = None if out is None else Path(out)
    threshold = Threshold("recovered", float(recovered))
    with nullcontext() if folder is None else writing(folder, "multiverse"):
        specifications = _specifications(protocol, made, by_score, attribution or {}, threshold, folder, overwrite)
    # 2. Edges by method, shares and their p by control.
    tests = shares_of(specifications, of, n, seed)
    settings = {"recovered": float(recovered), "n": n, "seed": seed, "roles": roles, "tasks": [task.name for task in tasks]}
    settings |= {"scores": list(by_score), "positions": list(at), "ablations": list(kinds), **standing_hooks(model)}
    settings |= {"n_test": {task.name: len(task.test) for task in tasks}}
    found = Multiverse(_rows(specifications), tests, of, settings)
    if folder is not None:
        found.save(folder / FILE)
    return found


def _specifications(
    protocol: Protocol,
    methods: Mapping[str, Any],
    scores: Sequence[str],
    attribution: Mapping[str, Any],
    threshold: Threshold,
    folder: Path | None,
    overwrite: bool,
) -> "dict[tuple[str, str, str, str], dict[str, Side]]":
    """Run every specification: (task, score, positions, ablation) -> method -> its test prompts as sums over contents. The
    folder's finished scores and curves are of this host and these options; tasks and methods may be added."""
    sources, groups = sources_of(methods)
    if folder is not None:
        model = protocol.model
        question = {"swd_lens": __version__, "the host": host_fingerprint(model), **standing_hooks(model)}
        question |= {"attribution": dict(attribution), "evaluation": dict(protocol.evaluation)}
        growing = {
            "tasks": {task.name: splits_fingerprint(task.splits) for task in protocol.tasks},
            "methods": {name: UnitSet.of(model, source).identities for name, source in sources.items()},
        }
        protocol = replace(protocol, parts=StepCache(folder, question, growing, overwrite=overwrite))
    found: dict[tuple[str, str, str, str], dict[str, Side]] = {}
    for done, score in enumerate(scores):
        reached(f", {done} of {len(scores)} scores finished")
        run = replace(protocol, attribution={**attribution, "score": score}, key=(score,))
        curves = run_protocol(run, sources, {}).curves
        for task, where, kind in product(protocol.tasks, protocol.positions, protocol.ablations):
            of_all, contents = curves[task.name, where, kind], contents_of(task.test)
            found[task.name, score, where, kind] = {
                name: _side([of_all[each] for each in groups.get(name, (name,))], contents, threshold) for name in methods
            }
    return found


def _made(given: Any) -> Any:
    """A method's replacement, or seeds of it, made where a callable makes them."""
    if isinstance(given, list | tuple):
        return [_made(each) for each in given]
    return given() if callable(given) and not isinstance(given, Mapping | nn.Module) else given


# ---------------------------------------------------------------------------------------------- specifications


@dataclass(frozen=True)
class Side:
    """One method's test prompts in one specification, as sums over the prompts of each content.

    Attributes:
        edges: of its prefixes, rising.
        contrast: keep - recovered full - (1 - recovered) empty: where its mean is at least 0 the threshold is reached.
        carried, squared, dense: full - empty, its square, and the dense host's margin, in logits.
        n_prompts: of each content.
    """

    edges: Float[Tensor, " prefix"]
    contrast: Float[Tensor, "prefix content"]
    carried: Float[Tensor, " content"]
    squared: Float[Tensor, " content"]
    dense: Float[Tensor, " content"]
    n_prompts: Float[Tensor, " content"]

    def on(self, grid: Float[Tensor, " point"]) -> Float[Tensor, "point content"]:
        """The contrast at these edges, read linearly in log(1 + edges)."""
        known, at = self.edges.log1p().numpy(), grid.log1p().numpy()
        weights = np.stack([np.interp(at, known, row) for row in np.eye(len(known))], 1)
        return torch.tensor(weights) @ self.contrast


def _side(curves: Sequence[CostCurve], contents: Sequence[str], threshold: Threshold) -> Side:
    """Curves of one method's seeds (or its only one), seen by contents."""
    grid = torch.tensor(sorted({float(edges) for curve in curves for edges in curve.rows["edges"]}), dtype=torch.float64)
    member = content_members(contents)
    sides = []
    for curve in curves:
        m = {name: values.double() for name, values in curve.margins.items()}
        carried = m["full"] - m["keep"][0]
        margins = Margins(m["keep"], m["ablate"], m["full"], m["keep"][0], m["dense"])
        edges = torch.tensor(curve.rows["edges"].tolist(), dtype=torch.float64)
        last = torch.cat([edges[1:] > edges[:-1], torch.tensor([True])])  # of prefixes of equal edges the longest
        contrast = threshold.contrast(margins)[last] @ member
        each = carried @ member, carried.square() @ member, m["dense"] @ member
        sides.append(Side(edges[last], contrast, each[0], each[1], each[2], member.sum(0)))
    if len(sides) == 1:
        return sides[0]
    contrast = torch.stack([each.on(grid) for each in sides]).mean(0)
    carried, squared, dense = (torch.stack([getattr(s, of) for s in sides]).mean(0) for of in ("carried", "squared", "dense"))
    return Side(grid, contrast, carried, squared, dense, member.sum(0))


def costs(
    grid: Float[Tensor, " point"],
    contrast: Float[Tensor, "label point"],
    carried: Float[Tensor, " label"],
    squared: Float[Tensor, " label"],
    dense: Float[Tensor, " label"],
    n: int,
) -> Float[Tensor, " label"]:
    """log(1 + edges) at which each labelling's curve first reaches the threshold, NaN where the task is not carried. contrast,
    carried, squared, dense: sums over n prompts, see `Side`."""
    logs, reached = grid.log1p(), contrast >= 0
    first = torch.where(reached.any(1), reached.int().argmax(1), len(grid) - 1)
    before = (first - 1).clamp(min=0)
    low, high = contrast.gather(1, before[:, None])[:, 0], contrast.gather(1, first[:, None])[:, 0]
    part = torch.where(first > 0, (-low / (high - low)).clamp(0, 1), torch.ones_like(low))
    crossing = logs[before] + part * (logs[first] - logs[before])
    mean = carried / n
    se = ((squared / n - mean.square()).clamp(min=0) / max(1, n - 1)).sqrt() if n > 1 else torch.zeros_like(mean)
    enough = (mean > LEAST_ERRORS * se) & (mean > LEAST_SHARE * (dense / n).abs())
    return torch.where(enough & reached.any(1), crossing, math.nan)


def _rows(specifications: Mapping[tuple[str, ...], Mapping[str, Side]]) -> pd.DataFrame:
    rows = []
    for key, sides in specifications.items():
        for name, side in sides.items():
            carried, squared, dense = (each.sum()[None] for each in (side.carried, side.squared, side.dense))
            cost = costs(side.edges, side.contrast.sum(1)[None], carried, squared, dense, int(side.n_prompts.sum()))
            about = dict(zip(_CHOICES, key, strict=True)) | {"method": name, "edges": math.expm1(float(cost[0]))}
            rows.append(about | {"carried": float(side.carried.sum() / side.n_prompts.sum())})
    return pd.DataFrame(rows)


# ---------------------------------------------------------------------------------------------- the test


def shares_of(specifications: Mapping[tuple[str, ...], Mapping[str, Side]], method: str, n: int, seed: int) -> pd.DataFrame:
    """`Multiverse.tests`."""
    controls = [name for name in next(iter(specifications.values())) if name != method]
    rows, wins = [], {}
    for control in controls:
        pairs = {key: (sides[method], sides[control]) for key, sides in specifications.items()}
        fewer, counted = relabelled(pairs, n, seed)
        shares = fewer.nansum(1) / counted.sum(1)
        own, others = float(shares[0]), shares[1:].nan_to_num(nan=math.inf)  # a relabelling that compares nothing is no evidence
        p = (1 + int((others >= own - _EQUAL).sum())) / (n + 1) if int(counted[0].sum()) else math.nan
        wins[control] = torch.where(counted[0], fewer[0], math.nan)
        row = {"control": control, "specifications": int(counted[0].sum()), "fewer": float(fewer[0].nansum())}
        rows.append(row | {"share": own, "p": p})
    table = pd.DataFrame(rows)
    table["p Holm"] = holm(table["p"].tolist())
    if len(controls) == 1:
        return table
    all_of = torch.stack([wins[control] for control in controls]).min(0).values  # NaN where a control does not carry
    row = {"control": EVERY, "specifications": int((~all_of.isnan()).sum()), "fewer": float(all_of.nansum())}
    row |= {"share": float(all_of.nanmean()), "p": table["p"].max(skipna=False), "p Holm": math.nan}
    return pd.concat([table, pd.DataFrame([row])], ignore_index=True)


def relabelled(
    pairs: Mapping[tuple[str, ...], tuple[Side, Side]], n: int, seed: int
) -> tuple[Float[Tensor, "label specification"], Bool[Tensor, "label specification"]]:
    """In which specifications the first of two methods needs fewer edges (1; equal: .5), and which are counted, as they are and
    under n relabellings. pairs: of a task, then of the choices -> both methods."""
    generator, flips, fewer = torch.Generator().manual_seed(seed), {}, []
    for (task, *_), (one, other) in pairs.items():
        n_contents = len(one.n_prompts)
        if task not in flips:  # the same prompts, whatever the specification
            drawn = torch.randint(0, 2, (n, n_contents), generator=generator).double()
            flips[task] = torch.cat([torch.zeros(1, n_contents, dtype=torch.float64), drawn])
        grid = torch.cat([one.edges, other.edges]).unique()
        found = []
        for a, b in ((one, other), (other, one)):
            contrast = _mixed(a.on(grid), b.on(grid), flips[task])
            carried, squared, dense = (
                _mixed(getattr(a, of), getattr(b, of), flips[task]) for of in ("carried", "squared", "dense")
            )
            found.append(costs(grid, contrast, carried, squared, dense, int(one.n_prompts.sum())))
        equal = (found[0] - found[1]).abs() <= _EQUAL
        won = torch.where(equal, 0.5, (found[0] < found[1]).double())
        fewer.append(torch.where(found[0].isnan() | found[1].isnan(), math.nan, won))
    table = torch.stack(fewer, 1)
    return table, ~table.isnan()


def _mixed(
    own: Float[Tensor, "*point content"], other: Float[Tensor, "*point content"], flips: Float[Tensor, "label content"]
) -> Float[Tensor, "label *point"]:
    """Sums over contents, of the flipped ones from the other method."""
    return own.sum(-1) + flips @ (other - own).transpose(-1, 0)
