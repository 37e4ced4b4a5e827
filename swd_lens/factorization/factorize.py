"""factorize: from a host and a pattern to a FactorSet.

1. Find the sites, in execution order; check tokens, settings and memory (resources/) before the host is touched.
2. With out=: take over the matrices that an earlier, interrupted call finished there, if they are what this call would
   make (checkpoint.py); and what shards of it have finished (shards.py).
3. Stage by stage (stages.py): the Grams of its sites, from the host with the earlier stages replaced ("sequential",
   "per_block"), from the dense host ("dense"), or none (without tokens); then their factors, here or on other workers
   (workers/), which does not change a bit.
4. In execution order, whoever solved them: each matrix gets its provenance and its probe, with out= its file, and is attached
   for those that follow.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swd_lens.base._version import __version__
from swd_lens.base.machine import available_bytes
from swd_lens.factorization.checkpoint import Checkpoint, Recipe, chain
from swd_lens.factorization.job import Job, shown, warn_of_few_tokens
from swd_lens.factorization.progress import Bar
from swd_lens.factorization.resources import (
    Estimate,
    SiteEstimate,
    check_calibration,
    check_passes,
    gram_dtype_for,
    refuse_whole_mlps,
    sparsity_of_each,
)
from swd_lens.factorization.shards import Shard, ShardError
from swd_lens.factorization.stages import Behind, Calibrated, stages_of
from swd_lens.factorization.workers import Solved, SolveTask, open_workers
from swd_lens.hosts import host_of, sites_of
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks.streams import as_stream
from swd_lens.units import add_probe, described, is_bare, origin_of, require_free
from swd_lens.units.factors import Factors, FactorSet


def factorize(
    model: Any,
    sites: Pattern,
    *,
    sparsity: float | int | Mapping[str, float] = 0.5,
    tokens: Any = None,
    calibration: str = "sequential",
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    batch_size: int = 16,
    gram_dtype: str = "auto",
    device: str | torch.device | None = None,
    workers: int | str = 1,
    threads: int | None = None,
    shard: Any = None,
    progress: bool = True,
    out: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> FactorSet:
    """Factorize the matrices that `sites` names into sparse read and write factors (paper §2.1).

    Args:
        model: a HookedTransformer or TransformerBridge, in any floating dtype; solved in float32.
        sites: a pattern or several ("all", "mlp_out", ...), see `swd_lens.hosts.sites.select_sites`.
        sparsity: s in (0, 1) for every matrix, budget K = (1 - s) * d_in * d_out; or a mapping from site names or patterns
            to s (`swd_lens.allocate` makes one).
        tokens: (rows, pos) calibration ids, or a `TokenStream` (as many as you like: memory does not grow with them);
            None = zero-data (G = I).
        calibration: "sequential" takes each matrix's inputs from the host with all earlier ones replaced (method.md §5.2);
            "per_block" from the host with all earlier blocks replaced, one pass per block; "dense" from the untouched host;
            "corrected" is sequential and fits each matrix to what the dense host writes there (targets.py): not the paper's,
            and better where many matrices are replaced. With one site they are the same.
        preset, units, options: the solver's, see `swd_lens.solve` (outer_iterations=, ...).
        batch_size: rows per calibration forward.
        gram_dtype: of the products of one batch and of the Grams, "float32" or "float64"; "auto": float64 where every matrix is
            small enough to be solved in float64, so that factors do not depend on the processor. Sums are float64 anyway.
        device: where to solve, one matrix at a time; None: where the host's matrix is.
        workers: solve this many matrices at a time in processes of their own, or "ray" for the Ray cluster (see
            `swd_lens.factorization.workers`). Sequential calibration has few matrices that do not wait for each other.
        threads: CPU threads per solve; None: as many as now, shared out over the processes (Ray: 1). The same number gives the
            same bits, whoever solves.
        shard: "2/8" does the second eighth of the matrices (zero-data or dense calibration only), into a folder of its own in
            `out`. When all shards are done, the same call without shard= puts them together.
        progress: show a bar: share of the estimated operations, site, iteration, relMSE so far.
        out: a folder that gets every matrix as soon as it is finished; at every moment `FactorSet.load` can read it.
            The same call again after an interruption takes over what is finished and goes on; the result has the same
            bits as that of an uninterrupted call. None: nothing is written.
        overwrite: start again, in place of what `out` holds (which stays until the first new matrix is finished).

    Returns:
        FactorSet. Factors of a float32 host remember their dense weight, those of other hosts do not: it would be a float32
        copy of the whole model.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ResumeError: `out` holds factors that were made otherwise; every difference is named.
        DoesNotFitError: more memory is needed than available (see `swd_lens.estimate`).
        ShardError: no such shard, or one of matrices that wait for each other.
        ValueError: bad sparsity or solver options; the site is named.
    """
    host = host_of(model)
    chosen = tuple(sites_of(host, sites))
    refuse_whole_mlps(chosen)
    check_calibration(calibration)
    check_passes(batch_size, gram_dtype)
    _check_device(device)
    stream = None if tokens is None else as_stream(tokens, model)
    each = sparsity_of_each(chosen, sparsity)
    dtype = gram_dtype_for(gram_dtype, chosen, preset, options)
    job = Job(model, chosen, stream, each, calibration, preset, units, batch_size, dtype, device, options)
    rows = job.forecast()  # a bad option fails here, before anything is hashed, read or run
    warn_of_few_tokens(job)
    if shard is not None:
        job, out = _only(job, Shard.parse(shard), rows, out)
    checkpoint = None if out is None else Checkpoint(Path(out), job.provenance(), overwrite)
    recipes = {} if checkpoint is None else job.recipes()
    done: dict[str, Factors] = {}
    if checkpoint is not None and not overwrite:
        found = checkpoint.resume(recipes, chained=job.chained)
        done = {site.name: job.remembering(site, found[site.name]) for site in job.sites if site.name in found}
    plan = job.forecast(done)
    Estimate(plan, available_bytes(next(model.parameters()).device), None, job.kind).require_fit()
    elsewhere = {} if checkpoint is None or overwrite else checkpoint.in_shards(recipes)
    _Run(job, done, recipes, checkpoint, elsewhere).go(plan, workers, threads, progress)
    return FactorSet({site.name: done[site.name] for site in job.sites}, job.provenance())


def _only(job: Job, shard: Shard, plan: Iterable[SiteEstimate], out: str | Path | None) -> tuple[Job, Path]:
    """The job of one shard, and its folder."""
    if job.chained:
        raise ShardError(
            f"shard {shard} with {job.kind} calibration: each matrix waits for those before it. Shard zero-data or "
            'calibration="dense", or use workers='
        )
    if out is None:
        raise ShardError(f"shard {shard} needs out=: the folder in which the shards are put together")
    mine = shard.of(job.sites, {row.site: row.flops for row in plan})
    return replace(job, sites=tuple(mine), shard=shard), shard.folder(Path(out))


def _check_device(device: str | torch.device | None) -> None:
    """Before anything is calibrated, not after."""
    if device is not None:
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"device={str(device)!r} cannot be used here: {why}. None solves where the host is"
            ) from error


@dataclass
class _Run:
    """One call at work: `done` grows."""

    job: Job
    done: dict[str, Factors]
    recipes: Mapping[str, Recipe]
    checkpoint: Checkpoint | None
    elsewhere: Mapping[str, Any]  # site -> what reads the factors that a shard has finished
    upstream: str | None = None

    def go(self, plan: tuple[SiteEstimate, ...], workers: int | str, threads: int | None, progress: bool) -> None:
        job = self.job
        todo = [site for site in job.sites if site.name not in self.done]
        if not todo:
            return
        host = host_of(job.model)
        if job.shard is None:
            require_free(host, job.sites[:-1])  # each of these will be attached for those that follow
        # With hooks or units of the user's in place a probe would refuse the factors wherever these are not.
        self.probed = job.shard is None and is_bare(host)
        self.plan, self.here = {row.site: row for row in plan}, workers == 1
        stages = stages_of(job.sites, job.kind)
        to_solve = [any(self._must_solve(site) for site in stage) for stage in stages]
        behind = Behind(
            job.model,
            job.stream,
            job.kind,
            batch_size=job.batch_size,
            keep=sum(to_solve) > 1,
            dtype=job.gram_dtype,
            scratch=None if self.checkpoint is None else self.checkpoint.folder,
        )
        bar = Bar(job.sites, plan, f"factorize s={shown(job.sparsity)}", show=progress, calibrated=job.chained)
        with behind, bar, open_workers(workers, threads=threads) as pool:
            for stage, solving in zip(stages, to_solve, strict=True):
                found = self._calibrated(behind, stage, progress) if solving and job.stream is not None else {}
                bar.calibrated([site for site in stage if site.name not in self.done])
                solved = pool.solve(self._tasks(stage, found, bar), on_iteration=bar.iterated if progress else None)
                for site in stage:
                    if site.name not in self.done:
                        self._take(site, solved, behind, bar)
                    if job.chained and self.recipes:
                        self.upstream = chain(self.upstream, site.name, self.done[site.name])
                    if job.shard is None and site != job.sites[-1]:
                        behind.replace(site, self.done[site.name])

    def _must_solve(self, site: Site) -> bool:
        return site.name not in self.done and site.name not in self.elsewhere

    def _calibrated(self, behind: Behind, stage: tuple[Site, ...], progress: bool) -> dict[str, Calibrated]:
        sites = [site for site in stage if self._must_solve(site)]
        return behind.calibrate(sites, progress and self.job.kind == "dense")

    def _tasks(self, stage: tuple[Site, ...], found: dict[str, Calibrated], bar: Bar) -> Iterator[SolveTask]:
        """One after the other, as they are asked for: no two float32 copies of weights at a time in this process."""
        for site in stage:
            if self._must_solve(site):
                if self.here:
                    bar.begin(site.name)
                yield self.job.task(site, found.pop(site.name, None), self.plan)

    def _take(self, site: Site, solved: Iterator[Solved], behind: Behind, bar: Bar) -> None:
        """Put the next matrix into `done`, and into the folder."""
        job = self.job
        f = self.elsewhere[site.name]() if site.name in self.elsewhere else self._stamped(site, next(solved))
        f = job.remembering(site, f)
        if self.probed:
            f = add_probe(f, job.model, site, job.probe_tokens)
        if self.checkpoint is not None:
            recipe = {**self.recipes[site.name], "upstream_sha256": self.upstream}
            f = replace(f, provenance={**f.provenance, "recipe": recipe})
            self.checkpoint.add(site.name, f)
        self.done[site.name] = f
        bar.finished(site.name, f.provenance["relmse"])

    def _stamped(self, site: Site, solved: Solved) -> Factors:
        assert solved.site == site.name, f"{solved.site} came for {site.name}"
        made = {"calibration": self.job.kind, "tokens": self.job.n_tokens}
        made |= {"relmse": solved.relmse, "relative_frobenius": solved.relative_frobenius}
        weight = host_of(self.job.model).weight(site)
        home = weight.device if next(self.job.model.parameters()).dtype == torch.float32 else torch.device("cpu")
        f = replace(solved.factors, weight=None).to(home)
        if self.job.kind == "corrected":  # the solver saw the target, not W
            made["relative_frobenius"] = f.relative_frobenius(weight.to(home))
        return stamp(f, self.job.model, site, made)


def stamp(f: Factors, model: Any, site: Site, more: dict[str, Any]) -> Factors:
    """Factors that know where they belong: site, model, fingerprints of the host's W, its processing; attaching checks these."""
    host = host_of(model)
    weight = host.weight(site)
    where = {
        "site": site.name,
        **described(host, site),
        "model": str(model.cfg.model_name),
        "normalization": str(model.cfg.normalization_type),
        "swd_lens": __version__,
    }
    return replace(f, origin=origin_of(host, site, weight), provenance={**f.provenance, **where, **more})
