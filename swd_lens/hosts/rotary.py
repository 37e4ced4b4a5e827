"""rotary: by which angles a host turns the queries and keys of each position.

1. A HookedTransformer keeps tables of sines and cosines in every attention module.
2. On a bridge only the forward knows which layer turns by which angles: they are read off a run of that many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.hosts import Host, UnsupportedHostError
from swd_lens.hosts.heads import Heads


@dataclass(frozen=True)
class Rotation:
    """Rotary angles of the positions 0 .. n_pos - 1; the first rotary_dim entries of a head are rotated, the others stay.

    Attributes:
        adjacent: pairs are (2i, 2i + 1); else (i, i + rotary_dim / 2).
    """

    cos: Float[Tensor, "pos rotary_dim"]
    sin: Float[Tensor, "pos rotary_dim"]
    adjacent: bool

    def apply(self, x: Float[Tensor, "*any pos d_head"]) -> Float[Tensor, "*any pos d_head"]:
        """x with each position rotated by its angle."""
        n = x.shape[-2]
        return self._turn(x, self.cos[:n], self.sin[:n])

    def at(self, position: int, x: Float[Tensor, "*any d_head"]) -> Float[Tensor, "*any d_head"]:
        """x as if it all stood at one position."""
        return self._turn(x, self.cos[position], self.sin[position])

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if self.adjacent:
            flipped = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            flipped = torch.cat([-second, first], -1)
        return torch.cat([turned * cos + flipped * sin, rest], -1)


def rotations(host: Host, heads: Sequence[Heads], n_pos: int) -> dict[int, Rotation | None]:
    """Layer -> angles of the first n_pos positions, float32 on the layer's device; None where positions do not rotate.

    On a bridge they are read off a forward of n_pos tokens: which layer turns by which angles, only the forward knows.

    Raises:
        ValueError: more positions than the host's context.
        UnsupportedHostError: a bridge whose layer shows no angles.
    """
    if n_pos > int(host.model.cfg.n_ctx):
        raise ValueError(f"{n_pos} positions do not fit the host's context of {host.model.cfg.n_ctx}")
    found: dict[int, Rotation | None] = {one.layer: None for one in heads}
    turning = [one for one in heads if one.positions == "rotary"]
    if not turning:
        return found
    if hasattr(host.model, "adapter"):
        return found | _bridge_rotations(host, turning, n_pos)
    return found | {one.layer: _hooked_rotation(host, one.layer, n_pos) for one in turning}


def _hooked_rotation(host: Host, layer: int, n_pos: int) -> Rotation:
    attn, cfg = host.model.blocks[layer].attn, host.model.cfg
    sin, cos = attn.rotary_sin, attn.rotary_cos
    if n_pos > len(cos):
        # Upstream makes its tables longer when a prompt needs it; here they are made, and left alone.
        sin, cos = attn.calculate_sin_cos_rotary(cfg.rotary_dim, n_pos, base=attn._rotary_base(), dtype=torch.float32)
    return Rotation(cos[:n_pos].float(), sin[:n_pos].float(), bool(cfg.rotary_adjacent_pairs))


def _bridge_rotations(host: Host, heads: Sequence[Heads], n_pos: int) -> dict[int, Rotation | None]:
    found: dict[tuple[int, str], Tensor] = {}

    def reader(layer: int, which: str) -> Any:
        def read(x: Tensor, hook: Any) -> None:
            found[layer, which] = x.detach().float().reshape(-1, x.shape[-2], x.shape[-1])[0]

        return read

    sides = [(one.layer, which) for one in heads for which in ("cos", "sin")]
    hooks = [(f"blocks.{layer}.attn.hook_{which}", reader(layer, which)) for layer, which in sides]
    known = [(name, read) for name, read in hooks if name in host.model.hook_dict]
    with torch.no_grad(), host.model.hooks(fwd_hooks=known):
        host.run_blocks(torch.zeros(1, n_pos, dtype=torch.int64), max(one.layer for one in heads) + 1)
    missing = [layer for layer, which in sides if (layer, which) not in found]
    if missing:
        raise UnsupportedHostError(
            f"blocks.{missing[0]}.attn of this bridge rotates queries and keys but does not show its angles (hook_cos, hook_sin)"
        )
    adjacent = bool(getattr(host.model.cfg, "rotary_adjacent_pairs", False))
    made: dict[int, Rotation | None] = {}
    for one in heads:
        cos, sin = found[one.layer, "cos"], found[one.layer, "sin"]
        made[one.layer] = Rotation(cos, sin, adjacent)
    return made
