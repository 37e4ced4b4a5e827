"""sae-lens objects through `from_saelens`: their sites, what is refused, and that units compute what SAELens itself computes.

sae-lens asks for transformer_lens < 4; it is a dependency of the tests (the dev extra), not of the package. Every SAE has
random weights, biases and thresholds; compared are the SAE's own forward, and, attached, HookedSAETransformer's logits.
"""

import json

import pytest
import sae_lens
import torch
from sae_lens import SAE, saes
from sae_lens.saes.sae import SAEMetadata
from torch import nn

from swd_lens.base.errors import UnitSourceError
from swd_lens.hosts.sites import Site
from swd_lens.units.coder import CoderUnits, is_counted
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import as_units

D_MODEL, D_MLP, UNITS = 6, 10, 16
SITE = "blocks.1.mlp_out"
SAE_KINDS = {
    "standard": (saes.StandardSAE, saes.StandardSAEConfig, {}),
    "jumprelu": (saes.JumpReLUSAE, saes.JumpReLUSAEConfig, {}),
    "topk": (saes.TopKSAE, saes.TopKSAEConfig, {"k": 4}),
    "absolute topk": (saes.AbsTopKSAE, saes.AbsTopKSAEConfig, {"k": 4}),
    "topk, rescaled": (saes.TopKSAE, saes.TopKSAEConfig, {"k": 4, "rescale_acts_by_decoder_norm": True}),
    "gated": (saes.GatedSAE, saes.GatedSAEConfig, {}),
    "matching pursuit": (saes.MatchingPursuitSAE, saes.MatchingPursuitSAEConfig, {"max_iterations": 3}),
}


def make(kind, width=D_MODEL, meta=None, **settings):
    """An SAE of random weights that stands on blocks.1.hook_mlp_out."""
    sae_class, cfg_class, own = SAE_KINDS[kind]
    metadata = SAEMetadata(**{"model_name": "toy", **(meta or {"hook_name": "blocks.1.hook_mlp_out"})})
    return shaken(sae_class(cfg_class(d_in=width, d_sae=UNITS, metadata=metadata, **own, **settings)))


def transcoder(name="Transcoder", read="mlp.hook_post", write="hook_mlp_out", d_in=D_MLP, d_out=D_MODEL, **meta):
    written = write if write is None or write.startswith("blocks.") else f"blocks.1.{write}"
    metadata = SAEMetadata(hook_name=f"blocks.1.{read}", hook_name_out=written, **meta)
    cfg = getattr(saes, f"{name}Config")(d_in=d_in, d_out=d_out, d_sae=UNITS, apply_b_dec_to_input=False, metadata=metadata)
    return shaken(getattr(saes, name)(cfg))


def shaken(sae):
    draw = torch.Generator().manual_seed(3)
    for parameter in sae.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return sae


def sae(hook="hook_mlp_out", **metadata):
    return make("standard", meta={"hook_name": f"blocks.1.{hook}", **metadata})


def changed(source, **attributes):
    for name, value in attributes.items():
        (setattr(source.cfg, name[4:], value) if name.startswith("cfg_") else setattr(source, name, value))
    return source


def inputs(width):
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(4))


def dense(h):
    return 2.0 * h[..., :D_MODEL] + 1.0


def test_saes_on_an_output():
    for kind in SAE_KINDS:
        for norm in ("none", "layer_norm", "constant_norm_rescale"):
            sae = make(kind, normalize_activations=norm)
            ((site, units),) = from_saelens(sae).items()
            assert (site, units.reads, units.writes, units.n_units) == ("blocks.1.mlp_out", "output", "output", UNITS)
            h = inputs(D_MLP)
            seen = []
            y = units.run(h, dense, lambda z, seen=seen: seen.append(z) or z)
            assert torch.equal(y, sae(dense(h))), (kind, norm)
            assert torch.equal(seen[0], sae.encode(dense(h))), (kind, norm)
            whole = as_units(sae, Site(1, "mlp_out", D_MLP, D_MODEL))
            assert is_counted(whole) and whole.edges == UNITS * 2 * D_MODEL


