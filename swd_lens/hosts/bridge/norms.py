"""What weight processing can fold away of a bridge's weights, and whether it has.

1. Which normalization feeds a site: ln1 the attention, ln2 the MLP; in parallel blocks with one norm it feeds both.
2. A folded norm multiplies by one and adds nothing: TransformerBridge.enable_compatibility_mode leaves ones (zeros, where the
   distance from one is stored) and zeros in its parameters, on 3.9 and 4.x alike.
3. attn_o's input holds the constant part of the values, which folds into its bias.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge, ParallelBlockBridge

from swd_lens.hosts import Affine
from swd_lens.hosts.bridge.leaves import leaves_of_block, matrix
from swd_lens.hosts.sites import KINDS, READS_ATTENTION_INPUT, Site, base_kind


def affine_of(model: Any, site: Site) -> Affine | None:
    """See `swd_lens.hosts.Host.affine`."""
    block = model.blocks[site.layer]
    kind = base_kind(site.kind)
    if kind == "mlp_out":
        return Affine()
    if kind not in KINDS:  # which norm it reads, if any, is not known
        return None
    if site.kind == "attn_o":
        return _value_constant(model, block, site.d_in)
    norm = _norm_before(block, kind)
    # Not supported by the adapter: norms that follow the matrices (BERT), linear attention (Qwen3.5).
    if norm is None or not getattr(model.adapter, "supports_fold_ln", True):
        return None
    return Affine(scale_of(norm), _shift_of(norm))


def is_folded(model: Any, reads: Iterable[Site]) -> bool:
    """Whether there is nothing left to fold. The norms of a fresh model multiply by one as well, but were not processed."""
    reads = list(reads)
    norms = [_norm_before(model.blocks[site.layer], base_kind(site.kind)) for site in reads]
    processed = getattr(model, "_weights_processed", False) or all(n is None or _weight_of(n) is None for n in norms)
    return bool(processed) and all(affine_of(model, site) == Affine() for site in reads)


def has_value_bias(block: nn.Module) -> bool:
    value = leaves_of_block(block)[0].get("attn_v")
    bias = None if value is None else value.bias
    return isinstance(bias, Tensor) and bool(bias.any())


def scale_of(norm: NormalizationBridge) -> Tensor | None:
    """What the normalization multiplies by; None where that is one."""
    weight: Any = _weight_of(norm)
    if weight is None:
        return None
    scale = weight.detach().float()
    if norm.uses_rms_norm and _stores_distance_from_one(norm, weight):
        scale = 1 + scale
    return None if bool((scale == 1).all()) else scale


def _stores_distance_from_one(norm: Any, weight: Tensor) -> bool:
    """As Gemma and Qwen3.5 do. 3.9 does not say so of all of them, so the norm is asked: it leaves a vector of ones alone."""
    with torch.no_grad():
        seen = norm.original_component(torch.ones_like(weight))
    return bool((seen - 1 - weight).abs().max() < (seen - weight).abs().max())


def _weight_of(norm: NormalizationBridge) -> Any:
    return getattr(norm.original_component, "weight", None)


def _shift_of(norm: NormalizationBridge) -> Tensor | None:
    bias: Any = getattr(norm.original_component, "bias", None)
    return None if bias is None or not bias.any() else bias.detach().float()


def _norm_before(block: Any, kind: str) -> NormalizationBridge | None:
    name = "ln1" if kind in READS_ATTENTION_INPUT else "ln2"
    if name == "ln2" and getattr(block, "mlp_reads_resid_directly", False):
        return None
    # GPT-J: one norm feeds both branches.
    if isinstance(block, ParallelBlockBridge) and "ln2" not in block._modules:
        name = "ln1"
    norm = block._modules.get(name)
    return norm if isinstance(norm, NormalizationBridge) else None


def _value_constant(model: Any, block: Any, d_in: int) -> Affine | None:
    """What every value holds whatever the tokens, as it arrives at attn_o: repeated to all heads where they are grouped."""
    value: Any = leaves_of_block(block)[0].get("attn_v")
    attn = block._modules.get("attn")
    if value is None or attn is None or _changes_values(attn):
        return None
    weight = matrix(value).detach().float()
    constant = weight.new_zeros(weight.shape[1]) if value.bias is None else value.bias.detach().float()
    norm = _norm_before(block, "attn_v")
    shift = _shift_of(norm) if norm is not None and getattr(model.adapter, "supports_fold_ln", True) else None
    if shift is not None:
        constant = constant + shift @ weight
    if not constant.any():
        return Affine()
    heads = constant.view(-1, int(model.cfg.d_head))
    return Affine(shift=heads.repeat_interleave(d_in // constant.numel(), dim=0).flatten())


def _changes_values(attn: Any) -> bool:
    """Whether more than an attention pattern that sums to one lies between values and attn_o: a gate, or a sink."""
    gated = getattr(attn.config, "gated_q_proj", False) or "gate" in attn._modules
    return bool(gated) or getattr(attn.original_component, "sinks", None) is not None
