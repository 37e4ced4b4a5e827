"""Norms whose scale is held: what is left of them is linear.

1. A `HeldNorm` is a norm of one run: h = (x - mean(x), if centred) * weight * inverse + shift, with inverse = 1 / scale of every
   position. Changes of x go through it forwards, gradients backwards.
2. `norms_behind` watches the norms that stand between sites and the residual stream (Gemma 2 and 3, OLMo 2) while a host runs.
3. `inverse_scale` is the formula of 1 / scale, with the host's own epsilon.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.interrupts import Undo
from swd_lens.hosts.families import Facts, facts_of
from swd_lens.hosts.host import Host
from swd_lens.hosts.sites import Site


@dataclass(frozen=True)
class HeldNorm:
    """A norm with its scale held."""

    centred: bool  # whether the mean over d_model is taken out (LayerNorm does, RMSNorm does not)
    weight: Float[Tensor, " d_model"] | None  # (d_model,) or None where there is none (or it is folded)
    inverse: Float[Tensor, "*_batch _pos"]  # (pos,) 1 / scale of the run's positions; or (batch, pos)

    def pull(self, vectors: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Vectors that are multiplied with h, as vectors that are multiplied with x; without the scale."""
        vectors = vectors if self.weight is None else vectors * self.weight.to(vectors)
        return vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors

    def through(self, vectors: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Changes of x, as changes of h; without the scale."""
        vectors = vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors
        return vectors if self.weight is None else vectors * self.weight.to(vectors)

    def push(self, changes: Float[Tensor, "*n _pos d_model"]) -> Float[Tensor, "*n _pos d_model"]:
        """Changes of x at every position of the run, as changes of h, the scale held."""
        return self.through(changes) * self.inverse[..., None]


def inverse_scale(facts: Facts, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
    """1 / scale of a norm of the host at x, float32; 1 where it has none."""
    x = x.detach().float()
    if facts.norm is None:
        return torch.ones_like(x[..., 0])
    x = x - x.mean(-1, keepdim=True) if facts.norm == "layer" else x
    return (x.square().mean(-1) + facts.eps).rsqrt()


@contextmanager
def norms_behind(host: Host, sites: Iterable[Site]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While open, what the norms behind these sites were given and what they made of it last, by the site's name.

    Sites without such a norm are missing.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            seen[name] = ((args[0] if args else next(iter(kwargs.values()))).detach(), output.detach())

        return keep

    with Undo() as undo:
        for site in sites:
            if (norm := host.norm_behind(site)) is not None:
                undo.push(norm.register_forward_hook(watch(site.name), with_kwargs=True).remove)
        yield seen


def held_behind(host: Host, site: Site, x: Float[Tensor, "*n d_model"]) -> HeldNorm | None:
    """The norm behind a site, held at what it was given."""
    norm = host.norm_behind(site)
    if norm is None:
        return None
    facts = facts_of(host.model)
    return HeldNorm(facts.norm == "layer", host.norm_affine(norm).scale, inverse_scale(facts, x))
