"""The demo's tables for the README, and how far machines differ.

    ATEN_CPU_CAPABILITY=default swd-lens demo --threads 1 --out a      # and so on: one folder per kind of machine
    python -m tests.benchmarks.demo a/run.json b/run.json ...

1. Fidelity of every replacement: of the first run, and the largest difference that another run has there.
2. Units / edges that a circuit needs for sufficiency .9 and for half the necessity drop. A cell in which runs differ shows all
   of its values.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]
SHARES = ("sufficiency 0.9", "half the drop")


def main(paths: Sequence[str]) -> None:
    if not paths:
        raise SystemExit(__doc__)
    runs = [json.loads(Path(path).read_text()) for path in paths]
    print(fidelity_table(runs), circuit_table(runs), sep="\n\n")


def fidelity_table(runs: Sequence[Run]) -> str:
    lines = [
        "| surface | method | edges | CE delta (nats) | KL (nats) | top-1 agreement | largest relMSE |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rows in zip(*(run["fidelity"] for run in runs), strict=True):
        first = rows[0]
        cells = [
            first["surface"],
            first["method"],
            agreed(rows, lambda row: f"{row['edges']:,}"),
            agreed(rows, lambda row: signed(row["ce_delta"])),
            agreed(rows, lambda row: f"{max(row['kl'], 0.0):.5f}"),
            agreed(rows, lambda row: f"{100 * row['top1_agreement']:.1f}%"),
            agreed(rows, lambda row: f"{max(row['relmse'].values()):.1e}" if row["method"] != "SVD" else "0"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    largest = max(
        abs(row[key] - rows[0][key])
        for rows in zip(*(run["fidelity"] for run in runs), strict=True)
        for row in rows
        for key in ("ce_delta", "kl")
    )
    return "\n".join(
        [*lines, "", f"Largest difference of a CE delta or KL between {len(runs)} runs: {largest:.1e} nats."]
    )


def circuit_table(runs: Sequence[Run]) -> str:
    circuits = list(zip(*(run["circuits"] for run in runs), strict=True))
    methods = list(dict.fromkeys(rows[0]["method"] for rows in circuits))
    heads = [f"{method}: {share}" for share in SHARES for method in methods]
    lines = ["| surface | task | " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * len(heads)]
    cells = {(rows[0]["surface"], rows[0]["task"], rows[0]["method"]): rows for rows in circuits}
    for surface, task in dict.fromkeys((surface, task) for surface, task, _ in cells):
        shown = [agreed(cells[surface, task, m], lambda c, s=share: cost(c, s)) for share in SHARES for m in methods]
        lines.append(f"| {surface} | {task} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def cost(circuit: Run, share: str) -> str:
    """Units / edges of the first prefix that reaches the share; empty if none does."""
    rows = circuit["rows"]
    if share == SHARES[0]:
        reached = [row for row in rows if row["sufficiency"] is not None and row["sufficiency"] >= 0.9]
    else:
        reached = [row for row in rows if row["necessity_drop"] >= 0.5 * rows[-1]["necessity_drop"]]
    return f"{reached[0]['units']} / {reached[0]['edges']:,}" if reached else ""


def signed(value: float) -> str:
    return f"{value:+.5f}" if abs(value) >= 5e-6 else "0"


def agreed(rows: Sequence[Any], show: Callable[[Any], str]) -> str:
    """What all runs show; where they differ, each value."""
    return ", ".join(dict.fromkeys(show(row) for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
