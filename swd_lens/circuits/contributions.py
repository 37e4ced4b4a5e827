"""Contributions: what each unit adds to the task margin on one prompt, by one of several definitions.

Each definition is one record of `SCORES`: a function under `@score(...)`, which says what `attribute` has to know of it; its
docstring is its line in the help. To add one, write it here: `attribute`, its help and its checks read the registry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.circuits.ablation import Means, aligned
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import FastForward, Runner, Shared
from swd_lens.hosts import Host, Start
from swd_lens.hosts.held import held_behind, norms_behind
from swd_lens.hosts.recording import recording, require_seen
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.task import Bucket
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import UnitSet

# Prompts x positions x units set to their means at once, by "ablation".
_TOKENS_PER_FORWARD = 16_384

PerSite = dict[str, Float[Tensor, "batch _unit"]]


@dataclass(frozen=True)
class Score:
    """One definition of a contribution."""

    # gives every prompt's contribution of every unit, site -> (batch, unit), float64 on the CPU
    of: Callable[["TrainingPass", Bucket], PerSite]
    about: str  # a sentence of the help
    gradients: bool = True  # whether it needs gradients in the host
    # whether runs may begin behind the first replaced site (fast_forward.py, point 3): only where z and gradients by it are not
    # looked at
    known: bool = False
    steps: bool = False  # whether it depends on `steps`, which the settings then name
    note: str = ""  # for the settings; "" for none


SCORES: dict[str, Score] = {}
Definition = TypeVar("Definition", bound=Callable[["TrainingPass", Bucket], PerSite])


def score(**needs: Any) -> Callable[[Definition], Definition]:
    """Register a definition in `SCORES`, under its own name."""

    def register(of: Definition) -> Definition:
        SCORES[of.__name__] = Score(of, " ".join((getdoc(of) or "").split()), **needs)
        return of

    return register


@dataclass(frozen=True)
class TrainingPass:
    """One pass over the training prompts under the attached units: what every definition of a contribution needs."""

    host: Host
    units: UnitSet
    fast_forward: FastForward
    means: Means
    steps: int  # of integrated gradients
    dense: DenseCache | None = None  # what is known of the dense host on these prompts

    @property
    def counted(self) -> slice:
        """The positions that count."""
        return slice(-1, None) if self.fast_forward.positions == "scoring" else slice(None)

    @property
    def runner(self) -> Runner:
        return Runner(self.host, self.units, self.fast_forward, self.dense)

    def moved(self, mean: Float[Tensor, "*pos unit"], z: Float[Tensor, "batch pos unit"]) -> Float[Tensor, "batch _pos unit"]:
        """z - mu at the positions that count."""
        return z[:, self.counted] - aligned(mean, z.shape[1]).to(z)[None][:, self.counted]

    def add_to_means(self, bucket: Bucket, z: Mapping[str, Tensor]) -> None:
        """Means need not run again what was just run, if it holds the positions they average."""
        whole = next(iter(z.values())).shape[1] == bucket.tokens.shape[1]
        if whole or self.means.last_suffices:
            self.means.add(bucket, z)

    def margin_gradients(
        self, shared: Shared, bucket: Bucket, moved: Site | None = None, part: float = 1.0
    ) -> tuple[dict[str, Float[Tensor, "batch _pos _unit"]], dict[str, Float[Tensor, "batch _pos _unit"]]]:
        """z and d margin / d z at every site, or at the one of which z is first moved to mu + part * (z - mu)."""
        sites = self.units.sites if moved is None else [moved]
        mu = None if moved is None else self.means.finished()[moved.name]
        differentiated: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}

        def capture(name: str) -> Callable[..., Tensor]:
            def keep(z: Tensor, hook: Any) -> Tensor:
                seen[name] = z.detach().float()
                if mu is not None:
                    at = z.detach() + (1.0 - part) * (aligned(mu, z.shape[1]).to(z) - z.detach())
                    if self.fast_forward.positions == "scoring":
                        at = torch.cat([z.detach()[:, :-1], at[:, -1:]], dim=1)
                    z = at
                # With every parameter frozen z has no gradient path: then it is made a leaf.
                differentiated[name] = z if z.requires_grad else z.detach().requires_grad_(True)
                return differentiated[name]

            return keep

        hooks = [(site.hook_name, capture(site.name)) for site in sites]
        with torch.enable_grad(), self.host.model.hooks(fwd_hooks=hooks):
            logits = self.host.last_logits(bucket.tokens, shared.prefix, start=shared.start, token_ids=bucket.token_ids)
            margins = bucket.margin(logits)
            require_seen(sites, differentiated, "units")
            if not margins.requires_grad:
                raise ValueError(
                    "the margin has no gradient by the units: a metric function must be differentiable (argmax or a "
                    "comparison is not). score='ablation' needs no gradient"
                )
            gradients = torch.autograd.grad(margins.sum(), list(differentiated.values()))
        return seen, {name: g.float() for name, g in zip(differentiated, gradients, strict=True)}


@score()
def first_order(training: TrainingPass, bucket: Bucket) -> PerSite:
    """z * dg/dz, summed over positions (paper app. A.3)."""
    z, gradients = training.margin_gradients(training.runner.share(bucket.tokens), bucket)
    training.add_to_means(bucket, z)
    counted = training.counted
    return {name: (z[name][:, counted] * gradients[name][:, counted]).double().sum(1).cpu() for name in z}


@score()
def attribution_patching(training: TrainingPass, bucket: Bucket) -> PerSite:
    """(z - mu) * dg/dz, what setting the unit to mu costs to first order: what a unit holds on every prompt counts nothing."""
    means = training.means.finished()
    z, gradients = training.margin_gradients(training.runner.share(bucket.tokens), bucket)
    moved = {name: training.moved(means[name], value) for name, value in z.items()}
    return {name: (moved[name] * gradients[name][:, training.counted]).double().sum(1).cpu() for name in z}


@score(steps=True)
def integrated_gradients(training: TrainingPass, bucket: Bucket) -> PerSite:
    """(z - mu) * the mean of dg/dz on the straight way from mu to z, one site at a time while later ones follow. Per site they
    add up to margin(z) - margin(site at mu), up to the midpoint rule's error.
    """
    means, steps, shared, of_sites = training.means.finished(), training.steps, training.runner.share(bucket.tokens), {}
    for site in training.units.sites:
        total: Any = 0.0
        z: dict[str, Tensor] = {}
        for step in range(steps):
            # Midpoints: exact for margins that are quadratic on the way.
            z, gradients = training.margin_gradients(shared, bucket, site, (step + 0.5) / steps)
            total = total + gradients[site.name][:, training.counted].double()
        difference = training.moved(means[site.name], z[site.name])
        of_sites[site.name] = (difference.double() * total / steps).sum(1).cpu()
    return of_sites


@score(gradients=False, known=True)
def ablation(training: TrainingPass, bucket: Bucket) -> PerSite:
    """margin - margin with the unit alone at mu. Exact, at one run per unit."""
    runner, sizes, means = training.runner, training.units.sizes, training.means.finished()
    shared = runner.share(bucket.tokens)
    values = {name: aligned(mean, bucket.tokens.shape[1])[None] for name, mean in means.items()}

    def margins(alone: list[tuple[str, int]], copies: int) -> Tensor:
        masks = {site: torch.zeros(copies, size, dtype=torch.bool) for site, size in sizes.items()}
        for row, (site, unit) in enumerate(alone):
            masks[site][row, unit] = True
        with torch.no_grad():
            logits = runner.logits(shared, masks, values, bucket.token_ids)
        return bucket.margin(logits).double().cpu()

    names = [(site, unit) for site, size in sizes.items() for unit in range(size)]
    at_once = max(1, _TOKENS_PER_FORWARD // bucket.tokens.numel())
    chunks = [names[start : start + at_once] for start in range(0, len(names), at_once)]
    whole = margins([], 1)
    lost = torch.cat([whole - margins(chunk, len(chunk)) for chunk in chunks])
    return {site: part.T for site, part in zip(sizes, lost.split(list(sizes.values())), strict=True)}


@score(note="swd_lens' reading of NaNA's score, which the paper describes in words only")
def direct_logit(training: TrainingPass, bucket: Bucket) -> PerSite:
    """z * (write vector . dg/dr), r the residual stream that the final norm reads at the scoring position: the effect on the
    logits past all later layers (our reading of NaNA, method.md §4.2). For sites that write to the residual stream.
    """
    host, units, last = training.host, training.units, training.host.model.cfg.n_layers
    for site in units.sites:
        if site.kind not in WRITES_RESIDUAL:
            raise ValueError(
                f"score='direct_logit' is for sites that write to the residual stream ({', '.join(WRITES_RESIDUAL)}); "
                f"{site.name} does not. Leave it out, or take score='first_order'"
            )
    prefix = host.freeze_prefix(bucket.tokens) if training.fast_forward.keeps_prefix else None
    watch = norms_behind(host, units.sites)
    with torch.no_grad(), watch as behind, recording(host, units=units.sites, keep=Tensor.float) as seen:
        residual = host.residual(bucket.tokens, last, prefix)
    training.add_to_means(bucket, seen.units)
    with torch.enable_grad():
        leaf = residual[:, -1:].detach().requires_grad_(True)
        logits = host.last_logits(bucket.tokens[:, -1:], start=Start(last, leaf), token_ids=bucket.token_ids)
        gradient = torch.autograd.grad(bucket.margin(logits).sum(), leaf)[0][:, 0]
    of_sites = {}
    for site in units.sites:
        # Through the norm behind the site, its scale held, where it has one.
        norm = held_behind(host, site, behind[site.name][0][:, -1]) if site.name in behind else None
        cotangent = gradient if norm is None else norm.pull(gradient.float()) * norm.inverse[:, None]
        at_end, of_site = seen.units[site.name][:, -1], units[site.name]
        if isinstance(of_site, Factors):
            effect = cotangent.float() @ of_site.write.to(cotangent.device).float().T
        else:  # a coder's effect is found by differentiating what it decodes
            assert isinstance(of_site, CoderUnits)  # attach lets nothing else through
            with torch.enable_grad():
                at = at_end.detach().requires_grad_(True)
                effect = torch.autograd.grad((of_site.decode(at) * cotangent).sum(), at)[0]
        of_sites[site.name] = (at_end * effect).double().cpu()
    return of_sites
