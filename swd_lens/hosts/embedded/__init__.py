"""The embedded model, a small one that does the four tasks, and held-out text for it: no network, no cache.

Beside it is its text (corpus); tests/embedded/ of the repository trained it and wrote weights/.

1. `load_model_folder`: a folder that training wrote (config, fp16 weights, tokenizer) in float32: as a HookedTransformer
   where transformer_lens has it (3.9), else as transformers' own GPT-2, whose function it is, in a TransformerBridge.
   Both hold the same matrices, bit for bit.
2. `load_default_model`: the folder that ships with the package.
3. `text_tokens`: rows of corpus text, for calibration and fidelity.
4. `Shape`: its sizes; `gpt2_state`: its stored parameters under the names of transformers' GPT-2.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import errors_seen, legible
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.embedded.corpus import MIX, N_CTX, Packer, load_tokenizer
from swd_lens.hosts.families import has_hooked_transformer, require_hooked_transformer
from swd_lens.tasks.generators.words import SPLITS

_NAME = "swd-lens-default"


@dataclass(frozen=True)
class Shape:
    """Sizes of the network: 0.98M parameters, 2 MB in fp16; 10k tokens/s on two CPU threads."""

    d_vocab: int
    n_layers: int = 4
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 512
    n_ctx: int = 128

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    def hooked_config(self) -> dict[str, Any]:
        """Arguments of HookedTransformerConfig for this shape."""
        return {
            **asdict(self),
            "d_head": self.d_head,
            "act_fn": "gelu_new",
            "normalization_type": "LN",
            "positional_embedding_type": "standard",
            "attention_dir": "causal",
            "eps": 1e-5,
            "model_name": _NAME,
            "default_prepend_bos": True,
        }

    def stored_names(self) -> list[str]:
        """TransformerLens' names of the parameters that a trained model's file holds."""
        block = ["attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O", "attn.b_Q", "attn.b_K", "attn.b_V", "attn.b_O"]
        block += ["mlp.W_in", "mlp.b_in", "mlp.W_out", "mlp.b_out", "ln1.w", "ln1.b", "ln2.w", "ln2.b"]
        blocks = [f"blocks.{layer}.{name}" for layer in range(self.n_layers) for name in block]
        return ["embed.W_E", "pos_embed.W_pos", *blocks, "ln_final.w", "ln_final.b"]


def gpt2_state(state: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """A stored state (TransformerLens' names) under the names and shapes of transformers' GPT2LMHeadModel: moved, not changed."""
    d = shape.d_model
    moved = {"transformer.wte.weight": state["embed.W_E"], "lm_head.weight": state["embed.W_E"]}
    moved |= {"transformer.wpe.weight": state["pos_embed.W_pos"]}
    moved |= {"transformer.ln_f.weight": state["ln_final.w"], "transformer.ln_f.bias": state["ln_final.b"]}
    for layer in range(shape.n_layers):
        old, new = f"blocks.{layer}.", f"transformer.h.{layer}."
        for norm, name in (("ln1", "ln_1"), ("ln2", "ln_2")):
            moved |= {f"{new}{name}.weight": state[f"{old}{norm}.w"], f"{new}{name}.bias": state[f"{old}{norm}.b"]}
        # GPT-2 packs Q, K, V side by side, heads inside each; its matrices are (d_in, d_out), as ours.
        weights = [state[f"{old}attn.W_{letter}"].transpose(0, 1).reshape(d, -1) for letter in "QKV"]
        biases = [state[f"{old}attn.b_{letter}"].flatten() for letter in "QKV"]
        moved |= {f"{new}attn.c_attn.weight": torch.cat(weights, 1), f"{new}attn.c_attn.bias": torch.cat(biases)}
        moved |= {f"{new}attn.c_proj.weight": state[f"{old}attn.W_O"].flatten(0, 1)}
        moved |= {f"{new}attn.c_proj.bias": state[f"{old}attn.b_O"]}
        for side, name in (("in", "c_fc"), ("out", "c_proj")):
            moved |= {f"{new}mlp.{name}.weight": state[f"{old}mlp.W_{side}"]}
            moved |= {f"{new}mlp.{name}.bias": state[f"{old}mlp.b_{side}"]}
    return moved


WEIGHTS = Path(__file__).parent / "weights"

# HookedTransformer, TransformerBridge, or whichever of the two transformer_lens has, in this order.
KINDS = ("auto", "hooked", "bridge")


@with_torch_defaults
@errors_seen
def load_default_model(device: "str | torch.device | None" = None, dtype: torch.dtype = torch.float32, kind: str = "auto") -> Any:
    """The embedded model: a 4-layer GPT-2-style host that does the four tasks, with its tokenizer.

    Offline. In eval mode; nothing is folded or centred; the unembedding is the embedding's transpose.

    Args:
        device: where to put it; None: the CPU (it is small).
        dtype: of the parameters (stored as fp16, the reported scores are those of float32 arithmetic on them).
        kind: "hooked" (HookedTransformer), "bridge" (TransformerBridge), or "auto": hooked where this transformer_lens
            has HookedTransformer (3.9), else bridge. Logits agree to 1e-5.

    Raises:
        FileNotFoundError: the package was installed without its weights.
        ImportError: "hooked", but this transformer_lens has no HookedTransformer (4.x).
        ValueError: unknown kind.
    """
    return load_model_folder(WEIGHTS, device, dtype, kind)


def load_model_folder(
    folder: str | Path, device: "str | torch.device | None" = None, dtype: torch.dtype = torch.float32, kind: str = "auto"
) -> Any:
    """The model in a folder written by `tests.embedded.train` (see `load_default_model`)."""
    one_of("kind", kind, KINDS)
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{legible(folder)} has no {legible(name)}; give a folder that tests.embedded.train wrote")
    shape, state, tokenizer = _read(folder, dtype)
    missing = [name for name in shape.stored_names() if name not in state]
    if missing:
        raise ValueError(f"{legible(folder)}/model.safetensors lacks {legible(', '.join(missing))}; train it again")
    device = str(device or "cpu")
    if kind == "bridge" or (kind == "auto" and not has_hooked_transformer()):
        from transformer_lens.model_bridge import TransformerBridge

        gpt2 = _gpt2(shape, state, tokenizer, device, dtype)
        model: Any = TransformerBridge.boot_transformers(_NAME, hf_model=gpt2, tokenizer=tokenizer, device=device, dtype=dtype)
        model.tokenizer.padding_side = "left"
        model.cfg.default_prepend_bos = True
        return model.eval()
    require_hooked_transformer(ImportError)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**shape.hooked_config(), device=device, dtype=dtype)
    model = HookedTransformer(config, tokenizer=tokenizer, default_padding_side="left")
    state["unembed.W_U"] = state["embed.W_E"].T.contiguous()
    state["unembed.b_U"] = torch.zeros(shape.d_vocab, dtype=dtype)
    # Not strict: TransformerLens keeps its causal mask as a buffer, which no file holds.
    model.load_state_dict(state, strict=False)
    return model.eval()


def _read(folder: Path, dtype: torch.dtype) -> tuple[Shape, dict[str, Tensor], PreTrainedTokenizerBase]:
    shape = Shape(**json.loads((folder / "config.json").read_text()))
    state = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    return shape, state, load_tokenizer(folder)


def _gpt2(shape: Shape, state: dict[str, Tensor], tokenizer: Any, device: str, dtype: torch.dtype) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    # No dropout, and the rest as in `hooked_config`. Eager, as a bridge asks for where it loads a model itself: other attention
    # does not show its patterns.
    settings = {
        **{f"{word}_token_id": getattr(tokenizer, f"{word}_token_id") for word in ("bos", "eos", "pad")},
        **{"vocab_size": shape.d_vocab, "n_positions": shape.n_ctx, "n_layer": shape.n_layers, "n_head": shape.n_heads},
        **{"n_embd": shape.d_model, "n_inner": shape.d_mlp, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_implementation": "eager"},
    }
    gpt2: Any = GPT2LMHeadModel(GPT2Config(**settings))
    gpt2.to(device, dtype)
    gpt2.load_state_dict(gpt2_state(state, shape))
    gpt2.tie_weights()
    return gpt2


def is_embedded(model: Any) -> bool:
    """Whether a host is called as `load_default_model` calls its own."""
    return getattr(model.cfg, "model_name", None) == _NAME


def network_of_embedded(dtype: torch.dtype) -> Any:
    """The embedded model as transformers' own GPT-2, on the CPU."""
    return _gpt2(*_read(WEIGHTS, dtype), "cpu", dtype).eval()


@with_torch_defaults
def text_tokens(n_tokens: int, split: str = "validation", seed: int = 0) -> Int[Tensor, "row 128"]:
    """Natural text of the embedded model as rows of 128 tokens, for calibration ("train") and fidelity ("test").

    A row is documents of the training mixture (tasks, copy lists, filler), each "BOS text EOS", packed one after the other; every
    row begins with BOS and its last document is cut off. Run it through an ordinary causal forward, without a document mask and
    without adding another BOS: one row in eight was trained in just this way (see `corpus`). The rows are never rows of the
    training run, also for "train"; the task documents of "validation" and "test" have held-out content (on the same templates).

    Args:
        n_tokens: at least this many tokens: ceil(n_tokens / 128) rows.
        split: "train", "validation" or "test".
        seed: another seed, other rows. The rows of a smaller request are the first of a larger one.

    Raises:
        ValueError: unknown split or n_tokens < 1.
    """
    one_of("split", split, SPLITS)
    bounded("n_tokens", n_tokens, 1)
    return Packer(load_tokenizer(WEIGHTS), split).plain_rows(seed, -(-n_tokens // N_CTX), MIX)
