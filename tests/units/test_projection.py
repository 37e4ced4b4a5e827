"""Weights and factors under an attachment: whoever changes them is told at the next forward or the next call.

On a HookedTransformer; tests/bridge/test_watch.py asks the same of bridges.
"""

import copy
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError
from swd_lens.hosts import find_sites
from swd_lens.units import UnitSet, attach
from swd_lens.units.factors import MEASURED, Factors, FactorSet
from swd_lens.units.integrity import Offsets
from tests.contract import identity
from tests.edited import FACTOR_SEEN_BY_VALUE, FACTOR_SEEN_BY_VERSION, SEEN_BY_VALUE, SEEN_BY_VERSION
from tests.micro import random_split, random_tokens, toy_model
from tests.units.test_coder import Coder

WEIGHT = r"{}: the host's matrix was changed while units are attached to it"
FACTORS = r"{}: read, write or offsets were changed in place after these factors were made"
TOKENS = random_tokens(2, 7)
# Where each matrix is kept: (site, part of the block, parameter).
PLACES = [
    ("blocks.0.attn_qkv", "attn", "W_Q"),
    ("blocks.0.attn_qkv", "attn", "W_V"),
    ("blocks.0.attn_o", "attn", "W_O"),
    ("blocks.1.mlp_in", "mlp", "W_in"),
    ("blocks.1.mlp_out", "mlp", "W_out"),
]


def every_edit_and_place_once(edits):
    names = list(edits)
    cases = [(names[i % len(names)], *PLACES[i % len(PLACES)]) for i in range(max(len(names), len(PLACES)))]
    return pytest.mark.parametrize(("edit", "site", "part", "name"), cases)


def random_factors(site, seed=0):
    generator = torch.Generator().manual_seed(seed)
    read, write = (torch.randn(shape, generator=generator) for shape in ((site.d_in, 6), (6, site.d_out)))
    return Factors(read * (read.abs() > 0.5), write * (write.abs() > 0.5), provenance={"site": site.name})


def everywhere(model):
    return {site.name: random_factors(site, i) for i, site in enumerate(find_sites(model))}


def factorized(model, sites="blocks.1.mlp_*"):
    return swd.factorize(model, sites, sparsity=0.4, outer_iterations=2, progress=False)


# ---------------------------------------------------------------------------------------------- the host's matrices


@every_edit_and_place_once(SEEN_BY_VERSION)
def test_a_changed_weight_ends_the_next_forward(model, edit, site, part, name):
    attachment = attach(model, everywhere(model))
    model(TOKENS)
    SEEN_BY_VERSION[edit](getattr(model.blocks[int(site[7])], part), name)
    for _ in range(2):  # and every one after it
        with pytest.raises(AttachError, match=WEIGHT.format(site)):
            model(TOKENS)
    with pytest.raises(AttachError, match=WEIGHT.format(site)):
        swd.find_sites(model)
    attachment.detach()  # it was said, and the host is what its weights are
    model(TOKENS)
    assert not any("unit" in name for name in model.hook_dict) and "_standing_units" not in model.__dict__
    attach(model, everywhere(model)).detach()


@every_edit_and_place_once(SEEN_BY_VALUE)
def test_what_versions_do_not_see_ends_the_next_call(model, edit, site, part, name):
    factors = everywhere(model)
    split = random_split()
    others = {"blocks.0.mlp_in": factors.pop("blocks.0.mlp_in")}
    with attach(model, factors) as attachment:
        SEEN_BY_VALUE[edit](getattr(model.blocks[int(site[7])], part), name)
        for call in (
            lambda: swd.find_sites(model),
            lambda: attach(model, others),
            lambda: swd.fidelity(model, others, TOKENS),
            lambda: swd.attribute(model, others, split),
            lambda: swd.factorize(model, "blocks.0.mlp_in", progress=False),
        ):
            with pytest.raises(AttachError, match=WEIGHT.format(site)):
                call()
    assert not attachment.attached and not any("unit" in name for name in model.hook_dict)


@pytest.mark.parametrize(
    "leave",
    [lambda a, m: a.detach(), lambda a, m: a.__exit__(None, None, None), lambda a, m: swd.detach(m)],
    ids=["handle", "block", "by name"],
)
def test_the_latest_call_that_notices_is_detach(model, leave):
    attachment = attach(model, identity(model, "blocks.1.mlp_out"))
    model.blocks[1].mlp.W_out.data.mul_(2)
    model(TOKENS)  # the old matrix, silently: nothing counts what .data writes
    with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp_out")):
        leave(attachment, model)
    assert not attachment.attached and "hook_mlp_out_unit" not in model.blocks[1]._modules


def test_another_exception_is_not_covered_by_this_one(model):
    with pytest.raises(KeyError, match="the user's"), attach(model, everywhere(model)):
        model.blocks[1].mlp.W_out.data.mul_(2)
        raise KeyError("the user's")


