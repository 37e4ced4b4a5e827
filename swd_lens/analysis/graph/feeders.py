"""feeders: what comes in at one unit, as a table.

1. The units of every attached site before it are sources, and with a prompt the tokens; the run is held as for a graph.
2. Edges into this unit alone, by the rules of edges.py: no table of all weights is made, so sets of any size can be asked.
3. What they leave of z unexplained is the row "rest".
"""

from typing import Any

import pandas as pd
import torch

from swd_lens.analysis.graph.build import activations_of, drawn_units, held_run
from swd_lens.analysis.graph.data import table
from swd_lens.analysis.graph.edges import TOKEN, Layout, NodeGroup, into, layout_of
from swd_lens.base.checks import bounded
from swd_lens.base.errors import legible
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import require_no_dropout
from swd_lens.units import UnitSet
from swd_lens.units.keys import read_unit

COLUMNS = {"source": "object", "position": "Int64", "kind": "object", **dict.fromkeys(("z", "weight", "contribution"), "float64")}


@with_torch_defaults
def feeders(model: Any, factors: Any, unit: Any, *, prompt: Any = None, tokens: Any = None, n: int | None = 20) -> pd.DataFrame:
    """Find which earlier units feed a unit: what each gives to its z along the direct path, as in `unit_graph` (ours).

        swd.graph.feeders(model, factors, "blocks.3.mlp_in/17", prompt="When Mary and John went to the store, John gave it to")

    With a prompt the host runs with all factors attached, norms and (for a unit of attn_o) attention patterns held, the
    activation function (for a unit of mlp_out) taken by its slope; contributions are z of the source times weight, at the
    prompt's last position. Tokens feed, too, and "rest" is what neither they nor units explain: matrices that are not replaced,
    biases, curvature. With n=None the contributions add up to the unit's z.

    Args:
        factors: what to attach, see `swd_lens.attach`; all their units in sites before this one are sources.
        unit: its name, a pair (site, index) or a row of a table.
        prompt: text, or token ids. None: weights alone, which have no sources of other kinds than units.
        tokens: without a prompt, for the scale of the norms; see `unit_graph`.
        n: how many; None: all.

    Returns:
        rank (from 1), source (a unit's name, "token" or "rest"), position (of the prompt), kind (residual, attention, mlp),
        z of the source, weight, contribution; largest |contribution| first. Without a prompt: rank, source, kind and weight.

    Raises:
        ValueError: no such unit, or none before it speaks to it; and see `unit_graph`.
        TypeError, UnsupportedHostError, AttachError: see `unit_graph`.
    """
    if n is not None:
        bounded("n", n, 1)
    attached = UnitSet.of(model, factors)
    ((target, (index,)),) = drawn_units(attached, [read_unit(unit, attached)])[0].items()
    require_no_dropout(model)
    before = attached.sites[: attached.sites.index(target)]
    drawn = {site: list(range(attached[site.name].n_units)) for site in before} | {target: [index]}
    with torch.no_grad():
        read, run = held_run(attached, drawn, prompt, tokens, [target], across=target.kind == "attn_o")
        ids = None if read is None else read.ids
        layout = layout_of(attached, drawn, run, answers=(), static=ids is None, bounded=False)
        rows = _rows_into(layout, layout.groups[-1], None if ids is None else len(ids))
    if not rows:
        its_unit = f"{target.name}/{index}"
        raise ValueError(
            f"no unit of {', '.join(s.name for s in before)} speaks to {legible(its_unit)} along a direct path here; "
            "attach sites before it that write what its site reads"
        )
    if ids is not None:
        z = float(run.z[target.name][-1, index])
        rest = z - sum(row["contribution"] for row in rows)
        rows.append({"source": "rest", "contribution": rest})
    by = "weight" if ids is None else "contribution"
    kept = COLUMNS if ids is not None else {name: COLUMNS[name] for name in ("source", "kind", "weight")}
    ranked = table(rows, kept).sort_values(by, key=lambda values: -values.abs(), kind="stable", ignore_index=True)
    ranked.insert(0, "rank", range(1, len(ranked) + 1))
    return ranked.head(n or len(ranked))


def _rows_into(layout: Layout, target: NodeGroup, n_tokens: int | None) -> list[dict[str, Any]]:
    """One row per node that feeds the last position of a group of one unit."""
    rows: list[dict[str, Any]] = []
    for source, kind, weight in into(layout, target):
        z = activations_of(layout, source).unflatten(0, (source.positions, -1))[-len(weight) :]
        for position, (of_position, activations) in enumerate(zip(weight.tolist(), z.tolist(), strict=True)):
            place = None if n_tokens is None else n_tokens - len(weight) + position
            for item, w, activation in zip(source.items, of_position, activations, strict=True):
                name = TOKEN if source.site is None else f"{source.site.name}/{item}"
                row = {"source": name, "position": place, "kind": kind, "z": activation, "weight": w}
                rows.append(row | {"contribution": activation * w})
    return rows
