"""channels_of: an MLP's hidden channels, after the activation, as units: the unit of sparse pretraining (method.md §3).

They stand at mlp_out: z is what it reads, z W_out + b_out what it writes, so that the units compute what the host does, for
every activation and also behind a gate. Their edges are the paper's: nonzeros that a channel reads (of mlp_in, and of mlp_gate
where there is one), nonzeros that it writes, and one more for each bias of its that is not zero.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.base._version import __version__
from swd_lens.hosts import Host, find_sites, host_of
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.train.baselines.fits import bias_of
from swd_lens.units import CoderUnits, described


class Channels(nn.Module):
    """encode is the identity; decode(z) = z W_dec + b_out. The edges are given, see the module's docstring."""

    W_dec: Tensor
    b_out: Tensor
    edges_per_unit: Tensor
    valid_units: Tensor

    def __init__(
        self,
        w_out: Float[Tensor, "unit d_out"],
        b_out: Float[Tensor, " d_out"],
        edges: Int[Tensor, " unit"],
        valid: Bool[Tensor, " unit"],
    ):
        super().__init__()
        for name, t in (("W_dec", w_out), ("b_out", b_out), ("edges_per_unit", edges), ("valid_units", valid)):
            self.register_buffer(name, t.detach().clone())

    def encode(self, x: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        """The channels themselves."""
        return x

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        """z W_dec + b_out."""
        return z @ self.W_dec + self.b_out


def channels_of(model: Any, sites: Pattern = "mlp_out") -> dict[str, CoderUnits]:
    """The MLP channels of a host as units, by default of every layer; for `attach`, `attribute`, `evaluate`, `compare`.

    Args:
        model: a HookedTransformer or TransformerBridge, sparse or not.
        sites: mlp_out sites.

    Returns:
        blocks.{L}.mlp_out -> units; d_mlp of them each.

    Raises:
        ValueError: a site that is no mlp_out.
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`.
    """
    host, found = host_of(model), find_sites(model, sites)
    if other := [site.name for site in found if site.kind != "mlp_out"]:
        raise ValueError(
            f"channels are units of mlp_out, not of {', '.join(other)}; sites='mlp_out' names every layer's"
        )
    return {site.name: _channels(host, site) for site in found}


def _channels(host: Host, site: Site) -> CoderUnits:
    everything = [one for one in host.sites() if one.layer == site.layer and one.kind.startswith("mlp")]
    readers = [one for one in everything if one != site]
    token = torch.zeros(1, 1, dtype=torch.int64)
    written = (host.weight(site) != 0).sum(1)
    read, biased = torch.zeros_like(written), torch.zeros_like(written)
    for one in readers:
        read += (host.weight(one) != 0).sum(0)
        biased += bias_of(host, one, token) != 0
    coder = Channels(host.weight(site), bias_of(host, site, token), read + written + biased, (read > 0) & (written > 0))
    provenance = {
        **described(host, site),
        **{"method": "channels", "site": site.name, "swd_lens": __version__},
        "model": str(host.model.cfg.model_name),
    }
    return CoderUnits(coder, site.d_in, site.d_out, site.d_in, name="channels", provenance=provenance)