@pytest.mark.parametrize(
    ("hook", "site", "side", "needs"),
    [
        ("hook_mlp_out", "blocks.1.mlp_out", "output", {"needs_no_post_norm": True}),
        ("mlp.hook_out", "blocks.1.mlp_out", "output", {}),
        ("hook_attn_out", "blocks.1.attn_o", "output", {"needs_no_post_norm": True}),
        ("attn.hook_out", "blocks.1.attn_o", "output", {}),
        ("mlp.hook_pre", "blocks.1.mlp_in", "output", {"needs_ungated_mlp": True}),
        ("mlp.hook_post", "blocks.1.mlp_out", "input", {}),
        ("attn.hook_z", "blocks.1.attn_o", "input", {}),
    ],
)
def test_an_sae_finds_its_site(hook, site, side, needs):
    source = sae(hook, model_name="gpt2")
    ((name, units),) = from_saelens(source).items()
    assert (name, units.reads, units.writes, units.n_units) == (site, side, side, UNITS)
    assert units.provenance["hook_name"] == f"blocks.1.{hook}" and units.provenance["model_name"] == "gpt2"
    assert json.loads(json.dumps(dict(units.provenance))) == units.provenance
    assert {key: value for key, value in units.provenance.items() if key.startswith("needs")} == needs
    h = inputs(D_MODEL)
    assert torch.equal(units.run(h, lambda h: -h), source(-h) if side == "output" else -source(h))


@pytest.mark.parametrize("kind", ["Transcoder", "JumpReLUTranscoder"])
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
def test_a_transcoder_finds_its_site_and_needs_no_dense_product(kind, read, write, site):
    source = transcoder(kind, read, write)
    ((name, units),) = from_saelens(source).items()
    assert (name, units.reads, units.writes, units.d_in, units.d_out) == (site, "input", "output", D_MLP, D_MODEL)
    assert is_counted(units) and units.edges_per_unit.tolist() == [D_MLP + D_MODEL] * UNITS
    assert torch.equal(units.run(inputs(D_MLP), lambda h: pytest.fail("the dense product ran")), source(inputs(D_MLP)))


@pytest.mark.parametrize(
    ("read", "metadata", "folded"),
    [
        ("ln2.hook_normalized", {}, True),
        ("mlp.hook_in", {"model_from_pretrained_kwargs": {"fold_ln": False, "dtype": torch.float32}}, False),
        ("mlp.hook_in", {}, None),
        # Gemma Scope 2 calls the normalized input hook_mlp_in; its Hugging Face name says what it is.
        ("hook_mlp_in", {"hf_hook_name": "model.layers.1.pre_feedforward_layernorm.output"}, None),
    ],
)
def test_what_a_transcoder_of_the_mlp_needs_of_its_host_is_recorded(read, metadata, folded):
    ((site, units),) = from_saelens(transcoder(read=read, d_in=D_MODEL, **metadata)).items()
    assert site == "blocks.1.mlp" and units.provenance.get("needs_folded_ln") is folded


def test_an_sae_does_not_see_all_of_its_site_until_it_is_told():
    (units,) = from_saelens(sae()).values()
    assert (units.d_in, units.d_out) == (0, D_MODEL)
    assert repr(units) == "CoderUnits(blocks.1.mlp_out: StandardSAE, (?, 6) -> 16 units, reads output, writes output)"
    with pytest.raises(AttributeError, match=r"as_units\(units, site\) fills in .*d_in=0, d_out=6"):
        _ = units.sparsity
    whole = as_units(units, Site(1, "mlp_out", 9, D_MODEL))
    assert whole.d_in == 9 and is_counted(whole) and whole.edges_per_unit.tolist() == [2 * D_MODEL] * UNITS
    assert repr(whole).endswith("reads output, writes output, 192 edges, s=-2.5556)")
    (on_input,) = from_saelens(sae("mlp.hook_post")).values()
    assert not is_counted(on_input)
    with pytest.raises(AttributeError, match="cannot be counted yet"):
        _ = on_input.edges_per_unit
    assert as_units(on_input, Site(1, "mlp_out", D_MODEL, 7)).edges_per_unit.tolist() == [D_MODEL + 7] * UNITS


def test_as_units_takes_a_saelens_object_of_this_width_only():
    assert as_units(sae(), Site(1, "mlp_out", 9, D_MODEL)).reads == "output"
    with pytest.raises(UnitSourceError, match=r"is for \(\?, 6\), blocks\.1\.mlp_out is \(9, 8\): .*another model"):
        as_units(sae(), Site(1, "mlp_out", 9, 8))


def test_older_versions_keep_their_metadata_in_cfg():
    source = sae()
    del source.cfg.metadata
    source.cfg.hook_name = "blocks.3.hook_attn_out"
    assert list(from_saelens(source)) == ["blocks.3.attn_o"]


