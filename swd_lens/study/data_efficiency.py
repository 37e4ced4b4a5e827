"""data_efficiency: how well a replacement does after how many tokens (paper §single-layer, app. original-vpd-kl-longtail).

1. SWD: an independent fit at every token count, on the first rows of the text.
2. A trained baseline: the checkpoints of one run; its tokens are those it went through, repeated ones counted again.
3. Of each: CE delta and KL against the dense host, and relMSE of the replaced output, on the same held-out text.

Tokens are data used; they equate neither optimization steps nor FLOPs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter
from tqdm.auto import tqdm

from swd_lens._version import __version__
from swd_lens.baselines.learned.units import LearnedUnits
from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.circuits.plots import compact
from swd_lens.display import card
from swd_lens.figures import INK, literal, new_figure, style
from swd_lens.hosts import find_sites, host_of
from swd_lens.inject import matrices_of
from swd_lens.plan import factorize
from swd_lens.sites import Pattern, Site
from swd_lens.tasks.text import TokenError, as_rows

METRICS = {"CE delta": "CE delta (nats)", "KL": "KL to dense (nats)", "relMSE": "relMSE of the output"}
TOKEN_COUNTS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
FIT, CHECKPOINT = "independent fit", "checkpoint"
# CE deltas span decades and may be negative: linear up to this, which is the paper's tolerance, logarithmic beyond.
_LINEAR_BELOW = 1e-3


@dataclass(frozen=True)
class Point:
    """One method after so many tokens.

    Attributes:
        kind: "independent fit" or "checkpoint".
        edges: of the whole replacement.
        relmse: of the replaced output: of a whole MLP, the MLP's.
    """

    method: str
    tokens: int
    kind: str
    edges: int
    fidelity: Fidelity
    relmse: float


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

    def tokens_to_reach(self, target: float | int, metric: str = "CE delta") -> dict[str, int | None]:
        """Method -> the fewest tokens after which the metric is at most this, and stays so at its later points; None: never.

        Raises:
            ValueError: an unknown metric.
        """
        _check_metric(metric)
        return {method: _first(self._rows(method), metric, target) for method in self.methods}

    def _rows(self, method: str) -> pd.DataFrame:
        return self.table().query("method == @method")

    def plot(self, metrics: str | Sequence[str] = tuple(METRICS)):
        """One panel per metric against tokens used (log axis); a matplotlib Figure. Lower is better everywhere.

        Markers: filled circles are independent fits, hollow squares checkpoints of one run.

        Raises:
            ValueError: an unknown metric.
        """
        chosen = [metrics] if isinstance(metrics, str) else list(metrics)
        for metric in chosen:
            _check_metric(metric)
        figure, axes = new_figure(1, len(chosen), width=3.1, height=2.8)
        for ax, metric in zip(axes[0], chosen, strict=True):
            self._draw(ax, metric)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=8, frameon=False)
        figure.suptitle(literal(f"{self.settings['site']} of {self.settings['model']}"), fontsize=9, color=INK)
        return figure

    def _draw(self, ax: Any, metric: str) -> None:
        for index, method in enumerate(self.methods):
            rows, look = self._rows(method), style(index)
            fitted = rows["kind"].iloc[0] == FIT
            marker = {
                "marker": "o" if fitted else "s",
                "markersize": 4,
                "markerfacecolor": look["color"] if fitted else "white",
            }
            ax.plot(rows["tokens"], rows[metric], label=literal(method), linewidth=1.4, **look, **marker)
        _log_axis(ax, "x")
        if metric == "CE delta":
            ax.set_yscale("symlog", linthresh=_LINEAR_BELOW)
            ax.axhline(0, color=INK, linewidth=0.6)
            if min(point.fidelity.ce_delta for point in self.points) >= 0:
                ax.set_ylim(bottom=-0.2 * _LINEAR_BELOW)
        else:
            _log_axis(ax, "y")
        ax.set_xlabel("tokens used", fontsize=9, color=INK)
        ax.set_ylabel(METRICS[metric], fontsize=9, color=INK)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: settings, and every point with its fidelity."""
        points = [
            {"method": p.method, "tokens": p.tokens, "kind": p.kind, "edges": p.edges, "relmse": p.relmse}
            | {"fidelity": p.fidelity.as_dict()}
            for p in self.points
        ]
        return {"settings": dict(self.settings), "points": points}

    def __repr__(self) -> str:
        return self.table().to_string(index=False)

    def _repr_html_(self) -> str:
        return card(f"Data efficiency at {self.settings['site']}", self.plot(), self.table())


