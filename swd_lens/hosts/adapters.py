"""Checkpoint folders beside whose weights an adapter lies (LoRA and the like, as the package peft saves them).

transformers reads such a folder without its adapter where peft is missing, and with peft leaves the adapter's modules in the
model, where a matrix is no longer one matrix. So the adapter is merged into the weights, in a folder of its own (made.py). A
model in memory that still has one is refused (`require_no_adapter`).
"""

import hashlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swd_lens.base.errors import UnsupportedHostError, legible
from swd_lens.hosts.made import made_folder, refused_as

CONFIG = "adapter_config.json"
WHAT = "a model with its adapter merged"


def merged(folder: Path, dtype: torch.dtype) -> tuple[Path, str]:
    """A checkpoint folder with this folder's adapter merged into its weights, and the model's name.

    Raises:
        ImportError: peft is missing.
        ValueError: peft cannot read the adapter, or it has no values for some of its modules.
        OSError: the cache folder cannot be written.
    """
    if find_spec("peft") is None:
        raise ImportError(f"{legible(folder)} holds an adapter beside the weights, which peft merges: pip install peft")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    # The weights themselves by name, size and time: reading gigabytes again would take longer than to load them.
    stated = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((str(folder.resolve()), stated)).encode()).hexdigest()
    place = f"adapters/{digest[:32]}-{str(dtype).removeprefix('torch.')}"
    source = {"folder": folder.resolve().name, "adapter": CONFIG, "dtype": str(dtype)}

    def merge(to: Path) -> str:
        from peft import PeftModel  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # transformers looks for an adapter beside the weights, and would put its modules in by itself.
        with tempfile.TemporaryDirectory() as plain:
            for path in files:
                if not path.name.startswith("adapter_"):
                    (Path(plain) / path.name).symlink_to(path.resolve())
            base: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(plain, local_files_only=True)
        with refused_as(f"peft cannot merge the adapter in {legible(folder)}"):
            model: Any = PeftModel.from_pretrained(base, str(folder))
            whole = model.merge_and_unload(safe_merge=True)
        whole.save_pretrained(to)
        tokenizer.save_pretrained(to)
        return f"{folder.resolve().name}, adapter merged"

    return made_folder(place, WHAT, source, merge)


def require_no_adapter(model: nn.Module) -> None:
    """Raise UnsupportedHostError where peft has put a module into a model."""
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedHostError(
                f"this model has an adapter in it ({type(module).__name__}): its matrices are sums of two. Merge it first: "
                "model.merge_and_unload(), then save_pretrained(folder) and swd_lens.load_host(folder)"
            )
