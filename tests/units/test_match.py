"""Factors and the matrix that a host has: hashes that are never stale, refusals under another processing, exact transport."""

from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import AttachError
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import attach, match
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.integrity import fingerprint
from swd_lens.units.match import described, rounded_checksum, weight_fingerprint
from tests import families
from tests.bridge.test_transport import FEW, TOKENS, assert_same, seen
from tests.micro import random_tokens, toy_model

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick

PROCESSINGS = {
    "fold_ln": {"fold_ln": True, "center_writing_weights": False, "fold_value_biases": False},
    "value biases": {"fold_ln": False, "center_writing_weights": False, "fold_value_biases": True},
    "everything": {"fold_ln": True, "center_writing_weights": True, "fold_value_biases": True},
}


# LayerNorm and biases everywhere; RMSNorm and biases of q, k and v.
two_families = pytest.mark.parametrize("raw", ["gpt2", "qwen2"], indirect=True)


def processed(family, **flags):
    model = families.hooked(family)
    model.load_and_process_state_dict(model.state_dict(), **flags, center_unembed=flags["center_writing_weights"])
    return model


@pytest.fixture(scope="module", params=families.HOOKED)
def raw(request):
    """A host as it was trained, and inexact factors of all of its matrices."""
    model = families.hooked(request.param)
    factors = swd.factorize(model, "all", sparsity=0.4, tokens=TOKENS, **FEW)
    return request.param, model, factors


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("flags", PROCESSINGS.values(), ids=PROCESSINGS)
def test_transport_gives_the_same_logits_and_the_same_z_there_and_back(raw, flags):
    family, model, factors = raw
    host = processed(family, **flags)
    moved = factors.transport(host)
    assert_same(seen(model, factors), seen(host, moved))
    for site, f in factors.items():
        assert torch.equal(moved[site].read != 0, f.read != 0) and torch.equal(moved[site].write, f.write)
        assert moved[site].provenance["processing"] == host_of(host).processing()
    back = moved.transport(model)
    assert_same(seen(model, factors), seen(model, back))


@pytest.mark.quick_cases(2)
def test_factors_of_a_processed_host_move_to_the_raw_one(raw):
    family, model, _ = raw
    host = processed(family, **PROCESSINGS["everything"])
    factors = swd.factorize(host, "all", sparsity=0.4, **FEW)
    assert_same(seen(host, factors), seen(model, factors.transport(model)))


@two_families
def test_without_transport_it_would_be_silently_wrong_and_is_refused(raw):
    family, model, factors = raw
    host = processed(family, **PROCESSINGS["everything"])
    with pytest.raises(AttachError, match=r"made with fold_ln=False.*this host has fold_ln=True.*factors\.transport\(model\)"):
        swd.attach(host, factors)
    blind = FactorSet({site: Factors(f.read, f.write) for site, f in factors.items()})
    (wrong, _), (right, _) = seen(host, blind), seen(model, factors)
    assert float((wrong - right).abs().max()) > 0.1
    # One by one, too: only a site that reads and writes as before may go in as it is.
    unchanged = []
    for site, f in factors.items():
        try:
            swd.attach(host, {site: f}).detach()
            unchanged.append(site)
        except AttachError:
            pass
    same = [s.name for s in find_sites(model) if torch.equal(host_of(model).weight(s), host_of(host).weight(s))]
    assert set(unchanged) <= set(same)


@two_families
def test_files_carry_what_transport_needs_and_one_matrix_moves_too(raw, tmp_path):
    family, model, factors = raw
    host = processed(family, **PROCESSINGS["everything"])
    factors.save(tmp_path)
    swd.FactorSet.load(tmp_path).transport(host).save(tmp_path / "moved")
    loaded, expected = swd.FactorSet.load(tmp_path / "moved"), seen(model, factors)
    assert_same(expected, seen(host, loaded))
    f = factors["blocks.0.mlp_in"]
    assert torch.equal(f.transport(host).read, loaded["blocks.0.mlp_in"].read)


@two_families
def test_what_does_not_lead_to_the_host_is_refused(raw):
    family, _, factors = raw
    host = processed(family, **PROCESSINGS["everything"])
    with torch.no_grad():
        host.blocks[1].mlp.W_in.add_(0.01 * torch.randn(host.blocks[1].mlp.W_in.shape))
    with pytest.raises(AttachError, match=r"blocks\.1\.mlp_in do not lead to this host's W: a sketch .* differs by"):
        factors.transport(host)
    nameless = {site: replace(f, origin=None) for site, f in factors.items()}
    with pytest.raises(AttachError, match="cannot be transported: they carry no origin"):
        FactorSet(nameless).transport(host)


