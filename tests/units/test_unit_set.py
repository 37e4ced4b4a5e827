"""UnitSet: whatever way units are given, one mapping, whose hashes are taken once."""

import pytest
import torch

from swd_lens.base.errors import AttachError
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import UnitSet, attach, unit_set
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import fingerprint
from tests.micro import toy_model
from tests.units.test_coder import OpenCoder

SITE = "blocks.1.mlp_out"


def ones(d_in):
    return torch.ones(d_in, 5), torch.ones(5, 16)


def test_what_was_given_becomes_one_mapping_in_execution_order(model, factors):
    whole = UnitSet.of(model, factors)
    assert list(whole) == [site.name for site in find_sites(model)] == [site.name for site in whole.sites]
    assert whole.provenance == factors.provenance and whole[SITE] is factors[SITE]
    assert whole.sizes[SITE] == 16 and whole.n_units == factors.n_units
    backwards = UnitSet.of(host_of(model), {"blocks.1.mlp.W_out": factors[SITE], "blocks.0.attn_o": OpenCoder(*ones(16))})
    assert list(backwards) == ["blocks.0.attn_o", SITE] and list(backwards.coders) == ["blocks.0.attn_o"]
    assert list(backwards.factors) == [SITE] and backwards.factors[SITE] is factors[SITE]
    assert list(UnitSet.of(model, factors[SITE])) == [SITE]
    with pytest.raises(AttachError, match="the set is empty"):
        UnitSet.of(model, {})


def test_a_set_of_this_host_is_handed_on_as_it_is(model, factors):
    units = UnitSet.of(model, factors)
    assert UnitSet.of(model, units) is units
    with attach(model, units) as attachment:
        assert attachment.factors is units
    other = UnitSet.of(toy_model(), units)
    assert other is not units and other[SITE] is units[SITE] and other.provenance == units.provenance


def test_vectors_and_edges(model, factors):
    coder = OpenCoder(*ones(32))
    units = UnitSet.of(model, {"blocks.0.mlp_out": factors["blocks.0.mlp_out"], SITE: coder})
    assert units.read_vectors("blocks.0.mlp_out") is factors["blocks.0.mlp_out"].read
    assert units.write_vectors("blocks.0.mlp_out") is factors["blocks.0.mlp_out"].write
    assert units.read_vectors(SITE) is coder.W_enc and units.write_vectors(SITE) is coder.W_dec
    hidden = CoderUnits(torch.nn.Identity(), 32, 16, 5)
    assert UnitSet(host_of(model), {find_sites(model, SITE)[0]: hidden}).read_vectors(SITE) is None
    assert units.active_edges[SITE].tolist() == [48] * 5
    with torch.no_grad():
        coder.W_enc[:, 2] = 0
    assert UnitSet.of(model, {SITE: coder}).active_edges[SITE].tolist() == [48, 48, 0, 48, 48]


def test_units_are_hashed_once_a_set(model, factors, monkeypatch):
    hashed = []
    monkeypatch.setattr(unit_set, "fingerprint", lambda weight: hashed.append(tuple(weight.shape)) or fingerprint(weight))
    units = UnitSet.of(model, {SITE: factors[SITE]})
    scored = {"units": {SITE: 16}, "factors": units.identities}
    units.require_made_for(scored, "this ranking")
    assert hashed == [(32, 16), (16, 16)]
    with pytest.raises(ValueError, match=r"was made with other factors of blocks\.1\.mlp_out"):
        UnitSet.of(model, {SITE: factors["blocks.0.mlp_out"]}).require_made_for(scored, "this ranking")
    with pytest.raises(ValueError, match=r"this ranking is of \{'blocks.1.mlp_out': 16\}, the factors are"):
        UnitSet.of(model, factors).require_made_for(scored, "this ranking")


def test_heads_by_hand():
    # Heads of 8: unit 0 reads head 1 alone, unit 1 3 of head 0 and 1 of head 1 (squares 9 and 1), unit 2 nothing.
    model, read = toy_model(), torch.zeros(16, 3)
    read[9, 0], read[2, 1], read[15, 1] = 2.0, 3.0, -1.0
    write = torch.zeros(3, 48)  # of q, k and v, two heads each: unit 0 writes head 0's key, unit 1 head 1's value
    write[0, 17], write[1, 47] = 1.0, -2.0
    units = UnitSet.of(
        model,
        {
            "blocks.1.attn_o": Factors(read, torch.ones(3, 16)),
            "blocks.0.attn_qkv": Factors(torch.ones(16, 3), write),
            "blocks.0.mlp_in": Factors(torch.ones(16, 3), torch.ones(3, 32)),
        },
    )
    assert units.heads == {
        "blocks.1.attn_o": [("L1H1", 1.0), ("L1H0", pytest.approx(0.9)), ("", 0.0)],
        "blocks.0.attn_qkv": [("L0H0 K", 1.0), ("L0H1 V", 1.0), ("", 0.0)],
    }
