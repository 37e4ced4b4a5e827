"""Attaching: the dense product is gone, the host is given back as it was, and every refusal says why."""

import copy
import io
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from transformer_lens.hook_points import HookPoint

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import AttachError, UnsupportedHostError
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import attach
from swd_lens.units.factors import Factors, FactorSet
from tests import families
from tests.contract import identity
from tests.hosts.test_interrupts import everything
from tests.micro import random_tokens, toy_model


@pytest.mark.parametrize(
    "overrides",
    [
        {"positional_embedding_type": "rotary", "rotary_dim": 8, "parallel_attn_mlp": True},
        {"attn_only": True, "d_mlp": None, "act_fn": None},
        {"normalization_type": "LNPre"},
        {"act_fn": "solu_ln"},
        {"dtype": torch.float64},
    ],
    ids=["rotary-parallel", "attention-only", "folded-layernorm", "solu_ln", "float64"],
)
def test_exact_factors_on_other_shapes_of_block(overrides):
    model = toy_model(**overrides)
    tokens = random_tokens(3, 8)
    with torch.no_grad():
        dense = model(tokens)
        for factors in (identity(model, "all"), baselines.svd(model, "all")):
            with attach(model, factors):
                assert (model(tokens) - dense).abs().max() <= 1e-5 * dense.abs().max()
            assert torch.equal(model(tokens), dense)


def test_the_dense_product_is_not_computed(model, factors):
    """With NaN in every dense matrix, the attached model still gives the right logits: nothing multiplies by them."""
    tokens = random_tokens(2, 6)
    weights = [
        weight
        for block in model.blocks
        for weight in (block.attn.W_Q, block.attn.W_K, block.attn.W_V, block.attn.W_O, block.mlp.W_in, block.mlp.W_out)
    ]
    with torch.no_grad():
        dense, kept = model(tokens), [weight.clone() for weight in weights]
        with attach(model, factors):
            for weight in weights:
                weight.data.fill_(float("nan"))  # past the versions, which the forward looks at
            # attn_o leaves TransformerLens' forward before W_O is touched, so NaN there must not show either.
            replaced = model(tokens)
            for weight, before in zip(weights, kept, strict=True):
                weight.data.copy_(before)
    assert (replaced - dense).abs().max() <= 1e-5 * dense.abs().max()


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("sent", "pair"),
    [(by_torch, False), *((lambda model, p=p: pickle.loads(pickle.dumps(model, p)), p == 2) for p in (0, 2, 5))],
    ids=["torch.save", "pickle 0", "pickle 2, of a pair", "pickle 5"],
)
def test_a_host_is_sent_with_its_units(model, factors, pair, sent):
    """Its class while units are attached was made on the fly, and nobody could import it."""
    tokens = random_tokens(2, 6)
    plain = model(tokens)
    given = {"blocks.0.mlp_out": Doubling()} if pair else factors
    with attach(model, given):
        attached = model(tokens)
        again = sent(model)
    with pytest.raises(RuntimeError, match=r"model\.W_out was read"):
        _ = again.W_out
    assert torch.equal(again(tokens), attached) and torch.equal(model(tokens), plain)
    assert len(find_sites(again)) == len(find_sites(model))  # which looks whether weights and factors are what they were
    with pytest.raises(AttachError, match="attached already"):
        attach(again, given)
    _, cache = again.run_with_cache(tokens)
    assert {name for name in cache if name.endswith("_unit")} == {
        site.hook_name for site in find_sites(model) if site.name in given
    }
    with torch.no_grad():
        again.blocks[0].mlp.W_out.mul_(2)
    with pytest.raises(AttachError, match="the host's matrix was changed"):
        again(tokens)
    model(tokens)


class Doubling:
    """An encode/decode pair at module level, as anything that is pickled has to be."""

    def encode(self, x):
        return x * 2

    def decode(self, z):
        return z[..., :16] / 2


def worked_out(model, tokens, saved):
    with torch.no_grad():
        return model(tokens).tolist(), float(saved["blocks.0.mlp_out"].product().sum())


@pytest.mark.slow
def test_a_host_and_a_loaded_set_are_sent_to_a_spawned_worker(model, factors, tmp_path):
    factors.save(tmp_path)
    given = model, random_tokens(2, 6), FactorSet.load(tmp_path)
    with attach(model, factors), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as workers:
        assert workers.submit(worked_out, *given).result() == worked_out(*given)


# ---------------------------------------------------------------------------------------------- restore and refuse


def test_attach_and_detach_without_a_with_block(model, factors):
    tokens = random_tokens(2, 6)
    logits = model(tokens)
    attachment = attach(model, factors)
    assert attachment.attached and "blocks.1.hook_attn_o_unit" in repr(attachment)
    attachment.detach()
    assert not attachment.attached
    assert torch.equal(model(tokens), logits)
    with pytest.raises(AttachError, match="not attached"):
        attachment.detach()
    with pytest.raises(AttachError, match="was detached"), attachment:
        pass


def test_nested_attachments_of_different_sites_in_any_order(model):
    tokens = random_tokens(2, 6)
    logits, hooks = model(tokens), list(model.hook_dict.items())
    first, second = baselines.svd(model, "mlp_in"), baselines.svd(model, ["mlp_out", "attn_o"])
    a, b = attach(model, first), attach(model, second)
    assert "blocks.0.hook_mlp_in_unit" in model.hook_dict and "blocks.0.hook_mlp_out_unit" in model.hook_dict
    a.detach()  # not the last one attached
    assert "blocks.0.hook_mlp_in_unit" not in model.hook_dict and "blocks.0.hook_mlp_out_unit" in model.hook_dict
    b.detach()
    assert list(model.hook_dict.items()) == hooks
    assert torch.equal(model(tokens), logits)


