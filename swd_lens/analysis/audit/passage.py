"""How what a site writes reaches the unembedding: through a norm behind the site, where the host has one, and the final norm.

1. A norm takes means out (LayerNorm), multiplies by its weight and by 1 / scale. Of these only the scale depends on the rest of
   the stream. It is measured at every position of some text, by the norm's own formula on what enters the norm, and held.
2. A `Passage` is linear: the norms' weights, and the mean over positions of the product of both 1 / scale. Times the unembedding
   it is the mean effect on the logits per unit of z, the scales held; on logits before a soft cap, where the host has one.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.base.surroundings import Undo
from swd_lens.hosts import Host, norms_output
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.streams import TokenStream

N_TOKENS = 8_192  # of the text, from its beginning


@dataclass(frozen=True)
class Passage:
    """From a site's output to what the unembedding reads.

    Attributes:
        weights: (d_model,) of each norm on the way, None where it is one (or folded into the next matrix).
        centred: whether these norms take the mean out.
        inverse: mean over positions of 1 / scale, of both norms together.
    """

    weights: tuple[Float[Tensor, " d_model"] | None, ...]
    centred: bool
    inverse: float

    def carry(self, write: Float[Tensor, "some d_model"]) -> Float[Tensor, "some d_model"]:
        """Write vectors as the unembedding reads them."""
        for weight in self.weights:
            write = write - write.mean(1, keepdim=True) if self.centred else write
            write = write if weight is None else write * weight.to(write)
        return write * self.inverse


def beginning_of(stream: TokenStream) -> tuple[Int[Tensor, "rows pos"], Bool[Tensor, "rows pos"] | None]:
    """The first rows of a text, N_TOKENS tokens or one row, and which of their positions count."""
    rows = next(iter(stream.batches(max(1, N_TOKENS // stream.row_length))))
    return rows, stream.counted(rows, 0)


def passages(
    host: Host, sites: Iterable[Site], rows: Int[Tensor, "rows pos"], counted: Bool[Tensor, "rows pos"] | None
) -> dict[str, Passage]:
    """Site -> its passage, of those that write to the residual stream; one forward of the rows.

    Args:
        counted: positions that scales are averaged over; None: all.

    Raises:
        UnsupportedHostError: the host has no next-token logits.
    """
    weight, _ = host.readout()
    writing = [site for site in sites if site.kind in WRITES_RESIDUAL]
    final = getattr(host.model, "ln_final", None) if facts_of(host.model).norm is not None else None
    behind = {site.name: norm for site in writing if (norm := _norm_behind(host, site)) is not None}
    inverse = _inverse_scales(host, [norm for norm in (final, *behind.values()) if norm is not None], rows)
    centred = facts_of(host.model).norm == "layer"
    found = {}
    for site in writing:
        norms = [norm for norm in (behind.get(site.name), final) if norm is not None]
        product = torch.ones(rows.shape)
        for norm in norms:
            product = product * inverse[id(norm)]
        mean = float(product.mean() if counted is None else product[counted].mean())
        of_site = (host.norm_weight(behind[site.name]),) if site.name in behind else ()
        found[site.name] = Passage((*of_site, weight if final is not None else None), centred, mean)
    return found


def _norm_behind(host: Host, site: Site) -> nn.Module | None:
    """The norm between a site's output and the residual stream (Gemma 2 and 3, OLMo 2)."""
    if not norms_output(host, site):
        return None
    own, before = ("ln1_post", "ln1") if site.kind == "attn_o" else ("ln2_post", "ln2")
    block = host.model.blocks[site.layer]
    return block._modules.get(own) or block._modules[before]


def _inverse_scales(
    host: Host, norms: list[nn.Module], rows: Int[Tensor, "rows pos"]
) -> Mapping[int, Float[Tensor, "rows pos"]]:
    """id of a norm -> 1 / scale at every position."""
    facts = facts_of(host.model)
    seen: dict[int, list[Tensor]] = {id(norm): [] for norm in norms}

    def look(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else next(iter(kwargs.values()))).detach().float()
        x = x - x.mean(-1, keepdim=True) if facts.norm == "layer" else x
        seen[id(norm)].append((x.square().mean(-1) + facts.eps).rsqrt().cpu())

    at_once = max(1, 2_048 // rows.shape[1])
    with torch.no_grad(), ExitStack() as stack:
        undo = stack.enter_context(Undo())
        for norm in norms:
            undo.push(norm.register_forward_pre_hook(look, with_kwargs=True).remove)
        for part in rows.split(at_once):
            host.run(part)
    return {key: torch.cat([of_part.reshape(-1, rows.shape[1]) for of_part in parts]) for key, parts in seen.items()}
