"""The two tables of a unit graph, with the same columns and types however they were made."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

NODES = {
    **dict.fromkeys(("node", "kind"), "object"),
    "layer": "Int64",
    "site": "object",
    **dict.fromkeys(("unit", "position", "token"), "Int64"),
    "label": "object",
    **dict.fromkeys(("probability", "score"), "float64"),
    "rank": "Int64",
    **dict.fromkeys(("activation", "rest", "influence"), "float64"),
}
EDGES = {
    **dict.fromkeys(("source", "target", "kind"), "object"),
    **dict.fromkeys(("weight", "contribution", "strength"), "float64"),
}


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows as a table; what a row lacks is None, NaN or NA, as the column's type has it."""
    rows = list(rows)
    made = {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in columns.items()}  # pyright: ignore[reportArgumentType,reportCallIssue]
    return pd.DataFrame(made)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain values; what is missing is None."""
    plain = frame.astype(object)
    return plain.where(plain.notna(), None).to_dict("records")  # pyright: ignore[reportReturnType]
