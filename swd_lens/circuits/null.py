"""circuit_null: would any circuit of so many edges do? A circuit beside random ones of the same edges.

1. The circuit: the prefix that `CostCurve.circuit_at` chooses (on validation prompts, where a task is given), or a given one.
2. match="edges": a random circuit is all valid units (with a read and a write edge) in random order, each taken where its edges
   still fit. So it has at most the circuit's edges, and as many as its order allows.
3. match="score": each member of the circuit is replaced by a random unit of nearly its score, members included. Valid units,
   in the order of their scores, are cut into strata of `STRATUM` times as many units as the circuit has; a random circuit takes
   from each stratum as many as the circuit does. Of several draws those are taken whose edges are nearest to the circuit's.
   So the null is of units that the scores take for almost as good, and a circuit that was itself drawn at random from its
   strata has no better chance than the others.
4. All circuits are kept and ablated on the same prompts (evaluate.py, `evaluate_circuits`).
5. Rank p-values: (1 + how many of n random circuits do at least as well) / (n + 1), of what is recovered (kept margins order
   circuits as recovered and sufficiency do) and of the drop. Both are uniform for random circuits
   (tests/circuits/test_calibration.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.figures import INK, new_figure, style
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.evaluate import evaluate, evaluate_circuits, random_set
from swd_lens.circuits.measure import Threshold
from swd_lens.circuits.scores import UnitScores
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units.unit_set import UnitSet

MATCHES = ("edges", "score")
MEASURES = ("recovered", "drop")
# Units of a stratum over those of the circuit: with 1 the best prefix would be its own stratum, and every random circuit itself.
STRATUM = 4
_TRIES = 20  # draws of which the nearest in edges is taken
# Of the margin with all units: the same units run in another batch give margins that differ by rounding, and count as equal.
ROUNDING = 1e-5


@dataclass(frozen=True, repr=False)
class CircuitNull(Record):
    """A circuit and random ones of the same edges, on one task.

    Attributes:
        rows: one row per circuit, the first is the one in question: "circuit" ("circuit", "random 0", ...), then the columns of
            `CostCurve.rows` without intervals.
        task: the task's name.
        q_full: mean margin with all units on these prompts, in logits.
        settings: match, n, seed and ablation; units and edges of the pool that was drawn from; those of the circuit.
        circuits: the circuits of the rows.
    """

    in_memory: ClassVar[tuple[str, ...]] = ("circuits",)
    derived: ClassVar[tuple[str, ...]] = ("recovered_p", "drop_p")

    rows: pd.DataFrame
    task: str
    q_full: float
    settings: Mapping[str, Any]
    circuits: tuple[Circuit, ...] = ()

    @property
    def recovered_p(self) -> float:
        """Rank p-value of what the circuit recovers; NaN where the surface does not carry the task."""
        return self._p("recovered")

    @property
    def drop_p(self) -> float:
        """Rank p-value of the circuit's drop."""
        return self._p("drop")

    def _p(self, of: str) -> float:
        if self.rows[of].isna().any():
            return float("nan")
        return (1 + self._as_good(of)) / len(self.rows)

    def _as_good(self, of: str) -> int:
        """How many random circuits do at least as well as the one in question."""
        values = self.rows["q keep" if of == "recovered" else of].to_numpy(dtype=float)
        return int((values[1:] >= values[0] - ROUNDING * abs(self.q_full)).sum())

    def table(self) -> pd.DataFrame:
        """Recovered and drop (logits) of the circuit, of the random ones mean, sd (n - 1) and best, how many of those
        do at least as well, and p.
        """
        rows = []
        for of in MEASURES:
            random = self.rows[of].iloc[1:]
            row = {"measure": of, "circuit": self.rows[of].iloc[0], "random mean": random.mean()}
            row |= {"random sd": random.std(), "random best": random.max(), "as good": self._as_good(of)}
            rows.append(row | {"p": self._p(of)})
        return pd.DataFrame(rows)

    def plot(self):
        """Every random circuit, in ascending order, and the circuit in question as a line; a matplotlib Figure."""
        figure, axes = new_figure(1, len(MEASURES), width=3.2, height=2.4)
        for ax, of in zip(axes[0], MEASURES, strict=True):
            values = self.rows[of].tolist()
            ax.axhline(values[0], linewidth=1.4, label="circuit", **style(0))
            ax.plot(sorted(values[1:]), marker="o", markersize=3, label="random", **(style(1) | {"linestyle": ""}))
            ax.set_title(f"p = {self._p(of):.3g}", fontsize=9, color=INK)
            ax.set(xlabel="random circuit, by rank", ylabel="drop (logits)" if of == "drop" else of)
        axes[0, 0].legend(fontsize=8, frameon=False)
        return figure

    def __repr__(self) -> str:
        return (
            f"CircuitNull({self.task}: {int(self.rows['units'].iloc[0]):,} units with {int(self.rows['edges'].iloc[0]):,} edges "
            f"beside {len(self.rows) - 1} random circuits, match={self.settings.get('match')!r}; p of recovered "
            f"{self.recovered_p:.3g}, of drop {self.drop_p:.3g})"
        )

    def parts(self) -> tuple[Any, ...]:
        edges = self.rows["edges"].iloc[1:]
        return (self.plot(), self.table(), f"The random circuits have {int(edges.min()):,} to {int(edges.max()):,} edges.")


