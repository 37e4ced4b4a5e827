"""How what a site writes reaches the unembedding: through a norm behind the site, where the host has one, and the final norm.

1. A norm takes means out (LayerNorm), multiplies by its weight and by 1 / scale. Of these only the scale depends on the rest of
   the stream. It is measured at every position of some text, by the norm's own formula on what enters the norm, and held.
2. A `Passage` is linear: the norms' weights, and the mean over positions of the product of both 1 / scale. Times the unembedding
   it is the mean effect on the logits per unit of z, the scales held; on logits before a soft cap, where the host has one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.hosts import Host
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import inverse_scale, norms_behind
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site
from swd_lens.tasks.streams import TokenStream

N_TOKENS = 8_192  # of the text, from its beginning
_AT_ONCE = 2_048  # tokens of a forward


@dataclass(frozen=True)
class Passage:
    """From a site's output to what the unembedding reads."""

    # (d_model,) of each norm on the way, None where it is one (or folded into the next matrix)
    weights: tuple[Float[Tensor, " d_model"] | None, ...]
    centred: bool  # whether these norms take the mean out
    inverse: float  # mean over positions of 1 / scale, of both norms together

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
    """Site -> its passage, of those that write to the residual stream; the rows run once, without their logits. counted:
    positions that scales are averaged over; None: all. Raises UnsupportedHostError: the host has no next-token logits."""
    final_weight, _ = host.readout()
    writing = [site for site in sites if site.kind in WRITES_RESIDUAL]
    behind = {site: norm for site in writing if (norm := host.norm_behind(site)) is not None}
    facts, final_parts = facts_of(host.model), []
    parts: dict[str, list[Tensor]] = {site.name: [] for site in behind}
    with torch.no_grad():
        for part in rows.split(max(1, _AT_ONCE // rows.shape[1])):
            with norms_behind(host, list(behind)) as seen:
                stream = host.residual(part, len(host.model.blocks))
            final_parts.append(inverse_scale(facts, stream).cpu())  # 1 where the host has no final norm
            for site, (x, _) in seen.items():
                parts[site].append(inverse_scale(facts, x).cpu().reshape(-1, rows.shape[1]))
    final_inverse, inverse = torch.cat(final_parts), {site: torch.cat(of_site) for site, of_site in parts.items()}
    by_site = {}
    for site in writing:
        both = final_inverse * inverse[site.name] if site in behind else final_inverse
        mean = float(both.mean() if counted is None else both[counted].mean())
        first = [host.norm_affine(behind[site]).scale] if site in behind else []
        by_site[site.name] = Passage((*first, final_weight), facts.norm == "layer", mean)
    return by_site
