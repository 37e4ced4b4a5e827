"""run_study: the main road in one call. Factorize surfaces at several sparsities, measure, find circuits, look at units.

1. For each surface (a named pattern of sites): SWD factors per sparsity or for a goal, or factors that are finished, and as
   controls (controls.py) exact factors (neurons, SVD, Random-B), the paper's SWD, and pruned neurons or singular vectors.
2. Fidelity of every replacement on held-out text.
3. For each surface: `compare` all replacements on all tasks (attribution on train prompts, nested prefixes on test prompts).
4. Cards for the best units of each task: contexts on held-out text, direct logit effect, edges, score.
5. Attention patterns of one prompt per task, and what the replacements do to them (views.py).
The result is a `Run` (run.py).

Nothing is run twice: Grams that do not depend on factors are collected once for all surfaces and sparsities, the dense host
runs once over the held-out text for all replacements of a surface. With out= every finished part is kept in the folder
(resume.py says what decides them), and the same call goes on from there.
"""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.errors import BudgetError, GoalError, TokenError, encodable, legible
from swd_lens.base.files import plain
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.progress import Steps
from swd_lens.base.record import checked
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits import Comparison
from swd_lens.circuits.compare import comparison_of, several, sources_of
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.protocol import Protocol
from swd_lens.factorization.calibration_text import CalibrationText, shared_sites
from swd_lens.factorization.factorize import factorize
from swd_lens.factorization.goal import Goal, divided
from swd_lens.factorization.stages import stages_of
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site, split_name
from swd_lens.solver import resolve
from swd_lens.solver.budget import edges
from swd_lens.study.controls import (
    EXACT,
    OF_TEXT,
    PAPER,
    PRUNED,
    RANDOM_B,
    RANDOM_B_SEEDS,
    SOLVED,
    SolvedMethod,
    controls_of,
    edges_needed,
    sizes_of,
    solved_controls,
    swd_methods,
)
from swd_lens.study.resume import growing_parts, require_own, settings_of_parts, start_again
from swd_lens.study.run import Run
from swd_lens.study.run_file import Replacement, folders_named
from swd_lens.study.section import AttentionView
from swd_lens.study.views import TaskUnit, attention_views, unit_cards
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.task import Task
from swd_lens.train import baselines
from swd_lens.units import UnitSet, matrices_of, weight_fingerprint
from swd_lens.units.factors import FactorSet
from swd_lens.units.match import check_units


