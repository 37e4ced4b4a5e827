"""The demo's tables, and how far machines differ.

    ATEN_CPU_CAPABILITY=default swd-lens demo --threads 1 --out a      # and so on: one folder per kind of machine
    python -m tests.benchmarks.demo a/run.json b/run.json ...
    python -m tests.benchmarks.demo --record a/run.json b/run.json ...     # also into results/demo.json

1. Fidelity of every replacement: of the first run, and the largest difference that another run has there.
2. Units / edges that a circuit needs for sufficiency .9 and for half the necessity drop. A cell in which runs differ shows all
   of its values.
3. With --record both tables go to results/demo.json, with the threads that the runs name; `python -m tests.benchmarks.results`
   then brings them into README.md and RESULTS.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.results import Table, record

Run = dict[str, Any]
SHARES = ("suff. 0.9", "half drop")


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's tables, and how far machines differ.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="run.json")
    parser.add_argument("--record", action="store_true", help="write the tables to results/demo.json")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.paths]
    tables = [fidelity_table(runs), circuit_table(runs)]
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


def circuit_table(runs: Sequence[Run]) -> Table:
    circuits = list(zip(*(run["circuits"] for run in runs), strict=True))
    methods = list(dict.fromkeys(rows[0]["method"] for rows in circuits))
    heads = [f"{method}: {share}" for share in SHARES for method in methods]
    cells = {(rows[0]["surface"], rows[0]["task"], rows[0]["method"]): rows for rows in circuits}
    body = []
    for surface, task in dict.fromkeys((surface, task) for surface, task, _ in cells):
        shown = [agreed(cells[surface, task, m], lambda c, s=share: cost(c, s)) for share in SHARES for m in methods]
        body.append([surface, task, *shown])
    title = "Units / edges of a circuit, at sufficiency 0.9 and at half the necessity drop"
    return Table(title, ["surface", "task", *heads], body, ["left"] * 2 + ["right"] * len(heads))


def cost(circuit: Run, share: str) -> str:
    """Units / edges of the first prefix that reaches the share; empty if none does."""
    rows = circuit["rows"]
    if share == SHARES[0]:
        reached = [row for row in rows if row["sufficiency"] is not None and row["sufficiency"] >= 0.9]
    else:
        reached = [row for row in rows if row["necessity drop"] >= 0.5 * rows[-1]["necessity drop"]]
    return f"{reached[0]['units']} / {reached[0]['edges']:,}" if reached else ""


def signed(value: float) -> str:
    return f"{value:+.5f}" if abs(value) >= 5e-6 else "0"


def agreed(rows: Sequence[Any], show: Callable[[Any], str]) -> str:
    """What all runs show; where they differ, each value."""
    return ", ".join(dict.fromkeys(show(row) for row in rows))


if __name__ == "__main__":
    main()
