"""Running parts of a HookedTransformer: prefixes that are kept, starting at a block, and unembedding a few tokens only.

1. `HookedRuns` is the part of the host that runs it; see `swd_lens.hosts.Host`.
2. A prefix is TransformerLens' frozen cache of keys and values. Repeated for copies of the batch it keeps them once. Prefixes of
   several lengths are joined as TransformerLens has batches of several lengths: padded at their beginning.
3. In a short last block all positions but the last are run to their keys and values only.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.utilities.activation_functions import apply_softcap

from swd_lens.hosts.hooked.fused import takes
from swd_lens.hosts.host import Begun, Start, appended, require_before, require_kept, shape_only


class _RepeatedEntry(TransformerLensKeyValueCacheEntry):
    """One layer's keys and values for `times` copies of the batch, copied when they are run on, not before.

    past_keys and past_values have the shape of the whole and no memory: upstream reads nothing but their shape. Attention that
    can do with what is kept once (fused.py) gets the new keys and values alone.
    """

    def __init__(self, kept: TransformerLensKeyValueCacheEntry, times: int, taken_once: Callable[[Any], bool]):
        super().__init__(shape_only(kept.past_keys, times), shape_only(kept.past_values, times), frozen=True)
        self.times, self.taken_once = times, taken_once
        self.kept: Any = kept  # upstream's entry, which gets the rotated keys beside it

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        if new_keys.shape[1] == 1 and self.taken_once(self):
            return new_keys, new_values
        keys, values = self.kept.past_keys, self.kept.past_values
        return appended(keys, new_keys, self.times, 1), appended(values, new_values, self.times, 1)

    def rotated(self, attn: Any) -> Tensor:
        """The keys that are kept once as attention reads them, rotated to their positions."""
        if attn.cfg.positional_embedding_type != "rotary":
            return self.kept.past_keys
        if not hasattr(self.kept, "rotated"):
            padding = getattr(self.kept, "padding", None)
            mask = None if padding is None else (~padding).long()
            self.kept.rotated = type(attn).apply_rotary(attn, self.kept.past_keys, 0, mask)
        return self.kept.rotated


class _JoinedEntry(TransformerLensKeyValueCacheEntry):
    """One layer's keys and values of several batches. padding: (rows, prefix), where there are none."""

    def __init__(self, entries: Sequence[Any], padding: Tensor, kept: bool):
        longest = padding.shape[1]

        def joined(parts: list[Tensor]) -> Tensor:
            if not kept:  # as `shape_only`
                return parts[0].new_zeros(1, 1, 1, 1).expand(len(padding), longest, *parts[0].shape[2:])
            return torch.cat([F.pad(part, (0, 0, 0, 0, longest - part.shape[1], 0)) for part in parts])

        keys, values = ([getattr(entry, name) for entry in entries] for name in ("past_keys", "past_values"))
        super().__init__(joined(keys), joined(values), frozen=True)
        self.padding = padding


class _PartialCache(TransformerLensKeyValueCache):
    """A frozen cache of the layers from `from_layer` on."""

    def __init__(self, entries: list[Any], mask: Tensor, from_layer: int):
        super().__init__(entries, mask, frozen=True)
        self.from_layer = from_layer


def _repeated(entry: Any, times: int, kept: bool, attn: Any = None) -> TransformerLensKeyValueCacheEntry:
    keys, values = entry.past_keys, entry.past_values
    if not kept:
        return TransformerLensKeyValueCacheEntry(shape_only(keys, times), shape_only(values, times), frozen=True)
    if times == 1:
        return entry
    if isinstance(entry, _RepeatedEntry):
        # Rows come copy after copy, so copies of copies are just more copies.
        return _RepeatedEntry(entry.kept, entry.times * times, partial(takes, attn))
    return _RepeatedEntry(entry, times, partial(takes, attn))


class _Filled(Exception):
    """An attention forward has handed over its keys and values: nothing else was wanted of it."""


@dataclass
class _KeysAndValues(TransformerLensKeyValueCacheEntry):
    """A cache entry that takes keys and values and ends the forward."""

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        self.past_keys, self.past_values = new_keys, new_values
        raise _Filled


