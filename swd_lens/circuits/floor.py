"""The floor of half precision: how far a lossless replacement is from the dense host, because the host rounds.

A host in bfloat16 or float16 rounds factors, z and outputs, so that even an exact factorization has a KL and a CE difference.
What is not above them says nothing of a method.

1. `lossless` factors each matrix exactly, W = Q R, and keeps Q and R as dense factors.
2. `Floors` says which of them a measurement needs: one for each set of sites that is replaced, none on hosts in float32. They
   run as further replacements, in the same forwards through the same code.
3. What was found is kept for the host, its weights, sites and tokens, and not measured again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.hosts import Host
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.units import UnitSet
from swd_lens.units.factors import Factors
from swd_lens.units.match import matrices_of, weight_fingerprint

FLOOR_BYTES = 2**31  # of the lossless factors of one set of sites, in float32
_HALF = (torch.bfloat16, torch.float16)

# Host's model -> (its state, sites, tokens) -> floor.
_FOUND: WeakKeyDictionary[Any, dict[Any, "Floor"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Floor:
    """Differences of a lossless replacement from the dense host, in nats per prediction."""

    kl: float  # KL(dense || replaced)
    ce_delta: float  # CE(replaced) - CE(dense)
    ce_delta_se: float | None  # its standard error over rows; None of a single row


def lossless(host: Host, sites: list[Site]) -> dict[str, Factors]:
    """Dense factors whose product is W, to float32 rounding; of a whole MLP those of its matrices."""
    exact: dict[str, Factors] = {}
    for site in (matrix for each in sites for matrix in matrices_of(host, each)):
        q, r = torch.linalg.qr(host.weight(site))
        exact[site.name] = Factors(q, r)
    return exact


class Floors:
    """The floors of some replacements (by name) of one host. units: name -> lossless replacement, of those that are not known
    yet; names cannot be those of a caller's replacements. rows: what is measured on."""

    units: dict[str, UnitSet]

    def __init__(self, host: Host, replacements: Mapping[str, UnitSet], rows: Int[Tensor, "rows pos"]):
        self._known: dict[Any, Floor] = _FOUND.setdefault(host.model, {})
        self._keys: dict[str, Any] = {}
        self._of: dict[str, str] = {}
        self.units = {}
        if next(host.model.parameters()).dtype not in _HALF:
            return
        run = (_state(host), hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest(), tuple(rows.shape))
        for name, of_name in replacements.items():
            sites = {site.name: site for each in of_name.sites for site in matrices_of(host, each)}
            own = "\0floor of " + " ".join(sites)
            self._of[name] = own
            n_bytes = sum(4 * min(site.d_in, site.d_out) * (site.d_in + site.d_out) for site in sites.values())
            if own in self._keys or n_bytes > FLOOR_BYTES:
                continue
            self._keys[own] = (run, tuple((each, weight_fingerprint(host, site)) for each, site in sites.items()))
            if self._keys[own] not in self._known:
                self.units[own] = UnitSet.of(host, lossless(host, list(sites.values())))

    def add(self, name: str, floor: Floor) -> None:
        """Keep the floor that was measured of one of `units`."""
        self._known[self._keys[name]] = floor

    def of(self, replacement: str) -> Floor | None:
        """The floor of a replacement; None in float32, and where lossless factors are too large."""
        key = self._keys.get(self._of.get(replacement, ""))
        return self._known.get(key)


def _state(host: Host) -> tuple[Any, ...]:
    """Everything that decides the host's logits but the replaced matrices: its tensors, and how often they were written to."""
    held = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in host.model.parameters()]
    return str(next(host.model.parameters()).dtype), hash(tuple(held)), str(standing_hooks(host.model))
