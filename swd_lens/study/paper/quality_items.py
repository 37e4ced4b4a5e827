"""Items about the quality of replacements: tokens that they need, factors without data, a model whose every matrix is replaced.

1. `tokens_needed`: CE delta, KL and relMSE of one matrix against tokens used, by SWD and trained baselines.
2. `zero_data`: factors that saw no text beside calibrated ones over sparsities, and their circuits beside a transcoder's.
3. `full_model`: everything replaced and tuned, beside a host that was trained sparse: CE, continuations, circuits.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.circuits import Comparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts import find_sites
from swd_lens.study.data_efficiency import data_efficiency
from swd_lens.study.efficiency import DataEfficiency
from swd_lens.study.paper.circuit_items import costs_table
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.result import ItemResult, result_of, table_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.replacement import FINETUNED, ModelReplacement, replace_model
from swd_lens.study.section import Picture
from swd_lens.study.sweep import Sweep, SweepPoint
from swd_lens.train import baselines
from swd_lens.train.baselines import SparsePretrained
from swd_lens.train.folder import TrainingFolder
from swd_lens.units.factors import Factors, FactorSet


def tokens_needed(materials: Materials, settings: ItemSettings) -> ItemResult:
    """CE delta, KL and relMSE of one matrix against tokens used; tokens to SWD's quality at the profile's calibration tokens."""
    site, counts, sparsities = settings["site"], settings["token_counts"], settings["sparsities"]
    methods: dict[str, Any] = {
        f"{solver} s={s:g}": {"sparsity": s, "progress": False, **materials.solver(solver)}
        for s in sparsities
        for solver in ("SWD (paper)", "SWD")
    }
    methods |= {spec["label"]: partial(materials.trained, site, spec) for spec in settings["trained"]}
    materials.on_step(f"measure {site} after {len(counts)} numbers of tokens")
    measured = data_efficiency(
        materials.model,
        site,
        methods,
        heldout=materials.heldout,
        tokens=materials.fitted_on(max(counts)),
        token_counts=counts,
        out=materials.folder / "data-efficiency" / "points.json",
        progress=materials.progress,
    )
    table = measured.table()
    table["CE delta se"] = [point.fidelity.ce_delta_se for point in measured.points]
    reached = _tokens_to_reach(measured, f"SWD (paper) s={sparsities[0]:g}", settings)
    last = table.groupby("method", sort=False).tail(1)
    words = [
        f"{row['method']} {row['CE delta']:+.4f} ± {row['CE delta se']:.4f} after {row['tokens']:,}"
        for row in last.to_dict("records")
    ]
    findings = [f"CE deltas in nats after the most tokens: {'; '.join(words)}.", _ratios_of_tokens(reached)]
    title = f"Quality of {site} replaced, against tokens used"
    tables = [table_of("Every point", table), table_of("Tokens to the quality of SWD", reached)]
    return result_of(
        settings, materials, findings, tables, [Picture.of(measured.plot(), title, findings[0])], measured.as_dict()
    )


def _tokens_to_reach(measured: DataEfficiency, reference: str, settings: ItemSettings) -> pd.DataFrame:
    """Of every method: the fewest tokens to the reference's CE delta at the profile's calibration tokens."""
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
    return pd.DataFrame(rows).astype({"tokens to it": "Int64", "tokens to within the tolerance": "Int64"})


def _ratios_of_tokens(reached: pd.DataFrame) -> str:
    first = reached.iloc[0]
    words = [_times(row) for row in reached.to_dict("records")]
    delta = f"{first['its CE delta']:+.4f}"
    return f"Tokens to within the tolerance of {first['reference']} (CE delta {delta}): {'; '.join(words)}."


def _times(row: dict[Any, Any]) -> str:
    times = row["times the reference's"]
    return (
        f"{row['method']} never" if times is None or math.isnan(times) else f"{row['method']} {times:.3g} times as many"
    )


# ---------------------------------------------------------------------------------------------- zero-data


def zero_data(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Factors without and with calibration over sparsities: weights, behaviour, circuits; beside a transcoder."""
    site, grid = settings["site"], settings["grid"]
    label = settings["solver"]
    methods: dict[str, Any] = {
        _named(s, without): partial(materials.swd, site, s, label, tokens=0 if without else None)
        for s in grid
        for without in (True, False)
    }
    frontier = {spec["label"]: partial(materials.trained, site, spec) for spec in settings["trained"]}
    compared = materials.compare(f"{site}, {label}", {**methods, **frontier})
    points = [
        _point(materials, compared, site, s, without, methods[_named(s, without)])
        for s in grid
        for without in (True, False)
    ]
    swept = Sweep(
        points, (0.5, settings["sufficiency"]), (settings["share_of_drop"],), settings["tolerance"], {"site": site}
    )
    table = swept.table()
    shown: Any = table[[name for name in table if ":" not in str(name)]]
    best = {s: _relative(points, s) for s in grid}
    findings = [
        "Relative Frobenius norm of the error, zero-data beside calibrated: "
        + "; ".join(f"s={s:g} {without:.3f} beside {with_:.3f}" for s, (without, with_) in best.items())
        + ".",
        *_smallest_circuits(points, settings["sufficiency"]),
    ]
    tables = [
        table_of("Weights and behaviour", shown),
        costs_table(compared, "mean", sufficiency=settings["sufficiency"], share_of_drop=settings["share_of_drop"]),
    ]
    frontiers = compared.without([_named(s, False) for s in grid])
    pictures = [
        Picture.of(swept.plot(), "Errors and circuits over sparsities", findings[0]),
        *(
            Picture.of(frontiers.plot(cost), f"Least {cost} of zero-data circuits, beside a transcoder", findings[-1])
            for cost in ("edges", "units")
        ),
    ]
    return result_of(settings, materials, findings, tables, pictures, swept.as_dict())


