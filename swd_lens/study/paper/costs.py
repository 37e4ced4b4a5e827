"""The cost of an item, before anything is loaded: operations, time, memory, disk, from shapes and settings alone.

1. `works_of` lists an item's work: solving, training, fidelity, circuits. Operations are those of matrix products, from the
   host's `Shape`: 2 per weight and token of a projection, and attention's own; a backward takes twice a forward.
2. `cost_of` adds them up. Time is operations over this machine's measured speed of products, times _SLOWER. Of profile small,
   on two quiet cores (150 GFLOP/s): mlp took .9 of it, factors and tuning of full-model .85; controls, beside tests, half.
3. An item alone: in one folder it takes over what others have made.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swd_lens.base.machine import product_speed
from swd_lens.base.record import PlainRecord
from swd_lens.circuits.evaluate import prefix_grid
from swd_lens.hosts.sites import split_name
from swd_lens.solver import cost as solver_cost
from swd_lens.study.paper.materials import SOLVERS
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.train.activations import MOST_BYTES


@dataclass(frozen=True)
class Shape(PlainRecord):
    """A host's sizes: weights of its blocks are taken as projections only."""

    layers: int
    d_model: int
    d_mlp: int
    d_vocab: int
    heads: int
    key_heads: int
    d_head: int
    gated: bool
    packed: bool = False  # queries, keys and values in one matrix

    @classmethod
    def of(cls, model: Any) -> "Shape":
        """Read the shape of a loaded host."""
        cfg = model.cfg
        key_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        gated = bool(getattr(cfg, "gated_mlp", False))
        packed = key_heads == cfg.n_heads and not gated
        return cls(cfg.n_layers, cfg.d_model, cfg.d_mlp, cfg.d_vocab, cfg.n_heads, key_heads, cfg.d_head, gated, packed)

    def matrix(self, kind: str) -> tuple[int, int]:
        """(d_in, d_out) of a kind of matrix."""
        wide, narrow = self.heads * self.d_head, self.key_heads * self.d_head
        return {
            "attn_qkv": (self.d_model, wide + 2 * narrow),
            "attn_q": (self.d_model, wide),
            "attn_k": (self.d_model, narrow),
            "attn_v": (self.d_model, narrow),
            "attn_o": (wide, self.d_model),
            "mlp_in": (self.d_model, self.d_mlp),
            "mlp_gate": (self.d_model, self.d_mlp),
            "mlp_out": (self.d_mlp, self.d_model),
            "mlp": (self.d_model, self.d_model),
        }[kind]

    def kinds(self) -> tuple[str, ...]:
        """The kinds of matrix in a block."""
        attention = ("attn_qkv",) if self.packed else ("attn_q", "attn_k", "attn_v")
        return (*attention, "attn_o", "mlp_in", *(("mlp_gate",) if self.gated else ()), "mlp_out")

    def sites(self, pattern: str | Sequence[str]) -> list[tuple[int, tuple[int, int]]]:
        """(layer, (d_in, d_out)) of every matrix that patterns name, in execution order."""
        named = []
        for each in [pattern] if isinstance(pattern, str) else pattern:
            if each == "all":
                named += [(layer, self.matrix(kind)) for layer in range(self.layers) for kind in self.kinds()]
            elif "." in each:
                layer, kind = split_name(each)
                named.append((layer, self.matrix(kind)))
            else:
                named += [(layer, self.matrix(each)) for layer in range(self.layers)]
        return sorted(named, key=lambda site: site[0])

    @property
    def block_weights(self) -> int:
        """Count the weights of one block's matrices."""
        return sum(math.prod(self.matrix(kind)) for kind in self.kinds())

    @property
    def weights(self) -> int:
        """Count the weights of blocks, embedding and unembedding."""
        return self.layers * self.block_weights + 2 * self.d_vocab * self.d_model

    def forward(self, tokens: float | int, context: int, layers: int | None = None) -> float:
        """Operations of a forward of so many tokens, in rows of `context`; of the first layers only, or of all and the logits."""
        n = self.layers if layers is None else layers
        attention = 4 * context * self.heads * self.d_head
        each = n * (2 * self.block_weights + attention) + (layers is None) * 2 * self.d_vocab * self.d_model
        return float(tokens * each)


