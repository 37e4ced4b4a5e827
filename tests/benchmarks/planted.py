"""Known optima: matrices that are the product of two sparse factors, and whether the solver finds them again.

    python -m tests.benchmarks.planted                          every row, presets best and thorough
    python -m tests.benchmarks.planted --presets deep --rows 1 2 --seeds 3
    python -m tests.benchmarks.planted --record                 also into results/known_optima.json

1. W = A B with so many units, each with so many read and write entries at random places, normal values (seeded); in some rows
   unequal numbers of entries, units of a single input among the others, correlated inputs with their exact Gram, noise, or a
   dense remainder. K and the number of units are the planted ones, so that an answer as good as the planted one exists.
2. Found units are matched to planted ones one to one, by the entries that they share. F1 is of all entries, read and write. MMCS
   is the mean over planted units of the largest |cosine| of a found rank-one piece with theirs.
3. Error: relative norm ||W - AB|| / ||W|| (under the Gram, where there is one), beside that of the planted factors: where W has
   noise, no answer of K edges has to come nearer.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swd_lens.base.errors import SolveInputError
from swd_lens.solver import solve
from swd_lens.truth.planted import Plant, Planted
from swd_lens.truth.planted import planted as draw
from swd_lens.truth.scores import mmcs, relative_error, support_f1
from tests.benchmarks.results import Table, record

BEFORE = (
    "From coordinates (`start='coordinates'`), as every unit started at first, best finds F1 .69, .80, .87, .86, .69 and .87 in "
    "the first six rows; from the span of rows or columns alone, as before pieces were read off, .69, .98, .96, .99, .69 and "
    ".97, and deep .98, .99, .99, .99, .93 and .99. The last column is the time of the same preset from coordinates, in turns."
)
COLUMNS = [
    "d_in x d_out, units, read + write",
    "kind",
    "s",
    "preset",
    "F1",
    "MMCS",
    "error",
    "planted error",
    "seconds",
    "from coordinates",
]


@dataclass(frozen=True)
class Row:
    """A planted matrix; `kind` is one of KINDS."""

    d_in: int
    d_out: int
    units: int
    reads: int
    writes: int
    kind: str = "plain"

    def __str__(self) -> str:
        return f"{self.d_in} x {self.d_out}, {self.units}, {self.reads} + {self.writes}"


ANNEALED = ("best", "quick", "thorough", "deep")
# Kind of a row -> that of swd_lens.truth.planted.
KINDS = {
    "plain": "plain",
    "noise 0.05": "plain",
    "unequal": "unequal",
    "single inputs": "single inputs",
    "correlated": "correlated",
    "remainder 0.05": "remainder",
}
ROWS = (
    Row(128, 64, 64, 4, 4),
    Row(128, 64, 64, 8, 8),
    Row(128, 64, 64, 16, 8),
    Row(128, 64, 32, 8, 8),
    Row(128, 64, 64, 4, 4, "noise 0.05"),
    Row(512, 128, 128, 16, 8),
    Row(128, 64, 96, 8, 8),
    Row(64, 128, 64, 8, 8),
    Row(128, 64, 64, 8, 8, "unequal"),
    Row(128, 64, 64, 8, 8, "single inputs"),
    Row(128, 64, 64, 8, 8, "correlated"),
    Row(128, 64, 64, 8, 8, "remainder 0.05"),
)


def planted(row: Row, seed: int) -> Planted:
    """The matrix of a row."""
    kind, _, noise = row.kind.partition(" ")
    sizes = row.d_in, row.d_out, row.units, row.reads, row.writes
    plant = Plant(*sizes, noise=float(noise) if kind in ("noise", "remainder") else 0.0, kind=KINDS[row.kind])
    return draw(plant, seed)


def error(drawn: Planted, read: Tensor, write: Tensor) -> float:
    """||W - AB|| / ||W||, under the Gram."""
    return relative_error(drawn.weight, read, write, drawn.gram)


def main() -> None:
    parser = argparse.ArgumentParser(description="Matrices with a known sparse factorization.")
    parser.add_argument("--presets", nargs="+", default=["paper", "best", "thorough"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(range(1, len(ROWS) + 1)), help="from 1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _cells(Row(32, 16, 16, 4, 4), "best", [0])  # what the first call loads is no row's time
    body = []
    for row in (ROWS[number - 1] for number in args.rows):
        for preset in args.presets:
            cells = _cells(row, preset, range(args.seeds))
            body.append(cells)
            print(" | ".join(cells), flush=True)
    table = Table("Planted factors", COLUMNS, body, ["left"] * 2 + ["right"] + ["left"] + ["right"] * 6)
    print("\n" + table.markdown())
    if args.record:
        about = [
            f"Means over {args.seeds} seeds. What a row is, and what is measured, is said in tests/benchmarks/planted.py.",
            BEFORE,
        ]
        record("known_optima", [table], threads=[args.threads], title="Known optima", section="Solver", order=9, about=about)


def _cells(row: Row, preset: str, seeds: Sequence[int]) -> list[str]:
    """Means over the seeds; of a preset that starts from coordinates anyway no second time is given."""
    measured, sparsities = [], []
    for seed in seeds:
        truth = planted(row, seed)
        sparsities.append(1 - truth.edges / truth.weight.numel())
        began = time.perf_counter()
        units = None if preset == "paper" and row.units == min(row.d_in, row.d_out) else row.units
        try:
            solution = solve(truth.weight, truth.gram, sparsities[-1], preset=preset, units=units)
        except SolveInputError:
            return [str(row), row.kind, f"{statistics.mean(sparsities):.3f}", preset, *["refused"] + [""] * 5]
        seconds = [time.perf_counter() - began, 0.0]
        if preset in ANNEALED:
            solve(truth.weight, truth.gram, sparsities[-1], preset=preset, units=units, start="coordinates")
            seconds[1] = time.perf_counter() - began - seconds[0]
        how = (support_f1, mmcs, error)
        floor = error(truth, truth.read, truth.write)
        measured.append([*(f(truth, solution.read, solution.write) for f in how), floor, *seconds])
    means = [statistics.mean(column) for column in zip(*measured, strict=True)]
    shown = [f"{value:.{digits}f}" for value, digits in zip(means, (2, 2, 3, 3, 2, 2), strict=True)]
    return [str(row), row.kind, f"{statistics.mean(sparsities):.3f}", preset, *shown[:-1], shown[-1] * (preset in ANNEALED)]


if __name__ == "__main__":
    main()
