"""One unit: what is known of it.

1. A `UnitCard` is a unit in brief, as a study keeps a task's best units: contexts, edges, direct logit effect, ranks.
2. A `UnitProfile` adds what an audit knows: statistics of z, edges by name, neighbours, a label.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.drawing import unit_html, unit_style
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.analysis.audit.vectors import Edges, LogitEffect
from swd_lens.base.errors import seen
from swd_lens.base.figures import INK, NEGATIVE, POSITIVE, literal, new_figure
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.sites import parse_unit

MARK = ("<<", ">>")  # around the peak, where a context is plain text
_STATISTICS = ("mean", "sd", "smallest", "largest", "density", "special_peaks", "n_tokens")


@dataclass(frozen=True)
class TaskRank:
    """A unit's worth to a task: score in logits of margin, rank among all scored units (1 is the best of `of`).

    `of` is None where it was not kept.
    """

    score: float
    rank: int
    of: int | None = None


@with_torch_defaults
@dataclass(frozen=True, repr=False, kw_only=True)
class UnitCard:
    """A unit in brief.

    Attributes:
        unit: its name, "blocks.2.mlp_out/5".
        contexts: the places of largest |z|, largest first.
        reads, writes: its edges; None where the unit source shows none.
        logits: direct effect of the write vector; None where the site does not write to the residual stream
            (or the host has no next-token logits).
        tasks: task -> score and rank.
    """

    unit: str
    contexts: tuple[Context, ...]
    reads: Edges | None
    writes: Edges | None
    logits: LogitEffect | None
    tasks: Mapping[str, TaskRank]

    @property
    def site(self) -> str:
        return parse_unit(self.unit)[0]

    @property
    def index(self) -> int:
        return parse_unit(self.unit)[1]

    def table(self) -> pd.DataFrame:
        """The contexts: z at the peak, and the text with the peak marked."""
        rows = [{"z": c.z[c.peak], "context": c.text(MARK)} for c in self.contexts]
        return pd.DataFrame(rows, columns=["z", "context"])

    @seen
    def __repr__(self) -> str:
        tasks = "".join(f", {task} #{rank.rank}" for task, rank in self.tasks.items())
        first = f"; fires most on {self.contexts[0].text(MARK)!r}" if self.contexts else "; never fires"
        return f"{type(self).__name__}({self.unit}{self._in_brief()}{tasks}{first})"

    def _in_brief(self) -> str:
        return "" if self.reads is None or self.writes is None else f", {self.reads.n} + {self.writes.n} edges"

    def _repr_html_(self) -> str:
        return f"<style>{unit_style()}</style>{unit_html(self)}"


@with_torch_defaults
@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class UnitProfile(UnitCard):
    """One unit, looked at from all sides.

    Attributes:
        unit, contexts, reads, writes, logits, tasks: see `UnitCard`.
        n_tokens: tokens that the statistics are over.
        mean, sd, smallest, largest: of z.
        density: share of tokens with |z| beyond a tenth of its largest.
        special_peaks: share of its places of largest |z| that lie on special tokens (BOS, EOS, ...): no text speaks for these.
        histogram: tokens by z.
        similar: (unit, cosine) of the nearest write vectors of its site.
        coactive: (unit, correlation of z over the text), strongest first, of its site.
        label: what somebody called it.
        settings: what all this depends on.
    """

    n_tokens: int
    mean: float
    sd: float
    smallest: float
    largest: float
    density: float
    special_peaks: float
    histogram: Histogram
    similar: tuple[tuple[str, float], ...]
    coactive: tuple[tuple[str, float], ...]
    label: UnitLabel | None
    settings: Mapping[str, Any]

    @property
    def peak(self) -> float:
        """The largest |z|."""
        return max(abs(self.smallest), abs(self.largest))

    def plot(self):
        """The histogram of z, tokens on a logarithmic scale; a matplotlib Figure."""
        figure, axes = new_figure(width=5.0, height=2.6)
        ax, counts = axes[0, 0], self.histogram.counts
        edges = self.histogram.edges
        used = counts.nonzero()[:, 0]
        low, high = (int(used[0]), int(used[-1])) if len(used) else (0, len(counts) - 1)
        for sign, colour in ((-1, NEGATIVE), (1, POSITIVE)):
            bins = [i for i in range(low, high + 1) if (i < len(counts) // 2) == (sign < 0)]
            ax.bar(edges[bins], counts[bins], width=self.histogram.width, align="edge", color=colour, linewidth=0)
        ax.axvline(0.0, color=INK, linewidth=0.6)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
        ax.set(xlabel="z", ylabel="tokens (log scale)")
        title = self.unit if self.label is None else f"{self.unit}: {self.label.label}"
        ax.set_title(literal(title), fontsize=9, color=INK)
        return figure

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, as `Audit.export` writes them: without the unit's tasks and neighbours."""
        label = self.label or UnitLabel("")
        return {
            "unit": self.unit,
            "site": self.site,
            "index": self.index,
            **asdict(label),
            "contexts": [
                {"text": c.text(MARK), "tokens": c.tokens, "z": [float(f"{z:.5g}") for z in c.z], "peak": c.peak}
                for c in self.contexts
            ],
            "promoted": self.logits and self.logits.promoted,
            "suppressed": self.logits and self.logits.suppressed,
            "statistics": {name: getattr(self, name) for name in _STATISTICS},
            "reads": self.reads and asdict(self.reads),
            "writes": self.writes and asdict(self.writes),
        }

    def _in_brief(self) -> str:
        label = "" if self.label is None else f" {self.label.label!r}"
        special = f", {self.special_peaks:.0%} of its peaks on special tokens" if self.special_peaks else ""
        return f"{label}{super()._in_brief()}, z {self.smallest:.3g} to {self.largest:.3g}{special}"
