"""The attention scores of a layer's heads, from the units that make them.

    score = <R_t norm(q), R_u norm(k)> * scale + alibi,     q = sum_a z_a bQ_a + cQ,     k = sum_b z_b bK_b + cK

1. `layer_units` cuts the write vectors of a layer's Q and K units into heads: bQ and bK. A unit of attn_qkv writes queries with
   its first columns, keys with the next and values with the rest; a unit of attn_q or attn_k has that part alone. cQ and cK are
   biases, with the output offsets of transported factors.
2. `run_layers` runs a batch of prompts of one length: once with the host's own products, for the dense pattern, and once with the
   units, for z and scores. The host is left as it was.
3. `LayerScores` builds queries and keys from z and the write vectors, in float32, and from them the scores. They must be those
   that the host showed; a host that computes scores in a way not known here is refused instead of being explained wrongly.

Where a head norms its queries or keys (Qwen3), the norm's weight is multiplied into the write vectors; its scale, which changes
from position to position, is that of the run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.errors import QKError, UnsupportedHostError
from swd_lens.hosts import require_no_dropout
from swd_lens.hosts.attention import HeadNorm, Heads, Rotation, heads_of, rotations
from swd_lens.hosts.recording import Recording, record, standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.tasks.prompt import Prompt
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import UnitSet, attach
from swd_lens.units.factors import Factors
from swd_lens.units.match import weight_fingerprint

# Scores recomputed from z differ from the host's by rounding: far below this in float32 (1e-5 of the largest score in the tests),
# and by the rounding of z, q and k where the host holds 8 or 11 bits.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_COARSE = 0.05
_SIDES = ("attn_qkv", "attn_q", "attn_k")
_POSITIONS_ENTER = {
    "learned": "through h, and so through z",
    "rotary": "rotary: gamma depends on the distance destination - source",
    "alibi": "ALiBi: a bias added to scores; gamma and z do not see it",
    "none": "not at all (no positions)",
}


# ---------------------------------------------------------------------------------------------- units


@dataclass(frozen=True)
class Side:
    """The units that write the queries, or the keys, of one layer."""

    site: Site  # whose units they are
    write: Float[Tensor, "unit head d_head"]  # (unit, head, d_head) raw write vectors: a query is z @ write + constant
    constant: Float[Tensor, "head d_head"]  # (head, d_head) what is added whatever z: the bias and the factors' output offset
    norm: HeadNorm | None  # of each head's query or key, or None

    @property
    def n_units(self) -> int:
        return self.write.shape[0]

    @property
    def folded(self) -> Float[Tensor, "unit head d_head"]:
        """Write vectors with the norm's weight multiplied in: what meets the other side's in a product."""
        return self.write if self.norm is None else self.write * self.norm.weight


@dataclass(frozen=True)
class LayerUnits:
    """Units on both sides of one layer's attention scores."""

    heads: Heads
    q: Side
    k: Side


def layer_units(units: UnitSet) -> dict[int, LayerUnits]:
    """Layer -> its Q and K units, for every layer that has both. Raises QKError: no layer has units on both sides;
    UnsupportedHostError: see `swd_lens.hosts.attention.heads_of`, or units that are not read and write factors."""
    for site in units.sites:
        if site.kind in _SIDES and not isinstance(units[site.name], Factors):
            raise UnsupportedHostError(
                f"{site.name} holds an encode/decode pair; QK coefficients are products of write vectors, so its units "
                "must be read and write factors"
            )
    layers = sides_of(units, {site.layer for site in units.sites})
    if not layers:
        raise QKError(
            f"no layer has units on its queries and its keys; these factors are of {', '.join(units)}. Factorize "
            "attn_qkv, or attn_q and attn_k"
        )
    return layers


def sides_of(units: UnitSet, layers: Iterable[int]) -> dict[int, LayerUnits]:
    """Layer -> its Q and K units, for those of these layers where both are read and write factors. Raises
    UnsupportedHostError: see `swd_lens.hosts.attention.heads_of`."""
    by_layer = {}
    for layer in sorted(layers):
        kinds = {site.kind: site for site in units.sites if site.layer == layer and site.name in units.factors}
        q, k = kinds.get("attn_qkv", kinds.get("attn_q")), kinds.get("attn_qkv", kinds.get("attn_k"))
        if q is not None and k is not None:
            heads = heads_of(units.host, layer)
            query, key = _side(heads, q, units.factors[q.name], True), _side(heads, k, units.factors[k.name], False)
            by_layer[layer] = LayerUnits(heads, query, key)
    return by_layer


