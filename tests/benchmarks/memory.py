"""Peak resident memory: calibration on more and more tokens, and factorizing more and more matrices.

    GOMP_SPINCOUNT=1000 python -m tests.benchmarks.memory --threads 2

1. Every number is measured in a process of its own, from the kernel's high-water mark (VmHWM in /proc/self/status; Linux).
   "before" is what the process holds when everything is loaded and one batch was run; "more" is the peak beyond that.
2. Calibration of the embedded model, tokens made anew in every pass (a `TokenStream`): "dense", the Grams of all 16 matrices
   in one pass; "sequential", the Grams of mlp_out block by block behind the replaced ones, from residuals on disk. Bar: 1M
   tokens take no more than 10k.
3. `swd.factorize` on 1, 4, 16 matrices of one size (2048 x 512, random weights), less the size of the results. Bar: the same
   for all. Zero-data, and with sequential calibration.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.residuals import Residuals
from swd_lens.hosts import find_sites
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import attach

ROW = 128  # tokens; the embedded model's context
MB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--matrices", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--measure", choices=MEASURES, help="one measurement, in this process, as a line of JSON per number")
    parser.add_argument("--numbers", type=int, nargs="+", help="tokens or matrices of that measurement, one after the other")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure is not None:
        _measure(args.measure, args.numbers)
        return
    print("| what | number | before, MB | more, MB | results, MB | more less results, MB |\n|---|---|---|---|---|---|")
    for what in MEASURES:
        for number in args.matrices if what.startswith("factorize") else args.tokens:
            row = _in_a_process(what, number, args.threads)
            own = row["more"] - row["results"]
            print(
                f"| {what} | {number:,} | {row['before'] / MB:.0f} | {row['more'] / MB:.1f} | {row['results'] / MB:.1f} "
                f"| {own / MB:.1f} |",
                flush=True,
            )


def _in_a_process(what: str, number: int, threads: int) -> dict[str, float]:
    how = [sys.executable, "-m", "tests.benchmarks.memory", "--measure", what, "--numbers", str(number)]
    # Tensors from 1 MB on outside the heap: otherwise its holes, tens of MB that come and go, hide what is asked here.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([*how, "--threads", str(threads)], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(what: str, numbers: list[int]) -> None:
    """Loads, warms up, then runs each number; a line of JSON each."""
    run = MEASURES[what]()
    before = _resident("VmRSS")
    for number in numbers:
        results = run(number)
        print(json.dumps({"number": number, "before": before, "more": _resident("VmHWM") - before, "results": results}))


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


# ---------------------------------------------------------------------------------------------- measurements


def _rows(n_tokens: int, d_vocab: int) -> TokenStream:
    """Random rows, the same in every pass, made when they are asked for."""

    def rows() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, d_vocab, (ROW,), generator=generator)

    return TokenStream(rows, n_tokens // ROW, row_length=ROW)


def dense() -> Callable[[int], int]:
    model = swd.load_default_model()
    sites = find_sites(model)

    def run(n_tokens: int) -> int:
        collect_grams(model, sites, _rows(n_tokens, model.cfg.d_vocab))
        return 0

    run(16 * ROW)
    return run


def sequential() -> Callable[[int], int]:
    model = swd.load_default_model()
    factors = baselines.svd(model, "mlp_out")

    def run(n_tokens: int) -> int:
        done: dict[str, Any] = {}
        with Residuals(model, _rows(n_tokens, model.cfg.d_vocab)) as residuals:
            for site in find_sites(model, "mlp_out"):
                with attach(model, {**done}) if done else torch.no_grad():
                    residuals.advance(site.layer)
                    collect_grams(model, [site], None, residuals=residuals)
                assert residuals.kept
                done[site.name] = factors[site.name]
        return 0

    run(16 * ROW)
    return run


def factorize() -> Callable[[int], int]:
    return _factorize(calibrated=False)


def factorize_calibrated() -> Callable[[int], int]:
    return _factorize(calibrated=True)


def _factorize(calibrated: bool) -> Callable[[int], int]:
    model = _wide_model()
    names = [site.name for site in find_sites(model, "mlp_out")]

    def run(n_matrices: int) -> int:
        tokens = _rows(64 * ROW, model.cfg.d_vocab) if calibrated else None
        found = swd.factorize(model, names[:n_matrices], sparsity=0.5, tokens=tokens, outer_iterations=2, progress=False)
        return _bytes_beyond(model, [found[name] for name in found])

    return run


def _wide_model() -> Any:
    """16 blocks with an MLP of 512 -> 2048 -> 512, random weights."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    shape = HookedTransformerConfig(
        n_layers=16, d_model=512, n_heads=4, d_head=16, d_mlp=2048, n_ctx=ROW, d_vocab=1000, act_fn="gelu_new", seed=0
    )
    return HookedTransformer(shape).eval()


def _bytes_beyond(model: Any, factors: list[Any]) -> int:
    """Of all tensors of the factors that are not the model's, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for f in factors
        for tensor in vars(f).values()
        if isinstance(tensor, Tensor)
    }
    return sum(size for address, size in storages.items() if address not in own)


MEASURES: dict[str, Callable[[], Callable[[int], int]]] = {
    "dense": dense,
    "sequential": sequential,
    "factorize": factorize,
    "factorize-calibrated": factorize_calibrated,
}


if __name__ == "__main__":
    main()
