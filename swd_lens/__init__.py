"""swd_lens: pretrained weights become circuit units.

    import swd_lens as swd

    model = swd.load_default_model()                                   # or swd.load_host(name)
    tokens = swd.text_tokens(16_384, split="train")
    factors = swd.factorize(model, "blocks.2.mlp_out", sparsity=0.5, tokens=tokens)
    with swd.attach(model, factors):
        logits, cache = model.run_with_cache("The list is")
        z = cache["mlp_out_unit", 2]                                   # (batch, pos, unit)
    task = swd.load_task("ioi", model)
    scores = swd.attribute(model, factors, task)
    curve = swd.evaluate(model, factors, task, scores)
    print(curve.in_words())                                            # what the surface carries, how small a circuit recovers it

The names of `PUBLIC` stand in the order of the flow: model, sites, factors, attached units, scores, circuits. Beside them are the
namespaces `baselines`, `edit`, `qk`, `graph`, `interactions`, `study` and `truth`, and `errors` and `types`, which collect what
calls raise and return. A name is imported when it is first used (PEP 562): `import swd_lens` loads neither torch nor
transformer_lens.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any as _Any

if _os.path.basename(_sys.argv[0] if _sys.argv else "") == "swd-lens":
    # Our own command, before torch is loaded: threads that wait should spin a little, then sleep. On a machine busy with
    # other work, spinning on made a 2 s factorization take 30 s; not spinning at all makes eigenvalues five times slower.
    # As a library we leave the process's settings alone.
    _os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Name -> module below swd_lens that defines it.
PUBLIC = {
    "load_default_model": "hosts.embedded",
    "load_host": "hosts.load",
    "find_sites": "hosts",
    "text_tokens": "hosts.embedded",
    "load_text": "tasks.text",
    "TokenStream": "tasks.streams",
    "load_task": "tasks.loaders",
    "Task": "tasks.task",
    "skill": "circuits.screen",
    "screen": "circuits.screen",
    "factorize": "factorization.factorize",
    "solve": "factorization.solve",
    "estimate": "factorization.estimate",
    "allocate": "factorization.allocate",
    "Factors": "units.factors",
    "FactorSet": "units.factors",
    "load_coders": "units.folders",
    "attach": "units.attach",
    "detach": "units.attach",
    "stack_unit_results": "units.residual",
    "fidelity": "circuits.fidelity",
    "attribute": "circuits.attribution",
    "evaluate": "circuits.evaluate",
    "refine": "circuits.refine",
    "compare": "circuits.compare",
    "concentration": "circuits.concentration",
    "Circuit": "circuits.circuit",
    "finetune": "train.finetune.run",
    "replace_model": "study.replacement",
    "audit": "analysis.audit.collect",
    "UnitLabels": "analysis.audit.labels",
    "run_study": "study.run_study",
    "best_circuit": "study.best",
    "__version__": "base",
}
NAMESPACES = {
    "baselines": "train.baselines",
    "edit": "analysis.edit",
    "graph": "analysis.graph",
    "interactions": "analysis.interactions",
    "qk": "analysis.qk",
    "study": "study",
    "truth": "truth",
}
ERRORS = {
    "AttachError": "base.errors",
    "BudgetError": "base.errors",
    "DoesNotFitError": "base.errors",
    "EditError": "base.errors",
    "FactorFileError": "base.errors",
    "FinetuneError": "base.errors",
    "FolderInUseError": "base.errors",
    "GoalError": "base.errors",
    "GradientError": "base.errors",
    "GramError": "base.errors",
    "HostDiffersError": "base.errors",
    "HostInUseError": "base.errors",
    "QKError": "base.errors",
    "RayMissingError": "base.errors",
    "ResumeError": "base.errors",
    "ShardError": "base.errors",
    "SiteDidNotRunWarning": "base.errors",
    "SolveInputError": "base.errors",
    "SparsityError": "base.errors",
    "SpecError": "base.errors",
    "TaskError": "base.errors",
    "TextWarning": "base.errors",
    "TokenError": "base.errors",
    "TrainError": "base.errors",
    "NotCarriedWarning": "base.errors",
    "UndefinedSufficiencyWarning": "base.errors",
    "UnitSourceError": "base.errors",
    "UnitsError": "base.errors",
    "UnsealedFileWarning": "base.errors",
    "UnknownSiteError": "base.errors",
    "UnknownWordsWarning": "base.errors",
    "UnsupportedHostError": "base.errors",
    "WeightError": "base.errors",
    "WorkerLostError": "base.errors",
}
TYPES = {
    "Allocation": "factorization.allocation",
    "Attachment": "units.attach",
    "Attack": "circuits.attack",
    "AttentionPaths": "analysis.graph.attention",
    "Audit": "analysis.audit.result",
    "BasisChoice": "factorization.basis",
    "BestCircuit": "study.best",
    "CircuitNull": "circuits.null",
    "Comparison": "circuits.comparison",
    "Concentration": "circuits.concentration",
    "CostCurve": "circuits.curve",
    "DataEfficiency": "study.efficiency",
    "DenseTransfer": "circuits.transfer",
    "Disagreement": "circuits.disagreement",
    "Edit": "analysis.edit.edited",
    "EditComparison": "analysis.edit.compare",
    "EditLocalization": "analysis.edit.localization",
    "EditSelection": "analysis.edit.select",
    "Estimate": "factorization.estimate",
    "ExportedGraph": "analysis.graph.export",
    "Fidelity": "circuits.fidelity",
    "FinetuneSpec": "train.finetune.spec",
    "MIBResult": "circuits.mib",
    "ModelReplacement": "study.replacement",
    "Multiverse": "circuits.multiverse",
    "PerTokenUse": "circuits.per_token",
    "QKPair": "analysis.qk.screen",
    "QKReplay": "analysis.qk.replay",
    "QKScan": "analysis.qk.scan",
    "QKScreen": "analysis.qk.screen",
    "Refinement": "circuits.refine",
    "IntruderTest": "analysis.audit.intruder",
    "Run": "study.run",
    "Samples": "study.generate",
    "Screen": "circuits.screen",
    "SideEffects": "analysis.edit.effects",
    "Site": "hosts.sites",
    "Stability": "study.stability_card",
    "Sweep": "study.sweep",
    "TaskExample": "tasks.split",
    "UnitGraph": "analysis.graph.result",
    "Replays": "analysis.graph.replays",
    "GraphPage": "analysis.graph.viewer.page",
    "UnitInteractions": "analysis.interactions.finite",
    "UnitOverlap": "analysis.interactions.overlap",
    "UnitProfile": "analysis.audit.unit",
    "UnitScores": "circuits.scores",
}
# Names of the namespaces that stand at the top as well: most did before there were namespaces, and go on working.
ALIASES = {
    "attack": "circuits.attack",
    "choose_basis": "factorization.basis",
    "circuit_null": "circuits.null",
    "collect_grams": "factorization.grams",
    "compare_edits": "analysis.edit.compare",
    "dashboard": "report.dashboard",
    "data_efficiency": "study.data_efficiency",
    "dense_transfer": "circuits.transfer",
    "disagreement": "circuits.disagreement",
    "edit_unit": "analysis.edit.make",
    "generate": "study.generate",
    "intervention_hooks": "circuits.ablation",
    "intruder": "analysis.audit.intruder",
    "localize": "analysis.edit.localization",
    "evaluate_circuits": "circuits.evaluate",
    "mib": "circuits.mib",
    "multiverse": "circuits.multiverse",
    "pack_text": "tasks.text",
    "per_token_use": "circuits.per_token",
    "plot_unit_paths": "analysis.graph.paths",
    "qk_replay": "analysis.qk.replay",
    "qk_scan": "analysis.qk.scan",
    "qk_screen": "analysis.qk.screen",
    "score_parts": "analysis.qk.parts",
    "select_edit_unit": "analysis.edit.select",
    "side_effects": "analysis.edit.effects",
    "stability": "study.stability",
    "stream_rows": "tasks.text",
    "sweep": "study.sweep",
    "task_graph": "analysis.graph.aligned",
    "unit_graph": "analysis.graph.build",
    "unit_hooks": "analysis.edit.make",
    "unit_interactions": "analysis.interactions.finite",
    "unit_overlap": "analysis.interactions.overlap",
}

__all__ = [*PUBLIC, *NAMESPACES, "errors", "types"]  # pyright: ignore[reportUnsupportedDunderAll]


class _Collection(_ModuleType):
    """A namespace whose members are imported when they are first used."""

    def __init__(self, name: str, about: str, homes: dict[str, str]):
        super().__init__(f"{__name__}.{name}", about)
        self.__all__ = list(homes)
        self._homes = homes

    def __getattr__(self, name: str) -> _Any:
        if name.startswith("_") or name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; it has {', '.join(self.__all__)}")
        return _member(self._homes[name], name)

    def __dir__(self) -> list[str]:
        return self.__all__


def _member(home: str, name: str) -> _Any:
    return getattr(_import_module(f"{__name__}.{home}"), name)


errors = _Collection("errors", "What calls of swd_lens raise and warn with.", ERRORS)
types = _Collection(
    "types", "What calls of swd_lens return.", {**TYPES, **{n: home for n, home in PUBLIC.items() if n[0].isupper()}}
)


def __getattr__(name: str) -> _Any:
    """A public name, a namespace or an alias, imported now and kept."""
    if name in NAMESPACES:
        value = _import_module(f"{__name__}.{NAMESPACES[name]}")
    else:
        for homes in (PUBLIC, ALIASES, TYPES, ERRORS):
            if name in homes:
                value = _member(homes[name], name)
                break
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
