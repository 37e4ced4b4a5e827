"""Units set to other values: true changes of real forwards, files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import Replays, replays, unit_graph
from tests.analysis.graph_checks import TOKENS, all_units, drawn, random_factors, set_hooks, shown_values
from tests.refusals import refuses

FEW = ("attn_v", "attn_o", "mlp_out")  # queries, keys and MLP inputs stay dense


def test_true_changes_are_those_of_real_forwards_and_the_host_is_left_as_it_was(tmp_path: Path) -> None:
    model, factors, graph = drawn(FEW, prompt=TOKENS, attention="frozen", answers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(torch.tensor([TOKENS]))
    found = replays(model, factors, graph, strengths=(0.0, 0.5, 3.0))
    assert torch.equal(model(torch.tensor([TOKENS])), logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    clean = shown_values(model, factors, graph, [])
    gaps = []
    for i, node in list(enumerate(found.nodes))[::7]:
        for j, strength in enumerate(found.strengths):
            true = shown_values(model, factors, graph, set_hooks(node, strength, float(found.z[i]), factors)) - clean
            assert torch.allclose(found.changes[i, j], true, atol=2e-5), (node, strength)
            gaps.append(float((true - found.frozen[i, j]).abs().max()))
    assert max(gaps) > 1e-3  # a true run is not the frozen one
    # Later units by themselves: their runs take up at their block.
    rows = [i for i, node in enumerate(found.nodes) if node.startswith("blocks.1.")]
    late = replays(model, factors, graph, [found.nodes[i] for i in rows], found.strengths)
    assert len(rows) > 3 and torch.allclose(late.changes, found.changes[rows], atol=2e-5)
    found.save(tmp_path / "replays.json")
    again = Replays.load(tmp_path / "replays.json")
    assert again.nodes == found.nodes and torch.equal(again.effects, found.effects)
    assert torch.equal(again.changes, found.changes) and again.strengths == found.strengths
    assert "Replays(" in repr(found) and "logit" in found._repr_html_()


def test_a_graph_of_the_last_position(default_model: Any) -> None:
    factors = swd.baselines.svd(default_model, "blocks.*.mlp_out")
    graph = unit_graph(default_model, factors, [("blocks.2.mlp_out", 3), ("blocks.3.mlp_out", 1)], prompt="The king said")
    found = replays(default_model, factors, graph, "blocks.2.mlp_out/3")
    last = len(graph.settings["token_ids"]) - 1
    assert graph.nodes.set_index("node").loc[f"token@{last}", "label"] == graph.settings["tokens"][-1]
    assert found.nodes == (f"blocks.2.mlp_out/3@{last}",)
    table = found.table()
    assert list(table.columns) == ["node", "strength", "target", "frozen", "true"] and len(table) == 3 * len(found.targets)
    own = table[table["target"] == found.nodes[0]]
    assert own["true"].tolist() == pytest.approx(own["frozen"].tolist(), rel=1e-4)


def test_what_cannot_be_replayed_is_refused() -> None:
    model, factors, graph = drawn(FEW, prompt=TOKENS, attention="frozen", answers=1)
    with pytest.raises(ValueError, match="this graph has none"):
        replays(model, factors, unit_graph(model, factors, all_units(factors), answers=[1]))
    refuses(ValueError, "does not draw", replays, model, factors, graph, "blocks.0.mlp_out/4@77")
    refuses(ValueError, "got nan", replays, model, factors, graph, strengths=(float("nan"),))
    refuses(ValueError, "other factors", replays, model, random_factors(model, "mlp_out"), graph)
    graph.settings["task_prompts"] = 5  # pyright: ignore[reportIndexIssue]
    refuses(ValueError, "mean of 5 prompts", replays, model, factors, graph)
    del graph.settings["task_prompts"]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        model.embed.W_E.add_(torch.randn(model.embed.W_E.shape, generator=torch.Generator().manual_seed(1)))
    refuses(ValueError, "another model, or other hooks", replays, model, factors, graph)
