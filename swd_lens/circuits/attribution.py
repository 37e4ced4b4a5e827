"""attribute: how much each unit contributes to the task margin.

1. Attach the factors (the unpruned replacement) and run the training prompts. mu_i, the mean of z_i, is what ablation will
   put in a unit's place.
2. Per example and unit, a contribution to the margin, in logits, by one of five definitions (`CONTRIBUTIONS`):
   `first_order`: z * dg/dz, summed over positions (paper app. A.3).
   `attribution_patching`: (z - mu) * dg/dz, what setting the unit to mu costs to first order: what a unit holds on every prompt
   counts nothing. All sites in one run.
   `integrated_gradients`: (z - mu) * the mean of dg/dz on the straight way from mu to z, one site at a time while later ones
   follow. Per site the contributions add up to margin(z) - margin(site at mu), up to the midpoint rule's error.
   `ablation`: margin - margin with the unit alone at mu. Exact, at one run per unit.
   `direct_logit`: z * (write vector . dg/dr), r the residual stream that the final norm reads at the scoring position: the
   effect on the logits past all later layers (our reading of NaNA, method.md §4.2).
3. Sum it over positions (positions="all"), clamp each example's at zero (sign="positive"), then average over examples:
   a_i = E[max(0, z_i dg/dz_i)] (paper app. A.3).
4. Rank all units of all sites together, by descending score; ties by (site in execution order, unit).

A further score is a function `TrainingPass` -> (bucket -> contributions) in `CONTRIBUTIONS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.errors import legible, quoted
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.ablation import MEAN_OVER, Means, aligned
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import FastForward, Runner, Shared, find_fast_forward
from swd_lens.circuits.scores import UnitScores, require_finite
from swd_lens.hosts import Host, Start, host_of, require_gradients, require_no_dropout
from swd_lens.hosts.held import held_behind, norms_behind
from swd_lens.hosts.recording import recording, require_seen, standing_hooks
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.task import Bucket, Task, TaskSplit
from swd_lens.units import attach
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import UnitSet

POSITIONS = ("scoring", "all")
# What becomes of one example's contribution before the mean over examples.
SIGNS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda contribution: contribution.clamp(min=0),
    "signed": lambda contribution: contribution,
    "absolute": lambda contribution: contribution.abs(),
}
# Prompts x positions x units set to their means at once, by "ablation".
_TOKENS_PER_FORWARD = 16_384

PerSite = dict[str, Float[Tensor, "batch _unit"]]


@with_torch_defaults
def attribute(
    model: Any,
    factors: Any,
    prompts: TaskSplit | Task,
    *,
    score: str = "first_order",
    sign: str = "positive",
    positions: str = "scoring",
    mean_over: str | None = None,
    steps: int = 16,
    batch_size: int = 128,
    dense: DenseCache | None = None,
    progress: bool = False,
) -> UnitScores:
    """Task-margin attribution of every unit under the unpruned replacement. The defaults are the paper's (app. A.3).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`: one site, a surface, or all sites; they share one ranking.
        prompts: the training split (a Task means its train split).
        score: "first_order" (paper): z * dg/dz. "attribution_patching": (z - mu) * dg/dz. "integrated_gradients": (z - mu) times
            the mean gradient on the way from mu to z, site by site. "ablation": the margin that is lost when the unit alone is
            set to mu, exactly. "direct_logit": z times what its write vector does to the margin past all later layers (through
            the final norm); our reading of NaNA's score (method.md §4.2), only for sites that write to the residual stream.
        sign: "positive" (paper) clamps every example's contribution at zero, "absolute" takes its magnitude, "signed" leaves
            it; then the mean over examples. In every case the highest score ranks first.
        positions: "scoring" (paper): score, mean and later intervene at the last position only; "all": contributions summed
            over positions, interventions everywhere.
        mean_over: what mu averages: "scoring" (the last position of every prompt), "all_tokens", or "per_position" (one mean
            per position, counted from the end). None = "scoring" with positions="scoring", else "all_tokens".
        steps: points on the way of integrated gradients (midpoint rule).
        batch_size: prompts per forward.
        dense: what the dense host gives on prompts, kept for further replacements of it (`compare` hands it on).

    Raises:
        ValueError: unknown score, sign, positions or mean_over, steps below 1, or direct_logit at a site that does not write
            to the residual stream; a score or a mean that is not finite.
        AttachError: see `swd_lens.attach`.
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    if mean_over is None:
        mean_over = "scoring" if positions == "scoring" else "all_tokens"
    _check("score", score, tuple(CONTRIBUTIONS))
    _check("sign", sign, tuple(SIGNS))
    _check("positions", positions, POSITIONS)
    _check("mean_over", mean_over, MEAN_OVER)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    split = prompts.train if isinstance(prompts, Task) else prompts
    if not isinstance(split, TaskSplit):
        raise TypeError(
            f"prompts must be a Task or a TaskSplit, got {type(split).__name__}; load_task(name, model) makes one"
        )
    split.require_host(model)
    require_no_dropout(model)
    if score != "ablation":
        require_gradients(model)
    host = host_of(model)
    with attach(model, factors) as attachment:
        units, sites = attachment.factors, attachment.sites
        fast_forward = find_fast_forward(host, sites, units, split, positions, known=score == "ablation", dense=dense)
        means = Means(host, sites, split, positions, mean_over, batch_size)
        contributions = CONTRIBUTIONS[score](TrainingPass(host, units, fast_forward, means, steps, dense))
        totals = {site: torch.zeros(size, dtype=torch.float64) for site, size in units.sizes.items()}
        for bucket in tqdm(
            list(split.buckets(batch_size)), desc="attribution", unit="batch", disable=not progress, leave=False
        ):
            of_bucket = contributions(bucket)
            require_finite(f"the score ({score})", of_bucket)
            for name, contribution in of_bucket.items():
                totals[name] += SIGNS[sign](contribution).sum(0).cpu()
        mean_z = means.finished()
    require_finite("the mean activation", mean_z)
    settings = {
        "score": score,
        "sign": sign,
        "ranking": "descending score over all sites; ties by (site, unit)",
        "positions": positions,
        "mean_over": mean_over,
        "split": split.name,
        "n_examples": len(split),
        "task": split.task,
        "task_source": split.source,
        "prepend_bos": split.prepend_bos,
        "units": units.sizes,
        "factors": units.identities,
        "swd_lens": __version__,
        **standing_hooks(model),
    }
    if score == "direct_logit":
        settings["note"] = "swd_lens' reading of NaNA's score, which the paper describes in words only"
    if score == "integrated_gradients":
        settings["steps"] = steps
    mean_scores = {name: (total / len(split)).float() for name, total in totals.items()}
    return UnitScores(mean_scores, mean_z, settings, units.heads)


