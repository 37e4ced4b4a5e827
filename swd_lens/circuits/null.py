"""circuit_null: would any circuit of so many edges do? A circuit beside random ones of the same edges.

1. The circuit: the least prefix of the ranking that is sufficient on these prompts, or one that is given.
2. The pool that random circuits are drawn from, valid units (with a read and a write edge) only. match="edges": all of them.
   match="score": the units outside the circuit whose scores are nearest to a score in it, as many as have `BAND` times its edges
   together; so that the null is of units that the scores take for almost as good.
3. A random circuit: the pool in random order, each unit taken where its edges still fit. So it has at most the circuit's edges,
   and as many as its order allows.
4. All circuits are kept and ablated on the same prompts (frontier.py, `judge`).
5. Rank p-values: (1 + how many of n random circuits do at least as well) / (n + 1), of sufficiency and of the necessity drop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.base.figures import INK, new_figure, style
from swd_lens.base.record import Record
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.curve import VALUES
from swd_lens.circuits.frontier import evaluate, judge
from swd_lens.circuits.kept import DenseRuns
from swd_lens.circuits.scores import UnitScores
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units.unit_set import UnitSet

MATCHES = ("edges", "score")
# Edges of the band over those of the circuit: with 1 every random circuit would be the whole band.
BAND = 2
# Of the unpruned margin: the same units run in another batch give margins that differ by rounding, and count as equal.
ROUNDING = 1e-5


@dataclass(frozen=True, repr=False)
class CircuitNull(Record):
    """A circuit and random ones of the same edges, on one task.

    Attributes:
        rows: one row per circuit, the first is the one in question: "circuit" ("circuit", "random 0", ...), then the columns of
            `CostCurve.rows` without intervals.
        task: the task's name.
        q_unpruned: mean margin of the unpruned replacement on these prompts, in logits.
        settings: match, n, seed and ablation; units and edges of the pool that was drawn from; those of the circuit.
        circuits: the circuits of the rows.
    """

    in_memory: ClassVar[tuple[str, ...]] = ("circuits",)
    derived: ClassVar[tuple[str, ...]] = ("sufficiency_p", "necessity_p")

    rows: pd.DataFrame
    task: str
    q_unpruned: float
    settings: Mapping[str, Any]
    circuits: tuple[Circuit, ...] = ()

    @property
    def sufficiency_p(self) -> float:
        """Rank p-value of the circuit's sufficiency; NaN where that is not defined."""
        return self._p("sufficiency")

    @property
    def necessity_p(self) -> float:
        """Rank p-value of the circuit's necessity drop."""
        return self._p("necessity drop")

    def _p(self, of: str) -> float:
        values = self.rows[of]
        if values.isna().any():
            return float("nan")
        return (1 + self._as_good(of)) / len(values)

    def _as_good(self, of: str) -> int:
        """How many random circuits do at least as well as the one in question."""
        tied = ROUNDING * (1.0 if of == "sufficiency" else abs(self.q_unpruned))
        values = self.rows[of].to_numpy(dtype=float)
        return int((values[1:] >= values[0] - tied).sum())

    def table(self) -> pd.DataFrame:
        """Sufficiency and necessity drop (logits) of the circuit, of the random ones mean, sd (n - 1) and best, how many of those
        do at least as well, and p.
        """
        return pd.DataFrame(
            [
                {
                    "measure": of,
                    "circuit": self.rows[of].iloc[0],
                    "random mean": self.rows[of].iloc[1:].mean(),
                    "random sd": self.rows[of].iloc[1:].std(),
                    "random best": self.rows[of].iloc[1:].max(),
                    "as good": self._as_good(of),
                    "p": self._p(of),
                }
                for of in VALUES
            ]
        )

    def plot(self):
        """Every random circuit, in ascending order, and the circuit in question as a line; a matplotlib Figure."""
        figure, axes = new_figure(1, len(VALUES), width=3.2, height=2.4)
        for ax, of in zip(axes[0], VALUES, strict=True):
            values = self.rows[of].tolist()
            ax.axhline(values[0], linewidth=1.4, label="circuit", **style(0))
            ax.plot(sorted(values[1:]), marker="o", markersize=3, label="random", **(style(1) | {"linestyle": ""}))
            ax.set_title(f"p = {self._p(of):.3g}", fontsize=9, color=INK)
            ax.set_ylabel("necessity drop (logits)" if of == "necessity drop" else of, fontsize=9, color=INK)
            ax.set_xlabel("random circuit, by rank", fontsize=9, color=INK)
        axes[0, 0].legend(fontsize=8, frameon=False)
        return figure

    def __repr__(self) -> str:
        return (
            f"CircuitNull({self.task}: {int(self.rows['units'].iloc[0]):,} units with {int(self.rows['edges'].iloc[0]):,} edges "
            f"beside {len(self.rows) - 1} random circuits, match={self.settings.get('match')!r}; p of sufficiency "
            f"{self.sufficiency_p:.3g}, of necessity drop {self.necessity_p:.3g})"
        )

    def parts(self) -> tuple[Any, ...]:
        edges = self.rows["edges"].iloc[1:]
        return (
            self.plot(),
            self.table(),
            f"The random circuits have {int(edges.min()):,} to {int(edges.max()):,} edges.",
        )


