"""What is fair beside a factorization: the fewest edges that each rival needs where it is no worse, after as many tries.

1. `TRIES`: the settings of each rival, equally many, so that none has the better chance of a lucky one.
2. `matched_rows`: beside each SWD the cheapest circuit of each rival whose CE, or KL, is at most TOLERANCE above SWD's own.
   Prefixes are chosen on validation prompts, so that the setting with the fewest edges is, too; what its circuit recovers is
   of test prompts.
3. `foretold`: how well the concentration on text, which knows no task, foretells circuits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

SPARSITIES = (0.5, 0.75)  # of SWD
# Of pruned neurons, which have nothing else to try; some behave as a factorization does.
PRUNED = (0.25, 0.375, 0.4375, 0.5, 0.625, 0.6875, 0.75, 0.8125)
# Of units that start as neurons: sparsities, and shares of the edges for what stands between units and neurons.
FROM_NEURONS = (0.375, 0.5, 0.625, 0.75)
SHARES = (0.01, 0.05)
# Nats by which the CE, or the KL, of what stands beside SWD may be above SWD's own.
TOLERANCE = 0.001
FAIR = {"CE": "ce_delta", "KL": "kl"}  # of a row that `measured_row` gives
TRIES = {
    "from neurons": tuple(f"from neurons, {share} of K, s={s}" for share in SHARES for s in FROM_NEURONS),
    "pruned": tuple(f"pruned s={s}" for s in PRUNED),
}
OF = {"recovered": "recovered 0.9", "drop": "half drop"}
MATCHED = ["task", "site", "SWD", *(f"{words}: {who}" for words in OF.values() for who in ("SWD", *TRIES))]


def matched_rows(cell: str, place: str, measured: Mapping[str, Mapping[str, Any]], by: str = "CE") -> list[list[str]]:
    """A row per SWD: its edges, and the fewest of each rival that is at most TOLERANCE worse, with the rival's setting.

    Args:
        measured: method -> its `ce_delta` and `kl`, and of its cheapest circuits `recovered` and `drop`: units, edges, and the
            share recovered on test prompts.
        by: what rivals must not be worse in, a key of FAIR.
    """
    field = FAIR[by]
    rows = []
    for s in SPARSITIES:
        swd_row = measured.get(f"SWD s={s}")
        if swd_row is None:
            continue
        row = [cell, place, f"s={s}, {by} {swd_row[field]:+.4f}"]
        for of in OF:
            row.append(_words(swd_row[of]))
            for rival, tries in TRIES.items():
                fair = {
                    method: measured[method][of]
                    for method in tries
                    if method in measured
                    and measured[method][of][1] is not None
                    and measured[method][field] <= swd_row[field] + TOLERANCE
                }
                least = min(fair, key=lambda method: fair[method][1], default=None)
                setting = "" if least is None else least.removeprefix(rival).strip(", ").replace(" of K", "")
                row.append("" if least is None else f"{_words(fair[least])} ({setting})")
        rows.append(row)
    return rows


def _words(circuit: Sequence[Any]) -> str:
    """Edges, in brackets the share that they recover on test prompts."""
    _, edges, recovered = circuit
    return "" if edges is None else f"{edges:,}" + ("" if recovered is None else f" [{recovered:.2f}]")


def foretold(measured: Sequence[Mapping[str, Any]]) -> str:
    """Spearman's correlation of concentration and edges at half the drop, over the methods of a cell."""
    pairs = [(row["text"], row["drop"][1]) for row in measured if row["drop"][1] and row["text"]]
    if len(pairs) < 4:
        return "too few circuits"
    return f"{pd.DataFrame(pairs).corr(method='spearman').iloc[0, 1]:.2f} of {len(pairs)}"