def _named(sparsity: float | int, without: bool) -> str:
    return f"SWD {'zero-data' if without else 'calibrated'} s={sparsity:g}"


def _point(
    materials: Materials, compared: Comparison, site: str, sparsity: float | int, without: bool, make: Any
) -> SweepPoint:
    factors: FactorSet = make()
    name = _named(sparsity, without)
    (f,) = factors.values()
    curves = {task: of_task.curves[name] for task, of_task in compared.items()}
    return SweepPoint(
        sparsity,
        without,
        factors.edges,
        f.n_units,
        float(f.provenance["relative_frobenius"]),
        compared.fidelities[name],
        curves,
    )


def _relative(points: list[SweepPoint], sparsity: float | int) -> tuple[float, float]:
    """(zero-data, calibrated)."""
    of_s = {point.zero_data: point.relative_frobenius for point in points if point.sparsity == sparsity}
    return of_s[True], of_s[False]


def _smallest_circuits(points: list[SweepPoint], sufficiency: float | int) -> list[str]:
    """Per task the zero-data circuit of fewest units that reaches the sufficiency, over all sparsities."""
    words = []
    for task in points[0].curves:
        costs = [
            (point.curves[task].cost_at(sufficiency=sufficiency, cost="units"), point)
            for point in points
            if point.zero_data
        ]
        known = [(cost, point.sparsity) for cost, point in costs if cost is not None]
        words.append(f"{task} never" if not known else "{}: {:,} at s={:g}".format(task, *min(known)))
    return [f"Fewest units of a zero-data circuit at sufficiency {sufficiency:g}: {'; '.join(words)}."]


# ---------------------------------------------------------------------------------------------- the whole model


