"""sweep: sparsity against everything it buys and costs, zero-data and calibrated (paper §zero-data, app. zero-data-setting).

1. For each s, zero-data (G = I) and calibrated: SWD factors of the sites.
2. The two notions of fidelity: relative Frobenius norm ||W - AB||_F / ||W||_F in parameter space, CE delta, KL, top-1 and
   relMSE in behaviour, on held-out text.
3. Circuits of every task, and what they cost at fixed targets.

The dense host is run once over calibration text, prompts and held-out text for all points (circuits/protocol.py; where their
factors do not fit in memory together, over held-out text once for those that do).

Circuits are comparable only where the replacements behave alike: "CE matched" says whether a point is within the tolerance of
the dense host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from swd_lens.base.display import Folded
from swd_lens.base.errors import legible
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.record import PlainRecord, Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import CostCurve
from swd_lens.circuits.compare import check_options, check_tasks
from swd_lens.circuits.comparison import TOLERANCE, priced, typed
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.measure import RECOVERED, Threshold
from swd_lens.circuits.plots import cost_axis
from swd_lens.circuits.protocol import Protocol, run_protocol
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.estimate import estimate
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern
from swd_lens.tasks.task import Task
from swd_lens.tasks.text import as_rows
from swd_lens.units.factors import FactorSet

_COSTS = ("units", "edges")
SPARSITIES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # paper §zero-data


@dataclass(frozen=True)
class SweepPoint(PlainRecord):
    """One sparsity, zero-data or calibrated.

    Attributes:
        edges, units: of the whole replacement.
        relative_frobenius: ||W - AB||_F / ||W||_F over the entries of all sites together.
        curves: task -> its cost curve.
    """

    derived = ("calibration",)

    sparsity: float
    zero_data: bool
    edges: int
    units: int
    relative_frobenius: float
    fidelity: Fidelity
    curves: Mapping[str, CostCurve]

    @property
    def calibration(self) -> str:
        return "zero-data" if self.zero_data else "calibrated"


@dataclass(frozen=True, repr=False)
class Sweep(Record):
    """Every point, and the targets at which circuits are priced."""

    points: Sequence[SweepPoint]
    recovered: Sequence[float | int]
    necessity: Sequence[float | int]
    tolerance: float | int
    settings: Mapping[str, Any]

    def matched(self, point: SweepPoint) -> bool:
        """Say whether |CE delta| is within the tolerance."""
        return abs(point.fidelity.ce_delta) <= self.tolerance

    def table(self) -> pd.DataFrame:
        """One row per sparsity and calibration: whether CE is matched, circuit costs (empty where a target is never reached),
        then sizes and errors.
        """
        targets = self._targets()
        rows, whole = [], set()
        for point in self.points:
            measured, errors = point.fidelity, list(point.fidelity.relmse.values())
            row: dict[str, Any] = {"s": point.sparsity, "calibration": point.calibration}
            row["CE matched"] = self.matched(point)
            size = {"edges": point.edges, "units": point.units, "relative Frobenius": point.relative_frobenius}
            size |= {"mean relMSE": sum(errors) / len(errors), "max relMSE": max(errors), "CE delta": measured.ce_delta}
            size |= {"KL": measured.kl, "top-1 agreement": measured.top1_agreement}
            costs: dict[str, int | None] = {
                f"{task}: {cost} at {target}": priced(curve, target, cost)
                for task, curve in point.curves.items()
                for target in targets
                for cost in _COSTS
            }
            whole |= costs.keys()
            rows.append(row | costs | size)
        return typed(pd.DataFrame(rows), whole=whole)

    def plot(self, recovered: float | int = RECOVERED, cost: str = "edges"):
        """Relative Frobenius norm, CE delta, and each task's least cost of recovering a share, against s; a matplotlib Figure.

        Hollow markers: CE is not matched, so that circuits are not comparable with those of filled ones.
        """
        threshold = Threshold("recovered", recovered)
        panels: list[tuple[str, str, Callable[[SweepPoint], float | int | None]]] = [
            ("weights", "relative Frobenius norm", lambda point: point.relative_frobenius),
            ("behaviour", "CE delta (nats)", lambda point: point.fidelity.ce_delta),
        ]
        for task in self.points[0].curves:
            least = f"{cost} at recovered {recovered:g}"
            title = literal(task.replace("_", " "))
            panels.append((title, least, lambda point, task=task: priced(point.curves[task], threshold, cost)))
        figure, axes = new_figure(1, len(panels), width=2.7, height=2.7)
        for ax, (title, label, value) in zip(axes[0], panels, strict=True):
            for index, calibration in enumerate(dict.fromkeys(point.calibration for point in self.points)):
                points = [p for p in self.points if p.calibration == calibration and value(p) is not None]
                x, y = [p.sparsity for p in points], [value(p) for p in points]
                look = style(index)
                ax.plot(x, y, label=calibration, linewidth=1.4, **look)
                faces = [look["color"] if self.matched(p) else "white" for p in points]
                ax.scatter(x, y, s=18, facecolors=faces, edgecolors=look["color"], linewidths=1.0, zorder=3)
            sparsities = sorted({p.sparsity for p in self.points})
            ax.set_xlim(sparsities[0] - 0.05, sparsities[-1] + 0.05)
            ax.set_title(title, fontsize=10, color=INK)
            ax.set(xlabel="sparsity s", ylabel=label)
        for ax, (_, _, value) in zip(axes[0, 2:], panels[2:], strict=True):
            cost_axis(ax.yaxis, pd.Series([value(point) for point in self.points], dtype=float).dropna())
        axes[0, 0].set_ylim(bottom=0)
        # Deltas span decades and may be negative: linear within the tolerance, logarithmic beyond.
        axes[0, 1].set_yscale("symlog", linthresh=self.tolerance or TOLERANCE)
        axes[0, 1].axhspan(-self.tolerance, self.tolerance, color="#888888", alpha=0.15, linewidth=0)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
        hollow = f"Hollow: |CE delta| above {self.tolerance:g} nats (outside the grey band), circuits not comparable"
        figure.suptitle(hollow, fontsize=8, color=INK)
        return figure

    def __repr__(self) -> str:
        return self.table().to_string(index=False, na_rep="")

    def title(self) -> str:
        tasks = list(self.points[0].curves) if self.points else []
        return f"Sweep of {len(self.points)} points; tasks {', '.join(tasks)}"

    def parts(self) -> tuple[Any, ...]:
        if not self.points:
            return (self.table(),)
        costs = [f"{cost} at {target}" for target in self._targets() for cost in _COSTS]
        measured = self.table().drop(columns=[f"{task}: {cost}" for task in self.points[0].curves for cost in costs])
        return self.plot(), self._circuits(), Folded("fidelity of every point", measured)

    def _targets(self) -> list[Threshold]:
        return [Threshold("recovered", v) for v in self.recovered] + [Threshold("necessity", v) for v in self.necessity]

    def _circuits(self) -> pd.DataFrame:
        """Price the circuits, one row per task and point: the card's table, in which no column is far to the right."""
        rows = [
            {"task": task, "s": point.sparsity, "calibration": point.calibration, "CE matched": self.matched(point)}
            | {f"{cost} at {target}": priced(curve, target, cost) for target in self._targets() for cost in _COSTS}
            for task in self.points[0].curves
            for point in self.points
            for curve in [point.curves[task]]
        ]
        return typed(pd.DataFrame(rows), whole={name for name in rows[0] if " at " in name})


