"""Which side's coordinates units start as, where no neuron stands on either: circuits behind and in front of attention.

    python -m tests.benchmarks.sides --folder sides/                     every cell (minutes); goes on where it stopped
    python -m tests.benchmarks.sides --folder sides/ --record            and results/sides.json

1. A cell is a task and a matrix of the embedded model that it needs at the scoring position: attn_o between head dimensions (its
   input) and the residual stream (its output), attn_q and attn_v between the residual stream and head dimensions, and mlp_in
   between the residual stream and neurons, for comparison.
2. Methods: each side's own coordinates, exact and pruned; SWD from the short side ("paper"), from the inputs and from the
   outputs; SVD.
3. Measured as in bases.py, whose rows these are.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.bases import CALIBRATION, COLUMNS, HELDOUT, PROMPTS, SPARSITIES, cells_of, measured_row
from tests.benchmarks.results import Table, record

CELLS = (
    ("gendered_pronoun", "blocks.2.attn_o"),
    ("greater_than", "blocks.0.attn_o"),
    ("ioi", "blocks.3.attn_o"),
    ("greater_than", "blocks.1.attn_q"),
    ("greater_than", "blocks.0.attn_v"),
    ("gendered_pronoun", "blocks.3.mlp_in"),
    ("greater_than", "blocks.2.mlp_in"),
)
SIDES = ("input", "output")
_LAST = COLUMNS.index("half drop: units / edges") + 1


def methods() -> dict[str, Callable[..., Any]]:
    """Label -> factors of a model's site, its weight and Gram."""

    def solved(**how: Any) -> Callable[..., Any]:
        return lambda model, site, weight, gram: swd.solve(weight, gram, tokens=CALIBRATION, **how)

    makers: dict[str, Callable[..., Any]] = {"SVD": lambda model, site, weight, gram: baselines.svd(model, site.name)}
    for side in SIDES:
        makers[f"{side}s"] = lambda model, site, weight, gram, side=side: baselines.neurons(model, site.name, side)
    for s in SPARSITIES:
        makers[f"SWD s={s}"] = solved(sparsity=s)
        for side in SIDES:
            makers[f"{side}s pruned s={s}"] = solved(sparsity=s, preset="pruned", basis=side)
            makers[f"SWD from {side}s s={s}"] = solved(sparsity=s, basis=side)
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits by the side whose coordinates units start as.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = swd.load_default_model()
    texts = swd.text_tokens(CALIBRATION, split="train"), swd.text_tokens(HELDOUT, split="test")
    rows: list[list[str]] = []
    for task_name, place in CELLS:
        rows += [[task_name, place, method, *row] for method, row in _cell(model, texts, task_name, place, args.folder)]
    table = Table("Circuits by side", COLUMNS[:_LAST], rows, ["left"] * 3 + ["right"] * (_LAST - 3))
    print("\n" + table.markdown())
    if args.record:
        about = [
            "The embedded model; 150 training and 50 test prompts, 8,192 calibration and 4,096 held-out tokens of its own text. "
            "Interventions at the scoring position, where its tasks need no keys, and queries and values of one layer at most."
        ]
        title = "Units that start as coordinates of either side"
        record("sides", [table], threads=[args.threads], title=title, section="Circuits", order=10, about=about)


def _cell(model: Any, texts: Any, task_name: str, place: str, folder: Path) -> list[tuple[str, list[str]]]:
    """The rows of a cell; what is not there yet is measured."""
    task = swd.load_task(task_name, model, n_train=PROMPTS[0], n_test=PROMPTS[1])
    [site] = swd.find_sites(model, place)
    weight, gram, rows = host_of(model).weight(site), None, []
    for method, make in methods().items():
        file = folder / f"{task_name} {place} {method}.json"
        if not file.exists():
            if gram is None:
                gram = collect_grams(model, [site], texts[0]).by_site[place]
            file.write_text(json.dumps(measured_row(model, task, site, weight, gram, texts, make)))
        rows.append((method, cells_of(json.loads(file.read_text()))[: _LAST - 3]))
        print(" | ".join([task_name, place, method, *rows[-1][1]]), flush=True)
    return rows


if __name__ == "__main__":
    main()
