"""What the ends of a unit's edges, and the tokens of its contexts, are called.

1. `TokenNames`: the string of a token id, each asked of the tokenizer once.
2. `Ends`: the coordinates of a site's input or output by name. mlp_out reads MLP neurons, attn_o head by head; both write
   residual dimensions. attn_qkv writes the heads of Q, K and V one after the other; mlp_in and mlp_gate write neurons.
"""

from dataclasses import dataclass
from typing import Any

from swd_lens.hosts import host_of
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, WRITES_RESIDUAL, split_name

_SENTENCEPIECE_SPACE = "\u2581"


class TokenNames:
    """Token id -> its string; ids in brackets where the host has no tokenizer."""

    def __init__(self, model: Any):
        self._tokenizer = getattr(model, "tokenizer", None)
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._string(token)
        return self._known[token]

    def _string(self, token: int) -> str:
        if self._tokenizer is None:
            return f"[{token}]"
        text = self._tokenizer.decode([token])
        # SentencePiece drops the space of a token that is decoded alone.
        piece = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: "")(token)
        spaced = isinstance(piece, str) and piece.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" ")
        return " " + text if spaced else text


@dataclass(frozen=True)
class Span:
    """Coordinates start .. start + size - 1 of one end, such as a head; named by coordinate where the size is the whole."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Ends:
    """Names of the coordinates that the units of a host read and write.

    Attributes:
        n_heads, n_kv_heads, d_head: the host's attention.
        other_attention: layers whose attention has other heads than these (linear attention).
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    other_attention: frozenset[int]

    @classmethod
    def of(cls, model: Any) -> "Ends":
        cfg = model.cfg
        linear = {site.layer for site in host_of(model).sites() if site.kind in ("attn_beta", "attn_decay")}
        n_heads = int(cfg.n_heads)
        n_kv_heads = int(getattr(cfg, "n_key_value_heads", None) or n_heads)
        return cls(n_heads, n_kv_heads, int(cfg.d_head), frozenset(linear))

    def read(self, site: str, width: int) -> list[Span]:
        """The spans of the site's input, d_in = width."""
        layer, kind = split_name(site)
        if kind == "mlp_out":
            return [Span("neuron", 0, width)]
        if kind == "attn_o":
            return self._heads(layer, width, (("", self.n_heads),)) or [Span("input", 0, width)]
        return [Span("residual", 0, width)]

    def written(self, site: str, width: int) -> list[Span]:
        """The spans of the site's output, d_out = width."""
        layer, kind = split_name(site)
        if kind in WRITES_RESIDUAL:
            return [Span("residual", 0, width)]
        if kind in ("mlp_in", "mlp_gate"):
            return [Span("neuron", 0, width)]
        q, k, v = ("Q", self.n_heads), ("K", self.n_kv_heads), ("V", self.n_kv_heads)
        parts = {"attn_q": (q,), "attn_k": (k,), "attn_v": (v,), "attn_qkv": (q, k, v)}
        known = kind in READS_ATTENTION_INPUT and kind in parts
        return (self._heads(layer, width, parts[kind]) if known else []) or [Span("output", 0, width)]

    def _heads(self, layer: int, width: int, parts: tuple[tuple[str, int], ...]) -> list[Span]:
        """One span per head of each part; none where the width shows that these are not the heads."""
        if layer in self.other_attention or width != sum(n for _, n in parts) * self.d_head:
            return []
        names = [f"{part} head {head}".strip() for part, n in parts for head in range(n)]
        return [Span(name, i * self.d_head, self.d_head) for i, name in enumerate(names)]
