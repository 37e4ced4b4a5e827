"""Circuits of the embedded model: SWD beside the exact controls, wider and sparser SWD, prefixes beside refined sets.

    python -m tests.benchmarks.circuits --record                  all three parts; each goes to results/circuits_PART.json
    python -m tests.benchmarks.circuits --part refine

1. All parts: 16,384 calibration and 16,384 held-out tokens, 300 training, 200 validation and 200 test prompts per task. A cell is
   the active edges of the cheapest prefix that recovers .9 of what its surface carries on the validation prompts, or "no" where
   the surface does not carry the task.
2. controls: mlp_out of every layer, all of them, all attn_o, the full surface; SWD s=.5 and .75, SVD, ten seeds of Random-B; with
   interventions at the scoring position, and in every layer's mlp_out with interventions everywhere, too.
3. widths: units None and "2x" at rising s; CE delta and edges, so that settings of the same CE delta can be compared.
4. refine: the best prefix and the refined circuit (SWD s=.5), searched on training and validation prompts, judged on test ones.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import swd_lens as swd
from swd_lens.circuits import CostCurve
from swd_lens.circuits.comparison import priced
from swd_lens.circuits.measure import Threshold
from swd_lens.tasks.generators import FAMILIES
from tests.benchmarks.results import Table, record

LAYERS = {f"blocks.{layer}.mlp_out": f"blocks.{layer}.mlp_out" for layer in range(4)}
WIDE = {"all mlp_out": "mlp_out", "all attn_o": "attn_o", "full surface": "all"}
SPARSITIES = (0.5, 0.625, 0.75, 0.8, 0.85, 0.9)
SEEDS = range(10)
RECOVERED, HALF = Threshold("recovered", 0.9), Threshold("necessity", 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = swd.load_default_model()
    tasks = [swd.load_task(name, model, n_train=300, n_validation=200, n_test=200) for name in FAMILIES]
    for part in args.part:
        tables = list(PARTS[part](model, tasks))
        print(*(f"{table.title}\n\n{table.markdown()}" for table in tables), sep="\n\n", flush=True)
        if args.record:
            command = f"python -m tests.benchmarks.circuits --part {part} --record"
            about = ["300 training, 200 validation and 200 test prompts, 16,384 calibration and 16,384 held-out tokens."]
            said = {"title": TITLES[part], "section": "Circuits", "order": 1 + list(PARTS).index(part), "about": about}
            record(f"circuits_{part}", tables, command=command, threads=[args.threads], **said)


def _factors(model: Any, sites: str, sparsity: float, units: str | None = None) -> Any:
    tokens = swd.text_tokens(16_384, split="train")
    return swd.factorize(model, sites, sparsity=sparsity, tokens=tokens, units=units, progress=False)


def _cell(curve: CostCurve, threshold: Threshold = RECOVERED) -> str:
    cost = priced(curve, threshold, "edges")
    return "no" if not curve.carries else "never" if cost is None else f"{cost:,}"


def controls(model: Any, tasks: list[Any]) -> Iterator[Table]:
    """A table for each kind of position: edges of SWD beside those of the exact controls."""
    columns = ["surface", "task", "carried (logits)", "SWD s=0.5", "SWD s=0.75", "SVD", "Random-B: least (median) of ten"]
    columns.append("SWD s=0.5 cheaper than")
    named = {"scoring": "at the scoring position", "all": "everywhere"}
    for positions, surfaces in (("scoring", {**LAYERS, **WIDE}), ("all", LAYERS)):
        rows = [row for surface in surfaces.items() for row in _beside_controls(model, tasks, surface, positions)]
        title = f"Edges that recover 0.9 of what is carried, interventions {named[positions]}"
        yield Table(title, columns, rows, ["left"] * 2 + ["right"] * 5 + ["left"])


def _beside_controls(model: Any, tasks: list[Any], surface: tuple[str, str], positions: str) -> Iterator[list[str]]:
    name, sites = surface
    methods = {f"SWD s={s}": _factors(model, sites, s) for s in (0.5, 0.75)}
    methods |= {"SVD": swd.baselines.svd(model, sites), "Random-B": swd.baselines.random_b_seeds(model, sites, seeds=SEEDS)}
    heldout = swd.text_tokens(16_384, split="test")
    found = swd.compare(model, methods, tasks, tokens=heldout, positions=positions, evaluation={"random_sets": 0})
    for task in tasks:
        curves = found[task.name].curves
        ours = curves["SWD s=0.5"]
        carried = f"{ours.carried.logits:.2f} ± {ours.carried.se:.2f}"
        random = [curves[f"Random-B/{seed}"] for seed in SEEDS]
        costs = sorted(cost for curve in random if (cost := priced(curve, RECOVERED, "edges")) is not None)
        of_random = "no"
        if costs:
            of_random = f"{costs[0]:,} ({costs[len(costs) // 2]:,})" + (
                "" if len(costs) == len(random) else f", {len(costs)} carry"
            )
        cells = [_cell(curves[method]) for method in ("SWD s=0.5", "SWD s=0.75", "SVD")]
        yield [name, task.name, carried, *cells, of_random, _cheaper(ours, curves["SVD"], random)]


def _cheaper(ours: CostCurve, svd: CostCurve, random: list[CostCurve]) -> str:
    """The controls that need more edges than SWD, of those that carry the task as it does."""
    mine = priced(ours, RECOVERED, "edges")
    if mine is None:
        return "–"
    beaten = sum(mine < cost for curve in random if (cost := priced(curve, RECOVERED, "edges")) is not None)
    carry = sum(curve.carries for curve in random)
    of_svd = priced(svd, RECOVERED, "edges")
    beside_svd = "SVD does not carry it" if of_svd is None else "SVD" if mine < of_svd else "not SVD"
    return f"{beside_svd}; {beaten} of {carry}"


def widths(model: Any, tasks: list[Any]) -> Iterator[Table]:
    """Edges at both thresholds over widths and sparsities, with the CE delta that makes settings comparable."""
    heldout = swd.text_tokens(16_384, split="test")
    rows = []
    for surface, sites in WIDE.items():
        for units in (None, "2x"):
            for sparsity in SPARSITIES:
                factors = _factors(model, sites, sparsity, units)
                curves = [
                    swd.evaluate(model, factors, task, swd.attribute(model, factors, task), random_sets=0) for task in tasks
                ]
                cells = [f"{_cell(curve)} / {_cell(curve, HALF)}" if curve.carries else "no" for curve in curves]
                ce_delta = swd.fidelity(model, factors, heldout).ce_delta
                rows.append([surface, units or "1x", f"{sparsity:g}", f"{ce_delta:+.4f}", *cells])
    columns = ["surface", "units", "s", "CE delta", *(task.name for task in tasks)]
    yield Table("Edges at recovered 0.9 / at half the drop", columns, rows, ["left"] * 2 + ["right"] * (len(columns) - 2))


def refine(model: Any, tasks: list[Any]) -> Iterator[Table]:
    """The cheapest prefix and the refined circuit, with what both recover on test prompts."""
    rows = []
    for surface, sites in WIDE.items():
        if sites == "all":
            continue
        factors = _factors(model, sites, 0.5)
        for task in tasks:
            scores = swd.attribute(model, factors, task)
            if not swd.evaluate(model, factors, task, scores, random_sets=0).carries:
                rows.append([surface, task.name, "no", "", "no", ""])
                continue
            table = swd.refine(model, factors, task, scores, recovered=0.9).table().set_index("circuit")
            row = [surface, task.name]
            for of in (table.loc["prefix"], table.loc["refined"]):
                recovered, low, high = (of[f"recovered{bound} (test)"] for bound in ("", " low", " high"))
                row += [f"{int(of['units']):,} / {int(of['edges']):,}", f"{recovered:.3f} ({low:.3f} to {high:.3f})"]
            rows.append(row)
    columns = ["surface", "task", "best prefix: units / edges", "recovered on test prompts"]
    columns += ["refined: units / edges", "recovered on test prompts"]
    yield Table("Best prefix and refined circuit, recovered 0.9", columns, rows, ["left"] * 2 + ["right", "left"] * 2)


TITLES = {
    "controls": "Circuits beside the exact controls",
    "widths": "Wider or sparser factors at the same CE",
    "refine": "Refined circuits beside prefixes",
}
PARTS = {"controls": controls, "widths": widths, "refine": refine}


if __name__ == "__main__":
    main()