# Model of a profile -> its shape (of their config.json; of Qwen3.5-27B, whose attention is partly linear, as if it were not).
SHAPES: Mapping[str, Shape] = {
    "gpt2": Shape(12, 768, 3072, 50_257, 12, 12, 64, False, True),
    "Qwen/Qwen2.5-0.5B": Shape(24, 896, 4864, 151_936, 14, 2, 64, True),
    "Qwen/Qwen2.5-1.5B": Shape(28, 1536, 8960, 151_936, 12, 2, 128, True),
    "Qwen/Qwen2.5-3B": Shape(36, 2048, 11_008, 151_936, 16, 2, 128, True),
    "Qwen/Qwen3.5-27B": Shape(64, 5120, 17_408, 248_320, 40, 8, 128, True),
    "smollm2": Shape(30, 576, 1536, 49_152, 9, 3, 64, True),
    "default": Shape(4, 128, 512, 1366, 4, 4, 32, False, True),
}


_SLOWER = 1.75
_PROMPT = 24  # tokens of a prompt
_BYTES, _EDGE = 4, 8  # of a number in memory, and of an edge in a file: its value and where it stands
# Bytes of logits at a time (base/divergence.py) and of a batch's activations, whatever the model.
_LOGITS, _ROWS = 2**28, 8


@dataclass(frozen=True)
class Work:
    """One kind of work in an item: operations, the most working memory, and what it leaves on the disk."""

    what: str
    flops: float | int
    memory: float | int = 0.0
    disk: float | int = 0.0


@dataclass(frozen=True)
class Cost(PlainRecord):
    """The cost of an item: seconds are those of a machine of this speed; memory with the model, in bytes."""

    item: str
    flops: float | int
    seconds: float | int
    memory_bytes: int
    disk_bytes: int
    works: Mapping[str, float]


def cost_of(settings: ItemSettings, shape: Shape | None = None, speed: float | int | None = None) -> Cost:
    """Cost of an item alone. shape: of the host; None = that of the profile's model; speed: operations per second; None =
    measured now."""
    shape = SHAPES[settings["model"]] if shape is None else shape
    speed = product_speed(torch.device("cpu")) if speed is None else speed
    works = list(works_of(settings, shape))
    flops = sum(work.flops for work in works)
    by_kind: dict[str, float] = {}
    for work in works:
        by_kind[work.what] = by_kind.get(work.what, 0.0) + _SLOWER * work.flops / speed
    memory = _BYTES * shape.weights + max(work.memory for work in works)
    return Cost(settings.item, flops, _SLOWER * flops / speed, int(memory), int(sum(work.disk for work in works)), by_kind)


