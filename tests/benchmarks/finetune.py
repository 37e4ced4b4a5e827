"""How much of a whole replacement's CE increase fine-tuning recovers, on the embedded model.

    python -m tests.benchmarks.finetune

1. Factorize everything (16 sites) on 16,384 tokens of the training split, sequentially; once per (sparsity, solver preset), kept
   in `--folder`.
2. For each recipe: fine-tune on other rows of the training split, each once (117,760 tokens; with calibration 134,144, less than
   1 % of the 13.5M that trained the model), with the learning curve on validation text.
3. CE delta and KL on test text before and after; recovered = 1 - after / before. The standard error is that of the mean over
   rows of (CE after - CE dense), divided by the CE delta before.

Absolute times depend on the machine; start with GOMP_SPINCOUNT=1000 when it is shared (docs, "Good to know").
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.train.finetune import finetune

TOKENS = 117_760
CALIBRATION = 16_384
TRAINED_ON = 13_500_000
# (sparsity, solver's preset, recipe, what differs from the recipe's preset)
CASES: list[tuple[float, str, str, dict[str, Any]]] = [
    (0.685, "best", "best", {}),
    (0.685, "best", "paper", {"steps": TOKENS // (8 * 128)}),
    (0.685, "paper", "best", {}),
    (0.5, "best", "best", {}),
    (0.75, "best", "best", {}),
    (0.685, "paper", "paper", {"steps": TOKENS // (8 * 128)}),
    (0.685, "best", "best", {"loss": "kl"}),
    (0.685, "best", "best", {"loss": "ce"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "swd-lens-finetune")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers in the list, from 0 [default: all]")
    parser.add_argument("--test-tokens", type=int, default=131_072)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, test = swd.load_default_model(), swd.text_tokens(args.test_tokens, split="test")
    train, held = swd.text_tokens(TOKENS, split="train", seed=1), swd.text_tokens(16_384, split="validation")
    share = (TOKENS + CALIBRATION) / TRAINED_ON
    print(f"torch {torch.__version__}, {args.threads} threads; {TOKENS:,} + {CALIBRATION:,} tokens, {share:.2%} of training")
    for number in range(len(CASES)) if args.cases is None else args.cases:
        sparsity, solver, recipe, changed = CASES[number]
        factors = _factors(model, args.folder / f"{solver}-{sparsity}", sparsity, solver)
        began = time.perf_counter()
        out = args.folder / f"run-{number}"
        more = {**changed, "out": out, "overwrite": True, "heldout": held, "progress": False}
        tuned = finetune(model, factors, train, preset=recipe, **more)
        seconds = time.perf_counter() - began
        before, after = (swd.fidelity(model, one, test, batch_size=64) for one in (factors, tuned))
        error = _standard_error(model, tuned, test) / before.ce_delta
        print(
            f"\ns={sparsity} solver {solver}, recipe {recipe} {changed or ''}: test CE delta {before.ce_delta:.5f} -> "
            f"{after.ce_delta:.5f}, recovered {1 - after.ce_delta / before.ce_delta:.1%} (se {error:.1%}); KL {before.kl:.5f} -> "
            f"{after.kl:.5f} ({1 - after.kl / before.kl:.1%} less); top-1 {before.top1_agreement:.4f} -> "
            f"{after.top1_agreement:.4f}; edges {factors.edges} -> {tuned.edges}; {seconds:.0f} s"
        )
        for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()):
            if "heldout_ce" in line:
                delta = line["heldout_ce"] - line["heldout_ce_dense"]
                print(f"  {line['tokens']:>8,} tokens: validation CE delta {delta:+.5f}, KL {line['heldout_kl']:.5f}", flush=True)


def _factors(model: Any, folder: Path, sparsity: float, solver: str) -> swd.FactorSet:
    if not (folder / "factors.json").is_file():
        tokens = swd.text_tokens(CALIBRATION, split="train")
        swd.factorize(model, "all", sparsity=sparsity, tokens=tokens, preset=solver, progress=False).save(folder)
    return swd.FactorSet.load(folder)


def _standard_error(model: Any, factors: swd.FactorSet, rows: torch.Tensor) -> float:
    """Of the CE delta, rows being the independent observations."""

    @torch.no_grad()
    def losses() -> torch.Tensor:
        parts = [(model(batch)[:, :-1].log_softmax(-1), batch[:, 1:, None]) for batch in rows.split(64)]
        return torch.cat([-log_q.gather(-1, targets).mean((1, 2)) for log_q, targets in parts])

    dense = losses()
    with swd.attach(model, factors):
        return float((losses() - dense).std() / len(rows) ** 0.5)


if __name__ == "__main__":
    main()
