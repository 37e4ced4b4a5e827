"""Job: the arguments of one factorize call, checked, and what follows from them: forecast, recipes, provenance, tasks."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from swd_lens.base._version import __version__
from swd_lens.factorization.checkpoint import Recipe, host_fingerprint
from swd_lens.factorization.resources import SiteEstimate, forecast
from swd_lens.factorization.shards import Shard
from swd_lens.factorization.stages import Calibrated
from swd_lens.factorization.workers import SolveTask
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site
from swd_lens.solver import resolve
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import probe_tokens
from swd_lens.units.factors import Factors, fingerprint


@dataclass(frozen=True)
class Job:
    """The arguments of `factorize`, checked."""

    model: Any
    sites: tuple[Site, ...]
    stream: TokenStream | None
    sparsities: Mapping[str, float]
    calibration: str
    preset: str
    units: int | float | str | None
    batch_size: int
    gram_dtype: str
    device: str | torch.device | None
    options: dict[str, Any]
    shard: Shard | None = None

    @property
    def kind(self) -> str:
        """Where Grams come from: "sequential", "corrected", "per_block", "dense", or "zero-data"."""
        return self.calibration if self.stream is not None else "zero-data"

    @property
    def sparsity(self) -> float | dict[str, float]:
        """One number where it is the same for all."""
        different = set(self.sparsities.values())
        return different.pop() if len(different) == 1 else dict(self.sparsities)

    @property
    def chained(self) -> bool:
        """Whether a site's factors depend on those of the sites before it."""
        return self.kind in ("sequential", "corrected", "per_block")

    @property
    def n_tokens(self) -> int:
        return 0 if self.stream is None else self.stream.n_tokens

    @cached_property
    def probe_tokens(self) -> list[int]:
        first = None if self.stream is None else self.stream.first_row()[None]
        return probe_tokens(first, int(self.model.cfg.d_vocab), int(self.model.cfg.n_ctx))

    def forecast(self, finished: Mapping[str, Factors] | None = None) -> tuple[SiteEstimate, ...]:
        return forecast(
            self.model,
            self.sites,
            None if self.stream is None else (self.stream.n_rows, self.stream.row_length),
            sparsities=self.sparsities,
            calibration=self.calibration,
            preset=self.preset,
            units=self.units,
            batch_size=self.batch_size,
            options=self.options,
            finished=tuple(finished or ()),
            gram_dtype=self.gram_dtype,
        )

    def provenance(self) -> dict[str, Any]:
        """Of the whole set."""
        made = {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "sparsity": self.sparsity,
            "preset": self.preset,
            "calibration": self.kind,
            "tokens": self.n_tokens,
        }
        if self.shard is not None:  # what enters its sites depends on other shards' factors
            return {**made, "shard": str(self.shard)}
        return {**made, "probe_tokens": self.probe_tokens, "probe_sites": [site.name for site in self.sites]}

    def recipes(self) -> dict[str, Recipe]:
        """What decides each site's factors, but for the factors before it (see checkpoint.py)."""
        shared: dict[str, Any] = {"swd_lens": __version__, "preset": self.preset}
        shared |= {"units": self.units, **resolve(self.preset, self.options).as_dict(), "calibration": self.kind}
        if self.stream is not None:
            shared["tokens_sha256"] = self.stream.fingerprint()
            shared["batch_size"] = self.batch_size  # the order of a sum
            shared["host_sha256"] = host_fingerprint(self.model, self.model.cfg)
            if self.gram_dtype != "float32":
                shared["gram_dtype"] = self.gram_dtype
        host = host_of(self.model)
        return {
            site.name: {
                "sparsity": self.sparsities[site.name],
                **shared,
                "weight_sha256": fingerprint(host.weight(site)),
            }
            for site in self.sites
        }

    def remembering(self, site: Site, f: Factors) -> Factors:
        """Factors with the host's dense weight, where that is no copy of another dtype's."""
        dtype = next(self.model.parameters()).dtype
        return replace(f, weight=host_of(self.model).weight(site) if dtype == torch.float32 else None)

    def task(self, site: Site, found: Calibrated | None, plan: Mapping[str, SiteEstimate]) -> SolveTask:
        weight = host_of(self.model).weight(site)
        gram, weight = (
            (None, weight) if found is None else (found.gram, weight if found.target is None else found.target)
        )
        return SolveTask(
            site=site.name,
            weight=weight if self.device is None else weight.to(self.device),
            gram=gram if gram is None or self.device is None else gram.to(self.device),
            sparsity=self.sparsities[site.name],
            preset=self.preset,
            units=self.units,
            tokens=None if gram is None else self.n_tokens,
            options=self.options,
            bytes=plan[site.name].peak_bytes,
        )


def shown(sparsity: float | dict[str, float]) -> str:
    if not isinstance(sparsity, dict):
        return f"{sparsity:g}"
    return f"{min(sparsity.values()):g}..{max(sparsity.values()):g}"


def warn_of_few_tokens(job: Job) -> None:
    widest = max(job.sites, key=lambda site: site.d_in)
    if job.stream is None or job.n_tokens >= widest.d_in:
        return
    share = resolve(job.preset, job.options).shrinkage_for(job.n_tokens, widest.d_in)
    remedy = (
        f"shrinkage {share:.3g} is applied to it (settings['shrinkage'])"
        if share > 0
        else f"preset {job.preset!r} applies no shrinkage here, so the factors will fit these tokens only"
    )
    warnings.warn(
        f"{job.n_tokens} calibration tokens for {widest.name}, which reads {widest.d_in} inputs: its Gram is singular; "
        f"{remedy}. Give more tokens, or none (zero-data).",
        stacklevel=3,
    )