@says_when_interrupted
@with_torch_defaults
def sweep(
    model: Any,
    sites: Pattern,
    tasks: Task | Sequence[Task],
    *,
    tokens: Any = None,
    heldout: Any,
    sparsities: float | int | Sequence[float | int] | np.ndarray = SPARSITIES,
    zero_data: bool | Sequence[bool] = (True, False),
    recovered: Sequence[float | int] = (0.5, 0.9),
    necessity: Sequence[float | int] = (0.5,),
    tolerance: float | int = TOLERANCE,
    units: int | float | str | None = None,
    attribution: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    positions: str = "scoring",
    ablation: str = "mean",
    on_step: Callable[[str], None] = lambda text: None,
    progress: bool = False,
    **solver: Any,
) -> Sweep:
    """Factorize at every sparsity, zero-data and calibrated, and measure fidelity and circuits (paper §zero-data).

    Args:
        model: the host, with these sites not attached.
        sites: the surface: a pattern or several, replaced together.
        tasks: one or several, tokenized for this host.
        tokens: (rows, pos) calibration ids; not needed for zero-data alone.
        heldout: (rows, pos) ids that calibration did not see, for fidelity.
        sparsities: each inside (0, 1).
        zero_data: True: without calibration (G = I); False: with `tokens`; one of them or, by default, both.
        recovered, necessity: targets at which circuits are priced: shares recovered, and fractions of the whole drop.
        tolerance: nats of |CE delta| up to which a point's circuits count as comparable.
        units, solver: see `swd_lens.factorize`.
        attribution, evaluation, positions, ablation: see `swd_lens.compare`.
        on_step: called with a line of text before each step; progress: bars within the steps.

    Raises:
        ValueError: no sparsity, task or kind of calibration, one of them twice, a sparsity outside (0, 1), a bad solver
            option, calibration without tokens, or whatever `compare` refuses of tasks; all before any work.
        TypeError: as `compare`, before any work.
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
    """
    tasks, heldout = check_tasks(tasks), as_rows(heldout, model)
    check_options(attribution, evaluation)
    settings = _points(sparsities, zero_data, tokens)
    for s, without in settings:
        # Refuses what the solver would refuse, but for every point at once and before the first is made.
        estimate(model, sites, sparsity=s, tokens=None if without else tokens, units=units, **solver)
    text = None if tokens is None else CalibrationText(tokens, model)
    sizes: dict[str, tuple[int, int, float]] = {}

    def point(name: str, s: float, without: bool) -> FactorSet:
        on_step(name)
        used, how = (None, {**solver, "calibration": "zero-data"}) if without else (text, solver)
        factors = factorize(model, sites, sparsity=s, tokens=used, units=units, progress=progress, **how)
        sizes[name] = factors.edges, factors.n_units, relative_frobenius(model, factors)
        return factors

    names = {f"{'zero-data' if without else 'calibrated'} s={s:g}": (s, without) for s, without in settings}
    protocol = Protocol(
        model,
        tasks,
        heldout,
        positions=[(attribution or {}).get("positions", positions)],
        ablations=[(evaluation or {}).get("ablation", ablation)],
        attribution=attribution or {},
        evaluation=evaluation or {},
        progress=progress,
    )
    # Made when their turn comes, and measured with those that are in memory together.
    made = run_protocol(protocol, {name: partial(point, name, *asked) for name, asked in names.items()}, {})
    curves = {name: {task: of_task[name] for (task, *_), of_task in made.curves.items()} for name in names}
    points = [SweepPoint(s, without, *sizes[name], made.fidelities[name], curves[name]) for name, (s, without) in names.items()]
    asked = {"model": str(model.cfg.model_name), "sites": [site.name for site in find_sites(model, sites)]}
    asked |= {"positions": positions, "ablation": ablation, "units": units, "solver": dict(solver)}
    asked |= standing_hooks(model)
    return Sweep(points, tuple(recovered), tuple(necessity), tolerance, asked)


