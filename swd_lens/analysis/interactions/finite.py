"""unit_interactions: how far units that are summed before an activation fail to add up behind it, pair by pair; its result,
`UnitInteractions`, has R of every pair, tables and figures.

1. Attach the factors. The activation is found in the host on the first batch (`find_activation`).
2. First pass over the tokens: E[z_i^2] of every valid unit; the `top` units of largest E[z_i^2] |B_i W_out|^2 are paired.
3. Second pass: second differences through the activation, projected by the dense W_out, summed over tokens (difference.py).
   In a gated MLP units of the gate are paired with each other, or with units of the up branch, which multiplies the gate.
4. R_ij = (sum_t |q_ij|^2)^(1/2) / (E_i E_j)^(1/4), which is the RMS of q_ij over the geometric mean of the RMS of m_i and m_j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.interactions.difference import GateUpSums, PairSums
from swd_lens.analysis.interactions.site import (
    SMALL,
    PairResult,
    SiteRun,
    attached,
    bars,
    find_activation,
    paired_factors,
    site_named,
    strongest,
    text_of,
)
from swd_lens.base.checks import bounded
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.figures import INK, PALETTE, heatmap, new_figure, style
from swd_lens.base.progress import tqdm
from swd_lens.base.record import PlainRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of, sites_of
from swd_lens.hosts.recording import Recording
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.units.factors import Factors
from swd_lens.units.match import weight_fingerprint

# R that the paper counts pairs above.
_THRESHOLDS = (0.10, 0.15, 0.20)


@dataclass(frozen=True)
class UpUnits(PlainRecord):
    """Units of a gated MLP's up branch that were paired with units of the gate.

    Attributes:
        site: the layer's mlp_in.
        units: by energy, largest first.
        energy: (up,) E[z^2] |B W_out|^2.
        marginal_rms: (up,) RMS over tokens of |f(gate) d_j W_out|, the unit's own effect in its context.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " up"]
    marginal_rms: Float[Tensor, " up"]

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token."""
        return _silent(self.units, self.marginal_rms)


@dataclass(frozen=True, repr=False)
class UnitInteractions(PairResult):
    """How far pairs of units fail to add up through an activation, over their marginal effects.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        units: the units that were paired, by energy, largest first; the order of all tensors.
        energy: (top,) E[z^2] |B W_out|^2, the pre-activation downstream energy.
        interaction_rms: (top, other) RMS over tokens of |q_ij| in the residual stream. The others are the same units (zero on the
            diagonal), or those of `up`.
        marginal_rms: (top,) RMS over tokens of |m_i|, unit i's own effect in its context.
        settings: model, weight, factors, tokens, activation, version and every choice.
        up: gate x up: the units of the up branch that those of the gate were paired with. None: pairs within the site.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " top"]
    interaction_rms: Float[Tensor, "top other"]
    marginal_rms: Float[Tensor, " top"]
    settings: Mapping[str, Any]
    up: UpUnits | None = None

    @cached_property
    def ratio(self) -> Float[Tensor, "top other"]:
        """(top, other) R_ij = interaction RMS / sqrt(marginal RMS of i x that of j).

        NaN for a unit with itself, and for units without any effect on these tokens (`silent`).
        """
        scale, others = (
            marginal.sqrt().where(marginal > 0, torch.nan) for marginal in (self.marginal_rms, self._others.marginal_rms)
        )
        ratio = self.interaction_rms / scale[:, None] / others
        return ratio.fill_diagonal_(torch.nan) if self.up is None else ratio

    @property
    def whose(self) -> str:
        return self.site if self.up is None else f"{self.site} x {self.up.site}"

    @property
    def _others(self) -> "UnitInteractions | UpUnits":
        """Whose units the columns are."""
        return self if self.up is None else self.up

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token (a ReLU that never opens): R is undefined for their pairs."""
        return _silent(self.units, self.marginal_rms)

    def values(self) -> Float[np.ndarray, " pair"]:
        """R of every pair once, undefined ones left out; within a site pairs are unordered."""
        each = torch.ones_like(self.ratio, dtype=torch.bool)
        values = self.ratio[each.triu(1) if self.up is None else each]
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
        order, others = strongest(self.ratio, n, within=self.up is None), self._others
        rows = [
            {
                "unit": f"{self.site}/{self.units[i]}",
                "other unit": f"{others.site}/{others.units[j]}",
                "R": float(self.ratio[i, j]),
                "interaction RMS": float(self.interaction_rms[i, j]),
                "marginal RMS": float(self.marginal_rms[i]),
                "other's marginal RMS": float(others.marginal_rms[j]),
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
        ax.set(xlabel="interaction ratio R", ylabel=f"pairs (of {len(values):,})")
        ax.set_title("All pairs", fontsize=10, color=INK)
        heatmap(axes[0, 1], self.ratio.numpy(), label="interaction ratio R")
        axes[0, 1].set_title("Pairs by pre-activation energy", fontsize=10, color=INK)
        up, gate = ("", "") if self.up is None else ("up ", "gate ")
        axes[0, 1].set(xlabel=f"{up}unit, by energy rank", ylabel=f"{gate}unit, by energy rank")
        figure.suptitle(f"Interactions of {self.whose} units through {self.settings['activation']}", fontsize=11, color=INK)
        return figure

    def plot_pairs(self, n: int = 30) -> Figure:
        """The n strongest pairs as bars (paper, fig. "strongest contextual GELU-mediated pairs")."""
        figure, axes = new_figure(1, 1, width=5.6, height=max(2.4, 0.17 * n + 1.0))
        pairs = self.pairs(n)
        bars(axes[0, 0], pairs, "R", f"Strongest {len(pairs)} pairs of {self.whose} units", signed=False)
        axes[0, 0].set_xlabel("interaction ratio R")
        return figure

    def left_out(self) -> str:
        """How many of the paired units have no R, and why; empty where all have one."""
        n_silent = len(self.silent) + (len(self.up.silent) if self.up else 0)
        return f"left out: {n_silent} without any effect on these tokens" if n_silent else ""

    def title(self) -> str:
        return f"Unit interactions: {self.in_words()}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), self.plot_pairs()


def _silent(units: tuple[int, ...], marginal_rms: Float[Tensor, " unit"]) -> tuple[int, ...]:
    return tuple(unit for unit, own in zip(units, marginal_rms.tolist(), strict=True) if own == 0)


@with_torch_defaults
def unit_interactions(
    model: Any, factors: Any, site: Pattern, tokens: Any, *, top: int = 128, batch_size: int = 16, progress: bool = True
) -> UnitInteractions:
    """Contextual pair interactions through the MLP's activation (paper, app. "Interaction Patterns"; exact, no sampling).

    In a gated MLP, f(gate) * up, the units of mlp_gate are taken out of the gate's preactivation while the up branch is held at
    what it is in that context. Two units of mlp_in enter such an MLP linearly and do not interact. A unit of each do: the
    pair's effect differs from the sum of both by [f(g) - f(g - c_i)] d_j, c_i and d_j being their contributions to the gate's
    preactivation g and to up. Both sites named together measure these pairs. The paper's models have no gate: this is ours.

    Args:
        model: the host, with these sites not attached.
        factors: what is attached while the tokens run, see `swd_lens.attach`: the site's factors, and those of any other
            site (the paper attaches the mlp_in of all lower layers, too).
        site: one mlp_in, of a gated MLP one mlp_gate; or both of one layer, for gate x up: a list of their names, or a pattern
            that names them.
        tokens: (rows, pos) ids or a `TokenStream`; every position counts. Each row is run twice; none are held.
        top: how many units are paired, those of largest E[z^2] |B W_out|^2; all valid ones where there are fewer. Gate x up: of
            each site.
        batch_size: rows per forward.
        progress: show a bar.

    Returns:
        UnitInteractions: R, and the RMS over tokens of q and m in units of the residual stream.

    Raises:
        ValueError: another kind of site, several sites other than a layer's mlp_gate and mlp_in, a site without factors, fewer
            than two valid units, top < 2, batch_size < 1, or units that are not finite.
        UnsupportedHostError: the activation does not act on each channel by itself (solu_ln), or was not found.
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        AttachError, UnknownSiteError: see `swd_lens.attach`.
    """
    host = host_of(model)
    sites = {named.kind: named for named in sites_of(host, site)}
    up_branch = None
    if len(sites_of(host, site)) == 2 and sites.keys() == {"mlp_gate", "mlp_in"}:
        named, other = sites["mlp_gate"], sites["mlp_in"]
        up_branch = other if named.layer == other.layer else None
    if up_branch is None:
        named = site_named(host, site)
    neighbours = {other.kind: other for other in host.sites() if other.layer == named.layer}
    _require_activated(named, gated="mlp_gate" in neighbours)
    bounded("top", top, 2)  # a pair needs two units
    stream = text_of(model, tokens, batch_size, 1, "the sums need")
    with attached(host, factors, named, stream, batch_size) as run:
        if "mlp_out" not in neighbours:
            raise UnsupportedHostError(f"blocks.{named.layer} has no mlp_out: where {named.name} leads to is not known")
        sites = [named] if up_branch is None else [named, up_branch]
        paired = _most_energetic(run, sites, neighbours["mlp_out"], top, progress)
        up = neighbours["mlp_in"] if named.kind == "mlp_gate" else None
        sums, activation = _sums(run, paired, neighbours["mlp_out"], up, progress)
        settings = run.provenance(top=top, activation=activation, batch_size=batch_size)
        if up_branch is not None:
            settings |= {"up_site": up_branch.name, "up_weight_sha256": weight_fingerprint(host, up_branch)}
    up_units = None
    if isinstance(sums, GateUpSums):
        of_up = paired[1]
        up_rms = (sums.up_marginals / sums.n_tokens).sqrt()
        up_units = UpUnits(of_up.site.name, tuple(of_up.units.tolist()), of_up.energy, up_rms)
    return UnitInteractions(
        site=named.name,
        units=tuple(paired[0].units.tolist()),
        energy=paired[0].energy,
        interaction_rms=(sums.pairs / sums.n_tokens).sqrt(),
        marginal_rms=(sums.marginals / sums.n_tokens).sqrt(),
        settings=settings,
        up=up_units,
    )


def _require_activated(site: Site, gated: bool) -> None:
    """Raises ValueError unless the site's output goes through the activation."""
    if site.kind == "mlp_in" and gated:
        raise ValueError(
            f"the MLP of blocks.{site.layer} is gated: units of {site.name} enter activation(gate) * up linearly, so no "
            f"two of them interact. Take blocks.{site.layer}.mlp_gate, whose units pass the activation, or name both "
            "sites: each unit of one with each of the other"
        )
    if site.kind not in ("mlp_in", "mlp_gate"):
        raise ValueError(
            f"{site.name} is summed after the activation, not before: its units cannot interact there. unit_interactions "
            "takes mlp_in (gated MLPs: mlp_gate); unit_overlap measures the units of any site"
        )


