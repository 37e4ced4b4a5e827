"""Norms and biases of a bridge that weight processing can fold into the matrices, and whether it has.

1. Which normalization feeds a site: ln1 the attention, ln2 the MLP; in parallel blocks with one norm it feeds both.
2. A folded norm multiplies by one and adds nothing: TransformerBridge.enable_compatibility_mode leaves ones (zeros, where the
   distance from one is stored) and zeros in its parameters, on 3.9 and 4.x alike.
3. attn_o's input holds the constant part of the values, which folds into its bias.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge, ParallelBlockBridge

from swd_lens.hosts.bridge.leaves import leaves_of_block, matrix
from swd_lens.hosts.host import Affine, Host, is_centered, value_constant
from swd_lens.hosts.sites import KINDS, READS_ATTENTION_INPUT, RESIDUAL_MATRICES, Site, base_kind


class BridgeNorms(Host):
    """What weight processing can fold of a TransformerBridge, and has; see `swd_lens.hosts.Host`."""

    def affine(self, site: Site) -> Affine | None:
        kind = base_kind(site.kind)
        if kind == "mlp_out":
            return Affine()
        if kind not in KINDS:  # which norm it reads, if any, is not known
            return None
        block = self.model.blocks[site.layer]
        # Not supported by the adapter: norms that follow the matrices (BERT), linear attention (Qwen3.5).
        folds = getattr(self.model.adapter, "supports_fold_ln", True)
        if site.kind != "attn_o":
            norm = _norm_before(block, kind)
            return self.norm_affine(norm) if folds and isinstance(norm, NormalizationBridge) else None
        # The constant part of attn_o's input, where it is known.
        value: Any = leaves_of_block(block)[0].get("attn_v")
        attn = block._modules.get("attn")
        if value is None or attn is None:
            return None
        # More than a pattern that sums to one lies between values and attn_o: a gate, or a sink.
        gated = getattr(attn.config, "gated_q_proj", False) or "gate" in attn._modules
        if gated or getattr(attn.original_component, "sinks", None) is not None:
            return None
        weight, norm = matrix(value).detach().float(), _norm_before(block, "attn_v")
        shift = _shift_of(norm) if norm is not None and folds else None
        bias = weight.new_zeros(weight.shape[1]) if value.bias is None else value.bias
        constant = value_constant(bias, shift, weight, int(self.model.cfg.d_head), site.d_in)
        return Affine(shift=constant) if constant.any() else Affine()

    def norm_before(self, site: Site) -> Affine | None:
        block, kind = self.model.blocks[site.layer], base_kind(site.kind)
        if kind not in KINDS or kind in RESIDUAL_MATRICES:
            return None
        name = "ln1" if kind in READS_ATTENTION_INPUT else "ln2"
        # transformer_lens 4 has OLMo 2's norms as ln1_post and ln2_post, and none before.
        if _norms_follow(block) or (name not in block._modules and f"{name}_post" in block._modules):
            return Affine()
        norm = _norm_before(block, kind)
        return None if getattr(norm, "original_component", None) is None else self.norm_affine(norm)

    def norm_behind(self, site: Site) -> nn.Module | None:
        block, name = self.model.blocks[site.layer], "ln1" if base_kind(site.kind) == "attn_o" else "ln2"
        return block._modules.get(name if _norms_follow(block) else f"{name}_post")

    def norm_affine(self, norm: nn.Module) -> Affine:
        return Affine(scale_of(norm), _shift_of(norm))

    def processing(self) -> dict[str, bool]:
        kinds = {site: base_kind(site.kind) for site in self.sites()}
        writes = [site for site, kind in kinds.items() if site.layer == 0 and kind in RESIDUAL_MATRICES]
        reads = [site for site, kind in kinds.items() if kind in KINDS and kind not in RESIDUAL_MATRICES]
        # The norms of a fresh model may multiply by one as well, but were not processed.
        norms = [_norm_before(self.model.blocks[site.layer], kinds[site]) for site in reads]
        processed = getattr(self.model, "_weights_processed", False) or all(n is None or _weight_of(n) is None for n in norms)
        biases = [getattr(leaves_of_block(block)[0].get("attn_v"), "bias", None) for block in self.model.blocks]
        return {
            "fold_ln": bool(processed) and all(self.affine(site) == Affine() for site in reads),
            "center_writing_weights": all(is_centered(self.weight(site)) for site in writes),
            "fold_value_biases": not any(isinstance(bias, Tensor) and bool(bias.any()) for bias in biases),
            "compatibility_mode": bool(self.model.compatibility_mode),
        }


def _norms_follow(block: Any) -> bool:
    """Whether ln1 and ln2 stand behind the attention and the MLP: by the name that Hugging Face gave the first.

    "post_attention_layernorm" (OLMo 2) and "attention.output.LayerNorm" (BERT) do, "input_layernorm" does not.
    """
    name = str(getattr(block._modules.get("ln1"), "name", ""))
    return name.startswith("post_") or ".output." in name


def scale_of(norm: Any) -> Tensor | None:
    """The vector that the norm multiplies by; None where that is one."""
    weight = _weight_of(norm)
    if weight is None:
        return None
    scale = weight.detach().float()
    # Gemma, Qwen3.5 and Nemotron store the distance from one. 3.9 does not say so of all of them, so the norm is asked: both
    # kinds of norm leave a vector of 1 and -1 in turn alone, but for what they multiply by and add.
    ones = torch.ones_like(weight)
    ones[1::2] = -1
    with torch.no_grad():
        seen = (norm.original_component(ones) - norm.original_component(torch.zeros_like(weight))) * ones
    if bool((seen - 1 - weight).abs().max() < (seen - weight).abs().max()):
        scale = 1 + scale
    return None if bool((scale == 1).all()) else scale


def _weight_of(norm: Any) -> Tensor | None:
    weight = getattr(getattr(norm, "original_component", None), "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 1 else None


def _shift_of(norm: Any) -> Tensor | None:
    """The vector that the norm adds; None where that is zero."""
    bias: Any = getattr(norm.original_component, "bias", None)
    return None if bias is None or not bias.any() else bias.detach().float()


def _norm_before(block: Any, kind: str) -> Any:
    name = "ln1" if kind in READS_ATTENTION_INPUT else "ln2"
    if name == "ln2" and getattr(block, "mlp_reads_resid_directly", False):
        return None
    # GPT-J: one norm feeds both branches.
    if isinstance(block, ParallelBlockBridge) and "ln2" not in block._modules:
        name = "ln1"
    return block._modules.get(name)