@says_when_interrupted
@with_torch_defaults
def run_study(
    model: Any,
    surfaces: Mapping[str, str | Sequence[str]],
    tasks: Sequence[Task],
    *,
    sparsities: Sequence[float | int] = (),
    kl: float | None = None,
    ce: float | None = None,
    factors: Mapping[str, FactorSet] = MappingProxyType({}),
    calibration_tokens: Any = None,
    heldout_tokens: Any,
    calibration_model: Any = None,
    positions: str | Sequence[str] = "scoring",
    ablation: str | Sequence[str] = "mean",
    controls: Sequence[str] | None = None,
    random_b_seeds: int = RANDOM_B_SEEDS,
    beside: Mapping[str, Any] = MappingProxyType({}),
    cards_per_task: int = 3,
    contexts_per_card: int = 6,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda text: None,
    progress: bool = False,
    **solver: Any,
) -> Run:
    """Walk the main road on a host.

    Args:
        surfaces: label -> pattern of sites, replaced together.
        tasks: tokenized for this host.
        sparsities: one SWD replacement each, per surface.
        kl, ce: a goal in place of a sparsity, or beside some: the sparsest SWD replacement that moves the model by at most so
            much on a quarter of the calibration rows, which it is not fitted on (see `swd_lens.factorize`). Controls that the
            solver makes keep the same goal, so that methods are compared at an equal distance from the model.
        factors: label -> factors that are finished (or tuned), as further methods on the surface whose matrices they replace;
            where there is none, that is a surface of its own.
        calibration_tokens: (rows, pos), or None for zero-data.
        heldout_tokens: (rows, pos) text that calibration did not see, for fidelity and contexts.
        calibration_model: what to factorize, where it is not `model` itself: the same weights in float64, so that the factors
            do not depend on the rounding of a float32 forward (see `swd_lens.factorization.grams`).
        positions: see `swd_lens.attribute`; ablation: see `swd_lens.evaluate`; one each or several, which are combined.
        controls: what stands beside SWD, any of "neurons" (the matrices' own inputs as units), "svd", "svd_whitened" and
            "svd_causal" (in the metric of the calibration tokens) and "random_b" (in the circuits only), which are exact; and,
            made at each of the sparsities and for the goal from the same calibration, "paper" (SWD by the paper's solver with
            the paper's settings), "pruned" and "svd_pruned" (see `baselines`). None: neurons, svd, pruned and paper, as far as
            they can be made: those of a sparsity or a goal where there is one, and the paper's where its solver can do with so
            few edges (`settings["controls left out"]` says where it cannot). With `preset="paper"` the study itself is of the
            paper's solver, and the control is left out.
        random_b_seeds: how many (the paper has ten).
        beside: label -> other units, such as `baselines.LearnedUnits`, compared on every surface: in the circuits only, with
            their CE beside them.
        cards_per_task, contexts_per_card: how much to show of each task's best units, see `unit_cards`.
        out: a folder that gets every finished part (the factors of each matrix, fidelities, each task's scores and curves), and
            the run in the end, as `Run.save` writes it. The same call again after an interruption goes on from there, and gives
            the same run; tasks, sparsities, surfaces, controls and further units may be added to it.
        overwrite: start again, in place of what `out` holds. Interrupted, the same call without it goes on.
        on_step: called with a line of text before each step, or `Steps` that expect `study_steps`; progress: bars within the
            steps.
        solver: options for `factorize` (preset=, calibration=, ...).

    Raises:
        ResumeError: `out` holds the parts of another study (every difference is named), or a run without its parts.
        OSError: (FolderInUseError) another call writes `out`; or it cannot be written.
        ValueError: nothing to do (no surface, task, sparsity, goal or factors), an unknown control, one of a sparsity where there
            is none, a goal that SWD or a control that was asked for cannot keep (GoalError), `beside` of another surface, and
            whatever the steps raise.
        TokenError: a goal without calibration tokens.
        BudgetError: "paper" was asked for, and its solver cannot do with so few edges.
        AttachError: `factors` of another model.
    """
    given_sites = {label: surface_of(model, given) for label, given in factors.items()}
    surfaces = {encodable(label): pattern for label, pattern in surfaces.items()}
    for names in given_sites.values():
        if all(names != [site.name for site in find_sites(model, pattern)] for pattern in surfaces.values()):
            surfaces[_label(model, names)] = names
    sizes = sizes_of(sparsities, kl, ce)
    if not surfaces or not tasks or not (sizes or factors):
        raise ValueError("a study needs at least one surface, one task and one sparsity (or finished factors)")
    ours = swd_methods(sizes, solver)
    own = [*ours, *solved_controls(tuple(SOLVED), sizes, solver), *EXACT.values(), RANDOM_B, *beside]
    if twice := [label for label in factors if label in own]:
        raise ValueError(
            f"factors= has the names of other methods of the study: {legible(', '.join(map(repr, twice)))}; give them others"
        )
    if random_b_seeds < 1:
        raise ValueError(f"random_b_seeds is {random_b_seeds}, but must be at least 1")
    usual, controls = controls is None, controls_of(controls, sizes, solver)
    if calibration_tokens is None and (kl is not None or ce is not None):
        raise TokenError(
            "a goal (kl= or ce=) needs tokens: factors are fitted on a part of the text and judged on another one"
        )
    if calibration_tokens is None and (of_text := [name for name in controls if name in OF_TEXT]):
        raise ValueError(
            f"controls {legible(', '.join(of_text))} go by what the matrices read on text, and this study has none: give "
            "calibration_tokens="
        )
    began = time.perf_counter()
    for pattern in surfaces.values():
        sites = find_sites(model, pattern)  # an unknown site should fail before minutes of work
        for label, units in beside.items():
            require_surface(model, label, units, sites)
        names = [site.name for site in sites]
        if not sizes and names not in given_sites.values():
            raise ValueError(f"no factors were given for {', '.join(names)}, and no sparsity at which to make some")

    sites_of = {surface: [site.name for site in find_sites(model, pattern)] for surface, pattern in surfaces.items()}
    solved_methods: dict[str, dict[str, SolvedMethod]] = {}
    left_out: list[str] = []
    for surface, names in sites_of.items():
        solved_methods[surface] = dict(ours)
        for method, how in solved_controls(controls, sizes, solver).items():
            small = how.without_edges(find_sites(model, names))
            if small is None:
                solved_methods[surface][method] = how
            elif usual:
                left_out.append(f"{method} of {surface}: {_shortage(small, how)}")
            else:
                shortage = _shortage(small, how)
                raise BudgetError(
                    f"{method} of {surface}: {shortage}; leave control 'paper' out, or give a smaller sparsity"
                )
    positions, ablation = several(positions, "positions"), several(ablation, "ablation")
    solved_on = model if calibration_model is None else calibration_model
    text, of_goal = None, {}
    if sizes and calibration_tokens is not None:
        text, kind = CalibrationText(calibration_tokens, solved_on), str(solver.get("calibration", "sequential"))
        if any(isinstance(size, Goal) for size in sizes):
            of_goal["tokens"], of_goal["heldout_tokens"] = divided(solved_on, text, None)
        for names in sites_of.values():
            for fitted in (text, *([of_goal["tokens"]] if of_goal else [])):
                fitted.expect(shared_sites(stages_of(find_sites(solved_on, names), kind), kind))
    labels = [(surface, method) for surface, methods in solved_methods.items() for method in methods]
    folders = dict(zip(labels, folders_named(labels), strict=True))

    folder = None if out is None else Path(out)
    if not isinstance(on_step, Steps):
        on_step = Steps(on_step, study_steps(len(sites_of), len(ours), controls, saved=folder is not None))
    with nullcontext() if folder is None else writing(folder, "run_study"):
        if folder is not None and overwrite:
            start_again(folder, folders.values())
        if folder is not None:
            require_own(folder)
            asked = settings_of_parts(model, calibration_model, text, heldout_tokens, solver)
            seeds = [f"random_b {seed}" for seed in range(random_b_seeds)] if "random_b" in controls else []
            named = {"sparsities": ours, "controls": [*(c for c in controls if c != "random_b"), *seeds]}
            named |= {"positions": positions, "ablation": ablation}
            units = {"factors": factors, "beside": beside}
            parts = StepCache(folder, asked, growing_parts(model, sites_of, tasks, units, named))
        else:
            parts = StepCache(None)
        replacements: list[Replacement] = []
        comparisons: dict[str, Comparison] = {}
        dense = DenseCache()
        for line in left_out:
            on_step(f"without {line}")
        for surface, names in sites_of.items():
            timed: dict[str, tuple[FactorSet, float]] = {}
            for method, how in solved_methods[surface].items():
                on_step(f"factorize {surface} as {method}")
                start = time.perf_counter()
                fitted_on = of_goal if isinstance(how.size, Goal) else {"tokens": text}
                without = {} if text is not None else {"calibration": "zero-data"}
                place = None if folder is None else folder / folders[surface, method]
                asked_of_method: dict[str, Any] = {**how.asked, **fitted_on, **without}
                try:
                    solved = factorize(solved_on, names, out=place, progress=progress, **asked_of_method)
                except (BudgetError, GoalError) as cause:
                    # A usual control that cannot keep the goal is no reason to have no study.
                    if not (usual and how.control and isinstance(how.size, Goal)):
                        raise
                    left_out.append(f"{method} of {surface}: {cause}")
                    on_step(f"without {left_out[-1]}")
                    continue
                timed[method] = (
                    solved,
                    parts.values(
                        (surface, "seconds", method),
                        lambda start=start: {"seconds": time.perf_counter() - start},
                        lambda values: checked("seconds", values, {"seconds": float})["seconds"],
                    ),
                )
            of_label = (label for label, of_factors in given_sites.items() if of_factors == names)
            timed |= {label: (factors[label], math.nan) for label in of_label}
            for control, method in EXACT.items():
                if control in controls:
                    on_step(f"exact factors of {surface}: {method}")
                    start = time.perf_counter()
                    of_text = {"tokens": calibration_tokens if text is None else text} if control in OF_TEXT else {}
                    timed[method] = baselines.exact.EXACT[control].make(model, names, **of_text), time.perf_counter() - start
            methods: dict[str, Any] = {method: solved for method, (solved, _) in timed.items()}
            if "random_b" in controls:
                methods[RANDOM_B] = baselines.random_b_seeds(model, names, range(random_b_seeds))
            sources, groups = sources_of({**methods, **beside})
            on_step(f"measure {surface}: fidelity, circuits of {', '.join(task.name for task in tasks)}")
            comparisons[surface] = comparison_of(
                Protocol(
                    model,
                    tasks,
                    heldout_tokens,
                    positions=positions,
                    ablations=ablation,
                    progress=progress,
                    parts=parts,
                    key=(surface,),
                    on_step=on_step,
                    dense=dense,
                ),
                sources,
                groups,
                reference=next(iter(methods)),
                roles=_roles(methods, solved_methods[surface], beside),
            )
            measured, solved_by = comparisons[surface].fidelities, solved_methods[surface]
            by_control = {method: solved_by[method].control if method in solved_by else None for method in timed}
            replacements += [
                Replacement(
                    surface,
                    method,
                    solved,
                    measured[method],
                    seconds,
                    exact=method in EXACT.values(),
                    pruned=by_control[method] in PRUNED,
                    paper=by_control[method] in PAPER,
                )
                for method, (solved, seconds) in timed.items()
            ]
        settings = _settings(model, surfaces, tasks, sparsities, text, heldout_tokens)
        settings |= {name: value for name, value in (("kl", kl), ("ce", ce)) if value is not None}
        settings["calibration dtype"] = str(next(solved_on.parameters()).dtype).removeprefix("torch.")
        settings |= _settings_used(replacements[0], comparisons, solver if sizes else None)
        settings |= {"controls": list(controls), "beside": list(beside)}
        settings |= {"controls left out": left_out} if left_out else {}
        settings |= {"factors": list(factors)} if factors else {}
        settings |= standing_hooks(model)
        # As run.json gives it back: lists for tuples, text for names.
        run = Run(json.loads(json.dumps(plain(settings), default=str)), replacements, comparisons, [], 0.0)
        sparsest = {surface: run.sparsest(surface) for surface in surfaces}
        shown: dict[str, Any] = {surface: (r.method, r.factors) for surface, r in sparsest.items()}
        about = [{surface: method for surface, (method, _) in shown.items()}, [task.name for task in tasks]]

        def look() -> dict[str, Any]:
            how = {"per_task": cards_per_task, "n_contexts": contexts_per_card, "progress": progress}
            on_step("top units and their contexts")
            cards = unit_cards(model, shown, comparisons, heldout_tokens, **how)
            on_step("attention patterns of one prompt per task")
            attention = attention_views(model, tasks, shown)
            return {"units": [c.as_dict() for c in cards], "attention": [view.as_dict() for view in attention]}

        def shown_again(values: Mapping[str, Any]) -> tuple[list[TaskUnit], list[AttentionView]]:
            return [*map(TaskUnit.from_dict, values["units"])], [*map(AttentionView.from_dict, values["attention"])]

        # Named by everything that it depends on: what is added to a study may change which units are shown.
        key = ("shown", json.dumps([about, cards_per_task, contexts_per_card]))
        cards, attention = parts.values(key, look, shown_again)
        run = replace(run, cards=cards, attention=attention, seconds=time.perf_counter() - began)
        if folder is not None:
            on_step(f"save the run in {folder}")
            run.save(folder)
        return run


