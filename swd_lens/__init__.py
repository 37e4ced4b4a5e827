"""swd_lens: pretrained weights become circuit units.

    import swd_lens as swd

    model = swd.load_default_model()                                   # or swd.load_host(name)
    tokens = swd.text_tokens(16_384, split="train")
    factors = swd.factorize(model, "blocks.2.mlp_out", sparsity=0.5, tokens=tokens)
    with swd.attach(model, factors):
        logits, cache = model.run_with_cache("The list is")
        z = cache["mlp_out_unit", 2]                                   # (batch, pos, unit)
    task = swd.load_task("ioi", model)
    scores = swd.attribute(model, factors, task.train)
    curve = swd.evaluate(model, factors, task.test, scores)
    print(curve.cost_at(sufficiency=0.9, cost="edges"))

The names below stand in the order of the flow: model, sites, factors, attached units, fidelity, scores, circuits.
"""

import os
import sys

if os.path.basename(sys.argv[0] if sys.argv else "") == "swd-lens":
    # Our own command, before torch is loaded: threads that wait should spin a little, then sleep. On a machine busy with
    # other work, spinning on made a 2 s factorization take 30 s; not spinning at all makes eigenvalues five times slower.
    # As a library we leave the process's settings alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from swd_lens import baselines
from swd_lens._version import __version__
from swd_lens.calibration import collect_grams
from swd_lens.checkpoint import ResumeError
from swd_lens.circuits import (
    Circuit,
    Comparison,
    CostCurve,
    Fidelity,
    Refinement,
    UndefinedSufficiencyWarning,
    UnitScores,
    attribute,
    compare,
    evaluate,
    fidelity,
    intervention_hooks,
    judge,
    refine,
)
from swd_lens.default_model import load_default_model, text_tokens
from swd_lens.factors import Factors, FactorSet
from swd_lens.finetune import FinetuneError, FinetuneSpec, finetune
from swd_lens.hosts import UnsupportedHostError, find_sites
from swd_lens.hosts.load import load_host
from swd_lens.inject import AttachError, Attachment, SiteDidNotRunWarning, UnitSourceError, attach
from swd_lens.plan import factorize
from swd_lens.report.dashboard import dashboard
from swd_lens.resources import DoesNotFitError, Estimate, estimate
from swd_lens.shards import ShardError
from swd_lens.sites import Site, UnknownSiteError
from swd_lens.solver import solve
from swd_lens.storage import FactorFileError
from swd_lens.study import (
    Allocation,
    DataEfficiency,
    ModelReplacement,
    Run,
    Samples,
    Sweep,
    allocate,
    data_efficiency,
    generate,
    replace_model,
    run_study,
    sweep,
)
from swd_lens.study.audit import Audit, UnitLabels, UnitProfile, audit
from swd_lens.study.edit import (
    Edit,
    EditComparison,
    EditError,
    EditSelection,
    SideEffects,
    compare_edits,
    edit_unit,
    select_edit_unit,
    side_effects,
    unit_hooks,
)
from swd_lens.study.graph import UnitGraph, plot_unit_paths, unit_graph
from swd_lens.study.interactions import UnitInteractions, UnitOverlap, unit_interactions, unit_overlap
from swd_lens.study.qk import QKError, QKPair, QKReplay, QKScan, QKScreen, qk_replay, qk_scan, qk_screen, score_parts
from swd_lens.tasks import Task, TaskError, TaskExample, TokenError, load_task, load_text, pack_text, stream_rows
from swd_lens.tasks.streams import TokenStream
from swd_lens.workers import WorkerLostError

__all__ = [
    "Allocation",
    "AttachError",
    "Attachment",
    "Audit",
    "Circuit",
    "Comparison",
    "CostCurve",
    "DataEfficiency",
    "DoesNotFitError",
    "Edit",
    "EditComparison",
    "EditError",
    "EditSelection",
    "Estimate",
    "FactorFileError",
    "FactorSet",
    "Factors",
    "Fidelity",
    "FinetuneError",
    "FinetuneSpec",
    "ModelReplacement",
    "QKError",
    "QKPair",
    "QKReplay",
    "QKScan",
    "QKScreen",
    "Refinement",
    "ResumeError",
    "Run",
    "Samples",
    "ShardError",
    "SideEffects",
    "Site",
    "SiteDidNotRunWarning",
    "Sweep",
    "Task",
    "TaskError",
    "TaskExample",
    "TokenError",
    "TokenStream",
    "UndefinedSufficiencyWarning",
    "UnitGraph",
    "UnitInteractions",
    "UnitLabels",
    "UnitOverlap",
    "UnitProfile",
    "UnitScores",
    "UnitSourceError",
    "UnknownSiteError",
    "UnsupportedHostError",
    "WorkerLostError",
    "__version__",
    "allocate",
    "attach",
    "attribute",
    "audit",
    "baselines",
    "collect_grams",
    "compare",
    "compare_edits",
    "dashboard",
    "data_efficiency",
    "edit_unit",
    "estimate",
    "evaluate",
    "factorize",
    "fidelity",
    "find_sites",
    "finetune",
    "generate",
    "intervention_hooks",
    "judge",
    "load_default_model",
    "load_host",
    "load_task",
    "load_text",
    "pack_text",
    "plot_unit_paths",
    "qk_replay",
    "qk_scan",
    "qk_screen",
    "refine",
    "replace_model",
    "run_study",
    "score_parts",
    "select_edit_unit",
    "side_effects",
    "solve",
    "stream_rows",
    "sweep",
    "text_tokens",
    "unit_graph",
    "unit_hooks",
    "unit_interactions",
    "unit_overlap",
]
