"""Published anchors: the toys of superposition by the papers' own recipe, and SPD of them beside what SPD publishes.

    python -m tests.benchmarks.known --out DIR              goes on in DIR, also within a training
    python -m tests.benchmarks.known --out DIR --record     also into results/known.json
    python -m tests.benchmarks.known --out DIR --tenths 5   40 in 10 only half of the way

1. Losses. The papers print none, so the toys are trained here by the recipes that they print (AdamW at a constant 5e-3; APD:
   Braun et al., 2025; SPD: Bushnaq et al., 2025), and `swd.truth`'s toys are held against that, all on the same 200,000 fresh
   samples. The bar is 5 %. `--without` leaves trainings out: that of SPD's 40 in 10 takes minutes.
2. SPD of each toy (swd_lens/truth/spd.py), measured after every tenth of its training: MMCS and ML2R with our definitions
   (`column_mmcs`), which are the paper's. They take the nearest piece however small; beside them are those of pieces with at
   least a tenth of the largest one's norm, whose number is said.
"""

import argparse
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.step_cache import StepCache
from swd_lens.base.writer import writing
from swd_lens.truth.run import _trained_toy
from swd_lens.truth.scores import column_mmcs
from swd_lens.truth.spd import MARKS, STEPS, decompose, recipe
from swd_lens.truth.toys import PUBLISHED, Toy, _pentagon, residual_mlp, sparse_features, superposition
from tests.benchmarks.results import Table, record

SIZES = {"TMS 5-2": (5, 2), "TMS 40-10": (40, 10)}
# Toy, paper -> steps and samples of each by which the paper (the residual MLP: the public code) trains it.
TRAININGS = {
    ("TMS 5-2", "APD"): (5_000, 1024),
    ("TMS 5-2", "SPD"): (10_000, 1024),
    ("TMS 40-10", "APD"): (2_000, 2048),
    ("TMS 40-10", "SPD"): (10_000, 8192),
    ("residual MLP", "SPD"): (1_000, 2048),
}
LOSSES = ["toy", "loss here", "recipe", "its loss", "ratio", "regular pentagon"]
FOUND = ["toy", "seed", "steps", "MMCS", "ML2R", "published", "pieces of a tenth", "their MMCS", "their ML2R", "lost of W"]
CURVE = ["toy", "seed", "step", "MMCS", "ML2R", "at work in W", "at work in W^T", "stochastic error", "lost of W"]
_ALIVE = 0.1


def losses(toy: str, recipe_of: str, cache: StepCache) -> list[str]:
    """A toy's loss, and that of a paper's recipe."""
    steps, batch = TRAININGS[toy, recipe_of]

    def loss_of_theirs() -> dict[str, float]:
        if toy == "residual MLP":
            return {"loss": residual_mlp(steps=steps).loss}
        return {"loss": _loss(superposition(*SIZES[toy], steps=steps, batch=batch, falling=False))}

    ours = _trained_toy(toy, 0, cache)
    ours = replace(ours, loss=_loss(ours), reference=_pentagon(_fresh(5)) if toy == "TMS 5-2" else ours.reference)
    theirs = cache.values(("losses on one sample", toy, recipe_of), loss_of_theirs, dict)["loss"]
    best = "" if isnan(ours.reference) else f"{ours.reference:.6f}"
    how = f"{recipe_of}: {steps:,} steps of {batch:,}"
    return [toy, f"{ours.loss:.6f}", how, f"{theirs:.6f}", f"{ours.loss / theirs:.3f}", best]


def _fresh(features: int) -> torch.Tensor:
    """The sample on which every toy of a size is judged, so that ratios have no error of two samples."""
    return sparse_features(200_000, features, torch.Generator().manual_seed(1))


@torch.no_grad()
def _loss(toy: Toy) -> float:
    if toy.bias is None:
        return toy.loss
    x = _fresh(len(toy.weight))
    return float((torch.relu(x @ toy.weight @ toy.weight.T + toy.bias) - x).square().mean())


def spd_of(name: str, cache: StepCache, tenths: int = MARKS, seed: int = 0) -> tuple[list[str], list[list[str]]]:
    """The row of a decomposition, and its curve."""
    toy = _trained_toy(name, 0, cache)
    assert toy.bias is not None
    found = decompose(toy.weight, toy.bias, recipe(*SIZES[name], seed=seed), cache=cache, tenths=tenths)
    norms = found.read.norm(dim=0) * found.write.norm(dim=1)
    alive = norms > _ALIVE * norms.max()
    last = found.curve[-1]
    kept = column_mmcs(toy.weight, found.read[:, alive], found.write[alive])
    published = " / ".join(f"{value:.3f}" for value in PUBLISHED[name])
    row = [
        name,
        str(seed),
        f"{int(last['step']):,}",
        f"{last['MMCS']:.3f}",
        f"{last['ML2R']:.3f}",
        published,
        f"{int(alive.sum())} of {len(norms)}",
    ]
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
    parser.add_argument("--tenths", type=int, default=MARKS, help="of the training of 40 in 10")
    parser.add_argument("--without", nargs="*", default=[], help='losses left out, as "TMS 40-10 SPD"')
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with writing(args.out, "known"):
        cache = StepCache(args.out, {"swd_lens": __version__})
        found = [spd_of(name, cache, args.tenths if name == "TMS 40-10" else MARKS) for name in SIZES]
        lost = [losses(*each, cache) for each in TRAININGS if " ".join(each) not in args.without]
    tables = [
        Table("SPD of the toys of superposition", FOUND, [row for row, _ in found], ["left"] + ["right"] * 9),
        Table("Losses of the toys", LOSSES, lost, ["left", "right", "left"] + ["right"] * 3),
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
    "The papers print no loss of their toys: these are held against the same toys trained by the papers' recipes here (constant "
    "rate; ours falls along a cosine; APD: Braun et al., 2025), on the same 200,000 fresh samples.",
]


if __name__ == "__main__":
    main()
