"""Attached beside dense: time of a forward and memory, on a GPT-2-small-size model with random weights and factors.

    GOMP_SPINCOUNT=1000 taskset -c 2,3 python -m tests.benchmarks.attach --threads 2

1. The host (`--host hooked` or `bridge`): 12 layers, d_model 768, d_mlp 3072, 50,257 tokens. Factors: random, with the
   densities that the default solver plans at each sparsity. Values do not change the time of a product, zeros do (where
   the sparse kernel is chosen).
2. Dense and attached forwards (all logits) in turns, `--repeats` times each. A ratio is attached over dense of the same
   turn; the median counts, the quartiles show the spread. Bars: 1.25 for all 48 matrices, 1.03 for one mlp_out.
3. Memory beyond the host: all tensors of the attached model and of the Factors that are not the host's, each storage once,
   over the factors' dense bytes. Bar: 1.1.
4. With `--split`: where the dense forward's time goes, by operation.
5. With `--kernels` instead: the sparse kernel beside the dense one, the table in `swd_lens.units.kernels`.

Absolute times depend on the machine; start with GOMP_SPINCOUNT=1000 when it is shared (docs, "Good to know").
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import swd_lens as swd
from swd_lens.solver.budget import plan_shares
from swd_lens.solver.spec import DEFAULT_PRESET, PRESETS, AnnealSpec
from swd_lens.units.kernels import FactorProduct

BATCHES = ((8, 64), (8, 256), (1, 128))
ONE = "blocks.8.mlp_out"
VOCABULARY = 50_257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9, help="turns; the one-matrix rows take three times as many")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--units", choices=("1x", "2x"), default="1x", help="times the shorter side of each matrix")
    parser.add_argument("--host", choices=("hooked", "bridge"), default="hooked")
    parser.add_argument("--split", action="store_true", help="also the dense forward's time by operation")
    parser.add_argument("--kernels", action="store_true", help="only the kernels' break-even table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.repeats} turns\n")
    if args.kernels:
        _kernels(args.repeats)
    else:
        _forwards(args)


# ---------------------------------------------------------------------------------------------- the whole model


def _forwards(args: argparse.Namespace) -> None:
    model = _gpt2_small() if args.host == "hooked" else _gpt2_small_bridge()
    if args.split:
        _split(model)
    print("| sparsity | matrices | tokens | dense ms | attached / dense | quartiles | memory / factors' dense size |")
    print("|---|---|---|---|---|---|---|")
    for sparsity in args.sparsity:
        every = _random_factors(model, sparsity, int(args.units[0]))
        for factors, turns in ((every, args.repeats), ({ONE: every[ONE]}, 3 * args.repeats)):
            for shape in BATCHES:
                print(f"| {sparsity} | {len(factors)} | {_row(model, factors, shape, turns)} |", flush=True)


def _gpt2_small() -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=12,
            d_model=768,
            n_heads=12,
            d_head=64,
            d_mlp=3072,
            d_vocab=VOCABULARY,
            n_ctx=1024,
            act_fn="gelu_new",
            normalization_type="LNPre",  # as from_pretrained leaves it, folded
            device="cpu",
            seed=0,
        )
    ).eval()


def _gpt2_small_bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = swd.load_default_model().tokenizer  # a bridge wants one; ids are all that is used here
    host = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    return TransformerBridge.boot_transformers("gpt2", hf_model=host, tokenizer=tokenizer, device="cpu").eval()


def _random_factors(model: Any, sparsity: float, times: int) -> dict[str, swd.Factors]:
    """Random factors of every matrix with as many entries as the default preset's plan gives them."""
    spec, generator, factors = PRESETS[DEFAULT_PRESET], torch.Generator().manual_seed(0), {}
    assert isinstance(spec, AnnealSpec), "the plan of another solver is another function"
    for site in swd.find_sites(model):
        units = times * min(site.d_in, site.d_out)
        plan = plan_shares(site.d_in, site.d_out, sparsity, units, spec)
        read, write = (plan.square, plan.other) if site.d_in <= site.d_out else (plan.other, plan.square)
        factors[site.name] = swd.Factors(_random(site.d_in, units, read, generator), _random(units, site.d_out, write, generator))
    return factors


