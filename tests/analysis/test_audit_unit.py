"""A unit's profile: edges of both sides, and how it is asked for."""

from types import SimpleNamespace

import pytest
import torch

from swd_lens.analysis.audit import audit
from tests.micro import random_tokens


def test_edges_of_mlp_out_are_neurons_and_residual_dimensions(found, factors):
    profile, f = found.unit("blocks.1.mlp_out/5"), factors["blocks.1.mlp_out"]
    read, write = f.read[:, 5], f.write[5]
    assert profile.reads.n == int((read != 0).sum()) and profile.writes.n == int((write != 0).sum())
    order = read.abs().sort(descending=True, stable=True).indices[:10].tolist()
    assert profile.reads.strongest == tuple((f"neuron {i}", float(read[i])) for i in order)
    order = write.abs().sort(descending=True, stable=True).indices[: min(10, profile.writes.n)].tolist()
    assert profile.writes.strongest == tuple((f"residual {i}", float(write[i])) for i in order)
    assert profile.reads.heads == profile.writes.heads == {}


def test_edges_of_attn_o_are_read_head_by_head(found, factors):
    profile, read = found.unit("blocks.0.attn_o/3"), factors["blocks.0.attn_o"].read[:, 3]
    strongest = int(read.abs().argmax())
    assert profile.reads.strongest[0][0] == f"head {strongest // 8} / dim {strongest % 8}"
    share = float(read[:8].square().sum() / read.square().sum())
    assert profile.reads.heads == pytest.approx({"head 0": share, "head 1": 1 - share})


def test_a_unit_is_asked_for_by_name_pair_row_and_number(model, factors, found):
    whole = repr(found.unit("blocks.1.mlp_out/5"))
    row = found.table().query("unit == 'blocks.1.mlp_out/5'").iloc[0]
    for unit in (("blocks.1.mlp_out", 5), "blocks.1.mlp.W_out/5", row, found.unit("blocks.1.mlp_out/5")):
        assert repr(found.unit(unit)) == whole
    with pytest.raises(ValueError, match="unit 5 does not say of which site"):
        found.unit(5)
    one_site = audit(model, factors, random_tokens(9, 8), units="blocks.1.*mlp_out", progress=False)
    assert one_site.unit(5).unit == one_site.unit("mlp_out/5").unit == "blocks.1.mlp_out/5"
    two = audit(model, factors, random_tokens(9, 8), units=[("blocks.1.mlp_out", 5), "blocks.0.attn_o/3"], progress=False)
    assert two.units == ["blocks.0.attn_o/3", "blocks.1.mlp_out/5"]
    assert len(list(two.profiles(found.table().head(0)))) == 0
    assert two.with_labels({("blocks.1.mlp_out", 5): "a word"}).labels.text("blocks.1.mlp_out/5") == "a word"


def test_units_of_a_coder(model):
    read, write = torch.eye(32)[:, :6], torch.eye(16)[:6]
    coder = SimpleNamespace(W_enc=read, W_dec=write, encode=lambda x: (x @ read).relu(), decode=lambda z: z @ write)
    found = audit(model, {"blocks.0.mlp_out": coder}, random_tokens(4, 8), progress=False)
    profile = found.unit("blocks.0.mlp_out/2")
    assert profile.reads.strongest == (("neuron 2", 1.0),) and profile.writes.strongest == (("residual 2", 1.0),)
    assert profile.logits is not None and profile.smallest >= 0
