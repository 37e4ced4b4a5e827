"""A cost curve beside the plain loop: time and memory, on a GPT-2-small-size model with random weights.

    GOMP_SPINCOUNT=1000 taskset -c 2,3 python -m tests.benchmarks.curves --threads 2

1. Host (`--host hooked` or `bridge`): 12 layers, d_model 768, 50,257 tokens; exact SVD factors of blocks.8.mlp_out (values
   and supports do not change the time), 256 prompts of 20 random tokens, 40 prefixes, kept and ablated: 80 interventions.
2. The plain loop is what one writes with TransformerLens alone: `run_with_hooks` on the attached host, whole prompts, all
   logits, one intervention after the other, in batches of `--batch` prompts. It takes minutes a curve, so a turn times
   `--sample` interventions of it on all prompts and multiplies. Then `evaluate` makes the whole curve in the same turn
   (without bootstrap and dense host, of which the loop has neither). A ratio is loop over curve of the same turn.
3. Bars: 25 at positions="scoring", 5 at positions="all". In the same run the sampled interventions' mean margins must agree
   to 1e-5 of the logit scale.
4. `--kl` also has `evaluate` compute KL, which needs the whole vocabulary.
5. With `--memory` instead: the largest resident memory of a curve of 10, 40 and 160 prefixes, each in a process of its own.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import torch

import swd_lens as swd
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.hosts import host_of
from tests.benchmarks.attach import ONE, VOCABULARY, _gpt2_small, _gpt2_small_bridge

LENGTH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="prompts per forward of the plain loop")
    parser.add_argument("--sample", type=int, default=2, help="interventions of the plain loop per turn")
    parser.add_argument("--positions", nargs="+", default=["scoring", "all"])
    parser.add_argument("--tokens-per-forward", type=int, default=None)
    parser.add_argument("--host", choices=("hooked", "bridge"), default="hooked")
    parser.add_argument("--kl", action="store_true")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # random answers: sufficiency is undefined
    torch.set_num_threads(args.threads)
    if args.memory:
        _memory(args)
    else:
        _times(args)


def _times(args: argparse.Namespace) -> None:
    print(f"torch {torch.__version__}, {args.threads} threads, {args.turns} turns, {args.host}, {args.prompts} prompts\n")
    print("| positions | prefixes | plain loop s | curve s | loop / curve | range | largest difference of margins |")
    print("|---|---|---|---|---|---|---|")
    model, factors, train, test = _setting(args)
    for positions in args.positions:
        scores = swd.attribute(model, factors, train, positions=positions)
        lengths = _lengths(args.prefixes, scores.n_units)
        ratios, loops, curves = [], [], []
        for turn in range(args.turns + 1):
            sampled = lengths[1 + turn :: max(1, len(lengths) // args.sample)][: args.sample]
            began = time.perf_counter()
            plain = _loop(model, factors, test, scores, sampled, args.batch)
            loop = (time.perf_counter() - began) * 2 * len(lengths) / len(sampled)
            began = time.perf_counter()
            found = _curve(model, factors, test, scores, lengths, args)
            curve = time.perf_counter() - began
            off = max(abs(plain[k] - found[k]) for k in sampled)
            if turn:  # the first one warms up
                ratios, loops, curves = [*ratios, loop / curve], [*loops, loop], [*curves, curve]
        row = f"{statistics.median(loops):.0f} | {statistics.median(curves):.1f} | {statistics.median(ratios):.1f}"
        print(f"| {positions} | {len(lengths)} | {row} | {min(ratios):.1f} to {max(ratios):.1f} | {off:.1e} |", flush=True)


def _setting(args: argparse.Namespace) -> Any:
    model = _gpt2_small() if args.host == "hooked" else _gpt2_small_bridge()
    factors = swd.baselines.svd(model, ONE)
    return model, factors, _split("train", 32, 0), _split("test", args.prompts, 1)


def _split(name: str, n: int, seed: int) -> swd.tasks.TaskSplit:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (n, LENGTH + 2), generator=generator)
    examples = tuple(swd.TaskExample(f"{name} {i}", ("right",), ("wrong",)) for i in range(n))
    answers, distractors = ([(int(x),) for x in ids[:, LENGTH + i]] for i in range(2))
    return swd.tasks.TaskSplit(name, examples, tuple(ids[:, :LENGTH]), tuple(answers), tuple(distractors), VOCABULARY)


def _lengths(n: int, units: int) -> list[int]:
    return sorted({round(units * i / (n - 1)) for i in range(n)})


def _loop(model: Any, factors: Any, split: Any, scores: Any, lengths: list[int], batch: int) -> dict[int, float]:
    """Mean margin of each kept prefix, by run_with_hooks."""
    found = {}
    with swd.attach(model, factors), torch.no_grad():
        for k in lengths:
            hooks = swd.intervention_hooks(scores, scores.ranking()[:k], "keep")
            total = 0.0
            for bucket in split.buckets(batch):
                logits = model.run_with_hooks(bucket.tokens, fwd_hooks=hooks)[:, -1]
                total += float(bucket.margin(logits).sum())
            found[k] = total / len(split)
    return found


def _curve(model: Any, factors: Any, split: Any, scores: Any, lengths: list[int], args: argparse.Namespace) -> Any:
    how = {} if args.tokens_per_forward is None else {"tokens_per_forward": args.tokens_per_forward}
    ranks, thresholds = scores.ranks(), torch.tensor([*lengths, *lengths])[:, None]
    keeps = torch.arange(len(thresholds))[:, None] < len(lengths)
    with swd.attach(model, factors) as attachment:
        bench = InterventionRunner(host_of(model), attachment, split, scores, "mean", **how)
        found, _ = bench.run(
            len(thresholds),
            lambda chunk: {site: (rank > thresholds[chunk]) == keeps[chunk] for site, rank in ranks.items()},
            kl=args.kl,
        )
    return dict(zip(lengths, found.q.tolist(), strict=False))


# ---------------------------------------------------------------------------------------------- memory


def _memory(args: argparse.Namespace) -> None:
    """Each curve in a process of its own, which prints its largest resident memory beyond that before the curve."""
    if args.prefixes < 0:  # the child
        model, factors, train, test = _setting(args)
        scores = swd.attribute(model, factors, train, positions=args.positions[0])
        _curve(model, factors, test, scores, _lengths(4, scores.n_units), args)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _curve(model, factors, test, scores, _lengths(-args.prefixes, scores.n_units), args)
        print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    print("| positions | prefixes | largest resident MB after 4 prefixes | after so many | \n|---|---|---|---|")
    for positions in args.positions:
        for prefixes in (10, 40, 160):
            command = [sys.executable, "-m", "tests.benchmarks.curves", "--memory", "--prefixes", str(-prefixes)]
            command += ["--positions", positions, "--prompts", str(args.prompts), "--host", args.host]
            command += ["--threads", str(args.threads)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            print(f"| {positions} | {prefixes} | {int(out[-2]) / 1024:.0f} | {int(out[-1]) / 1024:.0f} |", flush=True)


if __name__ == "__main__":
    main()
