"""finetune: train the values of read and write of a whole replacement, on a fixed support (SWD-FT, paper app. A; method.md §5.3).

1. Check factors, text, settings and folder before the host is touched; hash what decides the bits of the run.
2. With out=: take over a finished run, or go on from the checkpoint of an interrupted one (folder.py).
3. Mount all sites in the frozen host (mount.py) and train (loop.py).
4. The result: the same sites with the new values on the old support, provenance, and a new probe of every site.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swd_lens.base._version import __version__
from swd_lens.base.machine import plain_float32
from swd_lens.factorization.checkpoint import chain, host_fingerprint
from swd_lens.hosts import Host, require_no_dropout
from swd_lens.train.finetune.folder import RunFolder
from swd_lens.train.finetune.loop import Run
from swd_lens.train.finetune.mount import Mounted, checked, mounted
from swd_lens.train.finetune.objective import Heldout
from swd_lens.train.finetune.processes import Processes
from swd_lens.train.finetune.rows import Rows, rows_of
from swd_lens.train.finetune.spec import FinetuneError, resolve
from swd_lens.units import probe_tokens
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.passport import Probe

DEFAULT_PRESET = "best"


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
        FinetuneError: bad settings, text too short, encode/decode units, or a loss that is not finite (training stops; step and
            learning rate are named; `out` keeps the last checkpoint).
        TokenError, AttachError, UnknownSiteError, UnitSourceError, UnsupportedHostError: bad text, factors or host.
        ResumeError: `out` holds another run; every difference is named.
        ValueError: the host is in training mode and has dropout.
    """
    spec = resolve(preset, recipe)
    for name, every in (
        ("eval_every", 1 if eval_every is None else eval_every),
        ("checkpoint_every", checkpoint_every),
    ):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise FinetuneError(f"{name}={every!r}: give a whole number of steps, 1 or more")
    if spec.keep == "best" and heldout is None:
        raise FinetuneError('keep="best" needs heldout= tokens to tell which values are best')
    text = rows_of(tokens, model, spec.batch_size)
    held = None if heldout is None else rows_of(heldout, model, 1, "heldout")
    require_no_dropout(model)
    host, sites, given = checked(model, factors)
    device = next(model.parameters()).device
    processes = Processes(device, spec.batch_size)
    steps = spec.steps_for(text.n_rows)
    eval_every = eval_every or max(1, steps // 10)
    folder = None
    if out is not None:
        hashes = _hashes(host, given, text, held)
        decides = {**hashes, **spec.as_dict(), "steps": steps, "eval_every": eval_every, "swd_lens": __version__}
        folder = RunFolder(Path(out), decides)
    last = 0
    if folder is not None and not overwrite:
        if folder.check():
            return _remembering(folder.factors(), given)
        last = folder.last_step()
    processes.wait()  # everybody has looked before the main process changes anything
    exact = nullcontext() if spec.autocast is not None else plain_float32(device)
    # Also where the caller has switched gradients off.
    with torch.inference_mode(False), torch.enable_grad(), mounted(host, sites, given) as here, exact:
        run = Run(here, spec, text, held, processes, steps, eval_every, checkpoint_every, folder, progress)
        run.train(last)
        result = _result(run, getattr(factors, "provenance", {}) if isinstance(factors, FactorSet) else {}, preset)
    if folder is not None:
        if processes.main:
            folder.finish(result, {"before": _shown(run.before), "after": _shown(run.after)})
        processes.wait()
    return result


def _hashes(host: Host, given: Mapping[str, Factors], text: Rows, held: Rows | None) -> dict[str, Any]:
    upstream = None
    for name, f in given.items():
        upstream = chain(upstream, name, f)
    return {
        "host_sha256": host_fingerprint(host.model, host.model.cfg),
        "factors_sha256": upstream,
        "tokens_sha256": text.fingerprint(),
        "heldout_sha256": None if held is None else held.fingerprint(),
    }


# ---------------------------------------------------------------------------------------------- the result


def _remembering(made: FactorSet, given: Mapping[str, Factors]) -> FactorSet:
    """A finished run's factors with the dense weights that the given ones remember; files never hold them."""
    return FactorSet({name: replace(made[name], weight=f.weight) for name, f in given.items()}, made.provenance)


def _result(run: Run, provenance: Mapping[str, Any], preset: str) -> FactorSet:
    """The factors as they are now. The probe's inputs are seen in the host while all of them are still mounted: what enters a
    site depends on the sites before it only."""
    here, made = run.here, {}
    entry = {
        "preset": preset,
        **run.spec.as_dict(),
        "steps": run.steps,
        "tokens": run.steps * run.tokens_per_step,
        "unique_tokens": min(run.steps * run.tokens_per_step, run.rows.n_rows * run.rows.row_length),
        "before": _shown(run.before),
        "after": _shown(run.after),
        "swd_lens": __version__,
    }
    cfg = here.host.model.cfg
    tokens = provenance.get("probe_tokens") or probe_tokens(run.rows.first(), int(cfg.d_vocab), int(cfg.n_ctx))
    inputs = _inputs(here, list(tokens))
    for site in here.sites:
        f = here.factors[site.name]
        read, write = here.projections[site.name].factors(f)
        new = replace(f, read=read, write=write, probe=Probe.of(inputs[site.name], read.cpu(), f.offsets))
        weight = here.host.weight(site).to(read.device)
        about = {**_renamed(f.provenance), "relative_frobenius": new.relative_frobenius(weight), "finetune": entry}
        made[site.name] = replace(new, provenance=about)
    probed = {"probe_tokens": list(tokens), "probe_sites": [site.name for site in here.sites]}
    return FactorSet(
        made, {"swd_lens": __version__, "model": str(cfg.model_name), **provenance, **probed, "finetune": entry}
    )


def _inputs(here: Mounted, tokens: list[int]) -> dict[str, Tensor]:
    """What enters each site at the last of these tokens."""
    found: dict[str, Tensor] = {}
    watching = here.host.inputs(here.sites, lambda site, h: found.update({site.name: h[0, -1].float().cpu()}))
    with torch.no_grad(), watching:
        here.host.run_blocks(torch.tensor([tokens]), max(site.layer for site in here.sites) + 1)
    return found


def _renamed(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured on the factors before, under a name that says so; also a recipe, which no longer makes these factors."""
    stale = ("relmse", "relative_frobenius", "recipe")
    return {f"{key}_before_finetune" if key in stale else key: value for key, value in provenance.items()}


def _shown(found: Heldout | None) -> dict[str, float] | None:
    return None if found is None else {**found._asdict(), "ce_delta": found.ce_delta}
