"""Unit sources beyond SWD at work in a host: read/write tensors, transcoders, SAEs, under the same names and through one path."""

import copy

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError
from swd_lens.hosts import find_sites, host_of
from swd_lens.units import CoderUnits
from tests.contract import identity
from tests.micro import random_split, random_tokens, toy_model

pytestmark = pytest.mark.filterwarnings("ignore:the mean margin of")  # of a model with random weights

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(2, 6)


class Coder(torch.nn.Module):
    """encode and decode by two functions."""

    def __init__(self, encode, decode, reads="input", writes="output"):
        super().__init__()
        self.encode, self.decode, self.reads, self.writes = encode, decode, reads, writes


class ReadWrite:
    def __init__(self, read, write):
        self.read, self.write = read, write


def relu_coder(model, units=24, seed=0):
    """An inexact transcoder of mlp_out: relu(h @ enc + b) @ dec + bias."""
    generator = torch.Generator().manual_seed(seed)
    encoder, decoder = torch.randn(32, units, generator=generator), torch.randn(units, 16, generator=generator)
    return Coder(lambda h: (h @ encoder / 6 + 0.1).relu(), lambda z: z @ decoder / 6 + model.blocks[1].mlp.b_out)


@pytest.fixture
def model():
    return toy_model()


def exact_sources(model):
    """Sources that compute the dense output of mlp_out, each in its own way."""
    w, b = model.blocks[1].mlp.W_out.detach().clone(), model.blocks[1].mlp.b_out.detach().clone()
    return {
        "read/write": ReadWrite(w, torch.eye(16)),
        "transcoder": Coder(lambda h: h, lambda z: z @ w + b),
        "SAE on the output": Coder(lambda y: y * 2, lambda z: z / 2, reads="output"),
        "SAE on the input": Coder(lambda h: h * 2, lambda z: z / 2, writes="input"),
    }


@pytest.mark.parametrize("name", exact_sources(toy_model()))
def test_exact_sources_give_the_dense_logits_and_restore_the_host(model, name):
    source = exact_sources(model)[name]
    dense, hooks, keys = model(TOKENS), list(model.hook_dict.items()), list(model.state_dict())
    with swd.attach(model, {SITE: source}):
        logits, cache = model.run_with_cache(TOKENS)
        assert list(model.state_dict()) == keys
    assert cache["mlp_out_unit", 1].shape == (2, 6, {"read/write": 16, "SAE on the output": 16}.get(name, 32))
    torch.testing.assert_close(logits, dense, rtol=0, atol=float(dense.detach().abs().max()) * 1e-5)
    assert list(model.hook_dict.items()) == hooks and torch.equal(model(TOKENS), dense)


def test_a_transcoder_replaces_the_dense_product_and_an_sae_does_not(model):
    dense = model(TOKENS)
    transcoder, sae = (exact_sources(model)[name] for name in ("transcoder", "SAE on the output"))
    with torch.no_grad():
        model.blocks[1].mlp.W_out.fill_(torch.nan)
    with swd.attach(model, {SITE: transcoder}):
        torch.testing.assert_close(model(TOKENS), dense)
    with swd.attach(model, {SITE: sae}):
        assert model(TOKENS).isnan().all()


def test_units_of_a_transcoder_can_be_edited(model):
    sources = exact_sources(model)
    with swd.attach(model, {SITE: sources["transcoder"]}), torch.no_grad():
        edited = model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.1.hook_mlp_out_unit", lambda z, hook: torch.zeros_like(z))]
        )
        _, cache = model.run_with_cache(TOKENS)
    with torch.no_grad():
        model.blocks[1].mlp.W_out.zero_()
    torch.testing.assert_close(edited, model(TOKENS))
    assert cache["mlp_out_unit", 1].abs().max() > 0


