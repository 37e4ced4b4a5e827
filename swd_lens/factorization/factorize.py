"""factorize: from a host and a pattern to a FactorSet.

0. With a goal in place of a sparsity: search for it (goal.py); each trial is a call of the steps below.
1. Check the arguments and find the sites, in execution order (job.py); forecast their cost (estimate.py); with
   basis="auto", see what the text says of each (basis.py).
2. With out=: hold the folder, or be refused at once; take over the matrices that an earlier, interrupted call finished there,
   if they are what this call would make; and what shards of it have finished (checkpoint.py). Refuse what does not fit into
   memory, before the host is touched.
3. Stage by stage (stages.py): the Grams of its sites, from the host with the earlier stages replaced ("sequential",
   "per_block"), from the dense host ("dense"), or none (without tokens); then their factors, here or on other workers
   (workers/), which does not change a bit.
4. In execution order, whoever solved them: each matrix gets its provenance and its probe, with out= its file, and is attached
   for those that follow.

The bar counts operations, not matrices, so that its remaining time means something when the matrices differ in size.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.errors import AttachError, ResumeError, ShardError, legible, warn
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.machine import available_bytes
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.basis import with_chosen_bases
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.checkpoint import Checkpoint, Shard, host_fingerprint, writing_checkpoint
from swd_lens.factorization.estimate import Estimate, SiteEstimate, forecast
from swd_lens.factorization.goal import Goal, GoalSearch, divided, fitted_rows, paths_of, scaled
from swd_lens.factorization.gradients import require_loss
from swd_lens.factorization.job import Job, SolveOptions
from swd_lens.factorization.matrices import sparsity_of_each
from swd_lens.factorization.solve_task import made_by
from swd_lens.factorization.stages import Calibrated, ReplacedHost, stages_of
from swd_lens.factorization.workers import Solved, SolveTask, open_workers
from swd_lens.hosts import Host, find_sites, host_of
from swd_lens.hosts.beginnings import text_for, warn_without_bos
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.solver import DEFAULT_PRESET, Step
from swd_lens.solver.metric import relmse_of
from swd_lens.tasks.streams import TokenStream
from swd_lens.units import described, is_bare, origin_of, probe_at, require_detached, require_free
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.match import check_weights


@says_when_interrupted
@with_torch_defaults
def factorize(
    model: Any,
    sites: Pattern,
    *,
    sparsity: float | int | Mapping[str, float] | None = None,
    tokens: Any = None,
    kl: float | None = None,
    ce: float | None = None,
    heldout_tokens: Any = None,
    calibration: str = "sequential",
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    basis: str | Mapping[str, str] | None = None,
    batch_size: int = 16,
    gram_dtype: str = "auto",
    weigh_outputs: bool = False,
    device: str | torch.device | None = None,
    workers: int | str = 1,
    threads: int | None = None,
    shard: Any = None,
    progress: bool = True,
    out: str | Path | None = None,
    overwrite: bool = False,
    exclude: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> FactorSet:
    """Factorize the matrices that `sites` names into sparse read and write factors (paper §2.1).

    Args:
        model: a HookedTransformer or TransformerBridge, in any floating dtype; solved in float32.
        sites: a pattern or several ("all", "mlp_out", ...), see `swd_lens.hosts.sites.select_sites`.
        sparsity: s in (0, 1) for every matrix, budget K = (1 - s) * d_in * d_out; or a mapping from site names or patterns
            to s (`swd_lens.allocate` makes one). None: .5, or what keeps a goal.
        kl, ce: a goal in place of a sparsity, the largest KL(dense || replaced) and CE increase of all sites together, in nats
            per prediction of text that nothing was fitted on. Sparsities are searched for, of neurons and singular vectors with
            pruned weights and of SWD from two sides, or of the preset, units and options that you give; the factors whose effects
            on next tokens take the fewest edges are taken (goal.py; ours). With a mapping of sparsities all budgets are scaled
            alike, without one they are equal. It costs ten to twenty factorizations; `FactorSet.tried` shows them.
        heldout_tokens: of a goal: (rows, pos) text on which it is measured; the more there is, the closer other text keeps the
            goal: 4,096 tokens know a KL to about ±15 %. None: the last quarter of `tokens`' rows, which are then no calibration;
            what is found is measured on the others, too, up to 16,384 tokens in all (goal.py).
        tokens: (rows, pos) calibration ids, or a `TokenStream` (as many as you like: memory does not grow with them);
            None = zero-data (G = I), with a warning, since it is easily forgotten.
        calibration: "sequential" takes each matrix's inputs from the host with all earlier ones replaced (method.md §5.2);
            "per_block" from the host with all earlier blocks replaced, one pass per block; "dense" from the untouched host;
            "corrected" is sequential and fits each matrix to what the dense host writes there (grams.py): not the paper's,
            and better where many matrices are replaced. With one site they are the same. "zero-data" says that no tokens are
            meant.
        preset, units, options: the solver's, see `swd_lens.solve` (outer_iterations=, ...).
        basis: whose coordinates units start as: "input", "output" or "paper" (the short side); "neurons", the side of an MLP's
            neurons and the preset's own elsewhere; "auto", what `choose_basis` (basis.py) says of these tokens, without any an
            MLP's neurons and the dimensions of heads at their output; or a mapping from site names or patterns to these. None:
            "auto" for our solver's presets where `units` and the shares of edges are left to it, else the preset's own. With
            "auto" a task's circuit takes fewer edges, at a larger error than with "paper" (tests/benchmarks/RESULTS.md).
        batch_size: rows per calibration forward.
        gram_dtype: of the products of one batch and of the Grams, "float32" or "float64"; "auto": float64 where every matrix is
            small enough to be solved in float64, so that factors do not depend on the processor. Sums are float64 anyway.
        weigh_outputs: refit the values of each matrix so that errors of its outputs count as the loss sees them, by the second
            moment of its gradients there on the same tokens (ours; solver/outputs.py): one pass forward and back for all
            matrices. Supports, and so edges, are the same; KL to the dense model falls, by 40 % in the mean of single matrices
            of the embedded model (tests/benchmarks/RESULTS.md), while relMSE mostly rises.
        device: where to solve, one matrix at a time; None: where the host's matrix is.
        workers: solve this many matrices at a time in processes of their own, or "ray" for the Ray cluster (see
            `swd_lens.factorization.workers`). Sequential calibration has few matrices that do not wait for each other.
        threads: CPU threads per solve; None: as many as now, shared out over the processes, and all of them for a matrix that no
            other is solved beside (Ray: 1). The same number gives the same bits, whoever solves.
        shard: "2/8" does the second eighth of the matrices (zero-data or dense calibration only), into a folder of its own in
            `out`. When all shards are done, the same call without shard= puts them together.
        progress: show a bar: share of the estimated operations, site, iteration, relMSE so far.
        out: a folder that gets every matrix as soon as it is finished; at every moment `FactorSet.load` can read it.
            The same call again after an interruption takes over what is finished and goes on; the result has the same
            bits as that of an uninterrupted call. None: nothing is written.
        overwrite: start again, in place of what `out` holds (which stays until the first new matrix is finished).
        exclude: "special" (the tokenizer's special tokens, BOS among them) or token ids, whose positions do not count: Grams and
            output Grams are means over the others. The set's provenance says how many were left out, and each matrix's which
            share of its Gram's trace the first positions of rows have (`first_position_share`), and the relMSE at the others
            (`relmse_of_others`).
        attention_mask: (rows, pos), 0 where `tokens` are padding, which is left out. Padding before a text is moved behind it.

    Returns:
        FactorSet. Factors of a float32 host remember their dense weight, those of other hosts do not: it would be a float32
        copy of the whole model.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        AttachError: units are attached: their inputs would not be the host's.
        ResumeError: `out` holds factors that were made otherwise, or the trials of another goal; every difference is named.
        DoesNotFitError: more memory is needed than available (see `swd_lens.estimate`).
        ShardError: no such shard, or one of matrices that wait for each other.
        OSError: (FolderInUseError) another call writes `out`; or it cannot be written, or its disk is too small.
        ValueError: bad sparsity or solver options; the site is named. A goal beside a sparsity, without text, or (GoalError)
            which nothing that was tried keeps (the nearest is named).
    """
    zero_data = calibration == "zero-data" and tokens is None
    how = SolveOptions(
        preset=preset,
        units=units,
        basis=basis,
        calibration="sequential" if zero_data else calibration,
        batch_size=batch_size,
        gram_dtype=gram_dtype,
        weigh_outputs=weigh_outputs,
        device=device,
        workers=workers,
        threads=threads,
        settings=options,
    )
    if kl is not None or ce is not None:
        for name, value in (("sparsity", None if isinstance(sparsity, Mapping) else sparsity), ("shard", shard)):
            if value is not None:
                raise ValueError(
                    f"{name}={legible(value)} beside a goal (kl= or ce=), which searches for it; leave one of them out (a "
                    "mapping of sparsities may stand beside a goal: its budgets are scaled)"
                )
        require_detached(model, "factorize")
        texts = divided(model, tokens, heldout_tokens, exclude=exclude, attention_mask=attention_mask)
        # Where the text was divided, both parts are of one kind, and both say how far the end of a search moves the model.
        wide = fitted_rows(*texts) if heldout_tokens is None else None
        return _to_a_goal(model, sites, Goal(kl, ce), (*texts, wide), sparsity, how, out, overwrite, progress)
    if heldout_tokens is not None:
        raise TypeError(
            "heldout_tokens= is for a goal; give kl= or ce=, or measure with swd.fidelity(model, factors, heldout_tokens)"
        )
    # 1. What is asked for, and its share of a larger job.
    if tokens is None and not zero_data:
        warn(
            "no calibration tokens were given, so these factors are zero-data (G = I), which fits every input direction "
            'alike. Give tokens=, or say calibration="zero-data" if that is meant'
        )
    require_detached(model, "factorize")
    text = None if tokens is None else text_for(model, tokens, exclude=exclude, attention_mask=attention_mask)
    job = Job.of(model, sites, text, 0.5 if sparsity is None else sparsity, how)
    rows = forecast(job)  # a bad option fails here, before anything is hashed, read or run
    job.warn_of_few_tokens()
    if job.stream is not None:
        warn_without_bos(model, job.stream, "calibration tokens")
    job = job.knowing_its_host()
    if shard is not None:
        part = Shard.parse(shard)
        job = job.only(part, {row.site: row.flops for row in rows})
        if out is None:
            raise ShardError(f"shard {part} needs out=: the folder in which the shards are put together")
        out = part.folder(Path(out))

    # 2. to 4., with the folder held before the host runs.
    if out is None:
        return _factorized(with_chosen_bases(job, progress=progress), None, progress=progress)
    with writing_checkpoint(Path(out), job.file_bytes(), overwrite=overwrite):
        job = with_chosen_bases(job, progress=progress, folder=None if overwrite else Path(out))
        recipes = job.recipes()
        checkpoint = Checkpoint(Path(out), job.provenance(), recipes, chained=job.chained, overwrite=overwrite)
        return _factorized(job, checkpoint, progress=progress)


def _to_a_goal(
    model: Any,
    sites: Pattern,
    goal: Goal,
    texts: tuple[CalibrationText, TokenStream, TokenStream | None],
    sparsities: Any,
    how: SolveOptions,
    out: str | Path | None,
    overwrite: bool,
    progress: bool,
) -> FactorSet:
    """Search for factors that keep a goal (goal.py); `texts` are to be fitted and judged on, and the fitted rows that ends are
    measured on, too."""
    fitted, heldout, wide = texts
    require_loss(model, heldout)
    found = find_sites(model, sites)
    paths = paths_of(found, how.preset, how.units, how.solver)
    given = None if sparsities is None else sparsity_of_each(found, sparsities)

    def make(s: float, options: Mapping[str, Any], folder: Path | None) -> FactorSet:
        sparsity = s if given is None else scaled(found, given, s)
        arguments = {**how.arguments(), **options}
        return factorize(model, sites, sparsity=sparsity, tokens=fitted, progress=False, out=folder, **arguments)

    asked: dict[str, Any] = {"goal": str(goal), "sites": [site.name for site in found], "exclude": list(fitted.counting.ids)}
    asked["paths"] = {path: dict(options) for path, options in paths.items()}
    asked |= {name: getattr(how, name) for name in ("calibration", "batch_size", "gram_dtype", "weigh_outputs")}
    asked |= {} if given is None else {"sparsity": given}
    asked["host_sha256"] = host_fingerprint(model)
    asked |= {"tokens_sha256": fitted.fingerprint(), "heldout_sha256": heldout.fingerprint()}
    # As a file gives it back.
    plan = json.loads(json.dumps(asked, default=str)) | {"fitted rows, too": 0 if wide is None else wide.n_rows}
    folder = None if out is None else Path(out)
    search = GoalSearch(model, goal, paths, fitted, heldout, make, wide, folder, plan)
    with search.held(overwrite):
        return search.saved(*search.run(progress))


def _factorized(job: Job, checkpoint: Checkpoint | None, *, progress: bool) -> FactorSet:
    """Steps 2 to 4 of a job, from what is finished on."""
    # 2. What earlier calls and shards have finished, and whether the rest fits.
    model = job.model
    finished = {} if checkpoint is None else checkpoint.resume()
    done = {site.name: _verify_resumed(job, checkpoint, site, finished[site.name]) for site in job.sites if site.name in finished}
    plan = {row.site: row for row in forecast(job, done)}
    Estimate(tuple(plan.values()), available_bytes(next(model.parameters()).device), None, job.kind).require_fit()
    in_shards = {} if checkpoint is None else checkpoint.in_shards()
    if not plan:
        return FactorSet(done, job.provenance())

    # 3. and 4. The rest, stage by stage.
    host, stages = host_of(model), stages_of(job.sites, job.kind)
    unsolved = [[site for site in stage if site.name not in {*done, *in_shards}] for stage in stages]
    if job.shard is None:
        require_free(host, job.sites[:-1])  # each of these will be attached for those that follow
    # With hooks or units of the user's in place a probe would refuse the factors wherever these are not.
    probed = job.shard is None and is_bare(host)
    replaced = ReplacedHost(
        model,
        job.stream,
        job.kind,
        batch_size=job.how.batch_size,
        keep=sum(map(bool, unsolved)) > 1,
        dtype=job.gram_dtype,
        scratch=None if checkpoint is None else checkpoint.folder,
        weighed=[site for stage in unsolved for site in stage] if job.how.weigh_outputs else (),
        stands=job.stands,
    )
    bar = _Bar(job, plan, show=progress)
    reached(f", {len(done)} of {len(job.sites)} matrices finished")
    with replaced, bar.bar, open_workers(job.how.workers, threads=job.how.threads) as pool:
        for stage, to_solve in zip(stages, unsolved, strict=True):
            calibrated: dict[str, Calibrated] = {}
            if to_solve and job.stream is not None:
                calibrated = replaced.calibrate(to_solve, progress and job.kind == "dense")
            bar.calibrated([site for site in stage if site.name not in done])
            alone = len(stage) == 1
            seen = {name: (of_site.first_share, of_site.n_routed) for name, of_site in calibrated.items()}
            tasks = _tasks(job, to_solve, calibrated, bar, in_process=pool.in_this_process(alone=alone))
            solved = pool.solve(tasks, alone=alone, on_iteration=bar.iterated if progress else None)
            for site in stage:
                if site.name not in done:
                    if site.name in in_shards:
                        f = _verify_resumed(job, checkpoint, site, in_shards[site.name]())
                        if probed:
                            f = replace(f, probe=probe_at(model, site, job.probe_tokens, f.read, f.write))
                    else:
                        recipe = {} if checkpoint is None else {"recipe": checkpoint.recipe(site.name)}
                        f = _finished(job, site, next(solved), *seen.get(site.name, (None, None)), recipe, probed)
                    done[site.name] = f
                    if checkpoint is not None:
                        checkpoint.add(site.name, f)
                    reached(f", {len(done)} of {len(job.sites)} matrices finished")
                    bar.finished(site.name, f.provenance.get("relmse"))
                if job.shard is None and site != job.sites[-1]:
                    replaced.replace(site, done[site.name])
    return FactorSet({site.name: done[site.name] for site in job.sites}, job.provenance())


def _verify_resumed(job: Job, checkpoint: Checkpoint | None, site: Site, f: Factors) -> Factors:
    """Factors that the folder holds, with the host's dense weight. Raises ResumeError: they were made from another W, or from
    another input, than their recipe says."""
    try:
        check_weights(host_of(job.model), site, f)
    except AttachError as cause:
        folder = None if checkpoint is None else checkpoint.folder
        raise ResumeError(f"{folder}: {cause}; or start again with overwrite=True") from cause
    return replace(f, weight=job.remembered(site))


def _tasks(
    job: Job, sites: Sequence[Site], calibrated: dict[str, Calibrated], bar: "_Bar", *, in_process: bool
) -> Iterator[SolveTask]:
    """Yield tasks as they are asked for, so that this process never has two float32 copies of weights at a time."""
    for site in sites:
        if in_process:
            bar.begin(site.name)
        yield job.task(site, calibrated.pop(site.name, None), bar.plan[site.name].peak_bytes)


def _finished(
    job: Job, site: Site, solved: Solved, first_share: float | None, n_routed: int | None, recipe: Mapping[str, Any], probed: bool
) -> Factors:
    """The factors where the host's matrix is, with everything that they carry. first_share: of their Gram, if they have one;
    n_routed: of an expert, the tokens that it is the mean of; recipe: for their provenance, with a folder."""
    assert solved.site == site.name, f"{solved.site} came for {site.name}"
    host = host_of(job.model)
    weight = host.weight(site)
    home = weight.device if next(job.model.parameters()).dtype == torch.float32 else torch.device("cpu")
    read, write = solved.read.to(home), solved.write.to(home)
    error = solved.relative_frobenius
    if job.kind == "corrected":  # the solver saw the target, not W
        error = relmse_of(read, write, weight.to(home)) ** 0.5
    calibration = {"calibration": job.kind, "tokens": job.n_tokens if n_routed is None else n_routed}
    if first_share is not None:
        calibration["first_position_share"] = first_share
    if solved.relmse_of_others is not None:
        calibration["relmse_of_others"] = solved.relmse_of_others
    provenance = {**made_by(solved.solver), **_belonging(host, site), **calibration}
    provenance |= {"relmse": solved.relmse, "relative_frobenius": error, **recipe}
    probe = probe_at(job.model, site, job.probe_tokens, read, write) if probed else None
    origin = origin_of(host, site, weight)
    return Factors(read, write, solved.settings, provenance, job.remembered(site), origin, probe=probe)


def stamp(f: Factors, model: Any, site: Site) -> Factors:
    """Factors that know where they belong: site, model, fingerprints of the host's W, its processing; attaching checks these."""
    host = host_of(model)
    provenance = {**f.provenance, **_belonging(host, site)}
    return replace(f, origin=origin_of(host, site, host.weight(site)), provenance=provenance)


def _belonging(host: Host, site: Site) -> dict[str, Any]:
    """Provenance of a host's matrix; plain JSON values."""
    cfg = host.model.cfg
    named = {"model": str(cfg.model_name), "normalization": str(cfg.normalization_type), "swd_lens": __version__}
    return {"site": site.name, **described(host, site), **named}


# ---------------------------------------------------------------------------------------------- the bar

# The error so far costs a product of the factors; shown this often it costs nothing that matters.
_SECONDS_BETWEEN_ERRORS = 3.0


class _Bar:
    """The share of all estimated operations that is done; beside it site, iteration and relMSE so far. plan: site -> what is
    still to be done; show: False says nothing, and measures nothing."""

    def __init__(self, job: Job, plan: Mapping[str, SiteEstimate], *, show: bool):
        self.numbers = {site.name: number for number, site in enumerate(job.sites, 1)}
        self.plan = plan
        self.chained = job.chained  # dense calibration has a bar of its own
        self.at = 0.0  # operations done; tqdm keeps no count when it is disabled
        self.start = 0.0  # of the present matrix's solve
        self.present: str | None = None  # what is being solved in this process
        self.label, self.error, self.error_time = "", "", 0.0
        s = set(job.sparsities.values())
        title = f"factorize s={min(s):g}" if len(s) == 1 else f"factorize s={min(s):g}..{max(s):g}"
        total = sum(row.flops + self._calibration(row.site) for row in plan.values())
        self.bar: Any = tqdm(total=total, desc=title, unit="FLOP", unit_scale=True, disable=not show, leave=False)

    def calibrated(self, sites: Sequence[Site]) -> None:
        """Count the calibration of these sites as done."""
        self._to(self.at + sum(self._calibration(site.name) for site in sites))

    def begin(self, site: str) -> None:
        """Show the matrix that is handed to the solver of this process."""
        self.present, self.label, self.error = site, f"{site} ({self.numbers[site]}/{len(self.numbers)})", ""
        self.start, self.error_time = self.at, time.monotonic()
        self._tell("")

    def iterated(self, step: Step) -> None:
        """Show how far a solve in this process has come; called after each iteration."""
        if time.monotonic() - self.error_time >= _SECONDS_BETWEEN_ERRORS:
            self.error, self.error_time = f" relMSE {step.relmse():.3g}", time.monotonic()
        self._tell(f" {step.iteration}/{step.total}{self.error}")
        if self.present is not None:
            self._to(self.start + self.plan[self.present].flops * step.iteration / step.total)

    def finished(self, site: str, relmse: Any) -> None:
        """Count a matrix as done: solved here, elsewhere, or taken over, from a file that may say anything of its relMSE."""
        if site != self.present:
            self.label, self.start = f"{site} ({self.numbers[site]}/{len(self.numbers)})", self.at
        self.present = None
        self._to(self.start + self.plan[site].flops)
        self._tell(f" relMSE {relmse:.3g}" if isinstance(relmse, float) else "")

    def _calibration(self, site: str) -> float:
        return self.plan[site].calibration_flops if self.chained else 0.0

    def _tell(self, text: str) -> None:
        self.bar.set_postfix_str(self.label + text, refresh=False)

    def _to(self, operations: float) -> None:
        self.bar.update(operations - self.at)
        self.at = operations
