"""unit_overlap: do the units of one site add up to the output independently, or do pairs of them carry the same thing?

1. Attach the factors and go through the tokens once. Running float64 sums of z and of z z^T are all that is kept, so memory is
   (unit, unit) whatever the number of tokens. Both are taken of z minus its first value: covariances do not change by it,
   and a unit that never changes gets a variance of exactly zero.
2. Read correlation corr(z_i, z_j), write cosine cos(B_i, B_j), energy Var(z_i) |B_i|^2.
3. Contribution correlation: centre the contributions c_ti = (z_ti - mean z_i) B_i, flatten them over tokens t and coordinates,
   and take the cosine. It is the product of the two,

       sum_t sum_d c_ti[d] c_tj[d]   =  sum_t (z_ti - mean)(z_tj - mean)  x  sum_d B_i[d] B_j[d]
       |c_i| |c_j|                   =  sqrt(sum_t (z_ti - mean)^2 ...)   x  |B_i| |B_j|,

   since c_ti[d] factors into a part of t and a part of d. The paper does not print the formula (method.md §5.6); this one gives
   its signs: opposed reads and opposed writes correlate positively.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from swd_lens.analysis.interactions.site import SMALL, PairResult, attached, bars, site_named, strongest, text_of
from swd_lens.base.checks import bounded
from swd_lens.base.figures import INK, PALETTE, heatmap, new_figure, style
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Pattern

# A standard deviation below this share of the RMS is float32 rounding of one value, not variation.
_CONSTANT = 1e-6


@dataclass(frozen=True, repr=False)
class UnitOverlap(PairResult):
    """How far the contributions z_i B_i of one site's units overlap, pair by pair.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        read_correlation: (unit, unit) corr(z_i, z_j) over tokens; NaN where undefined. float64, as all tensors here.
        write_cosine: (unit, unit) cosine of the write vectors; NaN for the same units.
        variance: (unit,) variance of z over tokens.
        write_norm: (unit,) |B_i|.
        no_edges, constant: units that have no correlation: no read or no write edge; the same z on all tokens.
        shown: how many units the matrix views show.
        settings: model, weight, factors, tokens, version and every choice.
    """

    site: str
    read_correlation: Float[Tensor, "unit unit"]
    write_cosine: Float[Tensor, "unit unit"]
    variance: Float[Tensor, " unit"]
    write_norm: Float[Tensor, " unit"]
    no_edges: tuple[int, ...]
    constant: tuple[int, ...]
    shown: int
    settings: Mapping[str, Any]

    @cached_property
    def contribution_correlation(self) -> Float[Tensor, "unit unit"]:
        """(unit, unit) correlation of the centred contributions, flattened over tokens and coordinates."""
        return self.read_correlation * self.write_cosine

    @property
    def energy(self) -> Float[Tensor, " unit"]:
        """(unit,) Var(z_i) |B_i|^2."""
        return self.variance * self.write_norm.square()

    @property
    def defined(self) -> Bool[Tensor, " unit"]:
        """Units that have correlations."""
        return ~self.read_correlation.diagonal().isnan()

    @property
    def n_pairs(self) -> int:
        n = int(self.defined.sum())
        return n * (n - 1) // 2

    def top_units(self) -> Int[Tensor, " shown"]:
        """The `shown` units of largest energy, largest first."""
        energy = self.energy.where(self.defined, -1.0)
        return energy.argsort(descending=True, stable=True)[: self.shown]

    def measures(self) -> dict[str, Float[Tensor, "unit unit"]]:
        """The three matrices by the names that tables and figures use."""
        return {
            "read correlation": self.read_correlation,
            "write cosine": self.write_cosine,
            "contribution correlation": self.contribution_correlation,
        }

    def values(self, matrix: Float[Tensor, "unit unit"]) -> Float[np.ndarray, " pair"]:
        """Every unordered pair's entry once, undefined ones left out."""
        kept = matrix[self.defined][:, self.defined]
        above = torch.ones_like(kept, dtype=torch.bool).triu(1)
        return kept[above].numpy()

    def table(self) -> pd.DataFrame:
        """Median, 95th and 99th percentile and largest absolute value of each measure over all pairs."""
        rows = []
        for name, matrix in self.measures().items():
            median, p95, p99, largest = np.percentile(np.abs(self.values(matrix)), (50, 95, 99, 100)).tolist()
            rows.append({"|measure|": name, "median": median, "95th": p95, "99th": p99, "max": largest})
        return pd.DataFrame(rows)

    def pairs(self, n: int = 30) -> pd.DataFrame:
        """The n pairs of largest absolute contribution correlation, with the read and write overlap it is made of."""
        order = strongest(self.contribution_correlation, n)
        columns = {name: [float(matrix[i, j]) for i, j in order] for name, matrix in self.measures().items()}
        names = {"unit": [f"{self.site}/{i}" for i, _ in order], "other unit": [f"{self.site}/{j}" for _, j in order]}
        return pd.DataFrame({**names, **dict(reversed(columns.items()))})

    def plot(self) -> Figure:
        """Read variance against squared write norm, and the three matrices of the `shown` units (paper, fig. "selection and
        overlap structure")."""
        figure, axes = new_figure(2, 2, width=4.6, height=3.9)
        top = self.top_units()
        ax, variance, norm = axes[0, 0], self.variance.numpy(), self.write_norm.square().numpy()
        shown = top.numpy()
        others = np.setdiff1d(self.defined.nonzero()[:, 0].numpy(), shown)
        ax.scatter(norm[others], variance[others], s=9, color="#999999", linewidths=0, label=f"other {len(others)} units")
        ax.scatter(norm[shown], variance[shown], s=14, color=PALETTE[1], marker="D", linewidths=0, label=f"{len(top)} shown")
        line = np.array([norm[self.defined].min(), norm[self.defined].max()])
        least = self.energy[top].min().item()
        ax.plot(line, least / line, color=INK, linewidth=0.8, linestyle="--", label=f"energy of number {len(top)}")
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            # Often less than a decade: matplotlib's own minor labels run into each other.
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        low, high = variance[self.defined].min(), variance[self.defined].max()
        ax.set_ylim(low / 1.5, high * 1.5)
        ax.set(xlabel="squared write norm |B|²", ylabel="read variance Var(z)")
        ax.set_title("Selection by energy Var(z) |B|²", fontsize=10, color=INK)
        ax.legend(fontsize=7, frameon=False, loc="best")
        matrices = {name: matrix[top][:, top].clone().fill_diagonal_(torch.nan) for name, matrix in self.measures().items()}
        # One scale for the three, so that they can be compared; the few entries above it are drawn in its full colour.
        largest = np.nanpercentile(np.abs(np.stack([m.numpy() for m in matrices.values()])[:2]), 99)
        largest = float(f"{max(largest, 1e-3):.1g}")  # one digit, and never zero
        for ax, (name, matrix) in zip(axes.flat[1:], matrices.items(), strict=True):
            heatmap(ax, matrix.numpy(), label=f"{name} (full colour: {largest:g} or more)", signed=True, largest=largest)
            ax.set_title(name[0].upper() + name[1:], fontsize=10, color=INK)
            ax.set(xlabel="unit, by energy rank", ylabel="unit, by energy rank")
        figure.suptitle(f"Overlap of {self.site} units", fontsize=11, color=INK)
        return figure

    def plot_tail(self, n: int = 30) -> Figure:
        """All pairs' distributions, and the n strongest pairs (paper, fig. "linear bottleneck-unit dependence")."""
        figure, axes = new_figure(1, 2, width=4.8, height=max(3.2, 0.17 * n + 1.0))
        ax = axes[0, 0]
        for index, (name, matrix) in enumerate(self.measures().items()):
            size = np.sort(np.abs(self.values(matrix)))
            # Log-spaced ranks: enough points for every part of the curve, however many pairs there are.
            ranks = np.unique(np.geomspace(1, len(size), 300).astype(int))
            ax.plot(size[len(size) - ranks], ranks / len(size), label=name, **style(index))
        ax.set(xscale="log", yscale="log")
        ax.set_xlim(left=max(np.percentile(size, 5), 1e-7), right=1.1)  # of the last, the smallest, of the three
        ax.set(xlabel="|value|", ylabel=f"share of the {self.n_pairs:,} pairs with |value| or more")
        ax.legend(fontsize=SMALL, frameon=False, loc="lower left")
        ax.set_title("All pairs", fontsize=10, color=INK)
        pairs = self.pairs(n)
        bars(axes[0, 1], pairs, "contribution correlation", f"Strongest {len(pairs)} pairs", signed=True)
        figure.suptitle(f"Overlap of {self.site} units", fontsize=11, color=INK)
        return figure

    def left_out(self) -> str:
        """How many units have no correlation, and why; empty where all have one."""
        parts = [f"{len(self.no_edges)} without edges"] if self.no_edges else []
        parts += [f"{len(self.constant)} constant on these tokens"] if self.constant else []
        return f"left out: {', '.join(parts)}" if parts else ""

    def title(self) -> str:
        return f"Unit overlap: {self.in_words()}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), self.plot_tail()


