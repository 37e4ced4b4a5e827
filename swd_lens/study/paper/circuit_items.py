"""Items that compare circuits of the same surface: a single matrix, exact controls, a whole MLP.

1. The methods of an item: SWD by every solver (materials.py), exact controls, what is trained; each made when its turn comes.
2. `Materials.compare` measures them: fidelity, scores, nested prefixes, on the tasks that are judged at the surface.
3. Tables: fidelity, costs at the item's targets for every ablation, the primary number. Pictures: the paper's frontiers, on both
   axes of cost. Sentences: what is matched, who needs the fewest edges, the primary number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from swd_lens.circuits import Comparison
from swd_lens.circuits.comparison import priced, typed
from swd_lens.circuits.measure import Threshold
from swd_lens.study.paper import primary
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.primary import Ratio
from swd_lens.study.paper.result import ItemResult, result_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.section import Picture, SectionTable
from swd_lens.train import baselines

_COSTS = ("edges", "units")


def single_matrix(materials: Materials, settings: ItemSettings) -> ItemResult:
    """One matrix: SWD beside its neurons and trained baselines, under every ablation."""
    site, sparsities = settings["site"], settings["sparsities"]
    methods = materials.solved(site, sparsities, {sparsities[-1]: settings["sparser_tokens"]})
    methods |= {"Neurons": materials.exact(site)["Neurons"], **materials.pruned(site, sparsities)}
    methods |= materials.trained_methods(site, settings["trained"])
    return _compared(materials, settings, {site: methods}, settings["ablations"])


def controls(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Matrices, each alone: SWD beside exact factorizations of it, and those pruned to SWD's number of edges."""
    sparsities, seeds = settings["sparsities"], range(settings["random_b_seeds"])
    of_sites = {}
    for site in (settings["site"], *settings["further_sites"]):
        methods = materials.solved(site, sparsities) | materials.exact(site) | materials.pruned(site, sparsities)
        of_sites[site] = methods | materials.as_role(
            "control", {"Random-B": baselines.random_b_seeds(materials.model, site, seeds)}
        )
    return _compared(materials, settings, of_sites, ["mean"])


def mlp(materials: Materials, settings: ItemSettings) -> ItemResult:
    """A whole MLP: its matrices factorized one after the other, beside what is trained on its input and output."""
    site, sparsities = settings["site"], settings["sparsities"]
    matrices = settings["matrices"]
    methods = materials.solved(matrices, sparsities)
    methods |= {"Neurons": materials.exact(matrices)["Neurons"], **materials.pruned(matrices, sparsities)}
    methods |= materials.trained_methods(site, settings["trained"])
    return _compared(materials, settings, {site: methods}, ["mean"])


def _compared(
    materials: Materials, settings: ItemSettings, surfaces: Mapping[str, Mapping[str, Any]], ablations: list[str]
) -> ItemResult:
    """Measure the methods of each surface, and say what came out. surfaces: what is replaced -> method -> its units, or what
    makes them."""
    how = {"recovered": settings["recovered"], "share_of_drop": settings["share_of_drop"]}
    ratios: list[Ratio] = []
    tables, pictures, words, of_surfaces = [], [], [], {}
    for surface, methods in surfaces.items():
        compared = materials.compare(surface, methods, ablations=ablations)
        where = f", {surface}" if len(surfaces) > 1 else ""
        swd = compared.in_role("swd", "paper")
        ratios += [ratio for name in swd for ratio in primary.ratios(compared, name, surface, **how)]
        tables.append(SectionTable.of(f"Fidelity on held-out text{where}", compared.fidelity()))
        for (_, ablation), each in compared.under_each().items():
            tables.append(costs_table(each, ablation, where, **how))
            for cost in _COSTS:
                title = f"Least {cost} by what the circuit recovers and takes, {ablation} ablation{where}"
                pictures.append(Picture.of(each.plot(cost), title, _cheapest(each, cost, how["recovered"])))
        pruned = materials.pruned(surface, settings["sparsities"])
        nulls, beside_random = _nulls(materials, surface, methods, compared, [*swd, *pruned])
        tables.append(SectionTable.of(f"Circuits beside random ones of the same edges, mean ablation{where}", nulls))
        references = [of_task.curves[compared.methods[compared.reference][0]] for of_task in compared.values()]
        firsts = {task: next(iter(of_task.curves.values())) for task, of_task in compared.items()}
        margins = [f"{task} {curve.q_dense:.3g} ({curve.accuracy_dense:.0%} right)" for task, curve in firsts.items()]
        of_surface = [
            f"Margins of the dense model in logits: {', '.join(margins)}.",
            *(curve.in_words() for curve in references if not curve.carries),
            compared.matching(),
            *(_cheapest(each, "edges", how["recovered"]) for each in compared.under_each().values()),
            beside_random,
        ]
        words += [f"{surface}: {each}" for each in of_surface] if where else of_surface
        of_surfaces[surface] = _numbers(compared, nulls)
    tests = primary.tests(ratios)
    caption = "Edges of SWD over those of the cheapest control of no worse CE and KL"
    tables.append(SectionTable.of(caption, primary.table_of_ratios(ratios)))
    tables.append(
        SectionTable.of(
            "SWD beside each control: surfaces on which it needs fewer edges and more (sign test)", primary.table_of_tests(tests)
        )
    )
    said = primary.in_words(ratios, tests)
    pictures.insert(0, Picture.of(primary.plot(ratios), caption, said[0]))
    findings = [*materials.left_out_in_words(), *words, *said]
    numbers = {"surfaces": of_surfaces, "ratios": [ratio.as_dict() for ratio in ratios]}
    numbers["tests"] = [test.as_dict() for test in tests]
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _numbers(compared: Comparison, nulls: pd.DataFrame) -> dict[str, Any]:
    """Collect everything that was measured of a surface's methods."""
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
) -> tuple[pd.DataFrame, str]:
    """Tabulate, per task and method, its cheapest circuit, random circuits of the same edges, and the rank p-values; and count in
    a sentence the circuits beside which no random one does as well."""
    rows = []
    for task, of_task in compared.items():
        for method in tested:
            null = materials.null(surface, method, methods[method], of_task.curves[method])
            if null is not None:
                of_value = null.table().set_index("measure")
                row: dict[str, Any] = {"task": task, "method": method, "edges": int(null.rows["edges"].iloc[0])}
                row["random circuits as good"] = of_value.loc["recovered", "as good"]
                for value, p in (("recovered", null.recovered_p), ("drop", null.drop_p)):
                    row |= {value: of_value.loc[value, "circuit"], f"random {value}": of_value.loc[value, "random mean"]}
                    row[f"p of {value}"] = p
                rows.append(row)
    columns = ["task", "method", "edges", "random circuits as good", "recovered", "random recovered", "p of recovered"]
    nulls = pd.DataFrame(rows, columns=[*columns, "drop", "random drop", "p of drop"])
    if nulls.empty:
        return nulls, "No circuit is left to set beside random ones: none reaches the threshold with a unit."
    best = int((nulls["random circuits as good"] == 0).sum())
    return nulls, (
        f"Beside random circuits of the same edges, {best} of {len(nulls)} circuits recover more than every random "
        f"one; mean recovered {nulls['recovered'].mean():.3f} against {nulls['random recovered'].mean():.3f}, mean drop "
        f"{nulls['drop'].mean():.3g} against {nulls['random drop'].mean():.3g} logits."
    )


