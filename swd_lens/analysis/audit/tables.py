"""The tables of an audit; `Audit` documents them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.labels import UnitLabels
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts.sites import split_name

if TYPE_CHECKING:
    from swd_lens.analysis.audit.result import Audit
else:
    Audit = Any


def unit_table(audit: Audit) -> pd.DataFrame:
    """One row per audited unit."""
    rows = []
    for site, found in audit.sites.items():
        for column, index in enumerate(found.units.tolist()):
            first = audit.contexts(site, index, 1)
            rows.append(
                {
                    "unit": f"{site}/{index}",
                    "largest |z|": float(max(found.largest[column], -found.smallest[column])),
                    "mean z": float(found.mean[column]),
                    "sd": float(found.sd[column]),
                    "density": float(found.density[column]),
                    "top token": first[0].tokens[first[0].peak] if first else "",
                    **{f"{task} rank": audit.ranks[task][site][index] for task in audit.scored(site)},
                    "label": _called(audit.labels, f"{site}/{index}"),
                }
            )
    return pd.DataFrame(rows)


def rank_table(
    scores: UnitScores, labels: UnitLabels, per_layer: int = 3, layers: Iterable[int] | None = None
) -> pd.DataFrame:
    """The best units of each layer; labels stand beside them and change nothing."""
    wanted = None if layers is None else set(layers)
    rows, seen = [], {}
    for rank, (site, index) in enumerate(scores.ranking(), 1):
        layer = split_name(site)[0]
        seen[layer] = seen.get(layer, 0) + 1
        if seen[layer] <= per_layer and (wanted is None or layer in wanted):
            rows.append(
                {
                    "layer": layer,
                    "unit": f"{site}/{index}",
                    "layer order": seen[layer],
                    "global rank": rank,
                    "score": float(scores.scores[site][index]),
                    "label": _called(labels, f"{site}/{index}"),
                }
            )
    columns = ["layer", "unit", "layer order", "global rank", "score", "label"]
    return pd.DataFrame(rows, columns=columns).sort_values(["layer", "layer order"], ignore_index=True)


def excerpt_table(audit: Audit, units: Sequence[str], n: int, around: int) -> pd.DataFrame:
    """Label and n excerpts of each unit."""
    rows = []
    for name in units:
        found = [f"“{_cut(context, around)}”" for context in audit.contexts(*audit.place(name), n)]
        rows.append({"unit": name, "label": _called(audit.labels, name), "excerpts": "; ".join(found)})
    return pd.DataFrame(rows, columns=["unit", "label", "excerpts"])


def _called(labels: UnitLabels, unit: str) -> str:
    return labels[unit].label if unit in labels else ""


def _cut(context: Context, around: int) -> str:
    """The tokens about the peak as one line."""
    start, stop = max(0, context.peak - around), context.peak + around + 1
    part = Context(context.tokens[start:stop], context.z[start:stop], context.peak - start)
    return " ".join(part.text(("«", "»")).split())
