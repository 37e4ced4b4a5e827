"""What pair interactions cost at GPT-2 small's size, and beside the straightforward way.

    taskset -c 0,1 python -m tests.benchmarks.interactions --part bar
    taskset -c 0,1 python -m tests.benchmarks.interactions --part compare --repeats 5

Random weights of GPT-2 small's shape (12 layers, d_model 768, d_mlp 3072), 1,536 units at blocks.8.mlp_in. The factors are random
too; how many entries they have is not: s = 0.5 leaves 1,179,648, of which the solver gives 983,040 to the write factor, 0.208 of
its entries. Units of large energy write more than the average (0.242 of the channels against 0.208, the top eighth on the
embedded model, blocks.2.mlp_in, s = 0.5, twice as many units as d_model), so every unit here writes 0.242 of them.

1. bar: `swd.unit_interactions` whole, 128 units (8,128 pairs), 8,192 tokens: both passes of the host, energies, pairs.
2. compare: 12 units (66 pairs) and 1,024 tokens, the two ways in turn. The straightforward way computes f(h) and f(h - c_i) once
   per unit as well, then per pair f on all 3,072 channels and the product with W_out, tokens in blocks of 512.
"""

import argparse
import os
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from transformer_lens import HookedTransformer, HookedTransformerConfig

from swd_lens.analysis.interactions import unit_interactions
from swd_lens.analysis.interactions.difference import PairSums
from swd_lens.units.factors import Factors

SITE, D_MODEL, D_MLP, UNITS, LAYERS = "blocks.8.mlp_in", 768, 3072, 1536, 12
_gelu = partial(F.gelu, approximate="tanh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", choices=("bar", "compare"), required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--density", type=float, default=0.242, help="share of the channels that a unit writes")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"bar": _bar, "compare": _compare}[args.part](args)


def _sparse(shape: tuple[int, int], density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    return torch.randn(shape, generator=generator) * kept * 0.05


def _bar(args: argparse.Namespace) -> None:
    cfg = HookedTransformerConfig(
        n_layers=LAYERS, d_model=D_MODEL, n_heads=12, d_head=64, d_mlp=D_MLP, n_ctx=1024, d_vocab=50257, act_fn="gelu_new",
        normalization_type="LNPre", seed=0,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval()
    factors = Factors(_sparse((D_MODEL, UNITS), 1 / 6, 1), _sparse((UNITS, D_MLP), args.density, 2))
    rows = torch.randint(0, 50257, (args.tokens // 512, 512), generator=torch.Generator().manual_seed(3))
    start, before = time.perf_counter(), os.times()
    found = unit_interactions(model, {SITE: factors}, SITE, rows, top=128, batch_size=8)
    seconds, after = time.perf_counter() - start, os.times()
    write = (factors.write[list(found.units)] != 0).float()
    common = (write @ write.T)[torch.ones(128, 128).triu(1).bool()]
    print(
        f"{found.n_pairs:,} pairs, {args.tokens:,} tokens, {args.threads} threads: {seconds:.1f} s, of CPU time "
        f"{after.user + after.system - before.user - before.system:.1f} s; load {os.getloadavg()[0]:.1f}; "
        f"{common.mean():.0f} channels common to a pair"
    )


def _compare(args: argparse.Namespace) -> None:
    n, n_tokens = 12, 1024
    weight, write = _sparse((D_MLP, D_MODEL), 1.0, 4), _sparse((n, D_MLP), args.density, 2) * 4
    generator = torch.Generator().manual_seed(5)
    z, pre = torch.randn(n_tokens, n, generator=generator), torch.randn(n_tokens, D_MLP, generator=generator)
    ratios, differences = [], []
    for _ in range(args.repeats):
        start = time.perf_counter()
        sums = PairSums(write, weight, _gelu, torch.float32)
        sums.add(z, pre, None)
        middle = time.perf_counter()
        straight = _straightforward(z, pre, write, weight)
        end = time.perf_counter()
        ratios.append((end - middle) / (middle - start))
        differences.append(float((sums.pairs - straight).abs().max() / straight.max()))
        print(f"ours {middle - start:.2f} s, straightforward {end - middle:.2f} s, ratio {ratios[-1]:.1f}")
    print(f"median ratio {statistics.median(ratios):.1f}; largest difference {max(differences):.1e} of the largest sum")


def _straightforward(
    z: torch.Tensor, pre: torch.Tensor, write: torch.Tensor, weight: torch.Tensor, block: int = 512
) -> torch.Tensor:
    """sum_t |q_ij|^2 with whole channels: (unit, unit) float64."""
    n = len(write)
    total = torch.zeros(n, n, dtype=torch.float64)
    for rows in torch.arange(len(pre)).split(block):
        h, c = pre[rows], [z[rows, i, None] * write[i] for i in range(n)]
        full, less = _gelu(h), [_gelu(h - c_i) for c_i in c]
        for i in range(n):
            for j in range(i + 1, n):
                q = (full - less[i] - less[j] + _gelu(h - c[i] - c[j])) @ weight
                total[i, j] += float(q.square().sum())
    return total + total.T


if __name__ == "__main__":
    main()