def _side(heads: Heads, site: Site, factors: Factors, query: bool) -> Side:
    bias, norm = (heads.query_bias, heads.query_norm) if query else (heads.key_bias, heads.key_norm)
    start = heads.n_heads * heads.d_head if site.kind == "attn_qkv" and not query else 0
    columns = slice(start, start + bias.numel())
    write = factors.write[:, columns].float().to(bias.device).view(factors.n_units, *bias.shape)
    constant = bias
    if factors.offsets is not None:
        constant = constant + factors.offsets.out[columns].float().to(bias.device).view(bias.shape)
    return Side(site, write, constant, norm)


def units_of_head(layers: Mapping[int, LayerUnits], layer: int, head: int) -> LayerUnits:
    """The units of a head's layer. Raises QKError: a layer without Q and K units, or a head that is not there."""
    if layer not in layers:
        raise QKError(f"layer {layer} has no units on its queries and keys; layers with both: {', '.join(map(str, layers))}")
    units = layers[layer]
    if not 0 <= head < units.heads.n_heads:
        raise QKError(f"layer {layer} has heads 0 to {units.heads.n_heads - 1}, not {head}")
    return units


def provenance(units: UnitSet, layers: Mapping[int, LayerUnits]) -> dict[str, Any]:
    """Settings of results: the model, fingerprints of the matrices, how positions and norms enter, the version."""
    sites = {side.site for of_layer in layers.values() for side in (of_layer.q, of_layer.k)}
    made_from = {site: units.factors[site.name].provenance.get("weight_sha256") for site in sites}
    heads = next(iter(layers.values())).heads
    return {
        "model": str(getattr(units.host.model.cfg, "model_name", "")),
        "sites": {
            site.name: str(made_from[site] or weight_fingerprint(units.host, site))
            for site in sorted(sites, key=lambda site: (site.layer, site.kind))
        },
        "positions": _POSITIONS_ENTER[heads.positions],
        "rotary": heads.positions == "rotary",
        "qk_norm": "weight folded into write vectors" if heads.query_norm is not None else None,
        "soft_cap": heads.soft_cap,
        "version": __version__,
        **standing_hooks(units.host.model),
    }


def attended_row(model: Any, prompt: Prompt) -> Int[Tensor, " pos"]:
    """The token ids of one prompt, at least two. Raises QKError: a single token, which can attend to itself only, none, or
    several rows; TokenError: more tokens than the context holds."""
    if not prompt.ids:
        raise QKError("the prompt has no tokens; attention needs at least two")
    if prompt.n_rows != 1:
        raise QKError(f"a prompt is one row of tokens, got {prompt.n_rows}; qk_scan takes a list of prompts")
    row = prompt.row(model)
    if len(row) < 2:
        raise QKError("a prompt of one token attends to itself whatever its scores; give at least two tokens")
    return row


