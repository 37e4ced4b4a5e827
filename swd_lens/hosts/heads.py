"""Heads: how a host turns a layer's queries and keys into attention scores, as numbers and tensors that can be used elsewhere.

1. `heads_of(host, layer)` says how many query and key heads there are, their width, the scale, how positions enter, the norms
   and biases of queries and keys, a cap on scores, and the names of the hooks that show q, k, scores and pattern.
2. With these and the rotary angles (rotary.py), for a query q at position t and a key k at position u of one head:

       score = cap( <R_t norm(q), R_u norm(k)> * scale + alibi(t - u) ),   then masked, then softmax.

What a host does beyond that (sinks, clipping, gates, norms over all heads together) is refused by name; whoever computes scores
should also compare them with those that the host shows, since a new architecture may do what no name here tells.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.hosts import Host, UnsupportedHostError

# Attention classes of bridges whose forward is transformer_lens' own, step by step; others leave it to transformers.
_OWN_FORWARD = (
    "JointQKVAttentionBridge",
    "JointQKVPositionEmbeddingsAttentionBridge",
    "PositionEmbeddingsAttentionBridge",
)
_POSITIONS = {"standard": "learned", "rotary": "rotary", "alibi": "alibi", "none": "none"}


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
        q_hook, k_hook, scores_hook, pattern_hook: names for `run_with_hooks`. q and k are shown before norm and rotation, scores
            after the cap and the mask.
    """

    layer: int
    n_heads: int
    n_key_heads: int
    d_head: int
    scale: float
    positions: str
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
    def q_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_q"

    @property
    def k_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_k"

    @property
    def scores_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_attn_scores"

    @property
    def pattern_hook(self) -> str:
        return f"blocks.{self.layer}.attn.hook_pattern"


def heads_of(host: Host, layer: int) -> Heads:
    """The heads of a layer. Tensors are float32 copies on the layer's device.

    Raises:
        UnsupportedHostError: the layer has no attention scores of this form; the message says what it does instead.
    """
    cfg = host.model.cfg
    if str(getattr(cfg, "attention_dir", "causal")) == "bidirectional" or not _generates(host.model):
        raise UnsupportedHostError(
            "this host attends both ways; queries and keys are studied in causal hosts, where a destination sees earlier sources"
        )
    positions = _POSITIONS.get(str(getattr(cfg, "positional_embedding_type", "standard")))
    if positions is None:
        raise UnsupportedHostError(
            f"cfg.positional_embedding_type is {cfg.positional_embedding_type!r}: how it enters a score is not known here; "
            f"known are {', '.join(_POSITIONS)}"
        )
    attn = host.model.blocks[layer]._modules.get("attn")
    if attn is None:
        raise UnsupportedHostError(
            f"blocks.{layer} has no softmax attention (linear attention?), so no queries and keys"
        )
    if hasattr(host.model, "adapter"):
        return _bridge_heads(host, layer, attn, positions)
    return _hooked_heads(host, layer, attn, positions)


def _generates(model: Any) -> bool:
    return bool(getattr(getattr(model, "adapter", None), "supports_generation", True))


def _refuse(layer: int, found: dict[str, Any]) -> None:
    """Raises UnsupportedHostError, naming the first thing that is there."""
    for what, there in found.items():
        if there:
            raise UnsupportedHostError(
                f"blocks.{layer}.attn has {what}: its scores are no scaled products of queries and keys alone, and their parts "
                "would not add up"
            )


# ---------------------------------------------------------------------------------------------- HookedTransformer


def _hooked_heads(host: Host, layer: int, attn: Any, positions: str) -> Heads:
    from swd_lens.hosts.hooked.components import matrices

    cfg = host.model.cfg
    norms = [_hooked_norm(cfg, getattr(attn, name, None)) for name in ("q_norm", "k_norm")]
    _refuse(
        layer,
        {
            "attention sinks": getattr(cfg, "use_attention_sinks", False),
            "clipped queries and keys (cfg.clip_qkv)": getattr(cfg, "clip_qkv", None) is not None,
            "queries scaled by position (cfg.use_logn_attn)": getattr(cfg, "use_logn_attn", False),
            "angles that depend on the length (cfg.use_dynamic_ntk_rope)": getattr(cfg, "use_dynamic_ntk_rope", False),
            "one norm over all heads": any(n is not None and n.weight.numel() != cfg.d_head for n in norms),
        },
    )
    biases = [matrices(attn, part)[1].detach().float() for part in "QK"]
    slopes = None
    if positions == "alibi":
        slopes = attn.create_alibi_multipliers(cfg.n_heads).to(biases[0])
    cap = float(getattr(cfg, "attn_scores_soft_cap", 0) or 0)
    return Heads(
        layer,
        biases[0].shape[0],
        biases[1].shape[0],
        int(cfg.d_head),
        1 / float(attn.attn_scale),
        positions,
        query_bias=biases[0],
        key_bias=biases[1],
        query_norm=norms[0],
        key_norm=norms[1],
        slopes=slopes,
        soft_cap=cap if cap > 0 else None,
    )


