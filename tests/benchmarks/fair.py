"""What is fair beside a factorization: the fewest edges of each rival that is no worse.

1. `matched_rows`: beside each SWD the cheapest circuit of each of RIVALS whose CE, or KL, is at most TOLERANCE above SWD's own,
   whatever the rival's own sparsity. KL does not hang on which tokens happen to come next in the held-out text.
2. `foretold`: how well the concentration on text, which knows no task, foretells circuits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

SPARSITIES = (0.5, 0.75)  # of SWD
# Nats by which the CE, or the KL, of what stands beside SWD may be above SWD's own.
TOLERANCE = 0.001
FAIR = {"CE": "ce_delta", "KL": "kl"}  # of a row that `measured_row` gives
# What stands beside SWD, by how its label begins.
RIVALS = ("from neurons", "pruned", "weighed, pruned")
MATCHED = ["task", "site", "SWD"]
MATCHED += [f"{of}: {who}" for of in ("suff. 0.9", "half drop") for who in ("SWD", *RIVALS)]


def matched_rows(cell: str, place: str, measured: Mapping[str, Mapping[str, Any]], by: str = "CE") -> list[list[str]]:
    """A row per SWD: its edges, and the fewest of each rival that is at most TOLERANCE worse, with the rival's name.

    Args:
        measured: method -> its `ce_delta` and `kl`, and (units, edges) of its cheapest circuits: `sufficiency`, `drop`.
        by: what rivals must not be worse in, a key of FAIR.
    """
    field = FAIR[by]
    rows = []
    for s in SPARSITIES:
        swd_row = measured.get(f"SWD s={s}")
        if swd_row is None:
            continue
        row = [cell, place, f"s={s}, {by} {swd_row[field]:+.4f}"]
        for of in ("sufficiency", "drop"):
            row.append("" if swd_row[of][1] is None else f"{swd_row[of][1]:,}")
            for rival in RIVALS:
                fair = {
                    method: values[of][1]
                    for method, values in measured.items()
                    if method.startswith(rival)
                    and values[of][1] is not None
                    and values[field] <= swd_row[field] + TOLERANCE
                }
                least = min(fair, key=fair.__getitem__, default=None)
                words = None if least is None else least.removeprefix(rival).strip(", ").replace(" of K", "")
                row.append("" if least is None else f"{fair[least]:,} ({words})")
        rows.append(row)
    return rows


def foretold(measured: Sequence[Mapping[str, Any]]) -> str:
    """Spearman's correlation of concentration and edges at half the drop, over the methods of a cell."""
    pairs = [(row["text"], row["drop"][1]) for row in measured if row["drop"][1] and row["text"]]
    if len(pairs) < 4:
        return "too few circuits"
    return f"{pd.DataFrame(pairs).corr(method='spearman').iloc[0, 1]:.2f} of {len(pairs)}"
