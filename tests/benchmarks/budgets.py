"""What allocated budgets and the kinds of calibration do to the embedded model with everything replaced.

    python -m tests.benchmarks.budgets --part calibration --out calibration.json
    python -m tests.benchmarks.budgets --part allocation --out allocation.json

1. calibration: uniform s, every kind of calibration on several samples of 16,384 calibration tokens (seeds of the train split).
   CE delta and KL on 32,768 held-out tokens: median and range over the samples, and on how many of them a kind is better than
   "dense".
2. allocation: uniform budgets beside `allocate` by="kl" and by="error" (and "damped": the geometric mean of uniform and by KL)
   at the same K, each factorized with the default solver and --calibration (sequential). --split validation is for choosing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import plain
from swd_lens.factorization.allocate import allocate
from swd_lens.factorization.allocation import Allocation, round_to

N_CALIBRATION, N_HELDOUT = 16_384, 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", choices=("calibration", "allocation"), required=True)
    parser.add_argument("--sparsities", nargs="+", type=float, default=None)
    parser.add_argument("--modes", nargs="+", default=["dense", "per_block", "sequential", "corrected"])
    parser.add_argument("--calibration", default="sequential", help="of part allocation")
    parser.add_argument("--budgets", nargs="+", default=["uniform", "kl", "error"], help="also: damped")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="calibration samples")
    parser.add_argument("--split", default="test")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="also write every number here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = swd.load_default_model()
    part = {"calibration": _calibration, "allocation": _allocation}[args.part]
    rows: list[dict[str, Any]] = []
    for row in part(model, args):
        rows.append(row)
        print(json.dumps(plain(row)), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(plain(rows), indent=1))
    _print_table(rows, reference="dense" if args.part == "calibration" else "uniform")


def _calibration(model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for s in args.sparsities or (0.685,):
        for seed in args.seeds:
            for mode in args.modes:
                yield {"s": s, "what": mode, "seed": seed, **_measured(model, s, seed, mode, args.split)}


def _allocation(model: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for s in args.sparsities or (0.5, 0.685, 0.75):
        for seed in args.seeds:
            for what in args.budgets:
                began = time.perf_counter()
                budgets = _budgets(model, s, what, seed)
                row = {"s": s, "what": what, "seed": seed, "allocate seconds": time.perf_counter() - began}
                yield row | _measured(model, budgets, seed, args.calibration, args.split)


def _budgets(model: Any, s: float, what: str, seed: int) -> float | Mapping[str, float]:
    if what == "uniform":
        return s
    tokens = swd.text_tokens(N_CALIBRATION, split="train", seed=seed)
    found = allocate(model, "all", s, tokens, by="error" if what == "error" else "kl", progress=False)
    return _damped(found) if what == "damped" else found


def _damped(found: Allocation) -> dict[str, float]:
    """Half way from uniform to allocated, in the logarithm of K; the same total."""
    middle = {site: (found.uniform[site] * found.allocated[site]) ** 0.5 for site in found}
    scale = found.edges / sum(middle.values())
    edges = round_to({site: k * scale for site, k in middle.items()}, found.edges)
    return {site: 1 - k / found.numel[site] for site, k in edges.items()}


def _measured(model: Any, sparsity: Any, seed: int, calibration: str, split: str) -> dict[str, Any]:
    tokens = swd.text_tokens(N_CALIBRATION, split="train", seed=seed)
    factors = swd.factorize(model, "all", sparsity=sparsity, tokens=tokens, calibration=calibration, progress=False)
    found = swd.fidelity(model, factors, swd.text_tokens(N_HELDOUT, split=split))
    return {"edges": factors.edges, "CE delta": found.ce_delta, "KL": found.kl, "top-1": found.top1_agreement}


def _print_table(rows: list[dict[str, Any]], reference: str) -> None:
    print(f"\n| s | what | edges | CE delta: median (range) | KL: median (range) | top-1 | KL below {reference} |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for s, what in dict.fromkeys((row["s"], row["what"]) for row in rows):
        its = {row["seed"]: row for row in rows if (row["s"], row["what"]) == (s, what)}
        beside = {row["seed"]: row for row in rows if (row["s"], row["what"]) == (s, reference)}
        pairs = [row["KL"] < beside[seed]["KL"] for seed, row in its.items() if seed in beside]
        edges = sorted({f"{row['edges']:,}" for row in its.values()})
        cells = [f"{s:g}", what, "/".join(edges)]
        for key in ("CE delta", "KL"):
            values = [row[key] for row in its.values()]
            cells.append(f"{statistics.median(values):.5f} ({min(values):.5f} to {max(values):.5f})")
        cells.append(f"{statistics.median(row['top-1'] for row in its.values()):.1%}")
        cells.append("" if what == reference else f"{sum(pairs)} of {len(pairs)}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
