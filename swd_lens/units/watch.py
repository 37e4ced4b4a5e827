"""Watch: whether the matrix and the factors behind an attached site are still those that were attached.

1. Both are marked (base/marks.py) when the site is mounted: the parameters that hold the host's matrix, and read, write and
   offsets of factors. An encode/decode pair is used as it is, and whoever trains it may write to it.
2. `at_forward` is asked before the units compute. It compares versions: in-place operations, `load_state_dict` of a submodule
   and replaced parameters are noticed at the next forward.
3. `at_call` is asked by `host_of`, with which every function of swd_lens begins, and when the units are taken out. It compares
   values, so that what was written through `.data` is noticed, too.
4. A host that was moved to another dtype has other bits: then the fingerprint in the units' provenance says whether its matrix
   is the one that they were made from.
"""

from swd_lens.base.errors import error
from swd_lens.base.marks import Mark
from swd_lens.hosts import Host
from swd_lens.hosts.sites import Site
from swd_lens.hosts.weights import stored_parameters
from swd_lens.units.coder import Units
from swd_lens.units.factors import Factors
from swd_lens.units.match import same_weights


class Watch:
    """Of one attached site. Also in a deep copy of the host, with its own matrix and factors.

    Attributes:
        reported: whether an error has said that something was changed.
    """

    def __init__(self, host: Host, site: Site, units: Units):
        self.site, self.provenance = site, units.provenance
        self.weight = Mark(stored_parameters(host, site))
        self.factors = units.mark if isinstance(units, Factors) else None
        self.reported = False

    def at_forward(self) -> None:
        """Raises AttachError where the matrix or the factors were written to."""
        # In most forwards this line is all that is done.
        if self.weight.written() or (self.factors is not None and self.factors.written()):
            self._require(
                not self.weight.written() or self.weight.recast() or not self.weight.changed(),
                self.factors is None or not self.factors.changed(),
            )

    def at_call(self, host: Host) -> None:
        """Raises AttachError where the matrix or the factors hold other values."""
        if self.weight.recast() and same_weights(host, self.site, self.provenance):
            self.weight.renew()
        self._require(not self.weight.changed(), self.factors is None or not self.factors.changed())

    def _require(self, weight_holds: bool, factors_hold: bool) -> None:
        self.reported = self.reported or not (weight_holds and factors_hold)
        if not weight_holds:
            raise error("weight-edited-while-attached", site=self.site.name)
        if not factors_hold:
            raise error("factors-edited", site=self.site.name)
