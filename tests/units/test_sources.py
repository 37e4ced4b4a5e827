"""Unit sources: every kind that `as_units` takes, what CoderUnits compute and count, and SAELens objects by their metadata.

sae-lens is not installed here; stand-ins with the attributes that sae-lens 6.54 objects have take their place.
test_saelens.py holds the same against real ones.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swd_lens.base.errors import UnitSourceError
from swd_lens.hosts.sites import Site
from swd_lens.units.coder import CoderUnits, is_counted
from swd_lens.units.exact import svd_factors
from swd_lens.units.factors import Factors
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import as_units

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


def test_factors_are_units_as_they_are():
    factors = Factors(torch.ones(3, 4), torch.ones(4, 2))
    assert is_counted(factors)
    assert as_units(factors, SITE) is factors


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
    with pytest.raises(
        TypeError, match=r"is no unit source for blocks\.1\.mlp_out\. Accepted: Factors; .* encode\(x\)"
    ):
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


def test_the_hook_sees_z_and_may_replace_it():
    y = as_units(Coder(), SITE).run(torch.ones(2, 5, 3), dense=never, hook=lambda z: torch.zeros_like(z))
    assert torch.equal(y, torch.full((2, 5, 2), 10.0))


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


def test_a_unit_that_writes_the_input_reaches_the_output_through_all_of_w():
    decoder = torch.tensor([[1.0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    units = with_site(coder=OpenCoder(ENC, decoder), writes="input")
    assert units.edges_per_unit.tolist() == [1 + 2, 2 + 2, 1 + 2, 3 + 0]
    assert units.valid_units.tolist() == [True, True, True, False]


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
        (
            answering(decode=lambda z: z),
            r"decode gave \(1, 1, 4\) for z \(1, 1, 4\); blocks\.1\.mlp_out needs \(1, 1, 2\)",
        ),
    ],
)
def test_a_pair_that_does_not_work_is_refused_before_it_stands_anywhere(source, message):
    with pytest.raises(UnitSourceError, match=message):
        as_units(source, SITE)


def test_sides_are_checked():
    with pytest.raises(UnitSourceError, match=r"reads must be one of \('input', 'output'\), got 'in'"):
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


# ---------------------------------------------------------------------------------------------- SAELens stand-ins


class Sae(nn.Module):
    """What sae-lens 6 objects show: cfg with metadata, W_enc, W_dec, encode, decode, forward."""

    def __init__(self, d_in=4, d_out=None, d_sae=6, **metadata):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(d_in, d_sae, generator=draw))
        self.W_dec = nn.Parameter(torch.randn(d_sae, d_out or d_in, generator=draw))
        self.cfg = SimpleNamespace(d_in=d_in, d_sae=d_sae, normalize_activations="none", metadata=metadata)
        if d_out:
            self.cfg.d_out = d_out

    def encode(self, x):
        return (x @ self.W_enc).relu()

    def decode(self, z):
        return z @ self.W_dec + 1.0

    def forward(self, x):
        return self.decode(self.encode(x))


def sae(hook="blocks.1.hook_mlp_out", **metadata):
    return Sae(hook_name=hook, **metadata)


def transcoder(read, write, **metadata):
    return Sae(d_out=5, hook_name=f"blocks.1.{read}", hook_name_out=f"blocks.1.{write}", **metadata)


@pytest.mark.parametrize(
    ("hook", "site", "side"),
    [
        ("hook_mlp_out", "blocks.1.mlp_out", "output"),
        ("mlp.hook_out", "blocks.1.mlp_out", "output"),
        ("hook_attn_out", "blocks.1.attn_o", "output"),
        ("attn.hook_out", "blocks.1.attn_o", "output"),
        ("mlp.hook_pre", "blocks.1.mlp_in", "output"),
        ("mlp.hook_post", "blocks.1.mlp_out", "input"),
        ("attn.hook_z", "blocks.1.attn_o", "input"),
    ],
)
def test_an_sae_finds_its_site(hook, site, side):
    source = sae(f"blocks.1.{hook}", model_name="gpt2")
    ((name, units),) = from_saelens(source).items()
    assert (name, units.reads, units.writes, units.n_units) == (site, side, side, 6)
    assert units.provenance["hook_name"] == f"blocks.1.{hook}" and units.provenance["model_name"] == "gpt2"
    assert json.loads(json.dumps(dict(units.provenance))) == units.provenance
    h = torch.randn(2, 3, 4)
    expected = source(-h) if side == "output" else -source(h)
    assert torch.equal(units.run(h, lambda h: -h), expected)


@pytest.mark.parametrize(
    ("read", "write", "site"),
    [
        ("mlp.hook_post", "hook_mlp_out", "blocks.1.mlp_out"),
        ("attn.hook_z", "hook_attn_out", "blocks.1.attn_o"),
        ("mlp.hook_in", "mlp.hook_pre", "blocks.1.mlp_in"),
        ("mlp.hook_in", "mlp.hook_out", "blocks.1.mlp"),
        ("ln2.hook_normalized", "hook_mlp_out", "blocks.1.mlp"),
    ],
)
def test_a_transcoder_finds_its_site_and_needs_no_dense_product(read, write, site):
    source = transcoder(read, write)
    ((name, units),) = from_saelens(source).items()
    assert (name, units.reads, units.writes, units.d_in, units.d_out) == (site, "input", "output", 4, 5)
    assert is_counted(units) and units.edges_per_unit.tolist() == [9] * 6
    h = torch.randn(2, 3, 4)
    assert torch.equal(units.run(h, dense=never), source(h))


def test_what_a_transcoder_of_the_mlp_needs_of_its_host_is_recorded():
    def needs(read, **metadata):
        (units,) = from_saelens(transcoder(read, "hook_mlp_out", **metadata)).values()
        return units.provenance.get("needs_folded_ln")

    assert needs("ln2.hook_normalized") is True
    assert needs("mlp.hook_in", model_from_pretrained_kwargs={"fold_ln": False, "dtype": torch.float32}) is False
    assert needs("mlp.hook_in") is None
    # Gemma Scope 2 calls the normalized input hook_mlp_in; its Hugging Face name says what it is.
    assert needs("hook_mlp_in", hf_hook_name="model.layers.1.pre_feedforward_layernorm.output") is None


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("hook_mlp_out", {"needs_no_post_norm": True}),
        ("hook_attn_out", {"needs_no_post_norm": True}),
        ("mlp.hook_out", {}),
        ("mlp.hook_pre", {"needs_ungated_mlp": True}),
        ("mlp.hook_post", {}),
    ],
)
def test_what_an_sae_needs_of_its_host_is_recorded(hook, expected):
    (units,) = from_saelens(sae(f"blocks.1.{hook}")).values()
    assert {key: value for key, value in units.provenance.items() if key.startswith("needs")} == expected


def test_an_sae_does_not_see_all_of_its_site_until_it_is_told():
    (units,) = from_saelens(sae()).values()
    assert (units.d_in, units.d_out) == (0, 4)
    assert repr(units) == "CoderUnits(blocks.1.mlp_out: Sae, (?, 4) -> 6 units, reads output, writes output)"
    with pytest.raises(AttributeError, match=r"as_units\(units, site\) fills in .*d_in=0, d_out=4"):
        _ = units.sparsity
    whole = as_units(units, Site(1, "mlp_out", 9, 4))
    assert whole.d_in == 9 and is_counted(whole)
    assert whole.edges_per_unit.tolist() == [2 * 4] * 6
    assert repr(whole) == (
        "CoderUnits(blocks.1.mlp_out: Sae, (9, 4) -> 6 units, reads output, writes output, 48 edges, s=-0.3333)"
    )
    (on_input,) = from_saelens(sae("blocks.1.mlp.hook_post")).values()
    assert not is_counted(on_input)
    with pytest.raises(AttributeError, match="cannot be counted yet"):
        _ = on_input.edges_per_unit
    assert as_units(on_input, Site(1, "mlp_out", 4, 7)).edges_per_unit.tolist() == [4 + 7] * 6


def test_as_units_takes_a_saelens_object_for_its_own_site_only():
    units = as_units(sae(), Site(1, "mlp_out", 9, 4))
    assert isinstance(units, CoderUnits) and units.reads == "output"
    with pytest.raises(UnitSourceError, match=r"makes units of blocks\.1\.mlp_out, not of blocks\.2\.mlp_out"):
        as_units(sae(), Site(2, "mlp_out", 9, 4))
    with pytest.raises(UnitSourceError, match=r"is for \(\?, 4\), blocks\.1\.mlp_out is \(9, 8\): .*another model"):
        as_units(sae(), Site(1, "mlp_out", 9, 8))


def test_older_versions_keep_their_metadata_in_cfg():
    source = sae()
    del source.cfg.metadata
    source.cfg.hook_name = "blocks.3.hook_attn_out"
    assert list(from_saelens(source)) == ["blocks.3.attn_o"]


def changed(source, **attributes):
    for name, value in attributes.items():
        (setattr(source.cfg, name[4:], value) if name.startswith("cfg_") else setattr(source, name, value))
    return source


class LooksAside(Sae):
    def encode(self, x):
        z = super().encode(x)
        return z * (z >= z.amax((1, 2), keepdim=True) / 2)  # what a batch top-k does: the strongest of all positions


class AddsItsInput(Sae):
    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Coder(), "Coder is no SAELens object: it needs encode, decode and cfg.d_sae"),
        (sae(hook=None), "does not say where it stands; set it: sae.cfg.metadata.hook_name"),
        (sae("blocks.1.hook_resid_pre"), "stands on blocks.1.hook_resid_pre, which is no matrix' input or output"),
        (sae("hook_embed"), "stands on hook_embed: expected hooks of one block"),
        (Sae(d_out=5, hook_name="blocks.1.mlp.hook_post"), "does not say what it writes; set it: .*hook_name_out"),
        (
            transcoder("hook_mlp_out", "hook_resid_post"),
            "blocks.1.hook_mlp_out -> blocks.1.hook_resid_post, which is no",
        ),
        (
            Sae(d_out=5, hook_name="blocks.1.mlp.hook_post", hook_name_out="blocks.2.hook_mlp_out"),
            "blocks.1.mlp.hook_post -> blocks.2.hook_mlp_out: expected hooks of one block",
        ),
        (
            transcoder("hook_mlp_in", "hook_mlp_out"),
            "hook_mlp_in, which in TransformerLens is the residual stream before",
        ),
        (
            sae(hf_hook_name="model.layers.1.post_feedforward_layernorm.output"),
            "is of model.layers.1.post_feedforward_layernorm.output: a norm stands between",
        ),
        (
            transcoder(
                "mlp.hook_in", "hook_mlp_out", hf_hook_name_out="model.layers.1.post_feedforward_layernorm.output"
            ),
            "a norm stands between the matrix and that activation",
        ),
        (sae("blocks.1.attn.hook_z", hook_head_index=3), r"one attention head \(hook_head_index=3\)"),
        (changed(sae(), training_forward_pass=lambda step: step), r"training SAE.* save_inference_model\(path\)"),
        (
            changed(sae(), cfg_normalize_activations="expected_average_only_in"),
            "'expected_average_only_in', which is not folded .*fold_activation_norm_scaling_factor",
        ),
        (
            changed(sae(), cfg_normalize_activations="covariance_whitening"),
            "'covariance_whitening', which is not folded",
        ),
        (changed(sae(), hook_z_reshaping_mode=True), "turn_off_forward_pass_hook_z_reshaping"),
        (changed(sae(), use_error_term=True), "use_error_term on.* Set sae.use_error_term = False"),
        (changed(sae(), W_skip=torch.ones(4, 4)), r"skip connection W_skip \(4, 4\) that is not zero"),
        (changed(sae(), cfg_d_sae=7), r"gave z \(1, 3, 6\) and y \(1, 3, 4\); its cfg says 7 units"),
        (changed(transcoder("mlp.hook_post", "hook_mlp_out"), cfg_d_out=7), r"cfg says 6 units and d_out=7"),
        (changed(sae(), cfg_d_in=3), r"Sae\.encode failed on torch\.float32 of shape \(1, 3, 3\)"),
        (AddsItsInput(hook_name="blocks.1.hook_mlp_out"), r"own forward is not decode\(encode\(x\)\).*% apart"),
        (LooksAside(hook_name="blocks.1.hook_mlp_out"), "units at one position change with the other positions"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(source, message):
    with pytest.raises(UnitSourceError, match=message):
        from_saelens(source)


def test_a_skip_of_zeros_and_a_run_time_norm_are_no_reason_to_refuse():
    (units,) = from_saelens(changed(sae(), W_skip=torch.zeros(4, 4), cfg_normalize_activations="layer_norm")).values()
    assert units.provenance["normalize_activations"] == "layer_norm"
