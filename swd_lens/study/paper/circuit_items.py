"""Items that compare circuits of the same surface: a single matrix, exact controls, a whole MLP.

1. The methods of an item: SWD by every solver (replacements.py), exact controls, what is trained; each made when its turn comes.
2. `Materials.compare` measures them: fidelity, scores, nested prefixes, on the tasks that are judged at the surface.
3. Tables: fidelity, costs at the item's targets for every ablation, the primary number. Pictures: the paper's frontiers, on both
   axes of cost. Sentences: what is matched, who needs the fewest edges, the primary number.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from swd_lens.circuits import Comparison
from swd_lens.circuits.comparison import typed
from swd_lens.study.paper import primary
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.primary import Ratio
from swd_lens.study.paper.replacements import SOLVERS
from swd_lens.study.paper.result import ItemResult, result_of, table_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.section import Picture, SectionTable
from swd_lens.train import baselines

_COSTS = ("edges", "units")


def single_matrix(materials: Materials, settings: ItemSettings) -> ItemResult:
    """One matrix: SWD beside its neurons and trained baselines, under every ablation."""
    site, sparsities = settings["site"], settings["sparsities"]
    methods = materials.solved(site, sparsities, {sparsities[-1]: settings["sparser_tokens"]})
    methods |= {"Neurons": materials.exact(site)["Neurons"], **materials.pruned(site, sparsities)}
    methods |= {spec["label"]: partial(materials.trained, site, spec) for spec in settings["trained"]}
    return _compared(materials, settings, {site: methods}, settings["ablations"])


def controls(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Matrices, each alone: SWD beside exact factorizations of it, and those pruned to SWD's number of edges."""
    sparsities, seeds = settings["sparsities"], range(settings["random_b_seeds"])
    of_sites = {}
    for site in (settings["site"], *settings["further_sites"]):
        methods = materials.solved(site, sparsities) | materials.exact(site) | materials.pruned(site, sparsities)
        of_sites[site] = methods | {"Random-B": baselines.random_b_seeds(materials.model, site, seeds)}
    return _compared(materials, settings, of_sites, ["mean"])


def mlp(materials: Materials, settings: ItemSettings) -> ItemResult:
    """A whole MLP: its matrices factorized one after the other, beside what is trained on its input and output."""
    site, sparsities = settings["site"], settings["sparsities"]
    matrices = settings["matrices"]
    methods = materials.solved(matrices, sparsities)
    methods |= {"Neurons": materials.exact(matrices)["Neurons"], **materials.pruned(matrices, sparsities)}
    methods |= {spec["label"]: partial(materials.trained, site, spec) for spec in settings["trained"]}
    return _compared(materials, settings, {site: methods}, ["mean"])


def _compared(
    materials: Materials, settings: ItemSettings, surfaces: Mapping[str, Mapping[str, Any]], ablations: list[str]
) -> ItemResult:
    """Measure the methods of each surface, and say what came out.

    Args:
        surfaces: what is replaced -> method -> its units, or what makes them.
    """
    how = {"sufficiency": settings["sufficiency"], "share_of_drop": settings["share_of_drop"]}
    ratios: list[Ratio] = []
    tables, pictures, words, of_surfaces = [], [], [], {}
    for surface, methods in surfaces.items():
        compared = materials.compare(surface, methods, ablations=ablations)
        where = f", {surface}" if len(surfaces) > 1 else ""
        swd = [name for name in compared.methods if name.startswith(tuple(SOLVERS))]
        ratios += [ratio for name in swd for ratio in primary.ratios(compared, name, surface, **how)]
        tables.append(table_of(f"Fidelity on held-out text{where}", compared.fidelity()))
        for (_, ablation), each in compared.under_each().items():
            tables.append(costs_table(each, ablation, where, **how))
            for cost in _COSTS:
                title = f"Least {cost} by what the circuit keeps and takes, {ablation} ablation{where}"
                pictures.append(Picture.of(each.plot(cost), title, _cheapest(each, cost, how["sufficiency"])))
        nulls = _nulls(materials, surface, methods, compared, [*swd, *(n for n in methods if "pruned" in n)])
        tables.append(table_of(f"Circuits beside random ones of the same edges, mean ablation{where}", nulls))
        of_surface = [
            _dense(compared),
            compared.matching(),
            *(_cheapest(each, "edges", how["sufficiency"]) for each in compared.under_each().values()),
            _nulls_in_words(nulls),
        ]
        words += [f"{surface}: {each}" for each in of_surface] if where else of_surface
        of_surfaces[surface] = _numbers(compared, nulls)
    ratios = primary.adjusted(ratios)
    caption = "Edges of SWD over those of the best control of no worse CE"
    tables.append(table_of(caption, primary.table_of_ratios(ratios)))
    said = primary.in_words(ratios)
    pictures.insert(0, Picture.of(primary.plot(ratios), f"{caption}, and 95 % intervals over prompts", said[0]))
    findings = [*materials.left_out_in_words(), *words, *said]
    numbers = {"surfaces": of_surfaces, "ratios": [ratio.as_dict() for ratio in ratios]}
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _numbers(compared: Comparison, nulls: pd.DataFrame) -> dict[str, Any]:
    """Everything that was measured of a surface's methods."""
    return {
        "fidelity": {name: measured.as_dict() for name, measured in compared.fidelities.items()},
        "nulls": nulls.to_dict("records"),
        "curves": [
            {"ablation": ablation, "method": name, **curve.as_dict()}
            for (_, ablation), each in compared.under_each().items()
            for of_task in each.values()
            for name, curve in of_task.curves.items()
        ],
    }


