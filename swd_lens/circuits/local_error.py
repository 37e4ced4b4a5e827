"""Local errors: what a site's units give on the dense host's own inputs, beside what its matrix gives there.

In a replaced host a site reads what earlier replaced sites have left of its input. Here it reads what the dense host gives it:

    sum_t |h_t (W - A B)|^2 / sum_t |h_t W|^2  =  tr(E^T G E) / tr(W^T G W),  E = W - A B, G = sum_t h_t^T h_t

over the measured tokens, the host's bias in neither. No Gram is kept: each site's input is multiplied when the dense forward
shows it, and forgotten with the site's output. The products of W serve all replacements.

1. Read and write factors: the error is h W - h A B, constants of transported factors included.
2. Encode/decode pairs (`CoderUnits`) give the whole output, bias included: the error is that against the dense output. The
   denominator is the same; that of a whole MLP, which has no matrix, is the dense output with its bias.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.hosts import Host
from swd_lens.hosts.sites import Site, expert_of
from swd_lens.units import Attachment, UnitSet
from swd_lens.units.projection import projection_of


class LocalErrors:
    """Running sums of |error|^2 and |h W|^2 over what dense forwards show. units: by name of the replacement; alone: the
    attachment of the only one, which is mounted already, None: there are several; also: is given (name of the replacement, site,
    errors of the tokens that count) of every forward."""

    def __init__(
        self,
        host: Host,
        units: Mapping[str, UnitSet],
        alone: Attachment | None,
        also: Callable[[str, str, Float[Tensor, "*batch d_out"]], None] | None = None,
    ):
        self._also = also
        self._host, self._units, self._alone = host, units, alone
        self._errors: dict[str, dict[str, Tensor]] = {name: {} for name in units}
        self._norms: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._counted: Tensor | None = None

    @contextmanager
    def added(self, counted: Bool[Tensor, "rows pos"] | None = None) -> Iterator[None]:
        """While open, every forward of the dense host is added, at the positions that count (None: all)."""
        self._counted = counted
        sites = list({site.name: site for of_name in self._units.values() for site in of_name.sites}.values())
        self._inputs.clear()

        def keep_input(site: Site, h: Float[Tensor, "*batch d_in"]) -> None:
            self._inputs[site.name] = h

        with self._host.inputs(sites, keep_input), self._host.outputs(sites, self._add_site):
            yield

    def relmse(self, name: str) -> dict[str, float]:
        """Site -> local relative squared error of this replacement; a site whose input the forward never shows is left out, and
        so is an expert's to which none of these tokens is routed."""
        errors = self._errors[name]
        shown = [site for site in errors if expert_of(site) is None or self._norms[site] > 0]
        return {site: float(errors[site] / self._norms[site]) for site in shown}

    def _add_site(self, site: Site, y: Float[Tensor, "*batch d_out"]) -> None:
        h = self._inputs.pop(site.name, None)
        if h is None:
            return
        weight = None if site.kind == "mlp" else self._host.weight(site).to(h.dtype)
        product = y if weight is None else h @ weight
        _add(self._norms, site.name, that_count(product, self._counted))

        def dense(x: Tensor) -> Tensor:
            """The site's own product of another input; its bias is what y has beside h W."""
            return y if x is h or weight is None else y + (x - h) @ weight

        for name, of_name in self._units.items():
            if site.name in of_name:
                if self._alone:
                    units = self._alone.projection(site.name)
                else:
                    like = next(self._host.model.blocks[site.layer].parameters())
                    units = projection_of(of_name[site.name], site.name, like)[0]
                lost = units.local(h, dense) - (y if units.gives_bias else product)
                lost = that_count(lost, self._counted)
                _add(self._errors[name], site.name, lost)
                if self._also is not None:
                    self._also(name, site.name, lost)


def that_count(value: Float[Tensor, "*batch d"], counted: Bool[Tensor, "rows pos"] | None) -> Float[Tensor, "*counted d"]:
    """The vectors at positions that count, one per token being there; None: as they are."""
    if counted is None:
        return value
    return value.reshape(-1, value.shape[-1])[counted.flatten().to(value.device)]


def _add(sums: dict[str, Tensor], name: str, value: Float[Tensor, "*batch d_out"]) -> None:
    """Add |value|^2, in float64."""
    squared = torch.linalg.vector_norm(value, dtype=torch.float64).square().cpu()
    sums[name] = sums[name] + squared if name in sums else squared
