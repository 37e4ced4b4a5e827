"""Fused attention of a TransformerBridge.

1. Attention with rotary embeddings from outside (Llama, Qwen, Mistral, OLMo): transformers' own module runs, as transformers
   itself would run it ("sdpa"), with the bridge's q, k, v and o in it: their hook points and attached units run as ever.
2. Attention whose checkpoint holds q, k and v as one (GPT-2, NeoX): transformers' module does not have them apart, so the
   bridge's own steps run, but for scores, mask, softmax and weighted sum.
3. Hugging Face's mask is added to scores, windows included; where it is nothing but causal, none is given, which is faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    JointQKVAttentionBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    PositionEmbeddingsAttentionBridge,
)

from swd_lens.base.interrupts import joint
from swd_lens.hosts.fused import is_hooked, weighted_values
from swd_lens.hosts.weights import Shadow, shadow_methods

_SPLIT_BY_HEAD = ("use_attn_result", "use_split_qkv_input", "use_attn_in")


class Masks:
    """Knows masks of Hugging Face that are nothing but causal; it remembers the last one, which all layers of a run are given."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, bool] | None = None

    def needed(self, mask: Tensor | None) -> Tensor | None:
        """The mask, or None where it is nothing but causal."""
        if mask is None:
            return None
        if self.last is None or self.last[0] is not mask:
            causal = mask.ndim == 4 and mask.shape[-1] == mask.shape[-2]
            if causal:
                seen = mask if mask.dtype == torch.bool else mask == 0
                causal = bool((seen == torch.ones_like(seen[0, 0]).tril()).all())
            self.last = (mask, causal)
        return None if self.last[1] else mask


class _Fused(Shadow):
    """Covers one method of an attention component."""

    method: str

    def __init__(self, masks: Masks, attn: Any):
        super().__init__(attn)
        self.attn, self.masks = attn, masks

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.attn), self.method)(self.attn, *args, **kwargs)

    def can_run(self, mask: Tensor | None) -> bool:
        """Whether nobody looks inside, and there is nothing inside but what is computed."""
        attn, config = self.attn, self.attn.config
        points = {name: child for name, child in attn._modules.items() if isinstance(child, HookPoint)}
        inner = [point for name, point in points.items() if name not in ("hook_in", "hook_out")]
        split = any(getattr(config, flag, False) for flag in _SPLIT_BY_HEAD)
        whole = mask is None or (mask.ndim == 4 and (mask.is_floating_point() or mask.dtype == torch.bool))
        return whole and not (split or attn.training or is_hooked(*inner))


class _Delegated(_Fused):
    """In place of `PositionEmbeddingsAttentionBridge.forward`."""

    method = "forward"

    @joint
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mask, module = kwargs.get("attention_mask"), self.attn.original_component
        if not self.can_run(mask):
            return self.plainly(*args, **kwargs)
        # A bridge asks for every layer's pattern; transformers would warn that there is none.
        kwargs.pop("output_attentions", None)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = self.masks.needed(mask)
        config, former = module.config, module.config._attn_implementation_internal
        try:
            config._attn_implementation_internal = "sdpa"
            return AttentionBridge.forward(self.attn, *args, **kwargs)
        finally:
            config._attn_implementation_internal = former


class _Joint(_Fused):
    """In place of `JointQKVAttentionBridge._reconstruct_attention`: the same steps."""

    method = "_reconstruct_attention"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        attn, mask = self.attn, kwargs.get("attention_mask")
        if not self.can_run(mask):
            return self.plainly(q, k, v, **kwargs)
        n_heads = attn.config.n_heads
        n_key_heads = getattr(attn.config, "n_key_value_heads", None) or n_heads
        q, k, v, batch, n_positions, d_head = attn._reshape_qkv_to_heads(q, k, v, n_heads, n_key_heads)
        rotary, scale = kwargs.get("position_embeddings"), d_head**-0.5
        if isinstance(attn, JointQKVPositionEmbeddingsAttentionBridge):
            if isinstance(rotary, tuple):
                q, k = attn._apply_rotary_pos_emb(q, k, *attn._apply_position_embedding_hooks(rotary))
        elif getattr(attn.config, "scale_attn_by_inverse_layer_idx", False) and attn._layer_idx is not None:
            scale /= attn._layer_idx + 1
        k, v = attn._update_kv_cache(k, v, **kwargs)
        z = weighted_values(q, k, v, scale, self.masks.needed(mask))
        return attn._apply_output_projection(attn._reshape_attn_output(z, batch, n_positions, n_heads, d_head)), None


# Exactly these classes: their subclasses do more (alibi, clipping, gates).
_FUSED: dict[type, type[_Fused]] = {
    PositionEmbeddingsAttentionBridge: _Delegated,
    JointQKVAttentionBridge: _Joint,
    JointQKVPositionEmbeddingsAttentionBridge: _Joint,
}


def can_fuse(attn: Any) -> bool:
    """Whether scores, mask and softmax are all that this component's attention is."""
    module = getattr(attn, "original_component", None)
    if type(attn) not in _FUSED or module is None or not attn.is_causal or attn.is_cross_attention:
        return False
    capped = getattr(module, "attn_logit_softcapping", None) is not None
    sinks = getattr(module, "sinks", None) is not None
    upcast = bool(getattr(attn, "_reorder_and_upcast_attn", False))
    return not (capped or sinks or upcast)


def cover(model: Any, register: Callable[[Any], object]) -> bool:
    """Have the components that can compute their attention fused until the undo; False where none can."""
    masks, attentions = Masks(), [block._modules.get("attn") for block in model.blocks]
    for attn in (attentions := [attn for attn in attentions if can_fuse(attn)]):
        kind = _FUSED[type(attn)]
        shadow_methods(attn, {kind.method: partial(kind, masks)}, register)
    return bool(attentions)
