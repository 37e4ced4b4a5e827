"""Stages: what is calibrated together; per-block and dense calibration, and the host in between."""

import pytest
import torch

import swd_lens as swd
import swd_lens.factorization.stages
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.stages import stages_of
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import Site
from swd_lens.units import Attachment
from tests.factorization.test_factorize import QUICK, assert_same, bits
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(12, 9)


def names(stages) -> list[list[str]]:
    return [[site.name.removeprefix("blocks.") for site in stage] for stage in stages]


def test_stages_by_hand():
    kinds = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_in", "mlp_out")
    sites = [Site(layer, kind, 10, 10) for layer in (0, 1) for kind in kinds]
    assert names(stages_of(sites, "sequential"))[:5] == [
        ["0.attn_q", "0.attn_k", "0.attn_v"],
        ["0.attn_o"],
        ["0.mlp_gate", "0.mlp_in"],
        ["0.mlp_out"],
        ["1.attn_q", "1.attn_k", "1.attn_v"],
    ]
    assert [len(stage) for stage in stages_of(sites, "per_block")] == [7, 7]
    assert [len(stage) for stage in stages_of(sites, "zero-data")] == [14]
    # A Gram takes 400 bytes: three of them have room in 1,299.
    assert [len(stage) for stage in stages_of(sites, "dense", gram_bytes=1299)] == [3, 3, 3, 3, 2]
    assert [len(stage) for stage in stages_of(sites, "dense", gram_bytes=1)] == [1] * 14  # one at least


def test_per_block_reads_behind_the_earlier_blocks_only(model, monkeypatch):
    made = swd.factorize(model, "all", **QUICK, tokens=TOKENS, calibration="per_block")
    assert made.provenance["calibration"] == "per_block"
    sites = {site.name: site for site in find_sites(model, "all")}
    first = [site for site in sites.values() if site.layer == 0]
    grams = {**collect_grams(model, first, TOKENS).by_site}
    with swd.attach(model, {site.name: made[site.name] for site in first}):
        grams |= collect_grams(model, [site for site in sites.values() if site.layer == 1], TOKENS).by_site
    for name in sites:
        alone = swd.solve(made[name].weight, grams[name], 0.5, tokens=TOKENS.numel(), preset="paper", outer_iterations=4)
        assert torch.equal(alone.read, made[name].read) and torch.equal(alone.write, made[name].write)
    # It is neither of the others.
    for other in ("sequential", "dense"):
        theirs = swd.factorize(model, "all", **QUICK, tokens=TOKENS, calibration=other)
        assert bits(theirs["blocks.0.attn_qkv"]) == bits(made["blocks.0.attn_qkv"])
        assert bits(theirs["blocks.1.mlp_out"]) != bits(made["blocks.1.mlp_out"])


def test_dense_grams_in_several_passes_are_those_of_one(model, monkeypatch):
    named = {**QUICK, "tokens": TOKENS, "calibration": "dense"}
    whole = swd.factorize(model, "all", **named)
    monkeypatch.setattr(swd_lens.factorization.stages.stages_of, "__defaults__", (1,))
    logits = model(TOKENS)
    assert_same(swd.factorize(model, "all", **named), whole)
    assert torch.equal(model(TOKENS), logits)


def test_blocks_are_not_run_again_for_every_later_site(model):
    """Eight stages of two blocks: a block runs once per stage of its own, once to go on, and twice to verify that."""
    ran: list[int] = []
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, layer=layer: ran.append(layer))
    try:
        swd.factorize(model, "all", **QUICK, tokens=random_tokens(64, 9), batch_size=4)  # 16 batches
    finally:
        for block in model.blocks:
            block._forward_pre_hooks.clear()
    batches, stages, probes = 16, 4, 8
    assert ran.count(0) <= batches * (stages + 1) + 4 + probes
    assert ran.count(1) <= batches * stages + 4 + probes


def test_what_a_host_of_another_dtype_remembers():
    """A float32 copy of every weight would be a second model."""
    model = toy_model().to(torch.bfloat16)
    f = swd.factorize(model, "blocks.0.mlp_out", **QUICK, tokens=TOKENS)["blocks.0.mlp_out"]
    assert f.weight is None and f.read.dtype == torch.float32
    weight = model.blocks[0].mlp.W_out.detach().float()
    assert f.relative_frobenius(weight) == pytest.approx(f.provenance["relative_frobenius"])
    with pytest.raises(ValueError, match="do not remember their dense weight"):
        f.relmse()
    exact = toy_model()
    kept = swd.factorize(exact, "blocks.0.mlp_out", **QUICK)["blocks.0.mlp_out"].weight
    assert kept.data_ptr() == exact.blocks[0].mlp.W_out.data_ptr()  # no copy


@pytest.mark.parametrize("number", [0, 3])
def test_interrupted_while_the_host_is_given_back(model, monkeypatch, number):
    """Nobody else holds the attachments then."""
    logits, hooks = model(TOKENS), list(model.hook_dict)
    detach, calls = Attachment.detach, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == number + 1:
            self._undo._steps[-1]()  # in the middle of it
            raise KeyboardInterrupt
        detach(self)

    monkeypatch.setattr(Attachment, "detach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swd.factorize(model, "all", **QUICK)
    assert list(model.hook_dict) == hooks and torch.equal(model(TOKENS), logits)
