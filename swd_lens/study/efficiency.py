"""DataEfficiency: replacement quality against tokens used, as a table, a figure and a file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from swd_lens.base.errors import quoted
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.record import PlainRecord, SavedRecord
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.plots import compact

FIT, CHECKPOINT, SINGLE = "independent fit", "checkpoint", "single point"
METRICS = {"CE delta": "CE delta (nats)", "KL": "KL to dense (nats)", "relMSE": "relMSE of the output"}
# CE deltas span decades and may be negative: linear up to this, which is the paper's tolerance, logarithmic beyond.
_LINEAR_BELOW = 1e-3
# Kind of point -> marker, whether it is filled, and what it is called.
_MARKERS = {FIT: ("o", True, "circle"), CHECKPOINT: ("s", False, "square"), SINGLE: ("D", True, "diamond")}


@dataclass(frozen=True)
class Point(PlainRecord):
    """One method after so many tokens."""

    method: str
    tokens: int
    kind: str  # "independent fit", "checkpoint" or "single point"
    edges: int  # of the whole replacement
    fidelity: Fidelity
    relmse: float  # of the replaced output: of a whole MLP, the MLP's
    # what decides the replacement's weights, as plain values; None where nobody can say
    identity: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class DataEfficiency(SavedRecord):
    """The points of every method, and how they were made; `save` writes a JSON file, `load` reads it."""

    WHAT: ClassVar[str] = "a file of data_efficiency"

    points: list[Point]
    settings: Mapping[str, Any]

    @property
    def methods(self) -> list[str]:
        """In the order given."""
        return list(dict.fromkeys(point.method for point in self.points))

    def table(self) -> pd.DataFrame:
        """One row per point."""
        rows = [
            {"method": point.method, "tokens": point.tokens, "kind": point.kind, "edges": point.edges}
            | {"CE delta": point.fidelity.ce_delta, "KL": point.fidelity.kl, "relMSE": point.relmse}
            | {"top-1 agreement": point.fidelity.top1_agreement}
            for point in self.points
        ]
        return pd.DataFrame(rows)

    def tokens_to_reach(self, target: float | int, metric: str = "CE delta", *, lasting: bool = True) -> dict[str, int | None]:
        """Method -> the fewest tokens after which the metric is at most this; None: never.

        A metric that is not a number, after a training that diverged, is not reached.

        Args:
            target: in the metric's unit.
            metric: a column of `table`.
            lasting: of a run's checkpoints only count those from which the metric stays there; False: the first, chance or
                not, which is kind to the run. Independent fits do not know of each other: of them it is the first always.

        Raises:
            ValueError: an unknown metric.
        """
        _check_metrics([metric])
        reached: dict[str, int | None] = {}
        for method, rows in self._by_method():
            below, stays = (rows[metric] <= target).tolist(), lasting and CHECKPOINT in set(rows["kind"])
            enough = [all(below[i:]) if stays else below[i] for i in range(len(below))]
            reached[method] = int(rows["tokens"].iloc[enough.index(True)]) if any(enough) else None
        return reached

    def _by_method(self) -> list[tuple[str, pd.DataFrame]]:
        """In the order given, each with its rows by tokens."""
        table = self.table()
        return [(m, table.loc[table["method"] == m].sort_values(by="tokens")) for m in self.methods]

    def plot(self, metrics: str | Sequence[str] = tuple(METRICS)):
        """One panel per metric against tokens used (log axis); a matplotlib Figure. Lower is better everywhere.

        Filled circles are independent fits, hollow squares checkpoints of one run, a diamond on a thin line a single point. On
        the log axes of KL and relMSE, what is zero or (by rounding) below it lies on the panel's lower edge.

        Raises:
            ValueError: no metric, or an unknown one.
        """
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        if not names:
            raise ValueError(f"no metric to plot: choose among {', '.join(map(repr, METRICS))}")
        _check_metrics(names)
        figure, axes = new_figure(1, len(names), width=3.3, height=2.9)
        for ax, metric in zip(axes[0], names, strict=True):
            self._draw(ax, metric)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        # About 14 letters fit into an inch at this size, beside 0.5 inches of line.
        widest = 0.6 + max(map(len, labels)) / 14
        columns = max(1, min(len(labels), int(figure.get_size_inches()[0] / widest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        kinds = {point.kind for point in self.points}
        key = ", ".join(f"{shape}: {kind}" for kind, (*_, shape) in _MARKERS.items() if kind in kinds)
        space = " " if len(names) > 1 else "\n"
        title = f"{self.settings['site']} of {self.settings['model']}{space}({key})"
        figure.suptitle(literal(title), fontsize=9, color=INK)
        return figure

    def _draw(self, ax: Any, metric: str) -> None:
        logarithmic = metric != "CE delta"
        positive = self.table()[metric].where(lambda values: values > 0).min()
        floor = positive / 2 if positive == positive else 1.0
        for index, (method, rows) in enumerate(self._by_method()):
            look, values = style(index), rows[metric].to_numpy(dtype=float)
            shape, filled, _ = _MARKERS[rows["kind"].iloc[0]]
            marker = {"marker": shape, "markersize": 4, "markerfacecolor": look["color"] if filled else "white"}
            if shape == "D" and np.isfinite(values).all():
                ax.axhline(max(values[0], floor) if logarithmic else values[0], linewidth=0.7, alpha=0.6, **look)
            if logarithmic:
                values = np.where(values <= 0, floor, values)
            ax.plot(rows["tokens"], values, label=literal(method), linewidth=1.4, clip_on=False, **look, **marker)
        # The same in every panel, also in one without a number.
        used = self.table()["tokens"]
        ax.set_xlim(used.min() / 1.3, used.max() * 1.3)
        _log_axis(ax, "x")
        if logarithmic and positive == positive:
            _log_axis(ax, "y")
            if (self.table()[metric] <= 0).any():
                ax.set_ylim(bottom=floor)
        elif not logarithmic:
            ax.set_yscale("symlog", linthresh=_LINEAR_BELOW)
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.axhline(0, color=INK, linewidth=0.6)
            if not (self.table()[metric] < 0).any():
                ax.set_ylim(bottom=-0.2 * _LINEAR_BELOW)
        ax.set(xlabel="tokens used", ylabel=METRICS[metric])

    def __repr__(self) -> str:
        return self.table().to_string(index=False)

    def title(self) -> str:
        return f"Data efficiency at {self.settings['site']}"

    def parts(self) -> tuple[Any, ...]:
        return self.plot(), self.table()


def _log_axis(ax: Any, name: str) -> None:
    """Ticks as plain numbers, about six: at powers of ten, and at 3 times them where the axis spans few."""
    getattr(ax, f"set_{name}scale")("log")
    axis = getattr(ax, f"{name}axis")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)) if decades < 3 else LogLocator(numticks=7))
    axis.set_major_formatter(lambda value, _: compact(value))
    axis.set_minor_formatter(NullFormatter())


def _check_metrics(names: Sequence[str]) -> None:
    for name in names:
        if name not in METRICS:
            raise ValueError(f"metric={quoted(name)}: choose one of {', '.join(map(repr, METRICS))}")
