"""How what a site writes reaches the unembedding: through a norm behind the site, where the host has one, and the final norm.

1. A norm takes means out (LayerNorm), multiplies by its weight and by 1 / scale. Of these only the scale depends on the rest of
   the stream. It is measured at every position of some text, by the norm's own formula on what enters the norm, and held.
2. A `Passage` is linear: the norms' weights, and the mean over positions of the product of both 1 / scale. Times the unembedding
   it is the mean effect on the logits per unit of z, the scales held; on logits before a soft cap, where the host has one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.base.surroundings import Undo
from swd_lens.hosts import Host, norms_output
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.streams import TokenStream

N_TOKENS = 8_192  # of the text, from its beginning
_AT_ONCE = 2_048  # tokens of a forward


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
    """Site -> its passage, of those that write to the residual stream; the rows run once, without their logits.

    Args:
        counted: positions that scales are averaged over; None: all.

    Raises:
        UnsupportedHostError: the host has no next-token logits.
    """
    final_weight, _ = host.readout()
    writing = [site for site in sites if site.kind in WRITES_RESIDUAL]
    behind = {site.name: norm for site in writing if (norm := _norm_behind(host, site)) is not None}
    final_inverse, inverse = _inverse_scales(host, behind, rows)
    by_site = {}
    for site in writing:
        both = final_inverse * inverse[site.name] if site.name in behind else final_inverse
        mean = float(both.mean() if counted is None else both[counted].mean())
        first = [host.norm_weight(behind[site.name])] if site.name in behind else []
        by_site[site.name] = Passage((*first, final_weight), facts_of(host.model).norm == "layer", mean)
    return by_site


def _norm_behind(host: Host, site: Site) -> nn.Module | None:
    """The norm between a site's output and the residual stream (Gemma 2 and 3, OLMo 2)."""
    if not norms_output(host, site):
        return None
    own, before = ("ln1_post", "ln1") if site.kind == "attn_o" else ("ln2_post", "ln2")
    block = host.model.blocks[site.layer]
    return block._modules.get(own) or block._modules[before]


def _inverse_scales(
    host: Host, behind: Mapping[str, nn.Module], rows: Int[Tensor, "rows pos"]
) -> tuple[Float[Tensor, "rows pos"], dict[str, Float[Tensor, "rows pos"]]]:
    """1 / scale at every position: of the final norm (1 where the host has none), and of each site's norm behind it."""
    facts, n_blocks = facts_of(host.model), len(host.model.blocks)
    seen: dict[str, list[Tensor]] = {site: [] for site in behind}

    def inverse_scale(x: Float[Tensor, "rows pos d_model"]) -> Float[Tensor, "rows pos"]:
        x = x.detach().float()
        x = x - x.mean(-1, keepdim=True) if facts.norm == "layer" else x
        return (x.square().mean(-1) + facts.eps).rsqrt().cpu()

    def reader(site: str) -> Callable[..., None]:
        return lambda _, args, kwargs: seen[site].append(
            inverse_scale(args[0] if args else next(iter(kwargs.values())))
        )

    final = []
    with torch.no_grad(), Undo() as undo:
        for site, norm in behind.items():
            undo.push(norm.register_forward_pre_hook(reader(site), with_kwargs=True).remove)
        for part in rows.split(max(1, _AT_ONCE // rows.shape[1])):
            stream = host.residual(part, n_blocks)
            final.append(torch.ones(part.shape) if facts.norm is None else inverse_scale(stream))
    return torch.cat(final), {
        site: torch.cat([part.reshape(-1, rows.shape[1]) for part in parts]) for site, parts in seen.items()
    }