def _random(rows: int, columns: int, entries: int, generator: torch.Generator) -> Tensor:
    """`entries` normal values at random places, scaled so that h @ it is about as large as h."""
    factor = torch.zeros(rows * columns)
    factor[torch.randperm(rows * columns, generator=generator)[:entries]] = torch.randn(entries, generator=generator)
    return factor.view(rows, columns) * (columns / entries) ** 0.5


def _row(model: Any, factors: dict[str, swd.Factors], shape: tuple[int, int], turns: int) -> str:
    tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    ratios, dense = [], []
    for turn in range(turns + 1):
        host = _seconds(model, tokens)
        with swd.attach(model, factors):
            attached = _seconds(model, tokens)
        if turn:  # the first one warms up
            ratios.append(attached / host)
            dense.append(host)
    low, median, high = statistics.quantiles(ratios, n=4)
    milliseconds = 1000 * statistics.median(dense)
    memory = _memory(model, factors)
    return f"{shape[0]} x {shape[1]} | {milliseconds:.0f} | {median:.3f} | {low:.3f} to {high:.3f} | {memory:.3f}"


def _seconds(model: Any, tokens: Tensor) -> float:
    start = time.perf_counter()
    model(tokens)
    return time.perf_counter() - start


def _memory(model: Any, factors: dict[str, swd.Factors]) -> float:
    """Bytes that are there because of the factors, over the factors' dense bytes.

    Counted over every tensor that Python knows of before and after, so that a copy kept anywhere would show.
    """
    own = [tensor for f in factors.values() for tensor in (f.read, f.write)]
    before = _storages(_all_tensors())
    with swd.attach(model, factors):
        after = _storages(_all_tensors()) | _storages(own)
    new = {pointer: size for pointer, size in after.items() if pointer not in before} | _storages(own)
    return sum(new.values()) / sum(tensor.nbytes for tensor in own)


def _all_tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of every storage that the tensors use."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _split(model: Any) -> None:
    """Share of each operation in the dense forward's own CPU time."""
    tokens = torch.randint(0, VOCABULARY, BATCHES[0])
    model(tokens)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(tokens)
    rows = profiler.key_averages(group_by_input_shape=True)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"| operation, {BATCHES[0][0]} x {BATCHES[0][1]} tokens | share of the dense forward |\n|---|---|")
    for row in sorted(rows, key=lambda row: -row.self_cpu_time_total)[:12]:
        print(f"| {row.key} {[s for s in row.input_shapes if s]} | {row.self_cpu_time_total / total:.3f} |")
    print()


# ---------------------------------------------------------------------------------------------- the kernels alone


def _kernels(turns: int) -> None:
    print("| factor | rows of h | density | sparse / dense |\n|---|---|---|---|")
    for n_rows in (64, 512, 2048):
        for shape in ((768, 768), (768, 3072), (3072, 768)):
            for density in (0.02, 0.05, 0.1, 0.15, 0.2, 0.25):
                factor = torch.randn(shape) * (torch.rand(shape) < density)
                h, bias = torch.randn(n_rows, shape[0]), torch.randn(shape[1])
                dense, sparse = FactorProduct(factor, "dense"), FactorProduct(factor, "sparse")
                ratio = _ratio(lambda: sparse(h, bias), lambda: dense(h, bias), turns)  # noqa: B023 - called at once
                print(f"| {shape[0]} x {shape[1]} | {n_rows} | {density} | {ratio:.2f} |", flush=True)


def _ratio(ours: Callable[[], Any], theirs: Callable[[], Any], turns: int) -> float:
    """Median over the turns of ours / theirs."""
    ratios = []
    for _ in range(turns + 1):
        times = []
        for run in (ours, theirs):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])


if __name__ == "__main__":
    main()