def _roles(methods: Mapping[str, Any], solved: Mapping[str, SolvedMethod], beside: Mapping[str, Any]) -> dict[str, str]:
    """Method -> its role in a comparison."""
    controls = {*EXACT.values(), RANDOM_B, *(name for name, how in solved.items() if how.control in PRUNED)}
    paper = {name for name, how in solved.items() if how.control in PAPER}
    roles = {name: "control" if name in controls else "paper" if name in paper else "swd" for name in methods}
    return roles | dict.fromkeys(beside, "trained")


def study_steps(n_surfaces: int, n_sparsities: int, controls: Sequence[str], *, saved: bool) -> list[str]:
    """The first words of the steps that `run_study` says."""
    n_solved, n_exact = (len(set(controls) & set(known)) for known in (SOLVED, EXACT))
    of_surface = ["factorize"] * n_sparsities * (1 + n_solved) + ["exact"] * n_exact + ["measure"]
    return [*of_surface * n_surfaces, "top", "attention", *["save"] * saved]


def require_surface(model: Any, label: str, units: Any, surface: Sequence[Site]) -> None:
    """Raises ValueError unless these units replace the matrices of this surface."""
    host = host_of(model)
    replaced = {matrix.name for site in UnitSet.of(host, units).sites for matrix in matrices_of(host, site)}
    if replaced != {site.name for site in surface}:
        raise ValueError(
            f"{legible(label)} replaces {', '.join(sorted(replaced))}, this surface is "
            f"{', '.join(site.name for site in surface)}; circuits of different surfaces do not compare"
        )


