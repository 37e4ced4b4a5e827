"""Feature numbers and files."""

import json
from pathlib import Path

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import unit_graph
from swd_lens.analysis.graph.features import FeatureNumbers, cantor
from tests.analysis.audit_models import lettered, sparse_factors
from tests.analysis.graph_checks import TOKENS, all_units, exported_json, toy_graph
from tests.analysis.viewer_rules import unpaired


def test_units_of_several_sites_of_a_layer_have_numbers_of_their_own() -> None:
    graph = toy_graph(prompt=TOKENS)
    numbers = FeatureNumbers.of(graph)
    sites = [site for site in graph.settings["factors"] if site.startswith("blocks.1.")]
    indices = {numbers.index(site, unit) for site in sites for unit in range(5)}
    assert indices == set(range(5 * len(sites)))  # a layer's indices have no holes
    assert unpaired(numbers.number("blocks.1.mlp_in", 3)) == (1, 3 * 5 + 3)  # 5 sites, mlp_in the fourth
    assert unpaired(cantor(27, 300_000)) == (27, 300_000)
    # One site in a layer: the unit's own number; and another graph of the same factors has the same numbers.
    alone = toy_graph(("mlp_out",), prompt=TOKENS)
    assert FeatureNumbers.of(alone).index("blocks.1.mlp_out", 4) == 4
    assert FeatureNumbers.of(toy_graph(units="blocks.*.mlp_out", prompt=TOKENS)) == numbers
    assert FeatureNumbers.of(alone).name != numbers.name


def test_feature_files_hold_what_the_audit_knows(tmp_path: Path) -> None:
    model = lettered()
    factors = sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out", "blocks.1.mlp_in"])
    graph = unit_graph(model, factors, all_units(dict(factors)), prompt=TOKENS, keep=None)
    tokens = torch.randint(0, 20, (8, 24), generator=torch.Generator().manual_seed(1))
    known = [f"blocks.1.mlp_out/{unit}" for unit in range(6)]
    audit = swd.audit(model, factors, tokens, units=known).with_labels({known[0]: "of the audit"})
    exported = graph.export(tmp_path, audit=audit)
    numbers = FeatureNumbers.of(graph)
    folder = tmp_path / "features" / numbers.name
    n_units = graph.nodes["kind"].eq("unit").sum()
    assert len(list(folder.iterdir())) == n_units and exported.features == (n_units, 6)
    for unit in range(6):
        profile = audit.unit(known[unit])
        file = json.loads((folder / f"{numbers.number('blocks.1.mlp_out', unit)}.json").read_text(encoding="utf-8"))
        assert file["top_logits"] == [token for token, _ in profile.logits.promoted]
        assert file["bottom_logits"] == [token for token, _ in profile.logits.suppressed]
        by_sign = [(sign, [c for c in profile.contexts if sign * c.z[c.peak] > 0]) for sign in (1, -1)]
        groups_shown = zip(file["examples_quantiles"], [pair for pair in by_sign if pair[1]], strict=True)
        for group, (sign, contexts) in groups_shown:
            examples = group["examples"]
            for example, context in zip(examples, contexts, strict=True):
                assert tuple(example["tokens"]) == context.tokens and example["train_token_ind"] == context.peak
                assert [sign * z for z in example["tokens_acts_list"]] == pytest.approx(context.z)
                assert example["tokens_acts_list"][context.peak] > 0
        assert file["act_min"] == 0 and file["act_max"] >= profile.peak
        assert file["activation_frequency"] == pytest.approx(profile.density)
    written = json.loads(exported.path.read_text(encoding="utf-8"))
    assert "of the audit (blocks.1.mlp_out/0)" in [node["clerp"] for node in written["nodes"]]
    # A unit that no audit knows has a file, too: viewers ask for one.
    file = json.loads((folder / f"{numbers.number('blocks.0.mlp_out', 0)}.json").read_text())
    assert file["examples_quantiles"] == []
    # Without an audit later: what is known stays.
    graph.export(tmp_path)
    assert json.loads((folder / f"{numbers.number('blocks.1.mlp_out', 0)}.json").read_text())["examples_quantiles"]
    others = swd.audit(model, sparse_factors(model, ["blocks.0.mlp_out"], seed=3), tokens)
    with pytest.raises(ValueError, match="the audit: the graph was made of other factors"):
        graph.export(tmp_path, audit=others)
    url = "https://example.org/features"
    details = exported_json(graph, tmp_path, target="neuronpedia", features_url=url)["metadata"]["feature_details"]
    assert details == {"feature_json_base_url": url}
