"""Load the embedded model, and held-out text for it, from the package's own files: no network, no cache.

1. `load_model_folder`: a folder that `train` wrote (config, fp16 weights, tokenizer) as a float32 HookedTransformer.
2. `load_default_model`: the folder that ships with the package.
3. `text_tokens`: rows of corpus text, for calibration and fidelity.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor

from swd_lens.default_model.corpus import MIX, N_CTX, Packer
from swd_lens.default_model.network import Shape
from swd_lens.default_model.tokenizer import load_tokenizer
from swd_lens.tasks.generators.words import SPLITS

if TYPE_CHECKING:  # HookedTransformer is gone in TransformerLens 4: never imported at module level
    from transformer_lens import HookedTransformer

WEIGHTS = Path(__file__).parent / "weights"


def load_default_model(
    device: "str | torch.device | None" = None, dtype: torch.dtype = torch.float32
) -> "HookedTransformer":
    """The embedded model: a 4-layer GPT-2-style HookedTransformer that does the four tasks, with its tokenizer.

    Offline. In eval mode; nothing is folded or centred; the unembedding is a copy of the embedding's transpose.

    Args:
        device: where to put it; None: the CPU (it is small).
        dtype: of the parameters (stored as fp16, the reported scores are those of float32 arithmetic on them).

    Raises:
        FileNotFoundError: the package was installed without its weights.
    """
    return load_model_folder(WEIGHTS, device, dtype)


def load_model_folder(
    folder: str | Path, device: "str | torch.device | None" = None, dtype: torch.dtype = torch.float32
) -> "HookedTransformer":
    """The model in a folder written by `swd_lens.default_model.train` (see `load_default_model`)."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; give a folder that swd_lens.default_model.train wrote")
    shape = Shape(**json.loads((folder / "config.json").read_text()))
    config = HookedTransformerConfig(**shape.hooked_config(), device=str(device or "cpu"), dtype=dtype)
    model = HookedTransformer(config, tokenizer=load_tokenizer(folder), default_padding_side="left")
    state = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    state["unembed.W_U"] = state["embed.W_E"].T.contiguous()
    state["unembed.b_U"] = torch.zeros(shape.d_vocab, dtype=dtype)
    # TransformerLens keeps its causal mask as a buffer; everything else must be in the file
    missing = [key for key in model.state_dict() if key not in state and not key.endswith(("attn.mask", "attn.IGNORE"))]
    if missing:
        raise ValueError(f"{folder}/model.safetensors lacks {', '.join(missing)}; train it again")
    model.load_state_dict(state, strict=False)
    return model.eval()


def text_tokens(n_tokens: int, split: str = "validation", seed: int = 0) -> Int[Tensor, "row 128"]:
    """Natural text of the embedded model as rows of 128 tokens, for calibration ("train") and fidelity ("test").

    A row is documents of the training mixture (tasks, copy lists, filler), each "BOS text EOS", packed one after the
    other; every row begins with BOS and its last document is cut off. Run it through an ordinary causal forward,
    without a document mask and without adding another BOS: one row in eight was trained in just this way (see
    `corpus`). The rows are never rows of the training run, also for "train"; the task documents of "validation" and
    "test" have held-out content (on the same templates).

    Args:
        n_tokens: at least this many tokens: ceil(n_tokens / 128) rows.
        split: "train", "validation" or "test".
        seed: another seed, other rows. The rows of a smaller request are the first of a larger one.

    Raises:
        ValueError: unknown split or n_tokens < 1.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if n_tokens < 1:
        raise ValueError(f"n_tokens is {n_tokens}; ask for at least 1")
    return Packer(load_tokenizer(WEIGHTS), split).plain_rows(seed, -(-n_tokens // N_CTX), MIX)
