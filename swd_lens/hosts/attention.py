"""Attention: how a host turns a layer's queries and keys into scores, as numbers and tensors that can be used elsewhere.

1. `heads_of(host, layer)` says how many query and key heads there are, their width, the scale, how positions enter, the norms
   and biases of queries and keys, a cap on scores, and the names of the hooks that show scores and pattern.
2. `rotations(host, heads, n_pos)` gives the rotary angles of each position. A HookedTransformer keeps tables of sines and
   cosines in every attention module; on a bridge only the forward knows which layer turns by which angles, so they are read
   off a run of that many tokens.
3. With these, for a query q at position t and a key k at position u of one head:

       score = cap( <R_t norm(q), R_u norm(k)> * scale + alibi(t - u) ),   then masked, then softmax.

What a host does beyond that (sinks, clipping, gates, norms over all heads together) is refused by name; whoever computes scores
should also compare them with those that the host shows, since a new architecture may do what no name here tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import UnsupportedHostError, quoted
from swd_lens.hosts.families import POSITIONS, SCORED_ATTENTION, Positions, facts_of
from swd_lens.hosts.host import Host
from swd_lens.hosts.recording import record


@dataclass(frozen=True)
class HeadNorm:
    """An RMS norm of one head's query or key: x / rms(x) * weight."""

    weight: Float[Tensor, " d_head"]
    eps: float

    def inverse_rms(self, x: Float[Tensor, "*any d_head"]) -> Float[Tensor, "*any 1"]:
        return (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer.

    Attributes:
        n_key_heads: fewer than n_heads where keys are shared (grouped-query attention).
        scale: a score is <q, k> * scale.
        positions: how they enter: "learned" (in the residual stream), "rotary", "alibi" (added to scores) or "none".
        query_bias, key_bias: what the projections add, zeros where the host has none.
        query_norm, key_norm: None where queries and keys are used as they are.
        slopes: of ALiBi, one per head: a score loses slope * (t - u).
        soft_cap: scores become cap * tanh(score / cap); None = no cap.
        scores_hook, pattern_hook: names for `run_with_hooks`. Scores are shown after the cap and the mask; q and k, at
            attn.hook_q and attn.hook_k, before norm and rotation.
    """

    layer: int
    n_heads: int
    n_key_heads: int
    d_head: int
    scale: float
    positions: Positions
    query_bias: Float[Tensor, "head d_head"]
    key_bias: Float[Tensor, "key_head d_head"]
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    slopes: Float[Tensor, " head"] | None = None
    soft_cap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.n_heads // self.n_key_heads

    def key_head(self, head: int) -> int:
        """The key head that a query head reads."""
        return head // self.group

    @property
    def scores_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_attn_scores"

    @property
    def pattern_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_pattern"


def heads_of(host: Host, layer: int) -> Heads:
    """The heads of a layer. Tensors are float32 copies on the layer's device. Raises UnsupportedHostError: the layer has no
    attention scores of this form; the message says what it does instead."""
    facts = facts_of(host.model)
    if not facts.causal:
        raise UnsupportedHostError(
            "this host attends both ways; queries and keys are studied in causal hosts, where a destination sees earlier sources"
        )
    if facts.positions is None:
        raise UnsupportedHostError(
            f"cfg.positional_embedding_type is {quoted(host.model.cfg.positional_embedding_type)}: how it enters a score "
            f"is not known here; known are {', '.join(POSITIONS)}"
        )
    attn = host.model.blocks[layer]._modules.get("attn")
    if attn is None:
        raise UnsupportedHostError(f"blocks.{layer} has no softmax attention (linear attention?), so no queries and keys")
    return (_bridge_heads if facts.bridge else _hooked_heads)(host, layer, attn, facts.positions)


def _refuse(layer: int, features: dict[str, bool]) -> None:
    """Raise UnsupportedHostError, naming the first feature that the layer has."""
    for feature, present in features.items():
        if present:
            raise UnsupportedHostError(
                f"blocks.{layer}.attn has {feature}: its scores are no scaled products of queries and keys alone, and "
                "their parts would not add up"
            )


def _hooked_heads(host: Host, layer: int, attn: Any, positions: Positions) -> Heads:
    from swd_lens.hosts.hooked.components import matrices

    cfg = host.model.cfg
    norms = [
        None if norm is None else HeadNorm(norm.w.detach().float(), float(cfg.eps))
        for norm in (getattr(attn, "q_norm", None), getattr(attn, "k_norm", None))
    ]
    _refuse(
        layer,
        {
            "attention sinks": bool(getattr(cfg, "use_attention_sinks", False)),
            "clipped queries and keys (cfg.clip_qkv)": getattr(cfg, "clip_qkv", None) is not None,
            "queries scaled by position (cfg.use_logn_attn)": bool(getattr(cfg, "use_logn_attn", False)),
            "angles that depend on the length (cfg.use_dynamic_ntk_rope)": bool(getattr(cfg, "use_dynamic_ntk_rope", False)),
            "one norm over all heads": any(n is not None and n.weight.numel() != cfg.d_head for n in norms),
        },
    )
    query_bias, key_bias = (matrices(attn, part)[1].detach().float() for part in "QK")
    n_heads, n_key_heads, scale = len(query_bias), len(key_bias), 1 / float(attn.attn_scale)
    return Heads(
        *(layer, n_heads, n_key_heads, int(cfg.d_head), scale, positions, query_bias, key_bias),
        query_norm=norms[0],
        key_norm=norms[1],
        slopes=attn.create_alibi_multipliers(cfg.n_heads).to(query_bias) if positions == "alibi" else None,
        soft_cap=facts_of(host.model).score_cap,
    )


def _bridge_heads(host: Host, layer: int, attn: Any, positions: Positions) -> Heads:
    from swd_lens.hosts.bridge.leaves import leaves_of_block, matrix

    cfg, module = host.model.cfg, attn._modules.get("_original_component")
    scored = SCORED_ATTENTION.get(type(attn).__name__)
    if scored is None or positions == "alibi":
        raise UnsupportedHostError(
            f"blocks.{layer}.attn is a {type(attn).__name__} ({positions} positions); on a bridge, scores are known of "
            f"{', '.join(SCORED_ATTENTION)} with learned or rotary positions"
        )
    leaves = leaves_of_block(host.model.blocks[layer])[0]
    d_head = int(getattr(module, "head_dim", None) or cfg.d_head)
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None)
    norms = [_bridge_norm(attn, name) for name in ("q_norm", "k_norm")]
    _refuse(
        layer,
        {
            "attention sinks": getattr(module, "sinks", None) is not None,
            "clipped queries and keys (clip_qkv)": getattr(config, "clip_qkv", None) is not None,
            "scaled keys (key_multiplier)": getattr(module, "key_multiplier", None) is not None,
            "queries scaled by position": isinstance(rope, dict) and rope.get("llama_4_scaling_beta") is not None,
            "a gate beside its queries": matrix(leaves["attn_q"]).shape[1] != int(cfg.n_heads) * d_head,
            "one norm over all heads": any(n is not None and n.weight.shape != (d_head,) for n in norms),
        },
    )
    biases, parts = [], (leaves["attn_q"], leaves["attn_k"])
    leaf: Any
    for leaf in parts:
        weight = matrix(leaf).detach()
        bias = weight.new_zeros(weight.shape[1]) if leaf.bias is None else leaf.bias.detach()
        biases.append(bias.float().view(-1, d_head))
    query_bias, key_bias = biases
    scale, cap = d_head**-0.5, None
    if scored.own_scale:
        scale, cap = float(getattr(module, "scaling", scale)), getattr(module, "attn_logit_softcapping", None)
    elif scored.scaled_by_layer and getattr(cfg, "scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return Heads(
        *(layer, len(query_bias), len(key_bias), d_head, scale, positions, query_bias, key_bias),
        query_norm=norms[0],
        key_norm=norms[1],
        soft_cap=None if cap is None else float(cap),
    )


def _bridge_norm(attn: Any, name: str) -> HeadNorm | None:
    from swd_lens.hosts.bridge.norms import scale_of

    norm = attn._modules.get(name)
    module = getattr(norm, "original_component", None)
    if norm is None or module is None:
        return None
    if not norm.uses_rms_norm:
        raise UnsupportedHostError(f"{name} of this attention is no RMS norm; a mean that is taken out is not known here")
    weight = getattr(module, "weight", None)
    if weight is None:
        raise UnsupportedHostError(f"{name} of this attention has no weight of its own; such norms are not known here")
    scale = scale_of(norm)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return HeadNorm(torch.ones_like(weight, dtype=torch.float32) if scale is None else scale, float(eps or 0))


@dataclass(frozen=True)
class Rotation:
    """Rotary angles of the positions 0 .. n_pos - 1; the first rotary_dim entries of a head are rotated, the others stay.
    adjacent: pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2)."""

    cos: Float[Tensor, "pos rotary_dim"]
    sin: Float[Tensor, "pos rotary_dim"]
    adjacent: bool

    def apply(self, x: Float[Tensor, "*any pos d_head"]) -> Float[Tensor, "*any pos d_head"]:
        """x with each position rotated by its angle."""
        n = x.shape[-2]
        return self._rotate(x, self.cos[:n], self.sin[:n])

    def at(self, position: int, x: Float[Tensor, "*any d_head"]) -> Float[Tensor, "*any d_head"]:
        """x as if it all stood at one position."""
        return self._rotate(x, self.cos[position], self.sin[position])

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if self.adjacent:
            flipped = torch.stack([-rotary[..., 1::2], rotary[..., ::2]], -1).flatten(-2)
        else:
            first, second = rotary.chunk(2, dim=-1)
            flipped = torch.cat([-second, first], -1)
        return torch.cat([rotary * cos + flipped * sin, rest], -1)


def rotations(host: Host, heads: Sequence[Heads], n_pos: int) -> dict[int, Rotation | None]:
    """Layer -> angles of the first n_pos positions, float32 on the layer's device; None where positions do not rotate. Raises
    ValueError: more positions than the host's context; UnsupportedHostError: a bridge whose layer shows no angles."""
    if n_pos > int(host.model.cfg.n_ctx):
        raise ValueError(f"{n_pos} positions do not fit the host's context of {host.model.cfg.n_ctx}")
    by_layer: dict[int, Rotation | None] = {layer.layer: None for layer in heads}
    layers = [layer.layer for layer in heads if layer.positions == "rotary"]
    if not layers:
        return by_layer
    facts, cfg = facts_of(host.model), host.model.cfg
    if not facts.bridge:
        for layer in layers:
            attn = host.model.blocks[layer].attn
            sin, cos = attn.rotary_sin, attn.rotary_cos
            if n_pos > len(cos):
                # Upstream makes its tables longer when a prompt needs it; here they are made, and left alone.
                how: dict[str, Any] = {"base": attn._rotary_base(), "dtype": torch.float32}
                sin, cos = attn.calculate_sin_cos_rotary(cfg.rotary_dim, n_pos, **how)
            by_layer[layer] = Rotation(cos[:n_pos].float(), sin[:n_pos].float(), bool(cfg.rotary_adjacent_pairs))
        return by_layer
    names = {layer: [f"blocks.{layer}.attn.hook_{part}" for part in ("cos", "sin")] for layer in layers}
    seen = record(
        host,
        torch.zeros(1, n_pos, dtype=torch.int64),
        hooks=[name for pair in names.values() for name in pair],
        keep=lambda x: x.detach().float().reshape(-1, x.shape[-2], x.shape[-1])[0],
    ).hooks
    for layer, pair in names.items():
        if any(name not in seen for name in pair):
            raise UnsupportedHostError(
                f"blocks.{layer}.attn of this bridge rotates queries and keys but does not show its angles (hook_cos, hook_sin)"
            )
        by_layer[layer] = Rotation(seen[pair[0]], seen[pair[1]], facts.adjacent_pairs)
    return by_layer
