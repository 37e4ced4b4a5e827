"""Tables for the terminal: at most 80 columns wide, one table per surface, numbers in as many digits as they carry.

`swd-lens --json` prints the same numbers unrounded.
"""

from typing import Any

import pandas as pd
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from swd_lens.base.errors import visible
from swd_lens.report.wording import intervention_words
from swd_lens.study import Run

# Long column names of the DataFrames -> what fits a terminal.
_SHORT = {
    "CE delta se": "±",
    "top-1 agreement": "top-1",
    "max relMSE": "max\nrelMSE",
    "relMSE (calibration)": "relMSE\ncalibration",
    "relMSE (held-out)": "relMSE\nheld-out",
    **{name: name.replace(" ", "\n") for name in ("unit AUROC", "edge AUROC", "row MMCS")},
}


def run_tables(run: Run) -> list[Table | Text]:
    """Tabulate a run, surface by surface: how well each method stands in for the dense matrices, then what circuits cost.

    Circuits: least cost, "units / edges", of recovering 0.9 of what the surface carries, and of half the whole drop.
    """
    # Sparsity stands in the methods' names.
    columns = ["method", "edges", "CE delta", "CE delta se", "KL", "top-1 agreement", "max relMSE"]
    tables: list[Table | Text] = [
        table(f"Fidelity of {surface} on held-out text", pd.DataFrame(rows, columns=[name for name in columns if name in rows]))
        for surface, rows in run.fidelity_table().groupby("surface", sort=False)
    ]
    circuits = run.circuit_table()
    by = [name for name in ("surface", "positions", "ablation") if name in circuits]
    for key, rows in circuits.groupby(by, sort=False):
        surface, *intervention = key if isinstance(key, tuple) else (key,)
        where = f", {intervention_words(*intervention)}" if intervention else ""
        shown = pd.DataFrame({"task": rows["task"], "method": rows["method"], "margin": rows["margin"]})
        shown["carried"] = [c if yes else "no" for c, yes in zip(rows["carried"].round(2), rows["carries"], strict=True)]
        for title, threshold in (("recovered 0.9", "recovered 0.9"), ("half the drop", "necessity 0.5")):
            costs = zip(rows[f"units at {threshold}"], rows[f"edges at {threshold}"], strict=True)
            shown[title] = ["" if pd.isna(u) else f"{u:,.0f} / {e:,.0f}" for u, e in costs]  # of seeds: the means
        tables.append(table(f"Circuits in {surface}{where}: least units / edges", shown))
    return [*tables, Text('carried: logits of margin, or "no": then no circuit has a cost · blank: never reached', style="dim")]


def table(title: str, frame: pd.DataFrame) -> Table:
    """Make a DataFrame a rich table; numeric columns to the right."""
    shown = Table(title=Text(visible(title)), title_justify="left", title_style="bold", header_style="bold", padding=(0, 1))
    for column in frame.columns:
        # A long name is folded; a number without its digits would be none.
        numeric = pd.api.types.is_numeric_dtype(frame[column]) or frame[column].astype(str).str.contains(" / ").any()
        shown.add_column(
            Text(_SHORT.get(str(column), visible(str(column)))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
            min_width=max((len(_cell(value)) for value in frame[column]), default=0) if numeric else None,
        )
    for row in frame.itertuples(index=False):
        shown.add_row(*(_cell(value) for value in row))
    return shown


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, float):
        # Below a thousandth the digits after the point say nothing: two significant ones do.
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else escape(visible(str(value)))