@dataclass(frozen=True)
class _Paired:
    """Units of a site that are paired."""

    site: Site
    factors: Factors
    units: Int[Tensor, " top"]  # by energy, largest first
    energy: Float[Tensor, " top"]  # theirs, E[z^2] |B W_out|^2 in float64

    def write(self) -> Float[Tensor, "top d_mlp"]:
        write = self.factors.write.detach()
        return write[self.units.to(write.device)]

    def z(self, seen: Recording) -> Float[Tensor, "token top"]:
        z = seen.units[self.site.name]
        return z[:, self.units.to(z.device)]


def _most_energetic(run: SiteRun, sites: Sequence[Site], out: Site, top: int, progress: bool) -> list[_Paired]:
    """The `top` valid units of each site by energy. sites: the run's site, and others whose units are paired with its own;
    out: mlp_out, whose dense weight units write through."""
    factors = [paired_factors(run.attached, site) for site in sites]
    totals = [torch.zeros(of_site.n_units, dtype=torch.float64) for of_site in factors]
    for seen in run.batches(label="energies" if progress else None, others=sites[1:]):
        for site, total in zip(sites, totals, strict=True):
            total += seen.units[site.name].double().square().sum(0).cpu()
    weight, paired = run.host.weight(out), []
    for site, of_site, total in zip(sites, factors, totals, strict=True):
        moved = of_site.write.detach().to(weight) @ weight
        energy = total / run.stream.n_tokens * moved.double().square().sum(1).cpu()
        energy = energy.where(of_site.valid_units.cpu(), -1.0)  # without edges: last
        units = energy.argsort(descending=True, stable=True)[: min(top, int(of_site.valid_units.sum()))]
        paired.append(_Paired(site, of_site, units, energy[units]))
    return paired


