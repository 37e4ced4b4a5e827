"""Edits on a TransformerBridge: GPT-2's Conv1D and Llama's transposed nn.Linear, processed weights included; 3.9 and 4.x."""

import pytest
import torch

from swd_lens import baselines
from swd_lens.analysis.edit import Edit, compare_edits, edit_unit, side_effects
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.weights import stored_matrix
from swd_lens.units import attach
from tests import families

PROMPT, OTHERS = families.some_tokens(1, 6)[0], list(families.some_tokens(3, 5, seed=1))
ANSWER, FOIL = 100, 200


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2", "llama processed"])
def model(request):
    name, _, processed = request.param.partition(" ")
    model = families.bridge(name)
    if processed:  # a GatedMLPBridge multiplies by its own reference to the weight then
        model.enable_compatibility_mode()
    return model


def run(model, tokens=PROMPT[None]):
    with torch.no_grad():
        return host_of(model).run(tokens)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["blocks.0.mlp_out", "blocks.1.attn_o"])
def test_an_edit_in_and_out_of_a_bridge(model, name, tmp_path):
    host, site = host_of(model), find_sites(model, name)[0]
    stored = stored_matrix(host, site)
    assert torch.equal(stored.matrix().float(), host.weight(site))
    factors, outputs = baselines.svd(model, name), []
    edit = edit_unit(model, factors, f"{name}/1", PROMPT, ANSWER, FOIL, 1.5)
    logits, kept = run(model), stored.parameter.detach().clone()
    plain = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    def site_output():
        with host.outputs([site], lambda site, y: outputs.append(y[0, -1].double())):
            return run(model)

    site_output()
    with edit:
        changed = site_output()
    assert edit.local_shift == pytest.approx(1.5, rel=1e-6)
    shift = float((outputs[1] - outputs[0]) @ edit.target.direction.double())
    assert shift == pytest.approx(1.5, abs=3e-6 * float(outputs[0].abs().sum() + 1))
    assert torch.equal(run(model), logits) and torch.equal(stored.parameter, kept)
    assert not torch.equal(changed, logits)

    state = edit.state_dict(model)
    assert {key: tensor.shape for key, tensor in state.items()} == {key: t.shape for key, t in plain.items()}
    assert len([key for key in state if not torch.equal(state[key], plain[key])]) == 1
    model.load_state_dict(state)
    try:
        assert torch.equal(run(model), changed)
    finally:
        model.load_state_dict(plain)
    assert torch.equal(run(model), logits)
    with Edit.load(edit.save(tmp_path / "edit")).applied(model):
        assert torch.equal(run(model), changed)
    found = side_effects(model, edit, OTHERS, families.some_tokens(2, 6))
    before, after = (float(x[0, -1, ANSWER] - x[0, -1, FOIL]) for x in (logits, changed))
    assert found.change == pytest.approx(after - before, abs=1e-4) and found.mean_kl > 0 and found.kl_text > 0


def test_an_edited_replacement_on_a_bridge(model):
    name = "blocks.0.mlp_out"
    factors, outputs = baselines.svd(model, name), []
    edit = edit_unit(model, factors, f"{name}/1", PROMPT, ANSWER, FOIL, -1, base="replacement")
    host, site = host_of(model), find_sites(model, name)[0]
    for attached in (attach(model, factors), edit):
        with attached, host.outputs([site], lambda site, y: outputs.append(y[0, -1].double())):
            run(model)
    shift = float((outputs[1] - outputs[0]) @ edit.target.direction.double())
    assert shift == pytest.approx(-1, abs=3e-6 * float(outputs[0].abs().sum() + 1))
    assert not host.is_swapped(site)


@pytest.mark.quick_cases(1)
def test_comparison_on_a_bridge(model):
    logits = run(model)
    found = compare_edits(
        model, baselines.svd(model, "blocks.1.mlp_out"), "blocks.1.mlp_out/0", PROMPT, ANSWER, FOIL,
        other_prompts=OTHERS, shifts=(-0.05, 0.05), progress=False,
    ).table()  # fmt: skip
    assert torch.equal(run(model), logits)
    trained = found[found["method"] == "lora"]
    assert trained["margin change"].tolist() == pytest.approx([-0.05, 0.05], abs=0.01)
    assert len(found) == 8 and (found["KL other prompts"] > 0).all()
