"""Running parts of a HookedTransformer: prefixes that are kept, starting at a block, and unembedding a few tokens only."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.utilities.activation_functions import apply_softcap

from swd_lens.hosts import Start, require_before, require_kept


class _RepeatedEntry(TransformerLensKeyValueCacheEntry):
    """One layer's keys and values for `times` copies of the batch, copied when they are run on, not before.

    past_keys and past_values have the shape of the whole and no memory: upstream reads nothing but their shape.
    """

    def __init__(self, keys: Tensor, values: Tensor, times: int):
        super().__init__(_shape_only(keys, times), _shape_only(values, times), frozen=True)
        self.kept, self.times = (keys, values), times

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        return self._append(self.kept[0], new_keys), self._append(self.kept[1], new_values)

    def _append(self, kept: Tensor, new: Tensor) -> Tensor:
        rows = kept.expand(self.times, *kept.shape), new.unflatten(0, (self.times, -1))
        return torch.cat(rows, dim=2).flatten(0, 1)


class _PartialCache(TransformerLensKeyValueCache):
    """A frozen cache of the layers from `from_layer` on."""

    from_layer: int = 0


def freeze_prefix(model: Any, tokens: Tensor) -> TransformerLensKeyValueCache:
    """The keys and values of all positions but the last, without gradient."""
    cfg, prefix = model.cfg, tokens[:, :-1]
    cache = TransformerLensKeyValueCache.init_cache(cfg, cfg.device, len(tokens))
    with torch.no_grad():
        run(model, prefix, past_kv_cache=cache, stop_at_layer=cfg.n_layers)
    cache.freeze()
    return cache


def repeat_prefix(prefix: Any, times: int, from_layer: int) -> Any:
    """For `times` copies of the batch, and runs from block `from_layer` on. Copies nothing yet."""
    if prefix is None or (times == 1 and from_layer == 0):
        return prefix
    entries = [_repeated(entry, times, kept=layer >= from_layer) for layer, entry in enumerate(prefix.entries)]
    mask = prefix.previous_attention_mask.repeat(times, 1)
    partial = _PartialCache(entries, mask, frozen=True)
    partial.from_layer = max(from_layer, getattr(prefix, "from_layer", 0))
    return partial


def _repeated(entry: Any, times: int, kept: bool) -> TransformerLensKeyValueCacheEntry:
    keys, values = entry.past_keys, entry.past_values
    if not kept:
        return TransformerLensKeyValueCacheEntry(_shape_only(keys, times), _shape_only(values, times), frozen=True)
    if times == 1:
        return entry
    if isinstance(entry, _RepeatedEntry):
        # Rows come copy after copy, so copies of copies are just more copies.
        return _RepeatedEntry(*entry.kept, entry.times * times)
    return _RepeatedEntry(keys, values, times)


def _shape_only(tensor: Tensor, times: int) -> Tensor:
    """As many rows as `times` copies would have, all one element; not a view, which would keep the whole alive."""
    return tensor.new_zeros((1,) * tensor.ndim).expand(times * tensor.shape[0], *tensor.shape[1:])


def residual(model: Any, tokens: Tensor, layer: int, prefix: Any, start: Start | None = None) -> Tensor:
    """What enters block `layer`, computed from the start's block on; with a prefix at the last position only."""
    require_before(start, layer, prefix)
    if start is not None:
        if start.layer == layer:
            return start.residual
        how = {"start_at_layer": start.layer, "stop_at_layer": layer}
        return model(start.residual, attention_mask=_ones(model, start.residual), **how)
    require_kept(prefix, 0)
    if prefix is None:
        return run(model, tokens, stop_at_layer=layer)
    return run(model, tokens[:, -1:], past_kv_cache=prefix, stop_at_layer=layer)


class _Filled(Exception):
    """An attention forward has handed over its keys and values: nothing else was wanted of it."""


@dataclass
class _KeysAndValues(TransformerLensKeyValueCacheEntry):
    """A cache entry that takes keys and values and ends the forward."""

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        self.past_keys, self.past_values = new_keys, new_values
        raise _Filled


def _short_last_block(model: Any, resid: Tensor) -> Tensor:
    """What leaves the last block at the last position, (batch, 1, d_model): of the others only keys and values are computed."""
    cfg, layer = model.cfg, model.cfg.n_layers - 1
    if resid.shape[1] == 1:
        return model(resid, start_at_layer=layer, stop_at_layer=layer + 1)
    empty = TransformerLensKeyValueCacheEntry.init_cache_entry(cfg, resid.device, len(resid))
    entry = _KeysAndValues(empty.past_keys, empty.past_values)
    with suppress(_Filled):
        model.blocks[layer](resid[:, :-1], past_kv_cache_entry=entry, attention_mask=_ones(model, resid[:, :-1]))
    kept = TransformerLensKeyValueCacheEntry(entry.past_keys, entry.past_values, frozen=True)
    cache = TransformerLensKeyValueCache([kept] * (layer + 1), _ones(model, resid[:, :-1]), frozen=True)
    how = {"past_kv_cache": cache, "attention_mask": _ones(model, resid)}
    return model(resid[:, -1:], start_at_layer=layer, stop_at_layer=layer + 1, **how)


def last_residual(model: Any, tokens: Tensor, prefix: Any, start: Start | None, short: bool = False) -> Tensor:
    """What leaves the last block at the last position, (batch, 1, d_model)."""
    n_layers = model.cfg.n_layers
    if short and prefix is None and (start is None or start.layer < n_layers):
        if start is None:
            resid = run(model, tokens, stop_at_layer=n_layers - 1)
        else:
            resid = model(start.residual, start_at_layer=start.layer, stop_at_layer=n_layers - 1)
        return _short_last_block(model, resid)
    if start is None:
        return residual(model, tokens, n_layers, prefix)[:, -1:]
    require_kept(prefix, start.layer)
    resid = start.residual if prefix is None else start.residual[:, -1:]
    if start.layer == n_layers:
        return resid[:, -1:]
    how = {}
    if prefix is not None:
        # Of all positions: upstream extends it only where it embeds.
        how = {"past_kv_cache": prefix, "attention_mask": prefix.append_attention_mask(_ones(model, resid))}
    return model(resid, start_at_layer=start.layer, stop_at_layer=n_layers, **how)[:, -1:]


def unembed(model: Any, resid: Tensor, token_ids: Tensor | None) -> Tensor:
    """Logits (batch, pos, vocab or the tokens asked for) of what leaves the last block."""
    if token_ids is None:
        return model(resid, start_at_layer=model.cfg.n_layers)
    # As HookedTransformer.forward and Unembed.forward do, with some columns: nothing of the model needs to be patched.
    if model.cfg.normalization_type is not None:
        resid = model.ln_final(resid)
    part, columns = model.unembed, token_ids.to(model.unembed.W_U.device)
    logits = F.linear(part.hook_in(resid), part.W_U[:, columns].T, part.b_U[columns])
    return apply_softcap(part.hook_out(logits), model.cfg.output_logits_soft_cap)


def run(model: Any, tokens: Tensor, **how: Any) -> Tensor:
    tokens = tokens.to(model.cfg.device)
    # An explicit mask: otherwise TransformerLens guesses padding from the tokenizer's settings.
    return model(tokens, attention_mask=torch.ones_like(tokens), **how)


def _ones(model: Any, resid: Tensor) -> Tensor:
    return torch.ones(resid.shape[:2], dtype=torch.long, device=model.cfg.device)
