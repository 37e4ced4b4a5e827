"""run.json: what a `Run` writes beside its factors, and how it is read again without a model.

1. The file names its format. Format 2 keeps everything the report shows; format 1 (until swd_lens had `Run.load`) named no
   format and lacks what exact factors were, which curves are seeds of one method, and fidelities of controls: it is read with
   those left out. A later format is refused.
2. Of the sparse replacements it keeps the name of a folder; of the exact ones, which are not saved, a `FactorsRecord`: sizes,
   counts and provenance.
3. JSON knows no NaN: undefined and infinite numbers are null there, and NaN when read. Scores, means and prompts' margins are
   tensors and stay out; curves that were loaded price circuits, but cannot make them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.analysis.audit import Context, LogitEffect
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.comparison import TOLERANCE, TaskComparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.study.cards import UnitCard

FORMAT = 2
NAME = "run.json"
_PARTS = ("settings", "seconds", "fidelity", "circuits", "units")


@dataclass(frozen=True)
class FactorsRecord(Mapping[str, Mapping[str, Any]]):
    """What is known of factors that were not saved: site -> {"d_in", "d_out", "units", "edges", "settings", "provenance"}.

    Attributes:
        edges, n_units, sparsity: of all sites together, as a FactorSet has them.
    """

    sites: Mapping[str, Mapping[str, Any]]
    edges: int
    n_units: int
    sparsity: float
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, site: str) -> Mapping[str, Any]:
        return self.sites[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        """See `FactorSet.summary`."""
        return self.sites


def read_run(folder: Path) -> dict[str, Any]:
    """The values in a folder's run.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no JSON, not a run's, or of a later format.
    """
    path = folder / NAME
    if not path.is_file():
        made = "`swd-lens demo`, `swd-lens circuit` or Run.save"
        raise FileNotFoundError(f"there is no {NAME} in {folder}; give the folder that {made} wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken: no JSON ({error}); copy it again, or run the study again") from error
    if not isinstance(values, dict) or not set(_PARTS) <= set(values):
        missing = ", ".join(part for part in _PARTS if not isinstance(values, dict) or part not in values)
        raise ValueError(f"{path} is not what Run.save writes: it lacks {missing}")
    version = values.setdefault("format", 1)
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"{path} has run format {version!r} (swd_lens {values.get('swd_lens', 'of a later version')}), this swd_lens reads "
            f"up to {FORMAT}; update swd_lens"
        )
    return values


# ---------------------------------------------------------------------------------------------- out


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """All of a comparison but its curves, which stand in a list of their own."""
    return {
        "tasks": list(comparison),
        "groups": {name: list(names) for name, names in comparison.groups.items()},
        "reference": comparison.reference,
        "tolerance": comparison.tolerance,
        "fidelities": {name: measured.as_dict() for name, measured in comparison.fidelities.items()},
    }


# ---------------------------------------------------------------------------------------------- in


def record_of(row: Mapping[str, Any]) -> FactorsRecord:
    """Of a row of "fidelity" whose factors were not saved; in format 1 only the names of the sites are known."""
    known = row.get("factors") or {"sites": {site: {} for site in row["relmse"]}, "provenance": {}}
    return FactorsRecord(known["sites"], row["edges"], row["units"], row["sparsity"], known["provenance"])


def fidelity_of(values: Mapping[str, Any]) -> Fidelity:
    ce_dense, ce, kl, top1 = (_number(values[key]) for key in ("ce_dense", "ce", "kl", "top1_agreement"))
    relmse = {site: _number(error) for site, error in values["relmse"].items()}
    return Fidelity(ce_dense, ce, kl, top1, relmse, values["n_predictions"])


def comparisons_of(values: Mapping[str, Any]) -> dict[str, Comparison]:
    """Surface -> comparison, from the curves of all surfaces."""
    curves: dict[str, dict[str, dict[str, CostCurve]]] = {}
    for row in values["circuits"]:
        its = curves.setdefault(row["surface"], {}).setdefault(row["task"], {})
        its[row["method"]] = _curve(row)
    described = values["comparisons"] if values["format"] > 1 else _comparisons_of_1(values, curves)
    return {
        surface: Comparison(
            {task: TaskComparison(task, curves.get(surface, {}).get(task, {}), {}) for task in its["tasks"]},
            {name: tuple(names) for name, names in its["groups"].items()},
            {name: fidelity_of(measured) for name, measured in its["fidelities"].items()},
            its["reference"],
            its["tolerance"],
        )
        for surface, its in described.items()
    }


def _comparisons_of_1(values: Mapping[str, Any], curves: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What format 1 says of its comparisons: fidelities of the replacements, of which the first is the reference."""
    measured: dict[str, dict[str, Any]] = {surface: {} for surface in curves}
    for row in values["fidelity"]:
        measured.get(row["surface"], {})[row["method"]] = row
    return {
        surface: {"tasks": list(by_task), "groups": {}, "fidelities": measured[surface]}
        | {"reference": next(iter(measured[surface]), ""), "tolerance": TOLERANCE}
        for surface, by_task in curves.items()
    }


def _curve(row: Mapping[str, Any]) -> CostCurve:
    rows = pd.DataFrame(row["rows"])
    # A column of nulls alone has no type; counts are whole numbers, all else was float.
    rows = rows.astype({column: "int64" if column in ("units", "edges") else "float64" for column in rows})
    q, q_unpruned, accuracy, accuracy_unpruned = (
        _number(row[key]) for key in ("q_dense", "q_unpruned", "accuracy_dense", "accuracy_unpruned")
    )
    return CostCurve(rows, row["task"], q, q_unpruned, accuracy, accuracy_unpruned, row["settings"])


def card_of(values: Mapping[str, Any]) -> UnitCard:
    contexts = tuple(map(_context, values["contexts"]))
    effects = values["logits"]
    logits = effects and LogitEffect(*(_effects(effects[sign]) for sign in ("promoted", "suppressed")))
    return UnitCard(**{**values, "score": _number(values["score"]), "contexts": contexts, "logits": logits})


def _context(values: Mapping[str, Any]) -> Context:
    tokens, z, peak = tuple(values["tokens"]), tuple(map(_number, values["z"])), values["peak"]
    if len(tokens) != len(z) or peak not in range(len(z)):
        raise TypeError(f"a context of {len(tokens)} tokens has {len(z)} z and its peak at {peak!r}")
    return Context(tokens, z, peak)


def _effects(pairs: Any) -> tuple[tuple[str, float], ...]:
    return tuple((token, _number(value)) for token, value in pairs)


def _number(value: Any) -> float:
    return nan if value is None else float(value)
