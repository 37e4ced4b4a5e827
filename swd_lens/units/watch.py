"""watch: a site that is attached but did not run in a forward is reported, not ignored (TransformerLens#1688).

1. Before a block runs, its projections' `ran` is set to False; a projection that computes sets it to True.
2. After the block has run, every projection that is still False is named in a `SiteDidNotRunWarning`.

A block that does not run at all (stop_at_layer, start_at_layer) says nothing.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from swd_lens.units.projection import Projection


class SiteDidNotRunWarning(UserWarning):
    """Units are attached at a site, the block ran, and the site's product was computed by something else, or not at all."""


class _Begin:
    # Objects, not closures: a deep copy of the host then watches its own projections.
    def __init__(self, projections: Mapping[str, Projection]):
        self.projections = dict(projections)

    def __call__(self, block: nn.Module, args: Any) -> None:
        for projection in self.projections.values():
            projection.ran = False


class _End(_Begin):
    def __call__(self, block: nn.Module, args: Any, output: Any = None) -> None:
        idle = [name for name, projection in self.projections.items() if not projection.ran]
        if idle:
            warnings.warn(
                f"{', '.join(idle)}: attached, but did not run in this forward; its output was computed without the units, "
                "and hooks on z did not fire. Something replaced the module or goes round it; detach, and attach again",
                SiteDidNotRunWarning,
                stacklevel=2,
            )


def watch_block(
    block: nn.Module, projections: Mapping[str, Projection], register: Callable[[Callable[[], None]], None]
) -> None:
    """Watch the projections of one block, by site name; `register` is given the undo first."""
    begin, end = _Begin(projections), _End(projections)

    def undo() -> None:
        for hooks, ours in ((block._forward_pre_hooks, begin), (block._forward_hooks, end)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]

    register(undo)
    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)
