"""What an edge of a unit graph claims, done to the host: nudge one unit and hold everything that the edge holds."""

import json
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.analysis.graph import UnitGraph, unit_graph
from swd_lens.hosts import host_of
from swd_lens.units import attach
from swd_lens.units.factors import Factors

TOKENS = [3, 7, 1, 12, 5]
ALL = ("attn_q", "attn_v", "attn_o", "mlp_in", "mlp_out")
APART = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_in", "mlp_out")
FROZEN = {"prompt": TOKENS, "attention": "frozen", "keep": None}
PROMPTS = ({}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}, {"prompt": TOKENS[:1]})


def random_factors(model: Any, *kinds: str, n_units: int = 5) -> dict[str, Factors]:
    """Factors of every site of these kinds; they stand for no matrix, which no edge asks for."""
    host = host_of(model)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.4

    sites = [site for site in (*host.sites(), *host.alternatives()) if site.kind in kinds]
    return {site.name: Factors(random(site.d_in, n_units), random(n_units, site.d_out)) for site in sites}


def all_units(factors: dict[str, Factors]) -> list[tuple[str, int]]:
    return [(site, unit) for site, f in factors.items() for unit in range(f.n_units)]


def weights_of(graph: Any) -> dict[tuple[str, str], float]:
    """(source, target) -> weight of every edge."""
    return {(row.source, row.target): row.weight for row in graph.edges.itertuples()}


def nudged(
    model: Any,
    factors: dict[str, Factors],
    source: tuple[str, int, int],
    target: str,
    delta: float,
    tokens: list[int] = TOKENS,
    scale_one: bool = False,
) -> torch.Tensor:
    """Change of what `target` shows, per unit of delta, when unit (site, index, position) moves by delta.

    Held at the clean run's values: z of every other attached site, attention patterns, and the norms' scales (or at 1).

    Args:
        target: a site (its z, (pos, unit)), or "logits" (less the mean over the vocabulary, (vocab,)).
    """
    host = host_of(model)
    ids = torch.tensor(tokens)[None]
    held = [name for name in model.hook_dict if name.endswith(("hook_scale", "hook_pattern"))]
    clean: dict[str, torch.Tensor] = {}
    shown: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda value, hook: clean.update({name: value.detach().clone()})

    def hold(name: str) -> Any:
        return lambda value, hook: torch.ones_like(value) if scale_one and "scale" in name else clean[name]

    def move(name: str, index: int, position: int, by: float) -> Any:
        def hook_fn(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z = clean[name].clone()
            z[0, position, index] += by
            return z

        return hook_fn

    def show(name: str) -> Any:
        return lambda z, hook: shown.update({name: z.detach().clone()})

    with torch.no_grad(), attach(model, factors) as attachment:
        names = {site.name: site.hook_name for site in attachment.sites}
        with model.hooks(fwd_hooks=[(name, keep(name)) for name in (*held, *names.values())]):
            host.run(ids)
        changed = []
        for sign in (1, -1):
            hooks = [(name, hold(name)) for name in held]
            for site, name in names.items():
                if site == source[0]:
                    hooks.append((name, move(name, source[1], source[2], sign * delta)))
                elif site == target:
                    hooks.append((name, show(target)))
                else:
                    hooks.append((name, hold(name)))
            with model.hooks(fwd_hooks=hooks):
                logits = host.run(ids)[0, -1]
            changed.append(logits - logits.mean() if target == "logits" else shown[target][0])
    return (changed[0] - changed[1]) / (2 * delta)


def check_edges(model: Any, factors: dict[str, Factors], graph: Any, source: tuple[str, int, int], target: str) -> int:
    """Compare a nudge with all edges from one unit into one site; returns how many there are."""
    site, index, position = source
    change = nudged(model, factors, source, target, 0.05)
    weights = weights_of(graph)
    name = f"{site}/{index}@{position}"
    largest, count = float(change.abs().max()), 0
    for p in range(change.shape[0]):
        for unit in range(change.shape[1]):
            weight = weights.get((name, f"{target}/{unit}@{p}"), 0.0)
            assert abs(weight - float(change[p, unit])) < 2e-3 * max(largest, 1e-2), (name, target, unit, p)
            count += weight != 0.0
    return count


HOSTS = {
    "LN": {},
    "LN folded": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "no norm": {"normalization_type": None},
    "parallel": {"parallel_attn_mlp": True},
    "grouped": {"n_key_value_heads": 1},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 8},
    "gated": {"gated_mlp": True, "act_fn": "silu"},
    "norms behind": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
}


