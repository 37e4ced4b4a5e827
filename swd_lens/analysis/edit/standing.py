"""standing: what an edit is while it stands in a host; put in, checked, and restored however often that is asked.

1. `Delta` is dW as a pair.
2. `Overwritten` keeps a copy of W and writes W + dW in its place, in place; restoring copies W back, bit for bit.
3. `AttachedFactors` attaches changed factors instead, and touches no weight.
4. `written` is the first for a moment and unchecked, for measurements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.target import EditError
from swd_lens.hosts import Host
from swd_lens.hosts.sites import Site
from swd_lens.hosts.weights import Stored, stored_matrix
from swd_lens.units import Attachment, attach
from swd_lens.units.attach import require_free
from swd_lens.units.factors import FactorSet, fingerprint


@dataclass(frozen=True, eq=False)
class Delta:
    """A matrix of low rank: read @ write.

    Attributes:
        read: (d_in, rank) float32, on the CPU.
        write: (rank, d_out) float32, on the CPU.
    """

    read: Float[Tensor, "d_in rank"]
    write: Float[Tensor, "rank d_out"]

    @property
    def rank(self) -> int:
        return self.read.shape[1]

    @property
    def norm(self) -> float:
        """||read @ write||_F, from two rank x rank products."""
        read, write = self.read.double(), self.write.double()
        return float(((read.T @ read) * (write @ write.T)).sum().clamp(min=0).sqrt())

    def dense(self) -> Float[Tensor, "d_in d_out"]:
        """read @ write, as one matrix; nothing in here asks for it but `Edit.apply` and `Edit.state_dict`."""
        return self.read @ self.write

    def added_to(self, weight: Float[Tensor, "d_in d_out"]) -> Float[Tensor, "d_in d_out"]:
        """weight + read @ write in float32, where the weight lies."""
        return torch.addmm(weight.float(), self.read.to(weight.device), self.write.to(weight.device))


class Standing:
    """An edit in a host: put in, checked before it is taken out, and restored however often that is asked."""

    host: Host

    def is_in(self, host: Host) -> bool:
        return self.host.model is host.model

    def put_in(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError


class Overwritten(Standing):
    """W' in W's place, and W beside it."""

    def __init__(self, host: Host, site: Site, delta: Delta):
        self.host, self.site, self.delta = host, site, delta
        self.stored: Stored = stored_matrix(host, site)
        self.kept = self.stored.parameter.detach().clone()
        self.before, self.after = fingerprint(self.stored.matrix()), ""

    def put_in(self) -> None:
        self.stored.write(self.delta.added_to(self.stored.matrix()))
        self.after = fingerprint(self.stored.matrix())

    def check(self) -> None:
        require_free(self.host, [self.site])
        if fingerprint(self.stored.matrix()) not in (self.before, self.after):
            raise EditError(
                f"the matrix of {self.site.name} has changed since this edit was applied. If another edit came on top, undo "
                "that one first (edits come off in reverse order); leaving a with block restores W whatever happened"
            )

    def restore(self) -> None:
        self.stored.restore(self.kept)


class AttachedFactors(Standing):
    """The changed factors, attached."""

    def __init__(self, host: Host, factors: FactorSet):
        self.host, self.factors = host, factors
        self.attachment: Attachment | None = None

    def put_in(self) -> None:
        self.attachment = attach(self.host.model, self.factors)

    def check(self) -> None:
        """Detaching needs no other check than its own."""

    def restore(self) -> None:
        if self.attachment is not None and self.attachment.attached:
            self.attachment.detach()


@contextmanager
def written(host: Host, site: Site, delta: Delta) -> Iterator[None]:
    """W + delta for a moment, unchecked: for measurements that have checked once. Restored bit for bit."""
    stored = stored_matrix(host, site)
    kept = stored.parameter.detach().clone()
    try:
        stored.write(delta.added_to(stored.matrix()))
        yield
    finally:
        try:
            stored.restore(kept)
        finally:  # a Ctrl-C may hit the first
            stored.restore(kept)
