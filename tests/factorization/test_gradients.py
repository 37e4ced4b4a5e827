"""The loss's gradients at what sites write (gradients.py)."""

import torch

from swd_lens.factorization import gradients
from swd_lens.factorization.gradients import collect_output_grams
from swd_lens.hosts import find_sites
from swd_lens.tasks.streams import TokenStream
from tests.factorization.test_gradients_output import TOKENS


def test_the_host_is_left_as_it_was_and_may_be_frozen(model):
    sites = find_sites(model)
    logits, hooks = model(TOKENS), set(model.hook_dict)
    made = collect_output_grams(model, sites, TOKENS)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert set(model.hook_dict) == hooks and torch.equal(model(TOKENS), logits)
    model.requires_grad_(False)
    try:
        with torch.no_grad():
            again = collect_output_grams(model, sites, TOKENS)
        assert not any(p.requires_grad for p in model.parameters())
    finally:
        model.requires_grad_(True)
    for name in made:
        assert torch.equal(made[name], again[name])


def test_streams_other_sites_and_parts_of_logits(model, monkeypatch):
    name = "blocks.1.mlp_out"
    site = find_sites(model, name)
    made = collect_output_grams(model, site, TOKENS)[name]
    stream = TokenStream(lambda: iter(TOKENS), len(TOKENS))
    assert torch.equal(collect_output_grams(model, site, stream)[name], made)
    # A resumed run collects fewer sites in a pass: the same bits.
    assert torch.equal(collect_output_grams(model, find_sites(model), TOKENS)[name], made)
    monkeypatch.setattr(gradients, "TOKENS", 18)
    torch.testing.assert_close(collect_output_grams(model, site, TOKENS)[name], made)
    monkeypatch.setattr("swd_lens.hosts.predictions.CHUNK_BYTES", 4 * model.cfg.d_vocab * 5)
    torch.testing.assert_close(collect_output_grams(model, site, TOKENS)[name], made)
