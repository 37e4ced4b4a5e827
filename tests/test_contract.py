"""The contract that every source of units keeps, on every site: what it computes, what it counts, what it leaves behind."""

from importlib.util import find_spec

import pytest
import torch

from swd_lens.circuits import attribute, evaluate, intervention_hooks
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import attach
from tests.contract import CASES, EXACT, NEED_SAELENS, UNIT_SOURCES, constant_of, path_of, read_edges_of, taken_by, write_edges_of
from tests.micro import random_split, random_tokens, toy_model

pytestmark = pytest.mark.filterwarnings("ignore:the mean margin of")  # of a model with random weights

SITES = ["blocks.1.attn_qkv", "blocks.0.attn_o", "blocks.0.mlp_in", "blocks.1.mlp_out", "all"]  # of the exact ones


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def sources(model):
    """Every source on every site, made once, when it is first asked for: of the same cases in all quick tests."""
    made = {}

    def of(name, sites):
        if (name, sites) not in made:
            made[name, sites] = UNIT_SOURCES[name](model, sites)
        return made[name, sites]

    return of


def cases():
    missing = pytest.mark.skipif(find_spec("sae_lens") is None, reason="needs sae_lens, which is not installed here")
    return [
        pytest.param(name, sites, id=f"{name}-{sites}", marks=[missing] if name in NEED_SAELENS else []) for name, sites in CASES
    ]


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(("name", "sites"), cases())
def test_output_is_the_sum_of_units_plus_bias_and_detach_restores_the_host_bit_for_bit(model, sources, name, sites):
    factors, tokens = sources(name, sites), random_tokens(2, 7)
    with torch.no_grad():
        logits = model(tokens)
    hooks, modules = list(model.hook_dict.items()), list(model.mod_dict.items())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    inputs, outputs = {}, {}
    # Of a whole MLP these may be its two matrices.
    chosen, host = [site for one in factors for site in find_sites(model, one)], host_of(model)
    with (
        torch.no_grad(),
        attach(model, factors),
        host.inputs(chosen, lambda site, h: inputs.update({site.name: h})),
        host.outputs(chosen, lambda site, y: outputs.update({site.name: y})),
    ):
        _, cache = model.run_with_cache(tokens)
        assert list(model.state_dict()) == list(state)
    for site in chosen:
        f, z = factors[site.name], cache[site.hook_name]
        taken = taken_by(f, model, site, inputs[site.name])
        torch.testing.assert_close(z, taken, rtol=1e-5, atol=1e-5)
        contributions = torch.einsum("bpu,uo->bpuo", z, path_of(f, model, site))  # one path per unit
        total = contributions.sum(2) + constant_of(f, model, site)
        torch.testing.assert_close(outputs[site.name], total, rtol=1e-4, atol=1e-4)
    assert list(model.hook_dict.items()) == hooks  # same names, same order, same objects
    assert list(model.mod_dict.items()) == modules and [type(module) for module in model.modules()] == classes
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[key], value) for key, value in state.items())
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(("name", "sites"), cases())
def test_keep_all_is_the_identity_and_ablating_nothing_too(model, sources, name, sites):
    factors, tokens = sources(name, sites), random_tokens(3, 6)
    scores = attribute(model, factors, random_split(4), positions="all")
    with attach(model, factors), torch.no_grad():
        plain = model(tokens)
        kept = model.run_with_hooks(tokens, fwd_hooks=intervention_hooks(scores, scores.ranking(), "keep"))
        untouched = model.run_with_hooks(tokens, fwd_hooks=intervention_hooks(scores, [], "ablate"))
    assert torch.equal(plain, kept)
    assert torch.equal(plain, untouched)


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(("name", "sites"), cases())
def test_edges_are_the_nonzeros_of_read_and_write(model, sources, name, sites):
    for one, f in sources(name, sites).items():
        (site,) = find_sites(model, one)
        reads, writes = read_edges_of(f, model, site), write_edges_of(f, site)
        by_hand = [read + write for read, write in zip(reads, writes, strict=True)]
        assert f.edges_per_unit.tolist() == by_hand
        assert f.edges == sum(by_hand)
        both = [read > 0 and write > 0 for read, write in zip(reads, writes, strict=True)]
        assert f.valid_units.tolist() == both


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sites", SITES)
def test_exact_sources_compute_what_the_host_computes(model, sources, name, sites):
    tokens = random_tokens(4, 9)
    with torch.no_grad():
        dense = model(tokens)
        with attach(model, sources(name, sites)):
            replaced = model(tokens)
    assert (dense - replaced).abs().max() <= 1e-5 * dense.abs().max()


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize(("name", "sites"), cases())
def test_curves_end_at_the_unpruned_replacement(model, sources, name, sites):
    factors, split = sources(name, sites), random_split(4)
    scores = attribute(model, factors, split)
    curve = evaluate(model, factors, split, scores, grid=[1], random_sets=0)  # and the empty circuit, and the whole set
    whole, empty = curve.rows.iloc[-1], curve.rows.iloc[0]
    assert whole["units"] == sum(f.n_units for f in factors.values())
    assert whole["edges"] == sum(int(f.edges_per_unit[f.valid_units].sum()) for f in factors.values())
    assert whole["q keep"] == pytest.approx(curve.q_full, abs=1e-5)
    assert empty["q ablate"] == pytest.approx(curve.q_full, abs=1e-5)
    # Ablating every unit and keeping none are the same intervention.
    assert whole["q ablate"] == pytest.approx(empty["q keep"], abs=1e-5)
