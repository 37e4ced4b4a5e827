"""The item about a model whose every matrix is replaced and tuned, beside a host that was trained sparse.

1. Factors of every matrix, fine-tuned on their supports; the second host, where the profile has one. Each goes on where it was
   stopped.
2. CE of all of them, what they write on, CE against tokens.
3. Circuits of some of the tuned matrices, in a host whose every other matrix is replaced, too; beside the dense model's channels.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.weights import stored_matrix
from swd_lens.study.paper.circuit_items import costs_table
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.result import ItemResult, result_of
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.replacement import FINETUNED, ModelReplacement, replace_model
from swd_lens.study.section import Picture, SectionTable
from swd_lens.train import baselines
from swd_lens.train.baselines import SparsePretrained
from swd_lens.train.folder import TrainingFolder
from swd_lens.units.attach import attach
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.match import described

SWD_FT = "SWD-FT"
_CHECKPOINT_EVERY = 100  # steps of the fine-tuning at most


def full_model(materials: Materials, settings: ItemSettings) -> ItemResult:
    """Every matrix replaced, tuned on its supports, beside a host trained sparse: CE, what is written on, circuits."""
    model, folder = materials.model, materials.folder / "full-model"
    replaced = _replaced(materials, settings, folder)
    second = _trained_sparse(materials, settings, folder)
    assert replaced.after is not None and replaced.finetuned is not None
    matrices = find_sites(model, settings["sites"])
    entries = sum(site.d_in * site.d_out for site in matrices)
    rows = [
        {"model": "dense", "tokens": None, "nonzeros": entries, "CE": replaced.before.ce_dense},
        _row("SWD", settings["factorization_tokens"], replaced.factors.edges, replaced.before),
        _row(SWD_FT, settings["factorization_tokens"] + _tuned_tokens(replaced), replaced.factors.edges, replaced.after),
    ]
    hosts: dict[str, Any] = {SWD_FT: tuned_host(model, replaced.finetuned, settings["circuit_sites"])}
    methods: dict[str, Any] = {SWD_FT: partial(units_of, hosts[SWD_FT], replaced.finetuned, settings["circuit_sites"])}
    if second is not None:
        ce = second.log["heldout_ce"].dropna().iloc[-1]
        rows.append(
            {"model": "trained sparse", "tokens": second.provenance["tokens"], "nonzeros": second.provenance["blocks"], "CE": ce}
        )
        hosts["trained sparse"] = second.load()
        methods["trained sparse"] = partial(baselines.channels_of, hosts["trained sparse"], settings["circuit_sites"])
    methods["the dense model's channels"] = partial(baselines.neurons, model, settings["circuit_sites"])
    roles = {SWD_FT: "swd", "trained sparse": "trained", "the dense model's channels": "control"}
    for method in methods:
        materials.as_role(roles[method], {method: methods[method]})
    compared = materials.compare("full model", methods, hosts=hosts)
    table = pd.DataFrame(rows)
    how = {"recovered": settings["recovered"], "share_of_drop": settings["share_of_drop"]}
    tables = [SectionTable.of("Cross-entropy on held-out text", table), costs_table(compared, "mean", **how)]
    if replaced.samples is not None:
        tables.append(SectionTable.of("What the models write on", replaced.samples.table()))
    curve = _ce_curve(folder, settings, replaced, second)
    pictures = [Picture.of(curve, "Held-out CE against tokens used", "Dotted: the dense model.")]
    pictures += [
        Picture.of(compared.plot(cost), f"Least {cost}, whole model", compared.matching()) for cost in ("edges", "units")
    ]
    findings = [_ce_sentence(replaced, len(matrices), second), compared.matching()]
    numbers = {"replacement": replaced.as_dict(), "table": table.to_dict("records")}
    return result_of(settings, materials, findings, tables, pictures, numbers)


def _replaced(materials: Materials, settings: ItemSettings, folder: Path) -> ModelReplacement:
    heldout = materials.heldout
    return replace_model(
        materials.model,
        settings["sites"],
        heldout=heldout,
        sparsity=settings["sparsity"],
        tokens=materials.fitted_on(settings["factorization_tokens"]),
        budgets="uniform",
        calibration="sequential",
        **materials.solver(settings["solver"]),
        workers=materials.workers,
        finetune=settings["finetune"],
        finetune_tokens=materials.fitted_on(settings["finetune_tokens"]),
        finetune_options={"heldout": heldout[: max(2, len(heldout) // 4)], **tuning_steps(settings)},
        prompts=settings["prompts"],
        out=folder,
        on_step=materials.on_step,
        progress=materials.progress,
    )


def tuning_steps(settings: ItemSettings) -> dict[str, int]:
    """Set the rows in a step of fine-tuning, its steps where given, and how many lie between evaluations and checkpoints."""
    rows, steps = settings["finetune_batch"], settings["finetune_steps"]
    n_steps = steps or settings["finetune_tokens"] // (rows * settings["context"])
    between = max(1, n_steps // settings["finetune_evaluations"])
    # A step of a whole model takes a quarter of a minute on two cores: a short run that is killed must not begin anew.
    often = {"eval_every": between, "checkpoint_every": min(_CHECKPOINT_EVERY, between)}
    return {"batch_size": rows, **({"steps": steps} if steps else {}), **often}


def _trained_sparse(materials: Materials, settings: ItemSettings, folder: Path) -> SparsePretrained | None:
    """The second host; None where the profile leaves it out."""
    schedule = settings["sparse_pretraining"]
    if not schedule:
        return None
    materials.on_step("train a second host sparse")
    return baselines.sparse_pretrain(
        materials.model,
        materials.fitted_on(schedule["stop_after"] * schedule["tokens_per_update"]),
        out=folder / "sparse",
        preset="paper",
        heldout=materials.heldout,
        progress=materials.progress,
        **schedule,
    )


def tuned_host(model: Any, tuned: FactorSet, circuit_sites: str) -> Any:
    """Copy the host with every matrix replaced: the candidates' by the product of their factors, the others' attached. Raises
    UnsupportedHostError: candidates that are neither mlp_out nor attn_o."""
    host = copy.deepcopy(model)
    candidates = [site.name for site in find_sites(host, circuit_sites)]
    for site in find_sites(host, circuit_sites):
        stored_matrix(host_of(host), site).write(tuned[site.name].product())
    attach(host, {name: tuned[name] for name in tuned if name not in candidates})
    return host


def units_of(host: Any, tuned: FactorSet, circuit_sites: str) -> dict[str, Factors]:
    """The candidates' factors, as those of the matrices that `tuned_host` has written."""
    units = {}
    for site in find_sites(host, circuit_sites):
        own = tuned[site.name]
        provenance = {**own.provenance, **described(host_of(host), site)}
        units[site.name] = Factors(own.read, own.write, own.settings, provenance, origin=own.origin)
    return units