def _hooked_norm(cfg: Any, norm: Any) -> HeadNorm | None:
    return None if norm is None else HeadNorm(norm.w.detach().float(), float(cfg.eps))


# ---------------------------------------------------------------------------------------------- TransformerBridge


def _bridge_heads(host: Host, layer: int, attn: Any, positions: str) -> Heads:
    from swd_lens.hosts.bridge.leaves import leaves_of_block, matrix

    model, cfg = host.model, host.model.cfg
    theirs = attn._modules.get("_original_component")
    kind = next((c.__name__ for c in type(attn).__mro__ if c.__name__ in _OWN_FORWARD), None)
    if kind is None or type(attn).__name__ not in _OWN_FORWARD or positions == "alibi":
        raise UnsupportedHostError(
            f"blocks.{layer}.attn is a {type(attn).__name__} ({positions} positions); on a bridge, scores are known of "
            f"{', '.join(_OWN_FORWARD)} with learned or rotary positions"
        )
    leaves = leaves_of_block(model.blocks[layer])[0]
    d_head = int(getattr(theirs, "head_dim", None) or cfg.d_head)
    rope = getattr(getattr(theirs, "config", None), "rope_parameters", None)
    norms = [_bridge_norm(attn, name) for name in ("q_norm", "k_norm")]
    _refuse(
        layer,
        {
            "attention sinks": getattr(theirs, "sinks", None) is not None,
            "clipped queries and keys (clip_qkv)": getattr(getattr(theirs, "config", None), "clip_qkv", None)
            is not None,
            "scaled keys (key_multiplier)": getattr(theirs, "key_multiplier", None) is not None,
            "queries scaled by position": isinstance(rope, dict) and rope.get("llama_4_scaling_beta") is not None,
            "a gate beside its queries": matrix(leaves["attn_q"]).shape[1] != int(cfg.n_heads) * d_head,
            "one norm over all heads": any(n is not None and n.weight.shape != (d_head,) for n in norms),
        },
    )
    biases = [_bridge_bias(leaves[part], d_head) for part in ("attn_q", "attn_k")]
    own = kind == "PositionEmbeddingsAttentionBridge"
    cap = getattr(theirs, "attn_logit_softcapping", None) if own else None
    return Heads(
        layer,
        biases[0].shape[0],
        biases[1].shape[0],
        d_head,
        float(getattr(theirs, "scaling", d_head**-0.5)) if own else _joint_scale(cfg, layer, kind, d_head),
        positions,
        query_bias=biases[0],
        key_bias=biases[1],
        query_norm=norms[0],
        key_norm=norms[1],
        soft_cap=None if cap is None else float(cap),
    )


def _joint_scale(cfg: Any, layer: int, kind: str, d_head: int) -> float:
    inverse = kind == "JointQKVAttentionBridge" and getattr(cfg, "scale_attn_by_inverse_layer_idx", False)
    return d_head**-0.5 / (layer + 1 if inverse else 1)


def _bridge_bias(leaf: Any, d_head: int) -> Float[Tensor, "_head d_head"]:
    from swd_lens.hosts.bridge.leaves import matrix

    weight = matrix(leaf).detach()
    flat = torch.zeros(weight.shape[1], device=weight.device) if leaf.bias is None else leaf.bias.detach().float()
    return flat.view(-1, d_head)


def _bridge_norm(attn: Any, name: str) -> HeadNorm | None:
    from swd_lens.hosts.bridge.norms import scale_of

    norm = attn._modules.get(name)
    if norm is None or getattr(norm, "original_component", None) is None:
        return None
    if not norm.uses_rms_norm:
        raise UnsupportedHostError(
            f"{name} of this attention is no RMS norm; a mean that is taken out is not known here"
        )
    theirs = norm.original_component
    weight = getattr(theirs, "weight", None)
    if weight is None:
        raise UnsupportedHostError(f"{name} of this attention has no weight of its own; such norms are not known here")
    scale = scale_of(norm)
    eps = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))
    return HeadNorm(torch.ones_like(weight, dtype=torch.float32) if scale is None else scale, float(eps or 0))
