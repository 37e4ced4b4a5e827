"""What it costs to attach all 48 matrices of a GPT-2-small-size model, beside another checkout of this repository.

    git worktree add ../before f4f39be
    OMP_NUM_THREADS=1 python -m tests.benchmarks.attaching --beside ../before

1. Two processes, this checkout's and the other's, hold the same model (random weights) and factors (random, with the densities
   of sparsity 0.5, and with the fingerprints of their W in the provenance, so that they are compared with it).
2. They are asked in turns for one step, and answer with its seconds: `first`, attaching with W hashed anew; `again`, attaching
   when W was hashed before; `detach`; `forward` of 1 x 32 tokens with everything attached; `small forward`, the same of a model
   of two layers of width 16, where Python's own time shows; `load`, factors from a folder, all of them made.
3. A ratio is this checkout over the other, of one turn; the median counts, the quartiles show the spread. Bars: `first` and
   `again` at most 1.05, the forwards 1.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

STEPS = ("first", "again", "detach", "forward", "small forward", "load")

# Run in the other checkout as well, which may be too old to have this file.
WORKER = """
import sys, tempfile, time, warnings
from dataclasses import replace
import torch
import swd_lens as swd
from swd_lens.hosts import host_of
from swd_lens.units import match
from swd_lens.units.match import described
from tests.benchmarks.attach import _gpt2_small, _gpt2_small_bridge, _random_factors
from tests.micro import random_tokens, toy_model

warnings.simplefilter("ignore")
torch.set_grad_enabled(False)


def set_of(model):
    host, factors = host_of(model), _random_factors(model, 0.5, 1)
    return {s.name: replace(factors[s.name], provenance={"site": s.name, **described(host, s)}) for s in host.sites()}


model = _gpt2_small() if sys.argv[1] == "hooked" else _gpt2_small_bridge()
factors, tokens = set_of(model), torch.randint(0, 50_000, (1, 32), generator=torch.Generator().manual_seed(0))
small = toy_model()
of_small, of_text = set_of(small), random_tokens(1, 8)
folder = tempfile.mkdtemp()
swd.FactorSet(factors).save(folder)


def step(name):
    if name == "load":
        start = time.perf_counter()
        list(swd.FactorSet.load(folder).values())
        return time.perf_counter() - start
    if name == "small forward":
        with swd.attach(small, of_small):
            start = time.perf_counter()
            for _ in range(100):
                small(of_text)
            return time.perf_counter() - start
    if name == "first":
        match._FINGERPRINTS.clear()
    start = time.perf_counter()
    attachment = swd.attach(model, factors)
    middle = time.perf_counter()
    if name == "forward":
        start = time.perf_counter()
        model(tokens)
        middle = time.perf_counter()
    attachment.detach()
    end = time.perf_counter()
    return end - middle if name == "detach" else middle - start


print("ready", flush=True)
for line in sys.stdin:
    print(step(line.strip()), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--beside", type=Path, required=True, help="the other checkout")
    parser.add_argument("--host", choices=("hooked", "bridge"), default="hooked")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    ours, other = (_worker(checkout, args.host) for checkout in (Path(__file__).parents[2], args.beside))
    print("| step | other ms | this / other | quartiles |\n|---|---|---|---|")
    for step in STEPS:
        ratios, others = [], []
        for turn in range(args.turns + 1):
            # Who goes first changes from turn to turn.
            pair = {worker: _seconds(worker, step) for worker in ((ours, other) if turn % 2 else (other, ours))}
            if turn:  # the first one warms up
                ratios.append(pair[ours] / pair[other])
                others.append(pair[other])
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"| {step} | {1000 * statistics.median(others):.1f} | {median:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def _worker(checkout: Path, host: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, host],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    while worker.stdout.readline().strip() != "ready":
        assert worker.poll() is None, "the worker ended; its error stands above"
    return worker


def _seconds(worker: subprocess.Popen[str], step: str) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(step + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


if __name__ == "__main__":
    main()
