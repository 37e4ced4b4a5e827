"""UnitProfile: everything that is known of one unit, in words and as a picture; it shows itself in notebooks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.edges import Edges
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.audit.logits import LogitEffect
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.base.figures import INK, PALETTE, literal, new_figure
from swd_lens.hosts.sites import parse_unit


@dataclass(frozen=True)
class TaskRank:
    """What a unit is worth to a task: score in logits of margin, rank among all scored units (1 is the best of `of`)."""

    score: float
    rank: int
    of: int


@dataclass(frozen=True, repr=False, eq=False)
class UnitProfile:
    """One unit, looked at from all sides.

    Attributes:
        unit: its name, "blocks.2.mlp_out/5".
        contexts: the places of largest |z|, largest first.
        n_tokens: tokens that the statistics are over.
        mean, sd, smallest, largest: of z.
        density: share of tokens with |z| beyond a tenth of its largest.
        histogram: tokens by z.
        reads, writes: its edges; None where the unit source shows none.
        logits: direct effect of the write vector; None where the site does not write to the residual stream
            (or the host has no next-token logits).
        tasks: task -> score and rank.
        similar: (unit, cosine) of the nearest write vectors of its site.
        coactive: (unit, correlation of z over the text), strongest first, of its site.
        label: what somebody called it.
        settings: what all this depends on.
    """

    unit: str
    contexts: tuple[Context, ...]
    n_tokens: int
    mean: float
    sd: float
    smallest: float
    largest: float
    density: float
    histogram: Histogram
    reads: Edges | None
    writes: Edges | None
    logits: LogitEffect | None
    tasks: Mapping[str, TaskRank]
    similar: tuple[tuple[str, float], ...]
    coactive: tuple[tuple[str, float], ...]
    label: UnitLabel | None
    settings: Mapping[str, Any]

    @property
    def site(self) -> str:
        return parse_unit(self.unit)[0]

    @property
    def index(self) -> int:
        return parse_unit(self.unit)[1]

    @property
    def peak(self) -> float:
        """The largest |z|."""
        return max(abs(self.smallest), abs(self.largest))

    def table(self) -> pd.DataFrame:
        """The contexts: z at the peak, and the text with the peak marked."""
        rows = [{"z": c.z[c.peak], "context": c.text(("<<", ">>"))} for c in self.contexts]
        return pd.DataFrame(rows, columns=["z", "context"])

    def plot(self):
        """The histogram of z, tokens on a logarithmic scale; a matplotlib Figure."""
        figure, axes = new_figure(width=5.0, height=2.6)
        ax, counts = axes[0, 0], self.histogram.counts
        edges = self.histogram.edges
        used = counts.nonzero()[:, 0]
        low, high = (int(used[0]), int(used[-1])) if len(used) else (0, len(counts) - 1)
        for sign, colour in ((-1, PALETTE[0]), (1, PALETTE[1])):
            bins = [i for i in range(low, high + 1) if (i < len(counts) // 2) == (sign < 0)]
            ax.bar(edges[bins], counts[bins], width=self.histogram.width, align="edge", color=colour, linewidth=0)
        ax.axvline(0.0, color=INK, linewidth=0.6)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
        ax.set_xlabel("z", fontsize=8)
        ax.set_ylabel("tokens (log scale)", fontsize=8)
        title = self.unit if self.label is None else f"{self.unit}: {self.label.label}"
        ax.set_title(literal(title), fontsize=9, color=INK)
        return figure

    def __repr__(self) -> str:
        label = "" if self.label is None else f" {self.label.label!r}"
        tasks = "".join(f", {task} #{rank.rank}" for task, rank in self.tasks.items())
        edges = "" if self.reads is None or self.writes is None else f", {self.reads.n} + {self.writes.n} edges"
        first = f"; fires most on {self.contexts[0].text(('<<', '>>'))!r}" if self.contexts else "; never fires"
        return f"UnitProfile({self.unit}{label}{edges}, z {self.smallest:.3g} to {self.largest:.3g}{tasks}{first})"

    def _repr_html_(self) -> str:
        from swd_lens.analysis.audit.view import STYLE, unit_html

        return f"<style>{STYLE}</style>{unit_html(self)}"
