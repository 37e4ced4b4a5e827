"""load_coders: folders of SAEs and transcoders as units, without importing the package that wrote them.

1. What a folder holds is seen by its files: cfg.json and sae_weights.safetensors (SAELens, also several such folders in one);
   config.yaml and layer_{L}.safetensors (circuit-tracer).
2. Each becomes a `LoadedCoder` with the hooks that its configuration names; `from_saelens` says at which site that is, refuses
   what would run and be wrong, and tries it.
3. A `LoadedCoder` computes what the package computes that wrote it, as found in sae-lens 6.54 and circuit-tracer 0.5.0:

    z = f(norm(x) @ W_enc + b_enc),    y = unnorm(z @ W_dec + b_dec)

a. SAELens takes b_dec off the normed x first, if apply_b_dec_to_input (not of transcoders); W_enc is (d_in, unit).
b. f of "standard" and "transcoder": ReLU. "jumprelu": ReLU, then 0 up to the threshold. "topk": ReLU of the k largest, 0 else;
   with rescale_acts_by_decoder_norm z is in units of |W_dec[i]|. "gated": ReLU of (W_enc * exp(r_mag)) with b_mag where W_enc
   with b_gate is above 0.
c. norm at run time: "layer_norm" (sample standard deviation, 1e-5 beside it) and "constant_norm_rescale" (length sqrt(d_in)).
d. circuit-tracer stores W_enc as (unit, d_in); with a threshold f is x where x lies above it (no ReLU), else ReLU.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.errors import UnitSourceError, legible, quoted
from swd_lens.base.sealed import open_tensors, readable
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.units.coder import CoderUnits
from swd_lens.units.saelens import from_saelens

_CFG, _WEIGHTS, _CONFIG = "cfg.json", "sae_weights.safetensors", "config.yaml"
_NO_CODERS = (
    "holds no coders: neither cfg.json and sae_weights.safetensors (SAELens) nor config.yaml and layer_*.safetensors "
    "(circuit-tracer), nor folders of the former"
)
_BASE = {"W_enc", "W_dec", "b_dec"}
# SAELens before 6 kept these beside the rest of its cfg.
_OLD_NAMES = {"hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "activation_fn_str": "activation_fn"}

# Architecture -> its weights beyond W_enc, W_dec and b_dec.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
    "transcoder": ("b_enc",),
    "jumprelu_transcoder": ("b_enc", "threshold"),
    "skip_transcoder": ("b_enc", "W_skip"),
    "jumprelu_skip_transcoder": ("b_enc", "threshold", "W_skip"),
}


class LoadedCoder(nn.Module):
    """An SAE or transcoder of a folder.

    Attributes:
        cfg: d_in, d_sae, d_out (of transcoders), normalize_activations, metadata (hooks), as SAELens' objects have them.
        W_enc, W_dec: (d_in, unit) and (unit, d_out); with the other weights of the architecture they are buffers.
    """

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    threshold: Tensor

    def __init__(self, architecture: str, cfg: SimpleNamespace, weights: Mapping[str, Tensor]):
        super().__init__()
        self.architecture, self.cfg = architecture, cfg
        for name, weight in weights.items():
            self.register_buffer(name, weight.contiguous())
        self._undo: Callable[[Tensor], Tensor] | None = None

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z of the units."""
        norm = self.cfg.normalize_activations
        if norm == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            deviation = (x - mean).std(dim=-1, keepdim=True)
            self._undo = lambda y: y * deviation + mean
            x = (x - mean) / (deviation + 1e-5)
        elif norm == "constant_norm_rescale":
            scale = self.cfg.d_in**0.5 / x.norm(dim=-1, keepdim=True)
            self._undo = lambda y: y / scale
            x = x * scale
        if self.cfg.apply_b_dec_to_input:
            x = x - self.b_dec
        if self.architecture == "gated":
            gate = (x @ self.W_enc + self.b_gate > 0).to(x.dtype)
            return gate * (x @ (self.W_enc * self.r_mag.exp()) + self.b_mag).relu()
        pre = x @ self.W_enc + self.b_enc
        if self.architecture == "topk":
            pre = pre * self.W_dec.norm(dim=-1) if self.cfg.rescale_acts_by_decoder_norm else pre
            largest, units = pre.topk(self.cfg.k, dim=-1)
            return torch.zeros_like(pre).scatter(-1, units, largest.relu())
        z = pre if self.cfg.negative_above_threshold else pre.relu()
        return z * (pre > self.threshold).to(z.dtype) if hasattr(self, "threshold") else z

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        """Sum what the units write; a norm at run time is undone as the latest encode applied it."""
        if self.architecture == "topk" and self.cfg.rescale_acts_by_decoder_norm:
            z = z * (1 / self.W_dec.norm(dim=-1))
        y = z @ self.W_dec + self.b_dec
        if self._undo is not None and not hasattr(self.cfg, "d_out"):
            y, self._undo = self._undo(y), None
        return y

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return self.decode(self.encode(x))


