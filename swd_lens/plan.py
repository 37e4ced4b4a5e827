"""factorize: from a host and a pattern to a FactorSet.

1. Find the sites, in execution order; check tokens, settings and memory (resources.py) before the host is touched.
2. With out=: take over the matrices that an earlier, interrupted call finished there, if they are what this call would
   make (checkpoint.py).
3. For each other site: its Gram (from the host with the earlier sites already replaced, "sequential", or from the dense
   host, "dense"; none without tokens), then its factors, then, with out=, its file. The bar counts estimated operations,
   not matrices, so that its remaining time means something when the matrices differ in size.
4. Each result carries its provenance: site, weight fingerprint, tokens, calibration, errors, version.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens._version import __version__
from swd_lens.calibration import Grams, collect_grams
from swd_lens.checkpoint import Checkpoint, Recipe, chain, host_fingerprint, tokens_fingerprint, upstream_of
from swd_lens.factors import Factors, FactorSet, fingerprint
from swd_lens.hosts import host_of, sites_of
from swd_lens.inject import add_probe, attach, described, origin_of, probe_tokens
from swd_lens.machine import available_bytes
from swd_lens.resources import (
    Estimate,
    SiteEstimate,
    check_calibration,
    forecast,
    naming,
    shape_of,
    sparsity_of_each,
)
from swd_lens.sites import PACKED, Pattern, Site, UnknownSiteError
from swd_lens.solver import DEFAULT_PRESET, OnIteration, Step, resolve, solve
from swd_lens.tasks.text import as_rows

# The error so far costs a product of the factors; shown this often it costs nothing that matters.
_SECONDS_BETWEEN_ERRORS = 3.0


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
    progress: bool = True,
    out: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> FactorSet:
    """Factorize the matrices that `sites` names into sparse read and write factors (paper §2.1).

    Args:
        model: a HookedTransformer or TransformerBridge.
        sites: a pattern or several, see `swd_lens.sites.select_sites`.
        sparsity: s in (0, 1) for every matrix, budget K = (1 - s) * d_in * d_out; or a mapping from site names or patterns
            to s (`swd_lens.allocate` makes one).
        tokens: (rows, pos) calibration ids; None = zero-data (G = I).
        calibration: "sequential" takes each site's inputs from the host with the earlier sites replaced (method.md §5.2);
            "dense" from the untouched host, in one pass. With one site they are the same.
        preset, units, options: the solver's, see `swd_lens.solver.solve` (outer_iterations=, ...).
        batch_size: rows per calibration forward.
        progress: show a bar: share of the estimated operations, site, iteration, relMSE so far.
        out: a folder that gets every matrix as soon as it is finished; at every moment `FactorSet.load` can read it.
            The same call again after an interruption takes over what is finished and goes on; the result has the same
            bits as that of an uninterrupted call. None: nothing is written.
        overwrite: start again, in place of what `out` holds (which stays until the first new matrix is finished).

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ResumeError: `out` holds factors that were made otherwise; every difference is named.
        DoesNotFitError: more memory is needed than available (see `swd_lens.estimate`).
        ValueError: bad sparsity or solver options; the site is named.
    """
    host = host_of(model)
    chosen = tuple(sites_of(host, sites))
    for site in chosen:
        _refuse_whole_mlp(site)
    check_calibration(calibration)
    rows = None if tokens is None else as_rows(tokens, model)
    job = _Job(model, chosen, rows, sparsity_of_each(chosen, sparsity), calibration, preset, units, batch_size, options)
    job.forecast()  # a bad option fails here, before anything is hashed, read or run
    _warn_of_few_tokens(job)
    checkpoint = None if out is None else Checkpoint(Path(out), job.provenance())
    recipes = {} if checkpoint is None else job.recipes()
    done: dict[str, Factors] = {}
    if checkpoint is not None and not overwrite:
        found = checkpoint.resume(recipes, chained=job.chained)
        done = {site.name: replace(found[site.name], weight=host.weight(site)) for site in chosen if site.name in found}
    plan = job.forecast(done)
    Estimate(plan, available_bytes(next(model.parameters()).device), None, job.kind).require_fit()
    _run(job, plan, done, recipes, checkpoint, progress)
    return FactorSet({site.name: done[site.name] for site in chosen}, job.provenance())


def _refuse_whole_mlp(site: Site) -> None:
    if site.kind == "mlp":
        raise UnknownSiteError(
            f"{site.name} is a whole MLP, not one matrix; name {', '.join(PACKED['mlp'])} instead (only transcoders stand there)"
        )


@dataclass(frozen=True)
class _Job:
    """The arguments of `factorize`, checked."""

    model: Any
    sites: tuple[Site, ...]
    rows: Int[Tensor, "rows pos"] | None
    sparsities: Mapping[str, float]
    calibration: str
    preset: str
    units: int | float | str | None
    batch_size: int
    options: dict[str, Any]

    @property
    def kind(self) -> str:
        """Where Grams come from: "sequential", "dense", or "zero-data"."""
        return self.calibration if self.rows is not None else "zero-data"

    @property
    def sparsity(self) -> float | dict[str, float]:
        """One number where it is the same for all."""
        different = set(self.sparsities.values())
        return different.pop() if len(different) == 1 else dict(self.sparsities)

    @property
    def chained(self) -> bool:
        """Whether a site's factors depend on those of the sites before it."""
        return self.kind == "sequential"

    @property
    def n_tokens(self) -> int:
        return 0 if self.rows is None else self.rows.numel()

    @property
    def probe_tokens(self) -> list[int]:
        return probe_tokens(self.rows, int(self.model.cfg.d_vocab), int(self.model.cfg.n_ctx))

    def forecast(self, finished: Mapping[str, Factors] | None = None) -> tuple[SiteEstimate, ...]:
        return forecast(
            self.model,
            self.sites,
            None if self.rows is None else shape_of(self.rows),
            sparsities=self.sparsities,
            calibration=self.calibration,
            preset=self.preset,
            units=self.units,
            batch_size=self.batch_size,
            options=self.options,
            finished=tuple(finished or ()),
        )

    def provenance(self) -> dict[str, Any]:
        """Of the whole set."""
        return {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "sparsity": self.sparsity,
            "preset": self.preset,
            "calibration": self.kind,
            "tokens": self.n_tokens,
            "probe_tokens": self.probe_tokens,
            "probe_sites": [site.name for site in self.sites],
        }

    def recipes(self) -> dict[str, Recipe]:
        """What decides each site's factors, but for the factors before it (see checkpoint.py)."""
        shared: dict[str, Any] = {"swd_lens": __version__, "preset": self.preset}
        shared |= {"units": self.units, **resolve(self.preset, self.options).as_dict(), "calibration": self.kind}
        if self.rows is not None:
            shared["tokens_sha256"] = tokens_fingerprint(self.rows)
            shared["batch_size"] = self.batch_size  # the order of a sum
            shared["host_sha256"] = host_fingerprint(self.model, self.model.cfg)
        host = host_of(self.model)
        return {
            site.name: {
                "sparsity": self.sparsities[site.name],
                **shared,
                "weight_sha256": fingerprint(host.weight(site)),
            }
            for site in self.sites
        }


