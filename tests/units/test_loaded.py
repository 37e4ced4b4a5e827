"""Coders of folders compute what the packages compute that wrote them: by hand, and against sae-lens itself."""

from pathlib import Path

import pytest
import torch

from swd_lens.units.folders import load_coders
from swd_lens.units.loaded import ARCHITECTURES
from tests.units.coder_folders import circuit_tracer_folder
from tests.units.test_folders import _units

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
