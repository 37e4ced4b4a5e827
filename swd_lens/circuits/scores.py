"""UnitScores: what each unit of the attached sites is worth to a task, the ranking that follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import legible
from swd_lens.base.figures import new_figure, style
from swd_lens.base.record import Record

_POINTS = 200  # of the figure


def require_finite(what: str, values: Mapping[str, Float[Tensor, "*_row _unit"]]) -> None:
    """Raise ValueError where a unit's values (any number of them; site -> per unit) are not finite: it would be ranked first, or
    clamped to nothing. The message names the unit, and `what` the values are ("the score")."""
    for site, of_site in values.items():
        bad = ~of_site.isfinite()
        if bool(bad.any()):
            unit, value = f"{site}/{int(bad.nonzero()[0, -1])}", float(of_site[bad][0])
            raise ValueError(
                f"{what} of {legible(unit)} is {value}: an activation or a gradient overflows. Run the host in float32, or "
                "look at that unit's read and write"
            )


@dataclass(frozen=True, repr=False)
class UnitScores(Record):
    """Scores and mean activations of every unit of every attached site.

    Attributes:
        scores: site -> (unit,) in logits of margin.
        means: site -> (unit,) mean activation, what ablation puts in; (pos, unit) with mean_over="per_position", where the
            last row is the scoring position.
        settings: every choice that the scores depend on.
        heads: site -> per unit the attention head that it reads or writes, and its share, see `swd_lens.units.UnitSet.heads`;
            sites without heads are left out.
    """

    scores: Mapping[str, Float[Tensor, " _unit"]]
    means: Mapping[str, Float[Tensor, "*_pos _unit"]]
    settings: Mapping[str, Any]
    heads: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)

    @property
    def n_units(self) -> int:
        return sum(len(s) for s in self.scores.values())

    def ranking(self) -> list[tuple[str, int]]:
        """All units, best (highest score) first; equal scores in the order of sites, then units."""
        names = [(site, unit) for site, s in self.scores.items() for unit in range(len(s))]
        return [names[i] for i in self._order().tolist()]

    def ranks(self) -> dict[str, Tensor]:
        """site -> (unit,) rank of each unit among all of them, 1 the best."""
        order = self._order()
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(1, len(order) + 1)
        return dict(zip(self.scores, ranks.split([len(s) for s in self.scores.values()]), strict=True))

    def _order(self) -> Int[Tensor, " unit"]:
        """Places of all units, site after site, the best first."""
        return torch.cat([s.cpu() for s in self.scores.values()]).sort(descending=True, stable=True).indices

    def top(self, n: int = 10) -> pd.DataFrame:
        """The n best units: name, head and share (where a site has heads), score, mean activation (at the scoring position, where
        there is one per position).
        """
        means = {site: mean if mean.ndim == 1 else mean[-1] for site, mean in self.means.items()}
        best = self.ranking()[:n]
        columns = {"unit": [f"{site}/{unit}" for site, unit in best], **self.head_columns(best)}
        columns |= {"score": [float(self.scores[site][unit]) for site, unit in best]}
        return pd.DataFrame(columns | {"mean z": [float(means[site][unit]) for site, unit in best]})

    def head_columns(self, units: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
        """Columns "head" and "head share" of these units, for a table; none where no site of theirs has heads."""
        if not any(site in self.heads for site, _ in units):
            return {}
        held = [self.heads[site][unit] if site in self.heads else ("", math.nan) for site, unit in units]
        return {"head": [name for name, _ in held], "head share": [share for _, share in held]}

    def plot(self):
        """Scores of all units, best first, against their rank; a matplotlib Figure."""
        values = torch.cat([s.detach().float().cpu() for s in self.scores.values()]).sort(descending=True).values
        # Ranks in equal steps of the log axis: thousands of units would be as many points.
        ranks = torch.logspace(0, math.log10(max(1, len(values))), _POINTS, dtype=torch.float32).long().unique()
        figure, axes = new_figure(width=4.6, height=2.4)
        ax = axes[0, 0]
        ax.axhline(0.0, color="#888888", linewidth=0.8)
        ax.plot(ranks, values[ranks - 1], marker="o", markersize=2, linewidth=1.2, **style(0))
        ax.set(xscale="log", xlabel="rank (log scale)", ylabel="score (logits of margin)")
        return figure

    def __repr__(self) -> str:
        of = f"{self.settings['task']}: " if "task" in self.settings else ""
        return f"UnitScores({of}{self.n_units:,} units in {len(self.scores)} sites)"

    def parts(self) -> tuple[Any, ...]:
        return (self.plot(), self.top(10), "top(n) gives more of them; ranking() all.") if self.n_units else ()
