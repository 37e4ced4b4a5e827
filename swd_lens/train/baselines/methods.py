"""transcoder, vpd_recon, vpd_kl: train a baseline on one site of a host.

1. Check settings, site and text before anything is trained; hash what decides the bits of the run.
2. With out=: return the result of a finished run, or resume from the checkpoint of an interrupted one (train/folder.py).
3. Train (train/engine.py) what fits.py says: beside the host on the site's inputs and outputs, or inside it. Batches are whole
   rows, `tokens_per_step` tokens each; weights are kept at token counts that double, and at the end.
4. The result is a `LearnedUnits`, which everything that takes factors takes.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import TrainError, quoted
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts import Host, find_sites, host_of, require_gradients, require_no_dropout
from swd_lens.hosts.beginnings import warn_without_bos
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.train.activations import kept_activations
from swd_lens.train.baselines.fits import CoderFit, HostFit, LocalFit, bias_of
from swd_lens.train.baselines.spec import DEFAULT, TRANSCODERS, VPD_KLS, VPD_RECONS, TrainSpec, recipe
from swd_lens.train.baselines.units import INDEX, LearnedUnits, Trajectory, coders_of, forget, write_index
from swd_lens.train.engine import Engine
from swd_lens.train.folder import TrainingFolder, require_possible
from swd_lens.train.rows import Rows, rows_for, rows_of
from swd_lens.units import described, matrices_of, require_detached, require_free

# Lines of log that a run has at least, where it has so many steps; at most twice as many.
_LOG_LINES = 1000


@dataclass(frozen=True)
class Options:
    """How a training goes about its work, whatever is trained; see `transcoder`."""

    keep: Iterable[int] | int | None
    out: str | Path | None
    overwrite: bool
    checkpoint_every: int
    progress: bool
    activations: str | Path | None = None


@says_when_interrupted
@with_torch_defaults
def transcoder(
    model: Any,
    site: Pattern,
    tokens: Any,
    *,
    preset: str = DEFAULT,
    keep: Iterable[int] | int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 100,
    progress: bool = True,
    activations: str | Path | None = None,
    **settings: Any,
) -> LearnedUnits:
    """Train a ReLU transcoder with an L1 penalty in place of one projection, or of a whole MLP (paper app. transcoder-settings).

    Of a projection it maps input to output, bias included; of a whole MLP what the MLP reads to what it writes. Its features
    after the ReLU are the units; an edge is a weight of encoder or decoder.

    Memory: weights, gradients and two moments, 16 bytes a weight; activations of one step. It does not grow with the text.
    Where the training goes through the text twice or more, the activations of the site are run once and kept in a file of at
    most 4 GiB (in `out`, or the temporary folder), which goes with the process; in `activations`, where it stays.

    Args:
        model: a HookedTransformer or TransformerBridge, with this site not attached. It is not changed.
        site: one matrix ("blocks.8.mlp_out"), or a whole MLP ("blocks.8.mlp").
        tokens: (rows, pos) ids of training text, shuffled by the seed and gone through again where n_tokens asks for more; or a
            `TokenStream`, in its own order.
        preset: "small" (ours, the default), "paper" (TC3k of GPT-2's c_proj; TC24k at a whole MLP), "paper_tc12k".
        keep: token counts, or one, after which to keep weights; None = after 1, 2, 4, ... steps. The last are always kept. Runs
            that differ in it differ in a transcoder's last bits: rows are normalized once more where weights are kept.
        out: a folder (see units.py and train/folder.py). The same call again after an interruption goes on from the last
            checkpoint and ends with the same bits; after the end it reads the result. Without it all kept weights stay in memory.
            Of several processes that a launcher starts with one folder, one trains and the others wait for its result.
        overwrite: start again, in place of the run that `out` holds.
        checkpoint_every: steps between checkpoints; the last step has one, too.
        progress: show a bar.
        activations: a folder in which trainings on one text find the site's activations, and leave them: a host is run once for
            all of them. None: they are kept for this training alone.
        settings: what differs from the preset: n_tokens=, width=, l1=, ghost=, start=, learning_rate=, ... (see TranscoderSpec).

    Raises:
        TrainError: bad settings, not one site, too little text, or a loss that is not finite.
        TokenError, UnknownSiteError, UnsupportedHostError, AttachError: bad text, site or host.
        ResumeError: `out` holds another run (every difference is named), or files that changed after they were written.
        FolderInUseError, OSError: another call writes `out`, or it cannot be written, or the disk is full.
        ValueError: the host is in training mode and has dropout.
    """
    how = Options(keep, out, overwrite, checkpoint_every, progress, activations)
    return train_units("transcoder", model, *_asked(model, site, TRANSCODERS, preset, settings), tokens, how)


@says_when_interrupted
@with_torch_defaults
def vpd_recon(
    model: Any,
    site: Pattern,
    tokens: Any,
    *,
    preset: str = DEFAULT,
    keep: Iterable[int] | int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 100,
    progress: bool = True,
    activations: str | Path | None = None,
    **settings: Any,
) -> LearnedUnits:
    """Train VPD-Recon-CI: rank-one parameter components under learned causal importance, by local reconstruction.

    Of a single matrix the squared error of its output is minimised; of a whole MLP ("blocks.8.mlp") every matrix gets `width`
    components and the error is that of the MLP's output. Units are components, z_c = g_c(x) (x V)_c; an edge is an entry of
    V or U. The importance network is no part of the count (paper app. vpd-recon-ci-setting; method.md §1).

    Args:
        preset: "small" (ours, the default), "paper" (C = 3,072, hidden width 128, 4.19M tokens).
        settings: n_tokens=, width=, minimality=, importance=, hidden=, learning_rate=, ... (see VpdSpec).
        model, site, tokens, keep, out, overwrite, checkpoint_every, progress, activations: see `transcoder`.

    Raises:
        As `transcoder`.
    """
    how = Options(keep, out, overwrite, checkpoint_every, progress, activations)
    return train_units("vpd_recon_ci", model, *_asked(model, site, VPD_RECONS, preset, settings, "recon"), tokens, how)


@says_when_interrupted
@with_torch_defaults
def vpd_kl(
    model: Any,
    site: Pattern,
    tokens: Any,
    *,
    preset: str = DEFAULT,
    keep: Iterable[int] | int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    checkpoint_every: int = 100,
    progress: bool = True,
    **settings: Any,
) -> LearnedUnits:
    """Train VPD-KL: the components of `vpd_recon` by the KL of the host's logits under stochastic masks.

    Stochastic masks of all matrices, of one at a time or of a random subset at each position (`routing=`), faithfulness, and
    adversarial masks (`adversarial=`), one-shot or persistent (`adversary=`), are here; the transformer that predicts importance
    for a whole model (the later VPD runs, method.md §1.1) is not. A persistent adversary keeps three float32 per row, position
    and component, on the device and in checkpoints.

    Args:
        preset: "small" (ours, the default), "spd_gpt2" (the public GPT-2 recipe, C = 768), "paper" (the same with C = 3,072 and
            the paper's token counts), "vpd_pile4l" (the later VPD's losses, for 13.1B tokens).
        settings: n_tokens=, width=, minimality=, routing=, masks=, adversarial=, adversary=, clip=, ... (see VpdSpec).
        model, site, tokens, keep, out, overwrite, checkpoint_every, progress: see `transcoder`.

    Raises:
        As `transcoder`.
    """
    how = Options(keep, out, overwrite, checkpoint_every, progress)
    return train_units("vpd_kl", model, *_asked(model, site, VPD_KLS, preset, settings, "kl"), tokens, how)


def _asked(
    model: Any,
    pattern: Pattern,
    presets: Mapping[str, Any],
    preset: str,
    settings: Mapping[str, Any],
    fidelity: str | None = None,
) -> tuple[Site, Any]:
    """The one site that is named, and the settings for it. fidelity: what the function that was called trains by."""
    sites = find_sites(model, pattern)
    if len(sites) != 1:
        some = ", ".join(site.name for site in sites[:4]) + (", ..." if len(sites) > 4 else "")
        raise TrainError(
            f"{quoted(pattern)} names {len(sites)} sites ({some}); a baseline is trained on one: a matrix, or a whole MLP "
            "such as 'blocks.0.mlp'"
        )
    spec = recipe(presets, preset, sites[0].kind).changed(settings)
    if fidelity is not None and spec.fidelity != fidelity:
        this, other = ({"kl": "vpd_kl", "recon": "vpd_recon"}[each] for each in (fidelity, spec.fidelity))
        raise TrainError(f"{this} trains fidelity={quoted(fidelity)}; for fidelity={quoted(spec.fidelity)} call {other}")
    return sites[0], spec


# ---------------------------------------------------------------------------------------------- the way of all three


def train_units(method: str, model: Any, site: Site, spec: TrainSpec, tokens: Any, how: Options) -> LearnedUnits:
    """Train units of a method (units.py, `METHODS`) for a site, or return those that the folder holds. how: see `transcoder`,
    which also says what is raised."""
    bounded("checkpoint_every", how.checkpoint_every, 1, error=TrainError)
    require_possible(how.out)
    # Weights are kept after steps that reach the token counts asked for, or 1, 2, 4, ...; and after the last.
    keep = frozenset({2**i for i in range(spec.steps.bit_length()) if 2**i <= spec.steps} | {spec.steps})
    if how.keep is not None:
        given = [how.keep] if isinstance(how.keep, int) else how.keep
        counts = [n.item() if isinstance(n, np.generic) else n for n in given]
        for count in counts:
            bounded("keep (token counts)", count, 1, spec.steps * spec.tokens_per_step, error=TrainError)
        keep = frozenset({-(-count // spec.tokens_per_step) for count in counts} | {spec.steps})
    rows = rows_of(tokens, model)
    warn_without_bos(model, rows.stream, "training tokens")
    n_rows = rows_for("tokens_per_step", spec.tokens_per_step, rows)
    require_no_dropout(model)
    host = host_of(model)
    parts = matrices_of(host, site) if spec.per_matrix else [site]
    require_free(host, parts)
    require_detached(model, f"training a {method}")
    if spec.inside(site.kind):
        require_gradients(model)
    device = next(model.parameters()).device
    provenance = {
        "method": method,
        "replaces": site.name,
        "model": str(model.cfg.model_name),
        "swd_lens": __version__,
        **standing_hooks(model),
        "settings": spec.as_dict(),
        "tokens_sha256": rows.stream.fingerprint(),
        "unique_tokens": min(rows.n_rows * rows.row_length, spec.steps * spec.tokens_per_step),
        "sites": {
            part.name: {"kind": part.kind, "d_in": part.d_in, "d_out": part.d_out, "host": described(host, part)}
            for part in parts
        },
    }
    folder = None
    if how.out is not None:
        decides = {key: provenance[key] for key in ("method", "replaces", "tokens_sha256", "swd_lens")}
        decides |= {"host_sha256": host_fingerprint(model), "kept_after_steps": sorted(keep)}
        decides |= standing_hooks(model)
        folder = TrainingFolder(Path(how.out), {**decides, **provenance["settings"]}, method, (INDEX,))
    n_weights = sum(p.numel() for p in coders_of(provenance, meta=True).parameters())
    n_bytes = 4 * n_weights * (6 + len(keep))
    with nullcontext(False) if folder is None else folder.opened(how.overwrite, n_bytes) as finished:
        if folder is not None and finished:
            return LearnedUnits.load(folder.path, device=device)
        if folder is not None and how.overwrite:
            forget(folder.path)
        trajectory = Trajectory(None if folder is None else folder.path, provenance)
        with torch.enable_grad():
            fit = _fit(host, site, parts, trajectory, spec, rows, n_rows, how.activations)
            log_every = max(1, spec.steps // _LOG_LINES)
            engine = Engine(fit, rows, n_rows, folder, how.checkpoint_every, log_every=log_every, keep=keep)
            engine.run(progress=how.progress)
        log = pd.DataFrame(engine.lines)
        if folder is not None:
            write_index(folder.path, provenance, trajectory, log)
            folder.end({"tokens": engine.tokens, **engine.lines[-1]}, folder.result)
        return LearnedUnits(trajectory, provenance, log, device=device)


def _fit(
    host: Host,
    site: Site,
    parts: list[Site],
    trajectory: Trajectory,
    spec: TrainSpec,
    rows: Rows,
    n_rows: int,
    activations: str | Path | None,
) -> CoderFit:
    """Coders drawn from the seed, on the host's device, and what they are fitted to. n_rows: of a step; activations: see
    `transcoder`."""
    first = next(rows.batches(n_rows, spec.seed, 0))
    of_kind = coders_of(trajectory.provenance)
    generator = torch.Generator().manual_seed(spec.seed)
    coders: dict[Site, Any] = {part: of_kind[part.kind] for part in parts}
    for part, coder in coders.items():
        coder.draw(generator)
        coder.to(next(host.model.parameters()).device)
        if spec.per_matrix:
            coder.stand_for(host.weight(part), bias_of(host, part, first))
    if spec.inside(site.kind):
        return HostFit(host, site, coders, trajectory)
    shared = None if activations is None else Path(activations)
    kept = kept_activations(host, site, rows, spec.steps * spec.tokens_per_step, trajectory.folder, shared)
    return LocalFit(host, site, coders[site], trajectory, first, kept)
