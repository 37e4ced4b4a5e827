"""first_rows: as much of a table as a notebook's card shows, and how many rows it leaves out."""

import pandas as pd


def first_rows(table: pd.DataFrame, n: int = 20) -> tuple[pd.DataFrame, str | None]:
    """The first n rows, and a line that says how many more there are; None where there are none."""
    more = len(table) - n
    return table.head(n), f"and {more:,} more row{'s' * (more > 1)}" if more > 0 else None
