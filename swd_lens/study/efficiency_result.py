"""DataEfficiency: replacement quality against tokens used, as a table, a figure and a file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter

from swd_lens.base.display import card
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.files import write_json
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.plots import compact
from swd_lens.study.efficiency_methods import CHECKPOINT, FIT, SINGLE

METRICS = {"CE delta": "CE delta (nats)", "KL": "KL to dense (nats)", "relMSE": "relMSE of the output"}
# CE deltas span decades and may be negative: linear up to this, which is the paper's tolerance, logarithmic beyond.
_LINEAR_BELOW = 1e-3
_MARKERS = {FIT: ("o", True), CHECKPOINT: ("s", False), SINGLE: ("D", True)}  # and whether they are filled
_SHAPES = {FIT: "circle:", CHECKPOINT: "square:", SINGLE: "diamond:"}
_FORMAT = 1


@dataclass(frozen=True)
class Point:
    """One method after so many tokens.

    Attributes:
        kind: "independent fit", "checkpoint" or "single point".
        edges: of the whole replacement.
        relmse: of the replaced output: of a whole MLP, the MLP's.
    """

    method: str
    tokens: int
    kind: str
    edges: int
    fidelity: Fidelity
    relmse: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        own = {"method": self.method, "tokens": self.tokens, "kind": self.kind, "edges": self.edges}
        return own | {"relmse": self.relmse, "fidelity": self.fidelity.as_dict()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Point":
        """The point that `as_dict` gave; null, which JSON has for it, is NaN."""
        measured = {key: value for key, value in saved["fidelity"].items() if key != "ce_delta"}
        measured["relmse"] = {site: _number(value) for site, value in measured["relmse"].items()}
        found = Fidelity(**{key: _number(value) for key, value in measured.items()})
        return cls(saved["method"], saved["tokens"], saved["kind"], saved["edges"], found, _number(saved["relmse"]))


@dataclass(frozen=True, repr=False)
class DataEfficiency:
    """The points of every method, and how they were made."""

    points: Sequence[Point]
    settings: Mapping[str, Any]

    @property
    def methods(self) -> list[str]:
        """In the order given."""
        return list(dict.fromkeys(point.method for point in self.points))

    def table(self) -> pd.DataFrame:
        """One row per point."""
        return pd.DataFrame(
            [
                {
                    "method": point.method,
                    "tokens": point.tokens,
                    "kind": point.kind,
                    "edges": point.edges,
                    "CE delta": point.fidelity.ce_delta,
                    "KL": point.fidelity.kl,
                    "relMSE": point.relmse,
                    "top-1 agreement": point.fidelity.top1_agreement,
                }
                for point in self.points
            ]
        )

    def tokens_to_reach(
        self, target: float | int, metric: str = "CE delta", *, lasting: bool = True
    ) -> dict[str, int | None]:
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
        _check_metric(metric)
        return {method: _first(rows, metric, target, lasting) for method, rows in self._by_method()}

    def _by_method(self) -> list[tuple[str, pd.DataFrame]]:
        """In the order given, each with its rows by tokens."""
        table = self.table()
        return [(one, table.loc[table["method"] == one].sort_values(by="tokens")) for one in self.methods]

    # ------------------------------------------------------------------ shown

    def plot(self, metrics: str | Sequence[str] = tuple(METRICS)):
        """One panel per metric against tokens used (log axis); a matplotlib Figure. Lower is better everywhere.

        Filled circles are independent fits, hollow squares checkpoints of one run, a diamond on a thin line a single point. On
        the log axes of KL and relMSE, what is zero or (by rounding) below it lies on the panel's lower edge.

        Raises:
            ValueError: no metric, or an unknown one.
        """
        chosen = [metrics] if isinstance(metrics, str) else list(metrics)
        if not chosen:
            raise ValueError(f"no metric to plot: choose among {', '.join(map(repr, METRICS))}")
        for metric in chosen:
            _check_metric(metric)
        figure, axes = new_figure(1, len(chosen), width=3.3, height=2.9)
        for ax, metric in zip(axes[0], chosen, strict=True):
            self._draw(ax, metric)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        # About 14 letters fit into an inch at this size, beside 0.5 inches of line.
        widest = 0.6 + max(map(len, labels)) / 14
        columns = max(1, min(len(labels), int(figure.get_size_inches()[0] / widest)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        there = {point.kind for point in self.points}
        key = ", ".join(f"{_SHAPES[kind]} {kind}" for kind in _MARKERS if kind in there)
        space = " " if len(chosen) > 1 else "\n"
        title = f"{self.settings['site']} of {self.settings['model']}{space}({key})"
        figure.suptitle(literal(title), fontsize=9, color=INK)
        return figure

    def _draw(self, ax: Any, metric: str) -> None:
        logarithmic = metric != "CE delta"
        positive = self.table()[metric].where(lambda values: values > 0).min()
        floor = positive / 2 if positive == positive else 1.0
        for index, (method, rows) in enumerate(self._by_method()):
            look, values = style(index), rows[metric].to_numpy(dtype=float)
            shape, filled = _MARKERS[rows["kind"].iloc[0]]
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
        ax.set_xlabel("tokens used", fontsize=9, color=INK)
        ax.set_ylabel(METRICS[metric], fontsize=9, color=INK)

    def __repr__(self) -> str:
        return self.table().to_string(index=False)

    def _repr_html_(self) -> str:
        return card(f"Data efficiency at {self.settings['site']}", self.plot(), self.table())

    # ------------------------------------------------------------------ files

    def as_dict(self) -> dict[str, Any]:
        """Plain values: settings, and every point with its fidelity."""
        return {"settings": dict(self.settings), "points": [point.as_dict() for point in self.points]}

    def save(self, path: str | Path) -> None:
        """Write everything to a JSON file, whole or not at all."""
        write_json(Path(path), {"format": _FORMAT, **self.as_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "DataEfficiency":
        """Read what `save`, or `data_efficiency` with out=, wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is none of theirs, damaged, or of a later format.
        """
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            version, settings = int(saved["format"]), dict(saved["settings"])
            if version <= _FORMAT:
                return cls([Point.from_dict(point) for point in saved["points"]], settings)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of data_efficiency, or damaged ({error!r})") from error
        raise ValueError(f"{path} has format {version}, newer than this swd_lens; update it")


def _number(value: Any) -> Any:
    return float("nan") if value is None else value


def _first(rows: pd.DataFrame, metric: str, target: float | int, lasting: bool) -> int | None:
    below, run = (rows[metric] <= target).tolist(), lasting and CHECKPOINT in set(rows["kind"])
    since = next((place for place in range(len(below)) if (all(below[place:]) if run else below[place])), None)
    return None if since is None else int(rows["tokens"].iloc[since])


def _log_axis(ax: Any, name: str) -> None:
    """Ticks as plain numbers, about six: at powers of ten, and at 3 times them where the axis spans few."""
    getattr(ax, f"set_{name}scale")("log")
    axis = getattr(ax, f"{name}axis")
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)) if decades < 3 else LogLocator(numticks=7))
    axis.set_major_formatter(lambda value, _: compact(value))
    axis.set_minor_formatter(NullFormatter())


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: choose one of {', '.join(map(repr, METRICS))}")