class HookedRuns:
    """How a HookedTransformer runs; see `swd_lens.hosts.Host`."""

    model: Any

    def run(self, tokens: Int[Tensor, "batch pos"], **how: Any) -> Tensor:
        tokens = tokens.to(self.model.cfg.device)
        # An explicit mask: otherwise TransformerLens guesses padding from the tokenizer's settings.
        return self.model(tokens, attention_mask=torch.ones_like(tokens), **how)

    def run_blocks(self, tokens: Int[Tensor, "batch pos"], n_blocks: int, start: Start | None = None) -> None:
        self.residual(tokens, n_blocks, None, start)

    def freeze_prefix(self, tokens: Int[Tensor, "batch pos"], begun: Begun | None = None) -> Any:
        if tokens.shape[1] == 1:
            return None
        last = self.model.cfg.n_layers - 1
        cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.model.cfg.device, len(tokens))
        with torch.no_grad():
            if begun is None:
                earlier = self.run(tokens[:, :-1], past_kv_cache=cache, stop_at_layer=last)
            else:
                cache.entries[: begun.layer] = begun.prefix.entries[: begun.layer]
                mask = cache.append_attention_mask(self._ones(begun.earlier))
                earlier = self._run_between(begun.earlier, begun.layer, last, mask, past_kv_cache=cache)
            cache.entries[last] = self._keys_and_values(earlier)
        cache.freeze()
        return cache if begun is None else self.repeat_prefix(cache, 1, begun.layer)

    def begin(self, tokens: Int[Tensor, "batch pos"], layer: int) -> Begun | None:
        if tokens.shape[1] == 1:
            return None
        cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, self.model.cfg.device, len(tokens))
        with torch.no_grad():
            earlier = self.run(tokens[:, :-1], past_kv_cache=cache, stop_at_layer=layer)
            cache.freeze()
            last = self.run(tokens[:, -1:], past_kv_cache=cache, stop_at_layer=layer)
        # Entries of the layers from `layer` on are empty, and no shapes.
        shapes = [_repeated(entry, 1, kept=False) for entry in cache.entries[:layer]]
        return Begun(layer, earlier, last, _PartialCache(shapes, cache.previous_attention_mask, layer))

    def repeat_prefix(self, prefix: Any, times: int, from_layer: int = 0) -> Any:
        """Copies nothing yet."""
        if prefix is None or (times == 1 and from_layer == 0):
            return prefix
        of_layers = enumerate(zip(prefix.entries, self.model.blocks, strict=True))
        entries = [_repeated(entry, times, layer >= from_layer, block.attn) for layer, (entry, block) in of_layers]
        mask = prefix.previous_attention_mask.repeat(times, 1)
        first = max(from_layer, getattr(prefix, "from_layer", 0))
        return _PartialCache(entries, mask, first)

    def join_prefixes(self, prefixes: Sequence[Any]) -> Any:
        masks = [prefix.previous_attention_mask for prefix in prefixes]
        longest, first = max(mask.shape[1] for mask in masks), getattr(prefixes[0], "from_layer", 0)
        mask = torch.cat([F.pad(mask, (longest - mask.shape[1], 0)) for mask in masks])
        layers = enumerate(zip(*(prefix.entries for prefix in prefixes), strict=True))
        return _PartialCache([_JoinedEntry(entries, mask == 0, layer >= first) for layer, entries in layers], mask, first)

    def residual(
        self, tokens: Int[Tensor, "batch pos"], layer: int, prefix: Any = None, start: Start | None = None
    ) -> Float[Tensor, "batch _pos d_model"]:
        require_before(start, layer)
        require_kept(prefix, 0 if start is None else start.layer)
        if start is None:
            if prefix is None:
                return self.run(tokens, stop_at_layer=layer)
            return self.run(tokens[:, -1:], past_kv_cache=prefix, stop_at_layer=layer)
        if start.layer == layer:
            return start.residual
        if prefix is None:
            return self._run_between(start.residual, start.layer, layer)
        # The mask is of all positions: upstream extends it only where it embeds.
        mask = prefix.append_attention_mask(self._ones(start.residual))
        return self._run_between(start.residual, start.layer, layer, mask, past_kv_cache=prefix)

    def last_logits(
        self,
        tokens: Int[Tensor, "batch pos"],
        prefix: Any = None,
        *,
        start: Start | None = None,
        token_ids: Int[Tensor, " answer"] | None = None,
        short: bool = False,
    ) -> Float[Tensor, "batch _vocab"]:
        n_layers = self.model.cfg.n_layers
        # Unembed the last position only: for long prompts the rest is most of the work and memory.
        if short and prefix is None and (start is None or start.layer < n_layers):
            resid = self._short_last_block(self.residual(tokens, n_layers - 1, None, start))
        else:
            if start is not None and prefix is not None:
                start = Start(start.layer, start.residual[:, -1:])
            resid = self.residual(tokens, n_layers, prefix, start)[:, -1:]
        if token_ids is None:
            return self.model(resid, start_at_layer=n_layers)[:, -1]
        # As HookedTransformer.forward and Unembed.forward do, with some columns: nothing of the model needs to be patched.
        if self.model.cfg.normalization_type is not None:
            resid = self.model.ln_final(resid)
        part, columns = self.model.unembed, token_ids.to(self.model.unembed.W_U.device)
        logits = F.linear(part.hook_in(resid), part.W_U[:, columns].T, part.b_U[columns])
        return apply_softcap(part.hook_out(logits), self.model.cfg.output_logits_soft_cap)[:, -1]

    def unembed(
        self, tokens: Int[Tensor, "batch pos"], residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        return self.model(residual, start_at_layer=self.model.cfg.n_layers)

    def _short_last_block(self, resid: Tensor) -> Tensor:
        """The output of the last block at the last position; at the others only keys and values are computed."""
        layer = self.model.cfg.n_layers - 1
        if resid.shape[1] == 1:
            return self.model(resid, start_at_layer=layer, stop_at_layer=layer + 1)
        kept = self._keys_and_values(resid[:, :-1])
        cache = TransformerLensKeyValueCache([kept] * (layer + 1), self._ones(resid[:, :-1]), frozen=True)
        return self._run_between(resid[:, -1:], layer, layer + 1, self._ones(resid), past_kv_cache=cache)

    def _keys_and_values(self, resid: Tensor) -> TransformerLensKeyValueCacheEntry:
        """All that the last block computes of positions that no other block reads."""
        empty = TransformerLensKeyValueCacheEntry.init_cache_entry(self.model.cfg, resid.device, len(resid))
        entry = _KeysAndValues(empty.past_keys, empty.past_values)
        with suppress(_Filled):
            self.model.blocks[-1](resid, past_kv_cache_entry=entry, attention_mask=self._ones(resid))
        return TransformerLensKeyValueCacheEntry(entry.past_keys, entry.past_values, frozen=True)

    def _run_between(self, resid: Tensor, start: int, stop: int, mask: Tensor | None = None, **how: Any) -> Tensor:
        """Blocks start .. stop - 1, from what enters the first of them."""
        mask = self._ones(resid) if mask is None else mask
        return self.model(resid, start_at_layer=start, stop_at_layer=stop, attention_mask=mask, **how)

    def _ones(self, resid: Tensor) -> Tensor:
        return torch.ones(resid.shape[:2], dtype=torch.long, device=self.model.cfg.device)
