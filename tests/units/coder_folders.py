"""Folders as SAELens and circuit-tracer write them, made without either."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def saelens_folder(
    path: Path,
    weights: dict[str, Any],
    *,
    architecture: str = "standard",
    hook: str = "blocks.1.hook_mlp_out",
    out: str | None = None,
    **cfg: Any,
) -> Path:
    """cfg.json and sae_weights.safetensors, as sae-lens 6 writes them."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.as_tensor(weight, dtype=torch.float32).contiguous() for name, weight in weights.items()}
    save_file(tensors, str(path / "sae_weights.safetensors"))
    metadata = {"sae_lens_version": "6.54.12", "model_name": "toy", "hook_name": hook, "hook_name_out": out}
    (d_in, d_sae), d_out = tensors["W_enc"].shape, tensors["W_dec"].shape[1]
    sizes = {"d_in": d_in, "d_sae": d_sae} | ({} if out is None else {"d_out": d_out})
    whole = {"architecture": architecture, "dtype": "float32", "metadata": metadata, **sizes, **cfg}
    (path / "cfg.json").write_text(json.dumps(whole))
    return path


def circuit_tracer_folder(path: Path, layers: dict[int, dict[str, Any]], **config: Any) -> Path:
    """config.yaml and a file per layer; W_enc is (unit, d_in)."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {
        "model_name": "toy",
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
        "scan": "toy",
        **config,
    }
    (path / "config.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in whole.items()))
    for layer, weights in layers.items():
        tensors = {name: torch.as_tensor(weight, dtype=torch.float32).contiguous() for name, weight in weights.items()}
        save_file(tensors, str(path / f"layer_{layer}.safetensors"))
    return path


def random_weights(d_in: int, n_units: int, d_out: int, *more: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """W_enc (d_in, unit), W_dec, biases, and what else is named."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (d_in, n_units), "W_dec": (n_units, d_out), "b_dec": (d_out,), "W_skip": (d_out, d_in)}
    names = ("W_enc", "W_dec", "b_dec", *more)
    return {name: torch.randn(shapes.get(name, (n_units,)), generator=draw) * 0.5 for name in names}
