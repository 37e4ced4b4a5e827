"""mount: all sites of a set in training at once inside a frozen host, and the host as it was afterwards.

1. `attach` checks everything that it checks for a user (sites, shapes, whose weights, nothing attached already), and leaves.
2. Every parameter of the host stops asking for gradients; rewriting weights is refused; each site's product goes to a
   `TrainedProjection`.
3. On the way out, also by an exception or Ctrl-C, all of it is undone in reverse order.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from swd_lens.hosts import Host, Undo, host_of, sites_of
from swd_lens.hosts.sites import Site, select_sites
from swd_lens.train.finetune.spec import FinetuneError
from swd_lens.train.finetune.values import Support, Switch, TrainedProjection
from swd_lens.units import as_units, attach, by_site
from swd_lens.units.factors import Factors
from swd_lens.units.projection import UnitHookPoint
from swd_lens.units.watch import watch_block

_WHILE_TRAINING = "while factors are fine-tuned on this host: they stand for the weights that it would rewrite"


class Mounted:
    """A host with factors in training.

    Attributes:
        projections: site name -> projection, in execution order.
        switch: set `.dense` for the dense host.
    """

    def __init__(self, host: Host, sites: list[Site], factors: Mapping[str, Factors]):
        self.host, self.sites, self.factors = host, sites, dict(factors)
        self.switch = Switch()
        self.projections: dict[str, TrainedProjection] = {}

    def supports(self) -> dict[str, Support]:
        """ "blocks.0.mlp_out.read" -> its support, for every factor, in execution order."""
        return {
            f"{name}.{side}": getattr(projection, side)
            for name, projection in self.projections.items()
            for side in ("read", "write")
        }


def checked(model: Any, factors: Any) -> tuple[Host, list[Site], dict[str, Factors]]:
    """The host, the sites in execution order, and each site's Factors.

    Raises:
        FinetuneError: a unit source that is not Factors.
        AttachError, UnknownSiteError, UnitSourceError, UnsupportedHostError: see `swd_lens.attach`.
    """
    host, given = host_of(model), by_site(factors)
    sites = sites_of(host, given)
    named = {
        site.name: given[site.name]
        if site.name in given
        else next(f for n, f in given.items() if select_sites([site], n))
        for site in sites
    }
    units = {site.name: as_units(named[site.name], site) for site in sites}
    made: dict[str, Factors] = {}
    for name, one in units.items():
        if not isinstance(one, Factors):
            raise FinetuneError(
                f"{name} holds {type(named[name]).__name__}, an encode/decode pair: only read and write factors on "
                "a fixed support can be fine-tuned. Leave it out, or train it with its own code"
            )
        if one.edges == 0:
            raise FinetuneError(f"{name} has no nonzero entry, so there is nothing to train; leave it out")
        made[name] = one
    with attach(model, factors):  # not `.detach()`: a Ctrl-C in that would leave them attached
        pass
    return host, sites, made


@contextmanager
def mounted(host: Host, sites: list[Site], factors: Mapping[str, Factors]) -> Iterator[Mounted]:
    """The host in training; see the module's docstring."""
    undo: list[Undo] = []
    try:
        yield _mount(Mounted(host, sites, factors), undo)
    finally:
        try:
            undo_all(undo)
        finally:  # a Ctrl-C may hit the first
            undo_all(undo)


def undo_all(undo: list[Undo]) -> None:
    """Undo from the last on; what is undone leaves the list, so that a second call goes on where a Ctrl-C hit the first."""
    while undo:
        # Popped only when done: undoing twice is harmless.
        undo[-1]()
        undo.pop()


def _mount(here: Mounted, undo: list[Undo]) -> Mounted:
    host = here.host
    host.guard(_WHILE_TRAINING, undo.append)
    asked = [p for p in host.model.parameters() if p.requires_grad]
    undo.append(lambda: _ask(asked, True))
    _ask(asked, False)
    of_layer: dict[int, dict[str, Any]] = {}
    for site in here.sites:
        block = host.model.blocks[site.layer]
        hook = UnitHookPoint(f"{site.name}, in training")
        projection = TrainedProjection(here.factors[site.name], hook, next(block.parameters()), here.switch)
        projection.train(block.training)
        hook.train(block.training)
        host.swap(site, projection, hook, undo.append)
        here.projections[site.name] = projection
        of_layer.setdefault(site.layer, {})[site.name] = projection
    for layer, projections in of_layer.items():
        watch_block(host.model.blocks[layer], projections, undo.append)
    return here


def _ask(parameters: list[Any], gradients: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(gradients)
