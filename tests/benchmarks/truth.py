"""Matrices and hosts whose units are known (swd_lens/truth): how near methods come to them, and so how far units are things.

    python -m tests.benchmarks.truth --out DIR              the table of `swd-lens truth`; goes on in DIR
    python -m tests.benchmarks.truth --out DIR --record     also into results/truth.json

Methods are told the number of true units and of their entries unless the case says otherwise. What a row is stands in
swd_lens/truth/run.py, what the columns are in swd_lens/docs/pages/explain/truth.md.
"""

import argparse
from collections.abc import Sequence

import pandas as pd
import torch

from swd_lens.truth import TruthTable, run_truth
from tests.benchmarks.results import Table, record

WHAT = {"planted": "Planted matrices", "compiled": "attn_o of compiled hosts", "toys": "Toys of the decomposition papers"}
SHOWN = {
    "planted": ("F1", "MMCS"),
    "compiled": ("F1", "MMCS", "error", "unit AUROC", "edge AUROC"),
    "toys": ("F1", "MMCS", "error", "row MMCS", "ML2R"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Known units.")
    parser.add_argument("--out", required=True, help="folder of finished answers")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = run_truth(seeds=args.seeds, out=args.out)
    tables = [_planted(found), *(_of(found, part) for part in ("compiled", "toys")), _losses(found)]
    print("\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables))
    if args.record:
        record("truth", tables, threads=[args.threads], title="Known units", section="Solver", order=10, about=ABOUT, notes=NOTES)


def _planted(found: TruthTable) -> Table:
    """A row per case, a column per method: F1 and MMCS."""
    rows = found.table("planted")
    cases, methods = (list(dict.fromkeys(rows[name])) for name in ("case", "method"))
    numbers = {(row["case"], row["method"]): [row[name] for name in SHOWN["planted"]] for row in rows.to_dict("records")}
    body = [[case, *(_cell(numbers.get((case, method))) for method in methods)] for case in cases]
    return Table(f"{WHAT['planted']}: F1 / MMCS", ["case", *methods], body, ["left"] + ["right"] * len(methods))


def _of(found: TruthTable, part: str) -> Table:
    rows = found.table(part)
    rows = rows[rows["F1"].notna()]
    shown = SHOWN[part]
    body = [[row["case"], row["method"], *(_cell([row[name]]) for name in shown)] for row in rows.to_dict("records")]
    return Table(WHAT[part], ["case", "method", *shown], body, ["left", "left"] + ["right"] * len(shown))


def _losses(found: TruthTable) -> Table:
    columns = ["toy", "loss", "reference", "published MMCS", "published ML2R"]
    body = [
        [name, f"{toy['loss']:.6f}", "" if pd.isna(toy["reference"]) else f"{toy['reference']:.6f}"]
        + ["" if pd.isna(toy[column]) else f"{toy[column]:.3f}" for column in columns[3:]]
        for name, toy in found.toys.items()
    ]
    return Table("The toys, and what SPD publishes of them", columns, body, ["left"] + ["right"] * 4)


def _cell(values: Sequence[float] | None) -> str:
    """Two digits each, a stroke between; "" for what was not asked, a dash for what a method refused."""
    if values is None:
        return ""
    return " / ".join("–" if pd.isna(value) else f"{value:.2f}" for value in values) if not pd.isna(values[0]) else "–"


ABOUT = ["TODO"]
NOTES = ["TODO"]


if __name__ == "__main__":
    main()
