"""transcoder, vpd_recon, vpd_kl: train a baseline on one site of a host.

1. Check site, settings and text before anything is trained.
2. Train (train.py): on the site's inputs and outputs in the dense host, or inside the host (VPD-KL).
3. The result is a `LearnedUnits`, which everything that takes factors takes.
"""

from typing import Any

import torch
from torch import Tensor

from swd_lens._version import __version__
from swd_lens.baselines.learned.spec import TranscoderSpec, VpdSpec, resolve
from swd_lens.baselines.learned.steps import Activations, KlSteps
from swd_lens.baselines.learned.train import Training, rows_per_step
from swd_lens.baselines.learned.transcoder import Transcoder
from swd_lens.baselines.learned.units import LearnedUnits
from swd_lens.baselines.learned.vpd import Vpd
from swd_lens.finetune.rows import rows_of
from swd_lens.hosts import find_sites, host_of, require_no_dropout
from swd_lens.inject.match import described
from swd_lens.machine import plain_float32


def transcoder(
    model: Any, site: str, tokens: Any, *, keep: tuple[int, ...] | None = None, progress: bool = True, **settings: Any
) -> LearnedUnits:
    spec = resolve(TranscoderSpec(), settings)
    return _local(
        model, site, tokens, spec, "transcoder", lambda d_in, d_out, *_: Transcoder(d_in, d_out, spec), keep, progress
    )


def vpd_recon(
    model: Any, site: str, tokens: Any, *, keep: tuple[int, ...] | None = None, progress: bool = True, **settings: Any
) -> LearnedUnits:
    spec = resolve(VpdSpec(), settings)
    return _local(model, site, tokens, spec, "vpd_recon_ci", lambda d_in, d_out, w, b: Vpd(w, b, spec), keep, progress)


def vpd_kl(
    model: Any, site: str, tokens: Any, *, keep: tuple[int, ...] | None = None, progress: bool = True, **settings: Any
) -> LearnedUnits:
    spec = resolve(VpdSpec(fidelity="kl", fidelity_weight=2.0, minimality=3e-4), settings)
    return _local(model, site, tokens, spec, "vpd_kl", lambda d_in, d_out, w, b: Vpd(w, b, spec), keep, progress)


def _local(
    model: Any, site: str, tokens: Any, spec: Any, method: str, make: Any, keep: Any, progress: bool
) -> LearnedUnits:
    require_no_dropout(model)
    host = host_of(model)
    (where,) = find_sites(model, site)
    rows = rows_of(tokens, model, 1)
    rows = rows_of(tokens, model, rows_per_step(spec, rows.row_length))
    device = next(model.parameters()).device
    activations = Activations(host, where)
    weight = host.weight(where) if where.kind != "mlp" else torch.zeros(where.d_in, where.d_out)
    first = next(rows.batches(rows_per_step(spec, rows.row_length), spec.seed, 0))
    x, y = activations.at(first)
    with plain_float32(device):
        bias = (y[:1] - x[:1] @ weight.to(x.device))[0]
        fresh = lambda: make(where.d_in, where.d_out, weight.to(device), bias).to(device)  # noqa: E731
        coder = fresh()
        with torch.enable_grad():
            coder.begin(x, y)
        if method == "vpd_kl":
            steps = KlSteps(host, where, coder)
            training = Training(coder, spec, rows, steps.loss, keep)
            with steps.mounted():
                training.run(progress=progress)
        else:

            def loss(batch: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
                return coder.loss(*activations.at(batch), step)

            training = Training(coder, spec, rows, loss, keep)
            training.run(progress=progress)
    provenance = {
        "method": method,
        "site": where.name,
        "model": str(model.cfg.model_name),
        "swd_lens": __version__,
        "settings": spec.as_dict(),
        "tokens_sha256": rows.fingerprint(),
        **(described(host, weight) if where.kind != "mlp" else {}),
    }
    return LearnedUnits(fresh, training.checkpoints, provenance, training.log())
