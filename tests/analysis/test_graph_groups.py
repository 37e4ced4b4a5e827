"""Units that a reader would take for one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import groups, unit_graph
from tests.analysis.audit_models import lettered, sparse_factors
from tests.analysis.graph_checks import TOKENS, all_units, toy_graph


def test_groups_by_label(tmp_path: Path) -> None:
    labels = {"blocks.0.mlp_in/1": "names", "blocks.1.mlp_in/2": "names", "blocks.1.mlp_in/3": "alone"}
    graph = toy_graph(prompt=TOKENS, keep=None, labels=labels)
    assert groups(graph) == {"names": groups(graph)["names"]}
    assert set(groups(graph)["names"]) == {"blocks.0.mlp_in/1@4", "blocks.1.mlp_in/2@4"}
    ways: list[dict[str, Any]] = [{"target": "neuronpedia"}, {"groups": groups(graph)}]
    for how in ways:
        exported = graph.export(tmp_path, **how)
        (group,) = json.loads(exported.path.read_text())["qParams"]["supernodes"]
        assert group[0] == "names" and len(group) == 3
    assert "supernodes=%5B%5B%22names" in exported.query  # circuit-tracer reads them from there
    assert graph.export(tmp_path).query == "slug=unit-graph"


def _with(factors: swd.Factors, read: Any = (), write: Any = ()) -> swd.Factors:
    """The factors with other vectors of some units."""
    own = factors.read.clone(), factors.write.clone()
    for unit, vector in dict(read).items():
        own[0][:, unit] = vector
    for unit, vector in dict(write).items():
        own[1][unit] = vector
    return swd.Factors(*own, provenance=dict(factors.provenance))


def test_groups_by_writes_and_by_being_active_together() -> None:
    model = lettered()
    factors = sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out", "blocks.1.mlp_in"])
    factors = swd.FactorSet(
        {
            **factors,
            # Unit 4 writes what unit 3 of the layer below writes, the other way round.
            "blocks.1.mlp_out": _with(factors["blocks.1.mlp_out"], write={4: -2.0 * factors["blocks.0.mlp_out"].write[3]}),
            # Unit 7 is active where unit 2 is.
            "blocks.1.mlp_in": _with(factors["blocks.1.mlp_in"], read={7: 3.0 * factors["blocks.1.mlp_in"].read[:, 2]}),
        }
    )
    graph = unit_graph(model, factors, all_units(dict(factors)), prompt=TOKENS, keep=None, isolated=True)
    by_writes = [sorted(nodes) for nodes in groups(graph, "writes", factors=factors, alike=0.95).values()]
    assert by_writes == [["blocks.0.mlp_out/3@4", "blocks.1.mlp_out/4@4"]]
    tokens = torch.randint(0, 20, (8, 24), generator=torch.Generator().manual_seed(1))
    audit = swd.audit(model, factors, tokens)
    both = groups(graph, "writes", audit=audit, alike=0.95)
    assert ["blocks.1.mlp_in/2@4", "blocks.1.mlp_in/7@4"] in [sorted(nodes) for nodes in both.values()]
    assert any(name.startswith("promotes ") for name in both)
    # Any two members are alike: a chain of neighbours is not one group.
    assert all(len(nodes) < 4 for nodes in both.values())
    assert len(groups(graph, "writes", factors=factors, alike=1e-9)) < 4
    with pytest.raises(ValueError, match="need factors"):
        groups(graph, "writes")
    with pytest.raises(ValueError, match="alike"):
        groups(graph, "writes", factors=factors, alike=0.0)
    with pytest.raises(ValueError, match="by must be one of"):
        groups(graph, "taste")
    with pytest.raises(ValueError, match="other factors"):
        groups(graph, "writes", factors=sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out"], seed=3))
