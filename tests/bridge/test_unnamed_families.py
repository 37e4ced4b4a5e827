"""Architectures that nothing in swd_lens names: tiny checkpoints of them load as bridges, and every matrix is a site."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from tests import families

GATED = ["attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_in", "mlp_out"]
PLAIN = [kind for kind in GATED if kind != "mlp_gate"]
PACKED = ["attn_qkv", *PLAIN[3:]]
OLD = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "vocab_size": families.D_VOCAB}

# name of the class -> (what its configuration has besides, kinds of each block)
ARCHITECTURES = {
    "Olmo2": ({}, GATED),
    "Starcoder2": ({}, PLAIN),
    "Phi3": ({"pad_token_id": 0}, ["attn_qkv", *GATED[3:]]),
    "Glm4": ({"head_dim": 4, "pad_token_id": 0}, GATED),
    "Granite": ({}, GATED),
    "Nemotron": ({}, PLAIN),
    "SmolLM3": ({"pad_token_id": 0}, GATED),
    "GPTJ": (OLD, PLAIN),
    "CodeGen": (OLD, PACKED),
    "OPT": ({"ffn_dim": 32, "word_embed_proj_dim": 16}, PLAIN),
    "Falcon": ({}, PACKED),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_loads_and_every_matrix_is_a_site(name):
    more, kinds = ARCHITECTURES[name]
    config = more if more is OLD else {**families.SIZES, **more}
    folder = families.written(f"{name}ForCausalLM", f"{name}Config", config)
    model, tokens = swd.load_host(str(folder), kind="bridge"), families.some_tokens()
    assert [site.name for site in swd.find_sites(model)] == [f"blocks.{i}.{kind}" for i in range(2) for kind in kinds]
    with torch.no_grad():
        dense = model(tokens)
        plain = families.network(f"{name}ForCausalLM", folder)(tokens).logits
    assert (dense - plain).abs().max() < 1e-4 * plain.abs().max()
    exact = baselines.svd(model, "all")
    with swd.attach(model, exact), torch.no_grad():
        assert (model(tokens) - dense).abs().max() < 1e-4 * dense.abs().max()
    assert abs(swd.fidelity(model, exact, tokens).kl) < 1e-5