def _sums(
    run: SiteRun, paired: Sequence[_Paired], out: Site, up: Site | None, progress: bool
) -> tuple[PairSums | GateUpSums, str]:
    """The sums over the text of these units' pairs, and the activation's name.

    Args:
        paired: the units of the run's site, paired with each other; or with those of a second site, `up`.
        out: mlp_out, whose input is what the activation gives.
        up: the branch that a gate multiplies; None: no gate.
    """
    sums, name = None, ""
    outputs, others = [run.site] if up is None else [run.site, up], [each.site for each in paired[1:]]
    with tqdm(desc="pairs", unit="unit", disable=not progress, leave=False) as bar:
        for seen in run.batches(outputs=outputs, inputs=[out], others=others):
            pre, gate_times = seen.outputs[run.site.name], None if up is None else seen.outputs[up.name]
            if sums is None:
                activation, name = find_activation(run.host, run.site, pre, gate_times, seen.inputs[out.name])
                # A host in half precision: products in float32 all the same. One in float64 keeps it.
                dtype = torch.float64 if pre.dtype == torch.float64 else torch.float32
                kind: Any = PairSums if len(paired) == 1 else GateUpSums
                sums = kind(*(each.write() for each in paired), run.host.weight(out), activation, dtype)
                bar.reset(len(paired[0].units) * sums.n_blocks(len(pre)) * run.n_batches)
            sums.add(*(each.z(seen) for each in paired), pre, gate_times, each=lambda: bar.update())
    assert sums is not None  # a text has at least one batch
    return sums, name
