"""CostCurve: what nested prefixes of a ranking cost and do, and what one reads off them.

1. `rows` has one row per prefix; curves need not be monotone, so costs are minima over the prefixes that reach a value.
2. `cost_at` gives the least cost at a threshold, `min_cost` the whole curve of least costs (the paper's figures),
   `cost_interval` how far the least cost moves with the draw of test prompts.
3. `circuit_at` gives the cheapest circuit itself.
4. `mib` gives the circuit track's areas, CPR and CMD.
5. Seeds of one method (paper, app. exact-dense-controls): `mean_min_cost` and `over_seeds` take, per threshold, every seed's
   least cost; mean and standard deviation (of a sample, n - 1) are over the seeds that reach it, the others are counted
   (method.md §4.1).
6. `resampled` is the bootstrap over prompts: as many as there are, drawn with replacement, `times` times; each draw is a
   vector of weights that sum to one, so that all runs of a curve are resampled together by weights @ values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.base.record import Record, column
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.scores import UnitScores

COSTS = ("edges", "units")
_MOST_SHARE = 10  # of a threshold; a percentage that was meant is more
VALUES = ("sufficiency", "necessity drop")
# Of all units or edges; the fractions that the Mechanistic Interpretability Benchmark's circuit track evaluates.
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, repr=False)
class CostCurve(Record):
    """What nested prefixes of a ranking cost and do, on one task.

    Attributes:
        rows: one row per prefix: "units", "edges", "sufficiency", "necessity drop" (logits), of both also "... low" and
            "... high", the ends of the 95 % bootstrap interval over prompts, "q keep", "q ablate" (mean margins, logits),
            "accuracy keep", "accuracy ablate" (best answer above every distractor), and "KL keep", "KL ablate" (KL from the
            unpruned replacement at the scoring position, nats) where they were asked for.
        task: the task's name.
        q_dense, q_unpruned: mean test margin of the dense host and of the unpruned replacement, in logits.
        accuracy_dense, accuracy_unpruned: the same for accuracy.
        settings: the scores' settings plus ablation, split and number of prompts.
        scores: what ranked the units; edges: site -> (unit,) their active edges.
        margins: every test prompt's margin, in logits: "keep" and "ablate" (prefix, prompt), "unpruned" and "dense" (prompt,).
    """

    in_memory: ClassVar[tuple[str, ...]] = ("scores", "edges", "margins")

    rows: pd.DataFrame
    task: str
    q_dense: float
    q_unpruned: float
    accuracy_dense: float
    accuracy_unpruned: float
    settings: Mapping[str, Any]
    scores: UnitScores | None = None
    edges: Mapping[str, Int[Tensor, " _unit"]] = field(default_factory=dict)
    margins: Mapping[str, Float[Tensor, "*_prefix _prompt"]] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """A copy of the rows."""
        return self.rows.copy()

    def cost_at(
        self,
        *,
        sufficiency: float | int | None = None,
        necessity: float | int | None = None,
        drop: float | int | None = None,
        cost: str = "edges",
    ) -> int | None:
        """The least cost among prefixes that reach a threshold; None if none does.

        Args:
            sufficiency: reach Q(keep) / Q(unpruned) >= this (paper §protocol).
            necessity: reach a necessity drop >= this fraction of the drop that ablating every unit causes (ours).
            drop: reach a necessity drop >= this, in logits (paper §protocol, NecDrop).
            cost: "edges" or "units".

        Raises:
            ValueError: not exactly one threshold, or an unknown cost.
        """
        _check_cost(cost)
        reached = self._reached(sufficiency, necessity, drop)
        return int(self.rows.loc[reached, cost].min()) if reached.any() else None

    def _reached(
        self, sufficiency: float | int | None, necessity: float | int | None, drop: float | int | None
    ) -> pd.Series:
        if sum(threshold is not None for threshold in (sufficiency, necessity, drop)) != 1:
            raise error("not-one-threshold")
        require_share(sufficiency=sufficiency, necessity=necessity)
        if sufficiency is not None:
            return self.rows["sufficiency"] >= sufficiency
        if drop is not None:
            return self.rows["necessity drop"] >= drop
        whole = self.rows["necessity drop"].iloc[-1]
        # Ablating everything helps (or does nothing): there is no drop to take a fraction of.
        return (self.rows["necessity drop"] >= (necessity or 0.0) * whole) & (whole > 0)

    def cost_interval(
        self,
        *,
        sufficiency: float | int | None = None,
        necessity: float | int | None = None,
        drop: float | int | None = None,
        cost: str = "edges",
        level: float | int = 0.95,
        times: int = 1000,
        seed: int = 0,
    ) -> tuple[int | None, int | None]:
        """How far `cost_at` moves when the test prompts are drawn again: the percentile interval over bootstrap draws.

        Returns:
            (low, high); None where that end is not reached by any prefix.

        Raises:
            ValueError: see `cost_at`; or a curve without the prompts' margins.
        """
        _check_cost(cost)
        if not 0 < level < 1:
            raise error("confidence-level-outside", level=level)
        self._reached(sufficiency, necessity, drop)  # refuses what cost_at refuses
        self._require("margins", self.margins)
        q = {name: resampled(torch.atleast_2d(values), times, seed) for name, values in self.margins.items()}
        if sufficiency is not None:
            reached = (q["keep"] >= sufficiency * q["unpruned"]) & (q["unpruned"] > 0)
        else:
            drops = q["unpruned"] - q["ablate"]
            of_whole = (drops >= (necessity or 0.0) * drops[:, -1:]) & (drops[:, -1:] > 0)
            reached = of_whole if drop is None else drops >= drop
        costs = torch.tensor(self.rows[cost].tolist(), dtype=torch.float64)
        least = torch.where(reached, costs, torch.inf).amin(1).sort().values
        ends = (least[int((1 - level) / 2 * (times - 1))], least[-1 - int((1 - level) / 2 * (times - 1))])
        low, high = (int(end) if bool(end.isfinite()) else None for end in ends)
        return low, high

    def circuit_at(
        self,
        *,
        sufficiency: float | int | None = None,
        necessity: float | int | None = None,
        drop: float | int | None = None,
        cost: str = "edges",
    ) -> Circuit:
        """The prefix that `cost_at` prices.

        Raises:
            ValueError: see `cost_at`; or no prefix reaches the threshold.
        """
        _check_cost(cost)
        reached = self._reached(sufficiency, necessity, drop)
        given = {"sufficiency": sufficiency, "necessity": necessity, "drop": drop}
        threshold = {name: value for name, value in given.items() if value is not None}
        if not reached.any():
            of = "sufficiency" if sufficiency is not None else "necessity drop"
            raise error(
                "prefix-never-reaches",
                task=self.task,
                threshold=next(iter(threshold.values())),
                measure=of,
                highest=self.rows[of].max(),
            )
        # Of equal costs (units without edges cost none) the shortest prefix.
        best = self.rows.loc[reached].sort_values(by=[cost, "units"]).iloc[0]
        return self.circuit(int(best["units"]), chosen_at={**threshold, "cost": cost})

    def circuit(self, n_units: int, **provenance: Any) -> Circuit:
        """The prefix of this many units.

        Raises:
            ValueError: not in 0 .. number of units, or a curve made without its scores.
        """
        self._require("scores", self.scores)
        assert self.scores is not None
        if not 0 <= n_units <= self.scores.n_units:
            raise error("n-units-outside", limit=self.scores.n_units, n_units=n_units)
        units = tuple(self.scores.ranking()[:n_units])
        return Circuit(units, self.scores, self.edges, {"kind": "prefix", **self.settings, **provenance})

    def __repr__(self) -> str:
        return (
            f"CostCurve({self.task}: {len(self.rows)} prefixes of {self.rows['units'].max():,} units; margin dense "
            f"{self.q_dense:.3f}, unpruned {self.q_unpruned:.3f})"
        )

    def parts(self) -> tuple[Any, ...]:
        # The interval's ends and margins are in table(); a card has room for what is read most.
        shown = [name for name in self.rows if not name.endswith((" low", " high")) and not name.startswith("q ")]
        return self.plot(), pd.DataFrame(self.rows, columns=shown)

    def _require(self, what: str, value: Any) -> None:
        if not value:
            raise error("curve-without-circuit", part=what)

    def mib(self, cost: str = "units") -> dict[str, float]:
        """Areas of the circuit track of the Mechanistic Interpretability Benchmark over its ten fractions of all units or edges.

        f = (m - m_empty) / (m_full - m_empty), with m the margin of the kept prefix. CPR is the area under f (higher is
        better), CMD that under |1 - f| (lower is better), by trapezoids from the first fraction to the last.

        Raises:
            ValueError: an unknown cost, or a grid without the prefixes: evaluate with grid="mib".
        """
        _check_cost(cost)
        rows = self.rows.sort_values(by="units")
        total = int(rows[cost].iloc[-1])
        empty, full = float(rows["q keep"].iloc[0]), self.q_unpruned
        if int(rows["units"].iloc[0]) != 0 or self.settings.get("grid") != "mib":
            raise error("mib-without-its-prefixes")
        if full == empty:
            return {"CPR": float("nan"), "CMD": float("nan")}
        f = [
            (float(rows.loc[rows[cost] <= fraction * total, "q keep"].to_numpy()[-1]) - empty) / (full - empty)
            for fraction in MIB_FRACTIONS
        ]
        return {"CPR": _area(f), "CMD": _area([abs(1.0 - value) for value in f])}

    def min_cost(self, of: str = "sufficiency", cost: str = "edges") -> pd.DataFrame:
        """The least cost of reaching each value that some prefix reaches: columns `of` and `cost`, both ascending.

        Args:
            of: "sufficiency" or "necessity drop" (logits).
            cost: "edges" or "units".

        Raises:
            ValueError: an unknown value or cost.
        """
        _check_cost(cost)
        of = column(of)  # "necessity_drop" was its former name
        if of not in VALUES:
            raise error("curve-unknown-value", choices=VALUES, of=of)
        best = self.rows.loc[:, [of, cost]].dropna().sort_values(by=[of, cost], ascending=[False, True])
        # From the highest value down: a prefix counts where none that reaches as much costs less.
        best = best[best[cost] < best[cost].cummin().shift(fill_value=best[cost].max() + 1)]
        return best.iloc[::-1].reset_index(drop=True)

    def plot(self, cost: str = "edges"):
        """Sufficiency and necessity drop against cost; a matplotlib Figure."""
        from swd_lens.circuits.plots import plot_curves

        return plot_curves({"": self}, cost=cost)

    @classmethod
    def from_dict(cls, values: Any) -> "CostCurve":
        curve = super().from_dict(values)
        # A column of nulls alone has no type; counts are whole numbers, all else was float.
        types = {column: "int64" if column in COSTS else "float64" for column in curve.rows}
        return replace(curve, rows=curve.rows.astype(types))


def require_share(**thresholds: float | int | None) -> None:
    """Raises ValueError where a threshold is no share, such as 90 in place of 0.9. Measured ones lie beyond 0 and 1, too."""
    for name, value in thresholds.items():
        if value is not None and not value <= _MOST_SHARE:
            raise error("threshold-outside", name=name, value=value)


def _check_cost(cost: str) -> None:
    if cost not in COSTS:
        raise error("unknown-cost", choices=COSTS, cost=cost)


def _area(values: list[float]) -> float:
    """Trapezoids over MIB_FRACTIONS."""
    x = torch.tensor(MIB_FRACTIONS, dtype=torch.float64)
    return float(torch.trapezoid(torch.tensor(values, dtype=torch.float64), x))


# ---------------------------------------------------------------------------------------------- seeds of one method


def mean_min_cost(curves: Sequence[CostCurve], of: str = "sufficiency", cost: str = "edges") -> pd.DataFrame:
    """The least cost of reaching each value that some seed's prefix reaches, over the seeds.

    Args:
        curves: one per seed, of one task.
        of, cost: as for `CostCurve.min_cost`.

    Returns: columns `of` (ascending), mean, sd, reached (seeds that reach it).
    """
    least = [curve.min_cost(of, cost) for curve in curves]
    values = np.unique(np.concatenate([table[of].to_numpy(dtype=float) for table in least]))
    costs = pd.DataFrame({seed: _at(table, values, of, cost) for seed, table in enumerate(least)})
    spread = {"mean": costs.mean(axis=1), "sd": costs.std(axis=1), "reached": costs.notna().sum(axis=1)}
    return pd.DataFrame({of: values, **spread})


def _at(table: pd.DataFrame, values: np.ndarray, of: str, cost: str) -> np.ndarray:
    """The cost at each value: that of the first row (the cheapest) that reaches it, NaN where none does."""
    costs = np.append(table[cost].to_numpy(dtype=float), np.nan)
    return costs[np.searchsorted(table[of].to_numpy(dtype=float), values, side="left")]


@dataclass(frozen=True)
class SeedCosts:
    """What several seeds' circuits cost at one threshold; None where no seed reaches it (sd: where fewer than two do).

    Attributes:
        reached: seeds that reach it.
    """

    mean: float | None
    sd: float | None
    least: int | None
    reached: int


def over_seeds(costs: Sequence[int | None]) -> SeedCosts:
    """Mean, standard deviation and least cost over the seeds that reach a threshold (those with a cost)."""
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return SeedCosts(None, None, None, 0)
    return SeedCosts(fmean(reached), stdev(reached) if len(reached) > 1 else None, min(reached), len(reached))


_AT_ONCE = 128  # draws: (draws, prompts) weights are held at a time


def resampled(values: Float[Tensor, "run prompt"], times: int, seed: int = 0) -> Float[Tensor, "times run"]:
    """Means of every run over `times` bootstrap draws of the prompts, the same draws for all runs.

    Raises:
        ValueError: times below 1.
    """
    if times < 1:
        raise error("no-bootstrap-draws", times=times)
    return torch.cat([weights @ values.T for weights in _draws(values.shape[1], times, seed)])


def interval(
    samples: Float[Tensor, "times *runs"], level: float = 0.95
) -> tuple[Float[Tensor, "*runs"], Float[Tensor, "*runs"]]:
    """Lower and upper end of the percentile interval; NaN where a sample is NaN."""
    tail = (1.0 - level) / 2.0
    ends = torch.tensor([tail, 1.0 - tail], dtype=samples.dtype)
    # A few columns at a time: torch.quantile refuses more than 2^24 numbers.
    flat = samples.flatten(1).split(1024, dim=1)
    low, high = torch.cat([torch.quantile(columns, ends, dim=0) for columns in flat], dim=1)
    return low.view(samples.shape[1:]), high.view(samples.shape[1:])


def _draws(prompts: int, times: int, seed: int) -> Iterator[Float[Tensor, "draw prompt"]]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, times, _AT_ONCE):
        n = min(_AT_ONCE, times - start)
        drawn = torch.randint(prompts, (n, prompts), generator=generator)
        weights = torch.zeros(n, prompts, dtype=torch.float64)
        yield weights.scatter_add_(1, drawn, torch.ones(n, prompts, dtype=torch.float64)) / prompts