# ---------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class SideRun:
    """The queries, or the keys (one per key head), of a batch of prompts. Float32."""

    side: Side
    z: Float[Tensor, "batch pos unit"]  # (batch, pos, unit) of the site that writes them
    rotation: Rotation | None  # rotary angles, or None

    @cached_property
    def raw(self) -> Float[Tensor, "batch head pos d_head"]:
        """As the projection leaves them."""
        written = (self.z @ self.side.write.flatten(1)).unflatten(-1, self.side.write.shape[1:])
        return (written + self.side.constant).transpose(1, 2)

    @cached_property
    def vectors(self) -> Float[Tensor, "batch head pos d_head"]:
        """As they enter the product."""
        return self.ready(self.raw)

    def ready(self, raw: Float[Tensor, "*any pos d_head"]) -> Float[Tensor, "*any pos d_head"]:
        """Queries or keys, normed and rotated."""
        norm = self.side.norm
        return self._rotated(raw if norm is None else raw * norm.inverse_rms(raw) * norm.weight)

    @cached_property
    def inverse_rms(self) -> Float[Tensor, "batch head pos"] | None:
        """The norm's scale at each position in this run; None without a norm."""
        return None if self.side.norm is None else self.side.norm.inverse_rms(self.raw)[..., 0]

    def activations(self, unit: Int[Tensor, " case"], head: Int[Tensor, " case"]) -> Float[Tensor, "batch case pos"]:
        """z of units, times the norm's scale in the head."""
        z = self.z[..., unit].mT
        return z if self.inverse_rms is None else z * self.inverse_rms[:, head]

    def parts(self, head: int) -> tuple[Float[Tensor, "pos d_head"], Float[Tensor, "pos d_head"]]:
        """The units' writes to the first prompt's queries or keys, and the constant; with the run's norms, rotated."""
        z = self.z[0]
        written, constant = z @ self.side.write[:, head], self.side.constant[head].expand(len(z), -1)
        if self.side.norm is not None and self.inverse_rms is not None:
            scale = self.inverse_rms[0, head][:, None]
            written, constant = written * scale * self.side.norm.weight, constant * scale * self.side.norm.weight
        return self._rotated(written), self._rotated(constant)

    def at(self, head: int, position: int) -> Float[Tensor, "unit d_head"]:
        """Each unit's write to the first prompt's query or key at one position; with the run's norm, rotated."""
        folded, z = self.side.folded[:, head], self.z[0, position]
        folded = folded if self.rotation is None else self.rotation.at(position, folded)
        return (z if self.inverse_rms is None else z * self.inverse_rms[0, head, position])[:, None] * folded

    def _rotated(self, x: Float[Tensor, "*any pos d_head"]) -> Float[Tensor, "*any pos d_head"]:
        return x if self.rotation is None else self.rotation.apply(x)