def _nulls(
    materials: Materials, surface: str, methods: Mapping[str, Any], compared: Comparison, tested: Sequence[str]
) -> pd.DataFrame:
    """Per task and method: its cheapest sufficient circuit, random circuits of the same edges, and the rank p-values."""
    rows = []
    for task, of_task in compared.items():
        for method in tested:
            null = materials.null(surface, method, methods[method], of_task.curves[method])
            if null is not None:
                of_value = null.table().set_index("measure")
                row: dict[str, Any] = {"task": task, "method": method, "edges": int(null.rows["edges"].iloc[0])}
                row["random circuits as good"] = of_value.loc["sufficiency", "as good"]
                for value, p in (("sufficiency", null.sufficiency_p), ("drop", null.necessity_p)):
                    row |= {
                        value: of_value.loc[value, "circuit"],
                        f"random {value}": of_value.loc[value, "random mean"],
                    }
                    row[f"p of {value}"] = p
                rows.append(row)
    columns = [
        "task",
        "method",
        "edges",
        "random circuits as good",
        "sufficiency",
        "random sufficiency",
        "p of sufficiency",
    ]
    return pd.DataFrame(rows, columns=[*columns, "drop", "random drop", "p of drop"])


def _nulls_in_words(nulls: pd.DataFrame) -> str:
    """In how many circuits no random one does as well."""
    if nulls.empty:
        return "No circuit is left to set beside random ones: none reaches the sufficiency with a unit."
    best = int((nulls["random circuits as good"] == 0).sum())
    return (
        f"Beside random circuits of the same edges, {best} of {len(nulls)} circuits keep more of the margin than every random "
        f"one; mean sufficiency {nulls['sufficiency'].mean():.3f} against {nulls['random sufficiency'].mean():.3f}, mean drop "
        f"{nulls['drop'].mean():.3g} against {nulls['random drop'].mean():.3g} logits."
    )


def costs_table(
    compared: Comparison, ablation: str, where: str = "", *, sufficiency: float | int, share_of_drop: float | int
) -> SectionTable:
    """Per task and method: units and edges at the sufficiency, and at the drop in logits that is the same for all methods."""
    rows = []
    for task, of_task in compared.items():
        for method, names in compared.methods.items():
            curves = [of_task.curves[name] for name in names]
            drop = share_of_drop * curves[0].q_dense
            row: dict[str, Any] = {
                "task": task,
                "method": method,
                "margin": sum(c.q_full for c in curves) / len(curves),
            }
            for target, column, threshold in (
                (f"sufficiency {sufficiency:g}", "sufficiency", sufficiency),
                (f"drop of {drop:.3g} logits", "drop", drop),
            ):
                reaching = [c.rows[c.rows[column] >= threshold] for c in curves]
                reached = [rows for rows in reaching if len(rows)]
                for cost in _COSTS:
                    mean = sum(int(rows[cost].min()) for rows in reached) / len(reached) if reached else None
                    row[f"{cost} at {target.split(' of ')[0]}"] = mean
            whole = sum(float(c.rows["drop"].iloc[-1]) for c in curves) / len(curves)
            row |= {"drop asked for": drop, "drop of all units": whole}
            row |= {"CE difference": compared.ce_difference(method)}
            rows.append(row | {"CE difference se": compared.ce_difference_se(method)})
    frame = typed(pd.DataFrame(rows), real={"CE difference", "CE difference se"})
    caption = f"Least cost, {ablation} ablation; means over seeds; the drop is in logits, {share_of_drop:g} of the dense margin"
    return table_of(f"{caption}{where}", frame)


def _dense(compared: Comparison) -> str:
    """How well the dense model does the tasks."""
    words = []
    for task, of_task in compared.items():
        curve = next(iter(of_task.curves.values()))
        words.append(f"{task} {curve.q_dense:.3g} ({curve.accuracy_dense:.0%} right)")
    return f"Margins of the dense model in logits: {', '.join(words)}."


def _cheapest(compared: Comparison, cost: str, sufficiency: float | int) -> str:
    """Per task the method with the least cost at a sufficiency, and what SWD by our default needs beside it."""
    words = []
    for task, of_task in compared.items():
        least = {name: curve.cost_at(sufficiency=sufficiency, cost=cost) for name, curve in of_task.curves.items()}
        known = {name: value for name, value in least.items() if value is not None}
        if not known:
            words.append(f"{task}: no method reaches it")
            continue
        best = min(known, key=lambda name: known[name])
        if known[best] == 0:
            words.append(f"{task}: the empty circuit of {best} suffices")
            continue
        ours = {name: f"{known[name]:,}" if name in known else "never" for name in least if name.startswith("SWD s=")}
        beside = ", ".join(f"{name} {value}" for name, value in ours.items() if name != best)
        words.append(f"{task}: {best} {known[best]:,}" + (f" ({beside})" if beside else ""))
    _, ablation = compared.intervention
    return f"Fewest {cost} at sufficiency {sufficiency:g}, {ablation} ablation: {'; '.join(words)}."
