"""groups: units of a graph that a reader would take for one, as viewers show them (supernodes).

1. by="labels": nodes of the same label, whether of several units or of one at several positions.
2. by="writes": units that write in nearly the same direction (|cosine| of their write vectors, where these can be compared: on
   the residual stream, or within a site), or that are active together (|correlation| of z over an audit's text, within a site).
   Of two ways to write one thing, z with w or -z with -w, neither is the true one, so signs do not count.
3. Complete linkage: pairs are joined, the most alike first, as long as any two members of a group are alike.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.audit import Audit
from swd_lens.analysis.audit.vectors import write_vectors
from swd_lens.analysis.graph.data import GraphData, require_same_factors
from swd_lens.base.checks import one_of
from swd_lens.base.errors import legible, visible_token
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name
from swd_lens.units.unit_set import identities

_Unit = tuple[str, int]
BY = ("labels", "writes")


@with_torch_defaults
def groups(
    graph: GraphData, by: str = "labels", *, factors: Any = None, audit: Audit | None = None, alike: float = 0.5
) -> dict[str, list[str]]:
    """Find which nodes belong together: name of the group -> names of its nodes, at least two (ours).

        graph.export("graphs", audit=audit, groups=swd.graph.groups(graph, "writes", audit=audit))

    Args:
        by: "labels": of one label. "writes": write vectors that point the same way, or units that are active together.
        factors: of the graph, for "writes"; None: those of the audit.
        audit: labels of units that the graph has none of; for "writes" correlations of z, and its own factors.
        alike: for "writes", the least |cosine| or |correlation| of two units of a group.

    Raises:
        ValueError: another `by`, "writes" without factors or audit, `alike` not above 0, factors of another graph.
    """
    one_of("by", by, BY)
    nodes_of: dict[_Unit, list[str]] = {}
    rows = pd.DataFrame(graph.nodes[graph.nodes["kind"] == "unit"])
    rows = rows.sort_values("influence", ascending=False, kind="stable")
    for node, site, unit in zip(rows["node"], rows["site"], rows["unit"], strict=True):
        nodes_of.setdefault((str(site), int(unit)), []).append(str(node))
    labels = {(site, int(unit)): str(label) for site, unit, label in rows[["site", "unit", "label"]].values if label}
    if audit is not None:
        for unit in nodes_of:
            labels.setdefault(unit, audit.labels.text("{}/{}".format(*unit)))
    if by == "labels":
        by_label: dict[str, list[str]] = {}
        for unit, nodes in nodes_of.items():
            by_label.setdefault(labels.get(unit, ""), []).extend(nodes)
        return {label: nodes for label, nodes in by_label.items() if label and len(nodes) > 1}
    if not alike > 0:
        raise ValueError(f"alike must be above 0, got {alike}; at 0 all units are alike")
    units, named = list(nodes_of), {}
    for places in _linked(_likeness(graph, units, factors, audit), alike):
        members = [units[i] for i in places]
        name, (site, index) = _name(members, labels, audit), members[0]
        name = f"{name} ({site}/{index})" if name in named else name
        named[name] = [node for unit in members for node in nodes_of[unit]]
    return named


def _likeness(graph: GraphData, units: list[_Unit], factors: Any, audit: Audit | None) -> Float[Tensor, "unit unit"]:
    """How alike two units are: the larger of |cosine| and |correlation|; 0 where neither can be told."""
    factors = audit.factors if factors is None and audit is not None else factors
    if not isinstance(factors, Mapping):
        raise ValueError("groups by what units write need factors= (a FactorSet, or site -> factors) or audit=")
    require_same_factors(graph, identities(factors), "these factors")
    alike = torch.zeros(len(units), len(units), dtype=torch.float32)
    spaces: dict[str, list[int]] = {}
    for i, (site, _) in enumerate(units):
        spaces.setdefault("residual stream" if split_name(site)[1] in WRITES_RESIDUAL else site, []).append(i)
    writes = {site: write_vectors(factors[site]) for site in dict.fromkeys(site for site, _ in units) if site in factors}
    for site, index in units:
        write = writes.get(site)
        if write is None or index >= len(write):
            its_unit = f"{site}/{index}"
            raise ValueError(
                f"the graph has {legible(its_unit)}, these factors have no write vector of it; give the factors that the "
                "graph was made of"
            )
    for members in spaces.values():
        of_members = [writes[site][index].float() for site, index in (units[i] for i in members)]  # pyright: ignore[reportOptionalSubscript]
        vectors = torch.nn.functional.normalize(torch.stack(of_members), dim=-1)
        places = torch.tensor(members)
        alike[places[:, None], places] = (vectors @ vectors.T).abs()
    if audit is not None:
        place = {unit: i for i, unit in enumerate(units)}
        for (site, unit), i in place.items():
            of_site = audit.sites.get(site)
            if of_site is None or unit not in of_site.column:
                continue
            column = of_site.column[unit]
            pairs = zip(of_site.coactive[column].tolist(), of_site.correlation[column].tolist(), strict=True)
            for other, correlation in pairs:
                j = place.get((site, other), i)
                alike[i, j] = alike[j, i] = max(float(alike[i, j]), abs(correlation))
    return alike


def _linked(alike: Float[Tensor, "unit unit"], least: float) -> list[list[int]]:
    """Groups of at least two, members in the order of the table."""
    n = len(alike)
    pairs = [(float(alike[i, j]), i, j) for i in range(n) for j in range(i + 1, n) if alike[i, j] >= least]
    group_of = {i: [i] for i in range(n)}
    for _, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        one, other = group_of[i], group_of[j]
        if one is not other and bool((alike[one][:, other] >= least).all()):
            one += other
            for member in other:
                group_of[member] = one
    distinct = {id(group): sorted(group) for group in group_of.values() if len(group) > 1}
    return sorted(distinct.values())


def _name(members: list[_Unit], labels: Mapping[_Unit, str], audit: Audit | None) -> str:
    """The first label among the members, else what the first of them promotes, else its name and how many more there are."""
    label = next((labels[unit] for unit in members if labels.get(unit)), None)
    if label is not None:
        return label
    site, index = members[0]
    if audit is not None and site in audit.sites and index in audit.sites[site].column:
        effect = audit.unit((site, index)).logits
        if effect is not None and effect.promoted:
            return "promotes " + " ".join(visible_token(token) for token, _ in effect.promoted[:3])
    return f"{site}/{index} and {len(members) - 1} more"
