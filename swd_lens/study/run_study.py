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
(`_Study.open_folder` says what decides them), and the same call goes on from there.
"""

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.errors import BudgetError, GoalError, ResumeError, TokenError, encodable, legible
from swd_lens.base.files import plain
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.progress import Steps
from swd_lens.base.record import checked
from swd_lens.base.step_cache import CALL, FOLDER, HOW_TO_RESUME, StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits import Comparison
from swd_lens.circuits.compare import comparison_of, several, sources_of
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.protocol import Protocol
from swd_lens.factorization.calibration_text import CalibrationText, shared_sites
from swd_lens.factorization.checkpoint import host_fingerprint
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
from swd_lens.study.run import NAME, Replacement, Run, folders_named
from swd_lens.study.section import AttentionView
from swd_lens.study.views import TaskUnit, attention_views, unit_cards
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.task import Task
from swd_lens.train import baselines
from swd_lens.train.baselines import exact
from swd_lens.units import UnitSet, matrices_of, weight_fingerprint
from swd_lens.units.factors import FactorSet
from swd_lens.units.index import remove_set, writing_factors
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
    """Factorize, measure, find circuits and look at units of a host.

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
    began = time.perf_counter()
    # 1. What is asked for: what can be refused is refused before minutes of work.
    sizes, usual = sizes_of(sparsities, kl, ce), controls is None
    given = {label: surface_of(model, each) for label, each in factors.items()}
    sites_of = _sites_of(model, surfaces, given)
    if not sites_of or not tasks or not (sizes or factors):
        raise ValueError("a study needs at least one surface, one task and one sparsity (or finished factors)")
    bounded("random_b_seeds", random_b_seeds, 1)
    controls = controls_of(controls, sizes, solver)
    _require_names(factors, [*swd_methods(sizes, solver), *solved_controls(tuple(SOLVED), sizes, solver), *beside])
    _require_text(calibration_tokens, sizes, controls)
    for names in sites_of.values():
        for label, units in beside.items():
            require_surface(model, label, units, find_sites(model, names))
        if not sizes and names not in given.values():
            raise ValueError(f"no factors were given for {', '.join(names)}, and no sparsity at which to make some")
    folder = None if out is None else Path(out)
    study = _Study(
        model,
        model if calibration_model is None else calibration_model,
        sites_of,
        tasks,
        heldout_tokens,
        factors={surface: {n: factors[n] for n, names in given.items() if names == sites_of[surface]} for surface in sites_of},
        beside=beside,
        controls=controls,
        usual=usual,
        random_b_seeds=random_b_seeds,
        interventions={"positions": several(positions, "positions"), "ablations": several(ablation, "ablation")},
        folder=folder,
        progress=progress,
    )
    study.choose_methods(sizes, solver)
    study.read_text(calibration_tokens, sizes, str(solver.get("calibration", "sequential")))
    steps = study_steps(len(sites_of), len(sizes), controls, saved=folder is not None)
    study.on_step = on_step if isinstance(on_step, Steps) else Steps(on_step, steps)

    with nullcontext() if folder is None else writing(folder, "run_study"):
        study.open_folder(calibration_model, solver, {"factors": factors, "beside": beside}, overwrite)
        for line in study.left_out:
            study.on_step(f"without {line}")
        # 2. and 3. Surface by surface: factors, then fidelity and circuits of all of them together.
        replacements: list[Replacement] = []
        comparisons: dict[str, Comparison] = {}
        for surface in sites_of:
            made = {**study.solve(surface), **study.exact(surface, calibration_tokens)}
            comparisons[surface] = study.compare(surface, {method: f for method, (f, _) in made.items()})
            for method, (of_method, seconds) in made.items():
                measured, role = comparisons[surface].fidelities[method], comparisons[surface].roles[method]
                exact = method in study.exact_methods
                replacements.append(Replacement(surface, method, of_method, measured, seconds, role, exact))
        settings = _settings(study, sparsities, {"kl": kl, "ce": ce}, list(factors))
        settings |= _settings_used(replacements[0], comparisons, solver if sizes else None)
        # As run.json gives it back: lists for tuples, text for names.
        run = Run(json.loads(json.dumps(plain(settings), default=str)), replacements, comparisons, [], 0.0)
        # 4. and 5. The units and patterns that a reader looks at.
        cards, attention = study.look_at(run, cards_per_task, contexts_per_card)
        run = replace(run, cards=cards, attention=attention, seconds=time.perf_counter() - began)
        if folder is not None:
            study.on_step(f"save the run in {folder}")
            run.save(folder)
        return run


