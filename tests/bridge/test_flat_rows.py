"""OPT flattens rows and positions before its MLP's matrices: units and readers see (batch, pos, d) all the same.

Scores and curves of it: test_circuits.py; graphs: test_graph.py.
"""

import copy

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import host_of
from swd_lens.hosts.recording import record
from tests import families

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick
TOKENS = families.some_tokens(3, 11)


@pytest.fixture(scope="module")
def model():
    return families.bridge("opt")


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens)


def test_inputs_and_outputs_are_shown_by_row_and_position(model):
    host = host_of(model)
    sites = [site for site in host.sites() if site.kind.startswith("mlp")]
    shapes, out = [], model.blocks[0].mlp.out.original_component
    with_hook = out.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    seen = record(host, TOKENS, inputs=sites, outputs=sites)
    with_hook.remove()
    assert shapes == [(33, 32)]  # else there would be nothing to test here
    for site in sites:
        assert seen.inputs[site.name].shape == (3, 11, site.d_in)
        assert seen.outputs[site.name].shape == (3, 11, site.d_out)
    alone = record(host, TOKENS[1:2, :5], inputs=sites)
    for site in sites:
        torch.testing.assert_close(alone.inputs[site.name][0], seen.inputs[site.name][1, :5])
    assert not any(block._forward_pre_hooks for block in model.blocks)


def test_units_have_rows_and_positions_and_exact_ones_give_the_dense_logits(model):
    dense, exact = logits_of(model), baselines.svd(model, "all")
    with torch.no_grad(), swd.attach(model, exact) as attachment:
        replaced, cache = model.run_with_cache(TOKENS)
        twin = logits_of(copy.deepcopy(model), TOKENS[:2, :7])
        for site in attachment.sites:
            assert cache[site.hook_name].shape == (3, 11, exact[site.name].n_units)
        results = swd.stack_unit_results(cache, exact["mlp_out"])
        written = cache["resid_post", 1] - cache["resid_mid", 1]
    assert (replaced - dense).abs().max() < 1e-5 * dense.abs().max()
    assert (twin - dense[:2, :7]).abs().max() < 1e-5 * dense.abs().max()
    assert results.shape[1:] == (3, 11, 16)
    bias = model.blocks[1].mlp.out.original_component.bias
    torch.testing.assert_close(results[16:].sum(0) + bias, written, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits_of(model), dense) and not any(block._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("calibrated", [False, True])
def test_it_is_factorized_and_measured(model, calibrated):
    dense = logits_of(model)
    tokens = families.some_tokens(40, 32, seed=1) if calibrated else None
    factors = swd.factorize(
        model, "mlp_out", tokens=tokens, sparsity=0.9, outer_iterations=2, progress=False
    )  # a KL far above rounding
    found = swd.fidelity(model, factors, TOKENS, local=True)
    with torch.no_grad(), swd.attach(model, factors):
        replaced = model(TOKENS)
    log_p, log_q = (x[:, :-1].double().log_softmax(-1) for x in (dense, replaced))
    assert found.kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-3)
    for site in (one for one in host_of(model).sites() if one.kind == "mlp_out"):
        h, weight = record(host_of(model), TOKENS, inputs=[site]).inputs[site.name], host_of(model).weight(site)
        f = factors[site.name]
        error = (h @ (weight - f.read @ f.write)).square().sum() / (h @ weight).square().sum()
        assert found.local_relmse[site.name] == pytest.approx(float(error), rel=1e-3)


def test_a_single_token_and_generated_text(model):
    how = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False, "prepend_bos": True}
    dense, written = logits_of(model, TOKENS[:1, :1]), model.generate("The list is", **how)
    with torch.no_grad(), swd.attach(model, baselines.svd(model, "mlp_*")):
        assert (model(TOKENS[:1, :1]) - dense).abs().max() < 1e-5 * dense.abs().max()
        assert model.generate("The list is", **how) == written