def of_kind(name, **settings):
    metadata = SAEMetadata(hook_name="blocks.1.hook_mlp_out")
    return shaken(getattr(saes, name)(getattr(saes, f"{name}Config")(d_in=D_MODEL, d_sae=UNITS, metadata=metadata, **settings)))


def doubled():
    hooked = sae()
    hooked.add_hook("hook_sae_output", lambda y, hook: 2.0 * y)
    return hooked


POST_NORM = "model.layers.1.post_feedforward_layernorm.output"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (nn.Identity(), "Identity is no SAELens object: it needs encode, decode and cfg.d_sae"),
        (make("standard", meta={"hook_name": None}), "does not say where it stands; set it: sae.cfg.metadata.hook_name"),
        (sae("hook_resid_pre"), "stands on blocks.1.hook_resid_pre, which is no matrix' input or output"),
        (make("standard", meta={"hook_name": "hook_embed"}), "stands on hook_embed: expected hooks of one block"),
        (transcoder(write=None), "does not say what it writes; set it: .*hook_name_out"),
        (transcoder(read="hook_mlp_out", write="hook_resid_post"), "hook_mlp_out -> blocks.1.hook_resid_post, which is no"),
        (transcoder(write="blocks.2.hook_mlp_out"), "hook_post -> blocks.2.hook_mlp_out: expected hooks of one block"),
        (transcoder(read="hook_mlp_in"), "hook_mlp_in, which in TransformerLens is the residual stream before"),
        (sae(hf_hook_name=POST_NORM), f"is of {POST_NORM}: a norm stands between"),
        (transcoder(read="mlp.hook_in", hf_hook_name_out=POST_NORM), "a norm stands between the matrix and that activation"),
        (sae("attn.hook_z", hook_head_index=3), r"one attention head \(hook_head_index=3\)"),
        (of_kind("BatchTopKTrainingSAE", k=4), r"training SAE.* save_inference_model\(path\)"),
        (
            make("standard", normalize_activations="expected_average_only_in"),
            "'expected_average_only_in', which is not folded .*fold_activation_norm_scaling_factor",
        ),
        (changed(sae(), cfg_normalize_activations="covariance_whitening"), "'covariance_whitening', which is not folded"),
        (changed(sae(), use_error_term=True), "use_error_term on.* Set sae.use_error_term = False"),
        (changed(sae(), cfg_d_sae=7), r"gave z \(1, 3, 16\) and y \(1, 3, 6\); its cfg says 7 units"),
        (changed(transcoder(), cfg_d_out=7), r"cfg says 16 units and d_out=7"),
        (changed(sae(), cfg_d_in=3), r"StandardSAE\.encode failed on torch\.float32 of shape \(1, 3, 3\)"),
        (of_kind("TemporalSAE", n_heads=2, bottleneck_factor=2), r"own forward is not decode\(encode\(x\)\).*% apart"),
        (doubled(), "reset_hooks"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(source, message):
    with pytest.raises(UnitSourceError, match=message):
        from_saelens(source)


def test_hook_z_with_heads_is_refused_until_it_is_flat():
    sae = make("standard", width=8, meta={"hook_name": "blocks.1.attn.hook_z"}, reshape_activations="hook_z")
    by_head = sae(inputs(8).unflatten(-1, (2, 4))).flatten(-2)
    with pytest.raises(UnitSourceError, match="turn_off_forward_pass_hook_z_reshaping"):
        from_saelens(sae)
    sae.turn_off_forward_pass_hook_z_reshaping()
    (units,) = from_saelens(sae).values()
    assert torch.equal(units.run(inputs(8), lambda h: h), by_head)


def test_skip_transcoders():
    for name in ("SkipTranscoder", "JumpReLUSkipTranscoder"):
        sae = transcoder(name)
        with pytest.raises(UnitSourceError, match=r"skip connection W_skip .* that is not zero"):
            from_saelens(sae)
        nn.init.zeros_(sae.W_skip)
        (units,) = from_saelens(sae).values()
        assert torch.equal(units.run(inputs(D_MLP), dense), sae(inputs(D_MLP)))


def test_a_norm_to_fold():
    sae = make("standard", normalize_activations="expected_average_only_in")
    expected = sae(3.0 * inputs(D_MODEL)) / 3.0
    with pytest.raises(UnitSourceError, match="fold_activation_norm_scaling_factor"):
        from_saelens(sae)
    sae.fold_activation_norm_scaling_factor(3.0)
    (units,) = from_saelens(sae).values()
    torch.testing.assert_close(units.decode(units.encode(inputs(D_MODEL))), expected, rtol=1e-4, atol=1e-5)


def test_the_batch_top_k_is_caught_by_its_behaviour_too():
    # Were it not called a training SAE, the trial would still see that its units look at the other positions.
    from swd_lens.units import saelens

    training = shaken(saes.BatchTopKTrainingSAE(saes.BatchTopKTrainingSAEConfig(d_in=D_MODEL, d_sae=UNITS, k=4)))
    units = CoderUnits(training, 0, D_MODEL, UNITS, reads="output", name="BatchTopK")
    with pytest.raises(UnitSourceError, match="change with the other positions"):
        saelens._prove(training, units)


def test_attached_they_give_the_logits_of_sae_lens_own_host():
    from sae_lens import HookedSAETransformer
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    import swd_lens as swd

    sizes = {"n_layers": 2, "d_model": D_MODEL, "n_ctx": 8, "d_head": 3, "n_heads": 2, "d_mlp": D_MLP, "d_vocab": 11}
    cfg = HookedTransformerConfig(**sizes, act_fn="gelu", normalization_type="LNPre", seed=1)
    theirs, ours = HookedSAETransformer(cfg), HookedTransformer(cfg)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.arange(8)[None]
    sources = {
        "blocks.1.hook_mlp_out_unit": [make("jumprelu", normalize_activations="layer_norm"), transcoder()],
        "blocks.1.hook_attn_o_unit": [
            make("topk", meta={"hook_name": "blocks.1.hook_attn_out"}),
            make("standard", meta={"hook_name": "blocks.1.attn.hook_z"}, reshape_activations="hook_z"),
        ],
        "blocks.1.hook_mlp_in_unit": [make("standard", width=D_MLP, meta={"hook_name": "blocks.1.mlp.hook_pre"})],
        "blocks.1.hook_mlp_unit": [
            transcoder(read="ln2.hook_normalized", d_in=D_MODEL),
            transcoder("JumpReLUTranscoder", read="mlp.hook_in", d_in=D_MODEL),
        ],
    }
    sources["blocks.1.hook_mlp_out_unit"].append(make("gated", D_MLP, {"hook_name": "blocks.1.mlp.hook_post"}))
    with torch.no_grad():
        plain = theirs(tokens)
        for hook, saes_there in sources.items():
            for sae in saes_there:
                expected = theirs.run_with_saes(tokens, saes=[sae])
                sae.turn_off_forward_pass_hook_z_reshaping()
                with swd.attach(ours, sae):
                    logits, cache = ours.run_with_cache(tokens)
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
                assert cache[hook].shape == (1, 8, UNITS)
                assert (expected - plain).abs().max() > 0.1
                assert torch.equal(ours(tokens), plain)


# ---------------------------------------------------------------------------------------------- from disk


def test_training_saes_become_units_through_their_inference_files(tmp_path):
    settings = {"d_in": D_MODEL, "d_sae": UNITS, "metadata": SAEMetadata(hook_name="blocks.1.hook_mlp_out")}
    kinds = {
        "Standard": ({}, "StandardSAE"),
        "Gated": ({}, "GatedSAE"),
        "TopK": ({"k": 4}, "TopKSAE"),
        "JumpReLU": ({}, "JumpReLUSAE"),
        "BatchTopK": ({"k": 4}, "JumpReLUSAE"),  # the threshold that it has learned
        "MatryoshkaBatchTopK": ({"k": 4, "matryoshka_widths": [8, UNITS]}, "JumpReLUSAE"),
    }
    for kind, (own, becomes) in kinds.items():
        cfg = getattr(sae_lens, f"{kind}TrainingSAEConfig")(**settings, **own)
        training = shaken(getattr(sae_lens, f"{kind}TrainingSAE")(cfg))
        with pytest.raises(UnitSourceError, match="training SAE"):
            from_saelens(training)
        training.save_inference_model(tmp_path / kind)
        released = SAE.load_from_disk(tmp_path / kind)
        ((site, units),) = from_saelens(released).items()
        assert (site, units.name) == (SITE, becomes)
        assert torch.equal(units.run(inputs(D_MLP), dense), released(dense(inputs(D_MLP))))


def test_version():
    assert int(sae_lens.__version__.split(".")[0]) == 6, f"checked against 6.54.12, this is {sae_lens.__version__}"
