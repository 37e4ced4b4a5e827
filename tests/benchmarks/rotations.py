"""Rotations inside attention heads that leave a host's function as it is, and which of them makes its matrices sparse.

1. The value circuit of a head is W_V W_O, its scores are W_Q W_K^T: W_V R with R^T W_O, and W_Q R with W_K R, are the same head
   for every orthogonal R. Grouped heads share the R of their keys and values. Where rotary embeddings turn queries and keys by
   position, R has to commute with them: a rotation within each pair of dimensions that has one frequency.
2. `stacked` puts both matrices of a circuit under each other, a row per coordinate of the residual stream, weighed by what text
   puts there; each matrix of a head has norm 1.
3. `sparsest` turns each head's stack so that its entries are sparse: least sum of absolute values ("L1", projected gradients), or
   largest sum of fourth powers ("L4", fixed point of the polar factor), the best of several seeded starts. `sparsest_pairs` finds
   the best angle of each rotary pair on a grid, `principal` the axes of most energy.
4. `rotated` is a copy of the host with R in its weights. Its units are the package's own, and the rotation costs no edges there.
5. `choice` measures candidates of the rotation on one block, `rotations` the curves of others by where their dimensions lie.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from tests.benchmarks.beyond_parts import (
    LEVELS,
    PROMPTS,
    SPARSITIES,
    TASKS,
    Curves,
    Text,
    at_kl,
    kept,
    mean,
    measured,
    shown,
    solved,
)
from tests.benchmarks.circuit_rows import row_of_task

# Kinds that are measured of a model; the larger one's other matrices would take an hour.
KINDS = {
    "default": {"value": ("attn_v", "attn_o"), "scores": ("attn_q", "attn_k")},
    "smollm2": {"value": ("attn_o",), "scores": ("attn_k",)},
}
CIRCUITS = {"value": ("attn_v", "attn_o"), "scores": ("attn_q", "attn_k")}
STEPS, ANGLES = 300, 180
CHOSEN_ON, CHOSEN = 1, ("L1", (1.0, 1.0), 4)  # objective, shares of the two matrices, starts
CANDIDATES = {
    "value": [(of, shares, 4) for of in ("L1", "L4") for shares in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0))]
    + [("L1", (1.0, 1.0), 1)],
    "scores": [("L1", (1.0, 1.0), 4), ("L4", (1.0, 1.0), 4), ("L1", (1.0, 1.0), 1)],
}
ALL_POSITIONS = ("attn_v", "attn_k")
OWN, TURNED, AXES = "own dimensions", "rotated", "principal axes"


def parameter(model: Any, layer: int, kind: str, of: str = "W") -> Any:
    """The heads of an attention matrix, or their biases; those of grouped keys and values are stored under another name."""
    attn, name = model.blocks[layer].attn, f"{of}_{kind[-1].upper()}"
    return getattr(attn, f"_{name}" if f"_{name}" in attn._parameters else name)


def heads(model: Any, layer: int, circuit: str) -> int:
    """How many rotations a circuit has: one for each head of its keys or values."""
    return min(len(parameter(model, layer, kind)) for kind in CIRCUITS[circuit])


def stacked(
    model: Any, layer: int, circuit: str, gram: Float[Tensor, "d_model d_model"], shares: tuple[float, float] = (1, 1)
) -> Float[Tensor, "head row d_head"]:
    """Both matrices of a circuit by head.

    Args:
        gram: of what the attention reads.
        shares: what either matrix counts.
    """
    n, parts = heads(model, layer, circuit), []
    for kind, share in zip(CIRCUITS[circuit], shares, strict=True):
        weight = parameter(model, layer, kind).detach().double()
        weight = weight.mT if kind == "attn_o" else weight * gram.diagonal().double().sqrt()[:, None]
        part = weight.reshape(n, -1, weight.shape[-1])
        parts.append(share * part / part.flatten(1).norm(dim=1)[:, None, None])
    return torch.cat(parts, 1)


def polar(matrices: Float[Tensor, "head d d"]) -> Float[Tensor, "head d d"]:
    """The nearest orthogonal matrices."""
    left, _, right = torch.linalg.svd(matrices)
    return left @ right


def cost(turned: Float[Tensor, "head row d"], objective: str) -> Float[Tensor, " head"]:
    """Low is sparse."""
    return turned.abs().sum((1, 2)) if objective == "L1" else -turned.pow(4).sum((1, 2))


def sparsest(stack: Float[Tensor, "head row d"], objective: str, starts: int) -> Float[Tensor, "head d d"]:
    """Per head the best of the rotations that `starts` beginnings lead to; the first begins at the given dimensions."""
    size, generator = stack.shape[-1], torch.Generator().manual_seed(0)
    best = torch.eye(size, dtype=stack.dtype).repeat(len(stack), 1, 1)
    for start in range(starts):
        turn = torch.eye(size, dtype=stack.dtype).repeat(len(stack), 1, 1)
        if start:
            turn = polar(torch.randn(turn.shape, generator=generator, dtype=stack.dtype))
        for step in range(STEPS):
            turned = stack @ turn
            if objective == "L4":
                turn = polar(stack.mT @ turned.pow(3))
                continue
            slope = stack.mT @ (turned / (turned.square() + 1e-8).sqrt())  # sqrt: smooth at 0
            turn = polar(turn - 0.2 * 0.98**step * slope / slope.flatten(1).norm(dim=1)[:, None, None] * size**0.5)
        better = cost(stack @ turn, objective) < cost(stack @ best, objective)
        best = torch.where(better[:, None, None], turn, best)
    return best


def sparsest_pairs(stack: Float[Tensor, "head row d"], objective: str) -> Float[Tensor, "head d d"]:
    """Rotations within the pairs (i, i + d / 2) that rotary embeddings turn; exact up to the grid of angles."""
    n, _, size = stack.shape
    first, second = stack[..., : size // 2], stack[..., size // 2 :]
    angles = torch.arange(ANGLES, dtype=stack.dtype) * (torch.pi / 2 / ANGLES)
    costs = []
    for angle in angles:
        pair = torch.stack([first * angle.cos() + second * angle.sin(), second * angle.cos() - first * angle.sin()])
        costs.append((pair.abs() if objective == "L1" else -pair.pow(4)).sum((0, 2)))
    angle = angles[torch.stack(costs).argmin(0)]
    turn, at = torch.zeros(n, size, size, dtype=stack.dtype), torch.arange(size // 2)
    turn[:, at, at] = turn[:, at + size // 2, at + size // 2] = angle.cos()
    turn[:, at + size // 2, at], turn[:, at, at + size // 2] = angle.sin(), -angle.sin()
    return turn


def principal(stack: Float[Tensor, "head row d"]) -> Float[Tensor, "head d d"]:
    """The right singular vectors of each head's stack, largest first: few dimensions hold most, each entry of them is dense."""
    return torch.linalg.eigh(stack.mT @ stack).eigenvectors.flip(-1)


