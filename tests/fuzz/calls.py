"""Calls small enough to be made thousands of times: a toy host, a few hundred tokens, every command that writes a folder.

`CALLS` are those that resume: name -> a function of the folder `out`, whose result is the same to the bit however often it was
interrupted. `SAVES` write an object that exists already; each has two versions, the old one and the new one.
Everything is made once for a process, so that forked children find it.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.analysis.audit import UnitLabels, audit
from swd_lens.analysis.edit import Edit, edit_unit
from swd_lens.analysis.graph import UnitGraph, unit_graph
from swd_lens.circuits import Circuit, attribute
from swd_lens.factorization.allocation import Allocation
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.study import Run, run_study
from swd_lens.study.efficiency import DataEfficiency
from swd_lens.tasks.task import Task
from swd_lens.units.unit_set import identities
from tests import families
from tests.analysis.audit_models import lettered, made_scores
from tests.analysis.graph_checks import TOKENS as PROMPT
from tests.analysis.graph_checks import all_units, random_factors
from tests.circuits.slow import able_split
from tests.micro import random_tokens

TEXT, HELD = random_tokens(12, 10), random_tokens(6, 10, seed=1)
QUICK = {"sparsity": 0.6, "preset": "quick", "outer_iterations": 2, "progress": False}
TUNE = {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "eval_every": 2, "progress": False, "heldout": HELD}
TRAIN = {"n_tokens": 200, "tokens_per_step": 50, "checkpoint_every": 2, "progress": False}
MLP, SITE = "mlp_out", "blocks.1.mlp_out"


@cache
def host() -> Any:
    """Two layers of width 16; its tokens are letters."""
    return lettered()


@cache
def factors(seed: int = 0) -> swd.FactorSet:
    return swd.factorize(host(), MLP, tokens=random_tokens(12, 10, seed=seed), **QUICK)


@cache
def task() -> Task:
    train, validation = able_split(8, seed=3, name="train"), able_split(8, seed=5, name="validation")
    return Task("toy", train, validation, able_split(8, seed=4), source="random", prepend_bos=False)


# ---------------------------------------------------------------------------------------------- calls that resume


def factorize(out: Path) -> Any:
    return swd.factorize(host(), "all", out=out, **QUICK)


def factorize_calibrated(out: Path, seed: int = 0) -> Any:
    tokens = TEXT if seed == 0 else random_tokens(12, 10, seed=seed)
    return swd.factorize(host(), ["mlp_in", "mlp_out"], tokens=tokens, calibration="corrected", out=out, **QUICK)


def factorize_sequential(out: Path) -> Any:
    return swd.factorize(host(), "all", tokens=TEXT, batch_size=4, out=out, **QUICK)


def factorize_workers(out: Path) -> Any:
    return swd.factorize(host(), "all", workers=2, out=out, **QUICK)


def factorize_shards(out: Path) -> Any:
    for shard in ("1/2", "2/2"):
        if not (out / "factors.json").is_file():
            swd.factorize(host(), "all", tokens=TEXT, calibration="dense", shard=shard, out=out, **QUICK)
    return swd.factorize(host(), "all", tokens=TEXT, calibration="dense", out=out, **QUICK)


def finetune(out: Path, seed: int = 0) -> Any:
    return swd.finetune(host(), factors(seed), TEXT, out=out, **TUNE)


def transcoder(out: Path, seed: int = 0) -> Any:
    return baselines.transcoder(host(), SITE, TEXT, out=out, seed=seed, width=24, **TRAIN)


def vpd_recon(out: Path, seed: int = 0) -> Any:
    return baselines.vpd_recon(host(), "blocks.1.mlp", TEXT, out=out, seed=seed, width=8, **TRAIN)


def vpd_kl(out: Path, seed: int = 0) -> Any:
    bad = {"adversarial": 0.5, "adversary": "persistent"}
    return baselines.vpd_kl(host(), SITE, TEXT, out=out, seed=seed, width=8, **bad, **TRAIN)


@cache
def _tokenizer() -> Any:
    return load_tokenizer(WEIGHTS)


def sparse_pretrain(out: Path, seed: int = 0) -> Any:
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 1366}
    shape |= {"bos_token_id": 0, "eos_token_id": 0}
    settings = {"updates": 4, "tokens_per_update": 40, "checkpoint_every": 2, "eval_every": 2, "seed": seed}
    made = baselines.sparse_pretrain(
        shape, TEXT, out=out, tokenizer=_tokenizer(), heldout=HELD, progress=False, end_density=0.5, **settings
    )
    weights = (made.folder / "model.safetensors").read_bytes()
    about = {key: value for key, value in made.provenance.items() if key != "path"}
    return {"weights": torch.frombuffer(bytearray(weights), dtype=torch.uint8), "log": made.log, "about": about}


def replace_model(out: Path, seed: int = 0) -> Any:
    settings = {key: value for key, value in QUICK.items() if key != "sparsity"}
    tune = {key: value for key, value in TUNE.items() if key not in ("heldout", "progress")}
    made = swd.replace_model(
        host(),
        MLP,
        sparsity=0.6,
        budgets="error",
        tokens=TEXT if seed == 0 else random_tokens(12, 10, seed=seed),
        heldout=HELD,
        finetune_options=tune,
        out=out,
        **settings,
    )
    return {"numbers": made.as_dict(), "factors": made.factors, "finetuned": made.finetuned}


def data_efficiency(out: Path, seed: int = 0) -> Any:
    file = out / "points.json"
    swd_options = {**{k: v for k, v in QUICK.items() if k != "progress"}, "sparsity": 0.6 + 0.1 * seed}
    counts = {"tokens": TEXT, "token_counts": (20, 60, 120)}
    made = swd.data_efficiency(host(), SITE, {"SWD": swd_options, "TC": units()}, heldout=HELD, out=file, **counts)
    return made


def allocate(out: Path, seed: int = 0) -> Any:
    made = swd.allocate(host(), MLP, 0.6 + 0.1 * seed, TEXT, by="error", grid=(0.5, 1, 2), progress=False)
    made.save(out / "allocation.json")
    return Allocation.load(out / "allocation.json")


def study(out: Path) -> Any:
    _run(0).save(out)
    return Run.load(out)


def study_in_parts(out: Path, seed: int = 0) -> Any:
    run = _studied(seed, out=out)
    curves = {surface: of_surface["toy"].curves["SVD"] for surface, of_surface in run.comparisons.items()}
    values = {name: value for name, value in run.as_dict().items() if name not in ("seconds", "fidelity")}
    measured = {f"{r.surface} {r.method}": [r.fidelity, r.factors] for r in run.replacements}
    return {"values": values, "measured": measured, "margins": {s: dict(c.margins) for s, c in curves.items()}}


@cache
def on_a_bridge() -> tuple[Any, Any]:
    """A small TransformerBridge and factors of its MLPs."""
    model = families.bridge("gpt2")
    return model, swd.factorize(model, MLP, **QUICK)


def factorize_bridge(out: Path) -> Any:
    tokens = families.some_tokens(12, 10)
    return swd.factorize(on_a_bridge()[0], ["mlp_in", "mlp_out"], tokens=tokens, out=out, **QUICK)


def finetune_bridge(out: Path) -> Any:
    text = {**TUNE, "heldout": families.some_tokens(6, 10)}
    return swd.finetune(*on_a_bridge(), families.some_tokens(12, 10), out=out, **text)


CALLS: dict[str, Callable[[Path], Any]] = {
    "factorize": factorize,
    "factorize, corrected": factorize_calibrated,
    "factorize, sequential": factorize_sequential,
    "factorize, shards": factorize_shards,
    "factorize, workers=2": factorize_workers,
    "finetune": finetune,
    "transcoder": transcoder,
    "vpd_recon": vpd_recon,
    "vpd_kl": vpd_kl,
    "sparse_pretrain": sparse_pretrain,
    "replace_model": replace_model,
    "data_efficiency": data_efficiency,
    "allocate": allocate,
    "run_study": study,
    "run_study, in parts": study_in_parts,
    "factorize, bridge": factorize_bridge,
    "finetune, bridge": finetune_bridge,
}

# ---------------------------------------------------------------------------------------------- objects that are saved


@cache
def units(seed: int = 0) -> Any:
    return baselines.transcoder(host(), SITE, TEXT, seed=seed, width=24, **TRAIN)


@cache
def vpd_units(seed: int = 0) -> Any:
    return baselines.vpd_recon(host(), "blocks.1.mlp", TEXT, seed=seed, width=8, **TRAIN)


@cache
def _run(seed: int = 0) -> Run:
    return _studied(seed)


def _studied(seed: int, **more: Any) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_study(
            host(),
            {"out": SITE, "all": MLP},
            [task()],
            sparsities=(0.5,),
            calibration_tokens=random_tokens(12, 10, seed=seed),
            heldout_tokens=HELD,
            outer_iterations=2,
            preset="quick",
            cards_per_task=1,
            contexts_per_card=1,
            **more,
        )


@cache
def circuit(seed: int = 0) -> Circuit:
    scores = attribute(host(), factors(seed), task().train)
    return Circuit.of(factors(seed), scores, [f"{SITE}/{unit}" for unit in (3, 1, 2)], why="by hand")


@cache
def _allocation(seed: int = 0) -> Allocation:
    return swd.allocate(host(), MLP, 0.6 + 0.1 * seed, TEXT, by="error", grid=(0.5, 1, 2), progress=False)


@cache
def _efficiency(seed: int = 0) -> DataEfficiency:
    return swd.data_efficiency(host(), SITE, {"TC": units(seed)}, heldout=HELD)


@cache
def _graph(seed: int = 0) -> UnitGraph:
    held = random_factors(host(), "mlp_in", "mlp_out", n_units=3 + seed)
    return unit_graph(host(), held, all_units(held), prompt=PROMPT)


@cache
def _edit(seed: int = 0) -> Edit:
    edited = baselines.svd(host(), [SITE])
    return edit_unit(host(), edited, f"{SITE}/{1 + seed}", prompt=torch.tensor(PROMPT), answer=3, foil=4, shift=1.0)


@cache
def _labels(seed: int = 0) -> UnitLabels:
    names = {f"{SITE}/{i}": {"label": f"unit {i} of {seed}", "note": "häufig \u2028", "author": "me"} for i in range(5)}
    return UnitLabels.of(identities(factors(seed)), names)


@cache
def _audit(seed: int = 0) -> Any:
    named = [f"{SITE}/{unit}" for unit in range(4)]
    made = audit(host(), factors(seed), TEXT, n=2, scores=made_scores(factors(seed)), progress=False)
    return made.with_labels(_labels(seed)), named


@dataclass(frozen=True)
class Saved:
    """An object with a file or folder of its own.

    Attributes:
        name: of the file below the case's folder; "" where the folder itself is the thing.
        save: writes version 0 or 1 to a path.
        load: reads it.
    """

    name: str
    save: Callable[[Path, int], Any]
    load: Callable[[Path], Any]


SAVES: dict[str, Saved] = {
    "factors": Saved("", lambda path, seed: factors(seed).save(path), swd.FactorSet.load),
    "circuit": Saved("one.circuit", lambda path, seed: circuit(seed).save(path), Circuit.load),
    "transcoder units": Saved("", lambda path, seed: units(seed).save(path), baselines.LearnedUnits.load),
    "VPD units": Saved("", lambda path, seed: vpd_units(seed).save(path), baselines.LearnedUnits.load),
    "study": Saved("", lambda path, seed: _run(seed).save(path), Run.load),
    "allocation": Saved("a.json", lambda path, seed: _allocation(seed).save(path), Allocation.load),
    "efficiency": Saved("e.json", lambda path, seed: _efficiency(seed).save(path), DataEfficiency.load),
    "graph": Saved("g.json", lambda path, seed: _graph(seed).to_json(path), UnitGraph.load),
    "edit": Saved("e.edit", lambda path, seed: _edit(seed).save(path), Edit.load),
    "labels": Saved("labels.jsonl", lambda path, seed: _labels(seed).save(path), UnitLabels.load),
    "units.jsonl": Saved("units.jsonl", lambda path, seed: _audit(seed)[0].export(path, _audit(seed)[1]), UnitLabels.load),
}
