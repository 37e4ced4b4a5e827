"""finetune: train the values of read and write of a whole replacement, on a fixed support (SWD-FT, paper app. A; method.md §5.3).

1. Check factors, text, settings and folder before the host is touched; hash what decides the bits of the run.
2. With out=: return the result of a finished run, or resume from the checkpoint of an interrupted one (train/folder.py).
3. Mount all sites in the frozen host (mount.py) and train what fit.py says (train/engine.py).
4. The result: the same sites with the new values on the old support, provenance, and a new probe of every site.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import FinetuneError, ResumeError
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.sealed import damaged, read_json
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.checkpoint import host_fingerprint, upstream_of
from swd_lens.hosts import require_gradients, require_no_dropout
from swd_lens.hosts.beginnings import warn_without_bos
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.recording import record, standing_hooks
from swd_lens.tasks.streams import TokenStream
from swd_lens.train.engine import Engine
from swd_lens.train.finetune.fit import FinetuneFit, Heldout
from swd_lens.train.finetune.mount import mounted, trainable
from swd_lens.train.finetune.spec import FinetuneSpec, resolve
from swd_lens.train.folder import RUN, TrainingFolder, require_possible
from swd_lens.train.rows import Processes, Rows, rows_of
from swd_lens.units import UnitSet, probe_tokens
from swd_lens.units.factors import MEASURED, Factors, FactorSet
from swd_lens.units.integrity import Probe

_FACTORS, _INDEX = "factors", "factors/factors.json"  # the index has the hashes of all files of the set
DEFAULT_PRESET = "best"


@says_when_interrupted
@with_torch_defaults
def finetune(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    preset: str = DEFAULT_PRESET,
    heldout: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    eval_every: int | None = None,
    checkpoint_every: int = 100,
    **recipe: Any,
) -> FactorSet:
    """Train the nonzero values of all factors together, inside the frozen host; which entries are nonzero stays as it is.

    Under `accelerate launch` or `torchrun` the same call is data parallel: load the host on each process's device; only the
    main process writes files and shows progress; every process gets the result.

    Memory: values, gradients and two moments, 4 bytes each per nonzero, and 8 for its place; in a step, also the dense factors
    of all sites in the host's dtype, which the gradient of their inputs needs, and the activations of the batch.

    Args:
        model: a HookedTransformer or TransformerBridge with nothing attached. In training mode without dropout, or in eval mode.
        factors: what `swd_lens.factorize` made: a FactorSet, a dict site name -> Factors, or one Factors that knows its site.
        tokens: (rows, pos) ids of training text, or a `TokenStream` (taken in its own order); anything but the calibration text.
        preset: "best" (ours: cross-entropy and KL to the dense host) or "paper" (method.md §5.3). See FinetuneSpec.
        heldout: (rows, pos) ids: CE and KL on them are logged before, every `eval_every` steps, and after.
        out: a folder for log.jsonl, checkpoints and the result (out/factors). The same call again after an interruption goes on
            from the last checkpoint and ends with the same bits; after the end it reads the result.
        overwrite: start again, in place of the run that `out` holds.
        progress: show a bar.
        eval_every: steps between evaluations; None = a tenth of all.
        checkpoint_every: steps between checkpoints; the last step has one, too.
        recipe: settings that differ from the preset's: loss=, learning_rate=, steps=, passes=, batch_size=, seed=, autocast=,
            keep="best", ... (see FinetuneSpec).

    Returns:
        FactorSet: sites, support, settings, origin, offsets as given. Its provenance, and each site's, has "finetune". Errors of
        the solver's factors stay under "..._before_finetune"; probes are made anew.

    Raises:
        FinetuneError: bad settings, text too short, encode/decode units, or a loss that is not finite (`out` keeps the last
            checkpoint).
        TokenError, AttachError, UnknownSiteError, UnitSourceError, UnsupportedHostError: bad text, factors or host.
        ResumeError: `out` holds another run (every difference is named), or files that changed after they were written.
        FolderInUseError, OSError: another call writes `out`, or it cannot be written, or the disk is full.
        ValueError: the host is in training mode and has dropout.
    """
    require_possible(out)
    bounded("eval_every", 1 if eval_every is None else eval_every, 1, error=FinetuneError)
    bounded("checkpoint_every", checkpoint_every, 1, error=FinetuneError)
    run = _Run.checked(model, factors, tokens, heldout, resolve(preset, recipe))
    units, processes, eval_every = run.units, run.processes, eval_every or max(1, run.steps // 10)
    folder = None if out is None else TrainingFolder(Path(out), run.recipe(eval_every), "finetune", (_INDEX,))
    n_bytes = sum(32 * f.edges + 4 * (f.read.numel() + f.write.numel()) for f in units.factors.values())
    with nullcontext(False) if folder is None else folder.opened(overwrite, n_bytes, processes) as finished:
        if folder is not None and finished:
            return _finished(folder, units)
        with torch.enable_grad(), mounted(units) as training, fused_attention(units.host, run.rows.stream.first_row()[None]):
            fit = FinetuneFit(training, run.spec, run.steps, run.heldout, processes)
            every = None if run.heldout is None else eval_every
            engine = Engine(fit, run.rows, run.spec.batch_size, folder, checkpoint_every, every, processes=processes)
            engine.run(progress=progress)
            fit.finish()
            result = _result(engine, fit, factors.provenance if isinstance(factors, FactorSet) else {}, preset)
        if folder is not None and processes.main:
            result.save(folder.path / _FACTORS)  # then the word that they are there
            folder.end({"before": _means(fit.before), "after": _means(fit.after)}, folder.result)
        processes.wait()
    return result


@dataclass(frozen=True)
class _Run:
    """A fine-tuning whose arguments have been checked."""

    spec: FinetuneSpec
    units: UnitSet
    rows: Rows
    heldout: Rows | None
    processes: Processes
    steps: int

    @classmethod
    def checked(cls, model: Any, factors: Any, tokens: Any, heldout: Any, spec: FinetuneSpec) -> "_Run":
        """Read and check everything that `finetune` is given, before the host is touched."""
        if spec.keep == "best" and heldout is None:
            raise FinetuneError('keep="best" needs heldout= tokens to tell which values are best')
        rows = _checked_rows(rows_of(tokens, model, (TokenStream,)), spec.batch_size, "tokens")
        warn_without_bos(model, rows.stream, "training tokens")
        heldout = None if heldout is None else _checked_rows(rows_of(heldout, model, (TokenStream,)), 1, "heldout")
        require_no_dropout(model)
        require_gradients(model)
        units = trainable(model, factors)
        processes = Processes()
        require_shares(processes, next(model.parameters()).device, spec.batch_size)
        return cls(spec, units, rows, heldout, processes, spec.steps_for(rows.n_rows))

    def recipe(self, eval_every: int) -> dict[str, Any]:
        """Everything that decides the bits of the run."""
        model = self.units.host.model
        return {
            "host_sha256": host_fingerprint(model),
            **standing_hooks(model),
            "factors_sha256": upstream_of(self.units.factors),
            "tokens_sha256": self.rows.stream.fingerprint(),
            "heldout_sha256": None if self.heldout is None else self.heldout.stream.fingerprint(),
            **self.spec.as_dict(),
            "steps": self.steps,
            "eval_every": eval_every,
            "swd_lens": __version__,
        }


def _finished(folder: TrainingFolder, units: UnitSet) -> FactorSet:
    """The result of a finished run, with the dense weights that the given factors remember; files never hold them."""
    tuned = FactorSet.load(folder.path / _FACTORS)
    if missing := [name for name in units.factors if name not in tuned]:
        reason = f"no factors for {', '.join(missing)}"
        raise ResumeError(damaged(folder.path / _FACTORS, "this run's result", reason))
    return FactorSet({name: replace(tuned[name], weight=f.weight) for name, f in units.factors.items()}, tuned.provenance)


def _checked_rows(rows: Rows, batch_size: int, what: str) -> Rows:
    if rows.row_length < 2:
        raise FinetuneError(f"{what} has rows of one token: each position predicts the next, so rows of two or more are needed")
    if rows.n_rows < batch_size:
        raise FinetuneError(
            f"{what} has {rows.n_rows} rows of {rows.row_length} tokens, too few for one batch of "
            f"batch_size={batch_size}; give more text, shorter rows or a smaller batch_size"
        )
    return rows


def require_shares(processes: Processes, model_device: torch.device, batch_size: int) -> None:
    """Raise FinetuneError where a process has no row of a batch, or its host on another process's device."""
    if processes.n > batch_size:
        raise FinetuneError(
            f"batch_size={batch_size} has no row for each of {processes.n} processes; give {processes.n} or more, or launch fewer"
        )
    if processes.n > 1 and model_device.type == "cuda" and processes.device != model_device:
        raise FinetuneError(
            f"process {processes.index} has its host on {model_device}, but {processes.device} is its device: load the "
            "host with device=accelerate.PartialState().device"
        )


