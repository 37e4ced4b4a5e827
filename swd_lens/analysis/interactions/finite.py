"""unit_interactions: how far units that are summed before an activation fail to add up behind it, pair by pair.

1. Attach the factors. The activation is found in the host on the first batch (activation.py).
2. First pass over the tokens: E[z_i^2] of every valid unit; the `top` units of largest E[z_i^2] |B_i W_out|^2 are paired.
3. Second pass: second differences through the activation, projected by the dense W_out, summed over tokens (difference.py).
4. R_ij = (sum_t |q_ij|^2)^(1/2) / (E_i E_j)^(1/4), which is the RMS of q_ij over the geometric mean of the RMS of m_i and m_j.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.analysis.interactions.activation import Activation, find_activation
from swd_lens.analysis.interactions.difference import PairSums
from swd_lens.analysis.interactions.results import UnitInteractions
from swd_lens.analysis.interactions.watching import (
    Use,
    factors_at,
    one_site,
    provenance,
    require_batch_size,
    require_tokens,
    watch,
)
from swd_lens.base.machine import plain_float32
from swd_lens.hosts import Host, UnsupportedHostError, host_of, require_no_dropout
from swd_lens.hosts.sites import Pattern, Site, split_name
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units import attach
from swd_lens.units.factors import Factors


def unit_interactions(
    model: Any,
    factors: Any,
    site: Pattern,
    tokens: Any,
    *,
    top: int = 128,
    batch_size: int = 16,
    progress: bool = True,
) -> UnitInteractions:
    """Contextual pair interactions through the MLP's activation (paper, app. "Interaction Patterns"; exact, no sampling).

    In a gated MLP, f(gate) * up, the units are those of mlp_gate: they are taken out of the gate's preactivation while the up
    branch is held at what it is in that context. Units of mlp_in enter such an MLP linearly and cannot interact.

    Args:
        model: the host, with these sites not attached.
        factors: what is attached while the tokens run, see `swd_lens.attach`: the site's factors, and those of any other
            site (the paper attaches the mlp_in of all lower layers, too).
        site: one mlp_in, of a gated MLP one mlp_gate.
        tokens: (rows, pos) ids or a `TokenStream`; every position counts. Each row is run twice; none are held.
        top: how many units are paired, those of largest E[z^2] |B W_out|^2; all valid ones where there are fewer.
        batch_size: rows per forward.
        progress: show a bar.

    Returns:
        UnitInteractions: R, and the RMS over tokens of q and m in units of the residual stream.

    Raises:
        ValueError: another kind of site, several sites, a site without factors, fewer than two valid units, top < 2,
            batch_size < 1, or units that are not finite.
        UnsupportedHostError: the activation does not act on each channel by itself (solu_ln), or was not found.
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        AttachError, UnknownSiteError: see `swd_lens.attach`.
    """
    host = host_of(model)
    at = one_site(host, site)
    _require_activated(host, at)
    if isinstance(top, bool) or not isinstance(top, int) or top < 2:
        raise ValueError(f"top must be a whole number of 2 or more (a pair needs two units), got {top!r}")
    require_batch_size(batch_size)
    require_no_dropout(model)
    stream = as_stream(tokens, model)
    require_tokens(stream, 1, "the sums need")
    with attach(model, factors) as attachment:
        run = _Run(host, at, factors_at(attachment, at), stream, batch_size, progress)
        energy = run.energies()
        valid = int(run.units.valid_units.sum())
        chosen = energy.argsort(descending=True, stable=True)[: min(top, valid)]
        sums, name = run.pairs(chosen)
        settings = provenance(host, attachment, at, stream, {"top": top, "activation": name, "batch_size": batch_size})
    return UnitInteractions(
        site=at.name,
        units=tuple(chosen.tolist()),
        energy=energy[chosen],
        interaction_rms=(sums.pairs / sums.n_tokens).sqrt(),
        marginal_rms=(sums.marginals / sums.n_tokens).sqrt(),
        settings=settings,
    )


def _require_activated(host: Host, site: Site) -> None:
    """Raises ValueError unless the site's output goes through the activation."""
    kind = split_name(site.name)[1]
    gated = _neighbour(host, site, "mlp_gate") is not None
    if kind == "mlp_in" and gated:
        raise ValueError(
            f"the MLP of blocks.{site.layer} is gated: units of {site.name} enter activation(gate) * up linearly, so no pair of "
            f"them interacts. Take blocks.{site.layer}.mlp_gate, whose units pass the activation"
        )
    if kind not in ("mlp_in", "mlp_gate"):
        raise ValueError(
            f"{site.name} is summed after the activation, not before: its units cannot interact there. unit_interactions takes "
            "mlp_in (gated MLPs: mlp_gate); unit_overlap measures the units of any site"
        )


