"""QK screen and scan, on a GPT-2-small-size model with random weights: 12 layers, 12 heads, d_model 768.

    GOMP_SPINCOUNT=1000 taskset -c 2,3 python -m tests.benchmarks.qk --threads 2

1. Factors: random, of all twelve attn_qkv (768 x 2304, 768 units), with as many entries as s = 0.5 leaves; values do not change
   the time. The static screen computes gamma of 16 x 16 pairs in all 144 heads. Bar: 5 s.
2. The scan replays the five strongest pairs of each head on three prompts of `--length` random tokens, 2,160 cases.
3. The plain way is what one writes with TransformerLens alone: per case one forward of the attached host with a hook on hook_q
   that takes the unit out of its head, stopped behind the case's layer (a whole forward would be slower still), and the KL
   between the patterns. A turn times `--sample` cases of it, spread over the layers, and multiplies; the intact pattern costs
   it nothing. Then the scan makes all cases in the same turn. A ratio is plain over scan of the same turn. Bar: 20.
4. In the same run the sampled cases' KLs must agree to 1e-5 nats.
"""

import argparse
import statistics
import time
from typing import Any

import torch

import swd_lens as swd
from swd_lens.analysis.qk import QKScan, qk_scan, qk_screen
from tests.benchmarks.attach import VOCABULARY, _gpt2_small, _gpt2_small_bridge, _random


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sample", type=int, default=36, help="cases of the plain way per turn")
    parser.add_argument("--length", type=int, default=16, help="tokens per prompt")
    parser.add_argument("--host", choices=("hooked", "bridge"), default="hooked")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    model = _gpt2_small() if args.host == "hooked" else _gpt2_small_bridge()
    factors = _factors(model)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.turns} turns, {args.host}, prompts of {args.length} tokens\n"
    )
    _screen(model, factors, args.turns)
    _scan(model, factors, args)


def _factors(model: Any) -> dict[str, swd.Factors]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for site in swd.find_sites(model, "attn_qkv"):
        half = site.numel // 4  # two factors, half of the weights
        read = _random(site.d_in, site.d_in, min(half, site.d_in**2), generator)
        made[site.name] = swd.Factors(read, _random(site.d_in, site.d_out, half, generator))
    return made


def _screen(model: Any, factors: Any, turns: int) -> None:
    times, shape = [], ""
    for _ in range(turns + 1):
        began = time.perf_counter()
        shape = " x ".join(map(str, qk_screen(model, factors).gamma.shape))
        times.append(time.perf_counter() - began)
    print(f"static screen, gamma {shape}: median {statistics.median(times[1:]):.2f} s, first {times[0]:.2f} s (bar 5)")


def _scan(model: Any, factors: Any, args: argparse.Namespace) -> None:
    prompts = torch.randint(0, VOCABULARY, (3, args.length), generator=torch.Generator().manual_seed(1))
    pairs = qk_screen(model, factors).pairs(5)
    ratios, plains, scans, off = [], [], [], 0.0
    for turn in range(args.turns + 1):
        began = time.perf_counter()
        made = qk_scan(model, factors, prompts, pairs=pairs, progress=False)
        scan = time.perf_counter() - began
        spent, worst = _plain(model, factors, made, prompts, args.sample, turn)
        plain = spent * len(made.frame) / args.sample
        off = max(off, worst)
        if turn:  # the first one warms up
            ratios, plains, scans = [*ratios, plain / scan], [*plains, plain], [*scans, scan]
    assert off < 1e-5, f"the scan's KLs are off by {off}"
    scan, plain, ratio = (statistics.median(some) for some in (scans, plains, ratios))
    print(f"{12 * 12 * 5 * 3} cases: scan {scan:.2f} s, one forward per case {plain:.0f} s ({args.sample} timed)")
    print(f"plain / scan: median {ratio:.0f} ({min(ratios):.0f} to {max(ratios):.0f}; bar 20), largest KL difference {off:.1e}")


def _plain(model: Any, factors: Any, made: QKScan, prompts: torch.Tensor, sample: int, turn: int) -> tuple[float, float]:
    """Seconds for the sampled cases, and how far their KLs are from the scan's."""
    frame = made.frame.sort_values(["layer", "head", "q_unit", "k_unit", "prompt"]).reset_index(drop=True)
    step = len(frame) // sample
    cases = frame.iloc[turn % step :: step].head(sample).to_dict("records")
    d_head, spent, off = int(model.cfg.d_head), 0.0, 0.0
    with swd.attach(model, factors):
        for case in cases:
            layer, head, unit = case["layer"], case["head"], case["q_unit"]
            row = prompts[case["prompt"]][None]
            write = factors[f"blocks.{layer}.attn_qkv"].write[unit, head * d_head : (head + 1) * d_head]
            before = _pattern(model, row, layer, head, None, write, unit)
            began = time.perf_counter()
            after = _pattern(model, row, layer, head, unit, write, unit)
            kl = (before * (before.log() - after.log())).nan_to_num(0).sum(-1).mean()
            spent += time.perf_counter() - began
            off = max(off, abs(float(kl) - case["removed_kl"]))
    return spent, off


def _pattern(model: Any, row: Any, layer: int, head: int, remove: int | None, write: Any, unit: int) -> torch.Tensor:
    found = {}

    def take(z: Any, hook: Any) -> None:
        found["z"] = z[..., unit]

    def change(q: Any, hook: Any) -> Any:
        q[:, :, head] -= found["z"][..., None] * write
        return q

    def keep(pattern: Any, hook: Any) -> None:
        found["pattern"] = pattern[0, head].clone()

    hooks = [(f"blocks.{layer}.hook_attn_qkv_unit", take), (f"blocks.{layer}.attn.hook_pattern", keep)]
    if remove is not None:
        hooks.append((f"blocks.{layer}.attn.hook_q", change))
    model.run_with_hooks(row, fwd_hooks=hooks, stop_at_layer=layer + 1)
    return found["pattern"]


if __name__ == "__main__":
    main()
