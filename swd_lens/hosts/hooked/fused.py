"""Fused attention of a HookedTransformer: four methods of an attention module are covered, and all else stays upstream's.

Upstream's forward (abstract_attention.py) calls calculate_attention_scores, apply_causal_mask and calculate_z_scores in this
order. Covered, the first keeps queries and keys and hands on a tensor of one number, the second decides, and the third computes
z from queries, keys and values. Where something stands in the way, the second computes the scores after all.

Rows that are copies of a batch and share a kept prefix (`_RepeatedEntry` in running.py) hand over their own key and value only:
`takes` says whether the module can do with that. The prefix's keys are rotated once, the new one to its own place.

The unembedding is covered, too: upstream's copies W_U (113 MB of SmolLM2) at every call, to have it lie as transformers' does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformer_lens.components import Unembed

from swd_lens.base.holding import own_method
from swd_lens.hosts.fused import after_prefix, is_hooked, weighted_values
from swd_lens.hosts.hooked.components import leave_at_z
from swd_lens.hosts.weights import Shadow, shadow_methods


class Fused:
    """The four methods of one attention module, and what they share during a forward. whole: forwards without a shared prefix are
    fused, too."""

    def __init__(self, attn: Any, whole: bool):
        self.attn, self.whole = attn, whole
        self.queries: Tensor | None = None
        self.keys: Tensor | None = None
        self.prefix: Any = None

    def takes(self, prefix: Any) -> bool:
        """Whether a forward needs this prefix only once; then it goes on from there."""
        attn = self.attn
        looked_at = is_hooked(attn._modules.get("hook_rot_k"), attn.hook_attn_scores, attn.hook_pattern)
        self.prefix = None if looked_at or not can_fuse(attn) or attn.cfg.use_dynamic_ntk_rope else prefix
        return self.prefix is not None

    def rotary(self, x: Tensor, past: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        # Upstream has all keys begin at position 0; behind a shared prefix there is only the last one.
        past = past if self.prefix is None else self.prefix.past_keys.shape[1]
        return type(self.attn).apply_rotary(self.attn, x, past, attention_mask)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        attn, self.queries = self.attn, None
        fuses = self.whole and can_fuse(attn) and not is_hooked(attn.hook_attn_scores, attn.hook_pattern)
        if self.prefix is None and not fuses:
            return type(attn).calculate_attention_scores(attn, q, k)
        self.queries, self.keys = q, k
        return q.new_zeros(1, 1, 1, 1)

    def masked(self, scores: Tensor, past: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        attn, q, k = self.attn, self.queries, self.keys
        if self.prefix is not None:
            return scores
        if q is not None and k is not None:
            padded = attention_mask is not None and not bool(attention_mask.all())
            # After a kept prefix one position sees all keys; several would need a mask that is no square.
            if not padded and (past == 0 or q.shape[1] == 1):
                return scores
            self.queries = None
            scores = type(attn).calculate_attention_scores(attn, q, k)
        return type(attn).apply_causal_mask(attn, scores, past, attention_mask)

    def z(self, v: Tensor, pattern: Tensor) -> Tensor:
        attn, q, k, prefix = self.attn, self.queries, self.keys, self.prefix
        self.queries = self.keys = self.prefix = None
        if q is None or k is None:
            return type(attn).calculate_z_scores(attn, v, pattern)
        if prefix is not None:
            keys, values = prefix.rotated(attn), prefix.kept.past_values
            padding = getattr(prefix.kept, "padding", None)
            return leave_at_z(attn, attn.hook_z(after_prefix(q, k, v, keys, values, 1.0 / attn.attn_scale, padding)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        z = weighted_values(q, k, v, 1.0 / attn.attn_scale, None)
        return leave_at_z(attn, attn.hook_z(z.transpose(1, 2)))


class _Part(Shadow):
    """Covers one of the methods."""

    def __init__(self, fused: Fused, call: Callable[..., Tensor], attn: Any):
        super().__init__(attn)
        self.fused, self.call = fused, call

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(*args, **kwargs)


class _Unembedding(Shadow):
    """Covers the unembedding's forward."""

    def __call__(self, residual: Tensor) -> Tensor:
        part = self.owner
        return part.hook_out(F.linear(part.hook_in(residual), part.W_U.T, part.b_U))


def can_fuse(attn: Any) -> bool:
    """Whether scores, causal mask and softmax are all that this module's attention is."""
    cfg = attn.cfg
    capped = (cfg.attn_scores_soft_cap or 0) > 0
    biased = cfg.positional_embedding_type in ("alibi", "relative_positional_bias")
    both_ways = (attn._attention_dir_override or cfg.attention_dir) != "causal"
    return not (capped or biased or both_ways or attn.attn_type != "global" or cfg.use_attention_sinks)


def cover(model: Any, register: Callable[[Any], object], whole: bool) -> bool:
    """Have the layers that can compute their attention fused until the undo, and the unembedding multiply by W_U where it lies;
    or (not whole) only the attention of rows with a shared prefix. False where no layer can."""
    attentions = [block.attn for block in model.blocks if can_fuse(block.attn)]
    for attn in attentions:
        fused = Fused(attn, whole)
        names = {"apply_rotary": fused.rotary, "calculate_attention_scores": fused.scores}
        names |= {"apply_causal_mask": fused.masked, "calculate_z_scores": fused.z}
        shadow_methods(attn, {name: partial(_Part, fused, call) for name, call in names.items()}, register)
    if attentions and whole and type(model.unembed) is Unembed:
        shadow_methods(model.unembed, {"forward": _Unembedding}, register)
    return bool(attentions)


def takes(attn: Any, prefix: Any) -> bool:
    """Whether the module is covered, and its forward needs this prefix only once."""
    part = own_method(attn, "calculate_z_scores")
    return isinstance(part, _Part) and part.fused.takes(prefix)