def data_efficiency(
    model: Any,
    site: Pattern,
    methods: Mapping[str, Any],
    *,
    heldout: Any,
    tokens: Any = None,
    token_counts: Iterable[int] = TOKEN_COUNTS,
    progress: bool = False,
) -> DataEfficiency:
    """Replacement quality against tokens used, at one matrix or a whole MLP.

    Args:
        model: the host, with the site not attached.
        site: one matrix ("blocks.8.mlp_out") or a whole MLP ("blocks.8.mlp").
        methods: name -> a `LearnedUnits` (its kept checkpoints are measured), or a function without arguments that trains one
            when its turn comes; or a dict of options for `swd_lens.factorize` ({"sparsity": 0.5}): SWD, fitted anew for every
            count.
        heldout: (rows, pos) ids that nothing was fitted on.
        tokens: (rows, pos) calibration ids for SWD; its fits take the first rows of them.
        token_counts: for SWD, rounded up to whole rows; counts beyond `tokens` become one fit on all of them.

    Raises:
        TypeError: a method that is none of these.
        ValueError: no method, not one site, units of another site, no or bad token counts, or SWD without tokens; before any
            work, but for methods that are functions.
        TokenError, AttachError, UnknownSiteError: bad text, host or site.
    """
    where, parts = _sites(model, site)
    held = as_rows(heldout, model)
    makers = {name: _maker(name, given, model, where, parts, tokens, token_counts) for name, given in methods.items()}
    if not makers:
        raise ValueError('nothing to measure: pass {"SWD": {"sparsity": 0.5}, "Transcoder": units, ...}')
    points: list[Point] = []
    described: dict[str, Any] = {}
    for name, maker in tqdm(makers.items(), desc="data efficiency", unit="method", disable=not progress, leave=False):
        for used, kind, units in maker():
            found = fidelity(model, units, held)
            # The last site in execution order: of a whole MLP what the MLP writes.
            relmse = list(found.relmse.values())[-1]
            described[name] = _described(methods[name], units)
            points.append(Point(name, used, kind, sum(one.edges for one in units.values()), found, relmse))
    settings = {"model": str(model.cfg.model_name), "site": where.name, "swd_lens": __version__}
    settings |= {"heldout_tokens": held.numel(), "methods": described}
    return DataEfficiency(points, settings)


def _sites(model: Any, pattern: Pattern) -> tuple[Site, list[Site]]:
    found = find_sites(model, pattern)
    if len(found) != 1:
        raise ValueError(
            f"{pattern!r} names {len(found)} sites; data efficiency is measured at one matrix or one whole MLP"
        )
    return found[0], matrices_of(host_of(model), found[0])


Made = Iterator[tuple[int, str, Mapping[str, Any]]]


def _maker(
    name: str, given: Any, model: Any, where: Site, parts: list[Site], tokens: Any, token_counts: Iterable[int]
) -> Callable[[], Made]:
    """What makes a method's replacements one after the other: tokens, kind, units."""
    if isinstance(given, LearnedUnits):
        _require_of(name, given, where)
        return lambda: _checkpoints(given)
    if isinstance(given, Mapping):
        rows, counts = _text(name, tokens, token_counts, model)
        return lambda: _fits(model, parts, rows, counts, given)
    if callable(given):

        def trained() -> Made:
            units: Any = given()
            _require_of(name, units, where)
            return _checkpoints(units)

        return trained
    raise TypeError(
        f"{name!r} is a {type(given).__name__}; give LearnedUnits (swd.baselines.transcoder(...)), a function that trains them, "
        'or options for SWD, {"sparsity": 0.5}'
    )


def _require_of(name: str, units: Any, where: Site) -> None:
    if not isinstance(units, LearnedUnits):
        raise TypeError(f"the function of {name!r} gave a {type(units).__name__}, not LearnedUnits")
    if (replaced := units.provenance["replaces"]) != where.name:
        raise ValueError(f"{name!r} replaces {replaced}, not {where.name}")


def _checkpoints(units: LearnedUnits) -> Made:
    for tokens in units.checkpoints:
        yield tokens, CHECKPOINT, units.at(tokens)


def _fits(model: Any, parts: list[Site], rows: Any, counts: list[int], options: Mapping[str, Any]) -> Made:
    length = rows.shape[1]
    for count in counts:
        text = rows[: -(-count // length)]
        yield text.numel(), FIT, factorize(model, parts, tokens=text, **{"progress": False, **options})


def _text(name: str, tokens: Any, token_counts: Iterable[int], model: Any) -> tuple[Any, list[int]]:
    if tokens is None:
        raise TokenError(f"{name!r} is fitted by SWD, which needs tokens=")
    rows, counts = as_rows(tokens, model), sorted(set(token_counts))
    if not counts or counts[0] < 1:
        raise ValueError(f"token_counts={counts}: give one or more numbers above 0")
    return rows, sorted({min(count, rows.numel()) for count in counts})


def _described(given: Any, units: Any) -> dict[str, Any]:
    """How a method was made, as plain values."""
    if isinstance(units, LearnedUnits):
        return {"method": units.provenance["method"], "settings": units.provenance["settings"]}
    options = {name: v if isinstance(v, str | int | float | bool | None) else str(v) for name, v in given.items()}
    return {"method": "swd", **options}


def _first(rows: pd.DataFrame, metric: str, target: float | int) -> int | None:
    below = (rows[metric] <= target).tolist()
    since = next((place for place in range(len(below)) if all(below[place:])), None)
    return None if since is None else int(rows["tokens"].iloc[since])


def _log_axis(ax: Any, name: str) -> None:
    """Ticks at 1 and 3 times the powers of ten, written as plain numbers; also where the axis spans less than a decade."""
    getattr(ax, f"set_{name}scale")("log")
    axis = getattr(ax, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.set_major_formatter(lambda value, _: compact(value))
    axis.set_minor_formatter(NullFormatter())


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: choose one of {', '.join(map(repr, METRICS))}")