@pytest.mark.parametrize("overrides", [{}, {"gated_mlp": True, "act_fn": "silu"}], ids=["mlp", "gated"])
def test_a_transcoder_may_replace_a_whole_mlp(overrides):
    model = toy_model(**overrides)
    dense, original = model(TOKENS), copy.deepcopy(model.blocks[0].mlp)
    whole = Coder(lambda x: x, original)
    with swd.attach(model, {"blocks.0.mlp": whole}):
        logits, cache = model.run_with_cache(TOKENS)
        with pytest.raises(
            AttachError, match=r"blocks\.0\.mlp, which shares weights with blocks\.0\.mlp_in, is attached"
        ):
            swd.attach(model, identity(model, "blocks.0.mlp_in"))
    torch.testing.assert_close(logits, dense)
    assert cache["mlp_unit", 0].shape == (2, 6, 16)
    assert "blocks.0.mlp" not in [site.name for site in find_sites(model, "all")]
    with pytest.raises(swd.UnknownSiteError, match="is a whole MLP, not one matrix"):
        swd.factorize(model, "blocks.0.mlp", progress=False)


def test_a_transcoder_goes_through_fidelity_attribution_and_circuits(model):
    units = {SITE: relu_coder(model)}
    measured = swd.fidelity(model, units, random_tokens(4, 8))
    assert measured.kl > 0 and set(measured.relmse) == {SITE}
    scores = swd.attribute(model, units, random_split())
    assert scores.scores[SITE].shape == (24,) and scores.scores[SITE].max() > 0
    curve = swd.evaluate(model, units, random_split(name="test"), scores)
    assert curve.rows["units"].iloc[-1] == 24
    assert curve.rows["edges"].iloc[-1] == 24 * (32 + 16)  # counted dense: d_in + d_out a feature
    assert curve.rows["q keep"].iloc[-1] == pytest.approx(curve.q_full, abs=1e-6)


def test_a_coder_may_count_its_own_edges(model):
    coder = relu_coder(model)
    coder.edges_per_unit = torch.arange(24)
    coder.valid_units = torch.arange(24) % 2 == 0
    with swd.attach(model, {SITE: coder}) as attachment:
        units = attachment.factors[SITE]
        assert units.edges_per_unit.tolist() == list(range(24)) and units.edges == 276
        assert units.valid_units.sum() == 12
    scores = swd.attribute(model, {SITE: coder}, random_split())
    curve = swd.evaluate(model, {SITE: coder}, random_split(name="test"), scores)
    assert curve.rows["edges"].iloc[-1] == sum(range(0, 24, 2))  # those of valid units
    for wrong, what in ((torch.zeros(3), r"\(3,\)"), ([1] * 24, "list")):
        coder.edges_per_unit = wrong
        with pytest.raises(
            swd.UnitSourceError, match=f"edges_per_unit is {what}; it must be a tensor of one number for each"
        ):
            swd.attach(model, {SITE: coder})


def test_what_a_coder_needs_of_its_host_is_checked(model):
    coder = relu_coder(model)

    def units(**needs):
        return {SITE: CoderUnits(coder, 32, 16, 24, provenance={"hook_name": "blocks.1.mlp.hook_pre", **needs})}

    with pytest.raises(
        AttachError, match="before its weight and bias, this host has fold_ln=False; load it with fold_ln=True"
    ):
        swd.attach(model, units(needs_folded_ln=True))
    swd.attach(model, units(needs_folded_ln=False)).detach()
    swd.attach(model, units(needs_ungated_mlp=True)).detach()
    gated = toy_model(gated_mlp=True, act_fn="silu")
    with pytest.raises(AttachError, match="which is the gate's output in a gated MLP"):
        swd.attach(gated, units(needs_ungated_mlp=True))
    gated.cfg.use_normalization_before_and_after = True
    with pytest.raises(AttachError, match="which this host normalizes once more"):
        swd.attach(gated, units(needs_no_post_norm=True))


def test_what_is_no_source_is_refused_before_anything_is_touched(model):
    hooks = list(model.hook_dict.items())
    with pytest.raises(TypeError, match=r"dict is no unit source for blocks\.1\.mlp_out\. Accepted: Factors"):
        swd.attach(model, {SITE: {"read": 1}})
    with pytest.raises(swd.UnitSourceError, match=r"do not fit blocks\.1\.mlp_out, which is"):
        swd.attach(model, {SITE: ReadWrite(torch.zeros(5, 3), torch.zeros(3, 16))})
    assert list(model.hook_dict.items()) == hooks
    assert host_of(model).is_swapped(find_sites(model, SITE)[0]) is False
