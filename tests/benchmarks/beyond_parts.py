"""Parts of beyond.py: texts, kept files, points of a curve, and curves at equal KL."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import write_text
from swd_lens.base.shares import fewest_with
from swd_lens.circuits.ablation import Means
from swd_lens.circuits.concentration import text_predictions
from swd_lens.circuits.contributions import TrainingPass, first_order
from swd_lens.circuits.fast_forward import find_fast_forward
from swd_lens.circuits.fidelity import fidelities
from swd_lens.hosts import host_of
from swd_lens.tasks.task import TaskSplit
from swd_lens.units import attach
from tests.benchmarks.circuit_rows import loaded

TOKENS = {"default": (8_192, 8_192), "smollm2": (4_096, 2_048)}  # calibration, held out
PREDICTIONS, CONTEXT = {"default": 256, "smollm2": 128}, 24
LAYERS = {"default": (2, 3), "smollm2": (23,)}
SPARSITIES = {"default": (0.4, 0.6, 0.75, 0.9), "smollm2": (0.5, 0.75)}
LEVELS = {"default": (0.6, 0.75), "smollm2": (0.75,)}
# The arm, and its sparsities, whose KL others are compared at.
REFERENCE = {"default": "SWD from dimensions", "smollm2": "SWD from the short side"}
PROMPTS = (150, 100)
TASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "default": {
        "blocks.2.attn_o": ("gendered_pronoun", "docstring", "greater_than"),
        "blocks.3.attn_o": ("ioi",),
        "blocks.2.attn_q": ("docstring",),
        "blocks.2.mlp_out": ("greater_than",),
        "blocks.3.mlp_out": ("gendered_pronoun", "greater_than"),
    },
    "smollm2": {"blocks.23.attn_o": ("capital",)},
}
Curves = dict[str, list[dict[str, Any]]]


class Text:
    """A model with its calibration and held-out text, loaded when the first part that is missing asks for it."""

    def __init__(self, name: str):
        self.name, self._held = name, None

    def __call__(self) -> tuple[Any, torch.Tensor, torch.Tensor]:
        self._held = self._held or loaded(self.name, *TOKENS[self.name])
        return self._held


def kept(file: Path, make: Callable[[], Any]) -> Any:
    """A part as its file has it; made and written first where there is none."""
    if not file.exists():
        write_text(file, json.dumps(make()))
        print(file.stem, flush=True)
    return json.loads(file.read_text())


def predictions(model: Any, texts: Any) -> TaskSplit:
    """Contexts of the calibration text, and the tokens that follow; fewer on a larger host, where each takes longer."""
    name = "default" if model.cfg.d_model < 512 else "smollm2"
    return text_predictions(model, texts[0], PREDICTIONS[name], CONTEXT, 0)[0]


def text_edges(model: Any, factors: Mapping[str, Any], split: TaskSplit, positions: str, tie: str = "") -> float:
    """Edges that carry half of the effect on a next token, in the geometric mean.

    Args:
        split: from `predictions`.
        tie: "" for one unit per site and index; "joint" for one unit per index, whose reads are the same at all sites; "neurons"
            for one per index, worth what its unit at the last site is.
    """
    host, costs = host_of(model), []
    with attach(model, factors) as attachment:
        units, sites = attachment.factors, attachment.sites
        fast_forward = find_fast_forward(host, sites, units, split, positions, known=False, dense=None)
        means = Means(host, sites, split, positions, "scoring" if positions == "scoring" else "all_tokens", 64)
        training = TrainingPass(host, units, fast_forward, means, steps=1)
        edges = [units[site.name].edges_per_unit for site in sites]
        reads = (factors[sites[0].name].read != 0).sum(0)
        for bucket in split.buckets(64):
            of_sites = list(first_order(training, bucket).values())
            if tie == "joint":
                gains = torch.stack(of_sites).sum(0)
            else:
                gains = of_sites[-1] if tie == "neurons" else torch.cat(of_sites, 1)
            priced = torch.cat(edges) if not tie else sum(edges) - (len(sites) - 1) * reads * (tie == "joint")
            costs.append(fewest_with(0.5, gains.clamp(min=0), priced).double())
    of_edges = torch.cat(costs)[:, 0]
    return float(of_edges[of_edges > 0].log().mean().exp())


def measured(
    model: Any, sets: Mapping[str, Mapping[str, Any]], grams: Any, texts: Any, positions: str, joint: bool = False
) -> dict[str, dict[str, Any]]:
    """Label -> a point of a curve, of replacements that are given as site -> Factors."""
    fidelity, split = fidelities(model, sets, texts[1]), predictions(model, texts)
    points = {}
    for label, factors in sets.items():
        reads = next(iter(factors.values())).read.count_nonzero().item() if joint else 0
        points[label] = {
            "edges": int(sum(f.edges for f in factors.values()) - (len(factors) - 1) * reads),
            "relmse": sum(f.relmse(grams[site]) for site, f in factors.items()) / len(factors),
            "ce_delta": fidelity[label].ce_delta,
            "kl": fidelity[label].kl,
            "text": text_edges(model, factors, split, positions, "joint" if joint else ""),
        }
    return points


def solved(model: Any, site: Any, gram: Any, s: float, n_tokens: int, **how: Any) -> Any:
    """Factors of one site of a host."""
    solution = swd.solve(host_of(model).weight(site), gram, s, tokens=n_tokens, **how)
    return swd.Factors(solution.read, solution.write, solution.settings, weight=solution.weight)


# ---------------------------------------------------------------------------------------------- curves


def at_kl(curve: Sequence[Mapping[str, Any]], kl: float, key: str) -> float | None:
    """A curve's figure where its KL is this, on straight lines between logarithms; None where no point's KL is as low. Beyond its
    largest KL it is that point's, which is no worse than asked."""
    points = sorted(curve, key=lambda point: point["kl"])
    if points[0]["kl"] > kl:
        return None
    for low, high in pairwise(points):
        if kl < high["kl"]:
            if low["kl"] <= 0:  # an exact point has no logarithm
                return low[key]
            along = math.log(kl / low["kl"]) / math.log(high["kl"] / low["kl"])
            return math.exp((1 - along) * math.log(low[key]) + along * math.log(high[key]))
    return points[-1][key]


def mean(values: Sequence[float | None]) -> float | None:
    """The geometric mean, where each value is there."""
    there = [value for value in values if value is not None]
    if len(there) < len(values) or not there:
        return None
    return math.exp(sum(map(math.log, there)) / len(there)) if min(there) > 0 else 0.0


def shown(value: float | None) -> str:
    """A count of edges as a table shows it."""
    return "–" if value is None else f"{value:,.0f}"
