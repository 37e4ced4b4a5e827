"""Job: what is to be factorized and how, checked once: the arguments of `factorize`, `estimate` and `allocate`.

1. `Job.of` takes the matrices (matrices.py), refuses what no factorization can be made with, and settles what depends on them: a
   sparsity and a basis for each, and the precision of Grams. The other arguments stay together (`SolveOptions`).
2. `with_bases` changes the bases, once text has been looked at (basis.py).
3. A job says what follows from its arguments: the provenance of the set, the recipe of each matrix (checkpoint.py) and the task
   that its solve is (solve.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import ShardError, UnknownSiteError, legible, quoted, warn
from swd_lens.base.settings import AUTO
from swd_lens.factorization.calibration_text import CalibrationText, as_it_stands
from swd_lens.factorization.checkpoint import Recipe, Shard, host_fingerprint
from swd_lens.factorization.gradients import require_loss
from swd_lens.factorization.matrices import affordable, basis_asked, basis_of_each, matrices_of, sparsity_of_each
from swd_lens.factorization.solve_task import SolveTask, naming
from swd_lens.factorization.stages import Calibrated
from swd_lens.hosts import find_sites, host_of, matrix_entries
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import PACKED, Pattern, Site
from swd_lens.solver import DEFAULT_PRESET, AnySpec, resolve
from swd_lens.solver.budget import edges
from swd_lens.solver.validate import resolve_units
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import probe_tokens
from swd_lens.units.match import weight_fingerprint

CALIBRATIONS = ("sequential", "corrected", "per_block", "dense")


@dataclass(frozen=True)
class SolveOptions:
    """How matrices are factorized; see `swd_lens.factorize` for each.

    Raises:
        ValueError: a value that no factorization can be made with, or a device that is not there.
    """

    preset: str = DEFAULT_PRESET  # preset, units, basis: the solver's, for all matrices; a basis of None is the default
    units: int | float | str | None = None
    basis: Any = None
    calibration: str = "sequential"  # calibration, batch_size, gram_dtype, weigh_outputs: what each matrix is fitted to
    batch_size: int = 16
    gram_dtype: str = AUTO
    weigh_outputs: bool = False
    device: str | torch.device | None = None  # device, workers, threads: where matrices are solved
    workers: int | str = 1
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of the preset

    def __post_init__(self) -> None:
        one_of("calibration", self.calibration, CALIBRATIONS)
        bounded("batch_size", self.batch_size, 1)
        one_of("gram_dtype", self.gram_dtype, (AUTO, "float32", "float64"))
        if self.device is not None:  # before anything is calibrated, not after
            try:
                torch.empty(1, device=self.device)
            except (RuntimeError, AssertionError, NotImplementedError) as cause:
                why = (str(cause).splitlines() or [type(cause).__name__])[0]
                raise ValueError(
                    f"device={quoted(str(self.device))} cannot be used here: {legible(why)}. None solves where the host is"
                ) from cause

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `factorize` that say the same."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "settings"}
        return {**named, **self.settings}

    @property
    def solver(self) -> dict[str, Any]:
        """The further settings, and the basis where one is given: what was asked of the solver beside preset and units."""
        return {**self.settings} if self.basis is None else {**self.settings, "basis": self.basis}


@dataclass(frozen=True)
class Job:
    """The arguments of a factorization, checked."""

    model: Any  # the host; None where it is not loaded, and only shapes are known
    sites: tuple[Site, ...]  # in execution order
    # calibration tokens, or (rows, pos) of tokens that are not there yet; None for zero-data
    tokens: TokenStream | tuple[int, int] | None
    sparsities: Mapping[str, float]  # site name -> s
    how: SolveOptions  # the other arguments
    gram_dtype: Literal["float32", "float64"]  # of the Grams, decided
    bases: Mapping[str, str]  # site name -> basis, of those that are not solved with the preset's own
    # whether the text may say more of them: "asked" (the caller's "auto"), "default", or "no"
    basis_by_text: Literal["asked", "default", "no"] = "no"
    # what the text has said (basis.py), as plain values; empty until it has
    told: Mapping[str, Any] = field(default_factory=dict)
    shard: Shard | None = None  # the part of a larger job that this one is
    # how the host stood when the call began, where its text remembers what it was asked (calibration_text.py)
    stands: tuple[str, str, str] | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        sites: Pattern,
        tokens: TokenStream | tuple[int, int] | None,
        sparsity: float | int | Mapping[str, float],
        how: SolveOptions,
    ) -> "Job":
        """The job of these arguments; `model` is a host, or shapes as `estimate` takes them. Raises UnknownSiteError,
        UnsupportedHostError: bad sites or host; ValueError: bad shapes, sparsities or solver options (the site is named), or
        outputs that cannot be weighed."""
        shapes_only = isinstance(model, Mapping | Sequence)
        matrices = matrices_of(model, sites) if shapes_only else tuple(find_sites(model, sites))
        for site in matrices:
            if site.kind == "mlp":
                raise UnknownSiteError(
                    f"{site.name} is a whole MLP, not one matrix; name {', '.join(PACKED['mlp'])} instead (only "
                    "transcoders stand there)"
                )
        if how.weigh_outputs and tokens is None:
            raise ValueError("weigh_outputs=True needs calibration tokens: gradients are those of the loss on text; give tokens=")
        if how.weigh_outputs and isinstance(tokens, TokenStream) and not shapes_only:
            require_loss(model, tokens)
        sparsities = sparsity_of_each(matrices, sparsity)
        basis = basis_asked(how.preset, how.units, how.solver)
        bases = basis_of_each(matrices, basis)
        by_text: Literal["asked", "default", "no"] = "no"
        if basis == AUTO:
            bases, by_text = affordable(matrices, bases, sparsities), "default" if how.basis is None else "asked"
        job = cls(None if shapes_only else model, matrices, tokens, sparsities, how, "float32", bases, by_text)
        # Factors of a float32 Gram differ between processors though they are solved in float64 (6 of 16 factorizations of the
        # embedded model; of a float64 Gram none).
        with naming(matrices[0]):
            precisions = {job.preset_of(site).precision_for(site.d_in, site.d_out) for site in matrices}
        double = how.gram_dtype == "float64" or (how.gram_dtype == AUTO and precisions == {"float64"})
        return replace(job, gram_dtype="float64") if double else job

    def with_bases(self, told: Mapping[str, Any]) -> "Job":
        """Take the bases that a text has chosen for the sites (`BasisChoice.told`)."""
        bases = affordable(self.sites, basis_of_each(self.sites, told["chosen"]), self.sparsities)
        return replace(self, bases=bases, told=told)

    def settings_of(self, site: Site) -> dict[str, Any]:
        """The solver's settings for one matrix: those for all, and its basis where it has one of its own."""
        own = {"basis": self.bases[site.name]} if site.name in self.bases else {}
        return {**self.how.settings, **own}

    def preset_of(self, site: Site) -> AnySpec:
        """The preset with those settings, not yet decided for the matrix's shape."""
        return resolve(self.how.preset, self.settings_of(site))

    def spec(self, site: Site) -> AnySpec:
        """All settings of the solver, decided for one matrix."""
        calibrated = self.tokens is not None
        return self.preset_of(site).for_matrix(site.d_in, site.d_out, self.width(site), calibrated=calibrated)

    def width(self, site: Site) -> int:
        """The number of units of one matrix."""
        return resolve_units(self.how.units, site.d_in, site.d_out, self.preset_of(site))

    @property
    def kind(self) -> str:
        """Where Grams come from: "sequential", "corrected", "per_block", "dense", or "zero-data"."""
        return self.how.calibration if self.tokens is not None else "zero-data"

    @property
    def chained(self) -> bool:
        """Whether a site's factors depend on those of the sites before it."""
        return self.kind in ("sequential", "corrected", "per_block")

    @property
    def stream(self) -> TokenStream | None:
        return self.tokens if isinstance(self.tokens, TokenStream) else None

    @property
    def token_shape(self) -> tuple[int, int] | None:
        """(rows, pos); None for zero-data."""
        return (self.tokens.n_rows, self.tokens.row_length) if isinstance(self.tokens, TokenStream) else self.tokens

    @property
    def n_tokens(self) -> int:
        """Tokens that count."""
        if self.stream is not None:
            return self.stream.n_counted
        rows, pos = self.token_shape or (0, 0)
        return rows * pos

    @property
    def sparsity(self) -> float | dict[str, float]:
        """One number where it is the same for all."""
        different = set(self.sparsities.values())
        return different.pop() if len(different) == 1 else dict(self.sparsities)

    @cached_property
    def probe_tokens(self) -> list[int]:
        first = None if self.stream is None else self.stream.first_row()[None]
        return probe_tokens(first, int(self.model.cfg.d_vocab), int(self.model.cfg.n_ctx))

    def warn_of_few_tokens(self) -> None:
        """Warns where the tokens are fewer than the inputs of a matrix."""
        widest = max(self.sites, key=lambda site: site.d_in)
        if self.tokens is None or self.n_tokens >= widest.d_in:
            return
        share = self.preset_of(widest).shrinkage_for(self.n_tokens, widest.d_in)
        remedy = (
            f"shrinkage {share:.3g} is applied to it (settings['shrinkage'])"
            if share > 0
            else f"preset {self.how.preset!r} applies no shrinkage here, so the factors will fit these tokens only"
        )
        warn(
            f"{self.n_tokens} calibration tokens for {widest.name}, which reads {widest.d_in} inputs: its Gram is "
            f"singular; {remedy}. Give more tokens, or none (zero-data)."
        )

    def only(self, shard: Shard, flops: Mapping[str, float]) -> "Job":
        """The job of one shard; `flops` are the sites' estimated operations. Raises ShardError: the matrices wait for each
        other, or there are fewer than shards."""
        if self.chained:
            raise ShardError(
                f"shard {shard} with {self.kind} calibration: each matrix waits for those before it. Shard zero-data or "
                'calibration="dense", or use workers='
            )
        return replace(self, sites=tuple(shard.of(self.sites, flops)), shard=shard)

    def knowing_its_host(self) -> "Job":
        """The job with how its host stands now, where its text remembers: hashed once for all that ask the text."""
        return replace(self, stands=as_it_stands(self.model)) if isinstance(self.tokens, CalibrationText) else self

    def provenance(self) -> dict[str, Any]:
        """Provenance of the whole set."""
        provenance: dict[str, Any] = {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "sparsity": self.sparsity,
            "preset": self.how.preset,
            "calibration": self.kind,
            "tokens": self.n_tokens,
            **({} if self.stream is None else self.stream.about(self.model)),
            "matrix_entries": matrix_entries(host_of(self.model)),
            **({"weigh_outputs": True} if self.how.weigh_outputs else {}),
        }
        if self.basis_by_text != "no":  # the caller left it open
            provenance["basis"] = {"by": "kind of matrix", **self.told}
        provenance |= standing_hooks(self.model)
        if self.shard is not None:  # what enters its sites depends on other shards' factors
            return {**provenance, "shard": str(self.shard)}
        return {**provenance, "probe_tokens": self.probe_tokens, "probe_sites": [site.name for site in self.sites]}

    def recipes(self) -> dict[str, Recipe]:
        """Site name -> everything that decides its factors, but for the factors before it (see checkpoint.py)."""
        how = self.how
        shared: dict[str, Any] = {"swd_lens": __version__, "preset": how.preset}
        shared |= {"units": how.units, "calibration": self.kind, **({"weigh_outputs": True} if how.weigh_outputs else {})}
        if self.stream is not None:
            shared["tokens_sha256"] = self.stream.fingerprint()
            shared["batch_size"] = how.batch_size  # the order of a sum
            if not self.stream.counting.all:
                shared["exclude"] = list(self.stream.counting.ids)
            shared["host_sha256"] = self.stands[0] if self.stands else host_fingerprint(self.model)
            shared |= standing_hooks(self.model)
            if self.gram_dtype != "float32":
                shared["gram_dtype"] = self.gram_dtype
        host = host_of(self.model)
        return {
            site.name: {
                "sparsity": self.sparsities[site.name],
                **shared,
                **self.spec(site).as_dict(),
                "weight_sha256": weight_fingerprint(host, site),
            }
            for site in self.sites
        }

    def file_bytes(self) -> dict[str, int]:
        """Site -> bytes of its file: 8 an edge, and about ten vectors of its width (integrity.py)."""
        return {
            site.name: 8 * edges(site.d_in, site.d_out, self.sparsities[site.name]) + 40 * (site.d_in + site.d_out)
            for site in self.sites
        }

    def task(self, site: Site, calibrated: Calibrated | None, peak_bytes: int) -> SolveTask:
        """The solve of one matrix, or of its target."""

        def there(matrix: Tensor | None) -> Tensor | None:
            return matrix if matrix is None or self.how.device is None else matrix.to(self.how.device)

        seen = Calibrated(None, None, 0.0) if calibrated is None else calibrated
        weight = there(host_of(self.model).weight(site) if seen.target is None else seen.target)
        assert weight is not None
        return SolveTask(
            site=site.name,
            weight=weight,
            gram=there(seen.gram),
            sparsity=self.sparsities[site.name],
            preset=self.how.preset,
            units=self.how.units,
            tokens=None if seen.gram is None else seen.n_routed or self.n_tokens,
            options=self.settings_of(site),
            bytes=peak_bytes,
            first=seen.first,
            output_gram=there(seen.output_gram),
        )

    def remembered(self, site: Site) -> Tensor | None:
        """The host's dense weight, where factors remember it: it is no copy of another dtype's."""
        dtype = next(self.model.parameters()).dtype
        return host_of(self.model).weight(site) if dtype == torch.float32 else None
