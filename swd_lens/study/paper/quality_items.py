"""Items about the quality of a replaced matrix: tokens that it needs, and factors without data.

1. `tokens_needed`: CE delta, KL and relMSE of one matrix against tokens used, by SWD and trained baselines.
2. `zero_data`: factors that saw no text beside calibrated ones over sparsities, and their circuits beside a transcoder's.
"""

import itertools
import math
from functools import partial
from typing import Any

import pandas as pd

from swd_lens.circuits.comparison import priced
from swd_lens.circuits.measure import Threshold
from swd_lens.study.data_efficiency import data_efficiency
from swd_lens.study.paper.circuit_items import costs_table
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.result import ItemResult, result_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.section import Picture, SectionTable
from swd_lens.study.sweep import Sweep, SweepPoint
from swd_lens.units.factors import FactorSet


def tokens_needed(materials: Materials, settings: ItemSettings) -> ItemResult:
    """CE delta, KL and relMSE of one matrix against tokens used; tokens to SWD's quality at the profile's calibration tokens."""
    site, counts, sparsities = settings["site"], settings["token_counts"], settings["sparsities"]
    methods: dict[str, Any] = {
        f"{solver} s={s:g}": {"sparsity": s, "progress": False, **materials.solver(solver)}
        for s in sparsities
        for solver in ("SWD (paper)", "SWD")
    }
    methods |= materials.trained_methods(site, settings["trained"])
    materials.on_step(f"measure {site} after {len(counts)} numbers of tokens")
    measured = data_efficiency(
        materials.model,
        site,
        methods,
        heldout=materials.heldout,
        tokens=materials.fitted_on(max(counts)),
        token_counts=counts,
        checkpoints=settings["checkpoints"] or None,
        out=materials.folder / "data-efficiency" / "points.json",
        progress=materials.progress,
    )
    table = measured.table()
    table["CE delta se"] = [point.fidelity.ce_delta_se for point in measured.points]
    reference = f"SWD (paper) s={sparsities[0]:g}"
    # Count, for every method, the fewest tokens to the reference's CE delta at the profile's calibration tokens.
    asked = settings["calibration_tokens"]
    points = [point for point in measured.points if point.method == reference]
    at = min(points, key=lambda point: abs(point.tokens - asked))
    exactly = measured.tokens_to_reach(at.fidelity.ce_delta)
    within = measured.tokens_to_reach(at.fidelity.ce_delta + settings["tolerance"])
    rows = [
        {
            "method": method,
            "reference": f"{reference} at {at.tokens:,} tokens",
            "its CE delta": at.fidelity.ce_delta,
            "tokens to it": exactly[method],
            "tokens to within the tolerance": within[method],
            "times the reference's": (within[method] or math.nan) / at.tokens,
        }
        for method in measured.methods
    ]
    reached = pd.DataFrame(rows).astype({"tokens to it": "Int64", "tokens to within the tolerance": "Int64"})
    ratios = [
        f"{row['method']} {'never' if math.isnan(times) else f'{times:.3g} times as many'}"
        for row in reached.to_dict("records")
        for times in [row["times the reference's"]]
    ]
    last = table.groupby("method", sort=False).tail(1)
    words = [
        f"{row['method']} {row['CE delta']:+.4f} ± {row['CE delta se']:.4f} after {row['tokens']:,}"
        for row in last.to_dict("records")
    ]
    findings = [
        f"CE deltas in nats after the most tokens: {'; '.join(words)}.",
        f"Tokens to within the tolerance of {reached['reference'].iloc[0]} (CE delta {reached['its CE delta'].iloc[0]:+.4f}): "
        f"{'; '.join(ratios)}.",
    ]
    title = f"Quality of {site} replaced, against tokens used"
    tables = [SectionTable.of("Every point", table), SectionTable.of("Tokens to the quality of SWD", reached)]
    return result_of(settings, materials, findings, tables, [Picture.of(measured.plot(), title, findings[0])], measured.as_dict())


def zero_data(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Factors without and with calibration over sparsities: weights, behaviour, circuits; beside neurons and a transcoder."""
    site, grid = settings["site"], settings["grid"]
    label = settings["solver"]
    made = {
        _named(s, without): partial(materials.swd, site, s, label, tokens=0 if without else None)
        for s in grid
        for without in (True, False)
    }
    methods = materials.as_role("swd", made)
    cheap = {"Neurons": materials.exact(site)["Neurons"]}
    cheap |= materials.pruned(site, settings["sparsities"], ["pruned"])
    cheap |= materials.trained_methods(site, settings["trained"])
    compared = materials.compare(f"{site}, {label}", {**methods, **cheap})
    points = []
    for s, without in itertools.product(grid, (True, False)):
        name = _named(s, without)
        factors: FactorSet = methods[name]()
        (f,) = factors.values()
        error = float(f.provenance["relative_frobenius"])
        curves = {task: of_task.curves[name] for task, of_task in compared.items()}
        points.append(SweepPoint(s, without, factors.edges, f.n_units, error, compared.fidelities[name], curves))
    swept = Sweep(points, (0.5, settings["recovered"]), (settings["share_of_drop"],), settings["tolerance"], {"site": site})
    table = swept.table()
    shown: Any = table[[name for name in table if ":" not in str(name)]]
    norms = {(point.sparsity, point.zero_data): point.relative_frobenius for point in points}
    beside = "; ".join(f"s={s:g} {norms[s, True]:.3f} beside {norms[s, False]:.3f}" for s in grid)
    fewest, threshold = [], Threshold("recovered", settings["recovered"])
    for task in points[0].curves:
        costs = [(priced(point.curves[task], threshold, "units"), point) for point in points if point.zero_data]
        known = [(cost, point.sparsity) for cost, point in costs if cost is not None]
        fewest.append(f"{task} never" if not known else "{}: {:,} at s={:g}".format(task, *min(known)))
    findings = [
        f"Relative Frobenius norm of the error, zero-data beside calibrated: {beside}.",
        f"Fewest units of a zero-data circuit at {threshold}: {'; '.join(fewest)}.",
    ]
    tables = [
        SectionTable.of("Weights and behaviour", shown),
        costs_table(compared, "mean", recovered=settings["recovered"], share_of_drop=settings["share_of_drop"]),
    ]
    frontiers = compared.without([_named(s, False) for s in grid])
    pictures = [
        Picture.of(swept.plot(), "Errors and circuits over sparsities", findings[0]),
        *(
            Picture.of(frontiers.plot(cost), f"Least {cost} of zero-data circuits, beside neurons and a transcoder", findings[-1])
            for cost in ("edges", "units")
        ),
    ]
    return result_of(settings, materials, findings, tables, pictures, swept.as_dict())


def _named(sparsity: float | int, without: bool) -> str:
    return f"SWD {'zero-data' if without else 'calibrated'} s={sparsity:g}"
