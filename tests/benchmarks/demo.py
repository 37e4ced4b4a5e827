"""The demo's tables, and how far machines differ.

    ATEN_CPU_CAPABILITY=default swd-lens demo --threads 1 --out a      # and so on: one folder per kind of machine
    python -m tests.benchmarks.demo a/run.json b/run.json ...
    python -m tests.benchmarks.demo --record a/run.json b/run.json ...     # also into results/demo.json

1. Fidelity of every replacement: of the first run, and the largest difference that another run has there.
2. Edges that a circuit needs to recover .9 of what its surface carries / for half the drop, a column per method; then units
   likewise. A cell in which runs differ shows all of its values.
3. SWD beside each control of its sparsity, and beside the exact ones, of the first run: in how many of the cases where both have
   a circuit it has fewer edges, and how many times fewer in the median; MLPs and attention apart.
4. Every cell of the first run by the rule of before and by today's: what is carried, the first prefix of sufficiency .9 on the
   test prompts, and the prefix that recovers .9.
5. With --record all tables go to results/demo.json, with the threads that the runs name; `python -m tests.benchmarks.results`
   then brings them into README.md and RESULTS.md.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swd_lens.circuits import CostCurve
from swd_lens.circuits.comparison import priced
from swd_lens.circuits.measure import Threshold, part_of
from swd_lens.study import Run as LoadedRun
from tests.benchmarks.circuit_rows import BOTH_RULES, cells_by_both_rules
from tests.benchmarks.results import Table, record

Run = dict[str, Any]
SHARES = {"recovered 0.9": Threshold("recovered", 0.9), "half the drop": Threshold("necessity", 0.5)}
SAME_SPARSITY = 0.01
SWD = "SWD s=0.75"  # of the table of cells


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's tables, and how far machines differ.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="run.json")
    parser.add_argument("--record", action="store_true", help="write the tables to results/demo.json")
    args = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in args.paths]
    first = LoadedRun.load(args.paths[0].parent)
    tables = [fidelity_table(runs), circuit_table(runs, "edges"), circuit_table(runs, "units")]
    tables += [contest_table(runs[0], first), cells_table(first)]
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
    recovered, half = SHARES
    title = f"{of.capitalize()} of a circuit, at {recovered} and, behind the slash, {half} that ablating every unit causes"
    return Table(title, ["surface", "task", *methods], body, ["left"] * 2 + ["right"] * len(methods))


def costs(circuit: Run, of: str) -> str:
    """Units or edges at both shares; a dash where no prefix reaches one, "no" where the surface does not carry the task."""
    curve = CostCurve.from_dict(circuit)
    each = [priced(curve, share, of) for share in SHARES.values()]
    return "/".join("–" if number is None else f"{number:,}" for number in each) if curve.carries else "no"


def contest_table(run: Run, loaded: LoadedRun) -> Table:
    """SWD at each sparsity beside every control with as many edges, and beside the exact ones."""
    kinds = {row["method"]: row for row in run["fidelity"]}
    own = [method for method, row in kinds.items() if row["role"] == "swd"]
    body = []
    for method in own:
        near = kinds[method]["sparsity"]
        rivals = [
            name
            for name, row in kinds.items()
            if name not in own and ("factors" in row or abs(row["sparsity"] - near) < SAME_SPARSITY)
        ]
        for rival, part, (name, share) in itertools.product(rivals, ("MLP", "attention"), SHARES.items()):
            ratios, matched = contest(loaded, part, method, rival, share)
            median = f"{statistics.median(ratios):.2f}" if ratios else "–"
            body.append([method, rival, part, name, won(ratios), median, won(matched)])
    columns = ["method", "beside", "in", "at", "fewer edges in", "its edges over the method's, median"]
    columns.append("where its CE and KL are not worse")
    title = "SWD beside each control, where both have a circuit"
    return Table(title, columns, body, ["left"] * 4 + ["right"] * 3)


def contest(run: LoadedRun, part: str, method: str, rival: str, share: Threshold) -> tuple[list[float], list[float]]:
    """The rival's edges over the method's wherever both have some; and of these where its CE and KL are not worse."""
    ratios, matched = [], []
    for comparison in run.comparisons.values():
        beside = replace(comparison, reference=method)
        for of_task in comparison.values():
            curves = of_task.curves
            mine, other = (priced(curves[name], share, "edges") for name in (method, rival))
            if mine and other and part_of(curves[method].settings["units"]) == part:
                ratios.append(other / mine)
                if beside.matched(rival):
                    matched.append(other / mine)
    return ratios, matched


def cells_table(run: LoadedRun) -> Table:
    """Each cell by the rule of before and by today's."""
    body = []
    for surface, comparison in run.comparisons.items():
        for task, of_task in comparison.items():
            body.append([surface, task, *cells_by_both_rules(of_task.curves[SWD])])
    columns = ["surface", "task", *BOTH_RULES]
    title = f"{SWD}: every cell by sufficiency, as until commit 328dbf3, and by what is recovered"
    return Table(title, columns, body, ["left"] * 2 + ["right"] * 8)


def won(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def signed(value: float) -> str:
    return f"{value:+.5f}" if abs(value) >= 5e-6 else "0"


def agreed(rows: Sequence[Any], show: Callable[[Any], str]) -> str:
    """What all runs show; where they differ, each value."""
    return ", ".join(dict.fromkeys(show(row) for row in rows))


if __name__ == "__main__":
    main()
