"""allocate: how many edges each matrix of a surface gets, at the total of equal sparsity.

1. Solve every matrix at a few budgets around its uniform one, K = (1 - s) numel(W), on dense Grams (collected a few matrices
   at a time).
2. Measure what each of these does to the model: by="kl", KL(dense || host with only this matrix replaced); by="error", its
   relMSE, which costs no forwards.
3. Spend the same total where an edge saves most (allocation.py). The sum over matrices stands for the whole replacement: each is
   measured beside dense others, though they will all be replaced.

The result is a mapping site name -> s, which `swd_lens.factorize(model, sites, sparsity=allocation)` takes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.divergence import kl_sum, log_probabilities
from swd_lens.base.errors import SparsityError, TokenError, quoted
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.allocation import Allocation, LossCurve, SiteBudget, fewest_edges, spend
from swd_lens.factorization.basis import with_chosen_bases
from swd_lens.factorization.calibration_text import CalibrationText, KnownGrams
from swd_lens.factorization.estimate import forecast
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.job import Job, SolveOptions
from swd_lens.factorization.solve import solve
from swd_lens.factorization.solve_task import naming
from swd_lens.factorization.stages import Calibrated, calibrated_by
from swd_lens.hosts import Host, Start, host_of, require_no_dropout
from swd_lens.hosts.beginnings import warn_without_bos
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.predictions import Predictions, ends_in_whole_logits, tried_on
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.solver.budget import edges as edges_of
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.text import as_rows
from swd_lens.units import attach, require_detached, require_free
from swd_lens.units.factors import Factors

BY = ("kl", "error")

# Budgets tried, as multiples of the uniform one. Embedded model, everything, s = .5 to .75: five or sixteen budgets in the same
# range lower the summed loss by less than .5 % more; .7 to 1.4 loses 7 to 15 % at .685 and .75; .25 to 3 gave no lower KL.
GRID = (0.5, 1.0, 2.0)

# Below these a loss is float32 rounding.
_LEAST = {"kl": 1e-9, "error": 1e-12}

# Tokens on which the KL of one replaced matrix is measured, at most.
JUDGED = 4_096

# No matrix gets more of its entries than this: beyond it two sparse factors cost more than the matrix.
_DENSEST = 0.95

_BYTES_PER_GRAM_ENTRY = 12  # a float64 sum, and the float32 Gram made of it


@says_when_interrupted
@with_torch_defaults
def allocate(
    model: Any,
    sites: Pattern = "all",
    sparsity: float | int = 0.685,
    tokens: Any = None,
    *,
    by: str = "kl",
    kl: float | None = None,
    grid: Sequence[float | int] = GRID,
    preset: str = "quick",
    units: int | float | str | None = None,
    basis: str | Mapping[str, str] | None = None,
    judge: Any = None,
    batch_size: int = 16,
    gram_bytes: int = 2**30,
    progress: bool = True,
    **options: Any,
) -> Allocation:
    """Allocate the budget of equal sparsity over matrices so that the replaced model loses least (ours).

    It costs len(grid) solves per matrix and passes over `tokens` for the Grams (one if they fit `gram_bytes` together), and
    by="kl" also len(grid) passes over `judge` per matrix, from its block on, and two of the dense host. Held at a time: the
    Grams of a group, the factors of one matrix at every budget of the grid, and two residuals of `judge`.

    Args:
        model: the host, with these sites not attached.
        sites: a pattern or several, see `swd_lens.hosts.sites.select_sites`.
        sparsity: s in (0, 1) whose total K = sum over matrices of (1 - s) * d_in * d_out is spent.
        kl: a goal in place of that total: the fewest edges whose summed KL of single replacements is at most this, with budgets
            of the grid around `sparsity`. The KL of replacing all matrices together is another number, and mostly larger:
            `factorize(sparsity=budgets, kl=)` measures it, and scales the budgets until it is kept.
        tokens: (rows, pos) calibration ids for the Grams, or a `TokenStream`; None = zero-data (G = I).
        by: "kl", KL(dense || one matrix replaced) in nats per predicted token; or "error", the matrix's relMSE at all positions
            but the first of rows, where attention sinks are, which needs no forwards and knows nothing of what the model does
            with the output.
        grid: budgets to try, as multiples of a matrix's uniform K; no matrix gets less than the first or more than the last.
        preset, units, basis, options: the solver's for these trials, see `factorize`. The final factors may be made with a
            better preset; what counts is how losses compare.
        judge: (rows, pos) ids for by="kl"; None takes the first 4,096 of `tokens`.
        batch_size: rows per forward.
        gram_bytes: Grams held at once, at least one matrix's.
        progress: show a bar over the trials.

    Raises:
        ValueError: unknown `by`, a grid that does not rise or does not hold 1 between its ends, nothing to judge on, a bad
            solver option, or a sparsity that leaves too few edges (BudgetError; the site is named); a goal that is not above 0,
            for which no KL is measured, or beyond the grid's ends.
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        AttachError: a site is attached already.
    """
    one_of("by", by, BY)
    if isinstance(sparsity, Mapping):
        raise SparsityError("sparsity is a mapping already; allocate needs one number whose total is spent")
    if kl is not None and (by != "kl" or not 0 < kl < math.inf):
        raise ValueError(
            f"kl={kl} with by={quoted(by)}: a goal is a summed KL above 0, in nats per prediction, which is measured with by='kl'"
        )
    multiples = _multiples(grid)
    require_detached(model, "allocate")
    stream = None if tokens is None else as_stream(tokens, model)
    how = SolveOptions(preset=preset, units=units, basis=basis, batch_size=batch_size, settings=options)
    job = Job.of(model, sites, stream, sparsity, how)
    forecast(job)  # what the solver would refuse is refused here
    if stream is not None:
        warn_without_bos(model, stream, "calibration tokens")
    job = with_chosen_bases(job.knowing_its_host(), progress=progress)
    rows = _judged(judge, stream, model) if by == "kl" else None
    if rows is not None:
        require_free(host_of(model), job.sites)
    judged = None if rows is None else _Judge(host_of(model), rows, batch_size)
    budgets = {site.name: _budgets(job, site, sparsity, multiples) for site in job.sites}
    uniform = {site.name: edges_of(site.d_in, site.d_out, sparsity) for site in job.sites}
    curves = _curves(job, budgets, judged, gram_bytes, progress)
    total = sum(uniform.values()) if kl is None else fewest_edges(curves, kl)
    if kl is not None:
        sparsity = 1 - total / sum(site.numel for site in job.sites)
        uniform = {site.name: edges_of(site.d_in, site.d_out, sparsity) for site in job.sites}
    allocated = spend(curves, total)
    settings = _settings(job, multiples, kl, rows)
    site_budgets = {
        site.name: SiteBudget(site.numel, uniform[site.name], allocated[site.name], curves[site.name]) for site in job.sites
    }
    return Allocation(float(sparsity), by, settings, site_budgets)


def _settings(job: Job, multiples: Sequence[float], kl: float | None, rows: Tensor | None) -> dict[str, Any]:
    """Everything that the allocation depends on beside `by` and its curves, as plain values."""
    how = job.how
    settings = {"swd_lens": __version__, "model": str(job.model.cfg.model_name), "grid": list(multiples), "preset": how.preset}
    settings |= {"units": how.units, "tokens": job.n_tokens, **({} if kl is None else {"kl": kl})}
    settings["options"] = {name: dict(value) if isinstance(value, Mapping) else value for name, value in how.solver.items()}
    settings |= {"judged": 0 if rows is None else rows.numel(), **standing_hooks(job.model)}
    return settings


def _multiples(grid: Sequence[float | int]) -> tuple[float, ...]:
    """The grid as numbers; a ValueError where it does not rise, or does not hold 1 between its ends."""
    multiples = tuple(float(value) for value in grid)
    rising = all(a < b for a, b in itertools.pairwise(multiples))
    if len(multiples) < 2 or not rising or multiples[0] <= 0 or not multiples[0] <= 1 <= multiples[-1]:
        raise ValueError(
            f"grid={list(grid)}: give two or more rising multiples of the uniform budget, from at most 1 to at least 1, "
            f"such as {GRID}"
        )
    return multiples


def _curves(
    job: Job, budgets: Mapping[str, tuple[int, ...]], judged: "_Judge | None", gram_bytes: int, progress: bool
) -> dict[str, LossCurve]:
    """Solve every matrix at every budget: site -> loss by number of edges, KL where there is a judge, else error."""
    by = "error" if judged is None else "kl"
    curves: dict[str, LossCurve] = {}
    trials_to_make = sum(map(len, budgets.values()))
    with tqdm(total=trials_to_make, desc=f"allocate by {by}", disable=not progress, leave=False) as bar:
        for site, calibrated in _with_grams(job, gram_bytes):
            bar.set_postfix_str(site.name, refresh=False)
            weight, trials = host_of(job.model).weight(site), []
            gram, first = calibrated.gram, calibrated.first
            how: dict[str, Any] = {"preset": job.how.preset, "units": job.how.units, **job.settings_of(site)}
            how["tokens"] = None if gram is None else calibrated.n_routed or job.n_tokens  # as in `Job.task`
            for k in budgets[site.name]:
                with naming(site):
                    trials.append(solve(weight, gram, 1 - k / site.numel, **how))
                bar.update()
            if gram is None or first is None or not len(first):
                first = None
            losses = [f.relmse(gram, without=first) for f in trials] if judged is None else judged.losses(site, trials)
            curves[site.name] = LossCurve(budgets[site.name], tuple(max(loss, _LEAST[by]) for loss in losses))
    return curves


def _judged(judge: Any, stream: TokenStream | None, model: Any) -> Int[Tensor, "_rows _pos"]:
    """Rows on which KL is measured."""
    if judge is not None:
        judged = as_rows(judge, model)
    elif stream is not None:
        judged = next(stream.batches(max(1, JUDGED // stream.row_length)))
    else:
        raise ValueError('by="kl" needs tokens= (or judge=) to measure on; by="error" does without')
    if judged.shape[1] < 2:
        raise TokenError("KL is measured on rows of at least two tokens: each position predicts the next")
    require_no_dropout(model)
    return judged


def _budgets(job: Job, site: Site, sparsity: float | int, multiples: Sequence[float]) -> tuple[int, ...]:
    """Edges to try, rising, the uniform budget among them; none that the solver cannot make or would not use."""
    uniform = edges_of(site.d_in, site.d_out, sparsity)
    spec = job.spec(site)
    width = job.width(site)
    least = spec.least_edges(site.d_in, site.d_out, width)
    most = min(int(_DENSEST * site.numel), width * (site.d_in + site.d_out))
    least, most = min(least, uniform), max(most, uniform)
    tried = {min(max(round(multiple * uniform), least), most) for multiple in multiples}
    return tuple(sorted({*tried, uniform}))


def _with_grams(job: Job, gram_bytes: int) -> Iterator[tuple[Site, Calibrated]]:
    """Every site with its dense Gram, in execution order; Grams of as many sites at a time as fit."""
    group: list[Site] = []
    text = job.stream if isinstance(job.stream, CalibrationText) else None
    kept = None if text is None else KnownGrams(text, job.model, job.how.batch_size, job.gram_dtype, job.stands)
    for i, site in enumerate(job.sites):
        group.append(site)
        following = job.sites[i + 1].d_in ** 2 if i + 1 < len(job.sites) else float("inf")
        if (sum(other.d_in**2 for other in group) + following) * _BYTES_PER_GRAM_ENTRY <= gram_bytes:
            continue
        grams = None if kept is None else kept.collect(group)
        if grams is None and job.stream is not None:
            grams = collect_grams(job.model, group, job.stream, batch_size=job.how.batch_size, dtype=job.gram_dtype)
        calibrated = {} if grams is None else {member.name: calibrated_by(grams, member.name) for member in group}
        del grams  # each Gram goes with its matrix
        for member in group:
            yield member, calibrated.pop(member.name, Calibrated(None, None, 0.0))
        group = []


class _Judge:
    """KL(dense || one matrix replaced) in nats per predicted token, on the same rows for every matrix.

    The dense host runs twice for all of them, to its end and block by block: what enters the present matrix's block, and what
    leaves the last one, are kept for every batch, and each trial takes up there. Logits are made a part at a time.
    """

    def __init__(self, host: Host, rows: Int[Tensor, "rows pos"], batch_size: int):
        self.host, self.rows, self.batches = host, rows, list(rows.split(batch_size))
        self.layer, self.end = 0, len(host.model.blocks)
        with torch.no_grad(), fused_attention(host, rows):
            self.starts = [host.residual(batch, 0) for batch in self.batches]
            self.ends = [self._from(number, self.end) for number in range(len(self.batches))]
            # Whether runs in stages end in the logits of whole ones, on the first tokens.
            few = tried_on(host, rows)
            middle = self.end // 2

            def staged() -> Tensor:
                return host.residual(few, self.end, start=Start(middle, host.residual(few, middle)))

            self.staged = ends_in_whole_logits(host, few, staged)

    def losses(self, site: Site, trials: Sequence[Factors]) -> list[float]:
        """Loss of each trial in the site's place; sites come in execution order."""
        total = torch.zeros(len(trials), dtype=torch.float64)
        with torch.no_grad(), fused_attention(self.host, self.rows):
            if self.staged and site.layer > self.layer:
                self.starts = [self._from(number, site.layer) for number in range(len(self.batches))]
                self.layer = site.layer
            for number, batch in enumerate(self.batches):
                replaced = []
                for f in trials:
                    with attach(self.host.model, {site.name: f}):
                        replaced.append(self._from(number, self.end) if self.staged else self.host.run(batch))
                dense = self.ends[number] if self.staged else self.host.run(batch)
                for part in Predictions(self.host).parts(batch, batch.shape[1] - 1):
                    log_p = log_probabilities(self._logits(batch, dense, part))
                    for i, of_trial in enumerate(replaced):
                        total[i] += float(kl_sum(log_p, log_probabilities(self._logits(batch, of_trial, part))))
        return (total / (self.rows.shape[0] * (self.rows.shape[1] - 1))).tolist()

    def _from(self, number: int, layer: int) -> Tensor:
        return self.host.residual(self.batches[number], layer, start=Start(self.layer, self.starts[number]))

    def _logits(self, batch: Tensor, end: Tensor, part: tuple[slice, slice]) -> Tensor:
        return self.host.unembed(batch[part], end[part]) if self.staged else end[part]
