"""run_study: the main road in one call. Factorize surfaces at several sparsities, measure, find circuits, look at units.

1. For each surface (a named pattern of sites): SWD factors per sparsity, and exact factors (SVD, Random-B) as controls.
2. Fidelity of every replacement on held-out text.
3. For each surface: `compare` all replacements on all tasks (attribution on train prompts, nested prefixes on test prompts).
4. Cards for the best units of each task: contexts on held-out text, direct logit effect, edges, score.
5. Attention patterns of one prompt per task, and what the replacements do to them (attention.py).
The result is a `Run`: plain data that the CLI prints, `report` draws, `save` writes and `Run.load` reads (run_file.py).
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch

from swd_lens.base._version import __version__
from swd_lens.base.files import plain
from swd_lens.circuits import Comparison, compare
from swd_lens.circuits.fidelity import fidelity
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import Site
from swd_lens.solver import PRESETS, resolve
from swd_lens.study.attention import attention_views
from swd_lens.study.cards import unit_cards
from swd_lens.study.result import CONTROL, Replacement, Run
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.task import Task
from swd_lens.train import baselines
from swd_lens.units import by_site, matrices_of
from swd_lens.units.factors import FactorSet, fingerprint

__all__ = ["CONTROL", "CONTROLS", "Replacement", "Run", "run_study"]

CONTROLS = ("svd", "random_b")
RANDOM_B_SEEDS = 3


def run_study(
    model: Any,
    surfaces: Mapping[str, str | Sequence[str]],
    tasks: Sequence[Task],
    *,
    sparsities: Sequence[float | int],
    calibration_tokens: Any,
    heldout_tokens: Any,
    calibration_model: Any = None,
    positions: str = "scoring",
    ablation: str = "mean",
    controls: Sequence[str] = ("svd",),
    beside: Mapping[str, Any] = MappingProxyType({}),
    cards_per_task: int = 3,
    contexts_per_card: int = 6,
    on_step: Callable[[str], None] = lambda text: None,
    progress: bool = False,
    **solver: Any,
) -> Run:
    """Walk the main road on a host.

    Args:
        surfaces: label -> pattern of sites, replaced together.
        tasks: tokenized for this host.
        sparsities: one SWD replacement each, per surface.
        calibration_tokens: (rows, pos), or None for zero-data.
        heldout_tokens: (rows, pos) text that calibration did not see, for fidelity and contexts.
        calibration_model: what to factorize, where it is not `model` itself: the same weights in float64, so that the factors
            do not depend on the rounding of a float32 forward (see `swd_lens.factorization.grams`).
        positions: see `swd_lens.attribute`; ablation: see `swd_lens.evaluate`.
        controls: exact factorizations beside SWD: "svd", "random_b" (three seeds, in the circuits only), both or none.
        beside: label -> other units, such as `baselines.LearnedUnits`, compared on every surface: in the circuits only, with
            their CE beside them.
        cards_per_task, contexts_per_card: how much to show of each task's best units, see `unit_cards`.
        on_step: called with a line of text before each step; progress: bars within the steps.
        solver: options for `factorize` (preset=, calibration=, ...).

    Raises:
        ValueError: nothing to do (no surface, task or sparsity), `beside` of another surface, and whatever the steps raise.
    """
    if not surfaces or not tasks or not sparsities:
        raise ValueError("a study needs at least one surface, one task and one sparsity")
    if unknown := sorted(set(controls) - set(CONTROLS)):
        raise ValueError(f"no control {', '.join(map(repr, unknown))}; there are {', '.join(CONTROLS)}")
    began = time.perf_counter()
    for pattern in surfaces.values():
        found = find_sites(model, pattern)  # an unknown site should fail before minutes of work
        for label, units in beside.items():
            _require_there(model, label, units, found)
    replacements: list[Replacement] = []
    comparisons: dict[str, Comparison] = {}
    for surface, pattern in surfaces.items():
        for sparsity in sparsities:
            on_step(f"factorize {surface} at s={sparsity:g}")
            factors, seconds = _swd(
                model if calibration_model is None else calibration_model,
                pattern,
                sparsity,
                calibration_tokens,
                progress,
                solver,
            )
            measured = fidelity(model, factors, heldout_tokens)
            replacements.append(Replacement(surface, f"SWD s={sparsity:g}", factors, measured, seconds))
        if "svd" in controls:
            on_step(f"exact SVD of {surface}")
            replacements.append(_svd(model, surface, pattern, heldout_tokens))
        here = [r for r in replacements if r.surface == surface]
        methods: dict[str, Any] = {r.method: r.factors for r in here}
        if "random_b" in controls:
            methods["Random-B"] = baselines.random_b_seeds(model, pattern, range(RANDOM_B_SEEDS))
        fidelities = {r.method: r.fidelity for r in here}
        for label, units in beside.items():
            on_step(f"fidelity of {label}")
            methods[label], fidelities[label] = units, fidelity(model, units, heldout_tokens)
        on_step(f"circuits of {', '.join(task.name for task in tasks)} on {surface}")
        comparisons[surface] = compare(
            methods,
            model,
            tasks,
            tokens=heldout_tokens,
            fidelities=fidelities,
            positions=positions,
            ablation=ablation,
            progress=progress,
        )
    on_step("top units and their contexts")
    shown = {surface: _sparsest(replacements, surface) for surface in surfaces}
    cards = unit_cards(model, shown, comparisons, heldout_tokens, per_task=cards_per_task, n_contexts=contexts_per_card)
    on_step("attention patterns of one prompt per task")
    attention = attention_views(model, tasks, shown)
    settings = _settings(model, surfaces, tasks, sparsities, calibration_tokens, heldout_tokens)
    settings["calibration dtype"] = str(next((calibration_model or model).parameters()).dtype).removeprefix("torch.")
    settings |= _settings_used(replacements, comparisons, solver) | {"controls": list(controls), "beside": list(beside)}
    # As run.json gives it back: lists for tuples, text for names.
    settings = json.loads(json.dumps(plain(settings), default=str))
    return Run(settings, replacements, comparisons, cards, time.perf_counter() - began, attention)


def _require_there(model: Any, label: str, units: Any, surface: Sequence[Site]) -> None:
    """Raises ValueError unless these units replace the matrices of this surface."""
    host = host_of(model)
    theirs = {one.name for site in find_sites(model, list(by_site(units))) for one in matrices_of(host, site)}
    if theirs != {site.name for site in surface}:
        raise ValueError(
            f"{label} replaces {', '.join(sorted(theirs))}, this surface is {', '.join(site.name for site in surface)}; "
            "circuits of different surfaces do not compare"
        )


def _sparsest(replacements: Sequence[Replacement], surface: str) -> tuple[str, FactorSet]:
    sparse = [
        (r.method, r.factors)
        for r in replacements
        if r.surface == surface and r.is_saved and isinstance(r.factors, FactorSet)
    ]
    return max(sparse, key=lambda pair: pair[1].sparsity)


def _swd(
    model: Any, pattern: Any, sparsity: float | int, tokens: Any, progress: bool, solver: Any
) -> tuple[FactorSet, float]:
    """The factors, and the seconds that they took."""
    began = time.perf_counter()
    factors = factorize(model, pattern, sparsity=float(sparsity), tokens=tokens, progress=progress, **solver)
    return factors, time.perf_counter() - began


def _svd(model: Any, surface: str, pattern: Any, heldout: Any) -> Replacement:
    began = time.perf_counter()
    factors = baselines.svd(model, pattern)
    seconds = time.perf_counter() - began
    return Replacement(surface, CONTROL, factors, fidelity(model, factors, heldout), seconds)


def _settings(
    model: Any,
    surfaces: Any,
    tasks: Sequence[Task],
    sparsities: Any,
    calibration: Any,
    heldout: Any,
) -> dict[str, Any]:
    cfg = model.cfg
    return {
        "swd_lens": __version__,
        "torch": str(torch.__version__),
        "transformer_lens": version("transformer_lens"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "model": str(cfg.model_name),
        "host": type(model).__name__,
        "weights": _host_fingerprint(model),
        "shape": f"{cfg.n_layers} layers, d_model {cfg.d_model}, {cfg.n_heads} heads, d_mlp {cfg.d_mlp}",
        "surfaces": {label: [site.name for site in find_sites(model, pattern)] for label, pattern in surfaces.items()},
        "sparsities": [float(s) for s in sparsities],
        "calibration tokens": 0 if calibration is None else as_stream(calibration, model).n_tokens,
        "held-out tokens": as_stream(heldout, model).n_tokens,
        "tasks": {task.name: _describe(task) for task in tasks},
    }


def _settings_used(
    replacements: Sequence[Replacement], comparisons: Mapping[str, Comparison], solver: Mapping[str, Any]
) -> dict[str, Any]:
    """What solver, attribution and interventions say they used: read off their results, not repeated here."""
    factors = replacements[0].factors
    solved = next(iter(factors.summary().values()))["settings"]
    curve = next(iter(next(iter(comparisons.values())).values())).curves[replacements[0].method]
    shown = ("positions", "mean_over", "ablation", "score", "sign")
    used: dict[str, Any] = {key: curve.settings[key] for key in shown if key in curve.settings}
    used["calibration"] = factors.provenance["calibration"]
    used["solver"] = {"preset": solved["preset"], **solver}
    # Every setting by its value: what is not said would change its meaning when a default does.
    own = {name: solver[name] for name in solver if name in {field.name for field in fields(PRESETS[solved["preset"]])}}
    used["solver spec"] = resolve(solved["preset"], own).as_dict()
    used["solver settings"] = {field.name: solved[field.name] for field in fields(PRESETS[solved["preset"]])}
    return used


def _host_fingerprint(model: Any) -> str:
    """One SHA-256 over the fingerprints of every factorizable matrix."""
    host = host_of(model)
    return hashlib.sha256("".join(fingerprint(host.weight(site)) for site in host.sites()).encode()).hexdigest()


def _describe(task: Task) -> dict[str, Any]:
    dropped = sum(task.train.dropped.values()) + sum(task.test.dropped.values())
    counts = {"train": len(task.train), "test": len(task.test), "dropped": dropped}
    return {**counts, "source": task.source, "prepend_bos": task.prepend_bos, "example": task.test.examples[0].prompt}
