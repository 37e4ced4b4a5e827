"""What an edge of a unit graph claims, done to the host: nudge one unit and hold everything that the edge holds."""

from typing import Any

import torch

from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site
from swd_lens.units import attach
from swd_lens.units.factors import Factors

TOKENS = [3, 7, 1, 12, 5]


def random_factors(model: Any, *kinds: str, n_units: int = 5) -> dict[str, Factors]:
    """Factors of every site of these kinds; they stand for no matrix, which no edge asks for."""
    host = host_of(model)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.4

    sites = [site for site in (*host.sites(), *host.alternatives()) if site.kind in kinds]
    return {site.name: Factors(random(site.d_in, n_units), random(n_units, site.d_out)) for site in sites}


def all_units(factors: dict[str, Factors]) -> list[tuple[str, int]]:
    return [(site, unit) for site, f in factors.items() for unit in range(f.n_units)]


def weights_of(graph: Any) -> dict[tuple[str, str], float]:
    """(source, target) -> weight of every edge."""
    return {(row.source, row.target): row.weight for row in graph.edges.itertuples()}


def nudged(
    model: Any,
    factors: dict[str, Factors],
    source: tuple[str, int, int],
    target: str,
    delta: float,
    tokens: list[int] = TOKENS,
    scale_one: bool = False,
) -> torch.Tensor:
    """Change of what `target` shows, per unit of delta, when unit (site, index, position) moves by delta.

    Held at the clean run's values: z of every other attached site, attention patterns, and the norms' scales (or at 1).

    Args:
        target: a site (its z, (pos, unit)), or "logits" (less the mean over the vocabulary, (vocab,)).
    """
    host = host_of(model)
    ids = torch.tensor(tokens)[None]
    held = [name for name in model.hook_dict if name.endswith(("hook_scale", "hook_pattern"))]
    clean: dict[str, torch.Tensor] = {}
    shown: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda value, hook: clean.update({name: value.detach().clone()})

    def hold(name: str) -> Any:
        return lambda value, hook: torch.ones_like(value) if scale_one and "scale" in name else clean[name]

    def move(name: str, index: int, position: int, by: float) -> Any:
        def hook_fn(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z = clean[name].clone()
            z[0, position, index] += by
            return z

        return hook_fn

    def show(name: str) -> Any:
        return lambda z, hook: shown.update({name: z.detach().clone()})

    with torch.no_grad(), attach(model, factors) as attachment:
        names = {site.name: site.hook_name for site in attachment.sites}
        with model.hooks(fwd_hooks=[(name, keep(name)) for name in (*held, *names.values())]):
            host.run(ids)
        changed = []
        for sign in (1, -1):
            hooks = [(name, hold(name)) for name in held]
            for site, name in names.items():
                if site == source[0]:
                    hooks.append((name, move(name, source[1], source[2], sign * delta)))
                elif site == target:
                    hooks.append((name, show(target)))
                else:
                    hooks.append((name, hold(name)))
            with model.hooks(fwd_hooks=hooks):
                logits = host.run(ids)[0, -1]
            changed.append(logits - logits.mean() if target == "logits" else shown[target][0])
    return (changed[0] - changed[1]) / (2 * delta)


def check_edges(model: Any, factors: dict[str, Factors], graph: Any, source: tuple[str, int, int], target: str) -> int:
    """Compare a nudge with all edges from one unit into one site; returns how many there are."""
    site, index, position = source
    change = nudged(model, factors, source, target, 0.05)
    weights = weights_of(graph)
    name = f"{site}/{index}@{position}"
    largest, count = float(change.abs().max()), 0
    for p in range(change.shape[0]):
        for unit in range(change.shape[1]):
            weight = weights.get((name, f"{target}/{unit}@{p}"), 0.0)
            assert abs(weight - float(change[p, unit])) < 2e-3 * max(largest, 1e-2), (name, target, unit, p)
            count += weight != 0.0
    return count


def sites_by_name(model: Any) -> dict[str, Site]:
    host = host_of(model)
    return {site.name: site for site in (*host.sites(), *host.alternatives())}