def _check(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{legible(what)} must be one of {valid}, got {quoted(value)}")


# ---------------------------------------------------------------------------------------------- contributions


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


def first_order(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """z * dg/dz."""
    runner, counted = training.runner, training.counted

    def contributions(bucket: Bucket) -> PerSite:
        z, gradients = training.margin_gradients(runner.share(bucket.tokens), bucket)
        training.add_to_means(bucket, z)
        return {name: (z[name][:, counted] * gradients[name][:, counted]).double().sum(1).cpu() for name in z}

    return contributions


def attribution_patching(training: TrainingPass) -> Callable[[Bucket], PerSite]:
    """(z - mu) * dg/dz."""
    means, runner, counted = training.means.finished(), training.runner, training.counted

    def contributions(bucket: Bucket) -> PerSite:
        z, gradients = training.margin_gradients(runner.share(bucket.tokens), bucket)
        contributions = {}
        for name, at_run in z.items():
            moved = at_run[:, counted] - aligned(means[name], at_run.shape[1])[None][:, counted]
            contributions[name] = (moved * gradients[name][:, counted]).double().sum(1).cpu()
        return contributions

    return contributions


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
        at_end = z[site.name]
        difference = at_end[:, counted] - aligned(means[site.name], at_end.shape[1]).to(at_end)[None][:, counted]
        return (difference.double() * total / steps).sum(1).cpu()

    def contributions(bucket: Bucket) -> PerSite:
        shared = runner.share(bucket.tokens)
        return {site.name: of_site(site, shared, bucket) for site in training.units.sites}

    return contributions


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
            at_end = z[site.name][:, -1]
            of_sites[site.name] = (at_end * _written_effect(units[site.name], at_end, cotangent)).double().cpu()
        return of_sites

    return contributions


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


CONTRIBUTIONS: dict[str, Callable[[TrainingPass], Callable[[Bucket], PerSite]]] = {
    "first_order": first_order,
    "attribution_patching": attribution_patching,
    "integrated_gradients": integrated_gradients,
    "ablation": ablation,
    "direct_logit": direct_logit,
}
SCORES = tuple(CONTRIBUTIONS)
