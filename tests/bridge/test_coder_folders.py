"""Folders of SAELens and circuit-tracer on bridges, where neither package needs to be: what is attached is what hooks do."""

import json
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.hosts import host_of
from tests import families
from tests.units.coder_folders import circuit_tracer_folder, random_weights, saelens_folder

TOKENS = families.some_tokens(rows=2, pos=6)
# What each folder stands on: kind, hook read, hook written, on a bridge.
PLACES = {
    "SAE on the MLP's output": ("mlp.hook_out", "mlp.hook_out"),
    "SAE on the heads' output": ("attn.o.hook_in", "attn.o.hook_in"),
    "transcoder of the MLP": ("mlp.hook_in", "mlp.hook_out"),
}


def _folder(place: str, path: Any) -> Any:
    if place == "transcoder of the MLP":
        weights = random_weights(16, 24, 16, "b_enc", "threshold")
        traced = {"W_enc": weights["W_enc"].T, "activation_function.threshold": weights["threshold"]}
        layers = {1: {name: w for name, w in weights.items() if name not in ("W_enc", "threshold")} | traced}
        return circuit_tracer_folder(path, layers)
    hook = "blocks.1.hook_mlp_out" if place == "SAE on the MLP's output" else "blocks.1.attn.hook_z"
    return saelens_folder(path, random_weights(16, 24, 16, "b_enc"), architecture="topk", k=5, hook=hook)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attached_is_what_hooks_do(name: str, place: str, tmp_path: Any) -> None:
    model = families.bridge(name)
    coders = swd.load_coders(_folder(place, tmp_path))
    (units,) = coders.values()
    read, written = (f"blocks.1.{hook}" for hook in PLACES[place])
    seen: dict[str, torch.Tensor] = {}

    def keep(value: torch.Tensor, hook: Any) -> None:
        seen["x"] = value

    def replaced(value: torch.Tensor, hook: Any) -> torch.Tensor:
        x = seen.get("x", value)  # by head, where it stands on what heads give
        return units.decode(units.encode(x.reshape(*x.shape[:2], 16))).reshape(value.shape)

    hooks: list[Any] = [(written, replaced)]
    hooks = [(read, keep), *hooks] if read != written else hooks
    with torch.no_grad():
        plain = host_of(model).run(TOKENS)
        with model.hooks(fwd_hooks=hooks):
            by_hand = host_of(model).run(TOKENS)
        with swd.attach(model, coders):
            attached = host_of(model).run(TOKENS)
    torch.testing.assert_close(attached, by_hand, rtol=1e-5, atol=1e-5)
    assert float((attached - plain).abs().max()) > 1e-3


def test_a_graph_of_a_bridge_as_a_folder(tmp_path: Any) -> None:
    from tests.analysis.graph_checks import all_units, random_factors
    from tests.analysis.viewer_rules import check_neuronpedia

    model = families.bridge("llama")
    factors = random_factors(model, "attn_o", "mlp_in", "mlp_out")
    graph = swd.graph.unit_graph(model, factors, all_units(factors), prompt=TOKENS[0].tolist(), answers=2)
    audit = swd.audit(model, swd.FactorSet(factors), TOKENS, progress=False)
    exported = graph.export(tmp_path, target="neuronpedia", audit=audit)
    check_neuronpedia(json.loads(exported.path.read_text(encoding="utf-8")), n_layers=2)
    assert exported.features[1] > 5
