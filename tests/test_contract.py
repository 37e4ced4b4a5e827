"""The contract that every source of units keeps, on every site: what it computes, what it counts, what it leaves behind."""

import pytest
import torch

from swd_lens.circuits import attribute, evaluate, intervention_hooks
from swd_lens.factors import Factors
from swd_lens.hosts import find_sites, host_of
from swd_lens.inject import attach
from tests.contract import CASES, EXACT, UNIT_SOURCES, read_of, write_of
from tests.micro import random_split, random_tokens, toy_model

SITES = ["blocks.1.attn_qkv", "blocks.0.attn_o", "blocks.0.mlp_in", "blocks.1.mlp_out", "all"]  # of the exact ones


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def sources(model):
    """Every source on every site, made once."""
    return {(name, sites): UNIT_SOURCES[name](model, sites) for name, sites in CASES}


def cases():
    return [pytest.param(name, sites, id=f"{name}-{sites}") for name, sites in CASES]


@pytest.mark.parametrize(("name", "sites"), cases())
def test_output_is_the_sum_of_units_plus_bias(model, sources, name, sites):
    factors, tokens = sources[name, sites], random_tokens(2, 7)
    inputs, outputs = {}, {}
    chosen, host = find_sites(model, sites), host_of(model)
    with (
        attach(model, factors),
        host.inputs(chosen, lambda site, h: inputs.update({site.name: h})),
        host.outputs(chosen, lambda site, y: outputs.update({site.name: y})),
    ):
        _, cache = model.run_with_cache(tokens)
    for site in chosen:
        f, z = factors[site.name], cache[site.hook_name]
        h = inputs[site.name]
        torch.testing.assert_close(z, h @ f.read if isinstance(f, Factors) else f.encode(h), rtol=1e-5, atol=1e-5)
        contributions = torch.einsum("bpu,uo->bpuo", z, write_of(f))  # one path per unit
        attn = model.blocks[site.layer].attn
        bias = {
            "mlp_in": lambda block: block.mlp.b_in,
            "mlp_out": lambda block: block.mlp.b_out,
            "attn_o": lambda block: block.attn.b_O,
            "attn_qkv": lambda _, attn=attn: torch.cat([attn.b_Q.flatten(), attn.b_K.flatten(), attn.b_V.flatten()]),
        }[site.kind](model.blocks[site.layer])
        if name == "transcoder":  # which learns its own
            bias = f.coder.b_out
        torch.testing.assert_close(outputs[site.name], contributions.sum(2) + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "sites"), cases())
def test_keep_all_is_the_identity_and_ablating_nothing_too(model, sources, name, sites):
    factors, tokens = sources[name, sites], random_tokens(3, 6)
    scores = attribute(model, factors, random_split(), positions="all")
    with attach(model, factors), torch.no_grad():
        plain = model(tokens)
        kept = model.run_with_hooks(tokens, fwd_hooks=intervention_hooks(scores, scores.ranking(), "keep"))
        untouched = model.run_with_hooks(tokens, fwd_hooks=intervention_hooks(scores, [], "ablate"))
    assert torch.equal(plain, kept)
    assert torch.equal(plain, untouched)


@pytest.mark.parametrize(("name", "sites"), cases())
def test_edges_are_the_nonzeros_of_read_and_write(model, sources, name, sites):
    for site, f in sources[name, sites].items():
        mlp = model.blocks[int(site.split(".")[1])].mlp
        # A channel reads with the matrix before; its bias is one more edge of the paper's count.
        read = torch.cat([mlp.W_in, mlp.b_in[None]]) if name == "channels" else read_of(f)
        by_hand = [
            sum(value != 0 for value in read[:, unit].tolist())
            + sum(value != 0 for value in write_of(f)[unit].tolist())
            for unit in range(f.n_units)
        ]
        assert f.edges_per_unit.tolist() == by_hand
        assert f.edges == sum(by_hand)


@pytest.mark.parametrize(("name", "sites"), cases())
def test_detach_restores_the_host_bit_for_bit(model, sources, name, sites):
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        logits = model(tokens)
    hooks, modules = list(model.hook_dict.items()), list(model.mod_dict.items())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    with attach(model, sources[name, sites]):
        assert list(model.state_dict()) == list(state)
    assert list(model.hook_dict.items()) == hooks  # same names, same order, same objects
    assert list(model.mod_dict.items()) == modules
    assert [type(module) for module in model.modules()] == classes
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], value) for key, value in state.items())
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sites", SITES)
def test_exact_sources_compute_what_the_host_computes(model, sources, name, sites):
    tokens = random_tokens(4, 9)
    with torch.no_grad():
        dense = model(tokens)
        with attach(model, sources[name, sites]):
            replaced = model(tokens)
    assert (dense - replaced).abs().max() <= 1e-5 * dense.abs().max()


@pytest.mark.parametrize(("name", "sites"), cases())
def test_curves_end_at_the_unpruned_replacement(model, sources, name, sites):
    factors, split = sources[name, sites], random_split()
    scores = attribute(model, factors, split)
    curve = evaluate(model, factors, split, scores)
    whole, empty = curve.rows.iloc[-1], curve.rows.iloc[0]
    assert whole["units"] == sum(f.n_units for f in factors.values())
    assert whole["edges"] == sum(int(f.edges_per_unit[f.valid_units].sum()) for f in factors.values())
    assert whole["q_keep"] == pytest.approx(curve.q_unpruned, abs=1e-5)
    assert empty["q_ablate"] == pytest.approx(curve.q_unpruned, abs=1e-5)
    # Ablating every unit and keeping none are the same intervention.
    assert whole["q_ablate"] == pytest.approx(empty["q_keep"], abs=1e-5)
