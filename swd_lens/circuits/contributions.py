"""Contributions: what each unit gave to each prompt's margin, by four definitions with one signature.

Each maker takes a `Pass` (host, sites, road, means) and gives a function bucket -> {site: (batch, unit)}, in logits.

1. `first_order`: z * dg/dz, summed over positions (paper app. A.3).
2. `integrated_gradients`: (z - mu) * the mean of dg/dz on the straight way from mu to z, one site at a time while later ones
   follow. Per site the contributions add up to margin(z) - margin(site at mu), up to the midpoint rule's error.
3. `ablation`: margin - margin with the unit alone at mu. Exact, at one run per unit.
4. `direct_logit`: z * (write vector . dg/dr), r the residual stream that the final norm reads at the scoring position: the
   effect on the logits past all later layers (our reading of NaNA, method.md §4.2).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.circuits.means import Means
from swd_lens.circuits.roads import Ground, Road, Runner
from swd_lens.hosts import Host, Start, norms_output
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.task import Bucket
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors

# Prompts x positions x units set to their means at once, by "ablation".
_TOKENS_PER_FORWARD = 16_384

PerSite = dict[str, Float[Tensor, "batch _unit"]]


@dataclass(frozen=True)
class Pass:
    """One pass over the training prompts: what the makers need."""

    host: Host
    sites: list[Site]
    units: Mapping[str, Units]
    road: Road
    means: Means
    steps: int

    @property
    def chosen(self) -> slice:
        """The positions that count."""
        return slice(-1, None) if self.road.positions == "scoring" else slice(None)


def first_order(turn: Pass) -> Callable[[Bucket], PerSite]:
    """z * dg/dz."""
    runner = Runner(turn.host, turn.units, turn.road)

    def contributions(bucket: Bucket) -> PerSite:
        z, gradients = _margin_gradients(turn, runner.ground(bucket.tokens), bucket)
        _hand_over(turn, bucket, z)
        return {name: (z[name][:, turn.chosen] * gradients[name][:, turn.chosen]).double().sum(1).cpu() for name in z}

    return contributions


def integrated_gradients(turn: Pass) -> Callable[[Bucket], PerSite]:
    """(z - mu) * mean over the way from mu to z of dg/dz."""
    means, chosen = turn.means.finished(), turn.chosen
    runner = Runner(turn.host, turn.units, turn.road)

    def contributions(bucket: Bucket) -> PerSite:
        ground, found = runner.ground(bucket.tokens), {}
        for site in turn.sites:
            total: Any = 0.0
            for step in range(turn.steps):
                # Midpoints: exact for margins that are quadratic on the way.
                part = (step + 0.5) / turn.steps
                z, gradients = _margin_gradients(turn, ground, bucket, only=site, part=part, mu=means)
                total = total + gradients[site.name][:, chosen].double()
            difference = z[site.name][:, chosen] - _mu(means[site.name], z[site.name])[:, chosen]
            found[site.name] = (difference.double() * total / turn.steps).sum(1).cpu()
        return found

    return contributions


def ablation(turn: Pass) -> Callable[[Bucket], PerSite]:
    """margin - margin with the unit alone at mu."""
    means = turn.means.finished()
    runner = Runner(turn.host, turn.units, turn.road)
    names = [(name, unit) for name, units in turn.units.items() for unit in range(units.n_units)]

    def contributions(bucket: Bucket) -> PerSite:
        ground = runner.ground(bucket.tokens)
        values = {name: _mu(mean, bucket.tokens[:, :, None]) for name, mean in means.items()}

        def margins(alone: list[tuple[str, int]], copies: int) -> Tensor:
            masks = {name: torch.zeros(copies, u.n_units, dtype=torch.bool) for name, u in turn.units.items()}
            for row, (name, unit) in enumerate(alone):
                masks[name][row, unit] = True
            with torch.no_grad():
                logits = runner.logits(ground, masks, values, bucket.token_ids)
            return bucket.margin(logits).double().cpu()

        whole = margins([], 1)
        at_once = max(1, _TOKENS_PER_FORWARD // bucket.tokens.numel())
        lost = torch.cat(
            [
                whole - margins(names[i : i + at_once], len(names[i : i + at_once]))
                for i in range(0, len(names), at_once)
            ]
        )
        sizes = [units.n_units for units in turn.units.values()]
        return {name: part.T for name, part in zip(turn.units, lost.split(sizes), strict=True)}

    return contributions


def direct_logit(turn: Pass) -> Callable[[Bucket], PerSite]:
    """z * (write vector . dg/dr) at the scoring position."""
    for site in turn.sites:
        if site.kind not in WRITES_RESIDUAL:
            raise ValueError(
                f"score='direct_logit' is for sites that write to the residual stream ({', '.join(WRITES_RESIDUAL)}); "
                f"{site.name} does not. Leave it out, or take score='first_order'"
            )
        if norms_output(turn.host, site):
            raise ValueError(
                f"score='direct_logit' follows a write vector to the logits as it is, but in this host a norm stands between "
                f"{site.name} and the residual stream. Take score='first_order'"
            )
    host, last = turn.host, turn.host.model.cfg.n_layers

    def contributions(bucket: Bucket) -> PerSite:
        prefix = host.freeze_prefix(bucket.tokens) if turn.road.keeps_prefix else None
        z: dict[str, Tensor] = {}
        with torch.no_grad(), host.model.hooks(fwd_hooks=[(s.hook_name, _watch(s.name, z)) for s in turn.sites]):
            residual = host.residual(bucket.tokens, last, prefix)
        require_seen(turn.sites, z, "units")
        _hand_over(turn, bucket, z)
        with torch.enable_grad():
            leaf = residual[:, -1:].detach().requires_grad_(True)
            margin = bucket.margin(_read_out(host, bucket, leaf)).sum()
            gradient = torch.autograd.grad(margin, leaf)[0][:, 0]
        return {
            site.name: (z[site.name][:, -1] * _written_effect(turn.units[site.name], z[site.name][:, -1], gradient))
            .double()
            .cpu()
            for site in turn.sites
        }

    return contributions


CONTRIBUTIONS: dict[str, Callable[[Pass], Callable[[Bucket], PerSite]]] = {
    "first_order": first_order,
    "integrated_gradients": integrated_gradients,
    "ablation": ablation,
    "direct_logit": direct_logit,
}


# ---------------------------------------------------------------------------------------------- parts


def _margin_gradients(
    turn: Pass,
    ground: Ground,
    bucket: Bucket,
    only: Site | None = None,
    part: float = 1.0,
    mu: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Float[Tensor, "batch _pos _unit"]], dict[str, Float[Tensor, "batch _pos _unit"]]]:
    """z and d margin / d z at every site, or at `only` one, where z is first moved to mu + part * (z - mu)."""
    sites = turn.sites if only is None else [only]
    captured: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def capture(name: str) -> Any:
        def keep(z: Tensor, hook: Any) -> Tensor:
            found[name] = z.detach().float()
            if mu is not None:
                at = z.detach() + (1.0 - part) * (_mu(mu[name], z).to(z) - z.detach())
                if turn.road.positions == "scoring":
                    at = torch.cat([z.detach()[:, :-1], at[:, -1:]], dim=1)
                z = at
            # With every parameter frozen z has no gradient path: then it is made a leaf.
            captured[name] = z if z.requires_grad else z.detach().requires_grad_(True)
            return captured[name]

        return keep

    with torch.enable_grad(), turn.host.model.hooks(fwd_hooks=[(s.hook_name, capture(s.name)) for s in sites]):
        logits = turn.host.last_logits(bucket.tokens, ground.prefix, start=ground.start, token_ids=bucket.token_ids)
        margins = bucket.margin(logits)
        require_seen(sites, captured, "units")
        if not margins.requires_grad:
            raise ValueError(
                "the margin has no gradient by the units: a metric function must be differentiable (argmax or a comparison is "
                "not), and torch.inference_mode must be off. score='ablation' needs no gradient"
            )
        gradients = torch.autograd.grad(margins.sum(), list(captured.values()))
    return found, {name: g.float() for name, g in zip(captured, gradients, strict=True)}


def _hand_over(turn: Pass, bucket: Bucket, z: dict[str, Tensor]) -> None:
    """Means need not run again what was just run, if it holds the positions they average."""
    whole = next(iter(z.values())).shape[1] == bucket.tokens.shape[1]
    if whole or turn.means.last_suffices:
        turn.means.add(bucket, z)


def _mu(mean: Tensor, like: Tensor) -> Float[Tensor, "_batch _pos _unit"]:
    """The mean in a shape that broadcasts over `like` (batch, pos, ...)."""
    return mean.view(1, 1, -1) if mean.ndim == 1 else mean[-like.shape[1] :][None]


def _watch(name: str, seen: dict[str, Tensor]) -> Any:
    return lambda z, hook: seen.update({name: z.detach().float()})


def _read_out(host: Host, bucket: Bucket, residual: Float[Tensor, "batch 1 d_model"]) -> Tensor:
    return host.last_logits(
        bucket.tokens[:, -1:], start=Start(host.model.cfg.n_layers, residual), token_ids=bucket.token_ids
    )


def _written_effect(
    units: Units, z: Float[Tensor, "batch unit"], gradient: Float[Tensor, "batch d_out"]
) -> Float[Tensor, "batch unit"]:
    """write @ gradient per prompt; of a coder, by differentiating what it decodes."""
    if isinstance(units, Factors):
        return gradient.float() @ units.write.to(gradient.device).float().T
    assert isinstance(units, CoderUnits)  # attach lets nothing else through
    with torch.enable_grad():
        leaf = z.detach().requires_grad_(True)
        return torch.autograd.grad((units.decode(leaf) * gradient).sum(), leaf)[0]