def _run(
    job: _Job,
    plan: tuple[SiteEstimate, ...],
    done: dict[str, Factors],
    recipes: Mapping[str, Recipe],
    checkpoint: Checkpoint | None,
    progress: bool,
) -> None:
    """Factorize what the plan lists, into `done`."""
    todo = [site for site in job.sites if site.name not in done]
    dense: dict[str, Tensor] = {}
    if todo and job.kind == "dense":
        dense.update(collect_grams(job.model, todo, job.rows, batch_size=job.batch_size, progress=progress).by_site)
    upstream = upstream_of(done) if recipes and job.chained else None
    with _Progress(job, plan, progress) as bar:
        for site in todo:
            bar.begin(site)
            gram = _gram_behind(job, done, site) if job.chained else dense.pop(site.name, None)
            bar.calibrated()
            f = _factorize_one(job, site, gram, bar.on_iteration())
            with _behind(job, done):
                f = add_probe(f, job.model, site, job.probe_tokens)
            if checkpoint is not None:
                f = replace(
                    f, provenance={**f.provenance, "recipe": {**recipes[site.name], "upstream_sha256": upstream}}
                )
                checkpoint.add(site.name, f)
                upstream = chain(upstream, site.name, f) if job.chained else None
            done[site.name] = f
            bar.finished(f)


def _gram_behind(job: _Job, done: dict[str, Factors], site: Site) -> Tensor:
    """The site's Gram with everything in `done` replaced."""

    def collect() -> Grams:
        return collect_grams(job.model, [site], job.rows, batch_size=job.batch_size)

    with _behind(job, done):
        return collect()[site.name]