def is_of_other_factors(path: Path, factors: Mapping[str, Factors]) -> bool:
    """Whether the folder holds a run of other factors than these (in execution order); False where it holds none."""
    try:
        run = read_json(path / RUN, "a training run")
        return run["settings"]["factors_sha256"] != upstream_of(factors)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _result(engine: Engine, fit: FinetuneFit, provenance: Mapping[str, Any], preset: str) -> FactorSet:
    """The factors as they are now. The probe's inputs are seen in the host while all of them are still mounted: what enters a
    site depends on the sites before it only."""
    units, rows = fit.mounted.units, engine.rows
    entry = {
        "preset": preset,
        **fit.spec.as_dict(),
        "steps": fit.steps,
        "tokens": engine.tokens,
        "unique_tokens": min(engine.tokens, rows.n_rows * rows.row_length),
        "before": _means(fit.before),
        "after": _means(fit.after),
        "swd_lens": __version__,
        **standing_hooks(units.host.model),
    }
    cfg = units.host.model.cfg
    tokens = list(provenance.get("probe_tokens") or probe_tokens(rows.stream.first_row()[None], int(cfg.d_vocab), int(cfg.n_ctx)))
    # What enters each site at the last of these tokens.
    last = record(units.host, torch.tensor([tokens]), inputs=units.sites, keep=lambda h: h[0, -1].float().cpu())
    tuned = {}
    for site in units.sites:
        f = units.factors[site.name]
        read, write = fit.mounted.projections[site.name].factors(f)
        new = replace(f, read=read, write=write)
        error = new.relative_frobenius(units.host.weight(site).to(read.device))
        # Measured on the factors before; their recipe (it is in MEASURED, too) no longer makes these.
        before = {f"{key}_before_finetune" if key in MEASURED else key: value for key, value in f.provenance.items()}
        tuned[site.name] = replace(
            new,
            probe=Probe.of(last.inputs[site.name], read, write, f.offsets),
            provenance={**before, "relative_frobenius": error, "finetune": entry},
        )
    probed = {"probe_tokens": tokens, "probe_sites": list(units)}
    return FactorSet(tuned, {"swd_lens": __version__, "model": str(cfg.model_name), **provenance, **probed, "finetune": entry})


def _means(heldout: Heldout | None) -> dict[str, float] | None:
    return None if heldout is None else heldout.as_dict()
