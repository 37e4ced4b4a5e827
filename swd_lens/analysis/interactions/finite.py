"""unit_interactions: how far units that are summed before an activation fail to add up behind it, pair by pair.

1. Attach the factors. The activation is found in the host on the first batch (`find_activation`).
2. First pass over the tokens: E[z_i^2] of every valid unit; the `top` units of largest E[z_i^2] |B_i W_out|^2 are paired.
3. Second pass: second differences through the activation, projected by the dense W_out, summed over tokens (difference.py).
4. R_ij = (sum_t |q_ij|^2)^(1/2) / (E_i E_j)^(1/4), which is the RMS of q_ij over the geometric mean of the RMS of m_i and m_j.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.interactions.difference import PairSums, find_activation
from swd_lens.analysis.interactions.site import (
    SMALL,
    PairResult,
    SiteRun,
    attached,
    bars,
    site_named,
    strongest,
    text_of,
)
from swd_lens.base.errors import error
from swd_lens.base.figures import INK, PALETTE, heatmap, new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Pattern, Site

# R that the paper counts pairs above.
_THRESHOLDS = (0.10, 0.15, 0.20)


@dataclass(frozen=True, repr=False)
class UnitInteractions(PairResult):
    """How far pairs of units fail to add up through an activation, over their marginal effects.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        units: the units that were paired, by energy, largest first; the order of all tensors.
        energy: (top,) E[z^2] |B W_out|^2, the pre-activation downstream energy.
        interaction_rms: (top, top) RMS over tokens of |q_ij| in the residual stream; zero on the diagonal.
        marginal_rms: (top,) RMS over tokens of |m_i|, unit i's own effect in its context.
        settings: model, weight, factors, tokens, activation, version and every choice.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " top"]
    interaction_rms: Float[Tensor, "top top"]
    marginal_rms: Float[Tensor, " top"]
    settings: Mapping[str, Any]

    @cached_property
    def ratio(self) -> Float[Tensor, "top top"]:
        """(top, top) R_ij = interaction RMS / sqrt(marginal RMS of i x that of j).

        NaN on the diagonal, and for units without any effect on these tokens (`silent`).
        """
        scale = self.marginal_rms.sqrt()
        scale = scale.where(scale > 0, torch.nan)
        return (self.interaction_rms / scale[:, None] / scale).fill_diagonal_(torch.nan)

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token (a ReLU that never opens): R is undefined for their pairs."""
        return tuple(u for u, own in zip(self.units, self.marginal_rms.tolist(), strict=True) if own == 0)

    def values(self) -> Float[np.ndarray, " pair"]:
        """R of every unordered pair once, undefined ones left out."""
        values = self.ratio[torch.ones_like(self.ratio, dtype=torch.bool).triu(1)]
        return values[~values.isnan()].numpy()

    @property
    def n_pairs(self) -> int:
        return len(self.values())

    def table(self) -> pd.DataFrame:
        """One row: pairs, mean, median, 95th and 99th percentile and largest R, and how many pairs reach .10, .15, .20."""
        values = self.values()
        percentiles = np.percentile(values, (50, 95, 99, 100)).tolist() if len(values) else [float("nan")] * 4
        row: dict[str, Any] = {"pairs": len(values), "mean R": float(values.mean()) if len(values) else float("nan")}
        row |= dict(zip(("median", "95th", "99th", "max"), percentiles, strict=True))
        row |= {f"R >= {least:.2f}": int((values >= least).sum()) for least in _THRESHOLDS}
        return pd.DataFrame([row])

    def pairs(self, n: int = 30) -> pd.DataFrame:
        """The n pairs of largest R, with the RMS of their interaction and of each unit's own effect, in residual-stream units."""
        order = strongest(self.ratio, n)
        rows = [
            {
                "unit": f"{self.site}/{self.units[i]}",
                "other unit": f"{self.site}/{self.units[j]}",
                "R": float(self.ratio[i, j]),
                "interaction RMS": float(self.interaction_rms[i, j]),
                "marginal RMS": float(self.marginal_rms[i]),
                "other's marginal RMS": float(self.marginal_rms[j]),
            }
            for i, j in order
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The distribution of R over all pairs, and its matrix by energy (paper, fig. "contextual GELU interactions")."""
        figure, axes = new_figure(1, 2, width=4.8, height=3.9)
        ax, values = axes[0, 0], self.values()
        ax.hist(values, bins=min(60, max(10, len(values) // 20)), color=PALETTE[0], linewidth=0)
        if len(values):
            marks = {"median": 50, "95th": 95, "99th": 99}
            for index, (name, value) in enumerate(zip(marks, np.percentile(values, list(marks.values())), strict=True)):
                line = style(index + 1)
                ax.axvline(value, linewidth=1.4, label=f"{name}  {value:.3f}", **line)
            ax.legend(fontsize=SMALL, frameon=False, loc="upper right", title="percentile", title_fontsize=SMALL)
        ax.set_xlim(left=0)
        ax.set_xlabel("interaction ratio R", fontsize=SMALL)
        ax.set_ylabel(f"pairs (of {len(values):,})", fontsize=SMALL)
        ax.set_title("All pairs", fontsize=10, color=INK)
        heatmap(axes[0, 1], self.ratio.numpy(), label="interaction ratio R")
        axes[0, 1].set_title("Pairs by pre-activation energy", fontsize=10, color=INK)
        axes[0, 1].set_xlabel("unit, by energy rank", fontsize=SMALL)
        axes[0, 1].set_ylabel("unit, by energy rank", fontsize=SMALL)
        figure.suptitle(
            f"Interactions of {self.site} units through {self.settings['activation']}", fontsize=11, color=INK
        )
        return figure

    def plot_pairs(self, n: int = 30) -> Figure:
        """The n strongest pairs as bars (paper, fig. "strongest contextual GELU-mediated pairs")."""
        figure, axes = new_figure(1, 1, width=5.6, height=max(2.4, 0.17 * n + 1.0))
        pairs = self.pairs(n)
        bars(axes[0, 0], pairs, "R", f"Strongest {len(pairs)} pairs of {self.site} units", signed=False)
        axes[0, 0].set_xlabel("interaction ratio R", fontsize=SMALL)
        return figure

    def left_out(self) -> str:
        """How many of the paired units have no R, and why; empty where all have one."""
        return f"left out: {len(self.silent)} without any effect on these tokens" if self.silent else ""

    def title(self) -> str:
        return f"Unit interactions: {self.in_words()}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), self.plot_pairs()


@in_plain_surroundings
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
    named = site_named(host, site)
    neighbours = {other.kind: other for other in host.sites() if other.layer == named.layer}
    _require_activated(named, gated="mlp_gate" in neighbours)
    if isinstance(top, bool) or not isinstance(top, int) or top < 2:
        raise error("interactions-of-one", top=top)
    stream = text_of(model, tokens, batch_size, 1, "the sums need")
    with attached(host, factors, named, stream, batch_size) as run:
        if "mlp_out" not in neighbours:
            raise error("pairs-without-a-reader", layer=named.layer, site=named.name)
        energy = _energies(run, neighbours["mlp_out"], progress)
        units = energy.argsort(descending=True, stable=True)[: min(top, int(run.units.valid_units.sum()))]
        up = neighbours["mlp_in"] if named.kind == "mlp_gate" else None
        sums, activation = _pair_sums(run, units, neighbours["mlp_out"], up, progress)
        settings = run.provenance(top=top, activation=activation, batch_size=batch_size)
    return UnitInteractions(
        site=named.name,
        units=tuple(units.tolist()),
        energy=energy[units],
        interaction_rms=(sums.pairs / sums.n_tokens).sqrt(),
        marginal_rms=(sums.marginals / sums.n_tokens).sqrt(),
        settings=settings,
    )


def _require_activated(site: Site, gated: bool) -> None:
    """Raises ValueError unless the site's output goes through the activation."""
    if site.kind == "mlp_in" and gated:
        raise error("interactions-of-the-ungated-branch", layer=site.layer, site=site.name)
    if site.kind not in ("mlp_in", "mlp_gate"):
        raise error("interactions-behind-the-activation", site=site.name)


def _energies(run: SiteRun, out: Site, progress: bool) -> Float[Tensor, " unit"]:
    """E[z_i^2] |B_i W_out|^2 in float64; -1 for units without edges, which sort last."""
    total = torch.zeros(run.units.n_units, dtype=torch.float64)
    for seen in run.batches(label="energies" if progress else None):
        total += seen.units[run.site.name].double().square().sum(0).cpu()
    weight = run.host.weight(out)
    moved = run.units.write.detach().to(weight) @ weight
    energy = total / run.stream.n_tokens * moved.double().square().sum(1).cpu()
    return energy.where(run.units.valid_units.cpu(), -1.0)


def _pair_sums(
    run: SiteRun, units: Int[Tensor, " top"], out: Site, up: Site | None, progress: bool
) -> tuple[PairSums, str]:
    """The sums over the text of these units' pairs, and the activation's name.

    Args:
        out: mlp_out, whose input is what the activation gives.
        up: the branch that a gate multiplies; None: no gate.
    """
    sums, name = None, ""
    outputs = [run.site] if up is None else [run.site, up]
    with tqdm(desc="pairs", unit="unit", disable=not progress, leave=False) as bar:
        for seen in run.batches(outputs=outputs, inputs=[out]):
            pre, gate_times = seen.outputs[run.site.name], None if up is None else seen.outputs[up.name]
            if sums is None:
                activation, name = find_activation(run.host, run.site, pre, gate_times, seen.inputs[out.name])
                # A host in half precision: products in float32 all the same. One in float64 keeps it.
                dtype = pre.dtype if pre.dtype == torch.float64 else torch.float32
                write = run.units.write.detach()[units.to(run.units.write.device)]
                sums = PairSums(write, run.host.weight(out), activation, dtype)
                bar.reset(len(units) * sums.n_blocks(len(pre)) * run.n_batches)
            z = seen.units[run.site.name][:, units.to(pre.device)]
            sums.add(z, pre, gate_times, each=lambda: bar.update())
    assert sums is not None  # a text has at least one batch
    return sums, name
