"""The embedded model's sizes, and its stored parameters under the names of transformers' GPT-2.

The network that it was trained as, its training and its scores are tests/embedded/ of the repository.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


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
            "model_name": "swd-lens-default",
            "default_prepend_bos": True,
        }

    def gpt2_config(self) -> dict[str, Any]:
        """Arguments of transformers' GPT2Config for this shape: no dropout, and the rest as in `hooked_config`."""
        return {
            "vocab_size": self.d_vocab,
            "n_layer": self.n_layers,
            "n_embd": self.d_model,
            "n_head": self.n_heads,
            "n_inner": self.d_mlp,
            "n_positions": self.n_ctx,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
            # As a bridge asks for where it loads a model itself: other attention does not show its patterns.
            "attn_implementation": "eager",
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
            moved |= {
                f"{new}{name}.weight": state[f"{old}{norm}.w"],
                f"{new}{name}.bias": state[f"{old}{norm}.b"],
            }
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
