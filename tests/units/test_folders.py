"""Folders of SAELens and circuit-tracer as unit sources: what is read and refused, and that coders compute what the packages
compute that wrote them, by hand and against sae-lens itself. In a host: bridge/test_coder_folders.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swd_lens.base.errors import UnitSourceError
from swd_lens.units.folders import ARCHITECTURES, load_coders
from tests.units.coder_folders import circuit_tracer_folder, random_weights, saelens_folder


def _units(folder: Path) -> Any:
    ((site, units),) = load_coders(folder).items()
    return site, units


def test_folders_below_one_and_older_configurations(tmp_path: Path) -> None:
    weights = random_weights(6, 8, 6, "b_enc")
    for layer in (10, 2):
        saelens_folder(tmp_path / "all" / f"layer {layer}", weights, hook=f"blocks.{layer}.hook_mlp_out")
    coders = load_coders(tmp_path / "all")
    assert list(coders) == ["blocks.2.mlp_out", "blocks.10.mlp_out"]
    assert list(load_coders(tmp_path / "all", layers=[10])) == ["blocks.10.mlp_out"]
    assert coders["blocks.2.mlp_out"].provenance["path"].endswith("layer 2")
    assert "standard of layer 2" in repr(coders["blocks.2.mlp_out"])
    # Before 6: everything in one, the activation by its name, and a scaling factor of ones.
    saelens_folder(tmp_path / "old", {**weights, "scaling_factor": torch.ones(8)})
    old = '{"hook_point": "blocks.1.hook_mlp_out", "d_in": 6, "d_sae": 8, "dtype": "torch.float32", '
    old += '"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}, "normalize_activations": false}'
    (tmp_path / "old" / "cfg.json").write_text(old)
    site, units = _units(tmp_path / "old")
    z = units.encode(torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1)))
    assert site == "blocks.1.mlp_out" and units.coder.architecture == "topk"
    assert int((z != 0).sum(-1).max()) == 3
    # A file per layer, named by an address of the hub that was downloaded already.
    traced = circuit_tracer_folder(
        tmp_path / "traced",
        {0: {**random_weights(6, 8, 6, "b_enc"), "W_enc": torch.randn(8, 6)}},
        transcoders=["hf://org/repo/layer_0.safetensors?revision=x"],
    )
    assert list(load_coders(traced)) == ["blocks.0.mlp"]
    # gemma-scope-2 names its weights in small letters and stores them the other way round.
    own = random_weights(6, 8, 6, "b_enc", "threshold")
    scope = {"w_enc": own["W_enc"], "w_dec": own["W_dec"], **{name: own[name] for name in ("b_enc", "b_dec", "threshold")}}
    (units,) = load_coders(circuit_tracer_folder(tmp_path / "scope", {0: scope})).values()
    assert torch.equal(units.coder.W_enc, own["W_enc"])


def test_folders_that_hold_no_coder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        load_coders(tmp_path / "nothing")
    with pytest.raises(UnitSourceError, match="holds no coders"):
        load_coders(tmp_path)
    empty = circuit_tracer_folder(tmp_path / "empty", {})
    with pytest.raises(UnitSourceError, match="holds no coders"):
        load_coders(empty)
    (empty / "config.yaml").write_text("[1")
    with pytest.raises(UnitSourceError, match=r"config\.yaml is not a configuration of circuit-tracer, or damaged"):
        load_coders(empty)
    folder = saelens_folder(tmp_path / "damaged", random_weights(6, 8, 6, "b_enc"))
    (folder / "cfg.json").write_text("{")
    with pytest.raises(UnitSourceError, match=r"cfg\.json is not a configuration of SAELens, or damaged"):
        load_coders(folder)
    saelens_folder(folder, random_weights(6, 8, 6, "b_enc"))
    (folder / "sae_weights.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UnitSourceError, match=r"sae_weights\.safetensors is not weights of a coder, or damaged"):
        load_coders(folder)


def test_coders_that_would_be_computed_wrongly(tmp_path: Path) -> None:
    weights = random_weights(6, 8, 6, "b_enc")

    def refused(match: str, own: dict[str, Any] | None = None, **cfg: Any) -> None:
        with pytest.raises(UnitSourceError, match=match):
            load_coders(saelens_folder(tmp_path / "sae", own or weights, **cfg))

    refused("temporal cannot be computed", architecture="temporal")
    refused("standard with tanh-relu cannot be computed", activation_fn="tanh-relu")
    refused("finetuned scaling factors", {**weights, "scaling_factor": torch.full((8,), 2.0)})
    refused("a whole number k", architecture="topk")
    refused(r"missing: \['threshold'\]", architecture="jumprelu")
    refused(r"unknown: \['b_gate'\]", {**weights, "b_gate": torch.zeros(8)})
    refused(r"b_enc \(7,\) does not fit", {**weights, "b_enc": torch.zeros(7)})
    refused("d_sae 9 does not fit", d_sae=9)
    refused("expected_average_only_in", normalize_activations=True)
    refused("no matrix|reads or writes|no site", hook="blocks.1.hook_resid_pre")
    skip = random_weights(6, 8, 6, "b_enc", "W_skip")
    refused("skip", skip, architecture="skip_transcoder", hook="blocks.1.mlp.hook_in", out="blocks.1.hook_mlp_out")
    for name in ("a", "b"):
        saelens_folder(tmp_path / "twice" / name, weights)
    with pytest.raises(UnitSourceError, match=r"both stand at blocks\.1\.mlp_out"):
        load_coders(tmp_path / "twice")


def test_transcoders_that_have_no_site(tmp_path: Path) -> None:
    weights = {0: {**random_weights(6, 8, 6, "b_enc"), "W_enc": torch.randn(8, 6)}}
    across = circuit_tracer_folder(tmp_path / "across", weights, model_kind="cross_layer_transcoder")
    with pytest.raises(UnitSourceError, match="a cross_layer_transcoder: its units write to several layers"):
        load_coders(across)
    with pytest.raises(UnitSourceError, match="what its transcoders read and write"):
        load_coders(circuit_tracer_folder(tmp_path / "hookless", weights, feature_input_hook=None))
    hub = ["hf://org/repo/layer_0.safetensors", "hf://org/repo/layer_1.safetensors"]
    with pytest.raises(UnitSourceError, match=r"names hf://org/repo/layer_1.*as layer_1\.safetensors"):
        load_coders(circuit_tracer_folder(tmp_path / "hub", weights, transcoders=hub))
    with pytest.raises(UnitSourceError, match="hook_resid_mid"):
        load_coders(circuit_tracer_folder(tmp_path / "residual", weights, feature_input_hook="hook_resid_mid"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load_coders(circuit_tracer_folder(tmp_path / "gone", {}, transcoders=["elsewhere.safetensors"]))


# ---------------------------------------------------------------------------------------------- what they compute

# Two inputs, three units; unit 0 reads the first input, unit 1 the second, unit 2 minus their sum.
ENC = [[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]]
DEC = [[1.0, 0.0], [0.0, 2.0], [10.0, 10.0]]
X = torch.tensor([[[3.0, 1.0], [0.5, -2.0]]])


def test_circuit_tracer_by_hand(tmp_path: Path) -> None:
    """Its W_enc is (unit, d_in), nothing is taken off the input, and above a negative threshold z may be negative."""
    enc = torch.tensor(ENC).T
    layers = {
        0: {"W_enc": enc, "W_dec": DEC, "b_enc": [0.0, 0.5, 0.0], "b_dec": [1.0, 1.0]},
        2: {
            "W_enc": enc,
            "W_dec": DEC,
            "b_enc": [0.0] * 3,
            "b_dec": [0.0] * 2,
            "activation_function.threshold": [3.0, -3.0, 0.0],
        },
    }
    coders = load_coders(circuit_tracer_folder(tmp_path, layers))
    assert list(coders) == ["blocks.0.mlp", "blocks.2.mlp"]
    first, second = coders.values()
    assert (first.reads, first.writes, first.d_in, first.d_out) == ("input", "output", 2, 2)
    z = first.encode(X)
    assert z.tolist() == [[[3.0, 1.5, 0.0], [0.5, 0.0, 1.5]]]
    assert first.decode(z).tolist() == [[[4.0, 4.0], [16.5, 16.0]]]
    assert second.encode(X).tolist() == [[[0.0, 1.0, 0.0], [0.0, -2.0, 1.5]]]  # 3 is not above 3
    assert list(load_coders(tmp_path, layers=[2])) == ["blocks.2.mlp"]
    # Edges of unit 2: two of each side.
    assert first.edges_per_unit.tolist() == [2, 2, 4]


SAELENS = {
    "standard": ("StandardSAE", {}),
    "jumprelu": ("JumpReLUSAE", {}),
    "topk": ("TopKSAE", {"k": 4}),
    "topk, rescaled": ("TopKSAE", {"k": 4, "rescale_acts_by_decoder_norm": True}),
    "gated": ("GatedSAE", {}),
    "transcoder": ("Transcoder", {"d_out": 7}),
    "jumprelu transcoder": ("JumpReLUTranscoder", {"d_out": 7}),
    "skip transcoder": ("SkipTranscoder", {"d_out": 7}),
}


@pytest.mark.parametrize("kind", SAELENS)
@pytest.mark.parametrize("norm", ["none", "layer_norm", "constant_norm_rescale"])
def test_what_sae_lens_saves_computes_what_sae_lens_computes(kind: str, norm: str, tmp_path: Path) -> None:
    saes = pytest.importorskip("sae_lens").saes
    name, settings = SAELENS[kind]
    transcodes = "d_out" in settings
    hooks = {"hook_name": "blocks.3.hook_mlp_out"}
    if transcodes:
        hooks = {"hook_name": "blocks.3.mlp.hook_post", "hook_name_out": "blocks.3.hook_mlp_out"}
        settings = {**settings, "apply_b_dec_to_input": False}
    metadata = saes.sae.SAEMetadata(model_name="toy", **hooks)
    cfg = getattr(saes, f"{name}Config")(d_in=6, d_sae=16, metadata=metadata, normalize_activations=norm, **settings)
    sae = getattr(saes, name)(cfg)
    draw = torch.Generator().manual_seed(3)
    for parameter_name, parameter in sae.named_parameters():
        if parameter_name != "W_skip":  # another one is refused
            torch.nn.init.normal_(parameter, std=0.5, generator=draw)
    sae.save_model(tmp_path)
    site, units = _units(tmp_path)
    assert site == "blocks.3.mlp_out"
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert torch.equal(units.encode(x), sae.encode(x))
        assert torch.equal(units.decode(units.encode(x)), sae(x))
    assert units.coder.architecture in ARCHITECTURES