def works_of(settings: ItemSettings, shape: Shape) -> Iterator[Work]:
    """List the work of an item."""
    s, trained = settings["sparsities"], settings.get("trained", [])
    tokens = settings["calibration_tokens"]
    match settings.item:
        case "data-efficiency":
            for count in settings["token_counts"]:
                yield from _solving(settings, shape, settings["site"], s, ("SWD (paper)", "SWD"), count)
            yield from _training(settings, shape, settings["site"], trained)
            of_runs = sum(_checkpoints(spec, settings["checkpoints"]) for spec in trained)
            points = 4 * len(settings["token_counts"]) + of_runs
            yield _fidelity(settings, shape, settings["site"], points)
        case "single-matrix" | "controls" | "mlp":
            methods = len(s) * (len(SOLVERS) + 2) + 1 + len(trained) + settings.get("random_b_seeds", 0)
            ablations = len(settings.get("ablations", ["mean"]))
            yield from _training(settings, shape, settings["site"], trained)
            for site in (settings["site"], *settings.get("further_sites", [])):
                matrices = settings.get("matrices", site)
                yield from _solving(settings, shape, matrices, s, tuple(SOLVERS), tokens)
                n_random = len(s) * (len(SOLVERS) + 2) * settings["random_circuits"]
                yield from _circuits(settings, shape, site, matrices, methods, ablations, n_random)
        case "zero-data":
            yield from _solving(settings, shape, settings["site"], 2 * settings["grid"], (settings["solver"],), tokens)
            yield from _training(settings, shape, settings["site"], trained)
            site, methods = settings["site"], 2 * len(settings["grid"]) + 1 + len(s) + len(trained)
            yield from _circuits(settings, shape, site, site, methods, 1)
        case "full-model":
            yield from _solving(
                settings,
                shape,
                settings["sites"],
                [settings["sparsity"]],
                (settings["solver"],),
                settings["factorization_tokens"],
            )
            yield from _tuning(settings, shape)
            yield from _circuits(settings, shape, "full model", settings["circuit_sites"], 3, 1)
        case "audit" | "edit" | "qk":
            sites = settings.get("sites", settings.get("site"))
            yield from _solving(settings, shape, sites, [settings["sparsity"]], ("SWD",), settings.get("edit_tokens", tokens))
            yield _fidelity(settings, shape, sites, 2)
        case "interactions":
            layer, kind = split_name(settings["interaction_site"])
            below = [f"blocks.{i}.{kind}" for i in range(layer + 1)]
            for sites, units in ((settings["overlap_site"], None), (below, settings["interaction_units"])):
                yield from _solving(settings, shape, sites, [settings["sparsity"]], ("SWD",), tokens, units)
            pairs = settings["top"] ** 2 / 2
            yield Work("interactions", 2 * settings["interaction_tokens"] * pairs * (shape.d_mlp + 2 * shape.d_model))


def _solving(
    settings: ItemSettings,
    shape: Shape,
    sites: str | Sequence[str],
    sparsities: Sequence[float],
    solvers: Sequence[str],
    tokens: int,
    units: int | None = None,
) -> Iterator[Work]:
    """Calibration and factors; matrices of one block are calibrated together."""
    named = shape.sites(sites)
    stages = len({layer for layer, _ in named})
    for label in solvers:
        how = {name: value for name, value in SOLVERS[label].items() if name != "basis"}
        how |= {"outer_iterations": settings["outer_iterations"]} if how.get("preset") == "paper" else {}
        for sparsity in sparsities:
            costs = [solver_cost(*sizes, sparsity=sparsity, units=units, calibrated=tokens > 0, **how) for _, sizes in named]
            yield Work(
                "solving",
                sum(each.flops for each in costs),
                max(each.peak_bytes for each in costs),
                sum(_EDGE * (1 - sparsity) * math.prod(sizes) for _, sizes in named),
            )
    products = sum(2 * tokens * d_in**2 for _, (d_in, _) in named)
    passes = 1 if stages == 1 else len(solvers) * len(sparsities)
    forward = shape.forward(tokens, settings["context"], max(layer for layer, _ in named) + 1)
    yield Work("calibration", passes * (forward + products))


def _training(settings: ItemSettings, shape: Shape, site: str, trained: Sequence[Mapping[str, Any]]) -> Iterator[Work]:
    """Baselines: what a step does per token, and the host's forward, once for all of them; of several penalties each is trained,
    and judged on validation text."""
    layer, kind = split_name(site)
    d_in, d_out = shape.matrix(kind)
    kept = 0
    for spec in trained:
        penalties = len(spec["l1"]) if isinstance(spec.get("l1"), list) else 1
        width, hidden, tokens = spec["width"], spec.get("hidden", 0), spec["n_tokens"]
        width = width if isinstance(width, int) else int(float(width[:-1]) * max(d_in, d_out))  # "4x" of the larger side
        shared = spec.get("importance") == "shared_mlp"
        network = d_in * hidden + hidden * width if shared else width * d_in * hidden
        weights = width * (d_in + d_out) + (network if spec["method"] != "transcoder" else 0)
        inside = 3 * shape.forward(tokens, settings["context"]) if spec["method"] == "vpd_kl" else 0.0
        kept = max(kept, 0 if inside else min(tokens, settings["training_tokens"]))
        moments = 4 * _BYTES * weights + _BYTES * 4096 * (width + (0 if shared else width * hidden))
        on_disk = penalties * _BYTES * weights * _checkpoints(spec)
        yield Work("training", penalties * (6 * tokens * weights + inside), moments, on_disk)
        if penalties > 1:
            yield _fidelity(settings, shape, site, penalties)
    if kept:
        on_disk = _BYTES * kept * (d_in + d_out)
        on_disk = on_disk if on_disk <= MOST_BYTES else 0
        yield Work("activations", shape.forward(kept, settings["context"], layer + 1), on_disk, on_disk)