def shown_values(model: Any, factors: Any, graph: Any, hooks: list[Any]) -> torch.Tensor:
    """z of the graph's units and its answers' centred logits, in one run with these hooks."""
    z: dict[str, torch.Tensor] = {}
    with torch.no_grad(), swd.attach(model, factors) as attachment:
        keep = [(s.hook_name, lambda value, hook, name=s.name: z.update({name: value[0].clone()})) for s in attachment.sites]
        with model.hooks(fwd_hooks=[*hooks, *keep]):
            logits = host_of(model).run(torch.tensor([TOKENS]))[0, -1]
    rows = graph.nodes.to_dict("records")
    units = [float(z[row["site"]][row["position"], row["unit"]]) for row in rows if row["kind"] == "unit"]
    return torch.tensor(units + [float(logits[r["token"]] - logits.mean()) for r in rows if r["kind"] == "logit"])


def held_hooks(model: Any, factors: Any) -> list[Any]:
    """Hooks that hold norms' scales, patterns and the activation functions' slopes at the run of the prompt."""
    clean: dict[str, torch.Tensor] = {}
    shown = ("hook_scale", "hook_pattern", "hook_pre", "hook_pre_linear", "hook_post")
    names = [n for n in model.hook_dict if n.endswith(shown)]
    keep = [(n, lambda value, hook, n=n: clean.update({n: value.clone()})) for n in names]
    with torch.no_grad(), swd.attach(model, factors), model.hooks(fwd_hooks=keep):
        host_of(model).run(torch.tensor([TOKENS]))
    now: dict[str, torch.Tensor] = {}

    def linear(value: torch.Tensor, hook: Any) -> torch.Tensor:
        block = hook.name.removesuffix("hook_post")
        pre = clean[f"{block}hook_pre"].requires_grad_(True)
        mlp = model.blocks[int(block.split(".")[1])].mlp
        with torch.enable_grad():
            active = mlp.act_fn(pre)
            (slope,) = torch.autograd.grad(active.sum(), pre)
        linear_part = clean.get(f"{block}hook_pre_linear")
        change = now[f"{block}hook_pre"] - pre.detach()
        if linear_part is None:
            return clean[hook.name] + slope * change
        other = now[f"{block}hook_pre_linear"] - linear_part
        return clean[hook.name] + slope * linear_part * change + active.detach() * other

    hooks: list[Any] = []
    for name in names:
        if name.endswith(("hook_scale", "hook_pattern")):
            hooks.append((name, lambda value, hook: clean[hook.name]))
        elif name.endswith("hook_post"):
            hooks.append((name, linear))
        else:
            hooks.append((name, lambda value, hook: now.update({hook.name: value.clone()})))
    return hooks


def set_hooks(node: str, strength: float, z: float, factors: Any) -> list[Any]:
    unit, _, position = node.partition("@")
    return swd.unit_hooks({unit: ("clamp", strength * z)}, factors, positions=int(position))


def drawn(kinds: tuple[str, ...] = APART, host: str = "LN", *, units: Any = None, **settings: Any) -> tuple[Any, Any, UnitGraph]:
    """One of HOSTS, random factors of these kinds, and a graph of all of their units."""
    from tests.micro import toy_model  # a HookedTransformer, which transformer_lens 4 does not have

    model = toy_model(**HOSTS[host])
    factors = random_factors(model, *kinds)
    return model, factors, unit_graph(model, factors, all_units(factors) if units is None else units, **settings)


def toy_graph(kinds: tuple[str, ...] = ALL, **settings: Any) -> UnitGraph:
    """A graph of the toy model, of all units of random factors of these kinds."""
    return drawn(kinds, **settings)[2]


def exported_json(graph: UnitGraph, folder: Path, **how: Any) -> dict[str, Any]:
    """What `graph.export` wrote."""
    return json.loads(graph.export(folder, **how).path.read_text(encoding="utf-8"))
