"""Q and K write vectors of a layer, head by head.

1. A unit of attn_qkv writes to queries, keys and values; the first columns of its write vector are its query part, the next
   its key part. A unit of attn_q or attn_k has that part alone.
2. Each part is cut into heads: (unit, head, d_head). What is added whatever the tokens is one more vector per head: the bias,
   and the output offset of transported factors.
3. Where a head norms its queries or keys (Qwen3), the norm's weight is multiplied into the vectors; its scale, which changes from
   position to position, is left to the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.hosts import Host, UnsupportedHostError, sites_of
from swd_lens.hosts.attention import HeadNorm, Heads, heads_of
from swd_lens.hosts.sites import Site
from swd_lens.units import as_units, by_site
from swd_lens.units.factors import Factors
from swd_lens.units.passport import fingerprint


class QKError(ValueError):
    """A pair, prompt or set of factors that cannot be studied; the message says what was wrong and what to do."""


@dataclass(frozen=True)
class Side:
    """The queries, or the keys, of one layer.

    Attributes:
        site: whose units write them.
        write: (unit, head, d_head) raw write vectors: a query is z @ write + constant.
        constant: (head, d_head) what is added whatever z: the bias and the factors' output offset.
        norm: of each head's query or key, or None.
    """

    site: Site
    write: Float[Tensor, "unit head d_head"]
    constant: Float[Tensor, "head d_head"]
    norm: HeadNorm | None

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

    @property
    def layer(self) -> int:
        return self.heads.layer


def layer_units(host: Host, factors: Any) -> dict[int, LayerUnits]:
    """Layer -> its Q and K units, for every layer that has both.

    Raises:
        QKError: no layer has units on both sides.
        UnsupportedHostError: see `swd_lens.hosts.attention.heads_of`, or units that are not read and write factors.
    """
    of_kind: dict[int, dict[str, tuple[Site, Factors]]] = {}
    given = by_site(factors)
    for site in sites_of(host, list(given)):
        if site.kind in ("attn_qkv", "attn_q", "attn_k"):
            of_kind.setdefault(site.layer, {})[site.kind] = site, _factors_at(given, site)
    found = {}
    for layer, there in sorted(of_kind.items()):
        q, k = there.get("attn_qkv", there.get("attn_q")), there.get("attn_qkv", there.get("attn_k"))
        if q is not None and k is not None:
            heads = heads_of(host, layer)
            found[layer] = LayerUnits(heads, _side(heads, *q, query=True), _side(heads, *k, query=False))
    if not found:
        raise QKError(
            f"no layer has units on its queries and its keys; these factors are of {', '.join(given)}. Factorize attn_qkv, or "
            "attn_q and attn_k"
        )
    return found


def _factors_at(given: Mapping[str, Any], site: Site) -> Factors:
    from swd_lens.hosts.sites import select_sites

    source = given.get(site.name)
    if source is None:
        source = next(one for name, one in given.items() if select_sites([site], name))
    units = as_units(source, site)
    if not isinstance(units, Factors):
        raise UnsupportedHostError(
            f"{site.name} holds an encode/decode pair; QK coefficients are products of write vectors, so its units must be "
            "read and write factors"
        )
    return units


def _side(heads: Heads, site: Site, f: Factors, query: bool) -> Side:
    bias, norm = (heads.query_bias, heads.query_norm) if query else (heads.key_bias, heads.key_norm)
    start = heads.n_heads * heads.d_head if site.kind == "attn_qkv" and not query else 0
    columns = slice(start, start + bias.numel())
    write = f.write[:, columns].float().to(bias.device).view(f.n_units, *bias.shape)
    constant = bias
    if f.offsets is not None:
        constant = constant + f.offsets.out[columns].float().to(bias.device).view(bias.shape)
    return Side(site, write, constant, norm)


def units_of(found: Mapping[int, LayerUnits], layer: int, head: int) -> LayerUnits:
    """The layer's units, after a look at the numbers.

    Raises:
        QKError: a layer without Q and K units, or a head that is not there.
    """
    if layer not in found:
        raise QKError(
            f"layer {layer} has no units on its queries and keys; layers with both: {', '.join(map(str, found))}"
        )
    units = found[layer]
    if not 0 <= head < units.heads.n_heads:
        raise QKError(f"layer {layer} has heads 0 to {units.heads.n_heads - 1}, not {head}")
    return units


def positions_enter(heads: Heads) -> str:
    """How positions enter this layer's scores, for settings and captions."""
    return {
        "learned": "through h, and so through z",
        "rotary": "rotary: gamma depends on the distance destination - source",
        "alibi": "ALiBi: a bias added to scores; gamma and z do not see it",
        "none": "not at all (no positions)",
    }[heads.positions]


def provenance(host: Host, factors: Any, found: Mapping[int, LayerUnits]) -> dict[str, Any]:
    """What results are of: the model, fingerprints of the matrices, how positions and norms enter, the version."""
    from swd_lens.base._version import __version__

    sites = {side.site for units in found.values() for side in (units.q, units.k)}
    some = next(iter(found.values())).heads
    given = by_site(factors)

    def of(site: Site) -> str:
        known = getattr(given.get(site.name), "provenance", {}).get("weight_sha256")
        return str(known or fingerprint(host.weight(site).cpu()))

    return {
        "model": str(getattr(host.model.cfg, "model_name", "")),
        "sites": {site.name: of(site) for site in sorted(sites, key=lambda s: (s.layer, s.kind))},
        "positions": positions_enter(some),
        "qk_norm": "weight folded into write vectors" if some.query_norm is not None else None,
        "soft_cap": some.soft_cap,
        "version": __version__,
    }


def write_norms(side: Side) -> Float[Tensor, "head unit"]:
    """Head-specific write norms, with the weight of a norm multiplied in."""
    return side.folded.norm(dim=-1).T


def top_units(side: Side, top: int) -> Tensor:
    """(head, top) unit indices of the largest head-specific write norm, largest first; of equal ones the lower index first."""
    return torch.sort(write_norms(side), dim=1, descending=True, stable=True).indices[:, :top]