@with_torch_defaults
def load_coders(path: str | Path, *, layers: Iterable[int] | None = None) -> dict[str, CoderUnits]:
    """Load the SAEs or transcoders of a folder as units, which `attach`, `attribute` and all else take.

        coders = swd.load_coders("gpt2-small-mlp-out")      # cfg.json and sae_weights.safetensors, or folders of these
        with swd.attach(model, coders): ...

    Neither sae-lens nor circuit-tracer is needed, so this works with every transformer_lens. What `from_saelens` says of sites,
    norms, skip connections and hosts holds here, too.

    Args:
        path: a folder that SAELens saved, of the architectures "standard", "topk", "jumprelu", "gated" and transcoders; one
            that has several such folders below it; or a folder of circuit-tracer, with config.yaml and a file per layer.
        layers: only these blocks; None: all. Weights of others are not read.

    Returns:
        Site name -> CoderUnits, in the order of layers.

    Raises:
        FileNotFoundError: no such folder, or a weight file that is not there.
        UnitSourceError: no folder of these; another architecture; a cross-layer transcoder; weights that are missing, unknown or
            of other sizes; two for one site; weights that lie on the hub; and see `from_saelens`.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no {legible(path)}")
    wanted = None if layers is None else set(layers)
    if (path / _CONFIG).is_file():
        coders = _circuit_tracer(path, wanted)
    else:
        folders = sorted(cfg.parent for cfg in path.rglob(_CFG) if (cfg.parent / _WEIGHTS).is_file())
        if not folders:
            raise UnitSourceError(f"{path} {_NO_CODERS}")
        coders = ((folder, _saelens(folder, wanted)) for folder in folders)
    units: dict[str, CoderUnits] = {}
    for source, coder in coders:
        if coder is None:
            continue
        ((site, of_site),) = from_saelens(coder).items()
        if site in units:
            raise UnitSourceError(f"{source} and {units[site].provenance['path']} both stand at {site}; load them one at a time")
        provenance = {**of_site.provenance, "source": coder.architecture, "path": str(source)}
        units[site] = replace(of_site, name=f"{coder.architecture} of {source.name}", provenance=provenance)
    return dict(sorted(units.items(), key=lambda item: int(item[0].split(".")[1])))


def _saelens(folder: Path, layers: set[int] | None) -> LoadedCoder | None:
    """The coder of a folder; None where its layer is not asked for."""
    path = folder / _CFG
    with readable(path, "a configuration of SAELens", UnitSourceError):
        cfg = dict(json.loads(path.read_text(encoding="utf-8")))
    cfg = {_OLD_NAMES.get(name, name): value for name, value in cfg.items()}
    metadata = dict(cfg.get("metadata") or cfg)  # before sae-lens 6 they were one
    if layers is not None and not {int(n) for n in re.findall(r"blocks\.(\d+)\.", str(metadata.get("hook_name")))} & layers:
        return None
    architecture, k = cfg.get("architecture", "standard"), cfg.get("k")
    if cfg.get("activation_fn") == "topk":
        architecture, k = "topk", (cfg.get("activation_fn_kwargs") or {}).get("k", k)
    activation = cfg.get("activation_fn", "relu")
    if architecture not in ARCHITECTURES or activation not in ("relu", "topk"):
        kind = architecture if architecture not in ARCHITECTURES else f"{architecture} with {activation}"
        raise UnitSourceError(
            f"{path}: {kind} cannot be computed here exactly as where it was made; known: {', '.join(ARCHITECTURES)}"
        )
    if architecture == "topk" and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise UnitSourceError(f"{path}: a topk coder needs a whole number k of 1 or more, got {quoted(k)}")
    norm = cfg.get("normalize_activations") or "none"
    transcodes = "transcoder" in architecture
    weights = _tensors(folder / _WEIGHTS, str(cfg.get("dtype", "float32")))
    if "log_threshold" in weights:
        weights["threshold"] = weights.pop("log_threshold").exp()
    if (scaling := weights.pop("scaling_factor", None)) is not None and bool((scaling != 1).any()):
        raise UnitSourceError(
            f"{path}: finetuned scaling factors cannot be computed here exactly as where it was made; known: none"
        )
    own = SimpleNamespace(
        normalize_activations="expected_average_only_in" if norm is True else norm,
        metadata=metadata,
        apply_b_dec_to_input=bool(cfg.get("apply_b_dec_to_input", True)) and not transcodes,
        rescale_acts_by_decoder_norm=bool(cfg.get("rescale_acts_by_decoder_norm", False)),
        k=k,
        negative_above_threshold=False,
    )
    sizes = {name: cfg.get(name) for name in ("d_in", "d_sae", *(["d_out"] if transcodes else []))}
    return _coder(folder / _WEIGHTS, architecture, own, weights, sizes, transcodes)


def _circuit_tracer(folder: Path, layers: set[int] | None) -> Iterable[tuple[Path, LoadedCoder | None]]:
    """The transcoder of each layer that is asked for."""
    path = folder / _CONFIG
    with readable(path, "a configuration of circuit-tracer", UnitSourceError):
        config = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    kind = config.get("model_kind", "transcoder_set")
    if kind != "transcoder_set":
        raise UnitSourceError(
            f"{path} is a {kind}: its units write to several layers at once, and units stand at one site; take "
            "transcoders of single layers (model_kind: transcoder_set)"
        )
    hooks = [config.get(name) for name in ("feature_input_hook", "feature_output_hook")]
    if not all(isinstance(hook, str) for hook in hooks):
        raise UnitSourceError(
            f"{path} does not say what its transcoders read and write (feature_input_hook, feature_output_hook)"
        )
    for layer, file in sorted(_layer_files(folder, config.get("transcoders")).items()):
        if layers is not None and layer not in layers:
            continue
        weights = _tensors(file, None)
        if "w_enc" in weights:  # gemma-scope-2
            renamed = {"w_enc": "W_enc", "w_dec": "W_dec", "affine_skip_connection": "W_skip"}
            weights = {renamed.get(name, name): weight for name, weight in weights.items()}
        elif "W_enc" in weights:
            weights["W_enc"] = weights["W_enc"].T
        if (threshold := weights.pop("activation_function.threshold", None)) is not None:
            weights["threshold"] = threshold
        own = SimpleNamespace(
            normalize_activations="none",
            metadata={
                "model_name": config.get("model_name"),
                "hook_name": f"blocks.{layer}.{hooks[0]}",
                "hook_name_out": f"blocks.{layer}.{hooks[1]}",
                # It loads its models so, whatever the transcoders were trained with.
                "model_from_pretrained_kwargs": {"fold_ln": False},
            },
            apply_b_dec_to_input=False,
            negative_above_threshold="threshold" in weights,
        )
        architecture = "jumprelu_" * ("threshold" in weights) + "skip_" * ("W_skip" in weights) + "transcoder"
        yield file, _coder(file, architecture, own, weights, {}, True)


def _layer_files(folder: Path, listed: Any) -> dict[int, Path]:
    """Layer -> its file: those that config.yaml lists, else all that are there."""
    if not listed:
        names = {int(file.stem.removeprefix("layer_")): file for file in folder.glob("layer_*.safetensors")}
        if not names:
            raise UnitSourceError(f"{folder} {_NO_CODERS}")
        return names
    files: dict[int, Path] = {}
    for number, entry in enumerate(listed):
        # A list of addresses, or (before 0.2) of mappings that name them.
        layer, address = (entry.get("layer", number), entry.get("filepath")) if isinstance(entry, Mapping) else (number, entry)
        own = folder / f"layer_{layer}.safetensors"
        if str(address).startswith("hf://") and not own.is_file():
            raise UnitSourceError(
                f"{folder / _CONFIG} names {address}, which is not on this machine; download it to the folder as "
                f"layer_{layer}.safetensors"
            )
        files[int(layer)] = own if own.is_file() else folder / str(address)
    return files


def _tensors(path: Path, dtype: str | None) -> dict[str, Tensor]:
    """All tensors of a file, in the dtype that a configuration names (as they are where None)."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {legible(path)}")
    if path.suffix != ".safetensors":
        raise UnitSourceError(f"{path}: {path.suffix} cannot be computed here exactly as where it was made; known: .safetensors")
    file = open_tensors(path, "weights of a coder", UnitSourceError)
    with readable(path, "weights of a coder", UnitSourceError):
        as_type = None if dtype is None else getattr(torch, dtype.removeprefix("torch."))
        return {name: file.get_tensor(name).to(as_type) for name in file.keys()}  # noqa: SIM118 - no mapping


