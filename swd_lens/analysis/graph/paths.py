"""paths: the counterpart of the paper's figure of high-attribution paths (greater-than case study).

1. Per displayed layer, the units of one kind of site that rank highest for the task.
2. Each is drawn as it computes: the site's input h is read, z_i = h . A[:, i], and z_i B[i] is written to the residual stream,
   where the writes of all units add up. An arrow stands for all read or write edges of the unit; their number is beside it.
3. Units with a label (a semantic hypothesis of the user's) are filled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from swd_lens.base.figures import INK, PALETTE, literal, new_figure
from swd_lens.circuits import UnitScores
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name
from swd_lens.units.attach import by_site
from swd_lens.units.factors import Factors
from swd_lens.units.sources import as_units
from swd_lens.units.unit_set import require_made_for

_Point = tuple[float | int, float | int]
_MOST_LAYERS = 3  # shown by default, as many as the paper's figure has
_READ, _WRITE, _LABELLED = PALETTE[0], PALETTE[1], "#fdebd3"
_INPUT_X, _UNIT_X, _STREAM_X = 0.6, 3.1, 6.55
_UNIT_WIDTH, _UNIT_HEIGHT = 2.5, 0.58


def plot_unit_paths(
    model: Any,
    factors: Any,
    scores: UnitScores,
    *,
    kind: str = "mlp_out",
    layers: Sequence[int] | None = None,
    per_layer: int = 2,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """The best units of some layers and what they read and write, as the paper draws its greater-than case study.

    Args:
        factors: what the scores are of; see `swd_lens.attach`.
        scores: of `swd_lens.attribute`; ranks are among all units that were scored (1 is the best).
        kind: which sites are shown; they must write to the residual stream (mlp_out, attn_o).
        layers: which ones. None: the three whose best unit ranks highest.
        per_layer: units per layer.
        labels: unit name ("blocks.2.mlp_out/17") -> semantic label.

    Raises:
        ValueError: scores of other factors, no such layer, a kind that does not write to the residual stream, a label of a unit
            that is not there.
        TypeError: units of a coder, which have no read and write edges.
    """
    if kind not in WRITES_RESIDUAL:
        raise ValueError(
            f"kind={kind!r}: these units do not write to the residual stream; take one of {WRITES_RESIDUAL}"
        )
    if per_layer < 1:
        raise ValueError(f"per_layer={per_layer}: give a whole number of at least 1")
    found = {site: as_units(one, find_sites(model, site)[0]) for site, one in by_site(factors).items()}
    require_made_for(found, scores.settings, "this ranking")
    sites = {split_name(site)[0]: site for site in scores.scores if split_name(site)[1] == kind}
    if not sites:
        raise ValueError(f"none of these scores is of a site {kind}; there are {', '.join(scores.scores)}")
    ranks, names = scores.ranks(), dict(labels or {})
    _check_labels(names, scores)
    if layers is None:
        best = sorted(sites, key=lambda layer: int(ranks[sites[layer]].min()))
        layers = sorted(best[:_MOST_LAYERS])
    if unknown := [layer for layer in layers if layer not in sites]:
        raise ValueError(
            f"no units of {kind} in layer {unknown[0]}; scored are layers {', '.join(map(str, sorted(sites)))}"
        )
    if not layers:
        raise ValueError("layers is empty: name at least one")
    return _figure(found, scores, [sites[layer] for layer in sorted(layers)], per_layer, names)


def _check_labels(labels: Mapping[str, str], scores: UnitScores) -> None:
    for name in labels:
        site, _, index = name.rpartition("/")
        if site not in scores.scores or not index.isdigit() or int(index) >= len(scores.scores[site]):
            has = ", ".join(f"{site} (0 to {len(of_site) - 1})" for site, of_site in scores.scores.items())
            raise ValueError(f"label of {name!r}: there is no such unit among the scored ones: {has}")


def _figure(
    found: Mapping[str, Any], scores: UnitScores, sites: list[str], per_layer: int, labels: Mapping[str, str]
) -> Figure:
    step = 0.78
    band = per_layer * step + 0.42
    height = band * len(sites) + 0.95
    figure, axes = new_figure(width=7.4, height=height + 1.0)
    ax = axes[0, 0]
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, 7.4)
    ax.set_ylim(-0.95, height - 0.4)
    ax.plot([_STREAM_X, _STREAM_X], [-0.35, height - 0.55], color=INK, linewidth=3.2, solid_capstyle="round", zorder=1)
    _arrow(ax, (_STREAM_X, height - 0.8), (_STREAM_X, height - 0.42), INK, 3.2, head=16)
    ax.text(_STREAM_X + 0.16, -0.3, "residual\nstream", fontsize=8, color=INK, va="bottom")
    ax.text(
        0.17, -0.62, "An arrow stands for all read (blue) or write (orange) edges of a unit; + adds the writes of all units.\n"
        "Filled: units with a label.", fontsize=7, color="#555555", va="top",
    )  # fmt: skip
    ranks = scores.ranks()
    for row, site in enumerate(sites):
        middle = row * band + band / 2
        _layer(ax, found[site], scores, ranks[site], site, middle, step, per_layer, labels)
    task = scores.settings.get("task")
    ax.set_title(
        literal(f"Highest-ranked {split_name(sites[0])[1]} units" + (f" of {task}" if task else "")),
        fontsize=10, color=INK, loc="left",
    )  # fmt: skip
    return figure


def _layer(
    ax: Any,
    units: Any,
    scores: UnitScores,
    ranks: Any,
    site: str,
    middle: float | int,
    step: float | int,
    per_layer: int,
    labels: Mapping[str, str],
) -> None:
    if not isinstance(units, Factors):
        raise TypeError(f"the units of {site} are a {type(units).__name__}, which has no read and write edges to draw")
    layer, _ = split_name(site)
    chosen = ranks.argsort()[:per_layer].tolist()
    reads, writes = (units.read != 0).sum(0), (units.write != 0).sum(1)
    _box(ax, _INPUT_X, middle, 0.86, 0.62, f"$h_{{{layer}}}$", "#eef4fa", size=12)
    ax.text(
        _INPUT_X, middle - 0.42, f"layer {layer}\n{units.d_in} inputs", fontsize=7, ha="center", va="top", color=INK
    )
    ax.add_patch(Circle((_STREAM_X, middle), 0.17, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=4))
    ax.text(_STREAM_X, middle, "+", fontsize=12, ha="center", va="center", color=INK, zorder=5)
    for i, unit in enumerate(chosen):
        y = middle + step * ((len(chosen) - 1) / 2 - i)
        name = f"{site}/{unit}"
        label = labels.get(name, "")
        left = _UNIT_X - _UNIT_WIDTH / 2
        _arrow(ax, (_INPUT_X + 0.45, middle), (left, y), _READ, 1.6)
        _arrow(ax, (_UNIT_X + _UNIT_WIDTH / 2, y), (_STREAM_X - 0.19, middle), _WRITE, 1.6)
        score = float(scores.scores[site][unit])
        under = f"rank {int(ranks[unit]) + 1} of {scores.n_units} · score {score:.3g}"
        _box(ax, _UNIT_X, y, _UNIT_WIDTH, _UNIT_HEIGHT, "", _LABELLED if label else "white")
        head = f"$z_{{{unit}}}$" + (f"  {_short(label)}" if label else "")
        ax.text(_UNIT_X, y + 0.11, head, fontsize=9, ha="center", va="center", color=INK, zorder=5,
                fontweight="bold" if label else "normal")  # fmt: skip
        ax.text(_UNIT_X, y - 0.15, under, fontsize=6.5, ha="center", va="center", color="#555555", zorder=5)
        ax.text(_UNIT_X + _UNIT_WIDTH / 2 + 0.14, y + (0.13 if y >= middle else -0.15), f"writes {int(writes[unit])} of "
                f"{units.d_out}", fontsize=7, color=_WRITE, va="center")  # fmt: skip
        ax.text(left - 0.1, y + (0.2 if y >= middle else -0.2), f"reads {int(reads[unit])}", fontsize=7, color=_READ,
                va="center", ha="right")  # fmt: skip


def _short(label: str) -> str:
    return literal(label if len(label) <= 24 else label[:23] + "…")


def _box(
    ax: Any,
    x: float | int,
    y: float | int,
    width: float | int,
    height: float | int,
    text: str,
    fill: str,
    size: float | int = 9,
) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.1",
            facecolor=fill, edgecolor=INK, linewidth=1.0, zorder=3,
        )
    )  # fmt: skip
    if text:
        ax.text(x, y, text, fontsize=size, ha="center", va="center", color=INK, zorder=5)


def _arrow(ax: Any, start: _Point, end: _Point, colour: str, width: float | int, head: float | int = 10) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=head, color=colour, linewidth=width, shrinkA=0, shrinkB=0, zorder=2,
        )
    )  # fmt: skip
