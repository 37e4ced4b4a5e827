"""One layer's attention scores on prompts, from the units that make them.

1. `run_layers` runs a batch of prompts of one length: once with the host's own products, for the dense pattern, and once with the
   units, for z, scores and pattern. The host is left as it was.
2. `LayerScores` builds queries and keys from z and the write vectors, in float32, and from them the scores. They must be those
   that the host showed; a host that computes scores in a way not known here is refused instead of being explained wrongly.
3. `contribution` is a pair's part of every score, `effects` what the removal of a unit does to the pattern.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.analysis.qk.vectors import LayerUnits, Side
from swd_lens.base.machine import plain_float32
from swd_lens.hosts import Host, UnsupportedHostError, require_no_dropout
from swd_lens.hosts.attention import Heads, Rotation, rotations
from swd_lens.hosts.recording import require_seen
from swd_lens.units import attach

REMOVE = ("q", "k", "pair")
# Scores recomputed from z differ from the host's by rounding: far below this in float32 (1e-5 of the largest score in the tests),
# and by the rounding of z, q and k where the host holds 8 or 11 bits.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 0.05
_ROUNDING = 1e-6  # changes of a probability up to this are float32 rounding: a correlation of them says nothing


@dataclass(frozen=True)
class LayerScores:
    """A batch of prompts in one layer, as its units make it. Float32.

    Attributes:
        z_q, z_k: (batch, pos, unit) of the sites that write queries and keys (the same tensor for attn_qkv).
        seen: (batch, head, dest, src) the host's scores with units attached, after cap and mask.
        dense: the host's pattern without units; its rows sum to one also where the host rounds to 8 or 11 bits.
        turn: rotary angles, or None.
    """

    units: LayerUnits
    z_q: Float[Tensor, "batch pos q_unit"]
    z_k: Float[Tensor, "batch pos k_unit"]
    seen: Float[Tensor, "batch head pos pos"]
    dense: Float[Tensor, "batch head pos pos"]
    turn: Rotation | None

    @property
    def heads(self) -> Heads:
        return self.units.heads

    @cached_property
    def mask(self) -> Bool[Tensor, "pos pos"]:
        """Which sources a destination sees: causal, and within the window where attention slides."""
        # Masked scores are -inf or the lowest number of the host's dtype (-65504 at the least); of whole rows, all prompts alike.
        return (self.seen[0, 0] > -3e4).tril()

    def raw(self, query: bool) -> Float[Tensor, "batch pos head d_head"]:
        """Queries or keys (one per key head) as the projections leave them."""
        side, z = (self.units.q, self.z_q) if query else (self.units.k, self.z_k)
        return (z @ side.write.flatten(1)).unflatten(-1, side.write.shape[1:]) + side.constant

    @cached_property
    def q_raw(self) -> Float[Tensor, "batch pos head d_head"]:
        return self.raw(query=True)

    @cached_property
    def k_raw(self) -> Float[Tensor, "batch pos key_head d_head"]:
        return self.raw(query=False)

    @cached_property
    def q(self) -> Float[Tensor, "batch head pos d_head"]:
        return self.ready(self.units.q, self.q_raw.transpose(1, 2))

    @cached_property
    def k(self) -> Float[Tensor, "batch key_head pos d_head"]:
        return self.ready(self.units.k, self.k_raw.transpose(1, 2))

    def ready(self, side: Side, x: Float[Tensor, "*any pos d_head"]) -> Float[Tensor, "*any pos d_head"]:
        """Queries or keys as they enter the product: normed and rotated."""
        if side.norm is not None:
            x = x * side.norm.inverse_rms(x) * side.norm.weight
        return x if self.turn is None else self.turn.apply(x)

    def inverse_rms(self, query: bool) -> Float[Tensor, "batch head pos"] | None:
        """The norm's scale at each position of each (key) head in this run; None without a norm."""
        side, x = (self.units.q, self.q_raw) if query else (self.units.k, self.k_raw)
        return None if side.norm is None else side.norm.inverse_rms(x)[..., 0].transpose(1, 2)

    @cached_property
    def position_bias(self) -> Float[Tensor, "head pos pos"] | None:
        """What ALiBi adds to scores."""
        if self.heads.slopes is None:
            return None
        places = torch.arange(self.z_q.shape[1], device=self.z_q.device)
        return -self.heads.slopes[:, None, None] * (places[:, None] - places).clamp(min=0)

    @cached_property
    def scores(self) -> Float[Tensor, "batch head pos pos"]:
        """Before cap and mask."""
        keys = self.k.repeat_interleave(self.heads.group, dim=1)
        scores = self.q @ keys.mT * self.heads.scale
        return scores if self.position_bias is None else scores + self.position_bias

    def capped(self, scores: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
        cap = self.heads.soft_cap
        return scores if cap is None else cap * (scores / cap).tanh()

    def log_pattern(self, scores: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
        """Log probabilities of scores before the cap; 0 where a destination sees no source (its probability is 0 there)."""
        logs = self.capped(scores).masked_fill(~self.mask, -torch.inf).log_softmax(-1)
        return logs.masked_fill(~self.mask, 0.0)

    @cached_property
    def log_before(self) -> Float[Tensor, "batch head pos pos"]:
        """Log pattern with all units at work."""
        return self.log_pattern(self.scores)

    def pattern(self, log_pattern: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
        return log_pattern.exp() * self.mask

    def check(self, dtype: torch.dtype) -> None:
        """Raises UnsupportedHostError where the scores are not those that the host showed."""
        seen, ours = self.seen[..., self.mask], self.capped(self.scores)[..., self.mask]
        off, largest = float((seen - ours).abs().max()), float(seen.abs().max())
        if not off <= _TOLERANCE.get(dtype, _COARSE) * max(largest, 1e-6):
            raise UnsupportedHostError(
                f"layer {self.units.layer}: queries and keys give scores that differ by {off:.3g} from those the host shows "
                f"(largest {largest:.3g}). It does something to queries, keys or scores that is not known here, or a hook "
                "changes them; remove hooks with model.reset_hooks(), else please report it with the model's name"
            )


def run_layers(
    host: Host, factors: Any, found: Mapping[int, LayerUnits], tokens: Int[Tensor, "batch pos"], layers: Sequence[int]
) -> dict[int, LayerScores]:
    """Run prompts dense and with units attached, and keep what these layers show.

    Raises:
        UnsupportedHostError: a layer whose scores are not what its queries and keys give, or that does not show them.
        AttachError: see `swd_lens.attach`.
        ValueError: the host drops activations out (train mode).
    """
    last, n_pos, model = max(layers) + 1, tokens.shape[1], host.model
    require_no_dropout(model)
    with torch.no_grad(), plain_float32(_device(model)):
        turns = rotations(host, [found[layer].heads for layer in layers], n_pos)
        kept: dict[tuple[str, bool], Tensor] = {}
        with attach(model, factors) as attachment:
            with attachment.dense():
                _watch(host, tokens, last, [found[i].heads.pattern_hook for i in layers], kept, True)
            names = [found[layer].heads.scores_hook for layer in layers]
            sites = {side.site for i in layers for side in (found[i].q, found[i].k)}
            _watch(host, tokens, last, [*names, *(site.hook_name for site in sites)], kept, False)
        require_seen(sites, {s.name: s for s in sites if (s.hook_name, False) in kept}, "units")
        made = {}
        for layer in layers:
            units = found[layer]
            z_q, z_k = (kept[side.site.hook_name, False].float() for side in (units.q, units.k))
            seen, dense = _shown(kept, units.heads.scores_hook, False), _shown(kept, units.heads.pattern_hook, True)
            made[layer] = LayerScores(units, z_q, z_k, seen.float(), _rows_of_one(dense.float()), turns[layer])
            made[layer].check(seen.dtype)
    return made


def _watch(
    host: Host, tokens: Tensor, n_blocks: int, names: Sequence[str], kept: dict[tuple[str, bool], Tensor], dense: bool
) -> None:
    def reader(name: str) -> Any:
        def read(x: Tensor, hook: Any) -> None:
            kept[name, dense] = x.detach().clone()

        return read

    there = [name for name in names if name in host.model.hook_dict]
    with ExitStack() as stack:
        stack.enter_context(host.model.hooks(fwd_hooks=[(name, reader(name)) for name in there]))
        host.run_blocks(tokens, n_blocks)


def _shown(kept: Mapping[tuple[str, bool], Tensor], name: str, dense: bool) -> Tensor:
    if (name, dense) not in kept:
        raise UnsupportedHostError(
            f"{name} saw nothing in a forward of this host, so its attention scores cannot be compared; a TransformerBridge that "
            "leaves attention to transformers does not show them"
        )
    return kept[name, dense]


def _rows_of_one(pattern: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
    """Probabilities that a half-precision host rounded, made to sum to one again: the KL of others is no number below 0."""
    return pattern / pattern.sum(-1, keepdim=True)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


# ---------------------------------------------------------------------------------------------- pairs


def contribution(
    run: LayerScores, head: Int[Tensor, " case"], q_unit: Int[Tensor, " case"], k_unit: Int[Tensor, " case"]
) -> Float[Tensor, "batch case pos pos"]:
    """z_a(dest) * z_b(src) * gamma_ab(dest - src): each pair's part of its head's scores, before the cap.

    With normed queries and keys the scale of the norm is that of this run. Positions that a destination does not see are 0.
    """
    a, key_head = run.units.q.folded[q_unit, head], head // run.heads.group
    b = run.units.k.folded[k_unit, key_head]
    if run.turn is None:
        gamma = ((a * b).sum(-1) * run.heads.scale)[:, None, None]
    else:
        n_pos = run.z_q.shape[1]
        queries, keys = (run.turn.apply(x[:, None].expand(-1, n_pos, -1)) for x in (a, b))
        gamma = queries @ keys.mT * run.heads.scale
    z_a, z_b = run.z_q[..., q_unit].mT, run.z_k[..., k_unit].mT
    scales = run.inverse_rms(query=True), run.inverse_rms(query=False)
    z_a = z_a if scales[0] is None else z_a * scales[0][:, head]
    z_b = z_b if scales[1] is None else z_b * scales[1][:, key_head]
    return z_a[..., None] * z_b[..., None, :] * gamma * run.mask


def scores_without(
    run: LayerScores,
    head: Int[Tensor, " case"],
    q_unit: Int[Tensor, " case"],
    k_unit: Int[Tensor, " case"],
    remove: str,
    contributed: Float[Tensor, "batch case pos pos"],
) -> Float[Tensor, "batch case pos pos"]:
    """The head's scores (before cap and mask) with a unit taken out of its queries or keys; norms see what is left."""
    key_head = head // run.heads.group
    if remove == "pair":
        return run.scores[:, head] - contributed
    q, k = run.q[:, head], run.k[:, key_head]
    if remove == "q":
        part = run.z_q[..., q_unit].mT[..., None] * run.units.q.write[q_unit, head][:, None]
        q = run.ready(run.units.q, run.q_raw[:, :, head].transpose(1, 2) - part)
    else:
        part = run.z_k[..., k_unit].mT[..., None] * run.units.k.write[k_unit, key_head][:, None]
        k = run.ready(run.units.k, run.k_raw[:, :, key_head].transpose(1, 2) - part)
    scores = q @ k.mT * run.heads.scale
    return scores if run.position_bias is None else scores + run.position_bias[head]


@dataclass(frozen=True)
class Effects:
    """What removals do, per case; maps are (batch, case, dest, src), numbers (batch, case)."""

    map: Tensor
    before: Tensor
    after: Tensor
    dense: Tensor
    dense_kl: Tensor
    removed_kl: Tensor
    max_change: Tensor
    signed_mean: Tensor
    agreement: Tensor
    share: Tensor

    NUMBERS = ("dense_kl", "removed_kl", "max_change", "signed_mean", "agreement", "share")


def effects(
    run: LayerScores,
    head: Int[Tensor, " case"],
    q_unit: Int[Tensor, " case"],
    k_unit: Int[Tensor, " case"],
    remove: str,
) -> Effects:
    """Remove a unit in every case and compare patterns; `swd_lens.analysis.qk.qk_replay` says what the numbers mean."""
    mask = run.mask
    map_ = contribution(run, head, q_unit, k_unit)
    intact = run.scores[:, head]
    without = scores_without(run, head, q_unit, k_unit, remove, map_)
    log_before, log_after = run.log_before[:, head], run.log_pattern(without)
    before, after, dense = run.pattern(log_before), run.pattern(log_after), run.dense[:, head]
    log_dense = dense.clamp(min=torch.finfo(torch.float32).tiny).log()
    # The change that the map alone foretells: its contributions leave, all other pairs stay.
    foretold = run.pattern(run.log_pattern(intact - map_)) - before
    change = after - before
    removed, own = (_row_centred(x, mask) for x in (intact - without, map_))
    return Effects(
        map=map_,
        before=before,
        after=after,
        dense=dense,
        dense_kl=(dense * (log_dense - log_before)).sum(-1).mean(-1),
        removed_kl=(before * (log_before - log_after)).sum(-1).mean(-1),
        max_change=change.abs().amax((-2, -1)),
        signed_mean=map_.sum((-2, -1)) / mask.sum(),
        agreement=_correlation(foretold, change),
        share=_ratio(_dot(own, removed), _dot(removed, removed)),
    )


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum((-2, -1))


def _row_centred(x: Tensor, mask: Tensor) -> Tensor:
    """Less its mean over the sources that each destination sees: a constant in a row changes no pattern."""
    x = x * mask
    return (x - x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)) * mask


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    """Of changes of patterns: their rows sum to zero, so the cosine is the correlation. NaN where either is rounding."""
    told = torch.minimum(x.abs().amax((-2, -1)), y.abs().amax((-2, -1))) > _ROUNDING
    return _ratio(_dot(x, y), (_dot(x, x) * _dot(y, y)).sqrt()).where(told, torch.nan)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """over / under, NaN where there is nothing to divide by."""
    return torch.where(under > 0, over / under, torch.nan).float()