@in_plain_surroundings
def circuit_null(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    scores: UnitScores,
    *,
    circuit: Circuit | int | None = None,
    sufficiency: float | int = 0.9,
    n: int = 20,
    seed: int = 0,
    match: str = "edges",
    ablation: str = "mean",
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseRuns | None = None,
) -> CircuitNull:
    """Compare a circuit with random circuits of the same edges (ours; the paper has no null).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the scores were taken under.
        task: its test split judges (a split judges itself). The least prefix is chosen on the same prompts, as
            `CostCurve.circuit_at` does, which favours it a little; give a `circuit` found on other prompts where that matters.
        circuit: the circuit in question, found with these scores, or how many of the best units; None: the prefix of the fewest
            edges that reaches `sufficiency`.
        n: random circuits; the smallest possible p is 1 / (n + 1).
        seed: of their draw.
        match: "edges" (random units of at most, and as near as possible, the same edges, from all valid ones) or "score" (the
            same, from those outside the circuit with the nearest scores).
        ablation, batch_size, tokens_per_forward, dense: see `swd_lens.evaluate`.

    Raises:
        ValueError: n below 1, an unknown match, no prefix that is sufficient, or the empty one is; a circuit of other scores or
            of more units than there are, or no units to draw that have together its edges; and see `swd_lens.evaluate`.

    Warns:
        UndefinedSufficiencyWarning: the unpruned replacement's mean margin is not positive; sufficiency and its p are NaN.
    """
    if n < 1:
        raise error("null-without-circuits", n=n)
    if match not in MATCHES:
        raise error("null-unknown-match", choices=MATCHES, match=match)
    split = task.test if isinstance(task, Task) else task
    units = UnitSet.of(model, factors)
    how: dict[str, Any] = {"ablation": ablation, "batch_size": batch_size, "tokens_per_forward": tokens_per_forward}
    how |= {"bootstrap": 0, "dense": DenseRuns() if dense is None else dense}
    if circuit is None:
        subject = evaluate(model, units, split, scores, **how).circuit_at(sufficiency=sufficiency)
    elif isinstance(circuit, Circuit):
        subject = circuit
    elif not 0 <= circuit <= scores.n_units:
        raise error("n-units-outside", limit=scores.n_units, n_units=circuit)
    else:
        subject = Circuit.of(units, scores, scores.ranking()[:circuit], kind="prefix")

    pool = _Pool.of(subject, match)
    generator = torch.Generator().manual_seed(seed)
    provenance = {"kind": "random", "match": match, "seed": seed}
    draws = [Circuit(pool.draw(generator), scores, subject.edges, {**provenance, "draw": i}) for i in range(n)]
    named = {"circuit": subject} | {f"random {i}": drawn for i, drawn in enumerate(draws)}
    rows = judge(model, units, split, named, **how)
    # A necessity drop is what ablation takes off the unpruned margin.
    q_unpruned = float(rows["necessity drop"].iloc[0] + rows["q ablate"].iloc[0])
    settings = {
        **{"match": match, "n": n, "seed": seed, "ablation": ablation},
        **{"test_split": split.name, "n_test": len(split)},
        **{"pool units": len(pool.units), "pool edges": int(pool.edges.sum()), "circuit": dict(subject.provenance)},
    }
    return CircuitNull(rows, split.task, q_unpruned, settings, (subject, *draws))


@dataclass(frozen=True)
class _Pool:
    """Units to draw from, their edges, and how many edges a draw may have."""

    units: Sequence[tuple[str, int]]
    edges: Int[Tensor, " unit"]
    most: int

    @classmethod
    def of(cls, circuit: Circuit, match: str) -> "_Pool":
        """The pool of a match; raises ValueError where it has not the circuit's edges, or the circuit has none."""
        if not circuit.n_edges:
            raise error("null-of-no-edges", n_units=circuit.n_units)
        units = [(site, unit) for site, of_site in circuit.edges.items() for unit in range(len(of_site))]
        edges = torch.cat([circuit.edges[site] for site in circuit.edges])
        members = set(circuit.units)
        inside = torch.tensor([unit in members for unit in units])
        chosen = (edges > 0).nonzero().flatten()
        if match == "score":
            values = torch.cat([circuit.scores.scores[site].double().cpu() for site in circuit.edges])
            chosen = _band(values, edges, inside, BAND * circuit.n_edges)
        pool = cls([units[i] for i in chosen.tolist()], edges[chosen], circuit.n_edges)
        if int(pool.edges.sum()) < circuit.n_edges:
            raise error("null-of-too-few-edges", edges=circuit.n_edges, match=match, left=int(pool.edges.sum()))
        return pool

    def draw(self, generator: torch.Generator) -> tuple[tuple[str, int], ...]:
        """Units in random order, each where its edges still fit."""
        drawn, room = [], self.most
        for i in torch.randperm(len(self.units), generator=generator).tolist():
            if int(self.edges[i]) <= room:
                drawn.append(self.units[i])
                room -= int(self.edges[i])
        return tuple(drawn)


def _band(
    scores: Float[Tensor, " unit"], edges: Int[Tensor, " unit"], inside: Bool[Tensor, " unit"], most: int
) -> Int[Tensor, " chosen"]:
    """Valid units outside a circuit, nearest in score to a unit of it first, until they have `most` edges together."""
    members = scores[inside].sort().values
    outside = (~inside & (edges > 0)).nonzero().flatten()
    if not len(members) or not len(outside):
        return outside[:0]
    above = torch.searchsorted(members, scores[outside])
    lower, upper = members[(above - 1).clamp_min(0)], members[above.clamp_max(len(members) - 1)]
    distance = torch.minimum((scores[outside] - lower).abs(), (upper - scores[outside]).abs())
    nearest = outside[distance.argsort(stable=True)]
    before = edges[nearest].cumsum(0) - edges[nearest]
    return nearest[before < most]