def rotated(model: Any, layer: int, circuit: str, turn: Float[Tensor, "head d d"]) -> Any:
    """A copy of the host with these rotations in one circuit of one block; a copy computes what the host does up to rounding."""
    made = copy.deepcopy(model)
    for kind in CIRCUITS[circuit]:
        weight = parameter(made, layer, kind)
        of_heads = turn.to(weight).repeat_interleave(len(weight) // len(turn), 0)
        with torch.no_grad():
            weight.copy_(of_heads.mT @ weight if kind == "attn_o" else weight @ of_heads)
            if kind != "attn_o":
                bias = parameter(made, layer, kind, "b")
                bias.copy_((bias[:, None] @ of_heads)[:, 0])
    return made


# ---------------------------------------------------------------------------------------------- curves


def turn_of(model: Any, layer: int, circuit: str, gram: Any, how: Sequence[Any]) -> torch.Tensor:
    """The rotations of a circuit's heads that make it sparse; within rotary pairs where queries and keys have them."""
    objective, shares, starts = how
    stack = stacked(model, layer, circuit, gram, tuple(shares))
    if circuit == "scores" and model.cfg.positional_embedding_type == "rotary":
        return sparsest_pairs(stack, objective)
    return sparsest(stack, objective, starts)


def arms(site: Any, where: str, name: str) -> dict[str, dict[str, Any]]:
    """Arm -> options of `swd.solve`, of a host that is rotated or is not."""
    side = "input" if site.kind == "attn_o" else "output"
    made: dict[str, dict[str, Any]] = {"pruned": {"preset": "pruned", "basis": side}}
    if where != AXES or site.kind in CIRCUITS["value"]:
        made |= {"SWD from dimensions": {"basis": side}, "SWD from the short side": {}}
    if where == OWN:
        made |= {"pruned singular vectors": {"preset": "svd_pruned"}}
        made |= {"SWD from inputs": {"basis": "input"}} if side == "output" else {}
    if name != "default":  # a named side takes minutes there
        made = {arm: how for arm, how in made.items() if arm in ("pruned", "SWD from the short side")}
    return made


def curves_of_site(model: Any, site: Any, texts: Any, name: str, where: str, only: Sequence[str] = ()) -> Curves:
    """Arm -> its points, exact ones and one for each sparsity; `only` some arms where it is said."""
    gram = collect_grams(model, [site], texts[0]).by_site[site.name]
    side = "input" if site.kind == "attn_o" else "output"
    sets: dict[tuple[str, float], Any] = {
        (arm, s): {site.name: solved(model, site, gram, s, texts[0].numel(), **how)}
        for arm, how in arms(site, where, name).items()
        for s in SPARSITIES[name]
        if not only or arm in only
    }
    if not only:
        sets[("exact", 0)] = baselines.neurons(model, site.name, side)
    if where == OWN and not only:
        sets[("whitened SVD by head", 0)] = baselines.svd(model, site.name, whitened=True, by_head=True, tokens=texts[0])
        if name == "default":
            sets[("whitened SVD", 0)] = baselines.svd(model, site.name, whitened=True, tokens=texts[0])
    positions = "all" if site.kind in ALL_POSITIONS else "scoring"
    labelled = {f"{arm}|{s}": dict(factors) for (arm, s), factors in sets.items()}
    points = measured(model, labelled, {site.name: gram}, texts, positions)
    circuits = {} if only else task_costs(model, site, labelled, name)
    curves: Curves = {}
    for (arm, s), label in zip(sets, labelled, strict=True):
        curves.setdefault(arm, []).append({"s": s, **points[label], **circuits.get(label, {})})
    return curves


def task_costs(model: Any, site: Any, sets: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Label -> units, edges and recovered share of each task's circuit at recovered .9; of exact units and those of s = .75."""
    tasks = TASKS[name].get(site.name, ())
    prompts = {task: swd.load_task(task, model, n_train=PROMPTS[0], n_test=PROMPTS[1]) for task in tasks}
    wanted = [label for label in sets if label.endswith(("|0", "|0.75"))]
    return {
        label: {
            "circuits": {task: row_of_task(model, of, site, sets[label][site.name])["recovered"] for task, of in prompts.items()}
        }
        for label in wanted
    }


def rotations(text: Text, layer: int, circuit: str, folder: Path) -> dict[str, dict[str, Curves]]:
    """Kind -> where its dimensions lie -> curves, of one block."""

    def at(where: str) -> dict[str, Curves]:
        model, *texts = text()
        if where != OWN:
            gram = _input_gram(model, layer, circuit, texts)
            of_axes = principal(stacked(model, layer, circuit, gram)) if where == AXES else None
            turn = turn_of(model, layer, circuit, gram, CHOSEN) if of_axes is None else of_axes
            model = rotated(model, layer, circuit, turn)
        sites = [swd.find_sites(model, f"blocks.{layer}.{kind}")[0] for kind in KINDS[text.name][circuit]]
        return {site.kind: curves_of_site(model, site, texts, text.name, where) for site in sites}

    rotary = circuit == "scores" and text.name != "default"  # principal axes mix rotary pairs
    places = (OWN, TURNED) if rotary else (OWN, TURNED, AXES)
    by_place = {w: kept(folder / f"{text.name} {circuit} {layer} {w}.json", lambda w=w: at(w)) for w in places}
    return {kind: {w: by_place[w][kind] for w in places} for kind in KINDS[text.name][circuit]}


def _input_gram(model: Any, layer: int, circuit: str, texts: Any) -> torch.Tensor:
    [site] = swd.find_sites(model, f"blocks.{layer}.{CIRCUITS[circuit][0]}")
    return collect_grams(model, [site], texts[0]).by_site[site.name]


def errors(text: Text, layers: Sequence[int]) -> list[dict[str, Any]]:
    """The relMSE alone at s = .75, which is cheap on a larger host: a row for each block and matrix, by where dimensions lie."""
    model, *texts = text()
    sites = [swd.find_sites(model, f"blocks.{x}.{kind}")[0] for x in layers for pair in CIRCUITS.values() for kind in pair]
    grams, rows = collect_grams(model, sites, texts[0]).by_site, []
    for site in sites:
        circuit = "value" if site.kind in CIRCUITS["value"] else "scores"
        of_input = grams[f"blocks.{site.layer}.{CIRCUITS[circuit][0]}"]
        stack = stacked(model, site.layer, circuit, of_input)
        turns = {OWN: torch.eye(stack.shape[-1]).repeat(len(stack), 1, 1)}
        turns[TURNED] = turn_of(model, site.layer, circuit, of_input, CHOSEN)
        if circuit == "value":
            turns[AXES] = principal(stack)
        for where, turn in turns.items():
            sparse = float(cost(stack @ turn.to(stack), "L1").sum() / cost(stack, "L1").sum())
            weight, gram = _turned(host_of(model).weight(site), grams[site.name], site.kind, turn)
            side = "input" if site.kind == "attn_o" else "output"
            row = {"block": site.layer, "kind": site.kind, "where": where, "sparse": sparse}
            for label, how in {"pruned": {"preset": "pruned", "basis": side}, "SWD": {}}.items():
                solution = swd.solve(weight, gram, 0.75, tokens=texts[0].numel(), **how)
                row[label] = swd.Factors(solution.read, solution.write, weight=solution.weight).relmse(gram)
            rows.append(row)
            print(row, flush=True)
    return rows


def exact_circuits(text: Text, place: str, task: str) -> dict[str, Any]:
    """Units, edges and recovered share of a task's circuit of exact head dimensions, by where these lie."""
    model, *texts = text()
    [site] = swd.find_sites(model, place)
    prompts = swd.load_task(task, model, n_train=PROMPTS[0], n_test=PROMPTS[1])
    gram = _input_gram(model, site.layer, "value", texts)
    stack = stacked(model, site.layer, "value", gram)
    turns = {AXES: principal(stack), TURNED: turn_of(model, site.layer, "value", gram, CHOSEN), OWN: None}
    rows = {}
    for where, turn in turns.items():
        host = model if turn is None else rotated(model, site.layer, "value", turn)
        factors = baselines.neurons(host, place, "input")[place]
        rows[where] = row_of_task(host, prompts, site, factors)["recovered"]
        print(where, rows[where], flush=True)
    return rows


def _turned(weight: torch.Tensor, gram: torch.Tensor, kind: str, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and its Gram, as a host with these rotations has them."""
    width = len(weight) if kind == "attn_o" else weight.shape[1]
    of_heads = torch.block_diag(*turn.repeat_interleave(width // (len(turn) * turn.shape[-1]), 0)).to(weight)
    if kind != "attn_o":
        return weight @ of_heads, gram
    return of_heads.T @ weight, of_heads.to(gram).T @ gram @ of_heads.to(gram)


def choice(text: Text, circuit: str, folder: Path) -> list[list[str]]:
    """A row for each candidate of the rotation, by pruned dimensions on the block of choice."""

    def at(how: Sequence[Any] | None) -> Any:
        model, *texts = text()
        gram = _input_gram(model, CHOSEN_ON, circuit, texts)
        stack, made, sparse = stacked(model, CHOSEN_ON, circuit, gram), model, 1.0
        if how is not None:
            turn = turn_of(model, CHOSEN_ON, circuit, gram, how)
            made, sparse = rotated(model, CHOSEN_ON, circuit, turn), cost(stack @ turn, "L1") / cost(stack, "L1")
        sites = [swd.find_sites(made, f"blocks.{CHOSEN_ON}.{kind}")[0] for kind in CIRCUITS[circuit]]
        curves = [curves_of_site(made, site, texts, text.name, TURNED, ["pruned"])["pruned"] for site in sites]
        return {"sparse": float(torch.as_tensor(sparse).mean()), "curves": curves}

    parts = {how: kept(folder / f"choice {circuit} {how}.json", lambda how=how: at(how)) for how in [None, *CANDIDATES[circuit]]}
    rows = []
    for how, part in parts.items():
        levels = [[p["kl"] for p in own if p["s"] in LEVELS[text.name]] for own in parts[None]["curves"]]
        cells = [
            mean([at_kl(curve, kl, key) for curve, kls in zip(part["curves"], levels, strict=True) for kl in kls])
            for key in ("edges", "text")
        ]
        said = ["none", "", ""] if how is None else [how[0], "{:g} : {:g}".format(*how[1]), str(how[2])]
        rows.append([circuit, *said, f"{part['sparse']:.3f}", *map(shown, cells)])
    return rows