def _row(name: str, tokens: int, edges: int, measured: Fidelity) -> dict[str, Any]:
    row = {"model": name, "tokens": tokens, "nonzeros": edges, "CE": measured.ce, "CE delta": measured.ce_delta}
    return {**row, "CE delta se": measured.ce_delta_se, "KL": measured.kl}


def _tuned_tokens(replaced: ModelReplacement) -> int:
    """Unique tokens of the fine-tuning."""
    assert replaced.finetuned is not None
    return int(replaced.finetuned.provenance["finetune"]["tokens"])


def _ce_curve(folder: Path, settings: ItemSettings, replaced: ModelReplacement, second: SparsePretrained | None) -> Any:
    """Held-out CE against tokens used: the factors, their tuning, the sparse training; a matplotlib Figure."""
    figure, axes = new_figure(1, 1, width=5.6, height=3.4)
    ax, start = axes[0, 0], settings["factorization_tokens"]
    lines = TrainingFolder(folder / FINETUNED, {}, "finetune", ()).lines()
    tuned = [(start + line["tokens"], line["heldout_ce"]) for line in lines if line.get("heldout_ce") is not None]
    assert replaced.after is not None
    ends = [(start, replaced.before.ce), (start + _tuned_tokens(replaced), replaced.after.ce)]
    ax.plot(*zip(*ends, strict=True), "o", label="SWD, SWD-FT (all held-out text)", color=style(0)["color"])
    if tuned:
        ax.plot(*zip(*tuned, strict=True), label="tuning (a quarter of it)", linewidth=1.4, **style(1))
    if second is not None:
        rows = second.log.dropna(subset=["heldout_ce"])
        ax.plot(rows["tokens"], rows["heldout_ce"], label="trained sparse", linewidth=1.4, **style(2))
    ax.axhline(replaced.before.ce_dense, color=INK, linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set(xlabel="tokens used", ylabel="cross-entropy (nats)")
    ax.set_title(literal(f"{settings['sites']} at s={settings['sparsity']:g}"), fontsize=9, color=INK)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _ce_sentence(replaced: ModelReplacement, n_matrices: int, second: SparsePretrained | None) -> str:
    before, after = replaced.before, replaced.after
    assert after is not None
    text = (
        f"All {n_matrices} matrices at s={replaced.factors.sparsity:.3g}: CE {before.ce:.4f} as factorized (delta "
        f"{before.ce_delta:+.4f} ± {before.ce_delta_se:.4f}), {after.ce:.4f} after fine-tuning ({after.ce_delta:+.4f} ± "
        f"{after.ce_delta_se:.4f}), {before.ce_dense:.4f} dense."
    )
    if second is None:
        return text
    ce = second.log["heldout_ce"].dropna().iloc[-1]
    return f"{text} Trained sparse from scratch, after {second.provenance['tokens']:,} tokens: {ce:.4f}."