def _shortage(site: Site, how: SolvedMethod) -> str:
    """What the paper's solver lacks at a matrix."""
    assert not isinstance(how.size, Goal)
    k = edges(site.d_in, site.d_out, how.size)
    return (
        f"{site.name} ({site.d_in}, {site.d_out}) keeps {k:,} edges at s={how.size:g}, and the paper's solver needs "
        f"{edges_needed(site):,}"
    )


def surface_of(model: Any, factors: Any) -> list[str]:
    """The sites that factors replace, in execution order. Raises AttachError where they are of another model."""
    host = host_of(model)
    units = UnitSet.of(host, factors)
    for site in units.sites:
        check_units(host, site, units[site.name])
    return [site.name for site in units.sites]


def _label(model: Any, names: Sequence[str]) -> str:
    """What a surface without a name of its own is called."""
    kinds = {split_name(name)[1] for name in names}
    every = [site.name for site in host_of(model).sites() if site.kind in kinds]
    if len(names) > 1 and len(kinds) == 1 and sorted(names) == sorted(every):
        return f"all {next(iter(kinds))}"
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _settings(
    model: Any, surfaces: Any, tasks: Sequence[Task], sparsities: Any, calibration: Any, heldout: Any
) -> dict[str, Any]:
    """What the run was asked for, and on what."""
    cfg, host = model.cfg, host_of(model)
    # One SHA-256 over the fingerprints of every factorizable matrix.
    weights = hashlib.sha256("".join(weight_fingerprint(host, site) for site in host.sites()).encode()).hexdigest()
    return {
        "swd_lens": __version__,
        "torch": str(torch.__version__),
        "transformer_lens": version("transformer_lens"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "model": str(cfg.model_name),
        "host": type(model).__name__,
        "weights": weights,
        "shape": f"{cfg.n_layers} layers, d_model {cfg.d_model}, {cfg.n_heads} heads, d_mlp {cfg.d_mlp}",
        "surfaces": {label: [site.name for site in find_sites(model, pattern)] for label, pattern in surfaces.items()},
        "sparsities": [float(s) for s in sparsities],
        "calibration tokens": 0 if calibration is None else as_stream(calibration, model).n_tokens,
        "held-out tokens": as_stream(heldout, model).n_tokens,
        **as_stream(heldout, model).about(model),
        "tasks": {
            task.name: {
                "train": len(task.train),
                "validation": len(task.validation),
                "test": len(task.test),
                "dropped": sum(task.dropped.values()),
                "source": task.source,
                "prepend_bos": task.prepend_bos,
                "example": task.test.examples[0].prompt,
            }
            for task in tasks
        },
    }


def _settings_used(
    first: Replacement, comparisons: Mapping[str, Comparison], solver: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What solver (None: none was run), attribution and interventions say they used: read off their results."""
    comparison = next(iter(comparisons.values()))
    curve = next(iter(comparison.values())).curves[first.method]
    used: dict[str, Any] = {
        key: curve.settings[key]
        for key in ("positions", "mean_over", "ablation", "score", "sign")
        if key in curve.settings
    }
    if comparison.others:
        positions, ablations = zip(*comparison.under_each(), strict=True)
        used |= {"positions": list(dict.fromkeys(positions)), "ablation": list(dict.fromkeys(ablations))}
    used["calibration"] = first.factors.provenance.get("calibration")
    if solver is None:
        return used
    solved = checked("settings of factors", next(iter(first.factors.summary().values()))["settings"], {"preset": str})
    used["solver"] = {"preset": solved["preset"], **solver}
    # Every setting by its value: what is not said would change its meaning when a default does.
    names = [field.name for field in fields(resolve(solved["preset"], {}))]
    used["solver spec"] = resolve(solved["preset"], {n: solver[n] for n in solver if n in names}).as_dict()
    # Factors that were there already may be of a version which had fewer.
    used["solver settings"] = {name: solved[name] for name in names if name in solved}
    return used