def test_weights_of_sites_without_units_are_the_user_s_own(model):
    with attach(model, {"blocks.1.mlp_out": everywhere(model)["blocks.1.mlp_out"]}), torch.no_grad():
        for parameter in (model.blocks[1].mlp.b_out, model.blocks[1].mlp.W_in, model.embed.W_E):
            parameter.mul_(2)
        model(TOKENS)
        swd.find_sites(model)


def test_values_that_are_put_back_are_no_change(model):
    weight = model.blocks[1].mlp.W_out
    kept = weight.detach().clone()
    with attach(model, everywhere(model)), torch.no_grad():
        before = model(TOKENS)
        weight.mul_(2)
        weight.copy_(kept)
        assert torch.equal(model(TOKENS), before)
        model.blocks[1].load_state_dict(copy.deepcopy(model.blocks[1].state_dict()), strict=False)
        assert torch.equal(model(TOKENS), before)


def test_while_the_host_is_dense_its_weights_count_only_afterwards(model):
    with attach(model, everywhere(model)) as attachment, torch.no_grad():
        with attachment.dense():
            model.blocks[1].mlp.W_out.mul_(2)
            model(TOKENS)
        with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp_out")):
            model(TOKENS)


@pytest.mark.parametrize("changed", ["before the move", "after it"])
def test_a_host_may_be_moved_to_another_dtype(model, changed):
    with attach(model, factorized(model)) as attachment:
        if changed == "before the move":  # which the fingerprint shows
            model.blocks[1].mlp.W_in.data.mul_(2)
            model.to(torch.bfloat16)
        else:
            model.to(torch.bfloat16)
            model(TOKENS)
            swd.find_sites(model)
            model.blocks[1].mlp.W_in.data.mul_(2)
        with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp_in")):
            swd.find_sites(model)
        assert attachment.attached


def test_units_of_an_encode_decode_pair_watch_the_weight_alone(model):
    coder = Coder(torch.randn(32, 4), torch.randn(4, 16))
    with attach(model, {"blocks.1.mlp_out": coder}), torch.no_grad():
        coder._weights[0].mul_(2)  # used as it is: whoever trains it writes to it
        model(TOKENS)
        model.blocks[1].mlp.W_out.mul_(2)
        with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp_out")):
            model(TOKENS)


def test_units_of_a_whole_mlp_watch_all_of_its_matrices(model):
    for name in ("W_in", "W_out"):
        with attach(model, {"blocks.1.mlp": Coder(torch.randn(16, 4), torch.randn(4, 16))}), torch.no_grad():
            model(TOKENS)
            getattr(model.blocks[1].mlp, name).mul_(2)
            with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp")):
                model(TOKENS)


# ---------------------------------------------------------------------------------------------- the factors


@pytest.mark.parametrize("kernel", ["dense", "sparse"])
@pytest.mark.parametrize("which", ["read", "write"])
@pytest.mark.parametrize("edit", FACTOR_SEEN_BY_VERSION)
def test_changed_factors_end_the_next_forward(model, edit, which, kernel, monkeypatch):
    monkeypatch.setattr("swd_lens.units.kernels.choose", lambda *_: kernel)
    factors = everywhere(model)
    attachment = attach(model, factors)
    FACTOR_SEEN_BY_VERSION[edit](getattr(factors["blocks.1.mlp_in"], which))
    with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_in")):
        model(TOKENS)
    attachment.detach()
    with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_in")):
        attach(model, factors)
    assert not any("unit" in name for name in model.hook_dict)


@pytest.mark.parametrize(
    ("edit", "which"), list(zip(FACTOR_SEEN_BY_VERSION | FACTOR_SEEN_BY_VALUE, ["read", "write"] * 3, strict=True))
)
def test_changed_factors_are_refused_by_every_call(model, edit, which, tmp_path):
    factors = factorized(model)
    name = "blocks.1.mlp_out"
    units, other = UnitSet.of(model, factors), toy_model()
    (FACTOR_SEEN_BY_VERSION | FACTOR_SEEN_BY_VALUE)[edit](getattr(factors[name], which))
    calls = {
        "attach": lambda: attach(model, factors),
        "units": lambda: attach(model, units),
        "alone": lambda: attach(model, factors[name]),
        "fidelity": lambda: swd.fidelity(model, factors, TOKENS),
        "attribute": lambda: swd.attribute(model, factors, random_split()),
        "finetune": lambda: swd.finetune(model, factors, random_tokens(32, 8), steps=1, progress=False),
        "save": lambda: factors.save(tmp_path / "set"),
        "save one": lambda: factors[name].save(tmp_path / "single"),
        "transport": lambda: factors.transport(other),
        "summary": lambda: factors.summary(),
    }
    for what, call in calls.items():
        with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_out")):
            call()
            pytest.fail(what)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("edit", FACTOR_SEEN_BY_VALUE)
