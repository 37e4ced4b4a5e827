"""Sites and weights that a bridge offers, per family."""

import gc
import warnings
import weakref

import einops
import pytest
import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.families import FAMILIES, facts_of
from swd_lens.hosts.sites import Site
from tests import families
from tests.hosts.bridge.conftest import TOKENS, close, fresh, shared, swap_dense

APART = {"attn_q": (16, 16), "attn_k": (16, 8), "attn_v": (16, 8), "attn_o": (16, 16)}
WIDE = {"attn_q": (16, 32), "attn_k": (16, 16), "attn_v": (16, 16), "attn_o": (32, 16)}
FULL = dict.fromkeys(APART, (16, 16))
QKV = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (16, 16))
WHOLE = {"mlp": (16, 16)}
PACKED = {"attn_qkv": (16, 48), "attn_o": (16, 16)}
GATED = {"mlp_gate": (16, 32), "mlp_in": (16, 32), "mlp_out": (32, 16)}
PLAIN = {"mlp_in": (16, 32), "mlp_out": (32, 16)}
LINEAR = {
    **{"attn_qkv": (16, 64), "attn_gate": (16, 32), "attn_beta": (16, 4), "attn_decay": (16, 4), "attn_o": (32, 16)},
    **GATED,
}
# family -> per layer: sites, then their alternatives
TABLE: dict[str, list[tuple[dict, dict]]] = {
    "gpt2": [({**PACKED, "mlp_in": (16, 64), "mlp_out": (64, 16)}, {**QKV, **WHOLE})] * 2,
    "pythia": [({**PACKED, **PLAIN}, {**QKV, **WHOLE})] * 2,
    "llama": [({**APART, **GATED}, {"attn_qkv": (16, 32), **WHOLE})] * 2,
    "qwen2": [({**APART, **GATED}, {"attn_qkv": (16, 32), **WHOLE})] * 2,
    "qwen3": [({**WIDE, **GATED}, {"attn_qkv": (16, 64), **WHOLE})] * 2,
    "gemma2": [({**WIDE, **GATED}, {"attn_qkv": (16, 64), **WHOLE})] * 2,
    # The last layer attends; its q_proj holds a gate beside the query and is twice as wide.
    "qwen3_5": [(LINEAR, WHOLE)] * 3 + [({**WIDE, "attn_q": (16, 64), **GATED}, {"attn_qkv": (16, 96), **WHOLE})],
    # The MLP is no module of its own.
    "bert": [({**FULL, **PLAIN}, {"attn_qkv": (16, 48)})] * 2,
}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_sites_of_every_family(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is missing
        host = fresh(name)
    for got, which in ((host.sites(), 0), (host.alternatives(), 1)):
        expected = [(i, kind, *shape) for i, layer in enumerate(TABLE[name]) for kind, shape in layer[which].items()]
        assert [(s.layer, s.kind, s.d_in, s.d_out) for s in got] == expected


def _reference_weight(name: str, model: nn.Module, site: Site, linear: bool) -> torch.Tensor:
    family = FAMILIES["llama"] if name == "qwen3_5" and not linear else facts_of(shared(name).model).family
    module = model.get_submodule(f"{family.blocks[0]}.{site.layer}.{family.modules[site.kind]}")
    weight = module.weight if name == "gpt2" else module.weight.T
    if name == "pythia" and site.kind == "attn_qkv":
        # NeoX keeps each head's q, k and v together.
        return einops.rearrange(weight, "d_in (head three d_head) -> d_in (three head d_head)", head=2, three=3)
    return weight


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_weights_are_those_of_the_checkpoint(name: str):
    host, model = shared(name), families.reference(name)
    for site in host.sites():
        linear = site.layer < 3  # Qwen3.5's, all but the last
        assert torch.equal(host.weight(site), _reference_weight(name, model, site, linear)), site


def test_a_packed_weight_is_its_parts_side_by_side(kept):
    by_name = {site.name: site for site in kept.sites() + kept.alternatives()}
    packed = [s for s in by_name.values() if s.kind == "attn_qkv" and f"blocks.{s.layer}.attn_q" in by_name]
    assert packed
    for site in packed:
        parts = [by_name[f"blocks.{site.layer}.attn_{part}"] for part in "qkv"]
        assert torch.equal(kept.weight(site), torch.cat([kept.weight(part) for part in parts], dim=1))


class Table(nn.Module):
    """A matrix that is no linear map."""

    def __init__(self):
        super().__init__()
        self.entries = nn.Parameter(torch.ones(64, 64))


def test_what_holds_matrices_but_is_no_site_is_named():
    model = families.bridge("llama")
    experts = GeneralizedComponent("experts")
    experts._modules["_original_component"] = Table()
    for block in model.blocks:
        block._modules["mlp"] = experts
    with pytest.warns(UserWarning, match=r"blocks\.0\.mlp: Table"):
        host = host_of(model)
    assert {site.kind for site in host.sites()} == {"attn_q", "attn_k", "attn_v", "attn_o"}
    for block in model.blocks:
        block._modules["attn"] = experts
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.attn: Table"):
        host_of(model)


def test_what_was_found_is_remembered_while_it_is_true():
    model = families.bridge("llama")
    experts = GeneralizedComponent("experts")
    experts._modules["_original_component"] = Table()
    model.blocks[0]._modules["more"] = experts
    with pytest.warns(UserWarning, match=r"blocks\.0\.more: Table"):
        site = find_sites(model, "blocks.0.mlp_out")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert find_sites(model, "blocks.0.mlp_out")[0] is site
    leaf = model.blocks[0].mlp.out._modules["_original_component"]
    model.blocks[0].mlp.out._modules["_original_component"] = nn.Linear(leaf.in_features - 1, leaf.out_features)
    with pytest.warns(UserWarning):
        assert find_sites(model, "blocks.0.mlp_out")[0].d_in == site.d_in - 1
    alive = weakref.ref(model)
    del model, leaf, experts
    gc.collect()
    assert alive() is None


def test_a_subclass_of_linear_is_no_site():
    class ScaledLinear(nn.Linear):
        pass

    model = families.bridge("llama")
    model.blocks[0].mlp.out._modules["_original_component"].__class__ = ScaledLinear
    with pytest.warns(UserWarning, match=r"blocks\.0\.mlp\.mlp_out: ScaledLinear"):
        names = [site.name for site in host_of(model).sites()]
    assert "blocks.0.mlp_out" not in names and "blocks.1.mlp_out" in names


@pytest.mark.parametrize("more", [{"attn_only": True}, {"gated_mlp": True, "act_fn": "silu"}, {"normalization_type": None}])
def test_native_bridges(more):
    config = {"n_layers": 2, "d_model": 16, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_mlp": 24, "act_fn": "gelu"}
    model = TransformerBridge.boot_native({**config, "d_vocab": families.D_VOCAB, "seed": 0, **more}).eval()
    host = host_of(model)
    kinds = {site.kind for site in host.sites()}
    assert ("mlp_in" in kinds) != ("attn_only" in more) and ("mlp_gate" in kinds) == ("gated_mlp" in more)
    dense = host.run(TOKENS)
    undo = swap_dense(host, host.sites())
    assert close(host.run(TOKENS), dense)
    assert host.freeze_prefix(TOKENS) is None and close(host.last_logits(TOKENS), dense[:, -1])
    undo()
    assert torch.equal(host.run(TOKENS), dense)
