"""transcoder, vpd_recon, vpd_kl: train a baseline on one site of a host.

1. Check settings, site and text before anything is trained; hash what decides the bits of the run.
2. With out=: take over a finished run, or go on from the checkpoint of an interrupted one (finetune/folder.py).
3. Train (train.py) what fits.py says: beside the host on the site's inputs and outputs, or inside it.
4. The result is a `LearnedUnits`, which everything that takes factors takes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from swd_lens.base._version import __version__
from swd_lens.base.machine import plain_float32
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts import Host, find_sites, host_of, require_no_dropout
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.train.baselines.fits import Fit, HostFit, LocalFit, bias_of
from swd_lens.train.baselines.presets import DEFAULT, TRANSCODERS, VPD_KLS, VPD_RECONS, named
from swd_lens.train.baselines.spec import TrainError, TrainSpec, VpdSpec, resolve, whole
from swd_lens.train.baselines.train import Training, kept_steps, require_enough, rows_per_step, text_of
from swd_lens.train.baselines.trajectory import Trajectory
from swd_lens.train.baselines.units import INDEX, LearnedUnits, coders_of, forget, write_index
from swd_lens.train.finetune.folder import TrainingFolder
from swd_lens.train.finetune.rows import Rows
from swd_lens.units import described, matrices_of, require_free


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
    **settings: Any,
) -> LearnedUnits:
    """Train a ReLU transcoder with an L1 penalty in place of one projection, or of a whole MLP (paper app. transcoder-settings).

    Of a projection it maps input to output, bias included; of a whole MLP what the MLP reads to what it writes. Its features
    after the ReLU are the units; an edge is a weight of encoder or decoder.

    Memory: weights, gradients and two moments, 16 bytes a weight; activations of one step. It does not grow with the text.

    Args:
        model: a HookedTransformer or TransformerBridge, with this site not attached. It is not changed.
        site: one matrix ("blocks.8.mlp_out"), or a whole MLP ("blocks.8.mlp").
        tokens: (rows, pos) ids of training text, shuffled by the seed and gone through again where n_tokens asks for more; or a
            `TokenStream`, in its own order.
        preset: "small" (ours, the default), "paper" (TC3k of GPT-2's c_proj; TC24k at a whole MLP), "paper_tc12k".
        keep: token counts, or one, after which to keep weights; None = after 1, 2, 4, ... steps. The last are always kept. Runs
            that differ in it differ in a transcoder's last bits: rows are normalized once more where weights are kept.
        out: a folder (see units.py and finetune/folder.py). The same call again after an interruption goes on from the last
            checkpoint and ends with the same bits; after the end it reads the result. Without it all kept weights stay in memory.
        overwrite: start again, in place of the run that `out` holds.
        checkpoint_every: steps between checkpoints; the last step has one, too.
        progress: show a bar.
        settings: what differs from the preset: n_tokens=, width=, l1=, ghost=, start=, learning_rate=, ... (see TranscoderSpec).

    Raises:
        TrainError: bad settings, not one site, too little text, or a loss that is not finite.
        TokenError, UnknownSiteError, UnsupportedHostError, AttachError: bad text, site or host.
        ResumeError: `out` holds another run; every difference is named.
        ValueError: the host is in training mode and has dropout.
    """
    where = _one(model, site)
    spec = resolve(named(TRANSCODERS, preset, where.kind), settings)
    return _trained("transcoder", model, where, [where], tokens, spec, keep, out, overwrite, checkpoint_every, progress)


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
    **settings: Any,
) -> LearnedUnits:
    """Train VPD-Recon-CI: rank-one parameter components under learned causal importance, by local reconstruction.

    Of a single matrix the squared error of its output is minimised; of a whole MLP ("blocks.8.mlp") every matrix gets `width`
    components and the error is that of the MLP's output. Units are components, z_c = g_c(x) (x V)_c; an edge is an entry of
    V or U. The importance network is no part of the count (paper app. vpd-recon-ci-setting; method.md §1).

    Args:
        preset: "small" (ours, the default), "paper" (C = 3,072, hidden width 128, 4.19M tokens).
        settings: n_tokens=, width=, minimality=, importance=, hidden=, learning_rate=, ... (see VpdSpec).
        model, site, tokens, keep, out, overwrite, checkpoint_every, progress: see `transcoder`.

    Raises:
        As `transcoder`.
    """
    where = _one(model, site)
    spec = resolve(named(VPD_RECONS, preset, where.kind), settings)
    _require_fidelity(spec, "recon", "vpd_recon")
    return _vpd("vpd_recon_ci", model, where, tokens, spec, keep, out, overwrite, checkpoint_every, progress)


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
    where = _one(model, site)
    spec = resolve(named(VPD_KLS, preset, where.kind), settings)
    _require_fidelity(spec, "kl", "vpd_kl")
    return _vpd("vpd_kl", model, where, tokens, spec, keep, out, overwrite, checkpoint_every, progress)


# ---------------------------------------------------------------------------------------------- the way of all three


def _vpd(method: str, model: Any, site: Site, tokens: Any, spec: VpdSpec, *how: Any) -> LearnedUnits:
    return _trained(method, model, site, matrices_of(host_of(model), site), tokens, spec, *how)


def _trained(
    method: str,
    model: Any,
    site: Site,
    parts: list[Site],
    tokens: Any,
    spec: TrainSpec,
    keep: Iterable[int] | int | None,
    out: str | Path | None,
    overwrite: bool,
    checkpoint_every: int,
    progress: bool,
) -> LearnedUnits:
    whole("checkpoint_every", checkpoint_every, 1)
    steps = kept_steps(spec, keep)
    rows = text_of(tokens, model)
    require_enough(spec, rows)
    require_no_dropout(model)
    host = host_of(model)
    require_free(host, parts)
    if _inside(site, spec) and any(p.is_inference() for p in model.parameters()):
        raise TrainError(
            "this host was made under torch.inference_mode(), and no gradient passes its weights; load it outside of it"
        )
    device = next(model.parameters()).device
    provenance = _provenance(method, host, site, parts, spec, rows)
    folder = None if out is None else _folder(Path(out), method, provenance, model, steps)
    if folder is not None and not overwrite and folder.check():
        return LearnedUnits.load(folder.path, device=device)
    if folder is not None and overwrite:
        forget(folder.path)
        folder.start(0)  # a checkpoint of the run before must not be taken for one of this
    trajectory = Trajectory(None if folder is None else folder.path, provenance)
    # Also where the caller has switched gradients off.
    with torch.inference_mode(False), torch.enable_grad(), plain_float32(device):
        first = next(rows.batches(rows_per_step(spec, rows.row_length), spec.seed, 0))
        fit = _fit(host, site, parts, provenance, spec, first)
        training = Training(fit, spec, rows, steps, trajectory, folder, checkpoint_every, method)
        training.run(progress=progress)
    if folder is not None:
        write_index(folder.path, provenance, trajectory)
        folder.end({"tokens": training.tokens, **training.lines[-1]})
    return LearnedUnits(trajectory, provenance, pd.DataFrame(training.lines), device=device)


def _fit(host: Host, site: Site, parts: list[Site], provenance: Mapping[str, Any], spec: TrainSpec, first: Any) -> Fit:
    """Coders drawn from the seed, on the host's device, and what they are fitted to."""
    coders = coders_of(provenance)
    generator = torch.Generator().manual_seed(spec.seed)
    made: dict[Site, Any] = {part: coders[part.kind] for part in parts}
    for part, coder in made.items():
        coder.draw(generator)
        coder.to(next(host.model.parameters()).device)
        if isinstance(spec, VpdSpec):
            coder.stand_for(host.weight(part), bias_of(host, part, first))
    if _inside(site, spec):
        return HostFit(host, site, made)
    return LocalFit(host, site, made[site])


def _inside(site: Site, spec: TrainSpec) -> bool:
    """Whether training goes through the host (HostFit), not beside it."""
    return isinstance(spec, VpdSpec) and (spec.fidelity == "kl" or site.kind == "mlp")


def _provenance(method: str, host: Host, site: Site, parts: list[Site], spec: TrainSpec, rows: Rows) -> dict[str, Any]:
    sites = {
        part.name: {"kind": part.kind, "d_in": part.d_in, "d_out": part.d_out, "host": described(host, part)}
        for part in parts
    }
    return {
        "method": method,
        "replaces": site.name,
        "model": str(host.model.cfg.model_name),
        "swd_lens": __version__,
        "settings": spec.as_dict(),
        "tokens_sha256": rows.fingerprint(),
        "unique_tokens": min(rows.n_rows * rows.row_length, spec.steps * spec.tokens_per_step),
        "sites": sites,
    }


def _folder(
    path: Path, method: str, provenance: Mapping[str, Any], model: nn.Module, steps: frozenset[int]
) -> TrainingFolder:
    decides = {key: provenance[key] for key in ("method", "replaces", "tokens_sha256", "swd_lens")}
    decides |= {"host_sha256": host_fingerprint(model, model.cfg), "kept_after_steps": sorted(steps)}
    return TrainingFolder(path, {**decides, **provenance["settings"]}, method, (INDEX,))


def _one(model: Any, pattern: Pattern) -> Site:
    """The one site of a pattern."""
    found = find_sites(model, pattern)
    if len(found) != 1:
        some = ", ".join(site.name for site in found[:4]) + (", ..." if len(found) > 4 else "")
        raise TrainError(
            f"{pattern!r} names {len(found)} sites ({some}); a baseline is trained on one: a matrix, or a whole MLP such as "
            "'blocks.0.mlp'"
        )
    return found[0]


def _require_fidelity(spec: VpdSpec, wanted: str, function: str) -> None:
    if spec.fidelity != wanted:
        other = {"kl": "vpd_kl", "recon": "vpd_recon"}[spec.fidelity]
        raise TrainError(f"{function} trains fidelity={wanted!r}; for fidelity={spec.fidelity!r} call {other}")
