"""Published anchors: the toys of superposition by the papers' own recipe, and SPD of them beside what SPD publishes.

    python -m tests.benchmarks.known --out DIR              goes on in DIR, also within a training
    python -m tests.benchmarks.known --out DIR --record     also into results/known.json

1. Losses. The papers print none, so the toys are trained here by the recipe that they print (10,000 steps of AdamW at a
   constant 5e-3, batches of 1,024 or 8,192; the residual MLP: the public code's 1,000 steps), and `swd.truth`'s toys are held
   against that, all on 100,000 fresh samples. The bar is 5 %.
2. SPD of each toy (swd_lens/truth/spd.py), measured after every tenth of its training: MMCS and ML2R with our definitions
   (`column_mmcs`), which are the paper's. They take the nearest piece however small; beside them are those of pieces with at
   least a tenth of the largest one's norm, whose number is said.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.step_cache import StepCache
from swd_lens.base.writer import writing
from swd_lens.truth.scores import column_mmcs
from swd_lens.truth.spd import STEPS, decompose, recipe
from swd_lens.truth.toys import PUBLISHED, residual_mlp, superposition
from tests.benchmarks.results import Table, record

# Features, dimensions, published batch, seeds of SPD.
TOYS = ((5, 2, 1024, (0, 1, 2)), (40, 10, 8192, (0,)))
LOSSES = ["toy", "loss here", "loss by the papers' recipe", "ratio", "best possible"]
FOUND = ["toy", "seed", "MMCS", "ML2R", "published", "pieces of a tenth", "their MMCS", "their ML2R", "lost of W"]
CURVE = ["toy", "seed", "step", "MMCS", "ML2R", "at work in W", "at work in W^T", "stochastic error", "lost of W"]
_ALIVE = 0.1


def losses(features: int, hidden: int, batch: int, cache: StepCache) -> list[str]:
    """A toy's loss, and that of the papers' recipe."""

    def make() -> dict[str, float]:
        ours = superposition(features, hidden)
        published = superposition(features, hidden, steps=10_000, batch=batch, falling=False)
        return {"ours": ours.loss, "published": published.loss, "reference": ours.reference if hidden == 2 else 0.0}

    return _loss_cells(f"TMS {features}-{hidden}", cache.values(("losses", f"{features}-{hidden}"), make, dict))


def residual_losses(cache: StepCache) -> list[str]:
    """The same of the residual MLP."""

    def make() -> dict[str, float]:
        ours = residual_mlp()
        return {"ours": ours.loss, "published": residual_mlp(steps=1000).loss, "reference": 0.0}

    return _loss_cells("residual MLP", cache.values(("losses", "residual"), make, dict))


def _loss_cells(name: str, values: dict[str, float]) -> list[str]:
    ratio = values["ours"] / values["published"]
    best = f"{values['reference']:.6f}" if values["reference"] else ""
    return [name, f"{values['ours']:.6f}", f"{values['published']:.6f}", f"{ratio:.3f}", best]


def spd_of(features: int, hidden: int, seed: int, cache: StepCache) -> tuple[list[str], list[list[str]]]:
    """The row of a decomposition, and its curve."""
    name, toy = f"TMS {features}-{hidden}", superposition(features, hidden)
    assert toy.bias is not None
    found = decompose(toy.weight, toy.bias, recipe(features, hidden, seed=seed), cache=cache)
    norms = found.read.norm(dim=0) * found.write.norm(dim=1)
    alive = norms > _ALIVE * norms.max()
    last = found.curve[-1]
    kept = column_mmcs(toy.weight, found.read[:, alive], found.write[alive])
    published = " / ".join(f"{value:.3f}" for value in PUBLISHED[name])
    row = [name, str(seed), f"{last['MMCS']:.3f}", f"{last['ML2R']:.3f}", published, f"{int(alive.sum())} of {len(norms)}"]
    row += [f"{kept[0]:.3f}", f"{kept[1]:.3f}", f"{last['lost of W']:.4f}"]
    digits: dict[str, Any] = {"MMCS": 4, "ML2R": 3, "at work in W": 2, "at work in W^T": 2, "stochastic error": 6, "lost of W": 4}
    curve = [
        [name, str(seed), f"{int(each['step']):,}", *(f"{each[column]:.{n}f}" for column, n in digits.items())]
        for each in found.curve
    ]
    print(row, flush=True)
    return row, curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Published anchors of known units.")
    parser.add_argument("--out", type=Path, required=True, help="folder of finished parts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with writing(args.out, "known"):
        cache = StepCache(args.out, {"swd_lens": __version__})
        found = [spd_of(features, hidden, seed, cache) for features, hidden, _, seeds in TOYS for seed in seeds]
        lost = [*(losses(*toy[:3], cache) for toy in TOYS), residual_losses(cache)]
    tables = [
        Table("SPD of the toys of superposition", FOUND, [row for row, _ in found], ["left"] + ["right"] * 8),
        Table("Losses of the toys", LOSSES, lost, ["left"] + ["right"] * 4),
        Table("SPD by steps", CURVE, [row for _, curve in found for row in curve], ["left"] + ["right"] * 8),
    ]
    print("\n\n".join(f"{table.title}\n\n{table.markdown()}" for table in tables))
    if args.record:
        record("known", tables, threads=[args.threads], title="Published anchors", section="Solver", order=11, about=ABOUT)


ABOUT = [
    "SPD (Bushnaq et al., 2025) of the toy models on the models' own loss, by its published settings (components, minimality and "
    "its power, faithfulness, one gate of 16 neurons per component, Adam at 1e-3 along a cosine), W and its transpose tied as in "
    f"the public code, {STEPS:,} steps of 1,024 (5-2) and 512 samples (40-10) in place of 40,000 of 4,096, and 200 steps towards "
    "VU = W before, as in the public code's settings. MMCS and ML2R are of all pieces, as published, and of those with a tenth "
    "of the largest one's norm.",
    "The papers print no loss of their toys: these are held against the same toys trained by the papers' recipe here (constant "
    "rate; ours falls along a cosine, in fewer steps); 100,000 fresh samples.",
]


if __name__ == "__main__":
    main()
