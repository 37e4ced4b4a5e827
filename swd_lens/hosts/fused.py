"""Fused attention: passes in which nobody looks at scores or patterns do not compute them.

A host shows the scores and the pattern of every head, (head, pos, pos) each, and so computes them one after the other. Over
long rows that is most of what it takes more than transformers' own forward (SmolLM2-135M, one row of 1,024 tokens: 5.4 s of
arithmetic and 3 s of mapping memory in a HookedTransformer, 3.9 and .4 s in transformers). `fused_attention` has the layers
compute their weighted sums by `torch.nn.functional.scaled_dot_product_attention` for a while:

1. Every other module runs as it is, every other hook point shows what it showed, and attached units run as they do.
2. A layer looks at every forward whether somebody hooks what would not be computed, and whether the tokens are padded; then it
   runs plainly. What its attention does beyond scores, causal mask and softmax (caps, biases, sinks) is never fused.
3. One row is run plainly and fused before it is used; where logits differ (verified.py), all stays plain.
4. It begins where the scores of one row have `MIN_SCORES` numbers. Below, at prompts of a few dozen tokens, attention is a small
   part of a forward (SmolLM2, 64 prompts of 24 tokens: HookedTransformer 1.12 of transformers' time, bridge 1.03), and all
   stays as it is, to the bit. That depends on the number of heads and positions alone, not on the machine.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from swd_lens.base.interrupts import Undo
from swd_lens.hosts.host import Host
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.verified import verified

AGREES = 1e-5  # of the largest logit: trainings and Grams go this way, which compare runs of hours
MIN_SCORES = 2**18  # n_heads x positions^2: 171 positions of nine heads
_CHECKED_SCORES = 2**24  # of the row that is run both ways: 1,365 positions of nine heads
_CHECKED_POSITIONS = 64  # whose logits are compared, the last ones

# Models whose attention is fused now.
_OPEN: WeakSet[Any] = WeakSet()
# Model -> positions of the longest row on which its fused attention agreed, by dtype.
_AGREED: WeakKeyDictionary[Any, dict[torch.dtype, int]] = WeakKeyDictionary()


@contextmanager
def fused_attention(host: Host, tokens: Int[Tensor, "rows pos"]) -> Iterator[bool]:
    """While open, layers that can compute their attention fused; true where some do. The host is as it was afterwards.

    Open it before anything is recorded: a row may be run for comparison. tokens: rows as they will be run; nothing is fused where
    their scores are few. Warns where fused attention gives other logits on this host, or fails.
    """
    undo = Undo()
    with undo, undo:  # twice: a Ctrl-C on the way into the end of the inner one is still inside of the outer
        yield _fuses(host, tokens, undo)


def _fuses(host: Host, tokens: Tensor, undo: Undo) -> bool:
    cfg: Any = host.model.cfg
    dtype = next(host.model.parameters()).dtype
    if host.model in _OPEN:
        return True
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in host.model.modules())
    if tokens.numel() == 0 or cfg.n_heads * tokens.shape[1] ** 2 < MIN_SCORES or compiled:
        return False
    if not host.fuse_attention(undo.push):
        return False
    few = tokens[:1, : max(2, min(tokens.shape[1], math.isqrt(_CHECKED_SCORES // cfg.n_heads)))]
    agreed = _AGREED.setdefault(host.model, {})
    if agreed.get(dtype, 0) < few.shape[1]:

        def fused() -> Tensor:
            try:
                return _last_logits(host, few)
            finally:
                undo.run()  # and the host is plain again

        with torch.no_grad():
            plain = partial(_last_logits, host, few)
            if not verified(fused, plain, shortcut="fused attention", rounded=False, tolerance=AGREES):
                return False
        if not standing_hooks(host.model):  # a layer that somebody looked into was not fused
            agreed[dtype] = few.shape[1]
        host.fuse_attention(undo.push)
    undo.push(lambda: _OPEN.discard(host.model))
    _OPEN.add(host.model)
    return True


def _last_logits(host: Host, tokens: Tensor) -> Float[Tensor, "1 _pos vocab"]:
    residual = host.residual(tokens, len(host.model.blocks))
    return host.unembed(tokens[:, -_CHECKED_POSITIONS:], residual[:, -_CHECKED_POSITIONS:])


def is_hooked(*points: nn.Module | None) -> bool:
    """Whether anybody looks at one of these hook points, by TransformerLens' hooks or by PyTorch's."""
    if _has_any_global_hook():
        return True
    for point in filter(None, points):
        own = (point.fwd_hooks, point.bwd_hooks) if isinstance(point, HookPoint) else ()
        torchs = (point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks)
        if any((*own, *torchs)):
            return True
    return False


def weighted_values(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch key_head key_pos d_head"],
    v: Float[Tensor, "batch key_head key_pos d_head"],
    scale: float,
    mask: Float[Tensor, "batch _head pos key_pos"] | None,
) -> Float[Tensor, "batch head pos d_head"]:
    """softmax(q k^T * scale, masked) v. mask: added to scores; None: causal. A single position then sees all keys."""
    grouped = k.shape[1] != q.shape[1]
    causal = mask is None and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def after_prefix(
    q: Float[Tensor, "rows 1 head d_head"],
    k: Float[Tensor, "rows 1 key_head d_head"],
    v: Float[Tensor, "rows 1 key_head d_head"],
    keys: Float[Tensor, "batch prefix key_head d_head"],
    values: Float[Tensor, "batch prefix key_head d_head"],
    scale: float,
    padding: Bool[Tensor, "batch prefix"] | None = None,
) -> Float[Tensor, "rows 1 head d_head"]:
    """softmax(q [keys, k]^T * scale) [values, v] of one position, in rows that are copies of a batch and share what is before it.

    Nothing is copied: all copies' queries are multiplied with the one prefix that they share. padding: the places of a row's
    prefix that hold nothing.
    """
    sizes: dict[str, int] = {"batch": len(keys), "key_head": keys.shape[2]}
    q = rearrange(q, "(copy batch) 1 (key_head group) d -> batch key_head copy group d", **sizes)
    k, v = (rearrange(x, "(copy batch) 1 key_head d -> batch key_head copy 1 d", **sizes) for x in (k, v))
    before = q.flatten(2, 3) @ rearrange(keys, "batch pos key_head d -> batch key_head d pos")
    before = before if padding is None else before.masked_fill(padding[:, None, None, :], -torch.inf)
    own = (q * k).sum(-1, keepdim=True).flatten(2, 3)
    pattern = F.softmax(torch.cat([before, own], dim=-1) * scale, dim=-1)
    z = pattern[..., :-1] @ rearrange(values, "batch pos key_head d -> batch key_head pos d")
    z = z.unflatten(2, q.shape[2:4]) + pattern[..., -1:].unflatten(2, q.shape[2:4]) * v
    return rearrange(z, "batch key_head copy group d -> (copy batch) 1 (key_head group) d")
