"""Activity: how often each unit is at work on text. L0, dead units, and how rare the others are.

1. Attach the units, run the rows, and count at every site how many tokens have z != 0, per unit.
2. L0 is the mean number of such units per token; a unit that never is, is dead on this text.

It works for every unit source; SWD's units are linear in the site's input and nearly always at work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Int
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from swd_lens.base.figures import INK, PALETTE, literal, new_figure
from swd_lens.base.progress import tqdm
from swd_lens.base.record import Record
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.recording import record, standing_hooks
from swd_lens.tasks.streams import as_stream
from swd_lens.units import attach


@dataclass(frozen=True, repr=False)
class Activity(Record):
    """Attributes: tokens: how many were looked at; counts: site -> (unit,) tokens at which z was not zero; settings."""

    tokens: int
    counts: Mapping[str, Int[Tensor, " _unit"]]
    settings: Mapping[str, Any]

    def l0(self, site: str) -> float:
        """Units at work per token, on average."""
        return float(self.counts[site].sum()) / self.tokens

    def dead(self, site: str) -> Int[Tensor, " _unit"]:
        """Units that were at work at no token."""
        return (self.counts[site] == 0).nonzero().flatten()

    def table(self) -> pd.DataFrame:
        """One row per site; "dense" counts units at work at half of the tokens or more, "rare" at less than one in 1,000."""
        rows = []
        for site, counts in self.counts.items():
            share, n, dead = counts.double() / self.tokens, len(counts), len(self.dead(site))
            row = {"site": site, "units": n, "L0": self.l0(site), "dead": dead, "dead share": dead / n}
            row |= {"rare": int(((share > 0) & (share < 1e-3)).sum()), "dense": int((share >= 0.5).sum())}
            rows.append(row | {"tokens": self.tokens})
        return pd.DataFrame(rows)

    def plot(self):
        """How many units are at work at which share of the tokens, one panel per site; a matplotlib Figure."""
        figure, axes = new_figure(1, len(self.counts), width=3.2, height=2.5)
        edges = np.linspace(-np.log10(self.tokens) - 0.5, 0.0, 41)
        for ax, (site, counts) in zip(axes[0], self.counts.items(), strict=True):
            alive = counts[counts > 0].double() / self.tokens
            ax.hist(alive.log10().numpy(), bins=edges, color=PALETTE[0])
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.xaxis.set_major_formatter(lambda power, _: f"{10.0**power:.0e}" if power < -3 else f"{10.0**power:g}")
            ax.set(xlabel="share of tokens at which a unit is at work", ylabel="units")
            title = f"{site}: L0 {self.l0(site):.1f}, {len(self.dead(site))} of {len(counts)} dead"
            ax.set_title(literal(title), fontsize=9, color=INK)
        return figure

    def __repr__(self) -> str:
        return self.table().to_string(index=False)

    def title(self) -> str:
        return f"Units at work on {self.tokens:,} tokens"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot()


def activity_of(model: Any, units: Any, tokens: Any, *, batch_size: int = 16, progress: bool = False) -> Activity:
    """Count where units are at work. See `LearnedUnits.report`; `units` may be whatever `attach` takes."""
    stream = as_stream(tokens, model)
    require_no_dropout(model)
    host = host_of(model)
    batches = -(-stream.n_rows // batch_size)
    counts: dict[str, Tensor] = {}
    with attach(model, units) as attachment:
        bar = tqdm(stream.batches(batch_size), total=batches, desc="activity", disable=not progress, leave=False)
        for batch in bar:
            seen = record(host, batch, units=attachment.sites, keep=lambda z: (z != 0).sum((0, 1)).cpu())
            counts = {name: counts.get(name, 0) + count for name, count in seen.units.items()}
    settings = {"model": str(model.cfg.model_name), "rows": stream.n_rows, "row_length": stream.row_length}
    return Activity(stream.n_tokens, counts, settings | standing_hooks(model))
