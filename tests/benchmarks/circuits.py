"""What circuits of the embedded model cost: SWD beside the exact controls, wider and sparser SWD, prefixes beside refined sets.

    python -m tests.benchmarks.circuits --part controls --out controls.json
    python -m tests.benchmarks.circuits --part widths --out widths.json
    python -m tests.benchmarks.circuits --part refine --out refine.json

All on 16,384 calibration and 16,384 held-out tokens, 300 training and 200 test prompts per task, positions="scoring" unless
`--positions all`; active edges at sufficiency 0.9, least over the prefix grid.

1. controls: every mlp_out by itself, all of them, all attn_o, and the full surface; SWD s=0.5 and 0.75, SVD, ten seeds of
   Random-B. A row says how many of the ten seeds, and whether SVD, need more edges than SWD s=0.5.
2. widths: units None and "2x" at rising s; CE delta and edges, so that settings of the same CE delta can be compared.
3. refine: the best prefix and the refined circuit (SWD s=0.5), searched on training prompts, judged on test prompts.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import plain
from swd_lens.tasks.generators import FAMILIES

SURFACES = {
    **{f"blocks.{layer}.mlp_out": f"blocks.{layer}.mlp_out" for layer in range(4)},
    "all mlp_out": "mlp_out",
    "all attn_o": "attn_o",
    "full surface": "all",
}
WIDE = ("all mlp_out", "all attn_o", "full surface")
SPARSITIES = (0.5, 0.625, 0.75, 0.8, 0.85, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", choices=("controls", "widths", "refine"), required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--positions", default="scoring")
    parser.add_argument("--surfaces", nargs="+", default=list(SURFACES))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None, help="also write every number here, as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore", swd.UndefinedSufficiencyWarning)
    torch.set_num_threads(args.threads)
    model = swd.load_default_model()
    tasks = [swd.load_task(name, model, n_train=300, n_test=200) for name in FAMILIES]
    rows: list[dict[str, Any]] = []
    for row in {"controls": _controls, "widths": _widths, "refine": _refine}[args.part](model, tasks, args):
        if not rows:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(_shown(value) for value in row.values()) + " |", flush=True)
        rows.append(row)
    if args.out is not None:
        args.out.write_text(json.dumps(plain(rows), indent=1))


def _shown(value: Any) -> str:
    if value is None:
        return "never"
    return f"{value:+.5f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _factors(model: Any, surface: str, sparsity: float, units: str | None = None) -> Any:
    tokens = swd.text_tokens(16_384, split="train")
    return swd.factorize(model, SURFACES[surface], sparsity=sparsity, tokens=tokens, units=units, progress=False)


def _controls(model: Any, tasks: list[Any], args: argparse.Namespace) -> Any:
    heldout = swd.text_tokens(16_384, split="test")
    for surface in args.surfaces:
        seeds = swd.baselines.random_b_seeds(model, SURFACES[surface], seeds=range(args.seeds))
        methods = {
            "SWD s=0.5": _factors(model, surface, 0.5),
            "SWD s=0.75": _factors(model, surface, 0.75),
            "SVD": swd.baselines.svd(model, SURFACES[surface]),
            "Random-B": seeds,
        }
        found = swd.compare(
            methods, model, tasks, tokens=heldout, positions=args.positions, evaluation={"random_sets": 0}
        )
        for task in tasks:
            curves = found[task.name].curves
            edges = {name: curve.cost_at(sufficiency=0.9) for name, curve in curves.items()}
            random = [edges[f"Random-B/{seed}"] for seed in range(args.seeds)]
            reached = sorted(cost for cost in random if cost is not None)
            ours = edges["SWD s=0.5"]
            yield {
                "surface": surface,
                "task": task.name,
                "empty circuit's sufficiency": f"{curves['SWD s=0.5'].rows['sufficiency'].iloc[0]:.2f}",
                "SWD s=0.5": ours,
                "CE delta": found.fidelities["SWD s=0.5"].ce_delta,
                "SWD s=0.75": edges["SWD s=0.75"],
                "CE delta .75": found.fidelities["SWD s=0.75"].ce_delta,
                "SVD": edges["SVD"],
                "Random-B, least": reached[0] if reached else None,
                "Random-B, median": reached[len(reached) // 2] if reached else None,
                "fewer than": _fewer(ours, edges["SVD"], random),
            }


def _fewer(ours: int | None, svd: int | None, random: list[int | None]) -> str:
    """Whom SWD beats."""
    inf = float("inf")
    mine = inf if ours is None else ours
    beaten = sum(mine < (inf if cost is None else cost) for cost in random)
    return f"SVD {'yes' if mine < (inf if svd is None else svd) else 'no'}, seeds {beaten}/{len(random)}"


def _widths(model: Any, tasks: list[Any], args: argparse.Namespace) -> Any:
    heldout = swd.text_tokens(16_384, split="test")
    for surface in [name for name in WIDE if name in args.surfaces]:
        for units in (None, "2x"):
            for sparsity in SPARSITIES:
                factors = _factors(model, surface, sparsity, units)
                measured = swd.fidelity(model, factors, heldout)
                row: dict[str, Any] = {"surface": surface, "units": units or "1x", "s": f"{sparsity:g}"}
                row |= {"CE delta": measured.ce_delta, "KL": measured.kl}
                for task in tasks:
                    scores = swd.attribute(model, factors, task, positions=args.positions)
                    curve = swd.evaluate(model, factors, task, scores, random_sets=0)
                    row[task.name] = curve.cost_at(sufficiency=0.9)
                    row[f"{task.name}, half drop"] = curve.cost_at(necessity=0.5)
                yield row


def _refine(model: Any, tasks: list[Any], args: argparse.Namespace) -> Any:
    for surface in [name for name in WIDE if name in args.surfaces]:
        factors = _factors(model, surface, 0.5)
        for task in tasks:
            scores = swd.attribute(model, factors, task, positions=args.positions)
            found = swd.refine(model, factors, task, scores, sufficiency=0.9)
            table = found.table().set_index("circuit")
            row: dict[str, Any] = {"surface": surface, "task": task.name}
            for name in ("prefix", "refined"):
                row[f"{name}: units / edges"] = f"{table.loc[name, 'units']:,} / {table.loc[name, 'edges']:,}"
                row[f"{name}: sufficiency train"] = f"{table.loc[name, 'sufficiency (train)']:.3f}"
                row[f"{name}: test"] = (
                    f"{table.loc[name, 'sufficiency (test)']:.3f} ({table.loc[name, 'sufficiency low (test)']:.3f} to "
                    f"{table.loc[name, 'sufficiency high (test)']:.3f})"
                )
            yield row


if __name__ == "__main__":
    main()