@dataclass(frozen=True)
class LayerScores:
    """A batch of prompts in one layer, as its units make it. Float32."""

    units: LayerUnits
    q: SideRun  # q, k: the two sides (with the same z for units of attn_qkv)
    k: SideRun
    shown: Float[Tensor, "batch head pos pos"]  # the host's scores with units attached, after cap and mask
    # the host's pattern without units; its rows sum to one also where the host rounds to 8 or 11 bits
    dense: Float[Tensor, "batch head pos pos"]

    @property
    def heads(self) -> Heads:
        return self.units.heads

    @cached_property
    def mask(self) -> Bool[Tensor, "pos pos"]:
        """Which sources a destination sees: causal, and within the window where attention slides."""
        # Masked scores are -inf or the lowest number of the host's dtype (-65504 at the least); of whole rows, all prompts alike.
        return (self.shown[0, 0] > -3e4).tril()

    @cached_property
    def position_bias(self) -> Float[Tensor, "head pos pos"] | None:
        """The part of scores that ALiBi adds."""
        if self.heads.slopes is None:
            return None
        positions = torch.arange(len(self.mask), device=self.mask.device)
        return -self.heads.slopes[:, None, None] * (positions[:, None] - positions).clamp(min=0)

    @cached_property
    def scores(self) -> Float[Tensor, "batch head pos pos"]:
        """Before cap and mask."""
        keys = self.k.vectors.repeat_interleave(self.heads.group, dim=1)
        scores = self.q.vectors @ keys.mT * self.heads.scale
        return scores if self.position_bias is None else scores + self.position_bias

    def capped(self, scores: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
        cap = self.heads.soft_cap
        return scores if cap is None else cap * (scores / cap).tanh()

    def log_pattern(self, scores: Float[Tensor, "*any pos pos"]) -> Float[Tensor, "*any pos pos"]:
        """Log probabilities of scores before the cap; 0 where a destination sees no source (its probability is 0 there)."""
        logs = self.capped(scores).masked_fill(~self.mask, -torch.inf).log_softmax(-1)
        return logs.masked_fill(~self.mask, 0.0)

    @cached_property
    def log_intact(self) -> Float[Tensor, "batch head pos pos"]:
        """Log pattern with all units at work."""
        return self.log_pattern(self.scores)

    def contribution(
        self, head: Int[Tensor, " case"], q_unit: Int[Tensor, " case"], k_unit: Int[Tensor, " case"]
    ) -> Float[Tensor, "batch case pos pos"]:
        """z_a(dest) * z_b(src) * gamma_ab(dest - src): each pair's part of its head's scores, before the cap.

        With normed queries and keys the scale of the norm is that of this run. Positions that a destination does not see are 0.
        """
        key_head = head // self.heads.group
        a, b = self.units.q.folded[q_unit, head], self.units.k.folded[k_unit, key_head]
        rotation = self.q.rotation
        if rotation is None:
            gamma = ((a * b).sum(-1) * self.heads.scale)[:, None, None]
        else:
            queries, keys = (rotation.apply(x[:, None].expand(-1, len(self.mask), -1)) for x in (a, b))
            gamma = queries @ keys.mT * self.heads.scale
        z_a, z_b = self.q.activations(q_unit, head), self.k.activations(k_unit, key_head)
        return z_a[..., None] * z_b[..., None, :] * gamma * self.mask

    def check(self, dtype: torch.dtype) -> None:
        """Raises UnsupportedHostError where the scores are not those that the host showed."""
        shown, ours = self.shown[..., self.mask], self.capped(self.scores)[..., self.mask]
        off, largest = float((shown - ours).abs().max()), float(shown.abs().max())
        if not off <= _TOLERANCE.get(dtype, _COARSE) * max(largest, 1e-6):
            raise UnsupportedHostError(
                f"layer {self.heads.layer}: queries and keys give scores that differ by {off:.3g} from those the host "
                f"shows (largest {largest:.3g}). It does something to queries, keys or scores that is not known here, or "
                "a hook changes them; remove hooks with model.reset_hooks(), else please report it with the model's name"
            )


def run_layers(units: UnitSet, layers: Mapping[int, LayerUnits], tokens: Int[Tensor, "batch pos"]) -> dict[int, LayerScores]:
    """Run prompts dense and with all units attached, and keep what these layers show.

    Raises:
        UnsupportedHostError: a layer whose scores are not what its queries and keys give, or that does not show them.
        AttachError: see `swd_lens.attach`.
        ValueError: the host drops activations out (train mode).
    """
    host, heads = units.host, {layer: of_layer.heads for layer, of_layer in layers.items()}
    sites = {side.site for of_layer in layers.values() for side in (of_layer.q, of_layer.k)}
    require_no_dropout(host.model)
    with torch.no_grad():
        angles = rotations(host, list(heads.values()), tokens.shape[1])
        with attach(host.model, units) as attachment:
            with attachment.dense():
                dense = record(host, tokens, hooks=[each.pattern_hook for each in heads.values()], keep=Tensor.clone)
            hooks = [each.scores_hook for each in heads.values()]
            attached = record(host, tokens, units=sites, hooks=hooks, keep=Tensor.clone)
        runs = {}
        for layer, of_layer in layers.items():
            scores = _shown(attached, heads[layer].scores_hook)
            pattern = _shown(dense, heads[layer].pattern_hook).float()
            # Probabilities that a half-precision host rounded sum to one again: the KL of others is no number below 0.
            pattern = pattern / pattern.sum(-1, keepdim=True)
            q, k = (SideRun(side, attached.units[side.site.name].float(), angles[layer]) for side in (of_layer.q, of_layer.k))
            runs[layer] = LayerScores(of_layer, q, k, scores.float(), pattern)
            runs[layer].check(scores.dtype)
    return runs


def z_rms(
    units: UnitSet, layers: Mapping[int, LayerUnits], stream: TokenStream, batch_size: int
) -> dict[str, Float[Tensor, " unit"]]:
    """Root mean square of z over a text, units attached, by site of these layers' Q and K units. Raises AttachError,
    ValueError: as `run_layers`."""
    sites = list({side.site.name: side.site for each in layers.values() for side in (each.q, each.k)}.values())
    require_no_dropout(units.host.model)
    squares = {site.name: torch.zeros((), dtype=torch.float64) for site in sites}
    with torch.no_grad(), attach(units.host.model, units):
        for rows in stream.batches(batch_size):
            for name, z in record(units.host, rows, units=sites).units.items():
                squares[name] = squares[name] + z.flatten(0, 1).double().square().sum(0).cpu()
    return {name: (total / stream.n_tokens).sqrt().float() for name, total in squares.items()}


def _shown(recording: Recording, hook: str) -> Tensor:
    if hook not in recording.hooks:
        raise UnsupportedHostError(
            f"{hook} saw nothing in a forward of this host, so its attention scores cannot be compared; a "
            "TransformerBridge that leaves attention to transformers does not show them"
        )
    return recording.hooks[hook]