# ---------------------------------------------------------------------------------------------- what is asked for


def _sites_of(model: Any, surfaces: Mapping[str, str | Sequence[str]], given: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """List label -> names of its sites, of the surfaces asked for and of those that only finished factors replace."""
    sites_of = {encodable(label): [site.name for site in find_sites(model, pattern)] for label, pattern in surfaces.items()}
    for names in given.values():
        if names not in sites_of.values():
            kinds = {split_name(name)[1] for name in names}
            every = [site.name for site in host_of(model).sites() if site.kind in kinds]
            label = ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
            whole = len(names) > 1 and len(kinds) == 1 and sorted(names) == sorted(every)
            sites_of[f"all {next(iter(kinds))}" if whole else label] = names
    return sites_of


def _require_names(factors: Mapping[str, FactorSet], others: Sequence[str]) -> None:
    """Refuse finished factors that go by the name of another method."""
    if twice := [label for label in factors if label in (*others, *EXACT.values(), RANDOM_B)]:
        raise ValueError(
            f"factors= has the names of other methods of the study: {legible(', '.join(map(repr, twice)))}; give them others"
        )


def _require_text(calibration_tokens: Any, sizes: Sequence[float | Goal], controls: Sequence[str]) -> None:
    """Refuse a goal, and controls that go by text, where there is no calibration text."""
    if calibration_tokens is not None:
        return
    if any(isinstance(size, Goal) for size in sizes):
        raise TokenError("a goal (kl= or ce=) needs tokens: factors are fitted on a part of the text and judged on another one")
    if of_text := [name for name in controls if name in OF_TEXT]:
        raise ValueError(
            f"controls {legible(', '.join(of_text))} go by what the matrices read on text, and this study has none: give "
            "calibration_tokens="
        )


def require_surface(model: Any, label: str, units: Any, surface: Sequence[Site]) -> None:
    """Raise ValueError unless these units replace the matrices of this surface."""
    host = host_of(model)
    replaced = {matrix.name for site in UnitSet.of(host, units).sites for matrix in matrices_of(host, site)}
    if replaced != {site.name for site in surface}:
        raise ValueError(
            f"{legible(label)} replaces {', '.join(sorted(replaced))}, this surface is "
            f"{', '.join(site.name for site in surface)}; circuits of different surfaces do not compare"
        )


def surface_of(model: Any, factors: Any) -> list[str]:
    """List the sites that factors replace, in execution order; raise AttachError where they are of another model."""
    host = host_of(model)
    units = UnitSet.of(host, factors)
    for site in units.sites:
        check_units(host, site, units[site.name])
    return [site.name for site in units.sites]


def study_steps(n_surfaces: int, n_sparsities: int, controls: Sequence[str], *, saved: bool) -> list[str]:
    """List the first words of the steps that `run_study` says."""
    n_solved, n_exact = (len(set(controls) & set(known)) for known in (SOLVED, EXACT))
    of_surface = ["factorize"] * n_sparsities * (1 + n_solved) + ["exact"] * n_exact + ["measure"]
    return [*of_surface * n_surfaces, "top", "attention", *["save"] * saved]


# ---------------------------------------------------------------------------------------------- the work


@dataclass
class _Study:
    """One call of `run_study`: what it works on, and its steps.

    Attributes:
        solved_on: the host whose matrices are factorized.
        surfaces: label -> names of its sites.
        factors: surface -> label -> finished factors of it.
        usual: whether the controls are the usual ones, which may be left out where they cannot be made.
        interventions: positions and ablations, which are combined.
        solved: surface -> the methods that the solver makes there, SWD first.
        left_out: controls that cannot be made, each with the reason.
        text: for calibration; None for zero-data.
        places: (surface, method) -> the folder of its factors, inside `folder`.
    """

    model: Any
    solved_on: Any
    surfaces: Mapping[str, list[str]]
    tasks: Sequence[Task]
    heldout: Any
    factors: Mapping[str, Mapping[str, FactorSet]]
    beside: Mapping[str, Any]
    controls: Sequence[str]
    usual: bool
    random_b_seeds: int
    interventions: Mapping[str, tuple[str, ...]]
    folder: Path | None
    progress: bool
    on_step: Callable[[str], None] = print
    solved: dict[str, dict[str, SolvedMethod]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    text: CalibrationText | None = None
    places: dict[tuple[str, str], str] = field(default_factory=dict)
    parts: StepCache = field(default_factory=lambda: StepCache(None))
    dense: DenseCache = field(default_factory=DenseCache)

    @property
    def exact_methods(self) -> dict[str, str]:
        """Method -> its control, of exact factorizations."""
        return {EXACT[control]: control for control in EXACT if control in self.controls}

    def choose_methods(self, sizes: Sequence[float | Goal], solver: Mapping[str, Any]) -> None:
        """Say what the solver makes on each surface; a usual control that has too few edges there is left out.

        Raises:
            BudgetError: one that was asked for has too few.
        """
        for surface, names in self.surfaces.items():
            self.solved[surface] = swd_methods(sizes, solver)
            for method, how in solved_controls(self.controls, sizes, solver).items():
                if (small := how.without_edges(find_sites(self.model, names))) is None:
                    self.solved[surface][method] = how
                    continue
                assert not isinstance(how.size, Goal)
                shortage = (
                    f"{method} of {surface}: {small.name} ({small.d_in}, {small.d_out}) keeps "
                    f"{edges(small.d_in, small.d_out, how.size):,} edges at s={how.size:g}, and the paper's solver needs "
                    f"{edges_needed(small):,}"
                )
                if not self.usual:
                    raise BudgetError(f"{shortage}; leave control 'paper' out, or give a smaller sparsity")
                self.left_out.append(shortage)
        labels = [(surface, method) for surface, methods in self.solved.items() for method in methods]
        self.places = dict(zip(labels, folders_named(labels), strict=True))

    def read_text(self, tokens: Any, sizes: Sequence[float | Goal], kind: str) -> None:
        """Take the calibration text, and what all surfaces will collect of it in the same passes."""
        if not sizes or tokens is None:
            return
        self.text = CalibrationText(tokens, self.solved_on)
        of_goals = any(isinstance(size, Goal) for size in sizes)
        texts = [self.text, *([divided(self.solved_on, self.text, None)[0]] if of_goals else [])]
        for names in self.surfaces.values():
            for fitted in texts:
                fitted.expect(shared_sites(stages_of(find_sites(self.solved_on, names), kind), kind))

    def open_folder(self, calibration_model: Any, solver: Mapping[str, Any], units: Mapping[str, Any], overwrite: bool) -> None:
        """Open the cache of finished parts in the folder, if there is one. Everything that decides every part has to be as it was
        (hosts and texts by their hashes, settings by their values); surfaces, tasks, units that came from elsewhere and methods
        may be added to a study that is there, each with what decides it.

        Args:
            units: argument -> label -> units that came from elsewhere.

        Raises:
            ResumeError: the folder holds those of another study, or a run without its parts.
        """
        if self.folder is None:
            return
        call, run = self.folder / FOLDER / CALL, self.folder / NAME
        if overwrite:  # first what names the others
            call.unlink(missing_ok=True)
            run.unlink(missing_ok=True)
            for place in (self.folder / name for name in self.places.values()):
                if place.is_dir():
                    with writing_factors(place, "run_study"):
                        remove_set(place)
        if run.exists() and not call.exists():  # nobody can go on with that, or knows how it was made
            changed = f"{NAME} of a run without its parts"
            raise ResumeError(f"{self.folder} holds what another call has finished: {changed}. {HOW_TO_RESUME}")
        hosts = {"the host": self.model, "the calibration host": calibration_model}
        decides = {"swd_lens": __version__, **standing_hooks(self.model)}
        decides |= {name: host_fingerprint(host) for name, host in hosts.items() if host is not None}
        decides |= {"calibration tokens": None if self.text is None else self.text.fingerprint()}
        decides |= {"held-out tokens": as_stream(self.heldout, self.model).fingerprint(), "solver": dict(solver)}
        seeds = [f"random_b {seed}" for seed in range(self.random_b_seeds)] if "random_b" in self.controls else []
        ours = {method: True for of_surface in self.solved.values() for method, how in of_surface.items() if not how.control}
        named = {"sparsities": ours, "controls": [*(c for c in self.controls if c != "random_b"), *seeds]}
        named |= {"positions": self.interventions["positions"], "ablation": self.interventions["ablations"]}
        growing: dict[str, dict[str, Any]] = {"surfaces": dict(self.surfaces)}
        growing["tasks"] = {task.name: splits_fingerprint(task.splits) for task in self.tasks}
        for what, given in units.items():
            made_of = {label: sorted(UnitSet.of(self.model, each).identities.items()) for label, each in given.items()}
            growing[what] = {label: hashlib.sha256(repr(each).encode()).hexdigest() for label, each in made_of.items()}
        growing |= {what: {str(name): True for name in names} for what, names in named.items()}
        self.parts = StepCache(self.folder, decides, growing)

    def solve(self, surface: str) -> dict[str, tuple[FactorSet, float]]:
        """Make what the solver makes: method -> factors and the seconds that they took; behind them finished factors."""
        made: dict[str, tuple[FactorSet, float]] = {}
        for method, how in self.solved[surface].items():
            self.on_step(f"factorize {surface} as {method}")
            start = time.perf_counter()
            asked: dict[str, Any] = {**how.asked, "tokens": self.text}
            asked |= {} if self.text is not None else {"calibration": "zero-data"}
            place = None if self.folder is None else self.folder / self.places[surface, method]
            try:
                factors = factorize(self.solved_on, self.surfaces[surface], out=place, progress=self.progress, **asked)
            except (BudgetError, GoalError) as cause:
                # A usual control that cannot keep the goal is no reason to have no study.
                if not (self.usual and how.control and isinstance(how.size, Goal)):
                    raise
                self.left_out.append(f"{method} of {surface}: {cause}")
                self.on_step(f"without {self.left_out[-1]}")
                continue
            spent = {"seconds": time.perf_counter() - start}
            made[method] = factors, self.parts.values((surface, "seconds", method), lambda s=spent: s, _seconds)
        # Nobody knows how long finished ones took.
        return made | {label: (factors, math.nan) for label, factors in self.factors[surface].items()}

    def exact(self, surface: str, tokens: Any) -> dict[str, tuple[FactorSet, float]]:
        """Make the exact controls: method -> factors and the seconds that they took."""
        made = {}
        for method, control in self.exact_methods.items():
            self.on_step(f"exact factors of {surface}: {method}")
            start = time.perf_counter()
            of_text = {"tokens": tokens if self.text is None else self.text} if control in OF_TEXT else {}
            made[method] = (exact.EXACT[control].make(self.model, self.surfaces[surface], **of_text), time.perf_counter() - start)
        return made

    def compare(self, surface: str, made: Mapping[str, FactorSet]) -> Comparison:
        """Measure all methods of a surface: fidelity, scores, circuits."""
        solved = self.solved[surface]
        roles = {method: solved[method].role if method in solved else "swd" for method in made}
        roles |= dict.fromkeys(self.exact_methods, "control")
        methods: dict[str, Any] = dict(made)
        if "random_b" in self.controls:
            methods[RANDOM_B] = baselines.random_b_seeds(self.model, self.surfaces[surface], range(self.random_b_seeds))
            roles[RANDOM_B] = "control"
        sources, groups = sources_of({**methods, **self.beside})
        self.on_step(f"measure {surface}: fidelity, circuits of {', '.join(task.name for task in self.tasks)}")
        protocol = Protocol(
            self.model,
            self.tasks,
            self.heldout,
            positions=self.interventions["positions"],
            ablations=self.interventions["ablations"],
            progress=self.progress,
            parts=self.parts,
            key=(surface,),
            on_step=self.on_step,
            dense=self.dense,
        )
        roles |= dict.fromkeys(self.beside, "trained")
        return comparison_of(protocol, sources, groups, reference=next(iter(methods)), roles=roles)

    def look_at(self, run: Run, per_task: int, n_contexts: int) -> tuple[list[TaskUnit], list[AttentionView]]:
        """Show the best units of each task, and attention patterns: of each surface's sparsest replacement."""
        sparsest = {surface: run.sparsest(surface) for surface in self.surfaces}
        shown: dict[str, Any] = {surface: (r.method, r.factors) for surface, r in sparsest.items()}

        def look() -> dict[str, Any]:
            self.on_step("top units and their contexts")
            how: dict[str, Any] = {"per_task": per_task, "n_contexts": n_contexts, "progress": self.progress}
            cards = unit_cards(self.model, shown, run.comparisons, self.heldout, **how)
            self.on_step("attention patterns of one prompt per task")
            attention = attention_views(self.model, self.tasks, shown)
            return {"units": [card.as_dict() for card in cards], "attention": [view.as_dict() for view in attention]}

        def read(values: Mapping[str, Any]) -> tuple[list[TaskUnit], list[AttentionView]]:
            return [*map(TaskUnit.from_dict, values["units"])], [*map(AttentionView.from_dict, values["attention"])]

        # Named by everything that it depends on: what is added to a study may change which units are shown.
        about = [{surface: r.method for surface, r in sparsest.items()}, [task.name for task in self.tasks]]
        return self.parts.values(("shown", json.dumps([about, per_task, n_contexts])), look, read)


def _seconds(values: Mapping[str, Any]) -> float:
    return checked("seconds", values, {"seconds": float})["seconds"]


# ---------------------------------------------------------------------------------------------- settings of the run


def _settings(
    study: _Study, sparsities: Sequence[float | int], goal: Mapping[str, float | None], factors: list[str]
) -> dict[str, Any]:
    """Say what the run was asked for, and on what it was made."""
    model, controls = study.model, study.controls
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
        "surfaces": dict(study.surfaces),
        "sparsities": [float(s) for s in sparsities],
        "calibration tokens": 0 if study.text is None else as_stream(study.text, model).n_tokens,
        "held-out tokens": as_stream(study.heldout, model).n_tokens,
        **as_stream(study.heldout, model).about(model),
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
            for task in study.tasks
        },
        **{name: value for name, value in goal.items() if value is not None},
        "calibration dtype": str(next(study.solved_on.parameters()).dtype).removeprefix("torch."),
        "controls": list(controls),
        **({"random_b_seeds": study.random_b_seeds} if "random_b" in controls else {}),
        "beside": list(study.beside),
        **({"controls left out": study.left_out} if study.left_out else {}),
        **({"factors": factors} if factors else {}),
        **standing_hooks(model),
    }


def _settings_used(first: Replacement, comparisons: Mapping[str, Comparison], solver: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read off the results what solver (None: none was run), attribution and interventions say they used."""
    comparison = next(iter(comparisons.values()))
    curve = next(iter(comparison.values())).curves[first.method]
    used: dict[str, Any] = {
        key: curve.settings[key] for key in ("positions", "mean_over", "ablation", "score", "sign") if key in curve.settings
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
    names = [each.name for each in fields(resolve(solved["preset"], {}))]
    used["solver spec"] = resolve(solved["preset"], {n: solver[n] for n in solver if n in names}).as_dict()
    used["solver settings"] = {name: solved[name] for name in names}
    return used