@with_torch_defaults
def unit_overlap(
    model: Any, factors: Any, site: Pattern, tokens: Any, *, shown: int = 96, batch_size: int = 16, progress: bool = True
) -> UnitOverlap:
    """Read, write and contribution overlap of all pairs of a site's units (paper, app. "Interaction Patterns").

    Units without a read or a write edge, and units whose z is the same on all tokens, have no correlation: they are left out
    of every statistic, are NaN in the matrices, and are listed in `no_edges` and `constant`.

    Args:
        model: the host, with these sites not attached.
        factors: what is attached while the tokens run, see `swd_lens.attach`; the site's are among them.
        site: one site of any kind (the paper's case is mlp_out).
        tokens: (rows, pos) ids or a `TokenStream`; every position counts. Each row is run once; none are held.
        shown: how many units the matrix views show, those of largest energy; all of them where there are fewer.
        batch_size: rows per forward.
        progress: show a bar.

    Raises:
        ValueError: several sites, a site without factors, shown < 2, batch_size < 1, fewer than two units to pair (without edges
            and constant ones are counted), or units that are not finite.
        TokenError: a single token, and see `swd_lens.tasks.streams.as_stream`.
        AttachError, UnknownSiteError, UnsupportedHostError: see `swd_lens.attach`.
    """
    host = host_of(model)
    named = site_named(host, site)
    bounded("shown", shown, 2)  # a matrix of pairs
    stream = text_of(model, tokens, batch_size, 2, "a correlation needs")
    with attached(host, factors, named, stream, batch_size) as run:
        units, batches = run.units, run.batches(label="overlap" if progress else None)
        covariance, constant = _covariance((seen.units[named.name] for seen in batches), units.n_units)
        settings = run.provenance(shown=shown, batch_size=batch_size)
    valid = units.valid_units.cpu()
    defined = valid & ~constant
    if int(defined.sum()) < 2:
        raise ValueError(
            f"{named.name}: a pair needs two units that change, but of {units.n_units} units {int((~valid).sum())} have "
            f"no edges and {int((valid & constant).sum())} have the same z on all {stream.n_tokens} tokens; give more "
            "varied text"
        )
    variance = covariance.diagonal()
    write = units.write.detach().double().cpu()
    norm = write.norm(dim=1)
    blank = torch.where(defined, 1.0, torch.nan)
    return UnitOverlap(
        site=named.name,
        read_correlation=_cosines(covariance, variance.sqrt() * blank),
        write_cosine=_cosines(write @ write.T, norm * blank),
        variance=variance,
        write_norm=norm,
        no_edges=tuple((~valid).nonzero()[:, 0].tolist()),
        constant=tuple((valid & constant).nonzero()[:, 0].tolist()),
        shown=min(shown, int(defined.sum())),
        settings=settings,
    )