def _coder(
    path: Path, architecture: str, cfg: SimpleNamespace, weights: dict[str, Tensor], sizes: Mapping[str, Any], transcodes: bool
) -> LoadedCoder:
    """A coder of weights that fit each other, and the sizes that its configuration names."""
    expected = _BASE | set(ARCHITECTURES[architecture])
    if set(weights) != expected:
        missing, unknown = sorted(expected - set(weights)), sorted(set(weights) - expected)
        raise UnitSourceError(f"{path}: a {architecture} has other weights; missing: {missing}, unknown: {unknown}")
    (d_in, n_units), d_out = tuple(weights["W_enc"].shape), weights["W_dec"].shape[-1]
    shapes = {"W_enc": (d_in, n_units), "W_dec": (n_units, d_out), "b_dec": (d_out,), "W_skip": (d_out, d_in)}
    for name, weight in weights.items():
        if tuple(weight.shape) != shapes.get(name, (n_units,)):
            raise UnitSourceError(f"{path}: {name} {tuple(weight.shape)} does not fit W_enc and W_dec")
    actual = {"d_in": d_in, "d_sae": n_units, "d_out": d_out}
    for name, size in sizes.items():
        if size is not None and size != actual[name]:
            raise UnitSourceError(f"{path}: {name} {size} does not fit W_enc and W_dec")
    cfg.d_in, cfg.d_sae = d_in, n_units
    if transcodes:
        cfg.d_out = d_out
    return LoadedCoder(architecture, cfg, weights)
