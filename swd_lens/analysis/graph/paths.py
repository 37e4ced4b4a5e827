"""Paths: the counterpart of the paper's figure of high-attribution paths (greater-than case study).

1. Per displayed layer, the units of one kind of site that rank highest for the task.
2. Each is drawn as it computes: the site's input h is read, z_i = h . A[:, i], and z_i B[i] is written to the residual stream,
   where the writes of all units add up. An arrow stands for all read or write edges of the unit; their number is beside it.
3. Units with a label (a semantic hypothesis of the user's) are filled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from swd_lens.analysis.audit.drawing import DrawnUnit, draw_paths, shortened
from swd_lens.base.checks import bounded
from swd_lens.base.errors import quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import UnitScores
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name
from swd_lens.units import UnitSet
from swd_lens.units.factors import Factors

_MOST_LAYERS = 3  # shown by default, as many as the paper's figure has
_LABELLED = "#fdebd3"


@with_torch_defaults
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
    """Draw the best units of some layers and what they read and write, as the paper draws its greater-than case study.

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
        raise ValueError(f"kind={quoted(kind)}: these units do not write to the residual stream; take one of {WRITES_RESIDUAL}")
    bounded("per_layer", per_layer, 1)
    units = UnitSet.of(model, factors)
    units.require_made_for(scores.settings, "this ranking")
    sites = {split_name(site)[0]: site for site in scores.scores if split_name(site)[1] == kind}
    if not sites:
        raise ValueError(f"none of these scores is of a site {kind}; there are {', '.join(scores.scores)}")
    for name in labels or {}:
        site, _, index = name.rpartition("/")
        if site not in scores.scores or not index.isdigit() or int(index) >= len(scores.scores[site]):
            has = ", ".join(f"{site} (0 to {len(of_site) - 1})" for site, of_site in scores.scores.items())
            raise ValueError(f"label of {quoted(name)}: there is no such unit among the scored ones: {has}")
    ranks = scores.ranks()
    if layers is None:
        layers = sorted(sites, key=lambda layer: int(ranks[sites[layer]].min()))[:_MOST_LAYERS]
    if unknown := [layer for layer in layers if layer not in sites]:
        raise ValueError(f"no units of {kind} in layer {unknown[0]}; scored are layers {', '.join(map(str, sorted(sites)))}")
    if not layers:
        raise ValueError("layers is empty: name at least one")

    drawn: dict[int, tuple[str, list[DrawnUnit]]] = {}
    for layer in sorted(layers):
        site, of_site = sites[layer], units[sites[layer]]
        if not isinstance(of_site, Factors):
            raise TypeError(f"the units of {site} are a {type(of_site).__name__}, which has no read and write edges to draw")
        boxes: list[DrawnUnit] = []
        for unit in ranks[site].argsort()[:per_layer].tolist():
            label, score = (labels or {}).get(f"{site}/{unit}", ""), float(scores.scores[site][unit])
            box = DrawnUnit(
                name=f"$z_{{{unit}}}$" + (f"  {shortened(label)}" if label else ""),
                under=f"rank {int(ranks[site][unit])} of {scores.n_units} · score {score:.3g}",
                fill=_LABELLED if label else "white",
                looks={"fontweight": "bold" if label else "normal"},
                reads=f"reads {int((of_site.read[:, unit] != 0).sum())}",
                writes=f"writes {int((of_site.write[unit] != 0).sum())} of {of_site.d_out}",
            )
            boxes.append(box)
        drawn[layer] = f"layer {layer}\n{of_site.d_in} inputs", boxes
    task = scores.settings.get("task")
    words = (
        "An arrow into a unit stands for all its read edges, one out of it for its write edges; + adds the writes.\n"
        "Filled: units with a label."
    )
    return draw_paths(drawn, f"Highest-ranked {kind} units" + (f" of {task}" if task else ""), words)
