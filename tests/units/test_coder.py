"""Unit sources: read/write tensors and encode/decode pairs that `as_units` takes, by hand and at work in a host."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import swd_lens as swd
from swd_lens.base.errors import AttachError, UnitSourceError
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import Site
from swd_lens.units.coder import CoderUnits, is_counted
from swd_lens.units.exact import svd_factors
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import as_units
from tests.contract import identity
from tests.micro import random_split, random_tokens, toy_model

pytestmark = pytest.mark.filterwarnings("ignore:the mean margin of")  # of a model with random weights

NAME, TOKENS = "blocks.1.mlp_out", random_tokens(2, 6)
SITE = Site(1, "mlp_out", 3, 2)
# h @ ENC = z before relu; z @ DEC + 10 = y. Unit 1 reads two inputs, unit 3 writes nothing.
ENC = torch.tensor([[1.0, 2, 0, 1], [0, 1, -1, 1], [0, 0, 0, 1]])
DEC = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])


class Coder:
    """encode and decode and nothing else."""

    def __init__(self, enc=ENC, dec=DEC):
        # In a list: weights that cannot be seen from outside.
        self._weights = [enc, dec]

    def encode(self, x):
        return (x @ self._weights[0]).relu()

    def decode(self, z):
        return z @ self._weights[1] + 10.0


class OpenCoder(Coder, nn.Module):
    """The same with weights in sight, as a module."""

    def __init__(self, enc=ENC, dec=DEC):
        nn.Module.__init__(self)
        self.W_enc, self.W_dec = nn.Parameter(enc.clone()), nn.Parameter(dec.clone())

    @property
    def _weights(self):
        return self.W_enc, self.W_dec


def double(h):
    """A dense product, with bias: (..., 3) -> (..., 2)."""
    return 2.0 * h[..., :2] + 1.0


def never(h):
    raise AssertionError("the dense product was computed")


def with_site(**fields):
    return CoderUnits(**{"coder": OpenCoder(), "d_in": 3, "d_out": 2, "n_units": 4, **fields})


# ---------------------------------------------------------------------------------------------- Factors, read and write


def test_read_and_write_become_factors_that_know_their_site():
    source = SimpleNamespace(read=ENC.double().requires_grad_(), write=DEC, settings={"method": "mine"})
    factors = as_units(source, SITE)
    assert isinstance(factors, Factors)
    assert factors.read.dtype == torch.float32 and not factors.read.requires_grad
    assert torch.equal(factors.read, ENC) and torch.equal(factors.write, DEC)
    assert factors.provenance == {"site": "blocks.1.mlp_out"} and factors.settings == {"method": "mine"}
    assert factors.edges_per_unit.tolist() == [1 + 1, 2 + 1, 1 + 2, 3 + 0]


def test_an_exact_svd_keeps_its_dense_count():
    svd = svd_factors(torch.eye(3)[:, :2])
    again = as_units(SimpleNamespace(read=svd.read, write=svd.write, settings=svd.settings), SITE)
    assert again.edges_per_unit.tolist() == svd.edges_per_unit.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        (ENC, DEC[:3], r"read \(3, 4\) and write \(3, 2\) are no pair"),
        (ENC[0], DEC, r"read \(4,\) and write \(4, 2\) are no pair"),
        (ENC[:2], DEC, r"do not fit blocks.1.mlp_out, which is \(3, 2\)"),
        (ENC, DEC[:, :1], r"do not fit blocks.1.mlp_out"),
        (ENC * float("nan"), DEC, "not finite"),
    ],
)
def test_a_wrong_read_or_write_is_refused(read, write, message):
    with pytest.raises(UnitSourceError, match=message):
        as_units(SimpleNamespace(read=read, write=write), SITE)


@pytest.mark.parametrize("source", [torch.eye(3), {"read": ENC}, "blocks.1.mlp_out", Coder, None])
def test_anything_else_names_what_is_accepted(source):
    with pytest.raises(TypeError, match=r"is no unit source for blocks\.1\.mlp_out\. Accepted: Factors; .* encode\(x\)"):
        as_units(source, SITE)


# ---------------------------------------------------------------------------------------------- encode and decode


def test_a_pair_runs_as_written_and_its_bias_is_its_own():
    units = as_units(Coder(), SITE)
    assert isinstance(units, CoderUnits) and is_counted(units)
    assert (units.d_in, units.d_out, units.n_units) == (3, 2, 4)
    assert units.provenance == {"site": "blocks.1.mlp_out"}
    h = torch.tensor([[[1.0, 2, 3]]])
    # h @ ENC = 1, 2 + 2, -2, 6; relu takes the third; y = z @ DEC + 10 = (1, 4) + 10.
    assert units.encode(h).tolist() == [[[1, 4, 0, 6]]]
    assert units.run(h, dense=never).tolist() == [[[11, 14]]]


def test_units_that_read_the_output_run_after_the_dense_product():
    coder = Coder(torch.tensor([[1.0, 0], [1, 1]]), torch.eye(2))
    coder.reads = "output"
    units = as_units(coder, SITE)
    # double([1, 2, 3]) = (3, 5); z = (3 + 5, 5); y = z + 10.
    assert units.run(torch.tensor([[[1.0, 2, 3]]]), double).tolist() == [[[18, 15]]]
    assert units.edges_per_unit.tolist() == [4, 4]  # 2 d_out, weights unseen


def test_units_that_write_the_input_run_before_the_dense_product():
    coder = Coder(ENC, torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]))
    coder.writes = "input"
    # z = (1, 4, 0, 6) as above; the input again is (1, 4, 0) + 10; double of it (23, 29).
    assert as_units(coder, SITE).run(torch.tensor([[[1.0, 2, 3]]]), double).tolist() == [[[23, 29]]]


def test_edges_are_nonzeros_where_the_weights_are_seen_and_dense_where_not():
    assert as_units(Coder(), SITE).edges_per_unit.tolist() == [5, 5, 5, 5]
    seen = as_units(OpenCoder(), SITE)
    assert seen.edges_per_unit.tolist() == [1 + 1, 2 + 1, 1 + 2, 3 + 0]
    assert seen.valid_units.tolist() == [True, True, True, False]
    assert seen.edges == 11
    assert seen.sparsity == 1 - 11 / 6


def test_a_gradient_reaches_z_and_h():
    h, seen = torch.ones(1, 1, 3, requires_grad=True), []
    with_site().run(h, double, lambda z: seen.append(z) or z).sum().backward(inputs=[h])
    # Units 0, 1 are on (z = 1, 3; unit 2 is off and unit 3 writes nothing): d sum(y) / dh = ENC[:, 0] + ENC[:, 1].
    assert h.grad.tolist() == [[[3, 1, 0]]]
    assert seen[0].requires_grad


def test_the_coder_keeps_its_dtype_and_the_host_its_own():
    coder = OpenCoder().to(torch.bfloat16)
    units = as_units(coder, SITE)
    y = units.run(torch.ones(1, 2, 3), double)
    assert y.dtype == torch.float32 and units.encode(torch.ones(1, 3).double()).dtype == torch.float64
    assert coder.W_enc.dtype == torch.bfloat16
    assert torch.equal(y, with_site().run(torch.ones(1, 2, 3), double))


def test_another_device_is_named():
    with pytest.raises(UnitSourceError, match=r"coder is on meta, the host computes on cpu; .*coder\.to\('cpu'\)"):
        with_site(coder=OpenCoder().to("meta")).encode(torch.ones(1, 3))


def answering(encode=None, decode=None):
    coder = Coder()
    coder.encode, coder.decode = encode or coder.encode, decode or coder.decode
    return coder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Coder(ENC[:2]), r"Coder\.encode failed on torch\.float32 of shape \(1, 1, 3\): .*multipl"),
        (answering(encode=lambda x: (x, x)), r"Coder\.encode gave a tuple, expected one tensor"),
        (answering(encode=lambda x: x.long()), r"encode gave torch\.int64"),
        (answering(encode=lambda x: x.to_sparse()), r"layout torch\.sparse_coo, expected a dense"),
        (answering(encode=lambda x: x.to("meta")), "encode took cpu and gave meta"),
        (answering(encode=lambda x: x.flatten()), r"encode gave \(3,\) for \(1, 1, 3\); keep the batch and position"),
        (answering(decode=lambda z: z), r"decode gave \(1, 1, 4\) for z \(1, 1, 4\); blocks\.1\.mlp_out needs \(1, 1, 2\)"),
    ],
)
def test_a_pair_that_does_not_work_is_refused_before_it_stands_anywhere(source, message):
    with pytest.raises(UnitSourceError, match=message):
        as_units(source, SITE)


def test_sides_are_checked():
    with pytest.raises(UnitSourceError, match="reads must be one of 'input', 'output', got 'in'"):
        with_site(reads="in")
    with pytest.raises(UnitSourceError, match=r"writes must be one of .* got 'middle'"):
        with_site(writes="middle")
    with pytest.raises(UnitSourceError, match="cannot read the site's output and write its input"):
        with_site(reads="output", writes="input")


def test_coder_units_of_another_site_or_model_are_refused():
    with pytest.raises(UnitSourceError, match=r"makes units of blocks\.0\.mlp_out, not of blocks\.1\.mlp_out"):
        as_units(with_site(provenance={"site": "blocks.0.mlp_out"}), SITE)
    with pytest.raises(UnitSourceError, match=r"is for \(3, 2\), blocks\.1\.mlp_out is \(5, 2\)"):
        as_units(with_site(), Site(1, "mlp_out", 5, 2))


# ---------------------------------------------------------------------------------------------- at work in a host


class Functions(nn.Module):
    """encode and decode by two functions."""

    def __init__(self, encode, decode, reads="input", writes="output"):
        super().__init__()
        self.encode, self.decode, self.reads, self.writes = encode, decode, reads, writes


def relu_coder(model, units=24, seed=0):
    """An inexact transcoder of mlp_out: relu(h @ enc + b) @ dec + bias."""
    generator = torch.Generator().manual_seed(seed)
    encoder, decoder = torch.randn(32, units, generator=generator), torch.randn(units, 16, generator=generator)
    return Functions(lambda h: (h @ encoder / 6 + 0.1).relu(), lambda z: z @ decoder / 6 + model.blocks[1].mlp.b_out)


def test_a_transcoder_replaces_the_dense_product_and_an_sae_does_not(model):
    dense, weight = model(TOKENS), model.blocks[1].mlp.W_out
    w, b = weight.detach().clone(), model.blocks[1].mlp.b_out.detach().clone()
    transcoder = Functions(lambda h: h, lambda z: z @ w + b)
    sae, of_input = (
        Functions(lambda y: y * 2, lambda z: z / 2, reads="output"),
        Functions(lambda h: h, lambda z: z, writes="input"),
    )
    for source in (SimpleNamespace(read=w, write=torch.eye(16)), transcoder, sae, of_input):  # each computes the dense output
        with swd.attach(model, {NAME: source}):
            torch.testing.assert_close(model(TOKENS), dense)
        assert torch.equal(model(TOKENS), dense)
    with torch.no_grad():
        weight.fill_(torch.nan)
    with swd.attach(model, {NAME: transcoder}):
        torch.testing.assert_close(model(TOKENS), dense)
    with swd.attach(model, {NAME: sae}):
        assert model(TOKENS).isnan().all()


@pytest.mark.parametrize("overrides", [{}, {"gated_mlp": True, "act_fn": "silu"}], ids=["mlp", "gated"])
def test_a_transcoder_may_replace_a_whole_mlp(overrides):
    model = toy_model(**overrides)
    dense, original = model(TOKENS), copy.deepcopy(model.blocks[0].mlp)
    whole = Functions(lambda x: x, original)
    with swd.attach(model, {"blocks.0.mlp": whole}):
        logits, cache = model.run_with_cache(TOKENS)
        with pytest.raises(AttachError, match=r"blocks\.0\.mlp, which shares weights with blocks\.0\.mlp_in, is attached"):
            swd.attach(model, identity(model, "blocks.0.mlp_in"))
    torch.testing.assert_close(logits, dense)
    assert cache["mlp_unit", 0].shape == (2, 6, 16)
    assert "blocks.0.mlp" not in [site.name for site in find_sites(model, "all")]
    with pytest.raises(swd.UnknownSiteError, match="is a whole MLP, not one matrix"):
        swd.factorize(model, "blocks.0.mlp", progress=False)


def test_a_transcoder_goes_through_fidelity(model):
    """Through attribution and circuits: tests/test_contract.py."""
    measured = swd.fidelity(model, {NAME: relu_coder(model)}, random_tokens(4, 8))
    assert measured.kl > 0 and set(measured.relmse) == {NAME}


def test_a_coder_may_count_its_own_edges(model):
    coder = relu_coder(model)
    coder.edges_per_unit = torch.arange(24)
    coder.valid_units = torch.arange(24) % 2 == 0
    with swd.attach(model, {NAME: coder}) as attachment:
        units = attachment.factors[NAME]
        assert units.edges_per_unit.tolist() == list(range(24)) and units.edges == 276
        assert units.valid_units.sum() == 12
    scores = swd.attribute(model, {NAME: coder}, random_split())
    curve = swd.evaluate(model, {NAME: coder}, random_split(name="test"), scores)
    assert curve.rows["edges"].iloc[-1] == sum(range(0, 24, 2))  # those of valid units
    for wrong, what in ((torch.zeros(3), r"\(3,\)"), ([1] * 24, "list")):
        coder.edges_per_unit = wrong
        with pytest.raises(swd.UnitSourceError, match=f"edges_per_unit is {what}; it must be a tensor of one number for each"):
            swd.attach(model, {NAME: coder})


def test_what_a_coder_needs_of_its_host_is_checked(model):
    coder = relu_coder(model)

    def units(**needs):
        return {NAME: CoderUnits(coder, 32, 16, 24, provenance={"hook_name": "blocks.1.mlp.hook_pre", **needs})}

    with pytest.raises(AttachError, match="before its weight and bias, this host has fold_ln=False; load it with fold_ln=True"):
        swd.attach(model, units(needs_folded_ln=True))
    swd.attach(model, units(needs_folded_ln=False)).detach()
    swd.attach(model, units(needs_ungated_mlp=True)).detach()
    gated = toy_model(gated_mlp=True, act_fn="silu")
    with pytest.raises(AttachError, match="which is the gate's output in a gated MLP"):
        swd.attach(gated, units(needs_ungated_mlp=True))
    gated.cfg.use_normalization_before_and_after = True
    with pytest.raises(AttachError, match="which this host normalizes once more"):
        swd.attach(gated, units(needs_no_post_norm=True))
