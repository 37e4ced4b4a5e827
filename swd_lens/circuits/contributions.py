"""Contributions: what each unit adds to the task margin on one prompt, by one of several definitions.

Each definition is one record of `SCORES`: a function from a `TrainingPass` to (bucket -> contributions) under `@score(...)`,
which says what `attribute` has to know of it. To add one, write it here: `attribute`, its help and its checks read the registry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """One definition of a contribution.

    Attributes:
        make: called once per `attribute`, while the units are attached; gives bucket -> (batch, unit) per site.
        about: what it is, in a sentence of the help.
        gradients: whether it needs gradients in the host.
        known: whether runs may begin behind the first replaced site (fast_forward.py, point 3): only where z and gradients by it
            are not looked at.
        steps: whether it depends on `steps`, which the settings then name.
        note: for the settings; "" for none.
    """

    make: Callable[["TrainingPass"], Callable[[Bucket], PerSite]]
    about: str
    gradients: bool = True
    known: bool = False
    steps: bool = False
    note: str = ""


SCORES: dict[str, Score] = {}


def score(about: str, **needs: Any) -> Callable[[Any], Any]:
    """Register a function of a `TrainingPass` in `SCORES`, under its own name."""

    def register(make: Any) -> Any:
        SCORES[make.__name__] = Score(make, about, **needs)
        return make

    return register


@dataclass(frozen=True)
class TrainingPass:
    """One pass over the training prompts under the attached units: what every definition of a contribution needs.

    Attributes:
        steps: of integrated gradients.
        dense: what is known of the dense host on these prompts.
    """

    host: Host
    units: UnitSet
    fast_forward: FastForward
    means: Means
    steps: int
    dense: DenseCache | None = None

    @property
    def counted(self) -> slice:
        """The positions that count."""
        return slice(-1, None) if self.fast_forward.positions == "scoring" else slice(None)

    @property
    def runner(self) -> Runner:
        return Runner(self.host, self.units, self.fast_forward, self.dense)

    def moved(
        self, mean: Float[Tensor, "*pos unit"], z: Float[Tensor, "batch pos unit"]
    ) -> Float[Tensor, "batch _pos unit"]:
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


def _times_gradients(training: TrainingPass, means: Mapping[str, Tensor] | None) -> Callable[[Bucket], PerSite]:
    """z * dg/dz, or (z - mu) * dg/dz, summed over the positions that count."""
    runner, counted = training.runner, training.counted

    def contributions(bucket: Bucket) -> PerSite:
        z, gradients = training.margin_gradients(runner.share(bucket.tokens), bucket)
        training.add_to_means(bucket, z)
        of_sites = {}
        for name, value in z.items():
            moved = value[:, counted] if means is None else training.moved(means[name], value)
            of_sites[name] = (moved * gradients[name][:, counted]).double().sum(1).cpu()
        return of_sites

    return contributions


@score("z * dg/dz, summed over positions (paper app. A.3).")
def first_order(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """z * dg/dz."""
    return _times_gradients(training, None)


@score(
    "(z - mu) * dg/dz, what setting the unit to mu costs to first order: what a unit holds on every prompt counts nothing."
)
def attribution_patching(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """(z - mu) * dg/dz."""
    return _times_gradients(training, training.means.finished())


@score(
    "(z - mu) * the mean of dg/dz on the straight way from mu to z, one site at a time while later ones follow. Per site they "
    "add up to margin(z) - margin(site at mu), up to the midpoint rule's error.",
    steps=True,
)
def integrated_gradients(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """(z - mu) * mean over the way from mu to z of dg/dz."""
    means, counted, steps, runner = training.means.finished(), training.counted, training.steps, training.runner

    def of_site(site: Site, shared: Shared, bucket: Bucket) -> Float[Tensor, "batch unit"]:
        total: Any = 0.0
        z: dict[str, Tensor] = {}
        for step in range(steps):
            # Midpoints: exact for margins that are quadratic on the way.
            z, gradients = training.margin_gradients(shared, bucket, site, (step + 0.5) / steps)
            total = total + gradients[site.name][:, counted].double()
        difference = training.moved(means[site.name], z[site.name])
        return (difference.double() * total / steps).sum(1).cpu()

    def contributions(bucket: Bucket) -> PerSite:
        shared = runner.share(bucket.tokens)
        return {site.name: of_site(site, shared, bucket) for site in training.units.sites}

    return contributions


@score("margin - margin with the unit alone at mu. Exact, at one run per unit.", gradients=False, known=True)
def ablation(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """margin - margin with the unit alone at mu."""
    means, runner, sizes = training.means.finished(), training.runner, training.units.sizes
    names = [(site, unit) for site, size in sizes.items() for unit in range(size)]

    def contributions(bucket: Bucket) -> PerSite:
        shared = runner.share(bucket.tokens)
        values = {name: aligned(mean, bucket.tokens.shape[1])[None] for name, mean in means.items()}

        def margins(alone: list[tuple[str, int]], copies: int) -> Tensor:
            masks = {site: torch.zeros(copies, size, dtype=torch.bool) for site, size in sizes.items()}
            for row, (site, unit) in enumerate(alone):
                masks[site][row, unit] = True
            with torch.no_grad():
                logits = runner.logits(shared, masks, values, bucket.token_ids)
            return bucket.margin(logits).double().cpu()

        whole = margins([], 1)
        at_once = max(1, _TOKENS_PER_FORWARD // bucket.tokens.numel())
        chunks = [names[start : start + at_once] for start in range(0, len(names), at_once)]
        lost = torch.cat([whole - margins(chunk, len(chunk)) for chunk in chunks])
        return {site: part.T for site, part in zip(sizes, lost.split(list(sizes.values())), strict=True)}

    return contributions


@score(
    "z * (write vector . dg/dr), r the residual stream that the final norm reads at the scoring position: the effect on the "
    "logits past all later layers (our reading of NaNA, method.md §4.2). For sites that write to the residual stream.",
    note="swd_lens' reading of NaNA's score, which the paper describes in words only",
)
def direct_logit(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """z * (write vector . dg/dr) at the scoring position; through the norm behind the site, its scale held, where it has one."""
    host, units, last = training.host, training.units, training.host.model.cfg.n_layers
    for site in units.sites:
        if site.kind not in WRITES_RESIDUAL:
            raise ValueError(
                f"score='direct_logit' is for sites that write to the residual stream ({', '.join(WRITES_RESIDUAL)}); "
                f"{site.name} does not. Leave it out, or take score='first_order'"
            )

    def contributions(bucket: Bucket) -> PerSite:
        prefix = host.freeze_prefix(bucket.tokens) if training.fast_forward.keeps_prefix else None
        watch = norms_behind(host, units.sites)
        with torch.no_grad(), watch as behind, recording(host, units=units.sites, keep=Tensor.float) as seen:
            residual = host.residual(bucket.tokens, last, prefix)
        z = seen.units
        training.add_to_means(bucket, z)
        with torch.enable_grad():
            leaf = residual[:, -1:].detach().requires_grad_(True)
            start = Start(last, leaf)
            logits = host.last_logits(bucket.tokens[:, -1:], start=start, token_ids=bucket.token_ids)
            gradient = torch.autograd.grad(bucket.margin(logits).sum(), leaf)[0][:, 0]
        of_sites = {}
        for site in units.sites:
            norm = held_behind(host, site, behind[site.name][0][:, -1]) if site.name in behind else None
            cotangent = gradient if norm is None else norm.pull(gradient.float()) * norm.inverse[:, None]
            at_end, of_site = z[site.name][:, -1], units[site.name]
            if isinstance(of_site, Factors):
                effect = cotangent.float() @ of_site.write.to(cotangent.device).float().T
            else:  # what the write vectors are at this z is found by differentiating
                assert isinstance(of_site, CoderUnits)  # attach lets nothing else through
                with torch.enable_grad():
                    at = at_end.detach().requires_grad_(True)
                    effect = torch.autograd.grad((of_site.decode(at) * cotangent).sum(), at)[0]
            of_sites[site.name] = (at_end * effect).double().cpu()
        return of_sites

    return contributions