def _behind(job: _Job, done: dict[str, Factors]) -> Any:
    """The host with everything in `done` replaced."""
    return attach(job.model, done) if done else nullcontext()


def _factorize_one(job: _Job, site: Site, gram: Tensor | None, on_iteration: OnIteration | None) -> Factors:
    weight = host_of(job.model).weight(site)
    tokens = None if gram is None else job.n_tokens
    with naming(site):
        f = solve(
            weight,
            gram,
            job.sparsities[site.name],
            preset=job.preset,
            units=job.units,
            tokens=tokens,
            on_iteration=on_iteration,
            **job.options,
        )
    # Files hold no zeros, so no sign of a zero either: -0 becomes 0 before anything reads the factors, and a resumed run
    # continues with the same bits.
    f = replace(f, read=f.read + 0.0, write=f.write + 0.0)
    made = {"calibration": job.kind, "tokens": job.n_tokens}
    made |= {"relmse": f.relmse(gram), "relative_frobenius": f.relative_frobenius()}
    return stamp(f, job.model, site, made)


def stamp(f: Factors, model: Any, site: Site, more: dict[str, Any]) -> Factors:
    """Factors that know where they belong: site, model, fingerprints of the host's W, its processing; attaching checks these."""
    host = host_of(model)
    weight = host.weight(site)
    where = {
        "site": site.name,
        **described(host, weight),
        "model": str(model.cfg.model_name),
        "normalization": str(model.cfg.normalization_type),
        "swd_lens": __version__,
    }
    return replace(f, origin=origin_of(host, site, weight), provenance={**f.provenance, **where, **more})


def _shown(sparsity: float | dict[str, float]) -> str:
    if isinstance(sparsity, float):
        return f"{sparsity:g}"
    return f"{min(sparsity.values()):g}..{max(sparsity.values()):g}"


def _warn_of_few_tokens(job: _Job) -> None:
    widest = max(job.sites, key=lambda site: site.d_in)
    if job.rows is None or job.n_tokens >= widest.d_in:
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


# ---------------------------------------------------------------------------------------------- progress


@dataclass
class _Progress:
    """One bar over all matrices, in estimated operations; beside it site, iteration and relMSE so far."""

    job: _Job
    plan: tuple[SiteEstimate, ...]
    show: bool
    rows: dict[str, SiteEstimate] = field(init=False)
    bar: Any = field(init=False)
    at: float = 0.0  # operations done; tqdm keeps no count when it is disabled
    start: float = 0.0  # of the present matrix's solve
    label: str = ""
    error: str = ""
    error_time: float = 0.0

    def __post_init__(self) -> None:
        self.rows = {row.site: row for row in self.plan}
        total = sum(row.flops + self._calibration(row) for row in self.plan)
        self.bar = tqdm(
            total=total,
            desc=f"factorize s={_shown(self.job.sparsity)}",
            unit="FLOP",
            unit_scale=True,
            disable=not self.show,
            leave=False,
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def _calibration(self, row: SiteEstimate) -> float:
        return row.calibration_flops if self.job.chained else 0.0  # dense calibration has its own bar, before this one

    def begin(self, site: Site) -> None:
        place = self.job.sites.index(site) + 1
        self.row = self.rows[site.name]
        self.label, self.error = f"{site.name} ({place}/{len(self.job.sites)})", ""
        self._tell("")

    def calibrated(self) -> None:
        self._to(self.at + self._calibration(self.row))
        self.start, self.error_time = self.at, time.monotonic()

    def on_iteration(self) -> Callable[[Step], None] | None:
        """What `solve` calls after each iteration; nothing where nobody looks."""
        return self._iterated if self.show else None

    def _iterated(self, step: Step) -> None:
        if time.monotonic() - self.error_time >= _SECONDS_BETWEEN_ERRORS:
            self.error, self.error_time = f" relMSE {step.relmse():.3g}", time.monotonic()
        self._tell(f" {step.iteration}/{step.total}{self.error}")
        self._to(self.start + self.row.flops * step.iteration / step.total)

    def finished(self, f: Factors) -> None:
        self._to(self.start + self.row.flops)
        self._tell(f" relMSE {f.provenance['relmse']:.3g}")

    def _tell(self, text: str) -> None:
        self.bar.set_postfix_str(self.label + text, refresh=False)

    def _to(self, operations: float) -> None:
        self.bar.update(operations - self.at)
        self.at = operations
