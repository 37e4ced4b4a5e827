"""The demo's tables, and how far machines differ.

    ATEN_CPU_CAPABILITY=default swd-lens demo --threads 1 --out a      # and so on: one folder per kind of machine
    python -m tests.benchmarks.demo a/run.json b/run.json ...
    python -m tests.benchmarks.demo --record a/run.json b/run.json ...     # also into results/demo.json

1. Fidelity of every replacement: of the first run, and the largest difference that another run has there.
2. Edges that a circuit needs for sufficiency .9 / for half the drop, a column per method; then units likewise. A cell
   in which runs differ shows all of its values.
3. SWD beside each control of its sparsity, and beside the exact ones, of the first run: in how many of the cases where both need
   a circuit it has fewer edges, and how many times fewer in the median.
4. With --record all tables go to results/demo.json, with the threads that the runs name; `python -m tests.benchmarks.results`
   then brings them into README.md and RESULTS.md.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.results import Table, record

Run = dict[str, Any]
SHARES = ("sufficiency 0.9", "half the drop")
TOLERANCE = 0.001  # nats of CE within which circuits are comparable (paper §protocol)
SAME_SPARSITY = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's tables, and how far machines differ.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="run.json")
    parser.add_argument("--record", action="store_true", help="write the tables to results/demo.json")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.paths]
    tables = [fidelity_table(runs), circuit_table(runs, "edges"), circuit_table(runs, "units"), contest_table(runs[0])]
    print(*(table.markdown() for table in tables), largest_difference(runs), sep="\n\n")
    if args.record:
        print(record("demo", tables, threads=sorted({run["settings"]["threads"] for run in runs})))


def fidelity_table(runs: Sequence[Run]) -> Table:
    body = []
    for rows in zip(*(run["fidelity"] for run in runs), strict=True):
        first = rows[0]
        cells = [
            first["surface"],
            first["method"],
            agreed(rows, lambda row: f"{row['edges']:,}"),
            agreed(rows, lambda row: signed(row["ce_delta"])),
            agreed(rows, lambda row: f"{max(row['kl'], 0.0):.5f}"),
            agreed(rows, lambda row: f"{100 * row['top1_agreement']:.1f}%"),
            agreed(rows, lambda row: f"{max(row['relmse'].values()):.1e}" if "factors" not in row else "0"),
        ]
        body.append(cells)
    columns = ["surface", "method", "edges", "CE delta (nats)", "KL (nats)", "top-1 agreement", "largest relMSE"]
    return Table("Fidelity of every replacement", columns, body, ["left"] * 2 + ["right"] * 5)


def largest_difference(runs: Sequence[Run]) -> str:
    largest = max(
        abs(row[key] - rows[0][key])
        for rows in zip(*(run["fidelity"] for run in runs), strict=True)
        for row in rows
        for key in ("ce_delta", "kl")
    )
    return f"Largest difference of a CE delta or KL between {len(runs)} runs: {largest:.1e} nats."


def circuit_table(runs: Sequence[Run], of: str) -> Table:
    """What circuits cost in edges or units, a column per method."""
    circuits = list(zip(*(run["circuits"] for run in runs), strict=True))
    methods = list(dict.fromkeys(rows[0]["method"] for rows in circuits))
    cells = {(rows[0]["surface"], rows[0]["task"], rows[0]["method"]): rows for rows in circuits}
    body = [
        [surface, task, *(agreed(cells[surface, task, method], lambda c: costs(c, of)) for method in methods)]
        for surface, task in dict.fromkeys((surface, task) for surface, task, _ in cells)
    ]
    title = f"{of.capitalize()} of a circuit, at {SHARES[0]} and, behind the slash, {SHARES[1]} that ablating every unit causes"
    return Table(title, ["surface", "task", *methods], body, ["left"] * 2 + ["right"] * len(methods))


def costs(circuit: Run, of: str) -> str:
    """Units or edges at both shares; a dash where no prefix reaches one."""
    each = [cost(circuit, share, of) for share in SHARES]
    return "/".join("–" if number is None else f"{number:,}" for number in each)


def cost(circuit: Run, share: str, of: str) -> int | None:
    """Units or edges of the first prefix that reaches the share; None if none does."""
    rows = circuit["rows"]
    if share == SHARES[0]:
        reached = [row for row in rows if row["sufficiency"] is not None and row["sufficiency"] >= 0.9]
    else:
        reached = [row for row in rows if row["drop"] >= 0.5 * rows[-1]["drop"]]
    return reached[0][of] if reached else None


def contest_table(run: Run) -> Table:
    """SWD at each sparsity beside every control with as many edges, and beside the exact ones."""
    kinds = {row["method"]: row for row in run["fidelity"]}
    own = [method for method, row in kinds.items() if not (row.get("pruned") or row.get("paper") or "factors" in row)]
    body = []
    for method in own:
        near = kinds[method]["sparsity"]
        rivals = [
            name
            for name, row in kinds.items()
            if name not in own and ("factors" in row or abs(row["sparsity"] - near) < SAME_SPARSITY)
        ]
        for rival in rivals:
            for share in SHARES:
                ratios, matched = contest(run, method, rival, share)
                body.append([method, rival, share, won(ratios), f"{statistics.median(ratios):.2f}", won(matched)])
    columns = ["method", "beside", "at", "fewer edges in", "its edges over the method's, median", "where CE is matched"]
    title = "SWD beside each control, where both need a circuit"
    return Table(title, columns, body, ["left"] * 3 + ["right"] * 3)


def contest(run: Run, method: str, rival: str, share: str) -> tuple[list[float], list[float]]:
    """The rival's edges over the method's wherever both need some; and of these where their CE is within the tolerance."""
    edges = {(c["surface"], c["task"], c["method"]): cost(c, share, "edges") for c in run["circuits"]}
    ce = {(row["surface"], row["method"]): row["ce"] for row in run["fidelity"]}
    ratios, matched = [], []
    for surface, task in dict.fromkeys((surface, task) for surface, task, _ in edges):
        mine, other = edges[surface, task, method], edges[surface, task, rival]
        if mine and other:
            ratios.append(other / mine)
            if abs(ce[surface, method] - ce[surface, rival]) <= TOLERANCE:
                matched.append(other / mine)
    return ratios, matched


def won(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def signed(value: float) -> str:
    return f"{value:+.5f}" if abs(value) >= 5e-6 else "0"


def agreed(rows: Sequence[Any], show: Callable[[Any], str]) -> str:
    """What all runs show; where they differ, each value."""
    return ", ".join(dict.fromkeys(show(row) for row in rows))


if __name__ == "__main__":
    main()
