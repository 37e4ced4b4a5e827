"""The static screen: coefficients by hand, which units are kept, where the position enters, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swd_lens.analysis.qk import plot_attention_fidelity, qk_screen
from swd_lens.base.errors import QKError, UnsupportedHostError
from swd_lens.base.figures import svg
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts import host_of
from swd_lens.hosts.attention import heads_of, rotations
from swd_lens.units.factors import Factors
from tests import families
from tests.analysis.qk_checks import random_factors
from tests.micro import micro_model, random_tokens, toy_model
from tests.refusals import refuses


def test_coefficients_by_hand():
    """One head of width 2: gamma_ab = <query part of a, key part of b> / sqrt(2)."""
    write = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0, 9.0], [0.0, -1.0, 5.0, 0.0, 9.0, 9.0]])
    screen = qk_screen(micro_model(), {"blocks.0.attn_qkv": Factors(torch.eye(2), write)})
    # Query parts (1, 2), (0, -1), norms 2.2 and 1; key parts (3, 4), (5, 0), norms 5 and 5: of equal ones the first first.
    assert screen.q_units.tolist() == [[[0, 1]]] and screen.k_units.tolist() == [[[0, 1]]]
    expected = torch.tensor([[11.0, 5.0], [-4.0, 0.0]]) / 2**0.5
    assert torch.allclose(screen.gamma[0, 0], expected)
    assert float(screen.strongest[0, 0]) == pytest.approx(11 / 2**0.5)
    assert [(p.q_unit, p.k_unit) for p in screen.pairs(4)] == [(0, 0), (0, 1), (1, 0)]  # a zero coefficient is no pair
    assert screen.pairs(1)[0].gamma == pytest.approx(11 / 2**0.5) and str(screen.pairs(1)[0]) == "L0H0 q0×k0"


def test_units_of_largest_write_norm_are_kept_head_by_head():
    model = toy_model()
    factors = random_factors(model)
    screen = qk_screen(model, factors, top=4)
    assert screen.gamma.shape == (2, 2, 4, 4)
    write = factors["blocks.1.attn_qkv"].write
    for head in range(2):
        q, k = (write[:, start + 8 * head : start + 8 * head + 8] for start in (0, 16))
        assert screen.q_units[1, head].tolist() == q.norm(dim=1).topk(4).indices.tolist()
        assert screen.k_units[1, head].tolist() == k.norm(dim=1).topk(4).indices.tolist()
        expected = q[screen.q_units[1, head]] @ k[screen.k_units[1, head]].T / 8**0.5
        assert torch.allclose(screen.gamma[1, head], expected, atol=1e-6)


def test_layers_without_units_are_not_a_number():
    model = toy_model()
    factors = random_factors(model)
    screen = qk_screen(model, {"blocks.1.attn_qkv": factors["blocks.1.attn_qkv"]})
    assert screen.strongest[0].isnan().all() and not screen.strongest[1].isnan().any()
    assert {pair.layer for pair in screen.pairs()} == {1} and (screen.q_units[0] == -1).all()
    apart = random_factors(model, packed=False)
    with pytest.raises(QKError, match="no layer has units on its queries and its keys"):
        qk_screen(model, {"blocks.0.attn_q": apart["blocks.0.attn_q"]})


@pytest.mark.parametrize("name", ["pythia", "llama"])
def test_rotary_coefficients_hold_at_a_distance(name):
    """gamma(d) is what two rotated vectors give at any two positions d apart; pythia rotates half of a head only."""
    model = families.hooked(name)
    host, factors = host_of(model), random_factors(model)
    screen = qk_screen(model, factors, top=3, distance=4)
    heads, write = heads_of(host, 1), factors["blocks.1.attn_qkv"].write
    rotation = rotations(host, [heads], 12)[1]
    assert rotation is not None
    width = heads.d_head
    for head in range(heads.n_heads):
        key_head = head // heads.group
        a = write[screen.q_units[1, head], head * width : (head + 1) * width]
        start = (heads.n_heads + key_head) * width
        b = write[screen.k_units[1, head], start : start + width]
        for dest, src in ((4, 0), (11, 7)):
            gamma = rotation.at(dest, a) @ rotation.at(src, b).T / width**0.5
            assert torch.allclose(gamma, screen.gamma[1, head], atol=1e-5)
    assert "rotary" in screen.settings["positions"] and screen.settings["rotary"] and screen.settings["distance"] == 4
    assert "distance 4" in svg(screen.plot())
    assert not torch.allclose(qk_screen(model, factors, top=3).gamma, screen.gamma, atol=1e-3)


def test_the_weight_of_a_norm_is_in_the_coefficients():
    model = families.hooked("qwen3")
    factors = random_factors(model, packed=False)
    screen = qk_screen(model, factors, top=2)
    attn = model.blocks[0].attn
    q = factors["blocks.0.attn_q"].write[:, 8:16] * attn.q_norm.w
    k = factors["blocks.0.attn_k"].write[:, :8] * attn.k_norm.w
    expected = q[screen.q_units[0, 1]] @ k[screen.k_units[0, 1]].T / 8**0.5
    assert torch.allclose(screen.gamma[0, 1], expected, atol=1e-5)


def test_attention_fidelity_is_drawn_by_layer():
    errors = {"blocks.0.attn_qkv": 0.01, "blocks.1.attn_qkv": 0.02, "blocks.1.attn_o": 0.05, "blocks.0.mlp_in": 0.5}
    figure = plot_attention_fidelity(Fidelity(1.0, 1.0, 0.0, 1.0, errors, 10))
    lines = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines}
    assert lines["QKV (attn_qkv)"] == [1.0, 2.0] and lines["output (attn_o)"][1] == 5.0
    assert "replaced model" in figure.axes[0].get_ylabel()
    local = {"blocks.0.attn_qkv": 0.01, "blocks.1.attn_qkv": 0.015}
    figure = plot_attention_fidelity(Fidelity(1.0, 1.0, 0.0, 1.0, errors, 10, local_relmse=local))
    assert np.asarray(figure.axes[0].lines[0].get_ydata()).tolist() == [1.0, 1.5]
    assert "dense inputs" in figure.axes[0].get_ylabel()
    with pytest.raises(QKError, match=r"this fidelity is of blocks\.0\.mlp_in"):
        plot_attention_fidelity(Fidelity(1.0, 1.0, 0.0, 1.0, {"blocks.0.mlp_in": 0.5}, 10))


def test_hosts_and_units_without_such_scores_are_refused():
    both_ways = toy_model(attention_dir="bidirectional")
    refuses(UnsupportedHostError, "attends both ways", qk_screen, both_ways, random_factors(both_ways))
    sinks = toy_model(use_attention_sinks=True)
    refuses(UnsupportedHostError, r"blocks\.0\.attn has attention sinks", qk_screen, sinks, random_factors(sinks))

    coder = SimpleNamespace(encode=abs, decode=lambda z: z.repeat(1, 1, 3))
    refuses(UnsupportedHostError, "must be read and write factors", qk_screen, toy_model(), {"blocks.0.attn_qkv": coder})
    refuses(QKError, "from 0 to 31, got 32", qk_screen, toy_model(), random_factors(toy_model()), distance=32)


def rescaled(factors, site, unit, by):
    """The same unit: read vector times `by`, write vector over it."""
    read, write = factors[site].read.clone(), factors[site].write.clone()
    read[:, unit] *= by
    write[unit] /= by
    return {**factors, site: Factors(read, write)}


def test_with_text_sizes_by_hand():
    """z = h, tokens 0 and 2: h = (1, 0) and (1, 1), so rms(z) = 1 and sqrt(1/2).

    gamma = [[11, 5], [-4, 0]] / sqrt(2) as above; with a read vector three times as long the first row and column are three times
    smaller, and the unit ranks behind the other on the key side. Sizes: 11, 5 sqrt(1/2), 4 sqrt(1/2), 0, all / sqrt(2).
    """
    write = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0, 9.0], [0.0, -1.0, 5.0, 0.0, 9.0, 9.0]])
    factors = {"blocks.0.attn_qkv": Factors(torch.eye(2), write)}
    sizes = torch.tensor([[11.0, 5 * 0.5**0.5], [4 * 0.5**0.5, 0.0]]) / 2**0.5
    for by in (1.0, 3.0):
        scaled = rescaled(factors, "blocks.0.attn_qkv", 0, by)
        screen = qk_screen(micro_model(), scaled, tokens=[[0, 2]])
        assert screen.q_units.tolist() == [[[0, 1]]] and screen.k_units.tolist() == [[[0, 1]]]
        assert torch.allclose(screen.sizes[0, 0], sizes)
        assert screen.table(4)["size"].tolist() == pytest.approx([11 / 2**0.5, 2.5, 2.0])
        assert screen.table()["gamma"].item() == pytest.approx(11 / 2**0.5 / by**2)
        again = type(screen).from_dict(screen.as_dict())
        assert torch.allclose(again.sizes, screen.sizes)
    static = qk_screen(micro_model(), scaled)
    assert static.k_units.tolist() == [[[1, 0]]] and static.sizes is None and "size" not in static.table()


def test_a_units_scale_changes_the_static_screen_and_not_the_one_with_text():
    model, site = toy_model(), "blocks.1.attn_qkv"
    factors = random_factors(model)
    scaled = rescaled(factors, site, 3, 50.0)
    tokens = random_tokens(4, 9)
    one, other = (qk_screen(model, each, top=4, tokens=tokens) for each in (factors, scaled))
    assert torch.equal(one.q_units, other.q_units) and torch.equal(one.k_units, other.k_units)
    torch.testing.assert_close(one.sizes, other.sizes, rtol=1e-4, atol=1e-6)
    assert [str(p) for p in one.pairs(2)] == [str(p) for p in other.pairs(2)]
    assert "rms" in svg(one.plot()) and "2 layers x 2 heads, 4 with units, top 4 per side" in repr(one)
    assert len(one.table(per_head=3)) == 12 and "<svg" in one._repr_html_()
    static = [qk_screen(model, each, top=4) for each in (factors, scaled)]
    assert not torch.equal(static[0].q_units, static[1].q_units) or not torch.equal(*(s.k_units for s in static))
