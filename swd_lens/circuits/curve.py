"""CostCurve: what nested prefixes of a ranking cost and do, and what one reads off them.

1. `rows` has one row per prefix, measured on test prompts; `validation` the same prefixes on validation prompts. Which prefix
   reaches a threshold is read off the validation prompts, what it does off the test prompts: a prefix that was chosen on the
   prompts that judge it is flattered by them.
2. `carried` says what the units do for the task. Where they do not carry it, no circuit has a cost (measure.py).
3. `cost_at` gives the least cost at a threshold, `row_at` all that is known of that prefix, `circuit_at` the circuit itself,
   `smallest_admissible` the first prefix that beats random sets of its edges, `cost_interval` how sure the cost is.
4. `min_cost` gives the whole curve of least costs on the test prompts (the paper's figures), `mib` the circuit track's areas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import NotCarriedWarning, legible, quoted, warn
from swd_lens.base.record import Record
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.measure import (
    COSTS,
    LEVEL,
    VALUES,
    Carried,
    Margins,
    Threshold,
    crossing_interval,
    does_not_carry,
    surface_name,
)
from swd_lens.circuits.plots import plot_curves
from swd_lens.circuits.scores import UnitScores

# Of all units or edges; the fractions that the Mechanistic Interpretability Benchmark's circuit track evaluates.
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, repr=False)
class CostCurve(Record):
    """Costs and effects of nested prefixes of a ranking, on one task.

    Attributes:
        rows: one row per prefix on the test prompts, the empty one first and that of all units last: "units", "edges", "bits"
            (bits.py), "recovered", "sufficiency", "drop" (logits), the last three each also "... low" and "... high", the ends of
            its 95 % interval over prompts (measure.py), "recovered of dense", "q keep", "q ablate" (mean margins, logits),
            "accuracy keep", "accuracy ablate" (best answer above every distractor), and "KL keep", "KL ablate" (KL from the
            replacement with all units at the scoring position, nats) where they were asked for.
        task: the task's name.
        q_dense, q_full, q_empty: mean test margin of the dense host, of the replacement with all units, and with every unit at
            its reference activation, in logits.
        carried_se: standard error of q_full - q_empty, paired over prompts; NaN of a single prompt.
        accuracy_dense, accuracy_full: accuracy of the dense host and of the replacement with all units.
        settings: the scores' settings plus ablation, split and number of prompts.
        validation: the same prefixes on the validation prompts: "units", "edges", "recovered", "recovered of dense",
            "sufficiency", "drop", "q keep", "q ablate", and "random drop", the 95th percentile of the drops of random sets of as
            many edges (of a carried task, up to the first prefix that is above; NaN elsewhere). "random sets" is how many were
            run: fewer than asked for where it was sure before that the percentile is not below the drop; then it is the least
            that it can be. Without rows where a single split was given: then prefixes are chosen on the prompts that judge them.
        scores: what ranked the units; edges, bits: site -> (unit,) their active edges, and what they take to write down.
        margins: every test prompt's margin, in logits: "keep" and "ablate" (prefix, prompt), "full" and "dense" (prompt,).
    """

    in_memory: ClassVar[tuple[str, ...]] = ("scores", "edges", "bits", "margins")

    rows: pd.DataFrame
    task: str
    q_dense: float
    q_full: float
    q_empty: float
    carried_se: float
    accuracy_dense: float
    accuracy_full: float
    settings: Mapping[str, Any]
    validation: pd.DataFrame = field(default_factory=pd.DataFrame)
    scores: UnitScores | None = None
    edges: Mapping[str, Int[Tensor, " _unit"]] = field(default_factory=dict)
    bits: Mapping[str, Float[Tensor, " _unit"]] = field(default_factory=dict)
    margins: Mapping[str, Float[Tensor, "*_prefix _prompt"]] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """A copy of the rows."""
        return self.rows.copy()

    # ------------------------------------------------------------------------------------------ what the surface carries

    @property
    def carried(self) -> Carried:
        """The units' part in the task: q_full - q_empty with its standard error."""
        return Carried(self.q_full - self.q_empty, self.carried_se, self.q_dense)

    @property
    def carries(self) -> bool:
        """Whether these units carry the task; where they do not, no circuit of them has a cost."""
        return self.carried.enough

    @property
    def surface(self) -> str:
        """The sites whose units these are, as a sentence names them."""
        return surface_name(self.settings.get("units", {}))

    def in_words(self, **threshold: float | int) -> str:
        """One sentence on what the surface carries of the task, and how small a circuit recovers most of it; a second one on the
        smallest admissible prefix, where random sets were drawn.

        Args:
            threshold: see `cost_at`.
        """
        asked, c = Threshold.given(**threshold), self.carried
        if not c.enough:
            return self._does_not_carry()
        of_margin = f"{c.logits:.2f} ± {c.se:.2f} of the model's {c.q_dense:.2f} logits"
        row, admissible = self.row_of(asked, "edges"), self.smallest_admissible()
        beyond = ""
        if admissible is not None:
            recovers = f"{_size(admissible)} {_verb(admissible, 'recover')} {admissible['recovered']:.0%}"
            beyond = f" The smallest admissible prefix (beyond random sets): {recovers}."
        if row is None:
            reaches = f"no prefix reaches {asked} on {self.chosen_on} prompts"
            return f"{self.surface} carries {of_margin} of {self.task}; {reaches}.{beyond}"
        recovers = f"{_verb(row, 'recover')} {row['recovered']:.0%} of it"
        does = recovers if asked.of == "recovered" else f"{_verb(row, 'reach', 'es')} {asked}"
        return f"{self.surface} carries {of_margin} of {self.task}; {_size(row)} {does}.{beyond}"

    def _does_not_carry(self) -> str:
        return does_not_carry(self.surface, self.task, self.carried, self.q_full, self.q_empty, self.settings.get("ablation"))

    def _warn_not_carried(self) -> None:
        no_cost = "No circuit of these units has a cost: there is nothing of which it could recover a part"
        warn(f"{self._does_not_carry()} {no_cost}", NotCarriedWarning)

    # ------------------------------------------------------------------------------------------ one prefix

    @property
    def chosen_on(self) -> str:
        """The split on which prefixes are chosen: "validation", or the judging split where there was no other."""
        return "validation" if len(self.validation) else str(self.settings.get("test_split", "test"))

    def cost_at(
        self,
        *,
        recovered: float | int | None = None,
        sufficiency: float | int | None = None,
        necessity: float | int | None = None,
        drop: float | int | None = None,
        recovered_of_dense: float | int | None = None,
        cost: str = "edges",
    ) -> int | None:
        """The least cost among prefixes that reach a threshold on the validation prompts; None if none does.

        Without a threshold it is recovered=0.9.

        Args:
            recovered: reach (Q(keep) - Q(empty)) / (Q(full) - Q(empty)) >= this (measure.py).
            sufficiency: reach Q(keep) / Q(full) >= this (paper §protocol).
            necessity: reach a drop >= this fraction of the drop that ablating every unit causes (ours).
            drop: reach a drop >= this, in logits (paper §protocol, NecDrop).
            recovered_of_dense: as `recovered`, with Q(dense) in the place of Q(full): the same target for every method.
            cost: "edges" or "units".

        Raises:
            ValueError: several thresholds, or an unknown cost.

        Warns:
            NotCarriedWarning: these units do not carry the task, so that the cost is None.
        """
        given = {"recovered": recovered, "sufficiency": sufficiency, "necessity": necessity, "drop": drop}
        row = self.row_at(cost=cost, recovered_of_dense=recovered_of_dense, **given)
        return None if row is None else int(row[cost])

    def row_at(self, *, cost: str = "edges", **threshold: float | int | None) -> dict[str, Any] | None:
        """The row of the prefix that `cost_at` prices: chosen on validation prompts, measured on test prompts.

        Args:
            threshold, cost: see `cost_at`, which has the errors and the warning, too.
        """
        asked = Threshold.given(**threshold)
        one_of("cost", cost, COSTS)
        if not self.carries:
            self._warn_not_carried()
            return None
        return self.row_of(asked, cost)

    def row_of(self, threshold: Threshold, cost: str) -> dict[str, Any] | None:
        """`row_at` for tables of many curves: without its warning."""
        chosen = self.validation if len(self.validation) else self.rows
        reached = threshold.reached(chosen)
        if not self.carries or not reached.any():
            return None
        # Of equal costs (units without edges cost none) the shortest prefix.
        best = chosen.loc[reached].sort_values(by=[cost, "units"]).iloc[0]
        return dict(self.rows.loc[self.rows["units"] == best["units"]].iloc[0])

    def circuit_at(self, *, cost: str = "edges", **threshold: float | int | None) -> Circuit:
        """The prefix that `cost_at` prices.

        Args:
            threshold, cost: see `cost_at`.

        Raises:
            ValueError: see `cost_at`; no prefix reaches the threshold, or these units do not carry the task.
        """
        asked, chosen = Threshold.given(**threshold), self.validation if len(self.validation) else self.rows
        one_of("cost", cost, COSTS)
        if not self.carries:
            nothing = "there is nothing of which it could recover a part"
            raise ValueError(f"{legible(self._does_not_carry())} No circuit of these units can be chosen: {nothing}")
        row = self.row_of(asked, cost)
        if row is None:
            of = "drop" if asked.of == "necessity" else asked.of
            raise ValueError(
                f"no prefix of {quoted(self.task)} reaches {asked.value} on the {self.chosen_on} prompts; the highest "
                f"{of} is {chosen[of].max():.3f}"
            )
        chosen_at = {asked.of: asked.value, "cost": cost, "chosen_on": self.chosen_on}
        return self.circuit(int(row["units"]), chosen_at=chosen_at)

    def circuit(self, n_units: int, **provenance: Any) -> Circuit:
        """The prefix of this many units.

        Raises:
            ValueError: not in 0 .. number of units, or a curve made without its scores.
        """
        if self.scores is None:
            raise ValueError("this curve carries no scores (it was made by hand, not by evaluate)")
        bounded("n_units", n_units, 0, self.scores.n_units)
        units = tuple(self.scores.ranking()[:n_units])
        return Circuit(units, self.scores, self.edges, {"kind": "prefix", **self.settings, **provenance}, self.bits)

    def smallest_admissible(self) -> dict[str, Any] | None:
        """The row of the shortest admissible prefix: on validation prompts its drop is above the 95th percentile of the drops of
        random sets of as many edges (as in the paper's code). None where there is none, or none were drawn.
        """
        if not self.carries or "random drop" not in self.validation:
            return None
        admissible = self.validation.loc[self.validation["drop"] > self.validation["random drop"]]
        if admissible.empty:
            return None
        return dict(self.rows.loc[self.rows["units"] == admissible["units"].min()].iloc[0])

    def cost_interval(
        self, *, cost: str = "edges", level: float | int = LEVEL, **threshold: float | int | None
    ) -> tuple[int | None, int | None]:
        """A confidence interval, over draws of test prompts, of the cost at which the ranking reaches a threshold.

        It is of the cost at which the curve of *all* prompts would cross the threshold, read linearly in log(1 + cost) between
        the grid's prefixes (measure.py, `crossing_interval`); `cost_at` is the next prefix above such a crossing.

        Returns:
            (low, high); None where the curve does not get there, or, high, not surely; both where nothing is carried.

        Raises:
            ValueError: see `cost_at`; a level outside (0, 1), a single prompt, or a curve without the prompts' margins.

        Warns:
            NotCarriedWarning: see `cost_at`.
        """
        asked = Threshold.given(**threshold)
        one_of("cost", cost, COSTS)
        if not 0 < level < 1:
            raise ValueError(f"level must be in (0, 1), got {level}; 0.95 is a 95 % interval")
        if not self.margins:
            raise ValueError("this curve carries no margins (it was made by hand, not by evaluate)")
        if self.margins["full"].numel() < 2:
            raise ValueError(f"{quoted(self.task)} was measured on a single prompt: an interval over prompts needs two at least")
        if not self.carries:
            self._warn_not_carried()
            return None, None
        keep, ablate, full = (self.margins[name].double() for name in ("keep", "ablate", "full"))
        margins = Margins(keep, ablate, full, keep[0], self.margins["dense"].double())
        costs = torch.tensor(self.rows[cost].tolist(), dtype=torch.float64)
        low, high = crossing_interval(asked.contrast(margins), costs, level)
        return None if low is None else int(low), None if high is None else int(np.ceil(high))

    def __repr__(self) -> str:
        return (
            f"CostCurve({self.task}: {len(self.rows)} prefixes of {self.rows['units'].max():,} units; margin dense "
            f"{self.q_dense:.3f}, full {self.q_full:.3f}, empty {self.q_empty:.3f})"
        )

    def parts(self) -> tuple[Any, ...]:
        # The interval's ends and margins are in table(); a card has room for what is read most.
        shown = [name for name in self.rows if not name.endswith((" low", " high")) and not name.startswith("q ")]
        return self.in_words(), self.plot(), pd.DataFrame(self.rows, columns=shown)

    # ------------------------------------------------------------------------------------------ the whole curve

    def mib(self, cost: str = "units", of: str = "recovered") -> dict[str, float]:
        """Areas of the circuit track of the Mechanistic Interpretability Benchmark over its ten fractions of all units or edges.

        CPR is the area under f (higher is better), CMD that under |1 - f| (lower is better), by trapezoids from the first
        fraction to the last; NaN where the surface does not carry the task.

        Args:
            cost: "units" or "edges".
            of: what f is: "recovered", of the replacement's margin, or "recovered of dense", of the host's own, as the
                benchmark has it. `swd_lens.circuits.mib` runs its whole protocol.

        Raises:
            ValueError: an unknown cost or f, or a grid without the prefixes: evaluate with grid="mib".
        """
        f = self.mib_values(cost, of)
        fractions = torch.tensor(MIB_FRACTIONS, dtype=torch.float64)

        def area(values: list[float]) -> float:
            return float(torch.trapezoid(torch.tensor(values, dtype=torch.float64), fractions))

        return {"CPR": area(f), "CMD": area([abs(1.0 - value) for value in f])}

    def mib_values(self, cost: str = "units", of: str = "recovered") -> list[float]:
        """f of the largest prefix within each of the benchmark's fractions; see `mib` for arguments and errors."""
        one_of("cost", cost, COSTS)
        one_of("of", of, ("recovered", "recovered of dense"))
        rows = self.rows.sort_values(by="units")
        total = int(rows[cost].iloc[-1])
        if self.settings.get("grid") != "mib":
            raise ValueError('mib() needs the prefixes of its fractions: evaluate(..., grid="mib")')
        return [float(rows.loc[rows[cost] <= part * total, of].to_numpy()[-1]) for part in MIB_FRACTIONS]

    def min_cost(self, of: str = "recovered", cost: str = "edges") -> pd.DataFrame:
        """The least cost of reaching each value that some prefix reaches on the test prompts: columns `of` and `cost`, both
        ascending.

        Args:
            of: "recovered", "sufficiency" or "drop" (logits).
            cost: "edges" or "units".

        Raises:
            ValueError: an unknown value or cost.
        """
        one_of("cost", cost, COSTS)
        one_of("of", of, VALUES)
        best = self.rows.loc[:, [of, cost]].dropna().sort_values(by=[of, cost], ascending=[False, True])
        # From the highest value down: a prefix counts where none that reaches as much costs less.
        best = best[best[cost] < best[cost].cummin().shift(fill_value=best[cost].max() + 1)]
        return best.iloc[::-1].reset_index(drop=True)

    def plot(self, cost: str = "edges"):
        """Draw what prefixes recover, and their drop, against cost; a matplotlib Figure."""
        return plot_curves({"": self}, cost=cost)

    @classmethod
    def from_dict(cls, values: Any) -> "CostCurve":
        curve = super().from_dict(values)
        # A column of nulls alone has no type; counts are whole numbers, all else was float.
        typed = [t.astype({c: "int64" if c in COSTS else "float64" for c in t}) for t in (curve.rows, curve.validation)]
        return replace(curve, rows=typed[0], validation=typed[1])


def _size(row: Mapping[str, Any]) -> str:
    return f"{int(row['units']):,} unit{'s' * (int(row['units']) != 1)} with {int(row['edges']):,} active edges"


def _verb(row: Mapping[str, Any], verb: str, ending: str = "s") -> str:
    return verb + ending * (int(row["units"]) == 1)
