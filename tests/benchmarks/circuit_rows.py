"""A row of a table of circuits: what a factorization of one matrix costs, and what its task's cheapest circuits are.

1. `loaded` loads a model with its text, `Made.by` makes the factors.
2. `rows_on_text`, of several methods at once: edges, relMSE on the calibration text, CE delta and KL on held-out text, edges that
   carry half of the effect on a next token.
3. `row_of_task`: units and edges of the cheapest circuits, chosen on validation prompts, and what they recover on test prompts. A
   row is both.
4. `cells_of` shows it, under COLUMNS.
5. `cells_by_both_rules`: a curve's cheapest circuit by sufficiency, as until commit 328dbf3, and by what it recovers.

Benchmarks that compare where units start (bases.py, sides.py) have these rows.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import swd_lens as swd
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.fidelity import fidelities
from swd_lens.circuits.measure import Threshold
from swd_lens.hosts.sites import Site, side_of_units
from swd_lens.study.best import _between

COLUMNS = [
    "task",
    "site",
    "method",
    "edges",
    "relMSE",
    "CE delta",
    "KL",
    "text",
    "recovered 0.9: units / edges",
    "half drop: units / edges",
]
COLUMNS += ["units of one neuron", "seconds"]


def loaded(name: str, n_calibration: int, n_heldout: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The embedded model ("default") with its own text, or a real one with presidents' addresses: model, calibration and held-out
    tokens."""
    if name == "default":
        texts = swd.text_tokens(n_calibration, split="train"), swd.text_tokens(n_heldout, split="test")
        return swd.load_default_model(), *texts
    model = swd.load_host(name)
    heldout = swd.load_text("sotu", model, n_heldout, skip_tokens=n_calibration)
    return model, swd.load_text("sotu", model, n_calibration), heldout


# Factors of a model's site, its weight and Gram.
Make = Callable[[Any, Site, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Made:
    """Factors of one matrix, and the processor seconds that they took, which other work on the machine hardly changes."""

    factors: Any
    seconds: float

    @classmethod
    def by(cls, make: Make, model: Any, matrix: Site, weight: torch.Tensor, gram: torch.Tensor) -> "Made":
        began = time.process_time()
        made = make(model, matrix, weight, gram)
        seconds = time.process_time() - began
        return cls(made[matrix.name] if isinstance(made, swd.FactorSet) else made, seconds)


def rows_on_text(
    model: Any, matrix: Site, made: Mapping[str, Made], gram: torch.Tensor, texts: Any, concentrated: bool = True
) -> dict[str, dict[str, Any]]:
    """Method -> what text says of its factors of a matrix; the dense host runs once for all of them.

    Args:
        gram: of the calibration text.
        texts: that the Gram is of, and held-out.
        concentrated: whether the concentration is measured, too.
    """
    replacements = {method: {matrix.name: of.factors} for method, of in made.items()}
    kept = fidelities(model, replacements, texts[1])
    return {
        method: {
            "edges": of.factors.edges,
            "relmse": of.factors.relmse(gram),
            "ce_delta": kept[method].ce_delta,
            "ce_delta_se": kept[method].ce_delta_se,
            "kl": kept[method].kl,
            "text": swd.concentration(model, replacements[method], texts[0]).edges if concentrated else None,
            "single": _of_one_neuron(of.factors, side_of_units(matrix.kind)),
            "units": of.factors.n_units,
            "seconds": of.seconds,
        }
        for method, of in made.items()
    }


def row_of_task(model: Any, task: Any, matrix: Site, factors: Any, positions: str = "scoring") -> dict[str, Any]:
    """What a task says of factors of a matrix: units and edges of the cheapest circuits; `positions` are of interventions.
    "refined": "recovered" with more lengths around the first one that does, as `best_circuit` has it."""
    replacement = {matrix.name: factors}
    scores = swd.attribute(model, replacement, task, positions=positions)
    curve = swd.evaluate(model, replacement, task, scores, random_sets=0)
    row = {"margin": curve.q_dense, "carried": curve.carried.logits, "carries": curve.carries}
    for name, threshold in (("recovered", Threshold("recovered", 0.9)), ("drop", Threshold("necessity", 0.5))):
        by_units, by_edges = curve.row_of(threshold, "units"), curve.row_of(threshold, "edges")
        row[name] = [None, None, None]
        if by_units is not None and by_edges is not None:
            row[name] = [int(by_units["units"]), int(by_edges["edges"]), float(by_edges["recovered"])]
    row["refined"] = row["recovered"]
    coarse = curve.row_of(Threshold("recovered", 0.9), "edges")
    if coarse is not None and (lengths := _between(int(coarse["units"]), len(scores.ranking()))):
        finer = swd.evaluate(model, replacement, task, scores, grid=lengths, random_sets=0)
        if (fine := finer.row_of(Threshold("recovered", 0.9), "edges")) is not None:
            row["refined"] = [int(fine["units"]), int(fine["edges"]), float(fine["recovered"])]
    return row


def _of_one_neuron(f: Any, side: str) -> int:
    """Units that read, or write, a single neuron."""
    nonzeros = (f.read != 0).sum(0) if side == "input" else (f.write != 0).sum(1)
    return int(nonzeros.eq(1).sum())


def cells_of(row: dict[str, Any]) -> list[str]:
    """A measured row as the table shows it, from COLUMNS[3] on."""

    def cost(of: str) -> str:
        units, edges, _ = row[of]
        never = "" if row["carries"] else "not carried"
        return never if units is None else f"{units:,} / {edges:,}"

    se = "" if row["ce_delta_se"] is None else f" ± {row['ce_delta_se']:.4f}"
    return [
        f"{row['edges']:,}",
        f"{row['relmse']:.4f}",
        f"{row['ce_delta']:+.4f}{se}",
        f"{row['kl']:.4f}",
        "" if row["text"] is None else f"{row['text']:,.0f}",
        cost("recovered"),
        cost("drop"),
        f"{row['single']:,} of {row['units']:,}",
        f"{row['seconds']:.0f}",
    ]


BOTH_RULES = ["Q(dense)", "Q(full)", "Q(empty)", "carried", "edges at sufficiency 0.9", "recovered by that"]
BOTH_RULES += ["edges at recovered 0.9", "recovered on test prompts"]


def cells_by_both_rules(curve: CostCurve) -> list[str]:
    """The first prefix of sufficiency .9 on the test prompts, which was the rule of before, and today's."""
    before = curve.rows.loc[curve.rows["sufficiency"] >= 0.9].iloc[0]
    row = curve.row_of(Threshold("recovered", 0.9), "edges")
    now = ["no cost: not carried", "–"] if not curve.carries else ["never", "–"]
    if row is not None:
        now = [f"{int(row['edges']):,}", f"{row['recovered']:.2f}"]
    q = [f"{value:.2f}" for value in (curve.q_dense, curve.q_full, curve.q_empty)]
    carried = f"{curve.carried.logits:.2f} ± {curve.carried.se:.2f}"
    recovers = f"{before['recovered']:.2f}" if curve.carries else "–"
    return [*q, carried, f"{int(before['edges']):,}", recovers, *now]