def test_what_cannot_be_attached(model, factors):
    with pytest.raises(AttachError, match="the set is empty"):
        attach(model, FactorSet({}))
    with pytest.raises(AttachError, match=r"are \(16, 32\), the host's matrix is \(16, 48\)"):
        attach(toy_model(d_mlp=48), factors)
    with pytest.raises(AttachError, match="does not know its site"):
        attach(model, Factors(torch.eye(32), torch.zeros(32, 16)))
    with pytest.raises(swd.UnknownSiteError, match=r"blocks\.9\.mlp_out"):
        attach(model, {"blocks.9.mlp_out": factors["blocks.0.mlp_out"]})


def test_unsupported_hosts_say_why(model, factors):
    with pytest.raises(UnsupportedHostError, match="got Linear"):
        attach(torch.nn.Linear(2, 2), factors)
    moe = toy_model(num_experts=2, experts_per_token=1)
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.mlp is a MoE; swd_lens injects into MLP, GatedMLP"):
        find_sites(moe)
    model.set_use_attn_result(True)
    with pytest.raises(UnsupportedHostError, match=r"use_attn_result is on: .*attn_o would have one z per head"):
        attach(model, factors)
    model.set_use_attn_result(False)
    model.set_use_split_qkv_input(True)
    with pytest.raises(UnsupportedHostError, match=r"use_split_qkv_input is on: .*attn_qkv would read another input"):
        attach(model, factors)
    model.set_use_split_qkv_input(False)
    with attach(model, factors):
        model.set_use_attn_result(True)
        with pytest.raises(RuntimeError, match="switched on while attn_o is attached"):
            model(random_tokens(1, 3))
    model.set_use_attn_result(False)


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_a_host_that_is_dense_for_a_moment_still_holds_its_units(kind):
    model = getattr(families, kind)("gpt2")
    first, second = identity(model, "blocks.0.mlp_in"), identity(model, "blocks.0.mlp_in")
    a = attach(model, first)
    with pytest.raises(AttachError, match="attached already; detach it first"), a.dense():
        attach(model, second)
    host, site = host_of(model), find_sites(model, "blocks.0.mlp_in")[0]
    with pytest.raises(RuntimeError, match="attached already; detach it first"):
        host.swap(site, torch.nn.Identity(), HookPoint(), lambda undo: None)
    z = model.run_with_cache(families.some_tokens())[1]["mlp_in_unit", 0]
    a.detach()
    assert not a.attached and z.shape == (2, 9, 64) and "blocks.0.hook_mlp_in_unit" not in model.hook_dict


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_weights_may_move_but_not_change_while_units_are_attached(kind):
    model = getattr(families, kind)("gpt2")
    attachment = attach(model, baselines.svd(model, "blocks.0.mlp_in"))
    with attachment.dense():
        model.to(torch.float64)
        assert host_of(model).run(families.some_tokens()).dtype == torch.float64
    assert host_of(model).run(families.some_tokens()).dtype == torch.float64
    model.to(torch.float32)
    with pytest.raises(RuntimeError, match="rewrites weights"), attachment.dense():
        model.process_weights_() if kind == "hooked" else model.enable_compatibility_mode()
    attachment.detach()
    model.process_weights_() if kind == "hooked" else model.enable_compatibility_mode()
    with pytest.raises(AttachError, match="made under another weight processing"):
        attach(model, attachment.factors)


def test_a_setup_while_attached_leaves_nothing_behind(model):
    """model.setup() writes every module into mod_dict, the projections' own parts as well."""
    before = list(model.mod_dict.items())
    outer = attach(model, identity(model, "blocks.0.mlp_in"))
    inner = attach(model, identity(model, "blocks.0.mlp_out"))
    model.setup()
    assert any(name.startswith("blocks.0.mlp.unit_projections.mlp_out") for name in model.mod_dict)
    inner.detach()
    left = [name for name in model.mod_dict if "unit_projections" in name]
    assert left and not any("mlp_out" in name for name in left)
    outer.detach()
    assert list(model.mod_dict.items()) == before


# ---------------------------------------------------------------------------------------------- without a handle


def test_detach_takes_out_what_is_attached_without_a_handle(model, factors):
    tokens = random_tokens(2, 6)
    with torch.no_grad():
        before, logits = everything(model), model(tokens)
    attach(model, {"blocks.0.mlp_out": factors["blocks.0.mlp_out"]})
    kept = attach(model, {"blocks.1.mlp_out": factors["blocks.1.mlp_out"]})
    with pytest.raises(AttachError, match=r"swd_lens\.detach\(model\)"):
        attach(model, factors)
    swd.detach(model)
    assert everything(model) == before and not kept.attached
    with torch.no_grad():
        assert torch.equal(model(tokens), logits)
    swd.detach(model)  # nothing is there, nothing is done
    assert everything(model) == before
    with pytest.raises(UnsupportedHostError):
        swd.detach("model")


def test_detach_knows_what_was_attached_to_a_host_itself_and_not_to_its_copies(model, factors):
    with attach(model, factors) as attachment:
        clone = copy.deepcopy(model)
        with pytest.raises(AttachError, match="came with a copy"):
            swd.detach(clone)
        assert attachment.attached
