"""mib: the circuit track of the Mechanistic Interpretability Benchmark (Mueller et al. 2025), with units in its nodes' place.

1. Scores are signed: the mean over prompts of what a unit adds to the margin. CPR ranks by the score, CMD by its magnitude, as
   the benchmark's own printing of results chooses them.
2. What is not in a circuit is resampled: it gets its activation on the prompt's corrupt counterpart, at every position.
3. f of a circuit is (Q(S) - Q(empty)) / (Q(dense) - Q(empty)), Q the mean margin: the host's own margin is what is to be
   recovered, so that what the replacement itself loses counts against it.
4. Circuits hold the fractions .001, .002, .005, .01, .02, .05, .1, .2, .5 and 1 of all units (or edges). CPR is the area under f,
   CMD that under |1 - f|, by trapezoids on a linear axis. Random rankings stand beside both.
5. `node_scores` adds the units' signed scores up over attention heads (of attn_o, by the share of a unit's squared read norm in
   each head) and MLPs (mlp_out, whole MLPs): signed contributions add, to first order. `save_graph` writes them as the
   benchmark's JSON of importance scores. Heads and MLPs that no unit stands for have no score: its loader keeps them in every
   circuit, as our prefixes do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from swd_lens.base.checks import bounded
from swd_lens.base.errors import UnsupportedHostError, legible
from swd_lens.base.figures import new_figure, style
from swd_lens.base.files import write_json
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.curve import MIB_FRACTIONS, CostCurve
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.evaluate import evaluate
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Ends
from swd_lens.tasks.task import Task
from swd_lens.units import UnitSet

RANDOM = 5  # random rankings
_OF = "recovered of dense"
_WRITERS = ("attn_o", "mlp_out", "mlp")  # sites whose units write what the benchmark's nodes write


@dataclass(frozen=True, repr=False, eq=False)
class MIBResult(SavedRecord):
    """The benchmark's two areas of a replacement's units on one task.

    Attributes:
        task: its name.
        cpr, cmd: the areas over fractions of units; edges: the same over fractions of edges, {"CPR": ..., "CMD": ...}.
        random: a row per random ranking: "CPR" and "CMD" over fractions of units.
        rows: a row per fraction of units: "fraction", "f signed" (of CPR's ranking), "f absolute" (of CMD's).
        carried, carried_se: what resampling all units takes off the replacement's margin, logits, and its standard error.
        carries: whether that is enough to speak of (carried.md); where not, all areas are NaN.
        nodes: the benchmark's node -> signed score, in logits; {} where units write something else than its nodes do.
        graph: what its JSON says of the host: "n_layers", "n_heads", "parallel_attn_mlp", "d_model".
        settings: everything that was used.
    """

    WHAT = "a result of mib"

    task: str
    cpr: float
    cmd: float
    edges: dict[str, float]
    random: pd.DataFrame
    rows: pd.DataFrame
    carried: float
    carried_se: float
    carries: bool
    nodes: dict[str, float]
    graph: dict[str, int | bool]
    settings: Mapping[str, Any]

    def table(self) -> pd.DataFrame:
        """One row per area: over units, over edges, of random rankings the mean and the best."""
        rows = []
        for name, value, best in (("CPR", self.cpr, "max"), ("CMD", self.cmd, "min")):
            random = self.random[name] if len(self.random) else pd.Series([math.nan])
            row = {"area": name, "better": "higher" if name == "CPR" else "lower", "over units": value}
            rows.append(row | {"over edges": self.edges[name], "random mean": random.mean(), "random best": random.agg(best)})
        return pd.DataFrame(rows)

    def in_words(self) -> str:
        """Say in a sentence what the areas are, or that there are none."""
        if not self.carries:
            return (
                f"Resampling all units takes {self.carried:+.2f} ± {self.carried_se:.2f} logits off the margin of {self.task}: "
                "they do not carry the task, so that there is nothing of which a circuit could recover a part, and no area."
            )
        beside = (
            f"; random rankings {self.random['CPR'].mean():.3f} and {self.random['CMD'].mean():.3f}" if len(self.random) else ""
        )
        return f"{self.task}: CPR {self.cpr:.3f} (higher is better), CMD {self.cmd:.3f} (lower is better){beside}."

    def plot(self):
        """f of both rankings against the fraction of units, on the linear axis of the areas; a matplotlib Figure."""
        figure, axes = new_figure(width=4.6, height=2.6)
        ax = axes[0, 0]
        ax.axhline(1.0, color="#888888", linewidth=0.8)
        for index, name in enumerate(("f signed", "f absolute")):
            label = f"{name} ({'CPR' if index == 0 else 'CMD'})"
            ax.plot(self.rows["fraction"], self.rows[name], marker="o", markersize=3, label=label, **style(index))
        ax.set(xlabel="fraction of units", ylabel="f, of the dense margin")
        ax.legend(fontsize=8, frameon=False)
        return figure

    def graph_json(self) -> dict[str, Any]:
        """The benchmark's file of importance scores: "cfg", "nodes" (name -> "in_graph", "score") and "edges" (none are scored);
        evaluate it with `--level node`. Raises UnsupportedHostError: units that write something else than its nodes do."""
        if not self.nodes:
            sites = ", ".join(self.settings["units"])
            raise UnsupportedHostError(
                f"the benchmark's nodes are what heads and MLPs write; units of {legible(sites)} do not write that. Replace "
                f"sites of {', '.join(_WRITERS)}"
            )
        n_layers, n_heads = int(self.graph["n_layers"]), int(self.graph["n_heads"])
        layers = [[*(f"a{layer}.h{head}" for head in range(n_heads)), f"m{layer}"] for layer in range(n_layers)]
        names = ["input", *(name for layer in layers for name in layer), "logits"]
        nodes = {name: {"in_graph": True} | ({"score": self.nodes[name]} if name in self.nodes else {}) for name in names}
        return {"cfg": dict(self.graph), "nodes": nodes, "edges": {}}

    def save_graph(self, path: str | Path) -> None:
        """Write `graph_json` to a file, whole or not at all; raises what that does.

        Raises:
            OSError: the file cannot be written.
        """
        write_json(Path(path), self.graph_json())

    def __repr__(self) -> str:
        return f"MIBResult({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return (self.in_words(), self.plot(), self.table()) if self.carries else (self.in_words(),)


@with_torch_defaults
def mib(
    model: Any,
    factors: Any,
    task: Task,
    *,
    score: str = "attribution_patching",
    ablation: str = "resample",
    positions: str = "all",
    random: int = RANDOM,
    seed: int = 0,
    progress: bool = False,
    **attribution: Any,
) -> MIBResult:
    """Run the benchmark's protocol on units: scores on training prompts, areas on test prompts.

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`.
        task: tokenized for this host; each prompt with a corrupt one of its length.
        score, attribution: of `swd_lens.attribute`, whose scores are taken as they are, signed.
        ablation, positions: the benchmark's are "resample" and "all".
        random: rankings at random beside the units' own.
        seed: of these.

    Raises:
        ValueError: an option of `attribute` or `evaluate` that there is not, or a negative number of random rankings.
        TaskError: a prompt has no corrupt one, or (positions="all") one of another length.

    Source: the circuit track of MIB, Mueller et al. (2025), of which this is the protocol on units.
    """
    bounded("random", random, 0)
    dense, units = DenseCache(), UnitSet.of(model, factors)
    scores = attribute(
        model, units, task, score=score, sign="signed", positions=positions, dense=dense, progress=progress, **attribution
    )
    how: dict[str, Any] = {"grid": "mib", "ablation": ablation, "random_sets": 0, "dense": dense, "progress": progress}

    def curve(ranked: UnitScores) -> CostCurve:
        return evaluate(model, units, task.test, ranked, **how)

    signed = curve(scores)
    # Ranked by the magnitude of the mean (not by the mean of magnitudes, which is sign="absolute").
    magnitudes = {site: of_site.abs() for site, of_site in scores.scores.items()}
    magnitude_settings = {**scores.settings, "sign": "magnitude of the signed mean"}
    absolute = curve(replace(scores, scores=magnitudes, settings=magnitude_settings))
    generator, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(random):
        at_random = {site: torch.rand(of.shape, generator=generator, dtype=torch.float32) for site, of in scores.scores.items()}
        drawn.append(areas(curve(replace(scores, scores=at_random))))
    host = host_of(model)
    cfg = host.model.cfg
    graph = {"n_layers": int(cfg.n_layers), "n_heads": int(cfg.n_heads), "d_model": int(cfg.d_model)}
    graph["parallel_attn_mlp"] = bool(getattr(cfg, "parallel_attn_mlp", False))
    values = {
        name: of.mib_values("units", _OF) if of.carries else [math.nan] * len(MIB_FRACTIONS)
        for name, of in (("f signed", signed), ("f absolute", absolute))
    }
    return MIBResult(
        task=task.name,
        cpr=areas(signed)["CPR"],
        cmd=areas(absolute)["CMD"],
        edges={"CPR": areas(signed, "edges")["CPR"], "CMD": areas(absolute, "edges")["CMD"]},
        random=pd.DataFrame(drawn, columns=["CPR", "CMD"]),
        rows=pd.DataFrame({"fraction": list(MIB_FRACTIONS), **values}),
        carried=signed.carried.logits,
        carried_se=signed.carried.se,
        carries=signed.carries,
        nodes=node_scores(model, units, scores),
        graph=graph,
        settings={**signed.settings, "random": random, "seed": seed},
    )


def areas(curve: CostCurve, cost: str = "units") -> dict[str, float]:
    """CPR and CMD of a curve, of the host's own margin; NaN where its units do not carry the task."""
    return curve.mib(cost, _OF) if curve.carries else {"CPR": math.nan, "CMD": math.nan}


def node_scores(model: Any, factors: Any, scores: UnitScores) -> dict[str, float]:
    """Signed scores of units, added up over the benchmark's nodes: "a1.h3" of head 3 in layer 1, "m1" of layer 1's MLP; {} where
    a site's units write something else than heads and MLPs do, or show no read vectors that say by which head."""
    units = UnitSet.of(model, factors)
    ends, nodes = Ends.of(units.host), {}
    for site in units.sites:
        of_site = scores.scores[site.name].double().cpu()
        if site.kind in ("mlp_out", "mlp"):
            nodes[f"m{site.layer}"] = nodes.get(f"m{site.layer}", 0.0) + float(of_site.sum())
            continue
        reads, spans = units.read_vectors(site.name), ends.read(site.name, site.d_in)
        if site.kind != "attn_o" or reads is None or len(spans) != ends.n_heads:
            return {}
        energy = torch.stack([part.square().sum(0) for part in reads.detach().double().cpu().split(spans[0].size)], 1)
        shares = energy / energy.sum(1, keepdim=True).clamp_min(1e-300)
        for head, score in enumerate((shares * of_site[:, None]).sum(0).tolist()):
            nodes[f"a{site.layer}.h{head}"] = score
    return nodes