def test_a_normalization_weight_of_zero_leads_one_way_only():
    model = toy_model()
    with torch.no_grad():
        model.blocks[0].ln2.w[3] = 0.0
    folded = toy_model()
    folded.load_state_dict(model.state_dict())
    folded.load_and_process_state_dict(folded.state_dict(), **PROCESSINGS["everything"])
    there = swd.factorize(model, "blocks.0.mlp_in", sparsity=0.4, outer_iterations=3, progress=False).transport(folded)
    assert there["blocks.0.mlp_in"].probe is None  # what stood behind the 0 is unknown
    with pytest.raises(AttachError, match="has a weight of exactly 0, so nothing leads back"):
        there.transport(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_host_in_half_precision_takes_the_factors_of_its_float32_checkpoint(dtype):
    model = families.hooked("gpt2")
    factors = swd.factorize(model, "mlp_out", sparsity=0.4, outer_iterations=3, progress=False)
    dense = model(TOKENS)
    model.to(dtype)
    with torch.no_grad(), swd.attach(model, factors):
        attached = model(TOKENS)
        assert attached.dtype == dtype
    assert attached.isfinite().all() and not torch.equal(attached.float(), dense)
    with torch.no_grad():
        model.blocks[1].mlp.W_out.mul_(1.5)
    with pytest.raises(AttachError, match=rf"made in float32, this host is {str(dtype)[6:]}, and its W is not theirs"):
        swd.attach(model, factors)


def test_a_bias_that_folds_without_a_bit_of_this_matrix_changing_is_seen():
    """ln2's weight is one and W_in is centred already: folding moves the bias alone."""
    raw = toy_model()
    with torch.no_grad():
        raw.blocks[0].ln2.w.fill_(1.0)
        raw.blocks[0].mlp.W_in.sub_(raw.blocks[0].mlp.W_in.mean(0, keepdim=True))
    folded = toy_model()
    folded.load_and_process_state_dict(raw.state_dict(), **PROCESSINGS["fold_ln"])
    with torch.no_grad():
        folded.blocks[0].mlp.W_in.copy_(raw.blocks[0].mlp.W_in)  # of rounding, too, not a bit
    factors = swd.factorize(raw, "blocks.0.mlp_in", sparsity=0.4, outer_iterations=3, progress=False)
    with pytest.raises(AttachError, match="made under another weight processing"):
        swd.attach(folded, {"blocks.0.mlp_in": factors["blocks.0.mlp_in"]})
    tokens = random_tokens(2, 6)
    seen_by = []
    for model, units in ((raw, factors), (folded, factors.transport(folded))):
        with torch.no_grad(), swd.attach(model, units):
            seen_by.append(model(tokens).log_softmax(-1))
    assert float((seen_by[0] - seen_by[1]).abs().max()) < 1e-5 * float(seen_by[0].abs().max())


def test_factors_that_do_not_say_of_which_w_they_are_are_moved_by_their_origin():
    model, host = families.hooked("gpt2"), processed("gpt2", **PROCESSINGS["everything"])
    f = swd.factorize(model, "blocks.0.mlp_in", sparsity=0.4, outer_iterations=3, progress=False)["blocks.0.mlp_in"]
    provenance = {key: value for key, value in f.provenance.items() if not key.startswith("weight_sha256")}
    moved = replace(f, provenance=provenance).transport(host)
    assert moved.offsets is not None
    assert_same(seen(model, {"blocks.0.mlp_in": f}), seen(host, {"blocks.0.mlp_in": moved}))


SITE = "blocks.1.mlp_out"


def test_a_matrix_is_hashed_once_a_host(monkeypatch):
    model, hashed = toy_model(), []
    monkeypatch.setattr(match, "fingerprint", lambda weight: hashed.append(tuple(weight.shape)) or fingerprint(weight))
    factors = baselines.svd(model, SITE)
    for _ in range(3):
        with attach(model, factors):
            pass
    host, site = host_of(model), find_sites(model, SITE)[0]
    assert weight_fingerprint(host, site) == fingerprint(model.blocks[1].mlp.W_out)
    about = described(host, site)
    assert about["weight_sha256"] == factors[SITE].provenance["weight_sha256"] and hashed == [(32, 16)]
    # Of the rounded matrix a checksum is enough; the rounded host has the same one.
    assert set(about["weight_checksums"]) == {"bfloat16", "float16"}
    model.to(torch.bfloat16)
    assert rounded_checksum(host_of(model), site, "bfloat16") == about["weight_checksums"]["bfloat16"]
    assert rounded_checksum(host_of(model), site, "float16") != about["weight_checksums"]["float16"]


def in_place(weight):
    with torch.no_grad():
        weight[1, 1] += 1e-3


def past_the_versions(weight):
    weight.data[1, 1] += 1e-3


def replaced(weight):
    weight.data = weight.data * 1.001


def swapped_rows(weight):
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]


@pytest.mark.parametrize("change", [in_place, past_the_versions, replaced, swapped_rows])
@pytest.mark.parametrize("site", [SITE, "blocks.0.attn_qkv"])
def test_a_changed_matrix_is_never_taken_for_the_old_one(change, site):
    model = toy_model()
    factors = baselines.svd(model, site)
    with attach(model, factors[site]):
        pass
    block = model.blocks[int(site.split(".")[1])]
    change(block.mlp.W_out if site == SITE else block.attn.W_V)
    with pytest.raises(AttachError, match="were made from another W"):
        attach(model, factors[site])