@with_torch_defaults
def circuit_null(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    scores: UnitScores,
    *,
    circuit: Circuit | int | None = None,
    recovered: float | int | None = None,
    sufficiency: float | int | None = None,
    n: int = 20,
    seed: int = 0,
    match: str = "edges",
    ablation: str = "mean",
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseCache | None = None,
) -> CircuitNull:
    """Compare a circuit with random circuits of the same edges (ours; the paper has no null).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        task: its validation split chooses the prefix and its test split judges; a split alone does both, which favours
            the prefix.
        circuit: the circuit in question, found with these scores, or how many of the best units; None: the prefix of the fewest
            edges that reaches the threshold.
        recovered, sufficiency: that threshold, see `CostCurve.cost_at`.
        n: random circuits; the smallest possible p is 1 / (n + 1).
        seed: of their draw.
        match: "edges" (random units of at most, and as near as possible, the same edges, from all valid ones) or "score" (each
            member replaced by a random unit of nearly its score).
        ablation, batch_size, tokens_per_forward, dense: see `swd_lens.evaluate`.

    Raises:
        ValueError: n below 1, an unknown match, no prefix that reaches the threshold, or the empty one does; the units do not
            carry the task; a circuit of other scores, of more units than there are, or of every unit there is; and see
            `swd_lens.evaluate`.

    Warns:
        UndefinedSufficiencyWarning: the mean margin with all units is not positive.
    """
    bounded("n, the number of random circuits,", n, 1)
    one_of("match", match, MATCHES)
    split = task.test if isinstance(task, Task) else task
    units = UnitSet.of(model, factors)
    how: dict[str, Any] = {"ablation": ablation, "batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    how |= {"dense": DenseCache() if dense is None else dense}
    Threshold.given(recovered=recovered, sufficiency=sufficiency)  # refuses both before anything is run
    if circuit is None:
        curve = evaluate(model, units, task, scores, random_sets=0, **how)
        subject = curve.circuit_at(recovered=recovered, sufficiency=sufficiency)
    elif isinstance(circuit, Circuit):
        subject = circuit
    else:
        bounded("circuit=, a number of units,", circuit, 0, scores.n_units)
        subject = Circuit.of(units, scores, scores.ranking()[:circuit], kind="prefix")

    pool = _Pool.of(subject, match)
    generator = torch.Generator().manual_seed(seed)
    provenance = {"kind": "random", "match": match, "seed": seed}
    draws = [Circuit(pool.draw(generator), scores, subject.edges, {**provenance, "draw": i}, subject.bits) for i in range(n)]
    named = {"circuit": subject} | {f"random {i}": drawn for i, drawn in enumerate(draws)}
    rows = evaluate_circuits(model, units, split, named, **how)
    # A drop is what ablation takes off the margin with all units.
    q_full = float(rows["drop"].iloc[0] + rows["q ablate"].iloc[0])
    settings = {"match": match, "n": n, "seed": seed, "ablation": ablation, "test_split": split.name, "n_test": len(split)}
    settings |= {"pool units": len(pool.units), "stratum": pool.stratum, "circuit": dict(subject.provenance)}
    return CircuitNull(rows, split.task, q_full, settings, (subject, *draws))


def has_others(circuit: Circuit) -> bool:
    """Whether other circuits of as many edges can be drawn: it has edges, and a unit that has some is outside of it."""
    return bool(circuit.n_edges) and int(sum((of_site > 0).sum() for of_site in circuit.edges.values())) > sum(
        int(circuit.edges[site][unit]) > 0 for site, unit in circuit.units
    )


@dataclass(frozen=True)
class _Pool:
    """Valid units to draw from."""

    # units, edges: names and active edges of all valid units; of match="score" in the order of their scores, best first
    units: list[tuple[str, int]]
    edges: Int[Tensor, " unit"]
    members: Bool[Tensor, " unit"]  # which of them are in the circuit
    stratum: int | None  # units per stratum; None: random circuits are matched by their edges alone

    @classmethod
    def of(cls, circuit: Circuit, match: str) -> "_Pool":
        """The pool of a match; raises ValueError where the circuit has no edges, or every valid unit."""
        if not circuit.n_edges:
            raise ValueError(
                f"the circuit of {circuit.n_units} units has no edges, and nothing else of no edges can be drawn; where "
                "the empty circuit is sufficient, the task does not need these units"
            )
        ranked = [(site, unit) for site, unit in circuit.scores.ranking() if int(circuit.edges[site][unit])]
        edges, inside = torch.tensor([int(circuit.edges[site][unit]) for site, unit in ranked]), set(circuit.units)
        members = torch.tensor([unit in inside for unit in ranked])
        stratum = STRATUM * int(members.sum()) if match == "score" else None
        if bool(members.all()):
            raise ValueError(
                f"the circuit has all {int(members.sum()):,} units that read and write: no other circuit can be drawn beside it"
            )
        return cls(ranked, edges, members, stratum)

    def draw(self, generator: torch.Generator) -> tuple[tuple[str, int], ...]:
        """One random circuit."""
        most = int(self.edges[self.members].sum())
        if self.stratum is None:
            return self._named(random_set(self.edges, most, generator))
        # Of each stratum that has any as many units as the circuit has there.
        strata = list(enumerate(self.members.split(self.stratum)))
        taken = [(self.stratum * i, len(inside), n) for i, inside in strata if (n := int(inside.sum()))]
        tries = []
        for _ in range(_TRIES):
            drawn = torch.zeros_like(self.members)
            for start, size, n in taken:
                drawn[start + torch.randperm(size, generator=generator)[:n]] = True
            tries.append(drawn)
        return self._named(min(tries, key=lambda drawn: abs(int(self.edges[drawn].sum()) - most)))

    def _named(self, drawn: Bool[Tensor, " unit"]) -> tuple[tuple[str, int], ...]:
        return tuple(self.units[i] for i in drawn.nonzero()[:, 0].tolist())