def _neighbour(host: Host, site: Site, kind: str) -> Site | None:
    """Another site of the same layer."""
    return next((one for one in host.sites() if one.layer == site.layer and one.kind == kind), None)


class _Run:
    """Two passes over the tokens with the factors attached."""

    def __init__(self, host: Host, site: Site, units: Factors, stream: TokenStream, batch_size: int, progress: bool):
        out = _neighbour(host, site, "mlp_out")
        if out is None:
            raise UnsupportedHostError(f"blocks.{site.layer} has no mlp_out: where {site.name} leads to is not known")
        self.host, self.site, self.units, self.stream = host, site, units, stream
        self.out = out
        self.up = _neighbour(host, site, "mlp_in") if site.kind == "mlp_gate" else None
        self.weight = host.weight(out)
        self._batch_size, self._progress = batch_size, progress

    def energies(self) -> Float[Tensor, " unit"]:
        """E[z_i^2] |B_i W_out|^2 in float64; -1 for units without edges, which sort last."""
        total = torch.zeros(self.units.n_units, dtype=torch.float64)

        def add(seen: dict[str, Tensor]) -> None:
            total.add_(seen["z"].double().square().sum(0).cpu())

        self._watch(add, label="energies" if self._progress else None)
        with plain_float32(self.weight.device):
            moved = self.units.write.detach().to(self.weight) @ self.weight
        energy = total / self.stream.n_tokens * moved.double().square().sum(1).cpu()
        return energy.where(self.units.valid_units.cpu(), -1.0)

    def pairs(self, chosen: Tensor) -> tuple[PairSums, str]:
        """The sums of the chosen units' pairs, and the activation's name."""
        found: list[tuple[PairSums, str]] = []
        bar = tqdm(desc="pairs", unit="unit", disable=not self._progress, leave=False)

        def add(seen: dict[str, Tensor]) -> None:
            pre, post = seen[f"out {self.site.kind}"], seen["in mlp_out"]
            up = None if self.up is None else seen["out mlp_in"]
            if not found:
                activation, name = find_activation(self.host, self.site, pre, up, post)
                found.append((self._sums(chosen, activation, pre.dtype), name))
                bar.reset(len(chosen) * found[0][0].n_blocks(len(pre)) * self._n_batches())
            found[0][0].add(seen["z"][:, chosen.to(pre.device)], pre, up, each=lambda: bar.update())

        with bar:
            outputs = [self.site] if self.up is None else [self.site, self.up]
            self._watch(add, outputs=outputs, inputs=[self.out])
        return found[0]

    def _watch(self, use: Use, **what: Any) -> None:
        watch(self.host, self.site, self.stream, use, batch_size=self._batch_size, **what)

    def _n_batches(self) -> int:
        return -(-self.stream.n_rows // self._batch_size)

    def _sums(self, chosen: Tensor, activation: Activation, dtype: torch.dtype) -> PairSums:
        # A host in half precision: products in float32 all the same. One in float64 keeps it.
        dtype = dtype if dtype == torch.float64 else torch.float32
        write = self.units.write.detach()[chosen.to(self.units.write.device)]
        return PairSums(write, self.weight, activation, dtype)
