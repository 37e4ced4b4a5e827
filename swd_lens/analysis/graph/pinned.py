"""pinned_nodes: what a viewer shows when it opens, instead of a cloud of dots.

1. What is asked for: nodes, units (at all their positions), a circuit, a table of units.
2. Else the answers, and of a circuit its units, of any other graph both ends of its strongest edges.
"""

from typing import TYPE_CHECKING, Any

import pandas as pd

from swd_lens.base.errors import legible
from swd_lens.units.keys import read_unit, single_units

if TYPE_CHECKING:
    from swd_lens.analysis.graph.result import UnitGraph

_MOST = 200  # viewers show no more in their panel of pinned nodes
_READABLE = 40  # nodes there: a circuit's units have one each, and as far as there is room one for other positions
_STRONGEST = 30  # edges that stand for a graph that is of no circuit


def pinned_nodes(graph: "UnitGraph", pinned: Any = None) -> list[str]:
    """Names of the nodes that are pinned.

    Args:
        pinned: names of nodes or units, a circuit, a table of units; a unit stands for its nodes at all positions. None: the
            answers, and of a circuit its units (each where it has most influence, at further positions as far as there is room),
            else both ends of the strongest edges.

    Raises:
        ValueError: no node of the graph.
    """
    nodes, names = graph.nodes, set(graph.nodes["node"])
    if pinned is not None:
        found: list[str] = []
        for each in single_units(pinned):
            if isinstance(each, str) and each in names:
                found.append(each)
                continue
            site, unit = read_unit(each, {site for site in nodes["site"] if isinstance(site, str)})
            of_unit = nodes["node"][(nodes["site"] == site) & (nodes["unit"] == unit)].tolist()
            if not of_unit:
                its_unit = f"{site}/{unit}"
                raise ValueError(
                    f"{legible(its_unit)} is pinned but not in the graph; pin units or nodes that graph.nodes has"
                )
            found += of_unit
        return list(dict.fromkeys(found))
    answers = nodes["node"][nodes["kind"] == "logit"].tolist()
    ends = {*graph.edges["source"], *graph.edges["target"]}
    ranked = pd.DataFrame(nodes[nodes["rank"].notna() & nodes["node"].isin(ends)])
    if len(ranked):
        ranked = ranked.sort_values("influence", ascending=False, kind="stable")
        again = ranked.duplicated(["site", "unit"])
        once = ranked["node"][~again].tolist()
        chosen = [*once, *ranked["node"][again].tolist()[: max(_READABLE - len(once), 0)]]
    else:
        strongest = graph.edges.head(_STRONGEST)
        chosen = [node for ends in zip(strongest["source"], strongest["target"], strict=True) for node in ends]
    return list(dict.fromkeys([*answers, *chosen]))[:_MOST]