def _covariance(
    batches: Iterable[Float[Tensor, "_token unit"]], n_units: int
) -> tuple[Float[Tensor, "unit unit"], Bool[Tensor, " unit"]]:
    """Mean over tokens of (z_i - mean)(z_j - mean), and which units are constant; from sums of z - z_first and its products."""
    n, first, total = 0, torch.zeros(()), torch.zeros(n_units, dtype=torch.float64)
    products = torch.zeros(n_units, n_units, dtype=torch.float64)
    for z in (z.double().cpu() for z in batches):
        first = first if n else z[0].clone()
        z = z - first
        n += len(z)
        total += z.sum(0)
        products.addmm_(z.T, z)
        del z  # not beside the next forward
    mean = total / n
    covariance = (products / n).addr_(mean, mean, alpha=-1)
    covariance = (covariance + covariance.T) / 2
    variance = covariance.diagonal()
    square = variance + (mean + first).square()  # E[z^2]
    return covariance, variance <= _CONSTANT**2 * square


def _cosines(products: Float[Tensor, "unit unit"], length: Float[Tensor, " unit"]) -> Float[Tensor, "unit unit"]:
    """products / (length_i length_j), in [-1, 1]; NaN where a length is NaN."""
    return (products / length[:, None] / length).clamp(-1, 1)
