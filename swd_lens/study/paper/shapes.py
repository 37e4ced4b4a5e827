"""Shapes of hosts: what costs are made of, known of the profiles' models without loading them.

A projection takes 2 operations per weight and token; attention's products with the keys and values come on top.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swd_lens.base.record import PlainRecord
from swd_lens.hosts.sites import split_name


@dataclass(frozen=True)
class Shape(PlainRecord):
    """A host's sizes: weights of its blocks are taken as projections only."""

    layers: int
    d_model: int
    d_mlp: int
    d_vocab: int
    heads: int
    key_heads: int
    d_head: int
    gated: bool
    packed: bool = False  # queries, keys and values in one matrix

    @classmethod
    def of(cls, model: Any) -> "Shape":
        """Read the shape of a loaded host."""
        cfg = model.cfg
        key_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        gated = bool(getattr(cfg, "gated_mlp", False))
        packed = key_heads == cfg.n_heads and not gated
        return cls(cfg.n_layers, cfg.d_model, cfg.d_mlp, cfg.d_vocab, cfg.n_heads, key_heads, cfg.d_head, gated, packed)

    def matrix(self, kind: str) -> tuple[int, int]:
        """(d_in, d_out) of a kind of matrix."""
        wide, narrow = self.heads * self.d_head, self.key_heads * self.d_head
        return {
            "attn_qkv": (self.d_model, wide + 2 * narrow),
            "attn_q": (self.d_model, wide),
            "attn_k": (self.d_model, narrow),
            "attn_v": (self.d_model, narrow),
            "attn_o": (wide, self.d_model),
            "mlp_in": (self.d_model, self.d_mlp),
            "mlp_gate": (self.d_model, self.d_mlp),
            "mlp_out": (self.d_mlp, self.d_model),
            "mlp": (self.d_model, self.d_model),
        }[kind]

    def kinds(self) -> tuple[str, ...]:
        """The kinds of matrix in a block."""
        attention = ("attn_qkv",) if self.packed else ("attn_q", "attn_k", "attn_v")
        return (*attention, "attn_o", "mlp_in", *(("mlp_gate",) if self.gated else ()), "mlp_out")

    def sites(self, pattern: str | Sequence[str]) -> list[tuple[int, tuple[int, int]]]:
        """(layer, (d_in, d_out)) of every matrix that patterns name, in execution order."""
        named = []
        for each in [pattern] if isinstance(pattern, str) else pattern:
            if each == "all":
                named += [(layer, self.matrix(kind)) for layer in range(self.layers) for kind in self.kinds()]
            elif "." in each:
                layer, kind = split_name(each)
                named.append((layer, self.matrix(kind)))
            else:
                named += [(layer, self.matrix(each)) for layer in range(self.layers)]
        return sorted(named, key=lambda site: site[0])

    @property
    def block_weights(self) -> int:
        """Count the weights of one block's matrices."""
        return sum(math.prod(self.matrix(kind)) for kind in self.kinds())

    @property
    def weights(self) -> int:
        """Count the weights of blocks, embedding and unembedding."""
        return self.layers * self.block_weights + 2 * self.d_vocab * self.d_model

    def forward(self, tokens: float | int, context: int, layers: int | None = None) -> float:
        """Operations of a forward of so many tokens, in rows of `context`; of the first layers only, or of all and the logits."""
        n = self.layers if layers is None else layers
        attention = 4 * context * self.heads * self.d_head
        each = n * (2 * self.block_weights + attention) + (layers is None) * 2 * self.d_vocab * self.d_model
        return float(tokens * each)


# Model of a profile -> its shape (of their config.json; of Qwen3.5-27B, whose attention is partly linear, as if it were not).
SHAPES: Mapping[str, Shape] = {
    "gpt2": Shape(12, 768, 3072, 50_257, 12, 12, 64, False, True),
    "Qwen/Qwen2.5-0.5B": Shape(24, 896, 4864, 151_936, 14, 2, 64, True),
    "Qwen/Qwen2.5-1.5B": Shape(28, 1536, 8960, 151_936, 12, 2, 128, True),
    "Qwen/Qwen2.5-3B": Shape(36, 2048, 11_008, 151_936, 16, 2, 128, True),
    "Qwen/Qwen3.5-27B": Shape(64, 5120, 17_408, 248_320, 40, 8, 128, True),
    "smollm2": Shape(30, 576, 1536, 49_152, 9, 3, 64, True),
    "default": Shape(4, 128, 512, 1366, 4, 4, 32, False, True),
}