def relative_frobenius(model: Any, factors: FactorSet) -> float:
    """||W - AB||_F / ||W||_F over the entries of all sites together."""
    host, error, norm = host_of(model), 0.0, 0.0
    for site in find_sites(model, list(factors)):
        weight = host.weight(site).double().cpu()
        error += float((weight - factors[site.name].product().double().cpu()).square().sum())
        norm += float(weight.square().sum())
    return (error / norm) ** 0.5


def _points(sparsities: Any, zero_data: Any, tokens: Any) -> list[tuple[float, bool]]:
    """Sparsity, and whether without calibration, of every point. Raises ValueError: none, one twice, or calibration without
    tokens."""
    given: dict[str, list[Any]] = {}
    for name, asked in (("sparsities", sparsities), ("zero_data", zero_data)):
        asked = asked.tolist() if hasattr(asked, "tolist") else asked  # an array's values as Python's own numbers
        values = given[name] = list(asked) if isinstance(asked, Iterable) else [asked]
        if not values or len(set(values)) < len(values):
            raise ValueError(f"a sweep takes one or more different {legible(name)}, got {legible(values)}")
    if tokens is None and not all(given["zero_data"]):
        raise ValueError("calibrated factors need tokens=; zero_data=True sweeps without calibration alone")
    return [(float(s), without) for without in given["zero_data"] for s in given["sparsities"]]
