"""What QK studies claim, done to the host: units taken out by a hook on the attached model, and every pair added up."""

from typing import Any

import torch

from swd_lens.analysis.qk import QKPair, score_parts
from swd_lens.hosts import host_of
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import Offsets

ROW = [3, 7, 1, 12, 5, 7, 9]


def random_factors(model: Any, packed: bool = True, offsets: bool = False, n_units: int = 9) -> dict[str, Factors]:
    """Factors of what feeds queries and keys; they stand for no matrix, which nothing here asks for."""
    host, generator = host_of(model), torch.Generator().manual_seed(0)
    kinds = {"attn_qkv"} if packed else {"attn_q", "attn_k"}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    factors = {}
    for site in (*host.sites(), *host.alternatives()):
        if site.kind in kinds:
            added = Offsets(random(n_units), random(site.d_out)) if offsets else None
            factors[site.name] = Factors(random(site.d_in, n_units), random(n_units, site.d_out), offsets=added)
    return factors


def intervened(model: Any, factors: dict[str, Factors], pair: QKPair, row: list[int], remove: str) -> torch.Tensor:
    """The head's pattern (dest, src) in the attached host, a hook taking the unit out of q or k; "none" leaves all in."""
    side = "k" if remove == "k" else "q"
    heads, d_head = int(model.cfg.n_heads), _d_head(model, pair.layer)
    key_heads = int(getattr(model.cfg, "n_key_value_heads", None) or heads)
    head = pair.head if side == "q" else pair.head // (heads // key_heads)
    kind = "attn_qkv" if f"blocks.{pair.layer}.attn_qkv" in factors else f"attn_{side}"
    start = head * d_head + (heads * d_head if side == "k" and kind == "attn_qkv" else 0)
    unit = pair.q_unit if side == "q" else pair.k_unit
    write = factors[f"blocks.{pair.layer}.{kind}"].write[unit, start : start + d_head]
    kept = {}

    def take(z: torch.Tensor, hook: Any) -> None:
        kept["z"] = z[..., unit]

    def change(x: torch.Tensor, hook: Any) -> torch.Tensor:
        x = x.clone()
        x[:, :, head] -= kept["z"][..., None] * write
        return x

    def keep(pattern: torch.Tensor, hook: Any) -> None:
        kept["pattern"] = pattern[0, pair.head].clone()

    attn = f"blocks.{pair.layer}.attn"
    hooks = [(f"blocks.{pair.layer}.hook_{kind}_unit", take), (f"{attn}.hook_pattern", keep)]
    if remove != "none":
        hooks.append((f"{attn}.hook_{side}", change))
    with torch.no_grad(), attach(model, factors):
        model.run_with_hooks(torch.tensor([row]), fwd_hooks=hooks)
    return kept["pattern"]


def _d_head(model: Any, layer: int) -> int:
    """Gemma 2's and Qwen3's heads are wider than d_model / n_heads."""
    component = getattr(model.blocks[layer].attn, "original_component", None)
    return int(getattr(component, "head_dim", None) or model.cfg.d_head)


def check_parts(model: Any, factors: dict[str, Factors], row: list[int]) -> None:
    """The parts are the host's scores, to 1e-5 of the largest; all pairs, one by one, are the part called pairs."""
    for layer in range(len(model.blocks)):
        for head in (layer, int(model.cfg.n_heads) - 1):
            parts = score_parts(model, factors, layer, head, row)
            assert parts.error < 1e-5, (layer, head, parts.error)
    n_q, n_k = parts.run.units.q.n_units, parts.run.units.k.n_units  # pyright: ignore[reportPossiblyUnboundVariable]
    every = sum(parts.contribution(a, b) for a in range(n_q) for b in range(n_k))  # pyright: ignore[reportPossiblyUnboundVariable]
    assert torch.allclose(every, parts.pairs, atol=1e-5 * float(parts.pairs.abs().max()))  # pyright: ignore


def snapshot(model: Any) -> dict[str, Any]:
    """What a study must leave as it was."""
    with torch.no_grad():
        logits = model(torch.tensor([ROW]))
    hooks = {name: (len(hook.fwd_hooks), len(hook.bwd_hooks)) for name, hook in model.hook_dict.items()}
    return {"logits": logits, "hooks": hooks, "state": {name: v.clone() for name, v in model.state_dict().items()}}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    states = left["state"], right["state"]
    return (
        torch.equal(left["logits"], right["logits"])
        and left["hooks"] == right["hooks"]
        and list(states[0]) == list(states[1])
        and all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    )
