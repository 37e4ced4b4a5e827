"""The readout, what weight processing can fold, and compatibility mode of a bridge."""

import pytest
import torch

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import Affine
from tests import families
from tests.hosts.bridge.conftest import TOKENS, close, fresh, shared, sites_with, snapshot, swap_dense


def test_the_readout_turns_the_last_block_into_logits(causal):
    norm, unembed = causal.readout()
    seen = {}
    hooks = [("ln_final.hook_normalized", lambda x, hook: seen.update(x=x.clone()))]
    with torch.no_grad():
        logits = causal.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    bias = getattr(causal.model.ln_final.original_component, "bias", None)
    x = seen["x"] * (1 if norm is None else norm) + (0 if bias is None else bias)
    y, cap = x @ unembed, getattr(causal.model.original_model.config, "final_logit_softcapping", None)
    assert close(y if cap is None else cap * torch.tanh(y / cap), logits)


def test_an_encoder_has_no_readout():
    with pytest.raises(UnsupportedHostError, match="BertArchitectureAdapter"):
        shared("bert").readout()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_affine_says_how_inputs_are_written(name):
    """h = x * scale + shift with x the normalized residual stream, as the bridge's own hooks show it."""
    host, folds = shared(name), name not in ("qwen3_5", "bert")
    reads = [site for site in host.sites() + host.alternatives() if site.kind not in ("attn_o", "mlp_out")]
    if not folds:
        assert all(host.affine(site) is None for site in reads)
        return
    seen, x = {}, {}
    hooks = [
        (f"blocks.{layer}.{ln}.hook_normalized", lambda value, hook: x.update({hook.name: value.clone()}))
        for layer in (0, 1)
        for ln in ("ln1", "ln2")
    ]
    with torch.no_grad(), host.inputs(reads, seen.__setitem__):
        host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    for site in reads:
        affine = host.affine(site)
        normalized = x[f"blocks.{site.layer}.{'ln1' if site.kind.startswith('attn') else 'ln2'}.hook_normalized"]
        assert affine is not None and affine.scale is not None
        assert (affine.shift is None) == (name not in ("gpt2", "pythia"))
        assert close(normalized * affine.scale + (0 if affine.shift is None else affine.shift), seen[site])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_affine_of_what_writes(name):
    host = shared(name)
    for site in host.sites():
        if site.kind == "mlp_out":
            assert host.affine(site) == Affine()
        if site.kind != "attn_o":
            continue
        affine = host.affine(site)
        if name == "qwen3_5":  # gated, or a recurrence
            assert affine is None
        elif name in ("gpt2", "pythia", "qwen2", "bert"):
            assert affine is not None and affine.scale is None and affine.shift is not None
            # Where the norm delivers its bias only (or, in BERT, the values are their biases), so does every attention pattern.
            where = "attn.v.hook_in" if name == "bert" else "ln1.hook_normalized"
            hooks, seen = [(f"blocks.{site.layer}.{where}", lambda h, hook: h * 0)], {}
            with torch.no_grad(), host.inputs([site], seen.__setitem__):
                host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            assert close(seen[site], affine.shift.expand_as(seen[site]))
        else:
            assert affine == Affine()


COMPATIBLE = ("gpt2", "pythia", "llama", "qwen2", "qwen3", "gemma2")


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", COMPATIBLE)
@pytest.mark.parametrize("packed", [True, False])
def test_compatibility_mode(name, packed):
    """Folded and centred: the same swaps on the processed weights, and nothing left to fold."""
    host = fresh(name)
    raw = host.processing()
    assert not any(raw[key] for key in ("fold_ln", "center_writing_weights", "compatibility_mode"))
    assert raw["fold_value_biases"] == (name not in ("gpt2", "pythia", "qwen2"))
    host.model.enable_compatibility_mode()
    centred = name in ("gpt2", "pythia")  # RMSNorm does not centre
    expected = {"fold_ln": True, "center_writing_weights": centred, "fold_value_biases": True, "compatibility_mode": True}
    assert host.processing() == expected
    assert all(host.affine(site) == Affine() for site in host.sites() + host.alternatives())
    assert host.readout()[0] is None
    sites = sites_with(host, packed)
    with torch.no_grad():
        dense = host.run(TOKENS)
        h, y = {}, {}
        with host.inputs(sites, h.__setitem__), host.outputs(sites, y.__setitem__):
            assert close(host.run(TOKENS), dense)
        assert h.keys() == y.keys() == set(sites)
        before = snapshot(host.model)
        undo = swap_dense(host, sites)
        assert close(host.run(TOKENS), dense)
        _, cache = host.model.run_with_cache(TOKENS)
        assert all(torch.allclose(cache[s.hook_name], h[s] @ host.weight(s), atol=1e-4) for s in sites)
        prefix = host.freeze_prefix(TOKENS)
        assert close(host.last_logits(TOKENS, prefix), dense[:, -1])
        undo()
        assert snapshot(host.model) == before
        assert torch.equal(host.run(TOKENS), dense)


def test_processed_mlps_call_their_projections_only_while_needed():
    host = fresh("llama")
    host.model.enable_compatibility_mode()
    mlp, sites = host.model.blocks[0].mlp, [site for site in host.sites() if site.name == "blocks.0.mlp_in"]
    undo = swap_dense(host, sites)
    with host.inputs(sites, lambda site, h: None):
        undo()
        assert not mlp._use_processed_weights
    assert mlp._use_processed_weights and host.model.blocks[1].mlp._use_processed_weights


def test_processing_without_folding():
    host = fresh("gpt2")
    host.model.enable_compatibility_mode(fold_ln=False, fold_value_biases=False)
    folded = {key: value for key, value in host.processing().items() if key.startswith("fold")}
    assert folded == {"fold_ln": False, "fold_value_biases": False}
    assert host.processing()["center_writing_weights"] and host.processing()["compatibility_mode"]
    o = next(site for site in host.sites() if site.kind == "attn_o")
    affine = host.affine(o)
    assert affine is not None and affine.shift is not None