def full_model(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Every matrix replaced, tuned on its supports, beside a host trained sparse: CE, what is written on, circuits."""
    model, folder = materials.model, materials.folder / "full-model"
    replaced = _replaced(materials, settings, folder)
    second = _trained_sparse(materials, settings, folder)
    assert replaced.after is not None and replaced.finetuned is not None
    n_matrices = len(find_sites(model, settings["sites"]))
    rows = [
        {"model": "dense", "tokens": None, "nonzeros": _entries(model, settings), "CE": replaced.before.ce_dense},
        _row("SWD", settings["factorization_tokens"], replaced.factors.edges, replaced.before),
        _row(
            "SWD-FT", settings["factorization_tokens"] + _tuned_tokens(replaced), replaced.factors.edges, replaced.after
        ),
    ]
    methods: dict[str, Any] = {"SWD-FT": partial(_of_sites, materials, replaced.finetuned, settings["circuit_sites"])}
    hosts: dict[str, Any] = {}
    if second is not None:
        ce = second.log["heldout_ce"].dropna().iloc[-1]
        rows.append(
            {
                "model": "trained sparse",
                "tokens": second.provenance["tokens"],
                "nonzeros": second.provenance["blocks"],
                "CE": ce,
            }
        )
        hosts["trained sparse"] = second.load()
        methods["trained sparse"] = partial(baselines.channels_of, hosts["trained sparse"], settings["circuit_sites"])
    methods["the dense model's channels"] = partial(baselines.neurons, model, settings["circuit_sites"])
    compared = materials.compare("full model", methods, hosts=hosts)
    table = pd.DataFrame(rows)
    how = {"sufficiency": settings["sufficiency"], "share_of_drop": settings["share_of_drop"]}
    tables = [table_of("Cross-entropy on held-out text", table), costs_table(compared, "mean", **how)]
    if replaced.samples is not None:
        tables.append(table_of("What the models write on", replaced.samples.table()))
    curve = _ce_curve(folder, settings, replaced, second)
    pictures = [Picture.of(curve, "Held-out CE against tokens used", "Dotted: the dense model.")]
    pictures += [
        Picture.of(compared.plot(cost), f"Least {cost}, whole model", compared.matching())
        for cost in ("edges", "units")
    ]
    findings = [_ce_sentence(replaced, n_matrices, second), compared.matching()]
    numbers = {"replacement": replaced.as_dict(), "table": table.to_dict("records")}
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _replaced(materials: Materials, settings: ItemSettings, folder: Path) -> ModelReplacement:
    steps = {"steps": settings["finetune_steps"]} if settings["finetune_steps"] else {}
    heldout = materials.heldout
    tuning = {"batch_size": settings["finetune_batch"], "heldout": heldout[: max(2, len(heldout) // 4)], **steps}
    return replace_model(
        materials.model,
        settings["sites"],
        heldout=heldout,
        sparsity=settings["sparsity"],
        tokens=materials.fitted_on(settings["factorization_tokens"]),
        budgets="uniform",
        calibration="sequential",
        **materials.solver(settings["solver"]),
        workers=materials.workers,
        finetune=settings["finetune"],
        finetune_tokens=materials.fitted_on(settings["finetune_tokens"]),
        finetune_options=tuning,
        prompts=settings["prompts"],
        out=folder,
        on_step=materials.on_step,
        progress=materials.progress,
    )


def _trained_sparse(materials: Materials, settings: ItemSettings, folder: Path) -> SparsePretrained | None:
    """The second host; None where the profile leaves it out."""
    schedule = settings["sparse_pretraining"]
    if not schedule:
        return None
    materials.on_step("train a second host sparse")
    return baselines.sparse_pretrain(
        materials.model,
        materials.fitted_on(schedule["stop_after"] * schedule["tokens_per_update"]),
        out=folder / "sparse",
        preset="paper",
        heldout=materials.heldout,
        progress=materials.progress,
        **schedule,
    )


def _of_sites(materials: Materials, factors: FactorSet, pattern: str) -> dict[str, Factors]:
    """Those of the factors whose units are candidates; the other matrices stay dense."""
    return {site.name: factors[site.name] for site in find_sites(materials.model, pattern)}


def _row(name: str, tokens: int, edges: int, measured: Fidelity) -> dict[str, Any]:
    row = {"model": name, "tokens": tokens, "nonzeros": edges, "CE": measured.ce, "CE delta": measured.ce_delta}
    return {**row, "CE delta se": measured.ce_delta_se, "KL": measured.kl}


def _entries(model: Any, settings: ItemSettings) -> int:
    return sum(site.d_in * site.d_out for site in find_sites(model, settings["sites"]))


def _tuned_tokens(replaced: ModelReplacement) -> int:
    """Unique tokens of the fine-tuning."""
    assert replaced.finetuned is not None
    return int(replaced.finetuned.provenance["finetune"]["tokens"])


def _ce_curve(folder: Path, settings: ItemSettings, replaced: ModelReplacement, second: SparsePretrained | None) -> Any:
    """Held-out CE against tokens used: the factors, their tuning, the sparse training; a matplotlib Figure."""
    figure, axes = new_figure(1, 1, width=5.6, height=3.4)
    ax, start = axes[0, 0], settings["factorization_tokens"]
    lines = TrainingFolder(folder / FINETUNED, {}, "finetune", ()).lines()
    tuned = [(start + line["tokens"], line["heldout_ce"]) for line in lines if line.get("heldout_ce") is not None]
    assert replaced.after is not None
    ends = [(start, replaced.before.ce), (start + _tuned_tokens(replaced), replaced.after.ce)]
    ax.plot(*zip(*ends, strict=True), "o", label="SWD, SWD-FT (all held-out text)", color=style(0)["color"])
    if tuned:
        ax.plot(*zip(*tuned, strict=True), label="tuning (a quarter of it)", linewidth=1.4, **style(1))
    if second is not None:
        rows = second.log.dropna(subset=["heldout_ce"])
        ax.plot(rows["tokens"], rows["heldout_ce"], label="trained sparse", linewidth=1.4, **style(2))
    ax.axhline(replaced.before.ce_dense, color=INK, linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set_xlabel("tokens used", fontsize=9, color=INK)
    ax.set_ylabel("cross-entropy (nats)", fontsize=9, color=INK)
    ax.set_title(literal(f"{settings['sites']} at s={settings['sparsity']:g}"), fontsize=9, color=INK)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _ce_sentence(replaced: ModelReplacement, n_matrices: int, second: SparsePretrained | None) -> str:
    before, after = replaced.before, replaced.after
    assert after is not None
    text = (
        f"All {n_matrices} matrices at s={replaced.factors.sparsity:.3g}: CE {before.ce:.4f} as factorized (delta "
        f"{before.ce_delta:+.4f} ± {before.ce_delta_se:.4f}), {after.ce:.4f} after fine-tuning ({after.ce_delta:+.4f} ± "
        f"{after.ce_delta_se:.4f}), {before.ce_dense:.4f} dense."
    )
    if second is None:
        return text
    ce = second.log["heldout_ce"].dropna().iloc[-1]
    return f"{text} Trained sparse from scratch, after {second.provenance['tokens']:,} tokens: {ce:.4f}."