def test_factors_that_versions_do_not_see_end_the_next_call(model, edit):
    factors = everywhere(model)
    with attach(model, factors) as attachment:
        FACTOR_SEEN_BY_VALUE[edit](factors["blocks.1.mlp_in"].write)
        with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_in")):
            swd.find_sites(model)
        assert attachment.attached
    with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_in")), attach(model, everywhere(model)) as again:
        again.factors["blocks.1.mlp_in"].write.data.mul_(2)
        model(TOKENS)
    assert not again.attached


def test_changed_offsets_are_changed_factors(model):
    f = factorized(model)["blocks.1.mlp_in"]
    offsets = Offsets(torch.ones(f.n_units), torch.ones(f.d_out))
    with attach(model, {"blocks.1.mlp_in": replace(f, offsets=offsets)}):
        model(TOKENS)
        offsets.unit.mul_(2)
        with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_in")):
            model(TOKENS)


def test_replace_makes_new_factors_without_the_old_errors_and_probe(model, tmp_path):
    factors = factorized(model)
    f = factors["blocks.1.mlp_out"]
    assert f.probe is not None and {"relmse", "relative_frobenius"} <= set(f.provenance)
    same = replace(f, provenance={**f.provenance, "note": 1})
    assert same.probe is f.probe and same.provenance["relmse"] == f.provenance["relmse"]
    f.write.mul_(3)
    for new in (replace(f), replace(f, write=f.write.clone()), replace(same, read=2 * f.read)):
        assert new.probe is None and not set(MEASURED) & set(new.provenance)
        assert {"site", "weight_sha256"} <= set(new.provenance)
        new.save(tmp_path)
        loaded = Factors.load(tmp_path)
        assert torch.equal(loaded.write, new.write) and loaded.probe is None and "relmse" not in loaded.provenance
        with attach(model, FactorSet({**factors, "blocks.1.mlp_out": new}, factors.provenance)):
            model(TOKENS)
    f.read.data.mul_(3)
    assert replace(f).probe is None and torch.equal(replace(f).read, f.read)
    with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_out")):
        f.save(tmp_path)


def test_copies_of_factors_are_factors_like_any(model):
    f = factorized(model)["blocks.1.mlp_out"]
    for again in (copy.deepcopy(f), f.to("cpu"), replace(f, read=f.read.clone())):
        again.require_unedited()
        assert again.probe is not None and "relmse" in again.provenance
    other = copy.deepcopy(f)
    other.read.mul_(2)
    with pytest.raises(AttachError, match=FACTORS.format(r"blocks\.1\.mlp_out")):
        copy.deepcopy(other).require_unedited()
    f.require_unedited()


@pytest.mark.parametrize(
    ("density", "mode"), [(1.0, True), (0.02, False)], ids=["dense, made under it", "sparse, attached under it"]
)
def test_no_unit_is_an_inference_tensor(density, mode):
    model, name = toy_model(d_model=64, d_mlp=256, d_head=32), "blocks.1.mlp_out"
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(mode):
        read, write = (torch.randn(shape, generator=generator) for shape in ((256, 64), (64, 64)))
        f = Factors(
            *(t * (torch.rand(t.shape, generator=generator) < density) for t in (read, write)),
            offsets=Offsets(torch.ones(64), torch.ones(64)),
        )
    model.double()  # the factors are cast to it
    with torch.inference_mode(not mode):
        attachment = attach(model, {name: f})
    assert f"read {'dense' if density == 1 else 'sparse'}" in repr(model.blocks[1].mlp.unit_projections)
    model.add_hook("blocks.1.hook_mlp_out_unit", lambda z, hook: z)
    model(TOKENS).sum().backward()
    model.reset_hooks()
    attachment.detach()
    scores = swd.attribute(model, {name: f}, random_split())
    same = Factors(f.read.clone(), f.write.clone(), offsets=Offsets(torch.ones(64), torch.ones(64)))
    assert torch.equal(scores.scores[name], swd.attribute(model, {name: same}, random_split()).scores[name])


def test_a_deep_copy_watches_its_own_weights_and_factors(model):
    factors = {"blocks.1.mlp_out": everywhere(model)["blocks.1.mlp_out"]}
    with attach(model, factors):
        other = copy.deepcopy(model)
        assert torch.equal(other(TOKENS), model(TOKENS))
        with torch.no_grad():
            other.blocks[1].mlp.W_out.mul_(2)
        with pytest.raises(AttachError, match=WEIGHT.format(r"blocks\.1\.mlp_out")):
            other(TOKENS)
        model(TOKENS)


def test_rows_that_are_exchanged_in_place_change_the_fingerprint(model):
    factors, weight = factorized(model), model.blocks[1].mlp.W_out
    attach(model, factors).detach()
    weight.data.copy_(weight.data[torch.tensor([1, 0, *range(2, 32)])])
    with pytest.raises(AttachError, match=r"blocks\.1\.mlp_out"):
        attach(model, factors)
