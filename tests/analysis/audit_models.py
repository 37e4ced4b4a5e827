"""A toy model with letters for tokens, random factors, and what a brute-force search says of them."""

from typing import Any

import torch

import swd_lens as swd
from swd_lens.circuits.scores import UnitScores
from swd_lens.units import attach
from swd_lens.units.unit_set import identities


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    padding_side = "right"

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


def lettered(**overrides: Any) -> Any:
    from tests.micro import toy_model  # which needs HookedTransformer; bridges are tested without it

    model = toy_model(**overrides)
    model.tokenizer = Letters()
    return model


def sparse_factors(model: Any, pattern: str | list[str], units: int = 12, seed: int = 0) -> swd.FactorSet:
    """Random factors with about half of their entries zero, and one unit that is dead."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (torch.rand(*shape, generator=generator) < 0.5) / 4

    made = {}
    for site in swd.find_sites(model, pattern):
        read, write = matrix(site.d_in, units), matrix(units, site.d_out)
        read[:, units - 1] = 0.0
        made[site.name] = swd.Factors(read, write, provenance={"site": site.name})
    return swd.FactorSet(made)


def activations(model: Any, factors: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """site -> z (rows, pos, unit), by run_with_cache."""
    with attach(model, factors) as attachment, torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        return {site.name: cache[site.hook_name] for site in attachment.sites}


def made_scores(factors: swd.FactorSet, seed: int = 0, task: str = "a task") -> UnitScores:
    """Scores drawn at random, as if attributed to these factors."""
    generator = torch.Generator().manual_seed(seed)
    scores = {site: torch.rand(f.n_units, generator=generator) for site, f in factors.items()}
    settings = {"task": task, "units": {s: f.n_units for s, f in factors.items()}, "factors": identities(factors)}
    return UnitScores(scores, {site: torch.zeros_like(s) for site, s in scores.items()}, settings)
