"""A frozen host: its parameters ask for no gradients, while gradients are taken by something else."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from swd_lens.base.undo import Undo
from swd_lens.hosts.host import Host


@contextmanager
def frozen(host: Host, reason: str) -> Iterator[Undo]:
    """A host whose parameters ask for no gradients and whose weights are not rewritten; afterwards it is what it was. reason:
    ends the message of a refused rewriting: "fold_layer_norm was called ...". Yields: Undo: for what else is changed about the
    host."""
    # Flags of inference tensors cannot be set back, and no gradient comes to them anyway.
    asking = [p for p in host.model.parameters() if p.requires_grad and not p.is_inference()]
    with Undo() as undo:
        host.guard(reason, undo.push)
        undo.push(lambda: _require_gradients(asking, True))
        _require_gradients(asking, False)
        yield undo


def _require_gradients(parameters: list[nn.Parameter], required: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(required)