def _checkpoints(spec: Mapping[str, Any], asked: Sequence[int] = ()) -> int:
    """Count the checkpoints asked for and the last; where none are asked for, steps 1, 2, 4, ... and the last."""
    if asked:
        return len({n for n in asked if n < spec["n_tokens"]}) + 1
    steps = max(1, spec["n_tokens"] // spec.get("tokens_per_step", 4096))
    return steps.bit_length() + (steps & (steps - 1) > 0)


def _tuning(settings: ItemSettings, shape: Shape) -> Iterator[Work]:
    """Fine-tuning on fixed supports (forward and backward of factors and host), and the second host's training."""
    rows = settings["finetune_batch"]
    tokens = settings["finetune_steps"] * rows * settings["context"] or settings["finetune_tokens"]
    edges = (1 - settings["sparsity"]) * shape.layers * shape.block_weights
    activations = _BYTES * rows * settings["context"] * (shape.layers * 16 * shape.d_model + 4 * shape.d_vocab)
    # Before the first step and on the way, a quarter of the held-out text: dense, and replaced at twice the cost.
    judged = (settings["finetune_evaluations"] + 1) * settings["heldout_tokens"] // 4
    # Factors are dense in memory, about as large together as twice the weights.
    yield Work(
        "fine-tuning",
        4 * shape.forward(tokens, settings["context"]) + 3 * shape.forward(judged, settings["context"]),
        6 * _BYTES * shape.weights + activations,
        _EDGE * edges,
    )
    schedule = settings["sparse_pretraining"]
    if schedule:
        tokens = schedule["stop_after"] * schedule["tokens_per_update"]
        yield Work(
            "sparse pretraining",
            3 * shape.forward(tokens, settings["context"]),
            4 * _BYTES * shape.weights,
            _BYTES * shape.weights,
        )


def _fidelity(settings: ItemSettings, shape: Shape, sites: str | Sequence[str], methods: int) -> Work:
    """The dense host once, every replacement from its first replaced layer on."""
    first = min(layer for layer, _ in shape.sites(sites))
    tokens, context = settings["heldout_tokens"], settings["context"]
    dense = shape.forward(tokens, context)
    flops = dense + methods * (dense - shape.forward(tokens, context, first))
    return Work("fidelity", flops, 4 * _LOGITS + _BYTES * _ROWS * context * 12 * shape.d_model)


def _circuits(
    settings: ItemSettings,
    shape: Shape,
    surface: str,
    sites: str | Sequence[str],
    methods: int,
    ablations: int,
    n_random: int = 0,
) -> Iterator[Work]:
    """Measure fidelity of the methods; per task make a pass with gradients over training prompts, two runs per prefix of test
    prompts, and two per random circuit."""
    named = shape.sites(sites)
    yield _fidelity(settings, shape, sites, methods)
    prefixes = len(prefix_grid(sum(min(sizes) for _, sizes in named)))
    for name, (train, test) in settings["tasks"].items():
        if name in settings["judged"].get(surface, settings["tasks"]):
            scores = 3 * shape.forward(train * _PROMPT, _PROMPT)
            runs = 2 * ablations * prefixes * _run(shape, named, test)
            yield Work("circuits", methods * (scores + runs) + shape.forward(test * _PROMPT, _PROMPT))
            if n_random:
                yield Work("random circuits", 2 * n_random * _run(shape, named, test))


def _run(shape: Shape, named: Sequence[tuple[int, tuple[int, int]]], prompts: int) -> float:
    """Count the operations of an intervention: one token of each prompt, from the first replaced layer on."""
    return (1 - min(layer for layer, _ in named) / shape.layers) * shape.forward(prompts, _PROMPT)