def costs_table(
    compared: Comparison, ablation: str, where: str = "", *, recovered: float | int, share_of_drop: float | int
) -> SectionTable:
    """Tabulate, per task and method, what is carried, and units and edges at the targets: recovered, sufficiency (the paper's),
    and a drop in logits that is the same for all methods.
    """
    rows = []
    for task, of_task in compared.items():
        for method, names in compared.methods.items():
            curves = [of_task.curves[name] for name in names]
            drop = share_of_drop * curves[0].q_dense
            row: dict[str, Any] = {"task": task, "method": method}
            row |= {"margin": _mean([c.q_full for c in curves]), "empty": _mean([c.q_empty for c in curves])}
            row["carried"] = "yes" if all(c.carries for c in curves) else "no"
            for of, threshold in (
                (f"recovered {recovered:g}", Threshold("recovered", recovered)),
                (f"sufficiency {recovered:g}", Threshold("sufficiency", recovered)),
                ("drop", Threshold("drop", drop)),
            ):
                for cost in _COSTS:
                    known = [value for c in curves if (value := priced(c, threshold, cost)) is not None]
                    row[f"{cost} at {of}"] = _mean(known) if known else None
            row |= {"drop asked for": drop, "drop of all units": _mean([float(c.rows["drop"].iloc[-1]) for c in curves])}
            out = compared.out_by(method)
            row |= {"CE difference": compared.ce_difference(method), "CE difference se": compared.ce_difference_se(method)}
            rows.append(row | {"KL difference": compared.kl_difference(method), "out by": ", ".join(out or ())})
    frame = typed(pd.DataFrame(rows), real={"CE difference", "CE difference se", "KL difference"})
    caption = f"Least cost, {ablation} ablation; means over seeds; the drop is in logits, {share_of_drop:g} of the dense margin"
    return SectionTable.of(f"{caption}{where}", frame)


def _mean(values: Sequence[float | int]) -> float:
    return sum(values) / len(values)


def _cheapest(compared: Comparison, cost: str, recovered: float | int) -> str:
    """Name, per task, the method with the least cost, and what SWD by our default needs beside it."""
    words, threshold = [], Threshold("recovered", recovered)
    for task, of_task in compared.items():
        least = {name: priced(curve, threshold, cost) for name, curve in of_task.curves.items()}
        known = {name: value for name, value in least.items() if value is not None}
        if not known:
            words.append(f"{task}: no method reaches it")
            continue
        best = min(known, key=lambda name: known[name])
        ours = {name: f"{known[name]:,}" if name in known else "never" for name in compared.in_role("swd")}
        beside = ", ".join(f"{name} {value}" for name, value in ours.items() if name != best)
        words.append(f"{task}: {best} {known[best]:,}" + (f" ({beside})" if beside else ""))
    _, ablation = compared.intervention
    return f"Fewest {cost} at {threshold}, {ablation} ablation: {'; '.join(words)}."
